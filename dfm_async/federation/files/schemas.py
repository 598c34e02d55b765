"""Schemas of files: checks them, and resolves their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dfm_async.federation.files.documents import REF, Documents
from dfm_async.federation.files.tree import DEEPEST
from dfm_async.federation.files.values import FileValue, close_to
from dfm_async.federation.schemas import JSON_TYPES, REF_START

INPUTS: Final = ("accepts_literal_input", "accepts_node_input", "accepts_place_input", "discoverable")
"""What kinds of input a parameter takes; all by default."""

_REPEATED: Final = 100
"""As how many parts of a file a schema counts that has no name, and is put in the place of a reference."""

_GROUPS: Final = ("anyOf", "oneOf", "allOf")
_TABLES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE: Final = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")
_CONDITIONS: Final = ("not", "if", "then", "else")
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS: Final = ("description", "title", "format", "pattern")
_DATA: Final = (
    *("default", "const", "example", "examples", "nullable", "uniqueItems", "deprecated", "readOnly", "writeOnly"),
    *("dependentRequired", "contentEncoding", "contentMediaType", "discriminator", "externalDocs", "xml"),
)
"""Keywords that are kept as they are."""
_OTHERS: Final = ("type", "required", "enum", "prefixItems")
_KNOWN: Final = (*_DATA, *_OTHERS, *_TEXTS, *_COUNTS, *_BOUNDS, *_GROUPS, *_TABLES, *_SINGLE, *_CONDITIONS)
_PYTHON: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "null": (type(None),),
}


class SchemaReader:
    """Reads schemas. References to schemas in ``names`` (by node) stay references; others are resolved in place."""

    def __init__(self, documents: Documents, names: Mapping[int, str]) -> None:
        self._documents = documents
        self._names = names

    def parameter(self, value: FileValue) -> dict[str, Any]:
        """Read the schema of a parameter, with what kinds of input it accepts."""
        found = self._read(value, (), named=True, inputs=True)
        if not any(found.get(name, True) for name in INPUTS[:3]):
            value.problem(
                "this parameter accepts no input: set one of accepts-literal-input, accepts-node-input, "
                "accepts-place-input to true"
            )
        if "default" in found:
            _check_default(value, found)
        return found

    def schema(self, value: FileValue) -> dict[str, Any]:
        """Read a named schema."""
        return self._read(value, (), named=False, inputs=False)

    def _read(
        self, value: FileValue, active: tuple[int, ...], *, named: bool = True, inputs: bool = False
    ) -> dict[str, Any]:
        if named and id(value.node) in self._names:
            return {"$ref": REF_START + self._names[id(value.node)]}
        if id(value.node) in active:
            value.problem("this schema contains itself: name it in schemas, and refer to the name")
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
            elif key in _DATA or (key not in _KNOWN and key.startswith(("x-", "$"))):
                found[key] = part.plain()
            elif key in _KNOWN:
                read = self._keyword(key, part, active)
                if read is not None:
                    found[key] = read
            else:
                known = (*_KNOWN, *INPUTS) if inputs else _KNOWN
                value.problem_at_key(
                    key,
                    f"a schema has no key {key!r}{close_to(plain, known)}. Allowed are the keys "
                    "of JSON schemas" + (f" and {', '.join(INPUTS)}" if inputs else ""),
                )
        return found

    def _keyword(self, key: str, value: FileValue, active: tuple[int, ...]) -> Any:
        """Return what a keyword holds; None if it is invalid or empty."""
        if key == "type":
            return read_types(value)
        if key in _TABLES:
            return {name: self._read(part, active) for name, part in value.mapping(key)}
        if key in _GROUPS or key == "prefixItems":
            return [self._read(part, active) for part in value.items(key)] or None
        if key in _COUNTS or key in _BOUNDS:
            return value.number(key, positive=key == "multipleOf", whole=key in _COUNTS, signed=key in _BOUNDS)
        if key in _TEXTS:
            text = value.text(key)
            return text if text is None or key != "pattern" or _can_match(value, text) else None
        if key == "required":
            names = (part.text("the name of a property") for part in value.items(key))
            return [name for name in names if name is not None]
        if key == "enum":
            values = [part.plain() for part in value.items(key)]
            if not values and isinstance(value.node.value, list):
                value.problem("enum must list at least one value")
            return values or None
        return value.plain() if isinstance(value.node.value, bool) else self._read(value, active)


def is_path(text: str) -> bool:
    """Return whether a text can be the path of something in Python: identifiers with dots between them."""
    return all(part.isidentifier() for part in text.split("."))


def type_name(value: FileValue, what: str) -> str | None:
    """Read the name of a type: one of JSON schemas, or the path of a class."""
    found = value.text(what)
    if found is not None and not is_path(found):
        value.problem(f"{what} must name a type, such as string or pkg.mod.Model, not {found!r}")
    return found


def read_types(value: FileValue) -> str | list[str] | None:
    """Read a type of JSON schemas, or a list of them."""
    if isinstance(value.node.value, list):
        found = [name for part in value.items("type") if (name := _single_type(part)) is not None]
        if not value.node.value:
            value.problem("type must name at least one type")
        return found or None
    return _single_type(value)


def _single_type(value: FileValue) -> str | None:
    text = value.text("type") if not value.missing else "null"
    if text is None or text in JSON_TYPES or ("." in text and is_path(text)):
        return text
    value.problem(
        f"unknown type {text!r}{close_to(text, JSON_TYPES)}. Allowed are: {', '.join(JSON_TYPES)}, and "
        "the path of a pydantic model, such as pkg.mod.Model"
    )
    return None


def _can_match(value: FileValue, pattern: str) -> bool:
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError:
        value.problem(
            f"{pattern[:60]!r} is not a pattern that can be matched in bounded time: look-around and "
            "back-references are not allowed"
        )
        return False
    return True


def _check_default(value: FileValue, schema: Mapping[str, Any]) -> None:
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
