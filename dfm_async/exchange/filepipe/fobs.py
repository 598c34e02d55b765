"""FOBS, the form of values in NVFLARE's messages: MessagePack, with other objects as maps that name their type.

Only the types in the tables below are written and read; nothing that a message names is imported, opened or called. The
package ``msgpack`` does the packing, as it does for the peer: it calls us for every object, also in the keys of maps,
and can walk through a message without reserving memory for what the message only claims to have.
"""

from __future__ import annotations

import enum
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

import msgpack
import numpy as np

from dfm_async.errors import FobsError
from dfm_async.exchange.filepipe.fobs_format import (
    Buffer,
    Datum,
    Dialect,
    array_buffers,
    join_old_section,
    join_sections,
    load_array,
    split_sections,
)
from dfm_async.exchange.filepipe.models import (
    HEADERS,
    AnalyticsDataType,
    DataKind,
    Dxo,
    FlContext,
    LogWriterName,
    ParamsType,
    Shareable,
)

T = TypeVar("T")

THRESHOLD: Final = 10 * 1024 * 1024
"""Texts and bytes of this length and above get sections of their own; the peer does the same."""
_SMALLEST_THRESHOLD: Final = 1024

_TYPE: Final = "__fobs_type__"
_DATA: Final = "__fobs_data__"
_DECOMPOSER: Final = "__fobs_dc__"

_CORE: Final = "nvflare.fuel.utils.fobs.decomposers.core_decomposers."
_GENERIC: Final = "nvflare.fuel.utils.fobs.decomposer."
_FLARE: Final = "nvflare.apis.utils.decomposers.flare_decomposers."
_NUMPY: Final = "nvflare.app_common.decomposers.numpy_decomposers."

_ENUMS: Final[dict[type[enum.StrEnum], str]] = {
    DataKind: "nvflare.apis.dxo.DataKind",
    ParamsType: "nvflare.app_common.abstract.fl_model.ParamsType",
    AnalyticsDataType: "nvflare.apis.analytix.AnalyticsDataType",
    LogWriterName: "nvflare.apis.analytix.LogWriterName",
}
_OLD_LOG_WRITER_NAME: Final = "nvflare.app_common.tracking.tracker_types.LogWriterName"
"""What NVFLARE 2.5 calls it."""


class _Ref:
    """Stands in the body for a large value."""

    __slots__ = ("id",)

    def __init__(self, id: uuid.UUID) -> None:  # noqa: A002 - the peer's name for it
        self.id = id


_NAMES: Final[dict[type, tuple[str, str]]] = {
    tuple: ("tuple", _CORE + "TupleDecomposer"),
    set: ("set", _CORE + "SetDecomposer"),
    OrderedDict: ("collections.OrderedDict", _CORE + "OrderedDictDecomposer"),
    datetime: ("datetime.datetime", _CORE + "DatetimeDecomposer"),
    Shareable: ("nvflare.apis.shareable.Shareable", _GENERIC + "DictDecomposer"),
    Dxo: ("nvflare.apis.dxo.DXO", _FLARE + "DXODecomposer"),
    FlContext: ("nvflare.apis.fl_context.FLContext", _FLARE + "ContextDecomposer"),
    np.ndarray: ("numpy.ndarray", _NUMPY + "NumpyArrayDecomposer"),
    np.float64: ("numpy.float64", _NUMPY + "Float64ScalarDecomposer"),
    np.float32: ("numpy.float32", _NUMPY + "Float32ScalarDecomposer"),
    np.int64: ("numpy.int64", _NUMPY + "Int64ScalarDecomposer"),
    np.int32: ("numpy.int32", _NUMPY + "Int32ScalarDecomposer"),
    _Ref: ("nvflare.fuel.utils.fobs.datum.DatumRef", _GENERIC + "DataClassDecomposer"),
    **{kind: (name, _GENERIC + "EnumTypeDecomposer") for kind, name in _ENUMS.items()},
}
"""How NVFLARE names each type, and what takes its objects apart there."""


def dumps(value: Any, *, threshold: int = THRESHOLD, dialect: Dialect = Dialect.V2_7) -> bytes:
    """Make a message of a value.

    Raises:
        FobsError: it contains something that has no place in a message.
    """
    return b"".join(dump_buffers(value, threshold=threshold, dialect=dialect))


def dump_buffers(value: Any, *, threshold: int = THRESHOLD, dialect: Dialect = Dialect.V2_7) -> list[Buffer]:
    """Make a message of a value, in pieces. Large arrays and bytes are not copied: do not change them meanwhile.

    Args:
        value: what to send.
        threshold: from which length on texts and bytes get sections of their own.
        dialect: which version of NVFLARE shall read it. Before 2.7 nothing gets a section of its own.

    Raises:
        FobsError: it contains something that has no place in a message.
    """
    if threshold < _SMALLEST_THRESHOLD:
        raise ValueError(f"threshold must be at least {_SMALLEST_THRESHOLD}, not {threshold}")
    encoder = _Encoder(threshold, dialect)
    try:
        body = msgpack.packb(encoder.lift(value), default=encoder.to_map, strict_types=True)
    except RecursionError:
        raise FobsError("it is nested too deeply, or contains itself") from None
    except (ValueError, TypeError) as error:  # no UTF-8, nested too deeply, or longer than MessagePack can say
        raise FobsError(str(error)) from error
    return join_sections(body, encoder.datums) if dialect is Dialect.V2_7 else join_old_section(body)


