"""A federation as a web service: routes, and the life of the session behind them."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route, WebSocketRoute

from dfm_async.errors import SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.session.session import Session
from dfm_async.web.access import Authorizer, Guard, LocalAuthorizer
from dfm_async.web.answers import route_refusal
from dfm_async.web.assets import Assets
from dfm_async.web.endpoints import Endpoint, Handler, SocketEndpoint
from dfm_async.web.graphs import GraphHandlers
from dfm_async.web.jobs import JobHandlers
from dfm_async.web.limits import WebLimits
from dfm_async.web.live import LiveHandlers
from dfm_async.web.openapi import OpenApi
from dfm_async.web.pages import Pages
from dfm_async.web.pipelines import PipelineHandlers
from dfm_async.web.probes import Probes
from dfm_async.web.prometheus import MetricHandlers
from dfm_async.web.signals import heard_signals
from dfm_async.web.sockets import SocketHandlers
from dfm_async.web.state import State
from dfm_async.web.tracing import traced

__all__ = ["Service", "valid_name"]

_NAME: Final = re.compile(r"[A-Za-z0-9._~-]+")
_NOTICE: Final = """\
dfm_async: the service has no authorizer, so clients on this machine need a token.
  In a browser, open the live page with ?token={0}
  Programs send the header  Authorization: Bearer {0}
