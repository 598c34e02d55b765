"""``dfm-async serve``: a federation over HTTP."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import typer

from dfm_async.base.installation import install_hint
from dfm_async.cli.exits import BadInput, Exit
from dfm_async.cli.references import find_pipeline, named_pipelines
from dfm_async.cli.terminal import terminal
from dfm_async.cli.tokens import shared_token
from dfm_async.cli.view import LineView, logged
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import FlareOptions
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.planner.plan import prepare
from dfm_async.session.session import Session

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from dfm_async.web import Service, TokenAuthorizer
    from dfm_async.web.access import LocalAuthorizer
    from dfm_async.web.service import valid_name
except ImportError as error:
    raise BadInput(f"a service needs Starlette and uvicorn: {install_hint('cli')}") from error

__all__ = ["Serving", "chosen_pipelines", "serve_federation"]

_GRACE: Final = 10
"""For how many seconds connections may stay open when the service ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is to be served, and where."""

    federation: Federation
    pipelines: Mapping[str, Pipeline]
    host: str
    port: int
    store: str | None
    allow_pipelines: bool
    token: str | None
    homesite: str = "home"
    flare: FlareOptions | None = None
    """Where the federation is, if it is past this machine."""


def chosen_pipelines(
    references: Sequence[str], module: ModuleType | None, federation: Federation, homesite: str, *, allow_none: bool
) -> dict[str, Pipeline]:
    """The pipelines that clients may run, by the names that they have in URLs.

    Raises:
        BadInput: one of them is not there, two have one name, or there are none where there must be.
        PipelineError: one of them cannot be run.
    """
    found: dict[str, Pipeline] = {}
    given = {reference: find_pipeline(reference, module, federation) for reference in references}
    if not given and module is not None:
        given = named_pipelines(module)
    for reference, pipeline in given.items():
        name = next((name for name in (pipeline.name, reference) if name and valid_name(name)), None)
        if name is None:
            raise BadInput(f"pipeline {reference!r} has no name that can stand in a URL: letters, digits, . _ ~ -")
        if name in found:
            raise BadInput(f"two pipelines are called {name!r}; clients could not tell them apart")
        prepare(pipeline, federation, homesite, None, 1)
        found[name] = pipeline
    if not found and not allow_none:
        own = "" if module is None else f"write one in {module.__name__!r}, "
        raise BadInput(
            f"there is no pipeline that clients could run: {own}name one behind the federation, or let clients bring "
            "theirs with --allow-pipelines"
        )
    return found


async def serve_federation(serving: Serving) -> int:
    """Serves until the process is asked to end; the server hears the signals itself.

    Raises:
        BadInput: the address cannot be used.
    """
    listener = _listen(serving.host, serving.port)
    local = LocalAuthorizer() if serving.token is None else None
    authorizer = TokenAuthorizer(serving.token) if serving.token is not None else local
    service = Service(
        session=lambda: Session(
            serving.federation,
            homesite=serving.homesite,
            target="local" if serving.flare is None else "flare",
            options=serving.flare,
            store=serving.store,
        ),
        pipelines=serving.pipelines,
        authorizer=authorizer,
        allow_pipelines=serving.allow_pipelines,
    )
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    names = ", ".join([*serving.pipelines, *["those that clients bring"] * serving.allow_pipelines])

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        async with service.lifespan():
            with nullcontext() if local is None else shared_token(host, port, local.token):
                typer.echo(f"serving {serving.federation.name!r} at {url}/ (pipelines: {names})")
                shown = "TOKEN" if local is None else local.token
                typer.echo(f"in a browser: {url}/?token={shown}")
                yield

    app = Starlette(lifespan=lifespan, routes=[Mount("/", service.app)])
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=_GRACE)
    server = uvicorn.Server(config)
    with listener, logged(LineView(terminal(stderr=True), None)):
        await server.serve(sockets=[listener])
    return Exit.SUCCESS if server.started else Exit.FAILED


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"cannot listen at {host} port {port}: {reason}. Give another --port (0 takes a free one)"
        ) from error
