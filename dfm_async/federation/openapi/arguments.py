"""What operations of a document take: parameters and bodies, with their names in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast

from dfm_async.federation.files.values import Value
from dfm_async.federation.openapi.names import identifier, unused
from dfm_async.federation.openapi.schemas import Schemas
from dfm_async.federation.schemas import REF_START
from dfm_async.model.http import FRAMING, Argument, Payload

__all__ = ["Taken", "read_body", "read_parameters", "text_of"]

_STYLES: Final = {
    "path": ("simple",),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_NOT_PARAMETERS: Final = FRAMING | {"accept", "content-type", "authorization"}
"""Headers that something else decides about."""
_Kind: TypeAlias = Literal["json", "form", "text", "bytes"]
_FORM: Final = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class Taken:
    """What an operation takes."""

    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The schema of each parameter, by its name in Python."""
    required: list[str] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    payload: Payload | None = None

    def add(self, name: str, schema: dict[str, Any], required: bool) -> None:
        """Takes a parameter."""
        self.schemas[name] = schema
        if required:
            self.required.append(name)


def read_parameters(listed: list[Value], schemas: Schemas, taken: Taken) -> None:
    """Reads the parameters of an operation; those of its own replace those of its path."""
    chosen: dict[tuple[str, str], Value] = {}
    for value in listed:
        found = schemas.follow(value)
        if found is None:
            continue
        name, place = text_of(found, "name"), text_of(found, "in")
        if not name:
            found.problem("a parameter must have a name")
        elif place not in _STYLES:
            found.problem(f"a parameter is in one of {', '.join(_STYLES)}, not in {place or 'nothing'!r}")
        elif not (place == "header" and name.lower() in _NOT_PARAMETERS):
            chosen[name, place] = found
    for (name, place), found in chosen.items():
        _read_parameter(name, place, found, schemas, taken)


def _read_parameter(name: str, place: str, value: Value, schemas: Schemas, taken: Taken) -> None:
    argument = unused(identifier(name, lower=place == "header"), taken.schemas, place)
    required = place == "path" or _true(value, "required")
    content, schema, style = value.get("content"), value.get("schema"), value.get("style")
    as_json = content is not None
    if content is not None:
        kinds = dict(content.mapping("content"))
        kind = next((kind for kind in kinds if _is_json(kind)), None)
        if kind is None:
            content.problem("what a parameter holds can only be written as JSON, application/json")
            return
        schema = kinds[kind].get("schema")
    allowed = _STYLES[place]
    chosen = allowed[0] if style is None else style.node.value
    if chosen not in allowed:
        value.problem(f"the style of a parameter in {place} can be {' or '.join(allowed)}, not {chosen!r}")
        return
    explode = value.get("explode")
    described = {} if schema is None else schemas.read(schema)
    if about := text_of(value, "description"):
        described = _described(described, about)
    taken.add(argument, described, required)
    taken.arguments.append(
        Argument(
            argument=argument,
            name=name,
            place=cast(Literal["path", "query", "header", "cookie"], place),
            style=cast(Any, chosen),
            explode=chosen == "form" if explode is None else explode.node.value is True,
            json=as_json,
            required=required,
        )
    )


def read_body(value: Value, schemas: Schemas, taken: Taken) -> None:
    """Reads the body of an operation: the properties of an object become parameters, anything else is one."""
    found = schemas.follow(value)
    content = None if found is None else found.get("content")
    if found is None or content is None:
        return
    kinds = dict(content.mapping("content"))
    chosen = next((kind for test in (_is_json, _is_form, _is_text, _is_bytes) for kind in kinds if test(kind)), None)
    if chosen is None:
        content.problem(
            f"a body of {', '.join(kinds) or 'nothing'} is not supported. Supported are JSON, forms "
            f"({_FORM}), text and application/octet-stream"
        )
        return
    required = _true(found, "required")
    schema = kinds[chosen].get("schema")
    kind: _Kind = (
        "json" if _is_json(chosen) else "form" if _is_form(chosen) else "text" if _is_text(chosen) else "bytes"
    )
    sent = "application/octet-stream" if "*" in chosen else chosen
    whole = None if schema is None else schemas.follow(schema)
    structured = kind in ("json", "form")
    if structured and whole is not None and _is_flat(whole) and _flatten(whole, kind, sent, required, schemas, taken):
        return
    argument = unused("body", taken.schemas)
    described = schemas.read(schema) if schema is not None and structured else {}
    taken.add(argument, described, required)
    taken.payload = Payload(kind=kind, content_type=sent, argument=argument, required=(argument,) if required else ())


def _is_flat(schema: Value) -> bool:
    """Whether an object is described by nothing but its properties."""
    kind, more, properties = schema.get("type"), schema.get("additionalProperties"), schema.get("properties")
    return (
        (kind is None or kind.node.value == "object")
        and properties is not None
        and bool(properties.node.value)
        and (more is None or more.node.value is False)
        and not any(schema.has(key) for key in ("allOf", "anyOf", "oneOf", "not"))
    )


def _flatten(schema: Value, kind: _Kind, sent: str, required: bool, schemas: Schemas, taken: Taken) -> bool:
    properties = schema.get("properties")
    needed = schema.get("required")
    listed = needed.items("required") if needed is not None and required else ()
    names = {part.node.value for part in listed if isinstance(part.node.value, str)}
    found: dict[str, tuple[str, Value]] = {}
    for name, part in properties.mapping("properties") if properties is not None else ():
        argument = identifier(name)
        if argument in taken.schemas or argument in found:
            return False
        if not _true(part, "readOnly"):
            found[argument] = (name, part)
    for argument, (name, part) in found.items():
        taken.add(argument, schemas.read(part), name in names)
    taken.payload = Payload(
        kind=kind,
        content_type=sent,
        properties={argument: name for argument, (name, _) in found.items()},
        required=tuple(argument for argument, (name, _) in found.items() if name in names),
        always=required,
    )
    return True


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A schema with what the parameter says of itself. Beside a reference nothing can stand."""
    return schema if str(schema.get("$ref", "")).startswith(REF_START) else {**schema, "description": text}


def text_of(value: Value, key: str) -> str:
    """The text behind a key; empty if there is none."""
    found = value.get(key)
    return found.node.value if found is not None and isinstance(found.node.value, str) else ""


def _true(value: Value, key: str) -> bool:
    found = value.get(key)
    return found is not None and found.node.value is True


def _is_json(kind: str) -> bool:
    plain = kind.partition(";")[0].strip().lower()
    return plain == "application/json" or plain.endswith("+json")


def _is_form(kind: str) -> bool:
    return kind.partition(";")[0].strip().lower() == _FORM


def _is_text(kind: str) -> bool:
    return kind.lower().startswith("text/") and "*" not in kind


def _is_bytes(kind: str) -> bool:
    return kind.lower() in ("application/octet-stream", "*/*")
