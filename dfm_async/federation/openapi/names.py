"""Names of OpenAPI documents as names of Python."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from typing import Final

from dfm_async.federation.operation import RESERVED

__all__ = ["camel", "group_of", "identifier", "unused"]

_WORDS: Final = re.compile(r"[A-Za-z0-9]+")
_OTHER: Final = re.compile(r"[^A-Za-z0-9_]+")
_TAKEN: Final = RESERVED | {"context", "self"}
_LONGEST: Final = 100


def camel(text: str) -> str:
    """The name of an operation: its words, each with a capital letter, without what is between them."""
    found = "".join(word[0].upper() + word[1:] for word in _WORDS.findall(text))[:_LONGEST]
    return found if found and not found[0].isdigit() else f"Operation{found}"


def identifier(text: str, *, lower: bool = False) -> str:
    """The name of a parameter: one that Python, and calls in a pipeline, have no other use for."""
    found = _OTHER.sub("_", text).strip("_")[:_LONGEST] or "value"
    if lower:
        found = found.lower()
    if found[0].isdigit():
        found = f"p{found}"
    return f"{found}_" if keyword.iskeyword(found) or found in _TAKEN else found


def group_of(title: str) -> str:
    """The name of a group of operations."""
    return identifier(title, lower=True)


def unused(name: str, used: Collection[str], suffix: str = "") -> str:
    """The name, or one like it that is not used yet."""
    if name in used and suffix:
        name = f"{name}_{suffix}"
    found, number = name, 2
    while found in used:
        found = f"{name}_{number}"
        number += 1
    return found
