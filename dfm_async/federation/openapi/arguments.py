"""What operations of a document take: parameters and bodies, with their names in Python."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from dfm_async.federation.files.values import FileValue, one_of
from dfm_async.federation.openapi.schemas import Schemas, identifier, unused
from dfm_async.model.http import FRAMING, Argument, Credential, RequestPayload

_STYLES: Final = {
    "path": ("simple",),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_NOT_PARAMETERS: Final = FRAMING | {"accept", "content-type", "authorization"}
"""Headers that something else decides about."""
_Kind: TypeAlias = Literal["json", "form", "text", "bytes"]
_KINDS: Final[tuple[_Kind, ...]] = ("json", "form", "text", "bytes")
"""The kinds of bodies, the preferred ones first."""
_FORM: Final = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class OperationArguments:
    """What an operation takes."""

    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The schema of each parameter, by its name in Python."""
    required: list[str] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    payload: RequestPayload | None = None

    def add(self, name: str, schema: dict[str, Any], required: bool) -> None:
        """Add a parameter."""
        self.schemas[name] = schema
        if required:
            self.required.append(name)


def read_parameters(listed: list[FileValue], schemas: Schemas, taken: OperationArguments) -> None:
    """Read the parameters of an operation; those of its own replace those of its path."""
    chosen: dict[tuple[str, str], FileValue] = {}
    for value in listed:
        found = schemas.follow(value)
        if found is None:
            continue
        name, place = found.text_of("name"), found.text_of("in")
        if not name:
            found.problem("a parameter must have a name")
        elif place not in _STYLES:
            found.problem(f"a parameter is in one of {', '.join(_STYLES)}, not in {place or 'nothing'!r}")
        elif not (place == "header" and name.lower() in _NOT_PARAMETERS):
            chosen[name, place] = found
    for (name, place), found in chosen.items():
        _read_parameter(name, place, found, schemas, taken)


def _read_parameter(name: str, place: str, value: FileValue, schemas: Schemas, taken: OperationArguments) -> None:
    argument = unused(identifier(name, lower=place == "header"), taken.schemas, place)
    required = place == "path" or _true(value, "required")
    content, schema, style = value.get("content"), value.get("schema"), value.get("style")
    as_json = content is not None
    if content is not None:
        kinds = dict(content.mapping("content"))
        kind = next((kind for kind in kinds if _kind_of(kind) == "json"), None)
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
    about = value.text_of("description")
    if about and "$ref" not in described:
        described = {**described, "description": about}
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


def read_body(value: FileValue, schemas: Schemas, taken: OperationArguments) -> None:
    """Read the body of an operation: the properties of an object become parameters, anything else is one."""
    found = schemas.follow(value)
    content = None if found is None else found.get("content")
    if found is None or content is None:
        return
    kinds = dict(content.mapping("content"))
    kind, chosen = next(((kind, name) for kind in _KINDS for name in kinds if _kind_of(name) == kind), (None, ""))
    if kind is None:
        content.problem(
            f"a body of {', '.join(kinds) or 'nothing'} is not supported. Supported are JSON, forms "
            f"({_FORM}), text and application/octet-stream"
        )
        return
    required = _true(found, "required")
    schema = kinds[chosen].get("schema")
    sent = "application/octet-stream" if "*" in chosen else chosen
    whole = None if schema is None else schemas.follow(schema)
    structured = kind in ("json", "form")
    if structured and whole is not None and _is_flat(whole) and _flatten(whole, kind, sent, required, schemas, taken):
        return
    argument = unused("body", taken.schemas)
    described = schemas.read(schema) if schema is not None and structured else {}
    taken.add(argument, described, required)
    taken.payload = RequestPayload(
        kind=kind, content_type=sent, argument=argument, required=(argument,) if required else ()
    )


def _is_flat(schema: FileValue) -> bool:
    """Return whether an object is described by nothing but its properties."""
    return (
        (not schema.has("type") or schema.text_of("type") == "object")
        and bool(schema.part("properties").node.value)
        and (not schema.has("additionalProperties") or schema.part("additionalProperties").node.value is False)
        and not any(schema.has(key) for key in ("allOf", "anyOf", "oneOf", "not"))
    )


