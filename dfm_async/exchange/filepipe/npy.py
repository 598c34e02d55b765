"""Arrays as the bytes that ``numpy.save`` writes, and back, without trust in what they say.

``numpy.load`` evaluates the header and reserves the memory that the header asks for. Here the header must look exactly
as ``numpy.save`` writes it, and must fit the number of bytes that follow.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any, Final, TypeAlias

import numpy as np

from dfm_async.errors import FobsError

__all__ = ["Array", "array_buffers", "load_array"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_MAGIC: Final = b"\x93NUMPY"
_LENGTHS: Final = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
"""How many bytes tell the length of the header, by the version of the format."""
_LONGEST: Final = 10_000
"""Real headers have 118 bytes; a longer shape needs some more."""
_KINDS: Final = "biufcSUVMm"
"""Numbers, bytes, text and times: what has no objects and no fields."""
_HEADER: Final = re.compile(
    rb"\{'descr': '([<>|][biufcSUVMm][0-9]{1,9}(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)', "
    rb"'fortran_order': (True|False), 'shape': \(((?:[0-9]{1,19}, )*(?:[0-9]{1,19},?)?)\), \} *\n"
)


def array_buffers(array: Array) -> list[bytes | memoryview]:
    """Gives the header and the content of an array; the content is not copied if it lies in one piece.

    Raises:
        FobsError: its elements are objects, or have fields.
    """
    dtype = array.dtype
    if dtype.kind not in _KINDS or dtype.fields is not None or dtype.itemsize == 0:
        raise FobsError(f"arrays with elements of type {dtype} cannot be sent", "numpy.ndarray")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy(order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    flat = array.reshape(-1, order="C" if array.flags.c_contiguous else "F")
    return [header.getvalue(), flat.view(np.uint8).data]


def load_array(data: bytes | memoryview) -> Array:
    """Makes an array of its own from what ``numpy.save`` has written.

    Raises:
        FobsError: it is not what ``numpy.save`` writes for such arrays.
    """
    view = memoryview(data)
    head = bytes(view[:8])
    length_size = _LENGTHS.get(head[6:])
    if head[:6] != _MAGIC or length_size is None:
        raise _bad("it does not begin as it must")
    begin = 8 + length_size
    end = begin + int.from_bytes(view[8:begin], "little")
    if end > begin + _LONGEST or end > len(view):
        raise _bad("its header is too long")
    found = _HEADER.fullmatch(bytes(view[begin:end]))
    if found is None:
        raise _bad("its header is not one of a plain array")
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", found[3]))
    try:
        dtype = np.dtype(found[1].decode())
        if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(view) - end:
            raise _bad("its content is not as long as its header says")
        # A copy: the array may be changed, and does not keep the whole message alive.
        order: Any = "F" if found[2] == b"True" else "C"
        return np.ndarray(shape, dtype, view[end:], order=order).copy(order="K")
    except (TypeError, ValueError) as error:  # sizes and units that do not exist
        raise _bad("its header makes no sense") from error


def _bad(reason: str) -> FobsError:
    return FobsError(reason, "numpy.ndarray")
