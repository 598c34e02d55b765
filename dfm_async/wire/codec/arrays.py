"""Arrays and scalars of numpy, and buffers in shared memory. Arrays and views arrive read-only, over any transport."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from msgspec.msgpack import Ext

from dfm_async.wire.codec.codec_engine import BYTES_BLOCK, CodecEngine, Kind
from dfm_async.wire.codec.pickling import pack_pickle
from dfm_async.wire.memory import LARGE

_BYTEARRAY: Final = 17
_NDARRAY: Final = 21
_NUMPY_SCALAR: Final = 22
_BYTEARRAY_BLOCK: Final = 27
_NDARRAY_BLOCK: Final = 28
_VIEW: Final = 31
_VIEW_BLOCK: Final = 32
_OBJECTS: Final = 33


@dataclass(frozen=True, slots=True)
class DeferredBytes:
    """Bytes that are written right where they are sent from, without a copy in between; arrive as a memoryview.

    Attributes:
        size: their number.
        write: writes them to memory of this size.
    """

    size: int
    write: Callable[[memoryview], object]


def _is_array(_engine: CodecEngine, kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "numpy" and kind is sys.modules["numpy"].ndarray


def _is_scalar(_engine: CodecEngine, kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "numpy" and issubclass(kind, sys.modules["numpy"].generic)


def _pack_array(engine: CodecEngine, value: Any) -> Ext:
    numpy = sys.modules["numpy"]
    if value.dtype.hasobject:
        return _pack_objects(engine, value) if value.dtype == object else pack_pickle(engine, value)
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


def _unpack_array(engine: CodecEngine, data: memoryview) -> Any:
    description, shape, order, content = engine.decode_list(data)
    return _array(description, shape, order, bytearray(content) if engine.mode.writable else content)


def _unpack_array_block(engine: CodecEngine, data: memoryview) -> Any:
    description, shape, order, offset, size = engine.decode_list(data)
    return _array(description, shape, order, engine.part(offset, size))


def _array(description: Any, shape: Any, order: Any, content: Any) -> Any:
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(description)
    return numpy.frombuffer(content, dtype=dtype).reshape(shape, order=order)


def _pack_objects(engine: CodecEngine, value: Any) -> Ext:
    return Ext(_OBJECTS, engine.dumps([list(value.shape), engine.pack_part(value.ravel().tolist())]))


def _objects(value: Any) -> list[tuple[str, Any]]:
    """Return the objects in an array, each with the step that leads to it."""
    numpy = sys.modules["numpy"]
    places = numpy.ndindex(value.shape) if value.dtype == object else ()
    return [(str(list(place)), value[place]) for place in places]


def _unpack_objects(engine: CodecEngine, data: memoryview) -> Any:
    import numpy

    shape, items = engine.decode_list(data)
    engine.check_whole(items)
    if type(items) is not list:
        raise ValueError("this is not the state of an array of objects")
    array = numpy.fromiter(items, dtype=object, count=len(items)).reshape(shape)
    array.flags.writeable = engine.mode.writable
    return array


def _pack_scalar(engine: CodecEngine, value: Any) -> Ext:
    if value.dtype.hasobject:
        return pack_pickle(engine, value)
    description = sys.modules["numpy"].lib.format.dtype_to_descr(value.dtype)
    return Ext(_NUMPY_SCALAR, engine.dumps([engine.pack_part(description), value.tobytes()]))


def _unpack_scalar(engine: CodecEngine, data: memoryview) -> Any:
    import numpy

    description, content = engine.decode_list(data)
    dtype = numpy.lib.format.descr_to_dtype(description)
    # An empty string has no bytes that it could be read from.
    return numpy.frombuffer(content, dtype=dtype)[0] if dtype.itemsize else dtype.type()


def _pack_bytearray(engine: CodecEngine, value: bytearray) -> Ext:
    block = engine.store(value)
    if block is None:
        return Ext(_BYTEARRAY, bytes(value))
    return Ext(_BYTEARRAY_BLOCK, engine.dumps([block.offset, block.size]))


def _pack_view(engine: CodecEngine, value: memoryview) -> Ext:
    if value.format != "B" or value.ndim != 1 or not value.contiguous:
        raise TypeError('only a contiguous memoryview of bytes can be sent; call its cast("B") first')
    block = engine.store(value)
    return Ext(_VIEW, bytes(value)) if block is None else _view_block(engine, block.offset, block.size)


def _pack_deferred(engine: CodecEngine, value: DeferredBytes) -> Ext:
    block = engine.reserve(value.size)
    if block is not None:
        value.write(block.buffer)
        return _view_block(engine, block.offset, block.size)
    content = bytearray(value.size)
    value.write(memoryview(content))
    return Ext(_VIEW, content)


def _view_block(engine: CodecEngine, offset: int, size: int) -> Ext:
    return Ext(_VIEW_BLOCK, engine.dumps([offset, size]))


def _unpack_view(engine: CodecEngine, data: memoryview) -> memoryview:
    # A copy: it is aligned, as readers of its contents expect, and does not keep the whole message.
    return memoryview(bytearray(data) if engine.mode.writable else bytes(data))


ARRAY_KINDS: Final = (
    Kind(code=_NDARRAY, matches=_is_array, pack=_pack_array, unpack=_unpack_array, parts=_objects),
    Kind(code=_NDARRAY_BLOCK, unpack=_unpack_array_block),
    Kind(code=_OBJECTS, unpack=_unpack_objects),
    Kind(code=_VIEW, of=memoryview, pack=_pack_view, unpack=_unpack_view),
    Kind(code=_VIEW, of=DeferredBytes, pack=_pack_deferred, unpack=_unpack_view),
    Kind(code=_VIEW_BLOCK, unpack=lambda engine, data: engine.part(*engine.decode_list(data))),
    Kind(code=_NUMPY_SCALAR, matches=_is_scalar, pack=_pack_scalar, unpack=_unpack_scalar),
    Kind(code=_BYTEARRAY, of=bytearray, pack=_pack_bytearray, unpack=lambda _engine, data: bytearray(data)),
    Kind(code=_BYTEARRAY_BLOCK, unpack=lambda engine, data: bytearray(engine.part(*engine.decode_list(data)))),
    Kind(code=BYTES_BLOCK, unpack=lambda engine, data: bytes(engine.part(*engine.decode_list(data)))),
)
