"""Which classes the values of others may be of: those that signatures name, and what their fields name in turn."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import sys
import typing
from collections.abc import Iterable
from typing import Any, Final

import msgspec

__all__ = ["KnownClasses"]

_ROOTS: Final = frozenset({*sys.stdlib_module_names, "msgspec", "numpy", "pydantic"})
"""Where classes come from that everybody derives from: naming one does not mean all of them."""
_ALWAYS: Final = frozenset(
    {
        pathlib.PurePath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.Path,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    }
)


class KnownClasses:
    """Classes that may be built from what others have sent.

    A class is known if a type names it, if a field of a known class does, or if it derives from a known one.

    Args:
        hints: types of parameters and results.
        why_not: why a class is not known, for those who read of one.
    """

    def __init__(self, hints: Iterable[Any] = (), why_not: str = "no signature of an operation here names it") -> None:
        self.why_not = why_not
        self._exact: set[type] = set(_ALWAYS)
        self._bases: tuple[type, ...] = ()
        for hint in hints:
            self.add(hint)

    def add(self, hint: Any) -> None:
        """Adds the classes that a type names."""
        waiting = [hint]
        while waiting:
            found = waiting.pop()
            if isinstance(found, typing.TypeVar):
                waiting += [found.__bound__, *found.__constraints__]
            elif isinstance(found, type) and typing.get_origin(found) is None:
                if found not in self._exact:
                    self._exact.add(found)
                    waiting += _fields(found)
                    if found.__module__.partition(".")[0] not in _ROOTS and not getattr(found, "_is_protocol", False):
                        self._bases += (found,)
            elif typing.get_origin(found) is not None:
                waiting += [typing.get_origin(found), *_arguments(found)]

    def allows(self, kind: type) -> bool:
        """Whether a class is known."""
        return kind in self._exact or issubclass(kind, self._bases)


def _arguments(hint: Any) -> list[Any]:
    """What stands between the brackets of a type, and is one."""
    found: list[Any] = []
    for part in typing.get_args(hint):
        found += part if isinstance(part, list) else [part]
    if typing.get_origin(hint) in (typing.Literal, None):
        return []
    return [part for part in found if isinstance(part, (type, typing.TypeVar)) or typing.get_origin(part) is not None]


def _fields(kind: type) -> list[Any]:
    """The types of the fields of a class, if it is one that has fields."""
    is_data = (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, (msgspec.Struct, tuple))
        or hasattr(kind, "__pydantic_fields__")
        or typing.is_typeddict(kind)
    )
    if not is_data or issubclass(kind, enum.Enum):
        return []
    try:
        return list(typing.get_type_hints(kind).values())
    except Exception:  # noqa: BLE001 - annotations can hold anything; one that cannot be read names nothing
        return []
