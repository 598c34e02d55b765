"""A federation as a web service: the routes, and the lifespan of the session behind them."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Final, Literal, Unpack

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Send

from dfm_async.errors import DfmError, JobOwned, SessionClosed, StoreError
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.session.schedule import Schedule, ScheduleOptions, TickParams
from dfm_async.session.session import Session
from dfm_async.session.timetables import timetable
from dfm_async.telemetry.metrics import METRICS, Metric, counter, gauge, prometheus_text, value_of
from dfm_async.web.access import Authorizer, Guard, LocalAuthorizer, Principal
from dfm_async.web.assets import Assets, Drawings
from dfm_async.web.endpoints import Handler, RouteEndpoint, SocketEndpoint, traced
from dfm_async.web.job_handlers import JobHandlers
from dfm_async.web.limits import WebLimits
from dfm_async.web.open_streams import Streams
from dfm_async.web.openapi import OpenApi
from dfm_async.web.paging import PageHandlers
from dfm_async.web.responses import Refusal, answer, unknown_route
from dfm_async.web.single_results import ResultHandlers
from dfm_async.web.state import Handlers, State
from dfm_async.web.writers import LiveHandlers, SocketHandlers

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9._~-]+")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_NOTICE: Final = """\
dfm_async: the service has no authorizer, so clients on this machine need a token.
  In a browser, open the live page with ?token={0}
  Programs send the header  Authorization: Bearer {0}