class _Encoder:
    """Takes one value apart. Large values are found in the order in which the peer finds them."""

    def __init__(self, threshold: int, dialect: Dialect) -> None:
        self.datums: list[Datum] = []
        self._threshold = threshold
        self._dialect = dialect
        self._is_old = dialect is not Dialect.V2_7

    def lift(self, value: Any) -> Any:
        """Copy lists and dicts, with references in place of the large texts and bytes in them."""
        kind = type(value)
        if kind is str or kind is bytes or kind is bytearray:
            return self._lift_large(value, kind is str)
        if kind is list:
            return [self.lift(item) for item in value]
        if kind is dict or kind is OrderedDict:
            return kind((key, self.lift(item)) for key, item in _plain(value).items())
        if kind is Shareable:
            # The peer writes the headers first, wherever they are.
            return Shareable({HEADERS: {}} | {key: self.lift(item) for key, item in _plain(value).items()})
        if kind is memoryview:
            return self._lift_large(
                value.tobytes() if value.ndim != 1 or not value.contiguous else value.cast("B"), False
            )
        return value

    def _lift_large(self, value: Any, is_text: bool) -> Any:
        if self._is_old or len(value) < self._threshold:
            return value
        return self._refer([value.encode()] if is_text else [value], is_text)

    def _refer(self, pieces: list[Buffer], is_text: bool = False) -> _Ref:
        datum = Datum(uuid.uuid4(), is_text, pieces)
        self.datums.append(datum)
        return _Ref(datum.id)

    def to_map(self, value: Any) -> Any:
        """Return an object as a map; called for everything that MessagePack does not know."""
        kind = type(value)
        if kind is int:
            raise FobsError("it has more than 64 bits", "int")
        if kind is DataKind and self._is_old:
            return value.value  # it was no enum then
        names = _NAMES.get(kind)
        if kind is LogWriterName and self._dialect is Dialect.V2_5:
            names = (_OLD_LOG_WRITER_NAME, _GENERIC + "EnumTypeDecomposer")
        if names is None:
            raise FobsError("its type cannot be sent", f"{kind.__module__}.{kind.__qualname__}")
        return {_TYPE: names[0], _DATA: self._content(value), _DECOMPOSER: names[1]}

    def _content(self, value: Any) -> Any:
        match value:
            case tuple() | set():
                return [self.lift(item) for item in value]
            case OrderedDict():
                return list(value.items())
            case Shareable():
                return dict(value)
            case Dxo():
                return (value.kind, self.lift(value.meta), self.lift(value.data))
            case FlContext():
                return [self.lift(value.model), self.lift(value.props)]
            case np.ndarray():
                return self._array(value)
            case np.generic():
                return value.item()
            case datetime():
                return value.isoformat()
            case _Ref():
                return {"data": {"datum_id": str(value.id), "unwrap": True}}
            case _:
                return value.name  # an enum

    def _array(self, value: Any) -> Any:
        pieces = array_buffers(value)
        if self._is_old:
            return b"".join(pieces)
        is_large = sum(len(piece) for piece in pieces) >= self._threshold
        return {"type": "native", "data": self._refer([*pieces]) if is_large else b"".join(pieces)}


def _plain(value: dict[Any, Any]) -> dict[Any, Any]:
    if _TYPE in value:
        raise FobsError(f"a dict with the key {_TYPE!r} would be taken for something else", "dict")
    return value


def dialect_of(message: Buffer) -> Dialect:
    """Return which version of NVFLARE has written a message, and thus how to answer. 2.5 is taken for 2.6.

    Raises:
        FobsError: it is no message.
    """
    return split_sections(memoryview(message).cast("B"))[0]


def loads(message: Buffer) -> Any:
    """Read the value in a message of any version.

    Raises:
        FobsError: it is damaged, or contains a type that is not known here. Nothing else is raised, and no more
            memory is used than a few times the length of the message.
    """
    _, body, datums = split_sections(memoryview(message).cast("B"))
    decoder = _Decoder(datums)
    try:
        _walk(body)
        return msgpack.unpackb(
            body, strict_map_key=False, object_hook=decoder.from_map, ext_hook=_refuse_extension, timestamp=3
        )
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FobsError(f"its body is damaged ({type(error).__name__}: {error})") from error


class _PiecewiseBody:
    """Gives a body to MessagePack piece by piece, so that it is not copied as a whole."""

    def __init__(self, body: memoryview) -> None:
        self._rest = body

    def read(self, size: int) -> bytes:
        piece, self._rest = self._rest[:size], self._rest[size:]
        return bytes(piece)


