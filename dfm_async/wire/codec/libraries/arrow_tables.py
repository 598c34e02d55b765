"""Tables and arrays of Arrow, as IPC streams: written once, right to where they are sent from, and read in place.

What is read may be untrusted. Extension types are not accepted, because building one runs code of those who registered
it; compressed data is not accepted, because its size is known only after it was expanded. Everything else is validated.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from dfm_async.wire.codec.arrays import DeferredBytes
from dfm_async.wire.codec.kinds import ZONE_NAME
from dfm_async.wire.codec.registry import NamedCodec, Unsupported, register_ours

_OPTIONS: Final = pyarrow.ipc.IpcWriteOptions(compression=None)
_EXTENSION: Final = b"ARROW:extension"
_HOLLOW: Final = 1 << 20
_HOLLOW_PER_BYTE: Final = 64
"""The number of elements that a stream may have that take no bytes, such as nulls: a number, or by its size."""
_OVERLAP: Final = 256
"""How often the lists of a column may refer to the same element, on average."""
_SHOWN: Final = 1 << 22
_ELEMENT: Final = 64
"""The bytes that are shown of a table, and those that an element counts for beside its text."""
_OFFSET: Final = re.compile(r"[+-]\d\d:\d\d")
_INLINE: Final = 12
"""The number of bytes that the view of a text can hold itself."""
_DICTIONARY: Final = 2
_BATCH: Final = 3
"""The types of messages in the format."""


def encode_stream(table: Any) -> DeferredBytes:
    """Return a table, or a batch, as an IPC stream.

    Raises:
        Unsupported: it has extension types, or very many values that take no bytes.
    """
    for field in table.schema:
        if _has_extension(field.type):
            raise Unsupported(f"the column {field.name!r} has the extension type {field.type}; cast it to its storage")
    if _EXTENSION in table.schema.serialize().to_pybytes():
        raise Unsupported(f"the schema has metadata named {_EXTENSION.decode()}; remove it")
    measured = pa.MockOutputStream()
    _write(measured, table)
    try:
        _check_lengths(table, measured.size())
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return DeferredBytes(measured.size(), lambda view: _write(pa.FixedSizeBufferWriter(pa.py_buffer(view)), table))


def _write(sink: Any, table: Any) -> None:
    with pyarrow.ipc.new_stream(sink, table.schema, options=_OPTIONS) as writer:
        writer.write(table)


class _BufferFile:
    """A file that keeps the buffers that are written to it."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def write(self, data: Any) -> int:
        self.parts.append(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def stream_parts(table: Any) -> list[Any]:
    """Return a table as the buffers of an IPC stream: those of its columns, as far as they need no copy."""
    sink = _BufferFile()
    _write(sink, table)
    return sink.parts


def decode_stream(data: Any) -> Any:
    """Read a table from an IPC stream. Its memory is that of the stream.

    Raises:
        ValueError: this is not a stream, or one that is not accepted.
    """
    if not isinstance(data, memoryview):
        raise TypeError("a stream was expected")
    buffer = pa.py_buffer(data)
    _check_messages(buffer)
    with pyarrow.ipc.open_stream(buffer) as reader:
        table = reader.read_all()
    table.validate(full=True)
    for field in table.schema:
        for kind in types_in(field.type):
            _check_zone(kind)
    for array in _arrays(table):
        _check_views(array)
    _check_lengths(table, len(data))
    return table


def _has_extension(kind: Any) -> bool:
    return any(isinstance(found, pa.BaseExtensionType) for found in types_in(kind))


def types_in(kind: Any) -> Iterator[Any]:
    """Return a type and the types that it is made of."""
    yield kind
    if pa.types.is_dictionary(kind):
        yield from types_in(kind.value_type)
    elif not isinstance(kind, pa.BaseExtensionType):
        for index in range(kind.num_fields):
            yield from types_in(kind.field(index).type)


def _check_zone(kind: Any) -> None:
    zone = kind.tz if pa.types.is_timestamp(kind) else None
    if zone is not None and not (ZONE_NAME.fullmatch(zone) or _OFFSET.fullmatch(zone)):
        raise ValueError(f"{zone!r} is not the name of a time zone")


# What is checked before pyarrow reads a stream: the headers of its messages, which are tables of FlatBuffers.


def _check_messages(buffer: Any) -> None:
    reader = pyarrow.ipc.MessageReader.open_stream(buffer)
    for message in reader:
        header = message.metadata.to_pybytes()
        if message.metadata_version != pyarrow.ipc.MetadataVersion.V5:  # V4 can mark compressed data in other places
            raise ValueError("a message of an Arrow stream has another version than V5")
        if message.type == "schema" and _EXTENSION in header:
            raise ValueError("extension types of Arrow are not accepted")
        if message.type in ("record batch", "dictionary") and _compressed(header):
            raise ValueError("compressed data of Arrow is not accepted")


def _compressed(header: bytes) -> bool:
    try:
        message = _u32(header, 0)
        kind_at, batch_at = _field(header, message, 1), _field(header, message, 2)
        if kind_at is None or batch_at is None:
            raise ValueError("a message of an Arrow stream has no header")
        batch = batch_at + _u32(header, batch_at)
        if header[kind_at] == _DICTIONARY:
            data_at = _field(header, batch, 1)
            if data_at is None:
                raise ValueError("a dictionary of an Arrow stream has no data")
            batch = data_at + _u32(header, data_at)
        elif header[kind_at] != _BATCH:
            raise ValueError("a message of an Arrow stream has another type than its header")
        return _field(header, batch, 3) is not None
    except (struct.error, IndexError) as error:
        raise ValueError("the header of a message of an Arrow stream is cut off") from error


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return the position of a field of a table; None if the table does not have it."""
    offsets = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, offsets)[0]
    entry = 4 + 2 * number
    if offsets < 0 or entry + 2 > size:
        return None
    found = struct.unpack_from("<H", data, offsets + entry)[0]
    return table + found if found else None


def _check_lengths(table: Any, size: int) -> None:
    """Refuse very many elements that take no bytes, or that are shared: they become large when they are converted."""
    left = max(_HOLLOW, _HOLLOW_PER_BYTE * size)
    for array in _arrays(table):
        if _hollow(array.type):
            left -= len(array)
            if left < 0:
                raise ValueError(f"it has too many values that take no bytes, such as {len(array):,} of {array.type}")
        elif _is_list_view(array.type):
            total = pc.sum(array.sizes).as_py() or 0
            if total > max(_HOLLOW, _OVERLAP * len(array.values)):
                raise ValueError(f"its lists have {total:,} elements, of {len(array.values):,} values")


def _is_list_view(kind: Any) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _arrays(table: Any) -> Iterator[Any]:
    """Return the arrays that a table is made of: those of its columns, and their parts."""
    for column in table.columns:
        for chunk in getattr(column, "chunks", [column]):
            yield from _parts(chunk)


def _parts(array: Any) -> Iterator[Any]:
    """Return an array and the arrays that it is made of."""
    kind = array.type
    yield array
    if pa.types.is_dictionary(kind):
        yield from _parts(array.dictionary)
    elif pa.types.is_run_end_encoded(kind):
        yield from _parts(array.values)
    elif pa.types.is_struct(kind) or pa.types.is_union(kind):
        for index in range(kind.num_fields):
            yield from _parts(array.field(index))
    elif pa.types.is_map(kind):
        yield from _parts(array.keys)
        yield from _parts(array.items)
    elif kind.num_fields:  # lists of all kinds
        yield from _parts(array.values)


def _check_views(array: Any) -> None:
    """Refuse views of texts that are outside of their buffers. The validation of Arrow skips those of nulls."""
    if not (pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type)) or not len(array):
        return
    _, views, *buffers = array.buffers()
    slots = pa.Array.from_buffers(pa.binary(16), len(array), [None, views], offset=array.offset)
    size, number, at = (pc.binary_slice(slots, part, part + 4).view(pa.int32()) for part in (0, 8, 12))
    long = pc.greater(size, _INLINE)
    outside = pc.any(pc.less(size, 0)).as_py()
    size, number, at = (part.filter(long) for part in (size, number, at))
    outside = outside or pc.any(pc.or_(pc.less(number, 0), pc.greater_equal(number, len(buffers)))).as_py()
    if not outside:
        room = pa.array([0 if buffer is None else buffer.size for buffer in buffers], pa.int64()).take(number)
        end = pc.add(at.cast(pa.int64()), size)
        outside = pc.any(pc.or_(pc.less(at, 0), pc.greater(end, room))).as_py()
    if outside:
        raise ValueError("a text is outside of the buffers of its column")


def _hollow(kind: Any) -> bool:
    types = pa.types
    if types.is_fixed_size_list(kind):
        return kind.list_size == 0 or _hollow(kind.value_type)
    if types.is_struct(kind):
        return all(_hollow(kind.field(index).type) for index in range(kind.num_fields))
    hollow = types.is_null(kind) or types.is_run_end_encoded(kind)
    return bool(hollow or (types.is_fixed_size_binary(kind) and kind.byte_width == 0))


# The codecs.


def _batch(table: Any) -> Any:
    batches = table.to_batches()
    if len(batches) > 1:
        raise ValueError("one batch was expected")
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _column(table: Any) -> Any:
    if table.num_columns != 1:
        raise ValueError("one column was expected")
    return table.column(0)


def _array(table: Any) -> Any:
    column = _column(table)
    if column.num_chunks > 1:
        raise ValueError("one chunk was expected")
    return column.chunk(0) if column.num_chunks else pa.array([], type=column.type)


_WRAPPERS: Final = (pa.DictionaryScalar, pa.RunEndEncodedScalar, pa.UnionScalar, pa.ExtensionScalar)


class _TooLarge(Exception):
    """The values that are shown would become too large."""


class _Shown:
    """Turns elements into plain values, up to a size: a few bytes can refer to one large text, or list, many times."""

    def __init__(self) -> None:
        self._left = _SHOWN

    def plain(self, scalar: Any) -> Any:
        """Return the value of an element.

        Raises:
            _TooLarge: it does not fit.
        """
        self._take(_ELEMENT)
        if not scalar.is_valid:
            return None
        if isinstance(scalar, pa.ListScalar):  # a map has pairs
            return list(map(self.plain, scalar.values))
        if isinstance(scalar, pa.StructScalar):
            fields = [scalar.type.field(index).name for index in range(scalar.type.num_fields)]
            return {name: self.plain(scalar[index]) for index, name in enumerate(fields)}
        if isinstance(scalar, _WRAPPERS):
            return self.plain(scalar.value)
        if isinstance(scalar, pa.BinaryScalar):
            self._take(scalar.as_buffer().size)
        return scalar.as_py()

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _TooLarge


def first_rows(columns: list[Any], count: int) -> list[list[Any]]:
    """Return the first rows of columns as plain values, up to a number and a size."""
    shown = _Shown()
    rows: list[list[Any]] = []
    with contextlib.suppress(_TooLarge):
        for number in range(count):
            rows.append([shown.plain(column[number]) for column in columns])  # noqa: PERF401 - those before are kept
    return rows


def table_preview(value: Any, items: int) -> dict[str, Any]:
    """Describe a table: its shape, and its first columns, types and rows."""
    fields = [value.schema.field(index) for index in range(min(value.num_columns, items))]
    count = min(value.num_rows, items // max(1, len(fields)))
    return {
        "type": f"pyarrow.{type(value).__name__}",
        "shape": [value.num_rows, value.num_columns],
        "columns": [field.name for field in fields],
        "dtypes": [str(field.type) for field in fields],
        "rows": first_rows([value.column(index) for index in range(len(fields))], count) if fields else [],
    }


def _array_preview(value: Any, items: int) -> dict[str, Any]:
    name = "ChunkedArray" if isinstance(value, pa.ChunkedArray) else "Array"
    values = [row[0] for row in first_rows([value], min(len(value), items))]
    return {"type": f"pyarrow.{name}", "shape": [len(value)], "dtype": str(value.type), "values": values}


register_ours(
    NamedCodec(
        type=pa.Table,
        name="pyarrow.Table",
        encode=encode_stream,
        decode=decode_stream,
        canonical=lambda value: encode_stream(value.combine_chunks()),
        preview=table_preview,
        arrow=lambda value: value,
        ours=True,
    ),
    NamedCodec(
        type=pa.RecordBatch,
        name="pyarrow.RecordBatch",
        encode=encode_stream,
        decode=lambda state: _batch(decode_stream(state)),
        preview=table_preview,
        arrow=lambda value: value,
        ours=True,
    ),
    NamedCodec(
        type=pa.Array,
        name="pyarrow.Array",
        encode=lambda value: encode_stream(pa.RecordBatch.from_arrays([value], [""])),
        decode=lambda state: _array(decode_stream(state)),
        preview=_array_preview,
        subclasses=True,
        ours=True,
    ),
    NamedCodec(
        type=pa.ChunkedArray,
        name="pyarrow.ChunkedArray",
        encode=lambda value: encode_stream(pa.table([value], [""])),
        decode=lambda state: _column(decode_stream(state)),
        canonical=lambda value: encode_stream(pa.table([value], [""]).combine_chunks()),
        preview=_array_preview,
        ours=True,
    ),
)
