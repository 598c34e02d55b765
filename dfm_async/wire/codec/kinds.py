"""The table of kinds: one row for each type, or family of types, that becomes an extension.

Data that is read may be untrusted: every argument is checked before it is used. A further type of the standard library
is a row of ``_STANDARD``; one with an extension of its own, or a family of classes, is a row of ``VALUE_KINDS``.
"""

from __future__ import annotations

import builtins
import dataclasses
import datetime as dt
import decimal
import enum
import pathlib
import re
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Any, Final

import msgspec
from msgspec.msgpack import Ext

from dfm_async.model.replies import Replies
from dfm_async.wire.codec.codec_engine import BIG_INT, ITEMS, SURROGATES, CodecEngine, Kind
from dfm_async.wire.codec.pickling import importable, pack_pickle
from dfm_async.wire.codec.untrusted import check_hashes

# Types of the standard library, and of ours, that need no extension of their own: a name, and a state of plain data.

_STANDARD_CODE: Final = 29
_ADDRESSES: Final = (IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
_FACTORIES: Final[tuple[Callable[[], Any], ...]] = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(Counter, OrderedDict, deque),
)
_FACTORY_OF: Final = {factory.__name__: factory for factory in _FACTORIES}
_LARGEST_PART: Final = 1 << 17
"""The most bits that the numbers of a fraction may have: reducing larger ones would take long."""
ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,3}")
"""The names of time zones. They are looked up as files below the folders of the time zone data."""


def _offset_arguments(zone: dt.timezone) -> tuple[Any, ...]:
    """Return the arguments of a fixed offset: the offset, and its name if it has one of its own."""
    found: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]
    return found


def _moment_state(value: dt.datetime | dt.time) -> list[Any]:
    zone = value.tzinfo
    state = zone if type(zone) is dt.timezone else _zone_name(zone)
    return [value.replace(tzinfo=None).isoformat(), value.fold, state]


def _moment(kind: type[dt.datetime | dt.time]) -> Callable[[Any], Any]:
    def build(state: Any) -> Any:
        text, fold, zone = state
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone if type(zone) is dt.timezone else _zone(zone))

    return build


def _zone_name(zone: dt.tzinfo | None) -> str:
    key = zone.key if type(zone) is zoneinfo.ZoneInfo else None
    if key is None or not ZONE_NAME.fullmatch(key):
        raise TypeError(f"its time zone {zone!r} is neither a fixed offset nor a zoneinfo.ZoneInfo with a name")
    return key


def _zone(name: Any) -> zoneinfo.ZoneInfo:
    if not isinstance(name, str) or not ZONE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a time zone")
    return zoneinfo.ZoneInfo(name)


def _factory_name(factory: Callable[[], Any] | None) -> str | None:
    if factory is None:
        return None
    if factory not in _FACTORIES:
        raise TypeError(f"its default_factory {factory!r} is none of {', '.join(sorted(_FACTORY_OF))}")
    return str(factory.__name__)


def _default_dict(state: Any) -> defaultdict[Any, Any]:
    name, items = state
    return defaultdict(None if name is None else _FACTORY_OF[name], _mapping(items))


def _deque(state: Any) -> deque[Any]:
    items, longest = state
    if not isinstance(items, list) or (longest is not None and len(items) > longest):
        raise ValueError("this is not the state of a deque")
    return deque(items, longest)


def _fraction_state(value: Fraction) -> list[int]:
    parts = [value.numerator, value.denominator]
    if max(part.bit_length() for part in parts) > _LARGEST_PART:
        raise TypeError(f"its numbers have more than {_LARGEST_PART:,} bits")
    return parts


def _fraction(state: Any) -> Fraction:
    for part in state:
        if type(part) is not int or part.bit_length() > _LARGEST_PART:
            raise ValueError("this is not the state of a fraction")
    return Fraction(*state)


def _replies(state: Any) -> Replies[Any]:
    replies, failures = state
    if type(replies) is not list or type(failures) is not list:
        raise TypeError("this is not the state of the replies of a gather")
    return Replies(replies, failures)


def _ordered_state(value: OrderedDict[Any, Any]) -> Any:
    # The state of a module of PyTorch has the versions of its parts in this attribute.
    attributes = vars(value)
    if attributes.keys() - {"_metadata"}:
        raise TypeError(f"it has attributes of its own: {', '.join(attributes)}")
    return [dict(value), attributes["_metadata"]] if attributes else dict(value)


