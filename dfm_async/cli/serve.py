"""``dfm-async serve``: a federation over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from types import ModuleType
from typing import Any, Final

import typer

from dfm_async.base.text import install_hint
from dfm_async.cli.command_options import ServeOptions
from dfm_async.cli.command_runner import BadInput, Exit, print_message
from dfm_async.cli.flare.kits import flare_options
from dfm_async.cli.references import find_federation, find_pipeline, named_pipelines, set_workers
from dfm_async.cli.reload import Reloading
from dfm_async.cli.service_tokens import server_token, shared_token
from dfm_async.cli.terminal import terminal
from dfm_async.cli.view import LineView, logged
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.planning.prepare import prepare
from dfm_async.session.session import Session

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import BaseRoute, Mount, Route

    from dfm_async.web import Service, TokenAuthorizer
    from dfm_async.web.access import LocalAuthorizer
    from dfm_async.web.mcp_tools import check_names
    from dfm_async.web.service import valid_name
except ImportError as error:
    raise BadInput(f"a service needs Starlette and uvicorn: {install_hint('cli')}") from error

_GRACE: Final = 10
"""The time that open connections get when the service ends, in seconds."""


def serve_federation(options: ServeOptions) -> Coroutine[Any, Any, int]:
    """Find what to serve, and return the coroutine that serves it until the process is asked to end."""
    token = server_token(options.token_file, options.host)
    flare = flare_options(options)
    if options.resume and options.store is None:
        raise BadInput("--resume needs a store: give --store sqlite:///jobs.db")
    federation, module = find_federation(options.federation, compat=options.compat)
    set_workers(federation, options.workers, options.idle_after)
    pipelines = _chosen_pipelines(options, module, federation)
    local = LocalAuthorizer() if token is None else None
    service = Service(
        session=lambda: Session(
            federation,
            homesite=options.homesite,
            target="local" if flare is None else "flare",
            options=flare,
            store=options.store,
        ),
        pipelines=pipelines,
        authorizer=local if token is None else TokenAuthorizer(token),
        allow_pipelines=options.allow_pipelines,
        resume=options.resume,
        accept_changes=options.accept_changes,
    )
    routes: list[BaseRoute] = [Mount("/", service.app)]
    if options.mcp:
        try:
            routes.insert(0, Route("/mcp", service.mcp()))
        except (ImportError, ValueError) as error:
            raise BadInput(f"--mcp: {error}") from error
    reloading = None
    if options.reload:
        reloading = Reloading(options, federation, module, print_message)
    names = ", ".join([*pipelines, *["those of clients"] * options.allow_pipelines])
    return _serve(options, service, routes, federation.name, names, None if local is None else local.token, reloading)


def _chosen_pipelines(options: ServeOptions, module: ModuleType | None, federation: Federation) -> dict[str, Pipeline]:
    """Return the pipelines that clients may run, by their names in URLs."""
    found: dict[str, Pipeline] = {}
    given = {reference: find_pipeline(reference, module, federation) for reference in options.pipelines or ()}
    if not given and module is not None:
        given = named_pipelines(module)
    for reference, pipeline in given.items():
        name = next((name for name in (pipeline.name, reference) if name and valid_name(name)), None)
        if name is None:
            raise BadInput(f"pipeline {reference!r} has no name that is valid in a URL: letters, digits, . _ ~ -")
        if name in found:
            raise BadInput(f"two pipelines have the name {name!r}: rename one of them")
        prepare(pipeline, federation, options.homesite, None, 1)
        found[name] = pipeline
    if not found and not options.allow_pipelines:
        own = "" if module is None else f"write one in {module.__name__!r}, "
        raise BadInput(
            f"there is no pipeline that clients could run: {own}name one after the federation, or let clients "
            "submit theirs with --allow-pipelines"
        )
    return found


async def _serve(
    options: ServeOptions,
    service: Service,
    routes: list[BaseRoute],
    federation: str,
    names: str,
    token: str | None,
    reloading: Reloading | None,
) -> int:
    """Serve until the process is asked to end; the server handles the signals itself.

    Other commands of the same user find the token, if there is one.
    """
    listener = _listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        async with service.lifespan():
            with nullcontext() if token is None else shared_token(host, port, token):
                typer.echo(f"serving {federation!r} at {url}/ (pipelines: {names})")
                typer.echo(f"in a browser: {url}/?token={token or 'TOKEN'}")
                if options.mcp:
                    typer.echo(f"for agents: {url}/mcp with the header Authorization: Bearer {token or 'TOKEN'}")
                async with nullcontext() if reloading is None else _reloaded(options, service, reloading):
                    yield

    app = Starlette(lifespan=lifespan, routes=routes)
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=_GRACE)
    server = uvicorn.Server(config)
    with listener, logged(LineView(terminal(stderr=True), None)):
        await server.serve(sockets=[listener])
    return Exit.SUCCESS if server.started else Exit.FAILED


@asynccontextmanager
async def _reloaded(options: ServeOptions, service: Service, reloading: Reloading) -> AsyncIterator[None]:
    """Give new code to the service while the block runs."""

    def choose(federation: Federation, module: ModuleType) -> dict[str, Pipeline]:
        set_workers(federation, options.workers, options.idle_after)
        pipelines = _chosen_pipelines(options, module, federation)
        if options.mcp:
            try:
                check_names(pipelines)
            except ValueError as error:
                raise BadInput(f"--mcp: {error}") from error
        return pipelines

    async def reload() -> None:
        while True:
            pipelines = await reloading.next(choose)
            service._replace_pipelines(pipelines)  # noqa: SLF001 - of the same library
            print_message(f"reloaded (pipelines: {', '.join(pipelines)})")

    with reloading:
        typer.echo(f"watching {reloading.folder} for changes")
        task = asyncio.create_task(reload(), name="dfm_async reload")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"cannot listen on {host} port {port}: {reason}. Give another --port (0 takes a free one)"
        ) from error
