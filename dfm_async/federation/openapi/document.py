"""Reads OpenAPI documents: everything that is wrong with one is found at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from dfm_async.federation.bindings import Binding, FromParam, FromSecrets
from dfm_async.federation.files.documents import Documents
from dfm_async.federation.files.values import Value, one_of
from dfm_async.federation.openapi.arguments import Taken, read_body, read_parameters, text_of
from dfm_async.federation.openapi.names import camel, group_of, unused
from dfm_async.federation.openapi.schemas import Schemas
from dfm_async.federation.openapi.security import Security
from dfm_async.federation.operation import Declaration
from dfm_async.model.http import RequestPlan

__all__ = ["HttpOperation", "Service", "read_document"]

_METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_VERSIONS: Final = ("3.0", "3.1")
_UNKNOWN: Final = "http://unknown"
"""Stands for an address that is wrong; a problem is reported already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOperation:
    """An operation of a service.

    Attributes:
        name: its name.
        declaration: what it takes and returns.
        plan: how its requests are made.
        bindings: where the arguments of requests come from.
        description: what people should know of it.
    """

    name: str
    declaration: Declaration
    plan: RequestPlan
    bindings: Mapping[str, Binding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a document describes."""

    group: str
    operations: list[HttpOperation] = field(default_factory=list)
    schemas: dict[str, dict[str, object]] = field(default_factory=dict)


def read_document(
    documents: Documents,
    *,
    group: str | None,
    base_url: str | None,
    auth: Mapping[str, str],
    only: Collection[str] | None,
    taken: set[str],
) -> Service | None:
    """Reads a document. What is wrong with it is in the ledger of the documents.

    Args:
        documents: the document and the files that it refers to.
        group: what names of operations begin with; by default the title of the document.
        base_url: the address of the service; by default the first of the document's servers.
        auth: the key in the vault for each security scheme.
        only: the operations that are wanted, by the ids that they have in the document; None means all.
        taken: names of schemas that the federation has already.
    """
    if documents.root is None:
        return None
    document = Value(documents.root.root, documents.root)
    if not _is_openapi(document):
        return None
    group = group or _group(document)
    schemas = Schemas(documents, group, taken)
    reader = _Reader(document, group, base_url, schemas, Security(document, schemas, auth), only)
    found = reader.read()
    return Service(group=group, operations=found, schemas=schemas.declared)


def _is_openapi(document: Value) -> bool:
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
        document.problem("this is no OpenAPI document: 'openapi' is missing, such as openapi: 3.1.0")
        return False
    if not str(version.node.value).startswith(_VERSIONS):
        version.problem(f"OpenAPI {' and '.join(_VERSIONS)} are supported, not {version.kind}")
        return False
    return True


def _group(document: Value) -> str:
    info = document.get("info")
    return group_of("" if info is None else text_of(info, "title"))


def _server(owner: Value) -> str | None:
    """The address of the service, as a document, a path or an operation has it."""
    servers = owner.get("servers")
    listed = [] if servers is None else servers.items("servers")
    url = text_of(listed[0], "url") if listed else ""
    if not url:
        owner.problem("the document has no servers: pass base_url=, the address of the service")
        return None
    variables = listed[0].get("variables")
    for name, part in () if variables is None else variables.mapping("variables"):
        url = url.replace(f"{{{name}}}", text_of(part, "default") or f"{{{name}}}")
    try:
        address = urlsplit(url)
        good = address.scheme in ("http", "https") and bool(address.hostname) and "{" not in url
    except ValueError:
        good = False
    if not good or address.username or address.password or address.query or address.fragment:
        listed[0].problem(f"{url[:80]!r} is no whole address of a service: pass base_url=")
        return None
    return url


class _Reader:
    def __init__(
        self,
        document: Value,
        group: str,
        base_url: str | None,
        schemas: Schemas,
        security: Security,
        only: Collection[str] | None,
    ) -> None:
        self._document = document
        self._group = group
        self._given = base_url
        self._general: str | None = None
        """The address that the document has for all operations."""
        self._schemas = schemas
        self._security = security
        self._only = only
        self._ids: dict[str, None] = {}
        self._names: set[str] = set()

    def read(self) -> list[HttpOperation]:
        document = self._document
        found = [operation for parts in self._listed(document) if (operation := self._operation(*parts)) is not None]
        for name in self._only or ():
            if name not in self._ids:
                document.problem(f"the document has no operation {name!r}; {one_of(name, list(self._ids))}")
        if not self._ids:
            document.problem("the document has no operations")
        return found

    def _listed(self, document: Value) -> Iterator[tuple[str, str, str, Value, Value]]:
        paths = document.get("paths")
        for path, item in () if paths is None else paths.mapping("paths"):
            if path.startswith("x-"):
                continue
            place = self._schemas.follow(item)
            if place is None:
                continue
            if not path.startswith("/"):
                item.problem(f"a path must begin with '/', not {path!r}")
                continue
            for method in _METHODS:
                operation = place.get(method)
                if operation is None:
                    continue
                name = text_of(operation, "operationId") or f"{method} {path}"
                self._ids[name] = None
                if self._only is None or name in self._only:
                    yield name, method, path, place, operation

    def _operation(self, id_: str, method: str, path: str, place: Value, value: Value) -> HttpOperation | None:
        if not isinstance(value.node.value, dict):
            value.problem(f"an operation must be a mapping, not {value.kind}")
            return None
        taken = Taken()
        groups = [found for owner in (place, value) if (found := owner.get("parameters")) is not None]
        read_parameters([part for group in groups for part in group.items("parameters")], self._schemas, taken)
        body = value.get("requestBody")
        if body is not None:
            read_body(body, self._schemas, taken)
        secrets = self._security.of(value, taken.schemas)
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
        name = unused(f"{self._group}.{camel(id_)}", self._names)
        self._names.add(name)
        bindings: dict[str, Binding] = {argument: FromParam(argument) for argument in taken.schemas}
        bindings |= {secret.credential.argument: FromSecrets(secret.key) for secret in secrets}
        return HttpOperation(
            name=name,
            declaration=Declaration(
                description=_about(value),
                parameters=taken.schemas,
                required=tuple(taken.required),
                returns=self._returns(value),
            ),
            plan=plan,
            bindings=bindings,
        )

    def _address(self, place: Value, operation: Value) -> str:
        """Where an operation is asked: an operation and a path may have servers of their own."""
        if self._given is not None:
            return self._given
        for owner in (operation, place):
            servers = owner.get("servers")
            if servers is not None and servers.node.value:
                return _server(owner) or _UNKNOWN
        if self._general is None:  # what is wrong with it is said once
            self._general = _server(self._document) or _UNKNOWN
        return self._general

    def _returns(self, operation: Value) -> str:
        """The type of the answer, if the document says that there is only one."""
        responses = operation.get("responses")
        kinds: set[str] = set()
        for status, part in () if responses is None else responses.mapping("responses"):
            if not status.startswith("2"):
                continue
            found = self._schemas.follow(part)
            content = None if found is None else found.get("content")
            if content is None:  # many documents just do not say what comes
                kinds.add("null" if status == "204" else "object")
            for kind, described in () if content is None else content.mapping("content"):
                kinds.add(self._kind(kind, described.get("schema")))
        return kinds.pop() if len(kinds) == 1 else "object"

    def _kind(self, content_type: str, schema: Value | None) -> str:
        if content_type.lower().startswith("text/"):
            return "string"
        found = None if schema is None else self._schemas.follow(schema)
        kind = None if found is None else found.get("type")
        known = kind is not None and kind.node.value in ("string", "number", "integer", "boolean", "array")
        if found is None or kind is None or not known or not content_type.lower().startswith("application/json"):
            return "object"
        nullable = found.get("nullable")
        return "object" if nullable is not None and nullable.node.value is True else str(kind.node.value)


def _about(operation: Value) -> str:
    texts = dict.fromkeys(text_of(operation, key).strip() for key in ("summary", "description"))
    return "\n\n".join(text for text in texts if text)