"""


def valid_name(name: str) -> bool:
    """Tells whether a pipeline can be registered by a name: it stands in URLs."""
    return _NAME.fullmatch(name) is not None


class Service:
    """Serves the jobs of a federation over HTTP.

    Give :attr:`lifespan` to your application, and mount :attr:`app`, or include :attr:`routes`::

        service = Service(federation, pipelines={"report": report})
        app = Starlette(lifespan=service.lifespan, routes=[Mount("/dfm", service.app)])

    ``service.app`` can also be served by itself.

    Args:
        federation: the sites and their operations; for a session with options of its own give ``session``.
        session: the session to use, or a function that makes one each time that the application starts. One that is
            connected already is used as it is, and not closed.
        pipelines: what clients may run, by name.
        authorizer: who may do what. Without one, only clients on this machine are served that have the token of
            ``DFM_TOKEN``, or else one that is printed when the service starts; they may do everything.
            ``TokenAuthorizer(token)`` also serves others, ``AllowAnyone()`` asks for no token.
        limits: what clients may have at most.
        allow_pipelines: whether clients may bring pipelines of their own. They can then call every operation of the
            federation, with any arguments.
        drain_on_signals: whether the service drains when the process is asked to end (SIGINT, SIGTERM). Servers wait
            for open connections before they end the lifespan, so that streams would hold them up otherwise.
        page: whether the live page is served, at ``/``. Jobs of clients are then executed with ``watch=True``.
    """

    def __init__(
        self,
        federation: Federation | None = None,
        *,
        session: Session | Callable[[], Session] | None = None,
        pipelines: Mapping[str, Pipeline] | None = None,
        authorizer: Authorizer | None = None,
        limits: WebLimits | None = None,
        allow_pipelines: bool = False,
        drain_on_signals: bool = True,
        page: bool = True,
    ) -> None:
        if (federation is None) == (session is None):
            raise TypeError("give either a federation or a session")
        if federation is not None and not isinstance(federation, Federation):
            raise TypeError(f"federation must be a Federation, not {federation!r}")
        if session is not None and not isinstance(session, Session) and not callable(session):
            raise TypeError(f"session must be a Session, or a function that makes one, not {session!r}")
        if limits is not None and not isinstance(limits, WebLimits):
            raise TypeError(f"limits must be WebLimits, not {limits!r}")
        if authorizer is not None and not (callable(authorizer) and hasattr(authorizer, "allows")):
            raise TypeError(f"authorizer must be an object of a class that derives from Authorizer, not {authorizer!r}")
        for name, pipeline in (pipelines or {}).items():
            if not isinstance(pipeline, Pipeline):
                raise TypeError(f"pipeline {name!r} is no Pipeline, but {pipeline!r}")
            if not valid_name(name):
                raise ValueError(
                    f"pipeline {name!r} must have a name that can stand in a URL: letters, digits, . _ ~ -"
                )
        self._federation = federation
        self._session = session
        self._drain_on_signals = drain_on_signals
        self.limits = limits or WebLimits()
        """What clients may have at most."""
        self._local: LocalAuthorizer | None = None
        if authorizer is None:
            authorizer = self._local = LocalAuthorizer()
        guard = Guard(authorizer)
        self._state = State(guard, self.limits, pipelines or {}, allow_pipelines, page)
        self._openapi = OpenApi(self._state)
        self.routes: list[BaseRoute] = self._make_routes()
        """The routes, to include them in an application."""
        refusals = {404: route_refusal, 405: route_refusal}
        self.app = Starlette(routes=self.routes, lifespan=self.lifespan, exception_handlers=refusals)
        """An application with the routes, to mount it or to serve it by itself."""

    def _make_routes(self) -> list[BaseRoute]:
        state = self._state
        jobs, pages, probes = JobHandlers(state), Pages(state), Probes(state)
        pipelines, sockets = PipelineHandlers(state, jobs), SocketHandlers(state)
        live, graphs, assets = LiveHandlers(state), GraphHandlers(state), Assets(state)

        def route(method: str, path: str, handler: Handler) -> Route:
            if method == "POST":  # others only look
                handler = traced(state, path, handler)
            made = Route(path, Endpoint(handler, self.limits), methods=[method])
            made.methods = {method}  # HEAD comes with GET otherwise, and would open a stream that nobody sees
            return made

        page = [route("GET", "/", assets.index), route("GET", "/page/{name}", assets.file)] if state.page else []
        return [
            *page,
            route("GET", "/stream", live.stream),
            route("GET", "/health", probes.health),
            route("GET", "/ready", probes.ready),
            route("GET", "/metrics", MetricHandlers(state).metrics),
            route("GET", "/openapi.json", self._openapi.document),
            route("GET", "/pipelines", pipelines.list),
            route("POST", "/pipelines/{name}/jobs", jobs.submit),
            route("GET", "/jobs", pages.jobs),
            route("POST", "/jobs", pipelines.run),
            route("GET", "/jobs/{job_id}", jobs.show),
            route("DELETE", "/jobs/{job_id}", jobs.forget),
            route("GET", "/jobs/{job_id}/events", pages.events),
            route("GET", "/jobs/{job_id}/stream", jobs.stream),
            route("GET", "/jobs/{job_id}/graph", graphs.graph),
            WebSocketRoute("/jobs/{job_id}/socket", SocketEndpoint(sockets.stream, self.limits)),
            route("POST", "/jobs/{job_id}/inputs", jobs.send),
            route("POST", "/jobs/{job_id}/finish", jobs.finish),
            route("POST", "/jobs/{job_id}/resume", jobs.resume),
            route("POST", "/jobs/{job_id}/cancel", jobs.cancel),
        ]

    def add_to_docs(self, app: Any, prefix: str) -> None:
        """Adds the routes to the OpenAPI document of a FastAPI application, and with that to its ``/docs``.

        Whoever sees that document sees the names and schemas of the pipelines then.

        Args:
            app: the application.
            prefix: where the service is mounted in it.
        """
        own = app.openapi
        app.openapi = lambda: self._openapi.joined(own(), prefix)

    # life

    @asynccontextmanager
    async def lifespan(self, _app: Any = None) -> AsyncIterator[None]:
        """Opens the session, and at the end lets open streams end and closes it.

        Give it to your application. If that has a lifespan already: ``async with service.lifespan(): ...`` in it.

        Raises:
            PipelineError: a registered pipeline cannot be run.
            StoreError: another process serves the same store.
        """
        state = self._state
        if state.current is not None:
            raise SessionClosed("the service is open already")
        session = self._choose()
        ours = not session.connected
        if ours:
            await session.connect()
        try:
            session.claim_service()
            for pipeline in state.pipelines.values():
                await session.prepare(pipeline)
            state.streams.open()
            state.current = session
            await self._openapi.prepare()
            if self._local is not None and self._local.generated:
                sys.stderr.write(_NOTICE.format(self._local.token))
                sys.stderr.flush()
            with heard_signals(state.streams.drain) if self._drain_on_signals else nullcontext():
                yield
                await self.drain()
        finally:
            state.streams.drain()
            state.current = None
            state.forget()
            if ours:
                await session.close()

    def _choose(self) -> Session:
        if self._federation is not None:
            return Session(self._federation)
        if isinstance(self._session, Session):
            return self._session
        assert self._session is not None  # noqa: S101 - one of the two was given
        return self._session()

    async def drain(self) -> None:
        """Takes no further jobs and streams, and ends the open streams; each tells its client where to go on.

        Jobs go on, and can be looked at and steered. Returns when the last stream has ended.
        """
        self._state.streams.drain()
        await self._state.streams.until(0)

    @property
    def token(self) -> str | None:
        """The token that clients need if the service has no authorizer: that of ``DFM_TOKEN``, or a new one."""
        return None if self._local is None else self._local.token

    @property
    def current(self) -> Session | None:
        """The session, while the service is open."""
        return self._state.current

    @property
    def ready(self) -> bool:
        """Whether the service takes jobs and streams."""
        return self._state.ready

    def session(self, request: HTTPConnection) -> Session:
        """Gives the session to handlers of your own: ``Depends(service.session)``, or ``service.session(request)``.

        Raises:
            SessionClosed: the service is not open.
        """
        if self._state.current is None:
            raise SessionClosed("the service is not open: give lifespan=service.lifespan to the application")
        return self._state.current
