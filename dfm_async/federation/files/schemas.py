"""Schemas of files: checks them, and makes them stand on their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dfm_async.federation.files.documents import REF, Documents
from dfm_async.federation.files.tree import DEEPEST
from dfm_async.federation.files.values import Value, close_to
from dfm_async.federation.schemas import JSON_TYPES, REF_START

__all__ = ["INPUTS", "SchemaReader", "is_path"]

INPUTS: Final = ("accepts_literal_input", "accepts_node_input", "accepts_place_input", "discoverable")
"""What kinds of input a parameter takes; all by default."""

_REPEATED: Final = 100
"""As how many parts of a file a schema counts that has no name, and is put in the place of a reference."""

_GROUPS: Final = ("anyOf", "oneOf", "allOf")
_TABLES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE: Final = (
    "items",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "additionalItems",
)
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OTHERS: Final = (
    "type",
    "description",
    "title",
    "default",
    "enum",
    "const",
    "format",
    "pattern",
    "required",
    "nullable",
    "uniqueItems",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
    "externalDocs",
    "xml",
    "prefixItems",
    "dependentRequired",
    "contentEncoding",
    "contentMediaType",
)
_KNOWN: Final = (*_OTHERS, *_COUNTS, *_BOUNDS, *_GROUPS, *_TABLES, *_SINGLE)
_PYTHON: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "null": (type(None),),
}


class SchemaReader:
    """Reads schemas. Where one refers to a named schema, the name is kept; everything else is put in its place.

    Args:
        documents: the files.
        names: the name of each named schema, by the identity of its node.
    """

    def __init__(self, documents: Documents, names: Mapping[int, str]) -> None:
        self._documents = documents
        self._names = names

    def parameter(self, value: Value) -> dict[str, Any]:
        """Reads the schema of a parameter, with what kinds of input it accepts."""
        found = self._read(value, (), named=True, inputs=True)
        if not any(found.get(name, True) for name in INPUTS[:3]):
            value.problem(
                "this parameter accepts nothing: let one of accepts-literal-input, accepts-node-input, "
                "accepts-place-input be true"
            )
        if "default" in found:
            _check_default(value, found)
        return found

    def schema(self, value: Value) -> dict[str, Any]:
        """Reads a named schema."""
        return self._read(value, (), named=False, inputs=False)

    def _read(
        self, value: Value, active: tuple[int, ...], *, named: bool = True, inputs: bool = False
    ) -> dict[str, Any]:
        if named and id(value.node) in self._names:
            return {"$ref": REF_START + self._names[id(value.node)]}
        if id(value.node) in active:
            value.problem("this schema contains itself: give it a name in schemas, and refer to that")
            return {}
        if len(active) >= DEEPEST:
            value.problem(f"this schema is nested deeper than {DEEPEST} levels, with what it refers to")
            return {}
        if not isinstance(value.node.value, dict):
            value.problem(f"a schema must be a mapping, such as {{type: number}}, not {value.kind}")
            return {}
        active = (*active, id(value.node))
        found: dict[str, Any] = {}
        if value.has(REF):
            target = self._documents.referred(value)
            if target is not None:
                if id(target.node) not in self._names:  # it is put in the place of the reference, each time
                    value.document.ledger.spend(_REPEATED, value)
                found = self._read(target, active, inputs=inputs)
        for key, part in value.mapping("a schema"):
            if key == REF:
                continue
            plain = key.replace("-", "_")
            if inputs and plain in INPUTS:
                flag = part.flag(key)
                if flag is not None:
                    found[plain] = flag
            elif key in _KNOWN:
                self._keyword(key, part, active, found)
            elif key.startswith(("x-", "$")):
                found[key] = part.plain()
            else:
                known = (*_KNOWN, *INPUTS) if inputs else _KNOWN
                value.problem_at_key(
                    key,
                    f"a schema has no key {key!r}{close_to(plain, known)}. Allowed are the keys "
                    "of JSON schemas" + (f" and {', '.join(INPUTS)}" if inputs else ""),
                )
        return found

    def _keyword(self, key: str, value: Value, active: tuple[int, ...], found: dict[str, Any]) -> None:
        if key == "type":
            kinds = _types(value)
            if kinds is not None:
                found[key] = kinds
        elif key in _TABLES:
            found[key] = {name: self._read(part, active) for name, part in value.mapping(key)}
        elif key in _SINGLE and not isinstance(value.node.value, bool):
            found[key] = self._read(value, active)
        elif key in _GROUPS or key == "prefixItems":
            parts = [self._read(part, active) for part in value.items(key)]
            if parts:
                found[key] = parts
        elif key in _COUNTS:
            count = value.number(key, whole=True)
            if count is not None:
                found[key] = count
        elif key in _BOUNDS:
            bound = value.number(key, positive=key == "multipleOf", signed=True)
            if bound is not None:
                found[key] = bound
        elif key in ("description", "title", "format", "pattern"):
            text = value.text(key)
            if text is not None and (key != "pattern" or _can_match(value, text)):
                found[key] = text
        elif key == "required":
            names = [name for part in value.items(key) if (name := part.text("the name of a property")) is not None]
            found[key] = names
        elif key == "enum":
            values = [part.plain() for part in value.items(key)]
            if values:
                found[key] = values
            elif isinstance(value.node.value, list):
                value.problem("enum must list at least one value")
        else:
            found[key] = value.plain()


def is_path(text: str) -> bool:
    """Tells whether a text can be the path of something in Python: identifiers with dots between them."""
    return all(part.isidentifier() for part in text.split("."))


def _types(value: Value) -> str | list[str] | None:
    if isinstance(value.node.value, list):
        found = [name for part in value.items("type") if (name := _single_type(part)) is not None]
        if not value.node.value:
            value.problem("type must name at least one type")
        return found or None
    return _single_type(value)


def _single_type(value: Value) -> str | None:
    text = value.text("type") if not value.missing else "null"
    if text is None or text in JSON_TYPES or ("." in text and is_path(text)):
        return text
    value.problem(
        f"there is no type {text!r}{close_to(text, JSON_TYPES)}. Allowed are: {', '.join(JSON_TYPES)}, and "
        "the path of a pydantic model, such as pkg.mod.Model"
    )
    return None


def _can_match(value: Value, pattern: str) -> bool:
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError:
        value.problem(
            f"{pattern[:60]!r} is no pattern that can be matched in bounded time: look-around and "
            "back-references are not allowed"
        )
        return False
    return True


def _check_default(value: Value, schema: Mapping[str, Any]) -> None:
    kinds = schema.get("type")
    if kinds is None or schema["default"] is None:
        return
    kinds = [kinds] if isinstance(kinds, str) else kinds
    default = schema["default"]
    if not all(kind in _PYTHON for kind in kinds):
        return  # an object can be anything
    number = isinstance(default, bool) and "boolean" not in kinds
    if number or not any(isinstance(default, _PYTHON[kind]) for kind in kinds):
        (value.get("default") or value).problem(f"the default {default!r} is not of type {' or '.join(kinds)}")
