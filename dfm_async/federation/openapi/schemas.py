"""Schemas of OpenAPI documents as those of a federation."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection
from typing import Any, Final

from dfm_async.federation.files.documents import REF, Documents
from dfm_async.federation.files.tree import DEEPEST
from dfm_async.federation.files.values import FileValue
from dfm_async.federation.operation import RESERVED
from dfm_async.federation.schemas import JSON_TYPES, REF_START

_WORDS: Final = re.compile(r"[A-Za-z0-9]+")
_OTHER: Final = re.compile(r"[^A-Za-z0-9_]+")
_TAKEN: Final = RESERVED | {"context", "self"}
_LONGEST: Final = 100


def camel(text: str) -> str:
    """Return the name of an operation: its words, each with a capital letter, without what is between them."""
    found = "".join(word[0].upper() + word[1:] for word in _WORDS.findall(text))[:_LONGEST]
    return found if found and not found[0].isdigit() else f"Operation{found}"


def identifier(text: str, *, lower: bool = False) -> str:
    """Return the name of a parameter or a group: one that Python, and calls in a pipeline, have no other use for."""
    found = _OTHER.sub("_", text).strip("_")[:_LONGEST] or "value"
    if lower:
        found = found.lower()
    if found[0].isdigit():
        found = f"p{found}"
    return f"{found}_" if keyword.iskeyword(found) or found in _TAKEN else found


def unused(name: str, used: Collection[str], suffix: str = "") -> str:
    """Return the name, or one like it that is not used yet."""
    if name in used and suffix:
        name = f"{name}_{suffix}"
    found, number = name, 2
    while found in used:
        found = f"{name}_{number}"
        number += 1
    return found


_COPIED: Final[dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("default", "const", "exclusiveMinimum", "exclusiveMaximum"), lambda _: True),
    **dict.fromkeys(("title", "description", "format"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("minimum", "maximum"), lambda value: type(value) in (int, float)),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems"), lambda value: type(value) is int and value >= 0
    ),
    "multipleOf": lambda value: type(value) in (int, float) and value > 0,
    "nullable": lambda value: isinstance(value, bool),
}
"""Keywords that are copied, and whether a value of them is valid; others are left out."""
_GROUPS: Final = ("anyOf", "oneOf", "allOf")


class Schemas:
    """Reads schemas. What is referred to becomes a schema whose name begins with ``group``, so it may refer to itself.

    Documents are written by others, and for more than this: keywords that do not matter here are left out, and none
    of them is a mistake.
    """

    def __init__(self, documents: Documents, group: str, taken: set[str]) -> None:
        self.declared: dict[str, dict[str, Any]] = {}
        """The schemas that others refer to, by their names."""
        self._documents = documents
        self._group = group
        self._taken = taken
        self._names: dict[int, str] = {}

    def follow(self, value: FileValue) -> FileValue | None:
        """Resolve a value that is a reference; None if that is invalid."""
        return self._documents.follow(value, alone=False)

    def read(self, value: FileValue, depth: int = 0) -> dict[str, Any]:
        """Read a schema."""
        if value.has(REF):
            target = self.follow(value)
            return {} if target is None else {"$ref": REF_START + self._named(target)}
        if isinstance(value.node.value, bool) or value.missing:
            return {}
        if depth > DEEPEST:
            value.problem(f"this schema is nested deeper than {DEEPEST} levels")
            return {}
        found: dict[str, Any] = {}
        for key, part in value.mapping("a schema"):
            self._keyword(key, part, found, depth)
        _exclusive(found)
        return found

    def _named(self, target: FileValue) -> str:
        name = self._names.get(id(target.node))
        if name is None:
            file = target.document.name.rpartition("/")[2].partition(".")[0]
            wanted = f"{self._group}.{identifier(target.key or file)}"
            name = self._names[id(target.node)] = unused(wanted, self._taken)
            self._taken.add(name)
            self.declared[name] = {}
            self.declared[name] = self.read(target)
        return name

    def _keyword(self, key: str, value: FileValue, found: dict[str, Any], depth: int) -> None:
        plain = value.node.value
        if key == "type":
            kinds = plain if isinstance(plain, list) else [value.node]
            names = [part.value for part in kinds if part.value in JSON_TYPES]
            if len(names) != len(kinds):
                value.problem(f"the type must be one of {', '.join(JSON_TYPES)}, or a list of them, not {value.kind}")
            elif names:
                found[key] = names if isinstance(plain, list) else names[0]
        elif key in _GROUPS:
            parts = [self.read(part, depth + 1) for part in value.items(key)]
            if parts:
                found[key] = parts
        elif key == "properties":
            found[key] = {name: self.read(part, depth + 1) for name, part in value.mapping(key)}
        elif key in ("items", "additionalProperties"):
            found[key] = plain if isinstance(plain, bool) else self.read(value, depth + 1)
        elif key == "required":
            if isinstance(plain, list):  # some documents wrongly have true or false here, in a property
                found[key] = [part.node.value for part in value.items(key) if isinstance(part.node.value, str)]
        elif key == "enum":
            values = [part.plain() for part in value.items(key)]
            if values:
                found[key] = values
        elif key in _COPIED and _COPIED[key](copied := value.plain()):
            found[key] = copied


def _exclusive(schema: dict[str, Any]) -> None:
    """Convert the exclusive bounds of OpenAPI 3.0, a flag beside the bound, to those of later versions."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = schema.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            del schema[key]
            if value is True and bound in schema:
                schema[key] = schema.pop(bound)
