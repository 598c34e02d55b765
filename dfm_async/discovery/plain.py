"""Values as JSON holds them, and whether two of them are the same there."""

from __future__ import annotations

import datetime as dt
import reprlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["plain", "same", "short"]

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 12


def plain(value: Any) -> Any:
    """Gives a value as plain data that JSON can hold.

    Raises:
        TypeError: it is something that JSON has no form for.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return plain(dump(mode="json"))
    for kind in (str, bool, int, float):  # subclasses, such as numpy's float64
        if isinstance(value, kind):
            return kind(value)
    item = getattr(value, "tolist", None)
    if callable(item) and not isinstance(value, type):  # scalars and arrays of numpy
        return plain(item())
    name = type(value).__qualname__
    raise TypeError(f"advice is plain data that JSON can hold, and a value of type {name} is not: {short(value)}")


def same(one: Any, other: Any) -> bool:
    """Tells whether two values are the same in JSON: 1 is 1.0, but not true."""
    try:
        return _same(plain(one), plain(other))
    except TypeError:
        return bool(one == other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(item, other[key]) for key, item in one.items())
    return bool(one == other)


def short(value: Any) -> str:
    """A value in a few words, whatever it is."""
    try:
        return _short.repr(value)
    except Exception as error:  # noqa: BLE001 - the value's own code runs here
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