def _ordered(state: Any) -> OrderedDict[Any, Any]:
    if type(state) is not list:
        return OrderedDict(_mapping(state))
    items, metadata = state
    found = OrderedDict(_mapping(items))
    found._metadata = metadata  # type: ignore[attr-defined] # noqa: SLF001 - the name is PyTorch's
    return found


_EXCEPTION_STATE: Final = frozenset({"__notes__", "name", "path"})
"""The attributes of exceptions that are not arguments."""


def _exception_state(value: Exception) -> list[Any]:
    reduced: Any = value.__reduce__()
    _, arguments, *rest = reduced
    attributes = (rest[0] if rest else None) or {}
    if attributes.keys() - _EXCEPTION_STATE:
        raise TypeError(f"it has attributes of its own: {', '.join(attributes)}")
    return [list(arguments), attributes]


def _exception(kind: type[Exception]) -> Callable[[Any], Any]:
    def build(state: Any) -> Any:
        arguments, attributes = state
        if type(arguments) is not list or _mapping(attributes).keys() - _EXCEPTION_STATE:
            raise ValueError("this is not the state of an exception")
        value = kind(*arguments)
        value.__setstate__(attributes)
        return value

    return build


_EXCEPTIONS: Final = frozenset(
    kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)
)


def _mapping(state: Any) -> dict[Any, Any]:
    if type(state) is not dict:
        raise TypeError("a dict was expected")
    return state


def _address(kind: type[Any]) -> Callable[[Any], Any]:
    def build(state: Any) -> Any:
        if not isinstance(state, str):
            raise TypeError("a text was expected")
        return kind(state)

    return build


_STANDARD: Final[dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    Counter: (dict, lambda state: Counter(_mapping(state))),
    OrderedDict: (_ordered_state, _ordered),
    defaultdict: (lambda value: [_factory_name(value.default_factory), dict(value)], _default_dict),
    deque: (lambda value: [list(value), value.maxlen], _deque),
    Fraction: (_fraction_state, _fraction),
    dt.datetime: (_moment_state, _moment(dt.datetime)),
    dt.time: (_moment_state, _moment(dt.time)),
    dt.timezone: (lambda value: list(_offset_arguments(value)), lambda state: dt.timezone(*state)),
    zoneinfo.ZoneInfo: (_zone_name, _zone),
    Replies: (lambda value: [list(value), value.failures], _replies),
    **{kind: (str, _address(kind)) for kind in _ADDRESSES},
    **{kind: (_exception_state, _exception(kind)) for kind in _EXCEPTIONS},
}
"""By type, exactly: what makes the state of a value, and what rebuilds the value from it."""
_BUILDERS: Final = {kind.__name__: build for kind, (_, build) in _STANDARD.items()}


def _pack_standard(engine: CodecEngine, value: Any) -> Ext:
    kind = type(value)
    try:
        state = _STANDARD[kind][0](value)
    except TypeError:
        if engine.trusted:
            return pack_pickle(engine, value)
        raise
    return Ext(_STANDARD_CODE, engine.dumps([kind.__name__, engine.pack_part(state)]))


def _unpack_standard(engine: CodecEngine, data: memoryview) -> Any:
    name, state = engine.decode_list(data)
    engine.check_whole(state)
    return rebuild_standard(name, state)


def rebuild_standard(name: str, state: Any) -> Any:
    """Rebuild a value of a type of the standard library.

    Raises:
        TypeError: no value has such a state.
        ValueError: the same.
        LookupError: there is no such type, or no such time zone here.
    """
    return _BUILDERS[name](state)


# Types with an extension of their own.


def _state(code: int, kind: type, to_state: Callable[[Any], Any], build: Callable[[Any], Any]) -> Kind:
    """Make the row of a type whose state is a sequence of parts."""
    return Kind(
        code=code,
        of=kind,
        pack=lambda engine, value: Ext(code, engine.dumps([engine.pack_part(part) for part in to_state(value)])),
        unpack=lambda engine, data: build(engine.decode_list(data)),
    )


def _text(code: int, kind: type, build: Callable[[str], Any], to_text: Callable[[Any], str] = str) -> Kind:
    """Make the row of a type whose state is a text."""
    return Kind(
        code=code,
        of=kind,
        pack=lambda _engine, value: Ext(code, to_text(value).encode()),
        unpack=lambda _engine, data: build(str(data, "utf-8")),
    )


