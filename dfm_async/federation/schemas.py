"""JSON schemas as Python types: what a parameter may be, and pydantic models."""

from __future__ import annotations

import datetime
import functools
import keyword
import operator
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, ForwardRef, Literal, Union

if TYPE_CHECKING:
    from pydantic import BaseModel

JSON_TYPES: Final = ("string", "number", "integer", "boolean", "array", "object", "null")
"""The types of JSON schemas. An object without properties is any Python object."""
REF_START: Final = "#/schemas/"
"""A schema that refers to another names it so."""

_SCALARS: Final[dict[str, Any]] = {"number": float, "integer": int, "boolean": bool, "null": None}
_FORMATS: Final[dict[str, Any]] = {
    "date-time": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "uuid": uuid.UUID,
}
_LIMITS: Final[dict[str, dict[str, str]]] = {
    "string": {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"},
    "array": {"minItems": "min_length", "maxItems": "max_length"},
    "number": {
        "minimum": "ge",
        "maximum": "le",
        "exclusiveMinimum": "gt",
        "exclusiveMaximum": "lt",
        "multipleOf": "multiple_of",
    },
}
_LIMITS["integer"] = _LIMITS["number"]
_DEEPEST: Final = 32

_MOST_STEPS: Final = 1000
"""How many steps of a schema are read for one type; a larger schema declares nothing."""


def type_of(schema: Mapping[str, Any], models: Models) -> Any:
    """Return the type of a parameter. Objects with properties are dicts that are checked against their model."""

    def checked(name: str | None, found: Mapping[str, Any]) -> Any:
        return Annotated[dict[str, Any], _Checked(models, name, found)]

    return _SchemaTypes(models.declared, checked).of(schema)


def shown(hint: Any) -> Any:
    """Return the type without its limits, for messages and signatures."""
    if typing.get_origin(hint) is Annotated:
        return shown(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Union:
        parts = [shown(part) for part in typing.get_args(hint)]
        try:
            return functools.reduce(operator.or_, parts)
        except TypeError:  # two that have no operator, such as two literals
            return hint
    return hint


def result_type(returns: str) -> Any:
    """Return the type of a result, if its name determines it: whole numbers are numbers, too."""
    if returns in ("number", "integer"):
        return int | float
    return {"string": str, "boolean": bool, "array": list, "null": None}.get(returns, Any)


def optional(hint: Any) -> Any:
    """Return the same type, or None."""
    return _union([hint, None])


class Models(Mapping[str, Any]):
    """The schemas of a federation as pydantic models, each made when it is first requested.

    A schema that is not an object with properties is a plain type: ``Literal["a", "b"]``, ``list[float]``.
    """

    def __init__(self, declared: dict[str, dict[str, Any]]) -> None:
        self.declared = declared
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            schema = self.declared[name]
            if _has_properties(schema):
                self._make(name)
            else:
                self._made[name] = _SchemaTypes(self.declared, lambda inner, found: self._inner(inner, name, found)).of(
                    schema
                )
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.declared)

    def __len__(self) -> int:
        return len(self.declared)

    def _inner(self, name: str | None, outer: str, schema: Mapping[str, Any]) -> Any:
        return self[name] if name is not None else self.inner(f"{outer}_item", schema)

    def inner(self, name: str, schema: Mapping[str, Any]) -> Any:
        """Return the model of an object inside another schema."""
        return Models({**self.declared, name: dict(schema)})[name]

    def _make(self, name: str) -> None:
        """Make a model and all that it refers to: each names the others, and they are put together at the end."""
        wanted, made = [name], {}
        while wanted:
            name = wanted.pop()
            if name not in self._made:
                self._made[name] = made[name] = _ModelBuilder(self.declared, wanted).model(name, self.declared[name])
        by_reference = {_reference(known): found for known, found in self._made.items()}
        for model in made.values():
            model.model_rebuild(_types_namespace=by_reference)


class _ModelBuilder:
    """Build one model and those of the objects inside it; names of other schemas are added to ``wanted``."""

    def __init__(self, declared: Mapping[str, Mapping[str, Any]], wanted: list[str]) -> None:
        self._wanted = wanted
        self._types = _SchemaTypes(declared, self._object)
        self._within: list[str] = []

    def _object(self, name: str | None, schema: Mapping[str, Any]) -> Any:
        if name is None:
            return self.model(self._within[-1], schema) if len(self._within) < _DEEPEST else Any
        self._wanted.append(name)
        return ForwardRef(_reference(name))

    def model(self, name: str, schema: Mapping[str, Any]) -> type[BaseModel]:
        from pydantic import BaseModel, ConfigDict, Field, create_model

        needed = set(schema.get("required", ()))
        fields: dict[str, Any] = {}
        for index, (key, part) in enumerate(schema["properties"].items()):
            self._within.append(f"{name}_{key}")
            hint = self._types.of(part)
            self._within.pop()
            field, alias = _field_name(key, index, BaseModel)
            about: dict[str, Any] = {"alias": alias, "description": part.get("description")}
            if key in needed:
                fields[field] = (hint, Field(..., **about))
            else:
                fields[field] = (optional(hint), Field(part.get("default"), **about))
        extra: Literal["forbid", "allow"] = "forbid" if schema.get("additionalProperties") is False else "allow"
        module, _, short = name.rpartition(".")
        made: type[BaseModel] = create_model(
            short,
            __config__=ConfigDict(extra=extra, protected_namespaces=(), populate_by_name=True, defer_build=True),
            __module__=module or "schemas",
            __doc__=schema.get("description"),
            **fields,
        )
        made.__dfm_schema__ = name  # type: ignore[attr-defined] # marks that it is sent as plain data
        return made


class _Checked:
    """Makes pydantic check a dict, or an object of the model, against a schema; what comes out is a dict."""

    def __init__(self, models: Models, name: str | None, schema: Mapping[str, Any]) -> None:
        self._models = models
        self._name = name
        self._schema = schema

    def __repr__(self) -> str:
        return self._name or "an object"

    def __get_pydantic_core_schema__(self, _source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        models, name = self._models, self._name
        try:
            found = handler.generate_schema(models.inner("Value", self._schema) if name is None else models[name])
        except RecursionError:  # schemas that refer to each other over hundreds of steps: nothing is checked
            return core_schema.any_schema()
        return core_schema.no_info_after_validator_function(plain_data, found)


def plain_data(value: Any) -> Any:
    """Return objects of models that a file declares, as dicts: sites do not have their classes."""
    if hasattr(type(value), "__dfm_schema__"):
        return value.model_dump(by_alias=True, exclude_unset=True)
    if type(value) is list:
        return [plain_data(part) for part in value]
    return value


class _SchemaTypes:
    """Finds the type of a schema. What refers to itself without an object in between ends at the limit of steps.

    ``object_type`` makes the type of an object with properties, from the name of its schema, if it has one, and the
    schema.
    """

    def __init__(
        self, declared: Mapping[str, Mapping[str, Any]], object_type: Callable[[str | None, Mapping[str, Any]], Any]
    ) -> None:
        self._declared = declared
        self._object = object_type
        self._left = _MOST_STEPS

    def of(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            return Any
        ref = schema.get("$ref")
        if isinstance(ref, str):
            name = ref.removeprefix(REF_START)
            found = self._declared.get(name, {})
            return self._object(name, found) if _has_properties(found) else self.of(found, depth + 1)
        if "const" in schema or "enum" in schema:
            return _literal([schema["const"]] if "const" in schema else schema["enum"])
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return _union([self.of(part, depth + 1) for part in schema[key]])
        parts = schema.get("allOf")
        if parts:
            return self.of(parts[0], depth + 1) if len(parts) == 1 else Any
        kinds = schema.get("type")
        if kinds is None:
            return self._object(None, schema) if _has_properties(schema) else Any
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if schema.get("nullable") is True:
            kinds = [*kinds, "null"]
        return _union([self._limited(kind, schema, depth) for kind in kinds])

    def _limited(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        found = self._single(kind, schema, depth)
        limits = {ours: schema[theirs] for theirs, ours in _LIMITS.get(kind, {}).items() if theirs in schema}
        if not limits or found is Any:
            return found
        if kind == "string":
            found = str  # dates have no length
        from pydantic import Field

        return Annotated[found, Field(**limits)]

    def _single(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "string":
            other = _FORMATS.get(schema.get("format", ""))
            return str if other is None else str | other
        if kind == "array":
            items = schema.get("items")
            inner = self.of(items, depth + 1) if isinstance(items, Mapping) else Any
            return list if inner is Any else list[inner]  # type: ignore[valid-type] # made at run time
        if kind == "object":
            if _has_properties(schema):
                return self._object(None, schema)
            values = schema.get("additionalProperties")
            # Without anything about its content it is any Python object.
            return dict[str, self.of(values, depth + 1)] if isinstance(values, Mapping) else Any  # type: ignore[misc]
        return _SCALARS.get(kind, Any)  # the path of a model is not resolved here


def _has_properties(schema: Mapping[str, Any]) -> bool:
    return schema.get("type", "object") == "object" and bool(schema.get("properties"))


def _literal(values: list[Any]) -> Any:
    if all(isinstance(value, (str, int, type(None))) for value in values):
        return Literal[tuple(values)]
    return Any


def _union(types: list[Any]) -> Any:
    if any(found is Any for found in types):
        return Any
    return Union[tuple(types)]  # noqa: UP007 - made at run time


def _reference(name: str) -> str:
    return "Schema_" + name.replace("_", "__").replace(".", "_")


def _field_name(key: str, index: int, base: type) -> tuple[str, str | None]:
    """Return the attribute for a key, and the key itself if it cannot be one."""
    if not key.isidentifier() or keyword.iskeyword(key) or key.startswith("_") or key.startswith("model_"):
        return f"field_{index}", key
    return (f"{key}_", key) if hasattr(base, key) else (key, None)
