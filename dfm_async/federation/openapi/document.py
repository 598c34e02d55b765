"""Reads OpenAPI documents: everything that is wrong with one is found at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from dfm_async.federation.bindings import Binding, FromParam, FromSecrets
from dfm_async.federation.files.documents import Documents
from dfm_async.federation.files.operations import signature_of
from dfm_async.federation.files.values import FileValue, one_of
from dfm_async.federation.openapi.arguments import OperationArguments, Security, read_body, read_parameters
from dfm_async.federation.openapi.schemas import Schemas, camel, identifier, unused
from dfm_async.federation.operation import Declaration
from dfm_async.model.call_limits import CallLimits
from dfm_async.model.http import HttpOptions, RequestPlan
from dfm_async.model.resources import ClassPath

if TYPE_CHECKING:
    from dfm_async.federation.operation import Operation
    from dfm_async.federation.site import FederatedSites, Site

_METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_VERSIONS: Final = ("3.0", "3.1")
_UNKNOWN: Final = "http://unknown"
"""Replaces an invalid address, which is reported already."""


class _FoundOperation(NamedTuple):
    """An operation of a service: how its requests are made, and where their arguments come from."""

    name: str
    declaration: Declaration
    plan: RequestPlan
    bindings: Mapping[str, Binding]


def _is_openapi(document: FileValue) -> bool:
    if not isinstance(document.node.value, dict):
        document.problem(f"an OpenAPI document must be a mapping, not {document.kind}")
        return False
    if document.has("swagger"):
        document.problem_at_key(
            "swagger", "this is OpenAPI 2.0, which is not supported: convert it to 3.0, such as with swagger2openapi"
        )
        return False
    version = document.get("openapi")
    if version is None:
        document.problem("not an OpenAPI document: 'openapi' is missing, such as openapi: 3.1.0")
        return False
    if not str(version.node.value).startswith(_VERSIONS):
        version.problem(f"OpenAPI {' and '.join(_VERSIONS)} are supported, not {version.kind}")
        return False
    return True


def _server(owner: FileValue) -> str | None:
    """Return the address of the service, as a document, a path or an operation has it."""
    listed = owner.part("servers").items("servers")
    url = listed[0].text_of("url") if listed else ""
    if not url:
        owner.problem("the document has no servers: pass base_url=, the address of the service")
        return None
    for name, part in listed[0].part("variables").mapping("variables"):
        url = url.replace(f"{{{name}}}", part.text_of("default") or f"{{{name}}}")
    try:
        address = urlsplit(url)
        good = address.scheme in ("http", "https") and bool(address.hostname) and "{" not in url
    except ValueError:
        good = False
    if not good or address.username or address.password or address.query or address.fragment:
        listed[0].problem(f"{url[:80]!r} is not the complete URL of a service: pass base_url=")
        return None
    return url


@dataclass(slots=True)
class _DocumentReader:
    document: FileValue
    group: str
    base_url: str | None
    schemas: Schemas
    security: Security
    only: Collection[str] | None
    general: str | None = None
    """The address that the document has for all operations."""
    ids: dict[str, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def read(self) -> list[_FoundOperation]:
        found = [operation for parts in self._listed() if (operation := self._operation(*parts)) is not None]
        for name in self.only or ():
            if name not in self.ids:
                self.document.problem(f"the document has no operation {name!r}; {one_of(name, list(self.ids))}")
        if not self.ids:
            self.document.problem("the document has no operations")
        return found

    def _listed(self) -> Iterator[tuple[str, str, str, FileValue, FileValue]]:
        for path, item in self.document.part("paths").mapping("paths"):
            if path.startswith("x-"):
                continue
            place = self.schemas.follow(item)
            if place is None:
                continue
            if not path.startswith("/"):
                item.problem(f"a path must begin with '/', not {path!r}")
                continue
            for method in _METHODS:
                operation = place.get(method)
                if operation is None:
                    continue
                name = operation.text_of("operationId") or f"{method} {path}"
                self.ids[name] = None
                if self.only is None or name in self.only:
                    yield name, method, path, place, operation

    def _operation(
        self, id_: str, method: str, path: str, place: FileValue, value: FileValue
    ) -> _FoundOperation | None:
        if not isinstance(value.node.value, dict):
            value.problem(f"an operation must be a mapping, not {value.kind}")
            return None
        taken = OperationArguments()
        listed = [part for owner in (place, value) for part in owner.part("parameters").items("parameters")]
        read_parameters(listed, self.schemas, taken)
        body = value.get("requestBody")
        if body is not None:
            read_body(body, self.schemas, taken)
        secrets = self.security.of(value, taken.schemas)
        try:
            plan = RequestPlan(
                method=method.upper(),
                base_url=self._address(place, value),
                path=path,
                arguments=tuple(taken.arguments),
                payload=taken.payload,
                credentials=tuple(secret.credential for secret in secrets),
            )
        except ValueError as error:
            value.problem(str(error))
            return None
        name = unused(f"{self.group}.{camel(id_)}", self.names)
        self.names.add(name)
        bindings: dict[str, Binding] = {argument: FromParam(argument) for argument in taken.schemas}
        bindings |= {secret.credential.argument: FromSecrets(secret.key) for secret in secrets}
        declaration = Declaration(
            description=_about(value),
            parameters=taken.schemas,
            required=tuple(taken.required),
            returns=self._returns(value),
        )
        return _FoundOperation(name, declaration, plan, bindings)

    def _address(self, place: FileValue, operation: FileValue) -> str:
        """Return where an operation is asked: an operation and a path may have servers of their own."""
        if self.base_url is not None:
            return self.base_url
        for owner in (operation, place):
            if owner.part("servers").node.value:
                return _server(owner) or _UNKNOWN
        if self.general is None:  # report its problems once
            self.general = _server(self.document) or _UNKNOWN
        return self.general

    def _returns(self, operation: FileValue) -> str:
        """Return the type of the response, if the document has only one."""
        kinds: set[str] = set()
        for status, part in operation.part("responses").mapping("responses"):
            if not status.startswith("2"):
                continue
            found = self.schemas.follow(part)
            if found is None or not found.has("content"):  # many documents do not describe the content
                kinds.add("null" if status == "204" else "object")
            else:
                described = found.part("content").mapping("content")
                kinds.update(self._kind(kind, about.part("schema")) for kind, about in described)
        return kinds.pop() if len(kinds) == 1 else "object"

    def _kind(self, content_type: str, schema: FileValue) -> str:
        if content_type.lower().startswith("text/"):
            return "string"
        found = self.schemas.follow(schema)
        kind = "" if found is None else found.text_of("type")
        known = kind in ("string", "number", "integer", "boolean", "array")
        if found is None or not known or not content_type.lower().startswith("application/json"):
            return "object"
        return "object" if found.part("nullable").node.value is True else kind


def _about(operation: FileValue) -> str:
    texts = dict.fromkeys(operation.text_of(key).strip() for key in ("summary", "description"))
    return "\n\n".join(text for text in texts if text)


_ADAPTER: Final = "dfm_async.site.http.HttpCall"


def add_document(
    federation: FederatedSites,
    document: str | os.PathLike[str] | Mapping[str, Any],
    *,
    site: Site,
    name: str | None,
    provider: str | None,
    base_url: str | None,
    auth: Mapping[str, str],
    operations: Collection[str] | None,
    options: HttpOptions,
    limits: Mapping[str, Any],
) -> tuple[Operation[..., Any], ...]:
    """Read a document and offer its operations at a site: all of them, or none and a FederationError."""
    if base_url is not None:
        RequestPlan(method="GET", base_url=base_url, path="/")  # what is wrong with it is raised here, once
    documents = Documents("the document", document) if isinstance(document, Mapping) else Documents(document)
    found: list[_FoundOperation] = []
    with documents.reading() as root:
        group = name or identifier(root.part("info").text_of("title"), lower=True)
        schemas = Schemas(documents, group, set(federation.models.declared))
        if _is_openapi(root):
            found = _DocumentReader(root, group, base_url, schemas, Security(root, schemas, auth), operations).read()
    clashing = [each.name for each in found if each.name in federation.operations]
    if clashing:
        raise ValueError(f"federation {federation.name!r} has {', '.join(clashing)} already: pass another name=")
    key = limits.get("key")
    lacking = [each.name for each in found if key is not None and key not in each.declaration.parameters]
    if lacking:
        raise ValueError(
            f"{', '.join(lacking)} have no parameter {key!r}, which key= names: choose others by operations="
        )
    CallLimits.parse(limits)  # what is wrong with them is raised before anything is added
    federation.models.declared.update(schemas.declared)
    return tuple(_offer(federation, site, each, provider, options, limits) for each in found)


def _offer(
    federation: FederatedSites,
    site: Site,
    found: _FoundOperation,
    provider: str | None,
    options: HttpOptions,
    limits: Mapping[str, Any],
) -> Operation[..., Any]:
    declared = federation.declare(
        found.name, signature_of(found.declaration, federation.models), declaration=found.declaration
    )
    args: dict[str, Any] = {"operation": found.name, "request": _plain(found.plan)}
    changed = _plain(options)
    if changed:
        args["options"] = changed
    site.adapt(
        declared,
        ClassPath(_ADAPTER, args),
        bind=found.bindings,
        is_async=True,
        description=found.declaration.description,
        provider=provider,
        **limits,
    )
    return declared


def _plain(data: msgspec.Struct) -> Any:
    """Return the data as a file would hold it."""
    return msgspec.json.decode(msgspec.json.encode(data))