"""
_ATTEMPTS: Final = 5
"""How often a job is tried to be resumed whose store cannot be reached."""
_PAUSE: Final = 1.0
"""The number of seconds between these attempts."""
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STREAMS: Final[tuple[Metric[Streams], ...]] = (
    gauge(None, "streams_open", "{stream}", "Open streams.", value_of(len)),
    counter(None, "streams_opened_total", "{stream}", "Streams ever opened.", value_of(lambda s: s.opened)),
    counter(None, "streams_stalled_total", "{stream}", "Streams that stalled.", value_of(lambda s: s.stalled)),
)


def valid_name(name: str) -> bool:
    """Return whether a pipeline can be registered by a name, which becomes a part of URLs."""
    return _NAME.fullmatch(name) is not None


class Service:
    """Serve the jobs of a federation over HTTP.

    Give :attr:`lifespan` to your application, and mount :attr:`app`, or include :attr:`routes`::

        service = Service(federation, pipelines={"report": report})
        app = Starlette(lifespan=service.lifespan, routes=[Mount("/dfm", service.app)])

    ``service.app`` can also be served by itself.

    Args:
        federation: the sites and their operations; pass ``session`` instead for a session with options.
        session: the session to use, or a function that creates one each time that the application starts. A session
            that is already connected is not closed.
        pipelines: the pipelines that clients may run, by name.
        authorizer: identifies clients, and decides what they may do. Without one, only clients on this machine are
            served, with the token of ``DFM_TOKEN`` or one that is printed when the service starts; they may do
            everything. ``TokenAuthorizer(token)`` also serves clients on other machines, and ``AllowAnyone()`` needs no
            token.
        limits: the limits of clients.
        allow_pipelines: whether clients may submit their own pipelines. They can then call every operation of the
            federation, with any arguments.
        drain_on_signals: whether the service drains on SIGINT and SIGTERM. Otherwise open streams would delay the
            shutdown, because servers wait for open connections before they end the lifespan.
        page: whether the live page is served, at ``/``. Jobs of clients are then executed with ``watch=True``.
        resume: whether jobs in the store of the session that were interrupted are resumed when the service starts, the
            oldest first, and in PostgreSQL also the jobs of other processes that die later. Jobs that cannot be resumed
            stay interrupted, and are reported in the log.
        accept_changes: whether such jobs are resumed even if the code of their operations has changed.
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
        resume: bool = False,
        accept_changes: bool = False,
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
                raise TypeError(f"pipeline {name!r} must be a Pipeline, not {pipeline!r}")
            if not valid_name(name):
                raise ValueError(f"the name {name!r} of a pipeline must fit into a URL: letters, digits, . _ ~ -")
        self._federation = federation
        self._session = session
        self._drain_on_signals = drain_on_signals
        self._resume = resume
        self._accept_changes = accept_changes
        self._schedules: dict[str, Callable[[Session], Schedule[Any]]] = {}
        self.limits: WebLimits = limits or WebLimits()
        """What clients may have at most."""
        self._local: LocalAuthorizer | None = None
        if authorizer is None:
            authorizer = self._local = LocalAuthorizer()
        guard = Guard(authorizer)
        self._state = State(guard, self.limits, pipelines or {}, allow_pipelines, page)
        self._openapi = OpenApi(self._state)
        self._mcp: ASGIApp | None = None
        self._run_mcp: Callable[[Session], AbstractAsyncContextManager[None]] | None = None
        self.routes: list[BaseRoute] = self._make_routes()
        """The routes, to include them in an application."""
        refusals = {404: unknown_route, 405: unknown_route}
        self.app: Starlette = Starlette(routes=self.routes, lifespan=self.lifespan, exception_handlers=refusals)
        """An application with the routes, to mount it or to serve it by itself."""

    def _make_routes(self) -> list[BaseRoute]:
        state = self._state
        jobs, pages, monitoring, assets = JobHandlers(state), PageHandlers(state), _Monitoring(state), Assets(state)
        results = ResultHandlers(state)

        always = state.guard.query

        def route(method: str, path: str, handler: Handler, *query: str, checked: bool = True) -> Route:
            if method == "POST":  # others only read
                handler = traced(state, path, handler)
            endpoint = RouteEndpoint(handler, self.limits.retry, {*query, *always} if checked else None)
            made = Route(path, endpoint, methods=[method])
            made.methods = {method}  # without HEAD, which would open a stream that nothing reads
            return made

        page = [  # its address has parameters of its own
            route("GET", "/", assets.index, checked=False),
            route("GET", "/page/{name}", assets.file, checked=False),
        ]
        filters = ("status", "pipeline", "principal", "label", "since", "until", "search")
        socket = SocketHandlers(state).stream
        return [
            *(page if state.page else []),
            route("GET", "/stream", LiveHandlers(state).stream, "active"),
            route("GET", "/health", monitoring.health),
            route("GET", "/ready", monitoring.ready),
            route("GET", "/stats", monitoring.stats),
            route("GET", "/metrics", monitoring.metrics),
            route("GET", "/schedules", monitoring.schedules),
            route("GET", "/openapi.json", self._openapi.document),
            route("GET", "/pipelines", jobs.pipelines),
            route("POST", "/pipelines/{name}/jobs", jobs.submit, "activity"),
            route("GET", "/jobs", pages.jobs, "limit", "after", *filters),
            route("POST", "/jobs", jobs.submit_pipeline, "activity"),
            route("GET", "/jobs/{job_id}", jobs.show),
            route("DELETE", "/jobs/{job_id}", jobs.forget),
            route("GET", "/jobs/{job_id}/results/{offset}", results.result),
            route("GET", "/jobs/{job_id}/results/{offset}/image", results.image),
            route("GET", "/jobs/{job_id}/events", pages.events, "after", "limit", "wait"),
            route("GET", "/jobs/{job_id}/stream", jobs.stream, "after", "activity", "on_disconnect"),
            route("GET", "/jobs/{job_id}/graph", Drawings(state).graph),
            WebSocketRoute(
                "/jobs/{job_id}/socket",
                SocketEndpoint(socket, self.limits.retry, {"after", "on_disconnect", *always}),
            ),
            route("POST", "/jobs/{job_id}/inputs", jobs.send),
            route("POST", "/jobs/{job_id}/events/{event:path}", jobs.send_event),
            route("POST", "/jobs/{job_id}/finish", jobs.finish),
            route("POST", "/jobs/{job_id}/resume", jobs.resume, "accept_changes"),
            route("POST", "/jobs/{job_id}/retry", jobs.retry),
            route("POST", "/jobs/{job_id}/fork", jobs.fork),
            route("POST", "/jobs/{job_id}/cancel", jobs.cancel),
        ]

    def add_to_docs(self, app: Any, prefix: str) -> None:
        """Add the routes to the OpenAPI document of a FastAPI application, and with that to its ``/docs``.

        Users who can read that document can then read the names and schemas of the pipelines.

        Args:
            app: the application.
            prefix: where the service is mounted in it.
        """
        own = app.openapi
        app.openapi = lambda: self._openapi.merged(own(), prefix)

    def mcp(self) -> ASGIApp:
        """Return an application that offers every registered pipeline as a tool for agents. Needs the extra ``mcp``.

        The application serves the Model Context Protocol over HTTP. Add a route for it beside the service, before the
        service opens: ``Route("/mcp", service.mcp())``. The same authorizer decides which clients may see and call the
        tools. A call is a job of its principal.

        Raises:
            ImportError: the extra is not installed.
            SessionClosed: the service is already open.
            ValueError: the name of a pipeline cannot be the name of a tool.
        """
        if self._mcp is None:
            if self._state.current is not None:
                raise SessionClosed("the service is already open: call service.mcp() before its lifespan begins")
            from dfm_async.web.mcp_endpoint import McpEndpoint

            endpoint = McpEndpoint(self._state)
            self._mcp, self._run_mcp = endpoint, endpoint.running
        return self._mcp

    def schedule(
        self,
        name: str,
        pipeline: Pipeline,
        params: TickParams = None,
        *,
        cron: str | None = None,
        every: int | None = None,
        tz: str = "UTC",
        missed: Literal["skip", "once", "all"] = "skip",
        overlap: Literal["allow", "skip"] = "allow",
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Run a pipeline on a schedule while the service is open. Call it before the service opens.

        The arguments are those of :meth:`dfm_async.Session.schedule`. If several replicas of the service have one
        store in PostgreSQL, each tick runs in one of them. The jobs have the label ``schedule NAME``, which takes the
        place of a principal: authorizers decide who may read them.

        Raises:
            SessionClosed: the service is already open.
            ValueError: there is a schedule of this name, or an option is invalid.
            TypeError: neither ``cron`` nor ``every`` is given, or both are.
            ImportError: the extra ``schedule`` is not installed.
        """
        if self._state.current is not None:
            raise SessionClosed("the service is already open: call service.schedule() before its lifespan begins")
        if name in self._schedules:
            raise ValueError(f"the service has a schedule {name!r} already: choose another name")
        timetable(cron, every, tz)  # now, and not when the service opens
        given = ScheduleOptions(**{"watch": self._state.page, **options})
        self._schedules[name] = lambda session: session.schedule(
            name, pipeline, params, cron=cron, every=every, tz=tz, missed=missed, overlap=overlap, **given
        )

    def _replace_pipelines(self, pipelines: Mapping[str, Pipeline]) -> None:
        """Let clients run other pipelines from now on. They were checked before."""
        self._state.replace_pipelines(pipelines)

    # lifespan

    @asynccontextmanager
    async def lifespan(self, _app: Any = None) -> AsyncIterator[None]:
        """Open the session; at the end, drain the open streams and close it.

        Pass it to your application. In an application with its own lifespan, enter ``service.lifespan()`` there.

        Raises:
            PipelineError: a registered pipeline cannot be run, or one of a schedule.
            ParameterError: the parameters of a schedule do not fit.
            StoreError: another process serves the same store.
            ValueError: interrupted jobs are to be resumed, and the session has no store.
        """
        state = self._state
        if state.current is not None:
            raise SessionClosed("the service is already open")
        session = self._new_session()
        if self._resume and not session._has_store:
            raise ValueError(
                "Service(resume=True) needs a session with a store: Session(..., store='sqlite:///jobs.db')"
            )
        ours = not session.connected
        if ours:
            await session.connect()
        resuming: asyncio.Task[None] | None = None
        tools = AsyncExitStack()
        try:
            session._claim_service()
            for pipeline in state.pipelines.values():
                await session.prepare(pipeline)
            state.streams.open()
            state.current = session
            await self._openapi.prepare()
            if self._run_mcp is not None:
                await tools.enter_async_context(self._run_mcp(session))
            if self._local is not None and self._local.generated:
                sys.stderr.write(_NOTICE.format(self._local.token))
                sys.stderr.flush()
            if self._resume:
                resuming = session._spawn(self._resume_jobs(session))
            for make in self._schedules.values():
                await tools.enter_async_context(make(session))
            with _on_shutdown_signal(state.streams.drain) if self._drain_on_signals else nullcontext():
                yield
                await self.drain()
        finally:
            state.streams.drain()
            if resuming is not None:
                resuming.cancel()
                await asyncio.wait([resuming])
            await tools.aclose()
            state.current = None
            state.forget()
            if ours:
                await session.close()

    async def _resume_jobs(self, session: Session) -> None:
        """Resume interrupted jobs: those that there are, and later those of other processes that die."""
        failures: Counter[str] = Counter()
        """How often each job could not be resumed."""
        try:
            while True:
                try:
                    found = [info async for info in session.find_jobs(status=JobStatus.INTERRUPTED)]
                    for info in reversed(found):
                        if failures[info.job_id] < _ATTEMPTS:
                            failures[info.job_id] += await self._resume_job(session, info)
                    again = any(failures[info.job_id] in range(1, _ATTEMPTS) for info in found)
                    await session._jobs_interrupted(_PAUSE if again else None)
                except StoreError as error:
                    _log.warning("interrupted jobs cannot be resumed now: %s", error)
                    await asyncio.sleep(_PAUSE)
        except SessionClosed:
            return

    async def _resume_job(self, session: Session, info: JobInfo) -> int:
        """Resume a job, as soon as the session can take it; return the number of attempts that this has cost."""
        try:
            job = await session.resume(info.job_id, watch=self._state.page, accept_changes=self._accept_changes)
        except SessionClosed:
            raise
        except JobOwned:  # another service was faster: follow the job there
            await session.reattach(info.job_id)
            return 0
        except DfmError as error:
            _log.warning("job %s stays interrupted: %s", info.job_id, error, extra={"job": info.job_id})
            return 1 if isinstance(error, StoreError) else _ATTEMPTS  # a store may be reached again
        if info.label is not None:
            self._state.quota.add(Principal(info.label), job)
        return 0

    def _new_session(self) -> Session:
        if self._federation is not None:
            return Session(self._federation)
        if isinstance(self._session, Session):
            return self._session
        assert self._session is not None  # noqa: S101 - one of the two was given
        return self._session()

    async def drain(self) -> None:
        """Accept no further jobs and streams, and end the open streams; each reports the offset to continue from.

        Jobs continue, and clients can read and control them. Return when the last stream has ended.
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
        """Whether the service accepts jobs and streams."""
        return self._state.ready

    def session(self, request: HTTPConnection) -> Session:
        """Return the session, for your own handlers: ``Depends(service.session)``, or ``service.session(request)``.

        Raises:
            SessionClosed: the service is not open.
        """
        if self._state.current is None:
            raise SessionClosed("the service is not open: give lifespan=service.lifespan to the application")
        return self._state.current


class _Monitoring(Handlers):
    """Answers monitors of the service. Probes need neither a token nor a principal."""

    async def health(self, request: Request, _send: Send) -> Response:
        """Report that the service is alive."""
        self._state.guard.check_client(request)
        return answer({"status": "alive"})

    async def ready(self, request: Request, _send: Send) -> Response:
        """Report whether the service takes jobs and streams, and all its sites can serve."""
        state = self._state
        state.guard.check_client(request)
        if not state.ready:
            raise Refusal(503, "not ready", f"the service is {'draining' if state.streams.draining else 'not open'}")
        if unready := state.session.stats().unready:
            raise Refusal(503, "not ready", f"sites that cannot serve: {', '.join(unready)}")
        return answer({"status": "ready"})

    async def stats(self, request: Request, _send: Send) -> Response:
        """Return the statistics of the session."""
        state = self._state
        await state.authorize(request, "metrics")
        return answer(state.session.stats())

    async def schedules(self, request: Request, _send: Send) -> Response:
        """List the schedules of this service; none for principals that may not see metrics."""
        state = self._state
        principal = await state.authorize(request, "list")
        found = state.session.schedules() if state.guard.allows(principal, "metrics") else []
        return answer({"schedules": found})

    async def metrics(self, request: Request, _send: Send) -> Response:
        """Return the metrics of the session and its streams."""
        state = self._state
        await state.authorize(request, "metrics")
        text = prometheus_text(METRICS, state.session.stats()) + prometheus_text(_STREAMS, state.streams)
        return Response(text, media_type=_METRICS_TYPE)


@contextmanager
def _on_shutdown_signal(call: Callable[[], None]) -> Iterator[None]:
    """Call a function on the loop when the process receives SIGINT or SIGTERM, in addition to their handlers.

    Signals without a handler are left alone, and so are all signals outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def chained(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
        def handle(number: int, frame: FrameType | None) -> Any:
            if not loop.is_closed():
                loop.call_soon_threadsafe(call)
            return handler(number, frame)

        return handle

    before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    ours = {number: chained(handler) for number, handler in before.items()}
    for number, handle in ours.items():
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handle in ours.items():
            if signal.getsignal(number) is handle:  # else another handler was set meanwhile
                signal.signal(number, before[number])