def _walk(body: memoryview) -> None:
    """Raise if not all is there that lists and maps claim to have: memory would be reserved for it."""
    msgpack.Unpacker(_PiecewiseBody(body), max_buffer_size=len(body) or 1).skip()


def _refuse_extension(code: int, data: bytes) -> Any:
    raise FobsError("it contains an extension of MessagePack", f"extension {code}")


class _Decoder:
    """Decodes the objects of one message."""

    def __init__(self, datums: list[Datum]) -> None:
        self._datums = {str(datum.id): datum for datum in datums}

    def from_map(self, found: dict[Any, Any]) -> Any:
        """Return the object that a map with a type stands for; called for every map, from the inside to the outside."""
        if _TYPE not in found:
            return found
        name = found[_TYPE]
        make = _MAKERS.get(name) if isinstance(name, str) else None
        if make is None or _DATA not in found:
            raise FobsError("its type cannot be read", str(name))
        return make(self, found[_DATA])

    def resolve(self, data: Any) -> Any:
        """Return the large value that a reference is about."""
        # NVFLARE 2.5 writes the fields as they are.
        fields = _expect(dict, data)
        fields = _expect(dict, fields.get("data", fields))
        # Honest peers refer to each value once. Arrays made of the same bytes many times could fill the memory.
        datum = self._datums.pop(_expect(str, fields.get("datum_id")), None)
        if datum is None:
            raise FobsError("it refers to a section that is not there, or twice to the same")
        content = bytes(datum.pieces[0])
        return content.decode() if datum.is_text else content

    def array(self, data: Any) -> Any:
        """Make an array from its bytes; since NVFLARE 2.7 they are in a map."""
        if isinstance(data, dict):
            if data.get("type") != "native":
                raise FobsError("its content must be fetched over NVFLARE's network", "numpy.ndarray")
            data = data.get("data")
        return load_array(_expect(bytes, data))


def _expect(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise FobsError(f"expected a value of type {kind.__name__}, not {type(value).__name__}")
    return value


def _make_ordered(data: Any) -> OrderedDict[Any, Any]:
    found: OrderedDict[Any, Any] = OrderedDict()
    for item in _expect(list, data):
        key, value = _expect(tuple, item)
        found[key] = value
    return found


def _make_shareable(data: Any) -> Shareable:
    found = Shareable(_expect(dict, data))
    _expect(dict, found[HEADERS])
    return found


def _make_dxo(data: Any) -> Dxo:
    kind, meta, content = _expect(tuple, data)
    return Dxo(_expect(str, kind), content, {} if meta is None else _expect(dict, meta))


def _make_context(data: Any) -> FlContext:
    model, props = _expect(list, data)
    return FlContext(model, _expect(dict, props))


def _make_float32(data: Any) -> np.float32:
    with np.errstate(over="ignore"):  # beyond its range it is infinite
        return np.float32(_number(data))


def _number(data: Any) -> float:
    return data if type(data) is int else _expect(float, data)


def _make_int(kind: type[np.signedinteger[Any]], data: Any) -> Any:
    limits = np.iinfo(kind)
    if type(data) is not int or not limits.min <= data <= limits.max:
        raise FobsError("its value is out of range, or not an integer", f"numpy.{kind.__name__}")
    return kind(data)


def _enum_maker(kind: type[enum.StrEnum], name: str) -> Callable[[_Decoder, Any], enum.StrEnum]:
    def make(_: _Decoder, data: Any) -> enum.StrEnum:
        found = kind.__members__.get(_expect(str, data))
        if found is None:
            raise FobsError(f"it has no member {data!r}", name)
        return found

    return make


_MAKERS: Final[dict[str, Callable[[_Decoder, Any], Any]]] = {
    _NAMES[tuple][0]: lambda _, data: tuple(_expect(list, data)),
    _NAMES[set][0]: lambda _, data: set(_expect(list, data)),
    _NAMES[OrderedDict][0]: lambda _, data: _make_ordered(data),
    _NAMES[datetime][0]: lambda _, data: datetime.fromisoformat(_expect(str, data)),
    _NAMES[Shareable][0]: lambda _, data: _make_shareable(data),
    _NAMES[Dxo][0]: lambda _, data: _make_dxo(data),
    _NAMES[FlContext][0]: lambda _, data: _make_context(data),
    _NAMES[np.ndarray][0]: lambda decoder, data: decoder.array(data),
    _NAMES[np.float64][0]: lambda _, data: np.float64(_number(data)),
    _NAMES[np.float32][0]: lambda _, data: _make_float32(data),
    _NAMES[np.int64][0]: lambda _, data: _make_int(np.int64, data),
    _NAMES[np.int32][0]: lambda _, data: _make_int(np.int32, data),
    _NAMES[_Ref][0]: lambda decoder, data: decoder.resolve(data),
    **{name: _enum_maker(kind, name) for kind, name in _ENUMS.items()},
    _OLD_LOG_WRITER_NAME: _enum_maker(LogWriterName, _OLD_LOG_WRITER_NAME),
}
"""What makes an object of the data of each type."""
