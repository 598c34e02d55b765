"""The keys of untrusted MessagePack maps, checked before a dict is built of them.

A dict of n keys with the same hash takes n * n comparisons. Such keys can be made of arrays and extensions, but not of
the scalars that our encoder writes as keys: their hashes are random, or only a few can be the same.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["check_keys", "may_have_large_maps"]

_LARGE: Final = re.compile(rb"\xde[\x01-\xff]|\xdf")
"""The header of a map of more than 255 entries, or bytes that look like one."""
_FIXED: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4,
    **{0xA0 + length: length for length in range(32)},
}  # fmt: skip
"""How many bytes follow the first one of scalars, short strings and extensions, and headers of arrays."""
_VARIABLE: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}  # fmt: skip # noqa: E501
"""How many bytes tell the length of long strings, bytes and extensions, and how many more follow."""
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}
_ITEMS: Final = re.compile(
    rb"(?:[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]|"
    + b"|".join(re.escape(bytes([first])) + b".{%d}" % length for first, length in _FIXED.items())
    + rb"|\xde\x00.)*+",
    re.DOTALL,
)
"""Everything whose length follows from its first byte, with the headers of arrays and small maps."""


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
