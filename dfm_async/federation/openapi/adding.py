"""Adds the operations of a document to a federation."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dfm_async.errors import FederationError
from dfm_async.federation.files.documents import Documents
from dfm_async.federation.files.operations import signature_of
from dfm_async.federation.files.values import TooMuch
from dfm_async.federation.openapi.document import HttpOperation, read_document
from dfm_async.model.http import HttpOptions, RequestPlan
from dfm_async.model.resources import ClassPath

if TYPE_CHECKING:
    from dfm_async.federation.federation import Federation
    from dfm_async.federation.operation import Operation
    from dfm_async.federation.site import Site

__all__ = ["add_document"]

_ADAPTER: Final = "dfm_async.site.http.HttpCall"
_NO_FILE: Final = "the document"


def add_document(
    federation: Federation,
    document: str | os.PathLike[str] | Mapping[str, Any],
    *,
    site: Site,
    name: str | None,
    provider: str | None,
    base_url: str | None,
    auth: Mapping[str, str],
    operations: Collection[str] | None,
    options: HttpOptions,
) -> tuple[Operation[..., Any], ...]:
    """Reads a document and offers its operations at a site: all of them, or none if something is wrong.

    Raises:
        FederationError: lists everything that is wrong.
    """
    if base_url is not None:
        RequestPlan(method="GET", base_url=base_url, path="/")  # what is wrong with it is raised here, once
    if isinstance(document, Mapping):
        documents, file = Documents(_NO_FILE, document), _NO_FILE
    else:
        documents, file = Documents(document), os.fspath(document)
    service = None
    try:
        service = read_document(
            documents,
            group=name,
            base_url=base_url,
            auth=auth,
            only=operations,
            taken=set(federation.models.declared),
        )
    except TooMuch as error:
        error.at.problem("what the document refers to is, taken together, larger than allowed")
    documents.report_strays()
    problems = documents.ledger.problems
    if problems or service is None:
        raise FederationError(file, sorted(problems, key=lambda p: (p.file, p.line, p.column)))
    clashing = [found.name for found in service.operations if found.name in federation.operations]
    if clashing:
        raise ValueError(f"federation {federation.name!r} has {', '.join(clashing)} already: pass another name=")
    federation.models.declared.update(service.schemas)
    return tuple(_offer(federation, site, found, provider, options) for found in service.operations)


def _offer(
    federation: Federation, site: Site, found: HttpOperation, provider: str | None, options: HttpOptions
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
    )
    return declared


def _plain(data: msgspec.Struct) -> Any:
    """The data as a file would hold it."""
    return msgspec.json.decode(msgspec.json.encode(data))
