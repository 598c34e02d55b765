"""What is accepted of untrusted data: which classes values may be of, and which keys dicts and sets may have.

A class is accepted if signatures name it, or the fields of an accepted class do. A dict of n keys with the same hash
takes n * n comparisons. Such keys can be made of arrays and extensions, but not of the scalars that our encoder writes
as keys: their hashes are random, or only a few can be the same. So the keys of MessagePack maps are checked before a
dict is built of them.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from dfm_async.model.info import FailureInfo
from dfm_async.model.replies import Reply

_ROOTS: Final = frozenset({*sys.stdlib_module_names, "msgspec", "numpy", "pydantic"})
"""The packages of common base classes: naming one of their classes does not accept all that derive from it."""
_ALWAYS: Final = frozenset(
    {
        pathlib.PurePath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.Path,
        pathlib.PosixPath,
        pathlib.WindowsPath,
        FailureInfo,
        Reply,
    }
)
_SAME_HASH: Final = 32
"""The number of keys of one set or dict that may have the same hash."""
_LARGE: Final = re.compile(rb"\xde[\x01-\xff]|\xdf")
"""The header of a map of more than 255 entries, or bytes that look like one."""
_FIXED: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4,
    **{0xA0 + length: length for length in range(32)},
}  # fmt: skip
"""The number of bytes that follow the first one of scalars, short strings and extensions, and headers of arrays."""
_VARIABLE: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}  # fmt: skip # noqa: E501
"""The number of bytes of the length of long strings, bytes and extensions, and of those between it and the data."""
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}
_ITEMS: Final = re.compile(
    rb"(?:[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]|"
    + b"|".join(re.escape(bytes([first])) + b".{%d}" % length for first, length in _FIXED.items())
    + rb"|\xde\x00.)*+",
    re.DOTALL,
)
"""Everything whose length follows from its first byte, with the headers of arrays and small maps."""


class KnownClasses:
    """The classes that may be built from untrusted data.

    A class is known if a type names it, if a field of a known class does, or if it derives from a known one.

    Args:
        hints: types of parameters and results.
        why_not: why a class is not known, for error messages.
    """

    def __init__(self, hints: Iterable[Any] = (), why_not: str = "no signature of an operation here names it") -> None:
        self.why_not = why_not
        self._exact: set[type] = set(_ALWAYS)
        self._bases: tuple[type, ...] = ()
        for hint in hints:
            self.add(hint)

    def add(self, hint: Any) -> None:
        """Add the classes that a type names."""
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
        """Return whether a class is known."""
        return kind in self._exact or issubclass(kind, self._bases)


def _arguments(hint: Any) -> list[Any]:
    """Return the types between the brackets of a type."""
    found: list[Any] = []
    for part in typing.get_args(hint):
        found += part if isinstance(part, list) else [part]
    if typing.get_origin(hint) in (typing.Literal, None):
        return []
    return [part for part in found if isinstance(part, (type, typing.TypeVar)) or typing.get_origin(part) is not None]


def _fields(kind: type) -> list[Any]:
    """Return the types of the fields of a class, if it has fields."""
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


def check_hashes(keys: Sequence[Any]) -> None:
    """Refuse keys of which many have the same hash.

    Raises:
        ValueError: there are too many.
    """
    if len(keys) <= _SAME_HASH:
        return
    counts: dict[int, int] = {}
    for key in keys:
        found = hash(key)
        count = counts[found] = counts.get(found, 0) + 1
        if count > _SAME_HASH:
            raise ValueError(f"more than {_SAME_HASH} keys of a set or dict have the same hash")


def may_have_large_maps(data: bytes | memoryview) -> bool:
    """Return whether there may be maps of more than 255 entries, in extensions as well."""
    return _LARGE.search(data) is not None


def check_keys(data: bytes | memoryview) -> None:
    """Refuse arrays, maps and extensions as keys, if there is a map of more than 255 entries. Skips extensions.

    Raises:
        ValueError: there are such keys.
    """
    at, end = 0, len(data)
    while (at := _ITEMS.match(data, at).end()) < end:  # type: ignore[union-attr] # it matches nothing, too
        first = data[at]
        if first in _MAPS:
            return _check_all(data)
        if first not in _VARIABLE:  # cut off, or invalid: the decoder reports it
            return None
        at = _behind(data, at, first)
    return None


def _behind(data: bytes | memoryview, at: int, first: int) -> int:
    width, more = _VARIABLE[first]
    return at + 1 + width + more + int.from_bytes(data[at + 1 : at + 1 + width], "big")


def _check_all(data: bytes | memoryview) -> None:
    """Check the keys of all maps, item by item."""
    at, end = 0, len(data)
    # Of the containers around an item: how many items are left, and whether it is a map, where keys have even numbers.
    left, in_map = 1, False
    around: list[tuple[int, bool]] = []
    while at < end:
        while not left:
            if not around:
                return
            left, in_map = around.pop()
        key = in_map and not left & 1
        left -= 1
        first = data[at]
        count = -1
        if 0x80 <= first <= 0x9F:
            count, is_map, at = first & 0x0F, first <= 0x8F, at + 1
        elif first in _ARRAYS or first in _MAPS:
            is_map = first in _MAPS
            width = _MAPS[first] if is_map else _ARRAYS[first]
            count, at = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
        elif key and (0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8):
            raise ValueError("a key of a large map is an extension")
        elif first in _VARIABLE:
            at = _behind(data, at, first)
        else:
            at += 1 + _FIXED.get(first, 0)
        if count >= 0:
            if key:
                raise ValueError("a key of a large map is an array or a map")
            around.append((left, in_map))
            left, in_map = count * 2 if is_map else count, is_map