def _flatten(
    schema: FileValue, kind: _Kind, sent: str, required: bool, schemas: Schemas, taken: OperationArguments
) -> bool:
    listed = schema.part("required").items("required") if required else ()
    names = {part.node.value for part in listed if isinstance(part.node.value, str)}
    found: dict[str, tuple[str, FileValue]] = {}
    for name, part in schema.part("properties").mapping("properties"):
        argument = identifier(name)
        if argument in taken.schemas or argument in found:
            return False
        if not _true(part, "readOnly"):
            found[argument] = (name, part)
    for argument, (name, part) in found.items():
        taken.add(argument, schemas.read(part), name in names)
    taken.payload = RequestPayload(
        kind=kind,
        content_type=sent,
        properties={argument: name for argument, (name, _) in found.items()},
        required=tuple(argument for argument, (name, _) in found.items() if name in names),
        always=required,
    )
    return True


def _true(value: FileValue, key: str) -> bool:
    return value.part(key).node.value is True


def _kind_of(content_type: str) -> _Kind | None:
    """Return how a content type is written; None if it is not supported."""
    plain = content_type.partition(";")[0].strip().lower()
    if plain == "application/json" or plain.endswith("+json"):
        return "json"
    if plain == _FORM:
        return "form"
    if content_type.lower().startswith("text/") and "*" not in content_type:
        return "text"
    return "bytes" if content_type.lower() in ("application/octet-stream", "*/*") else None


_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class Secret(NamedTuple):
    """How a secret is sent, and its key in the vault."""

    credential: Credential
    key: str


class Security:
    """How a service authenticates its callers. ``auth`` has the key in the vault for schemes of the document."""

    def __init__(self, document: FileValue, schemas: Schemas, auth: Mapping[str, str]) -> None:
        self._auth = auth
        self._schemes: dict[str, FileValue] = {}
        self._general = document.get("security")
        for name, part in document.part("components").part("securitySchemes").mapping("securitySchemes"):
            found = schemas.follow(part)
            if found is not None:
                self._schemes[name] = found
        for name in auth:
            if name not in self._schemes:
                known = one_of(name, list(self._schemes))
                document.problem(f"auth names the security scheme {name!r}, which the document does not have; {known}")

    def of(self, operation: FileValue, used: Collection[str]) -> list[Secret]:
        """Return the secrets that requests of an operation need; their arguments avoid the names in ``used``."""
        stated = operation.get("security") or self._general
        if stated is None or not stated.node.value:
            return []
        choices = [[name for name, _ in part.mapping("a requirement")] for part in stated.items("security")]
        for choice in choices:
            if choice and all(name in self._auth for name in choice):
                return [secret for name in choice if (secret := self._secret(stated, name, used)) is not None]
        if [] in choices:
            return []
        shown = " or ".join(" and ".join(map(repr, choice)) for choice in choices)
        operation.problem(
            f"the service requires authentication by {shown}: pass the keys of your vault for it, such as "
            f"auth={{{choices[0][0]!r}: 'KEY'}}"
        )
        return []

    def _secret(self, stated: FileValue, name: str, used: Collection[str]) -> Secret | None:
        scheme = self._schemes.get(name)
        if scheme is None:
            stated.problem(f"unknown security scheme {name!r}; {one_of(name, list(self._schemes))}")
            return None
        credential = self._credential(scheme, unused(f"auth_{identifier(name)}", used))
        return None if credential is None else Secret(credential, self._auth[name])

    def _credential(self, scheme: FileValue, argument: str) -> Credential | None:
        kind, http = scheme.text_of("type"), scheme.text_of("scheme").lower()
        match kind, http:
            case ("http", "basic"):
                return Credential(argument=argument, kind="basic")
            case ("http", "bearer") | ("oauth2" | "openIdConnect", _):  # the vault has an access token
                return Credential(argument=argument, kind="bearer")
            case ("apiKey", _):
                return self._api_key(scheme, argument)
        scheme.problem(
            f"this kind of security is not supported: {kind or 'none'} {http}".rstrip() + ". Supported are http with "
            "bearer or basic, apiKey, oauth2 and openIdConnect"
        )
        return None

    def _api_key(self, scheme: FileValue, argument: str) -> Credential | None:
        name, place = scheme.text_of("name"), scheme.text_of("in")
        if not name or (place != "query" and not _TOKEN.fullmatch(name)):
            scheme.problem("an apiKey must have the name of a header, a cookie or a part of the query")
            return None
        match place:
            case "header" | "query" | "cookie":
                return Credential(argument=argument, kind=place, name=name)
        scheme.problem(f"an apiKey is in a header, the query or a cookie, not in {place!r}")
        return None
