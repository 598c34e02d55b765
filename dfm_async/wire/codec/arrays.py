"""Arrays and scalars of numpy, and buffers in shared memory. Arrays arrive read-only, over any transport."""

from __future__ import annotations

import sys
from typing import Any, Final

from msgspec.msgpack import Ext

from dfm_async.wire.codec.engine import BYTES_BLOCK, Engine, Kind
from dfm_async.wire.codec.pickling import pack_pickle
from dfm_async.wire.memory import LARGE

_BYTEARRAY: Final = 17
_NDARRAY: Final = 21
_NUMPY_SCALAR: Final = 22
_BYTEARRAY_BLOCK: Final = 27
_NDARRAY_BLOCK: Final = 28


def _is_array(_engine: Engine, kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "numpy" and kind is sys.modules["numpy"].ndarray


def _is_scalar(_engine: Engine, kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "numpy" and issubclass(kind, sys.modules["numpy"].generic)


def _pack_array(engine: Engine, value: Any) -> Ext:
    numpy = sys.modules["numpy"]
    if value.dtype.hasobject:
        return pack_pickle(engine, value)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    description = numpy.lib.format.dtype_to_descr(value.dtype)
    head = [engine.pack_part(description), list(value.shape), order]
    contiguous = value.flags.c_contiguous or value.flags.f_contiguous
    block = None
    if contiguous and value.nbytes >= LARGE:
        block = engine.adopt(memoryview(value.ravel(order="K").view(numpy.uint8)))
    if block is None:
        block = engine.reserve(value.nbytes)
        if block is None:
            return Ext(_NDARRAY, engine.dumps([*head, value.tobytes(order)]))
        stored = numpy.frombuffer(block.buffer, dtype=numpy.uint8)
        if contiguous:  # the padding between the fields of a record as well
            numpy.copyto(stored, value.ravel(order="K").view(numpy.uint8))
        else:
            numpy.copyto(stored.view(value.dtype).reshape(value.shape, order=order), value)
    return Ext(_NDARRAY_BLOCK, engine.dumps([*head, block.offset, block.size]))


def _unpack_array(engine: Engine, data: memoryview) -> Any:
    description, shape, order, content = engine.decode_list(data)
    return _array(description, shape, order, bytearray(content) if engine.mode.writable else content)


def _unpack_array_block(engine: Engine, data: memoryview) -> Any:
    description, shape, order, offset, size = engine.decode_list(data)
    return _array(description, shape, order, engine.part(offset, size))


def _array(description: Any, shape: Any, order: Any, content: Any) -> Any:
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(description)
    return numpy.frombuffer(content, dtype=dtype).reshape(shape, order=order)


def _pack_scalar(engine: Engine, value: Any) -> Ext:
    if value.dtype.hasobject:
        return pack_pickle(engine, value)
    description = sys.modules["numpy"].lib.format.dtype_to_descr(value.dtype)
    return Ext(_NUMPY_SCALAR, engine.dumps([engine.pack_part(description), value.tobytes()]))


def _unpack_scalar(engine: Engine, data: memoryview) -> Any:
    import numpy

    description, content = engine.decode_list(data)
    dtype = numpy.lib.format.descr_to_dtype(description)
    # An empty string has no bytes that it could be read from.
    return numpy.frombuffer(content, dtype=dtype)[0] if dtype.itemsize else dtype.type()


def _pack_bytearray(engine: Engine, value: bytearray) -> Ext:
    block = engine.store(value)
    if block is None:
        return Ext(_BYTEARRAY, bytes(value))
    return Ext(_BYTEARRAY_BLOCK, engine.dumps([block.offset, block.size]))


ARRAY_KINDS: Final = (
    Kind(code=_NDARRAY, matches=_is_array, pack=_pack_array, unpack=_unpack_array),
    Kind(code=_NDARRAY_BLOCK, unpack=_unpack_array_block),
    Kind(code=_NUMPY_SCALAR, matches=_is_scalar, pack=_pack_scalar, unpack=_unpack_scalar),
    Kind(code=_BYTEARRAY, of=bytearray, pack=_pack_bytearray, unpack=lambda _engine, data: bytearray(data)),
    Kind(code=_BYTEARRAY_BLOCK, unpack=lambda engine, data: bytearray(engine.part(*engine.decode_list(data)))),
    Kind(code=BYTES_BLOCK, unpack=lambda engine, data: bytes(engine.part(*engine.decode_list(data)))),
)