def _keys(engine: CodecEngine, values: list[Any]) -> list[Any]:
    if not engine.trusted:
        check_hashes(values)
    return values


def _set(code: int, kind: type) -> Kind:
    def pack(engine: CodecEngine, value: Any) -> Ext:
        items = [engine.pack_part(item) for item in value]
        if engine.mode.canonical:
            items.sort(key=engine.dumps)
        return Ext(code, engine.dumps(items))

    unpack = lambda engine, data: kind(_keys(engine, engine.decode_list(data)))  # noqa: E731
    return Kind(code=code, of=kind, pack=pack, unpack=unpack)


def _unpack_items(engine: CodecEngine, data: memoryview) -> dict[Any, Any]:
    items = engine.decode_list(data)
    _keys(engine, [key for key, _ in items])
    return dict(items)


def _timed(code: int, kind: type[dt.datetime | dt.time]) -> Kind:
    """Make the row of dates and times: those whose time zone has more than an offset keep its rules."""

    def pack(engine: CodecEngine, value: dt.datetime | dt.time) -> Ext:
        zone = value.tzinfo
        if zone is None or (type(zone) is dt.timezone and len(_offset_arguments(zone)) == 1):
            return Ext(code, engine.dumps([value.isoformat(), value.fold]))
        return _pack_standard(engine, value)

    def unpack(engine: CodecEngine, data: memoryview) -> dt.datetime | dt.time:
        text, fold = engine.decode_list(data)
        return kind.fromisoformat(text).replace(fold=fold)

    return Kind(code=code, of=kind, pack=pack, unpack=unpack)


