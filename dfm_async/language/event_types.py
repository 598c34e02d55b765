"""The types of events: JSON data, described by a JSON schema, so that anybody can send them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal

from dfm_async.base.text import shortened

_PLAIN: Final[dict[Any, dict[str, Any]]] = {
    Any: {},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    list: {"type": "array"},
    dict: {"type": "object", "additionalProperties": {}},
    None: {"type": "null"},
}
"""The schemas of types without parts."""
_NAMES: Final = {
    "boolean": "bool",
    "integer": "int",
    "number": "float",
    "string": "str",
    "array": "list",
    "object": "dict",
    "null": "None",
}
_TYPES: Final = "bool, int, float, str, None, Literal, list, dict with str keys, or unions of them"


def schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type whose values are JSON data.

    Raises:
        TypeError: its values are something else.
    """
    try:
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
    except TypeError:  # an unhashable annotation
        raise TypeError(_refusal(hint)) from None
    _check(hint, hint)
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        found = TypeAdapter(hint).json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        raise TypeError(f"{_refusal(hint)} ({error})") from error
    if "$defs" in found:
        raise TypeError(_refusal(hint))
    plain: dict[str, Any] = _closed(found)
    return plain


def type_text(schema: Mapping[str, Any]) -> str:
    """Write the type of a schema as Python would; what has no short text is ``Any``."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return f"Literal[{', '.join(map(repr, values))}]"
    if "anyOf" in schema:
        return " | ".join(type_text(part) for part in schema["anyOf"])
    kind = schema.get("type")
    if kind == "array" and schema.get("items"):
        return f"list[{type_text(schema['items'])}]"
    if kind == "object" and schema.get("additionalProperties"):
        return f"dict[str, {type_text(schema['additionalProperties'])}]"
    return _NAMES.get(kind, "Any") if isinstance(kind, str) else "Any"


def _check(hint: Any, whole: Any) -> None:
    """Raise TypeError unless a type is made of JSON types."""
    if hint is type(None) or (isinstance(hint, type) and hint in _PLAIN):
        return
    if hint is Any or typing.is_typeddict(hint):
        return
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        _check(parts[0], whole)
    elif origin is Literal:
        if not all(isinstance(part, (str, int, type(None))) for part in parts):
            raise TypeError(_refusal(whole))
    elif origin in (typing.Union, types.UnionType) or origin is list:
        for part in parts:
            _check(part, whole)
    elif origin is dict and parts[0] is str:
        _check(parts[1], whole)
    else:
        raise TypeError(_refusal(whole))


def _refusal(hint: Any) -> str:
    return f"type= must be a type of JSON data ({_TYPES}), not {shortened(hint)}"


def _closed(schema: Any) -> Any:
    """Return a schema in which dicts with any values are written as dicts, and without titles that nobody chose."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: {name: _closed(part) for name, part in value.items()} if key == "properties" else _closed(value)
        for key, value in schema.items()
        if key != "title"
    }
    if found.get("additionalProperties") is True:
        found["additionalProperties"] = {}
    return found
