"""Values of the standard library as plain data, and back: containers, fractions, addresses, times with zones.

What is read may come from anywhere: every class is in a table here, and every argument is checked before it is used.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Any, Final

__all__ = ["STANDARD", "offset_arguments", "rebuild", "state_of"]

_ADDRESSES: Final = (IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
_FACTORIES: Final[tuple[Callable[[], Any], ...]] = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(Counter, OrderedDict, deque),
)
_FACTORY_OF: Final = {factory.__name__: factory for factory in _FACTORIES}
_LARGEST_PART: Final = 1 << 17
"""How many bits the numbers of a fraction may have: reducing larger ones would take long."""
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,3}")
"""The names of time zones. They are looked up as files below the folders of the time zone data."""


def state_of(value: Any) -> tuple[str, Any]:
    """Gives the name and the state of a value whose type is in :data:`STANDARD`.

    Raises:
        TypeError: this one cannot be told as plain data.
    """
    kind = type(value)
    return kind.__name__, _STATES[kind](value)


def rebuild(name: str, state: Any) -> Any:
    """Makes a value of what :func:`state_of` gave.

    Raises:
        TypeError: nothing gives such a state.
        ValueError: the same.
        LookupError: there is no such type, or no such time zone here.
    """
    return _BUILDERS[name](state)


def offset_arguments(zone: dt.timezone) -> tuple[Any, ...]:
    """What a fixed offset was made of: the offset, and its name if it has one of its own."""
    found: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]
    return found


def _zone_state(zone: dt.tzinfo | None) -> Any:
    return zone if type(zone) is dt.timezone else _zone_name(zone)


def _zone_name(zone: dt.tzinfo | None) -> str:
    key = zone.key if type(zone) is zoneinfo.ZoneInfo else None
    if key is None or not _ZONE.fullmatch(key):
        raise TypeError(f"its time zone {zone!r} is neither a fixed offset nor a zoneinfo.ZoneInfo with a name")
    return key


def _any_zone(state: Any) -> dt.tzinfo:
    return state if type(state) is dt.timezone else _zone(state)


def _zone(name: Any) -> zoneinfo.ZoneInfo:
    if not isinstance(name, str) or not _ZONE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a time zone")
    return zoneinfo.ZoneInfo(name)


def _datetime(state: Any) -> dt.datetime:
    text, fold, zone = state
    return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_any_zone(zone))


def _time(state: Any) -> dt.time:
    text, fold, zone = state
    return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=_any_zone(zone))


def _offset(state: Any) -> dt.timezone:
    offset, *name = state
    return dt.timezone(offset, *name)


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    if factory not in _FACTORIES:
        known = ", ".join(sorted(_FACTORY_OF))
        raise TypeError(f"its default_factory {factory!r} is none of {known}")
    return str(factory.__name__)


def _default_dict(state: Any) -> defaultdict[Any, Any]:
    name, items = state
    return defaultdict(None if name is None else _FACTORY_OF[name], _mapping(items))


def _deque(state: Any) -> deque[Any]:
    items, longest = state
    if not isinstance(items, list) or (longest is not None and len(items) > longest):
        raise ValueError("this is not the state of a deque")
    return deque(items, longest)


def _parts(value: Fraction) -> list[int]:
    parts = [value.numerator, value.denominator]
    if max(part.bit_length() for part in parts) > _LARGEST_PART:
        raise TypeError(f"its numbers have more than {_LARGEST_PART:,} bits")
    return parts


def _fraction(state: Any) -> Fraction:
    for part in state:
        if type(part) is not int or part.bit_length() > _LARGEST_PART:
            raise ValueError("this is not the state of a fraction")
    return Fraction(*state)


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


_STATES: Final[dict[type, Callable[[Any], Any]]] = {
    Counter: dict,
    OrderedDict: dict,
    defaultdict: lambda value: [_factory_name(value), dict(value)],
    deque: lambda value: [list(value), value.maxlen],
    Fraction: _parts,
    dt.datetime: lambda value: [value.replace(tzinfo=None).isoformat(), value.fold, _zone_state(value.tzinfo)],
    dt.time: lambda value: [value.replace(tzinfo=None).isoformat(), value.fold, _zone_state(value.tzinfo)],
    dt.timezone: lambda value: list(offset_arguments(value)),
    zoneinfo.ZoneInfo: _zone_name,
    **dict.fromkeys(_ADDRESSES, str),
}
_BUILDERS: Final[dict[str, Callable[[Any], Any]]] = {
    "Counter": lambda state: Counter(_mapping(state)),
    "OrderedDict": lambda state: OrderedDict(_mapping(state)),
    "defaultdict": _default_dict,
    "deque": _deque,
    "Fraction": _fraction,
    "datetime": _datetime,
    "time": _time,
    "timezone": _offset,
    "ZoneInfo": _zone,
    **{kind.__name__: _address(kind) for kind in _ADDRESSES},
}
STANDARD: Final = frozenset(_STATES)
"""The types that this module knows; exactly these, and no types that derive from them."""
