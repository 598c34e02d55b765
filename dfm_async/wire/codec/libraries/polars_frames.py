"""Data frames and series of polars, as Arrow IPC streams. They need pyarrow, at both ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import polars

from dfm_async.wire.codec.registry import NamedCodec, Unsupported, load_library, register_ours


def _arrow() -> Any:
    try:
        load_library("pyarrow")
    except LookupError as error:
        raise Unsupported("values of polars need the package 'pyarrow', which is not installed here") from error
    from dfm_async.wire.codec.libraries import arrow_tables

    return arrow_tables


def _encode(value: Any) -> Any:
    arrow = _arrow()
    _check_types(value)
    try:
        table = arrow.pa.table(value)
    except arrow.pa.ArrowInvalid as error:  # a type that only polars has
        raise Unsupported(f"Arrow does not have one of its types: {error}") from error
    return arrow.encode_stream(table)


def _table(value: Any) -> Any:
    """Return a data frame as a table of Arrow, with types that older programs know: no views of texts."""
    _arrow()
    _check_types(value)
    return value.to_arrow(compat_level=polars.CompatLevel.oldest())


def _check_types(value: Any) -> None:
    for name, kind in value.schema.items():
        if any(part == polars.Object for part in _types_in(kind)):
            raise Unsupported(f"the column {name!r} has Python objects in it")
        if any(isinstance(part, polars.Array) and part.size == 0 for part in _types_in(kind)):
            raise Unsupported(f"the column {name!r} has arrays without elements")


def _types_in(kind: Any) -> Iterator[Any]:
    """Return a type and the types that it is made of."""
    yield kind
    inner = [field.dtype for field in getattr(kind, "fields", ())] or [getattr(kind, "inner", None)]
    for part in inner:
        if part is not None:
            yield from _types_in(part)


def _decode(state: Any) -> Any:
    table = _arrow().decode_stream(state)
    _check_metadata(table.schema.metadata)
    for field in table.schema:
        _check_field(field)
    return polars.DataFrame(table)


# polars panics on types and metadata that it does not know, and writes that to the terminal: they are found before.

_ENUM: Final = b"_PL_ENUM_VALUES2"
_CATEGORICAL: Final = b"_PL_CATEGORICAL2"
_KNOWN: Final = (
    *("null", "boolean", "integer", "floating", "decimal128", "date", "time", "timestamp", "duration"),
    *("string", "large_string", "string_view", "binary", "large_binary", "binary_view"),
    *("list", "large_list", "struct"),
)
"""The types of Arrow that polars has as well, as ``pyarrow.types`` names them."""
_PHYSICAL: Final = (b"u8;", b"u16;", b"u32;")


def _check_field(field: Any) -> None:
    str.encode(field.name)
    _check_metadata(field.metadata)
    parts = [field.type.field(index) for index in range(field.type.num_fields)]
    if not _is_known(field.type) or len({part.name for part in parts}) < len(parts):
        raise ValueError(f"polars does not have the type {field.type}")
    for part in parts:
        _check_field(part)


def _is_known(kind: Any) -> bool:
    types = _arrow().pa.types
    if types.is_dictionary(kind):
        return _is_known(kind.value_type) and not kind.value_type.num_fields
    if types.is_fixed_size_list(kind):
        return bool(kind.list_size)
    return any(getattr(types, f"is_{name}")(kind) for name in _KNOWN)


def _check_metadata(metadata: Any) -> None:
    for key, value in (metadata or {}).items():
        key.decode()
        value.decode()
        if key == _ENUM:
            names = []
            while value:
                name, value = _split(value)
                names.append(name)
            valid = len(set(names)) == len(names)
        elif key == _CATEGORICAL:
            _name, value = _split(value)
            _namespace, value = _split(value)
            valid = value in _PHYSICAL
        else:
            valid = not key.startswith(b"_PL_")
        if not valid:
            raise ValueError(f"this is not metadata of this version of polars: {key!r}")


def _split(value: bytes) -> tuple[str, bytes]:
    """Split off a text that begins with its length in bytes."""
    length, _, rest = value.partition(b";")
    if not length.isdigit() or int(length) > len(rest):
        raise ValueError("metadata of polars is cut off")
    return rest[: int(length)].decode(), rest[int(length) :]


def _encode_series(value: Any) -> Any:
    return [value.name, _encode(value.alias("").to_frame())]


def _decode_series(state: Any) -> Any:
    name, frame = state
    return _decode(frame).to_series().alias(name)


def _refuse_query(_: Any) -> Any:
    raise Unsupported("it is a query and has no data yet. Send the DataFrame that its collect() returns")


def _rows(value: Any) -> list[list[Any]]:
    try:
        arrow = _arrow()
        table = arrow.pa.table(value)
    except (Unsupported, ValueError):  # values that were not received: they have no types that Arrow does not have
        return [list(row) for row in value.rows()]
    rows: list[list[Any]] = arrow.first_rows(table.columns, table.num_rows)
    return rows


def _preview(value: Any, items: int) -> dict[str, Any]:
    head = value[:, :items]
    return {
        "type": "polars.DataFrame",
        "shape": list(value.shape),
        "columns": head.columns,
        "dtypes": [str(kind) for kind in head.dtypes],
        "rows": _rows(head.head(items // max(1, head.width))),
    }


def _series_preview(value: Any, items: int) -> dict[str, Any]:
    return {
        "type": "polars.Series",
        "shape": [len(value)],
        "name": value.name,
        "dtype": str(value.dtype),
        "values": [row[0] for row in _rows(value.head(items).alias("").to_frame())],
    }


register_ours(
    NamedCodec(
        type=polars.DataFrame,
        name="polars.DataFrame",
        encode=_encode,
        decode=_decode,
        canonical=lambda value: _encode(value.rechunk()),
        preview=_preview,
        arrow=_table,
        ours=True,
    ),
    NamedCodec(
        type=polars.Series,
        name="polars.Series",
        encode=_encode_series,
        decode=_decode_series,
        canonical=lambda value: _encode_series(value.rechunk()),
        preview=_series_preview,
        ours=True,
    ),
    NamedCodec(type=polars.LazyFrame, name="polars.LazyFrame", encode=_refuse_query, decode=_refuse_query, ours=True),
)
