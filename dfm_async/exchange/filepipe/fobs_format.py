"""The outer form of FOBS messages, and arrays in them.

A message is a body, and behind it the large values that the body refers to. Every section begins with a marker, since
NVFLARE 2.7 a kind, and a size; those of large values go on with an id.

Arrays are the bytes that ``numpy.save`` writes, read without trust: ``numpy.load`` evaluates the header and reserves
the memory that the header asks for. Here the header must look exactly as ``numpy.save`` writes it, and must fit the
number of bytes that follow.
"""

from __future__ import annotations

import enum
import io
import math
import re
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from dfm_async.errors import FobsError

Buffer: TypeAlias = bytes | bytearray | memoryview

_BODY: Final = 100
_TEXT: Final = 101
_BYTES: Final = 102
_FILE: Final = 103
_ID_SIZE: Final = 16


class Dialect(enum.Enum):
    """Which versions of NVFLARE a message is for. All are read; what is written must fit the peer.

    Attributes:
        V2_5: for 2.5.
        V2_6: for 2.6. Most messages are the same as for 2.5.
        V2_7: for 2.7 and 2.8.
    """

    V2_5 = "2.5"
    V2_6 = "2.6"
    V2_7 = "2.7"


_HEADER: Final = struct.Struct(">BBQ")
_OLD_HEADER: Final = struct.Struct(">BQ")


@dataclass(frozen=True, slots=True)
class Datum:
    """A large value that has a section of its own.

    Attributes:
        id: what the body calls it.
        is_text: whether it is text, in UTF-8, or bytes.
        pieces: its content.
    """

    id: uuid.UUID
    is_text: bool
    pieces: Sequence[Buffer]


def join_sections(body: bytes, datums: Sequence[Datum]) -> list[Buffer]:
    """Put a message for NVFLARE 2.7 and later together."""
    buffers: list[Buffer] = [_HEADER.pack(_BODY, 0, len(body)), body]
    for datum in datums:
        size = _ID_SIZE + sum(len(piece) for piece in datum.pieces)
        buffers.append(_HEADER.pack(_TEXT if datum.is_text else _BYTES, 0, size) + datum.id.bytes)
        buffers += datum.pieces
    return buffers


def join_old_section(body: bytes) -> list[Buffer]:
    """Put a message for NVFLARE 2.5 and 2.6 together. They do not agree on how a body refers to large values."""
    return [_OLD_HEADER.pack(_BODY, len(body)), body]


def split_sections(message: memoryview) -> tuple[Dialect, memoryview, list[Datum]]:
    """Take a message of any version apart. Nothing is copied. Of 2.5 and 2.6, which look the same, it names 2.6.

    Raises:
        FobsError: it is cut off, has something behind its end, or a section that only NVFLARE can read.
    """
    try:
        return Dialect.V2_7, *_split(message, _HEADER)
    except _Misfit as misfit:
        try:
            return Dialect.V2_6, *_split(message, _OLD_HEADER)
        except _Misfit:
            raise FobsError(str(misfit)) from None


class _Misfit(Exception):
    """The sections do not fill the message in this dialect."""


def _split(message: memoryview, header: struct.Struct) -> tuple[memoryview, list[Datum]]:
    body: memoryview | None = None
    found: list[tuple[int, int, memoryview]] = []
    position = 0
    while body is None or position < len(message):
        if len(message) - position < header.size:
            raise _Misfit("it is cut off in the header of a section")
        marker, *kind, size = header.unpack_from(message, position)
        position += header.size
        content = message[position : position + size]
        position += size
        if len(content) < size:
            raise _Misfit("it is cut off in a section")
        if body is None:
            if marker != _BODY or any(kind):
                raise _Misfit("it does not begin with a body")
            body = content
        elif marker not in (_TEXT, _BYTES, _FILE) or size < _ID_SIZE:
            raise _Misfit("it has an invalid section")
        else:
            found.append((marker, kind[0] if kind else 0, content))
    return body, [_datum(*section) for section in found]


def _datum(marker: int, kind: int, content: memoryview) -> Datum:
    if marker == _FILE:
        raise FobsError("it contains a file")
    if kind:
        raise FobsError(f"it refers to something of kind {kind} that must be fetched over NVFLARE's network")
    return Datum(uuid.UUID(bytes=bytes(content[:_ID_SIZE])), marker == _TEXT, [content[_ID_SIZE:]])


# arrays

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NPY_MAGIC: Final = b"\x93NUMPY"
_NPY_LENGTHS: Final = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
"""How many bytes tell the length of the header, by the version of the format."""
_NPY_LONGEST: Final = 10_000
"""Real headers have 118 bytes; a longer shape needs some more."""
_NPY_KINDS: Final = "biufcSUVMm"
"""Numbers, bytes, text and times: what has no objects and no fields."""
_NPY_HEADER: Final = re.compile(
    rb"\{'descr': '([<>|][biufcSUVMm][0-9]{1,9}(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)', "
    rb"'fortran_order': (True|False), 'shape': \(((?:[0-9]{1,19}, )*(?:[0-9]{1,19},?)?)\), \} *\n"
)


def array_buffers(array: Array) -> list[bytes | memoryview]:
    """Return the header and the content of an array; the content is not copied if it is contiguous.

    Raises:
        FobsError: its elements are objects, or have fields.
    """
    dtype = array.dtype
    if dtype.kind not in _NPY_KINDS or dtype.fields is not None or dtype.itemsize == 0:
        raise FobsError(f"arrays with elements of type {dtype} cannot be sent", "numpy.ndarray")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy(order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    flat = array.reshape(-1, order="C" if array.flags.c_contiguous else "F")
    return [header.getvalue(), flat.view(np.uint8).data]


def load_array(data: bytes | memoryview) -> Array:
    """Make an array of its own from what ``numpy.save`` has written.

    Raises:
        FobsError: it is not what ``numpy.save`` writes for such arrays.
    """
    view = memoryview(data)
    head = bytes(view[:8])
    length_size = _NPY_LENGTHS.get(head[6:])
    if head[:6] != _NPY_MAGIC or length_size is None:
        raise _bad_array("it does not begin as it must")
    begin = 8 + length_size
    end = begin + int.from_bytes(view[8:begin], "little")
    if end > begin + _NPY_LONGEST or end > len(view):
        raise _bad_array("its header is too long")
    found = _NPY_HEADER.fullmatch(bytes(view[begin:end]))
    if found is None:
        raise _bad_array("its header is not one of a plain array")
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", found[3]))
    try:
        dtype = np.dtype(found[1].decode())
        if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(view) - end:
            raise _bad_array("its content is not as long as its header says")
        # A copy: the array may be changed, and does not keep the whole message alive.
        order: Any = "F" if found[2] == b"True" else "C"
        return np.ndarray(shape, dtype, view[end:], order=order).copy(order="K")
    except (TypeError, ValueError) as error:  # sizes and units that do not exist
        raise _bad_array("its header is invalid") from error


def _bad_array(reason: str) -> FobsError:
    return FobsError(reason, "numpy.ndarray")