_PATH: Final = 18
_PATHS: Final = {
    kind.__name__: kind
    for kind in (
        *(pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(pathlib.Path, pathlib.PosixPath, pathlib.WindowsPath),
    )
}
_PATH_MODULES: Final = frozenset({"pathlib", "pathlib._local"})
"""The modules that paths say they are from: that depends on the version of Python."""


def _pack_path(engine: CodecEngine, value: pathlib.PurePath) -> Ext:
    kind = type(value)
    ref = f"pathlib:{kind.__name__}" if _PATHS.get(kind.__name__) is kind else _ref(kind)
    return Ext(_PATH, engine.dumps([ref, str(value)]))


def _unpack_path(engine: CodecEngine, data: memoryview) -> Any:
    ref, state = engine.decode_list(data)
    module, _, name = ref.partition(":")
    known = _PATHS.get(name) if module in _PATH_MODULES else None
    return known(state) if known is not None else _resolve(engine, ref, pathlib.PurePath)(state)


# Families of classes, which are found by their names: a reference to the class, and its state.

_PYDANTIC_STATE: Final = {"__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__"}


def _ref(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _resolve(engine: CodecEngine, ref: str, base: type | None) -> Any:
    kind = engine.resolve(ref)
    if base is not None and not issubclass(kind, base):
        raise TypeError(f"{ref} is not a {base.__name__}")
    return kind


def _family(
    code: int,
    matches: Callable[[type], bool],
    to_state: Callable[[Any], Any],
    build: Callable[[CodecEngine, Any, Any], Any],
    base: type | None = None,
) -> Kind:
    """Make the row of a family of classes. A class of a script, or of a function, is shipped by value instead."""

    def named(engine: CodecEngine, kind: type) -> bool:
        in_script = engine.mode.stored and kind.__module__ == "__main__" and "<" not in kind.__qualname__
        return matches(kind) and (importable(kind) or in_script)

    def pack(engine: CodecEngine, value: Any) -> Ext:
        return Ext(code, engine.dumps([_ref(type(value)), engine.pack_part(to_state(value))]))

    def unpack(engine: CodecEngine, data: memoryview) -> Any:
        ref, state = engine.decode_list(data)
        engine.check_whole(state)
        return build(engine, _resolve(engine, ref, base), state)

    return Kind(code=code, matches=named, pack=pack, unpack=unpack)


def _enum_state(value: enum.Enum) -> list[Any]:
    # A combination of flags has no name of its own.
    return [None, value.value] if isinstance(value, enum.Flag) else [value.name, None]


def _enum(_engine: CodecEngine, kind: Any, state: Any) -> Any:
    name, value = state
    return kind[name] if name is not None else kind(value)


def _is_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and kind.__reduce_ex__ is object.__reduce_ex__


def _dataclass_state(value: Any) -> dict[str, Any]:
    state = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    state.update(getattr(value, "__dict__", {}))
    return state


def _dataclass(engine: CodecEngine, kind: Any, state: Any) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]  # raises TypeError for another class
    missing = set(names) - state.keys()
    if missing:
        raise TypeError(f"{kind.__qualname__} lacks {', '.join(sorted(missing))}")
    value = object.__new__(kind)
    for name in names if engine.mode.known is not None else state:
        object.__setattr__(value, name, state[name])
    return value


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_fields__") and hasattr(kind, "model_validate")


def _pydantic(engine: CodecEngine, kind: Any, state: Any) -> Any:
    if not hasattr(kind, "__pydantic_fields__"):
        raise TypeError(f"{kind.__qualname__} is not a pydantic model")
    whole = isinstance(state, dict) and state.keys() == _PYDANTIC_STATE
    if not whole or not isinstance(state["__dict__"], dict) or not isinstance(state["__pydantic_fields_set__"], set):
        raise TypeError(f"this is not the state of a {kind.__qualname__}")
    if not all(isinstance(state[name], (dict, type(None))) for name in ("__pydantic_extra__", "__pydantic_private__")):
        raise TypeError(f"this is not the state of a {kind.__qualname__}")
    value: Any = object.__new__(kind)
    value.__setstate__(state if engine.mode.known is None else _declared_state(kind, state))
    return value


def _declared_state(kind: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the state of a model that the model declares."""
    private, extra = state["__pydantic_private__"], state["__pydantic_extra__"]
    fields, hidden = kind.__pydantic_fields__, getattr(kind, "__private_attributes__", {})
    return {
        "__dict__": {name: value for name, value in state["__dict__"].items() if name in fields},
        "__pydantic_extra__": extra if kind.model_config.get("extra") == "allow" else None,
        "__pydantic_fields_set__": {name for name in state["__pydantic_fields_set__"] if name in fields},
        "__pydantic_private__": private and {name: value for name, value in private.items() if name in hidden},
    }


VALUE_KINDS: Final = (
    *(Kind(code=_STANDARD_CODE, of=kind, pack=_pack_standard, unpack=_unpack_standard) for kind in _STANDARD),
    # What the engine itself packs.
    Kind(code=BIG_INT, unpack=lambda _engine, data: int.from_bytes(data, "little", signed=True)),
    Kind(code=SURROGATES, unpack=lambda _engine, data: str(data, "utf-8", "surrogatepass")),
    Kind(code=ITEMS, unpack=_unpack_items),
    # Single types. Those of datetime come after the rows of the standard library, which are their second form.
    _state(1, tuple, tuple, tuple),
    _set(2, set),
    _set(3, frozenset),
    _state(5, complex, lambda value: [value.real, value.imag], lambda state: complex(*state)),
    _timed(6, dt.datetime),
    _text(7, dt.date, dt.date.fromisoformat, dt.date.isoformat),
    _timed(8, dt.time),
    _state(
        9, dt.timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda it: dt.timedelta(*it)
    ),
    _text(10, uuid.UUID, uuid.UUID),
    _text(11, decimal.Decimal, decimal.Decimal),
    _state(19, range, lambda value: [value.start, value.stop, value.step], lambda state: range(*state)),
    # Families, in the order in which they are tried.
    _family(12, lambda kind: issubclass(kind, enum.Enum), _enum_state, _enum, enum.Enum),
    _family(
        16,
        lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"),
        list,
        lambda _engine, kind, state: kind._make(state),
        tuple,
    ),
    _family(
        15,
        lambda kind: issubclass(kind, msgspec.Struct),
        lambda value: {name: getattr(value, name) for name in value.__struct_fields__},
        lambda _engine, kind, state: kind(**state),
        msgspec.Struct,
    ),
    _family(14, _is_pydantic, lambda value: value.__getstate__(), _pydantic),
    _family(13, _is_dataclass, _dataclass_state, _dataclass),
    Kind(
        code=_PATH,
        matches=lambda _engine, kind: issubclass(kind, pathlib.PurePath),
        pack=_pack_path,
        unpack=_unpack_path,
    ),
)
