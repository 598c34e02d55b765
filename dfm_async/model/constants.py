"""Constants that others can use without changing them: what can be changed is copied for each use."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, Final

_FIXED: Final = frozenset(
    {
        *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range),
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone, zoneinfo.ZoneInfo),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
        *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    }
)
"""Types whose objects are immutable."""


def copier(value: Any) -> Callable[[], Any] | None:
    """Return a function that copies the mutable parts of a value; None if nothing of it is mutable.

    A value that cannot be copied stays what it is.
    """
    kind = type(value)
    if kind in _FIXED or isinstance(value, (enum.Enum, type)):
        return None
    if kind is list:
        return _list_copier(value)
    if kind is dict:
        return _dict_copier(value)
    if kind in (tuple, frozenset) or (isinstance(value, tuple) and not hasattr(value, "__dict__")):
        if all(copier(item) is None for item in value):
            return None
    elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        fields = [getattr(value, found.name, None) for found in dataclasses.fields(value)]
        if all(copier(item) is None for item in [*fields, *getattr(value, "__dict__", {}).values()]):
            return None
    elif kind is set and all(copier(item) is None for item in value):
        return value.copy  # type: ignore[no-any-return]
    try:
        copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - the user's own classes, which may not be made for it
        return None
    return lambda: copy.deepcopy(value)


def _list_copier(value: list[Any]) -> Callable[[], Any]:
    parts = [copier(item) for item in value]
    if not any(parts):
        return value.copy
    pairs = list(zip(value, parts, strict=True))
    return lambda: [item if part is None else part() for item, part in pairs]


def _dict_copier(value: dict[Any, Any]) -> Callable[[], Any]:
    parts = [copier(item) for item in value.values()]
    if not any(parts):
        return value.copy
    entries = list(zip(value.items(), parts, strict=True))
    return lambda: {key: item if part is None else part() for (key, item), part in entries}


def fresh(value: Any) -> Any:
    """Return a constant for one use: code that changes it changes only its own copy."""
    made = copier(value)
    return value if made is None else made()
