"""Schemas of OpenAPI documents as those of a federation."""

from __future__ import annotations

from typing import Any, Final

from dfm_async.federation.files.documents import REF, Documents
from dfm_async.federation.files.tree import DEEPEST
from dfm_async.federation.files.values import Value
from dfm_async.federation.openapi.names import identifier, unused
from dfm_async.federation.schemas import JSON_TYPES, REF_START

__all__ = ["Schemas"]

_COPIED: Final = (
    "title",
    "description",
    "default",
    "const",
    "format",
    "nullable",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "multipleOf",
)
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS: Final = ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum")
_GROUPS: Final = ("anyOf", "oneOf", "allOf")


class Schemas:
    """Reads schemas. What is referred to becomes a schema with a name, so it may refer to itself.

    Documents are written by others, and for more than this: keywords that do not matter here are left out, and none
    of them is a mistake.

    Args:
        documents: the files.
        group: what names begin with.
        taken: names that the federation has already.
    """

    def __init__(self, documents: Documents, group: str, taken: set[str]) -> None:
        self.declared: dict[str, dict[str, Any]] = {}
        """The schemas that others refer to, by their names."""
        self._documents = documents
        self._group = group
        self._taken = taken
        self._names: dict[int, str] = {}

    def follow(self, value: Value) -> Value | None:
        """What a value stands for, if it is a reference; None if that is wrong."""
        seen: set[int] = set()
        while value.has(REF):
            if id(value.node) in seen:
                value.problem("this reference leads back to itself")
                return None
            seen.add(id(value.node))
            found = self._documents.referred(value)
            if found is None:
                return None
            value = found
        return value

    def read(self, value: Value, depth: int = 0) -> dict[str, Any]:
        """Reads a schema."""
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

    def _named(self, target: Value) -> str:
        name = self._names.get(id(target.node))
        if name is None:
            file = target.document.name.rpartition("/")[2].partition(".")[0]
            wanted = f"{self._group}.{identifier(target.key or file)}"
            name = self._names[id(target.node)] = unused(wanted, self._taken)
            self._taken.add(name)
            self.declared[name] = {}
            self.declared[name] = self.read(target)
        return name

    def _keyword(self, key: str, value: Value, found: dict[str, Any], depth: int) -> None:
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
            if isinstance(plain, list):  # in a property it is said with true or false, by mistake
                found[key] = [part.node.value for part in value.items(key) if isinstance(part.node.value, str)]
        elif key == "enum":
            values = [part.plain() for part in value.items(key)]
            if values:
                found[key] = values
        elif key in _COPIED or key in _BOUNDS:
            copied = value.plain()
            if _makes_sense(key, copied):
                found[key] = copied


def _makes_sense(key: str, value: Any) -> bool:
    if key in _COUNTS:
        return type(value) is int and value >= 0
    if key == "multipleOf":
        return type(value) in (int, float) and value > 0
    if key in ("minimum", "maximum"):
        return type(value) in (int, float)
    if key in ("description", "title", "format"):
        return isinstance(value, str)
    if key == "nullable":
        return isinstance(value, bool)
    return True


def _exclusive(schema: dict[str, Any]) -> None:
    """In OpenAPI 3.0, a bound is exclusive by a word beside it; later, that word is the bound."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = schema.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            del schema[key]
            if value is True and bound in schema:
                schema[key] = schema.pop(bound)
