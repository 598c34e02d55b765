"""The stream of the whole service: what happens to all jobs, and how the workers are."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Send

from dfm_async.session.session import Session
from dfm_async.session.watch import JobWatch, SiteWatch
from dfm_async.web.access import Principal
from dfm_async.web.course import Course, Phase
from dfm_async.web.jobs import info_data
from dfm_async.web.records import sse_event
from dfm_async.web.sse import Line
from dfm_async.web.state import State

__all__ = ["LiveHandlers"]

_JOBS: Final = 0.2
"""How many seconds lie at least between two looks at the jobs."""
_SITES: Final = 1.0
"""How many seconds lie at least between two looks at the workers."""


class LiveHandlers:
    """Answers those who watch."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def stream(self, request: Request, send: Send) -> None:
        """Streams what happens to all jobs that the client may see, and how the workers are."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "list")
        session = state.session
        with state.streams.seat(principal) as seat:
            writer = ServiceWriter((request.receive, send), state, principal, session)
            with seat.taken(writer.course):
                await writer.run()
            await writer.line.linger(seat)


class ServiceWriter:
    """Writes jobs and sites to one client as server-sent events without ids.

    It is a state: a client that comes back begins with everything that there is.

    Attributes:
        course: the phase of the stream.
        line: the connection to the client.
    """

    def __init__(self, request: tuple[Receive, Send], state: State, principal: Principal, session: Session) -> None:
        self._over = asyncio.Event()
        self.course = Course(self._over.set)
        self.line = Line(request, self.course, state.limits)
        self._heartbeat = state.limits.heartbeat
        self._guard = state.guard
        self._principal = principal
        self._session = session

    async def run(self) -> None:
        """Writes until the service drains, or the client is gone."""
        await self.line.events(200, [], self._write_all)

    async def _write_all(self) -> None:
        session = self._session
        async with session.changes(_JOBS) as changes, session.health(_SITES) as health, asyncio.TaskGroup() as group:
            group.create_task(self._tell_jobs(changes))
            if self._guard.allows(self._principal, "metrics"):
                group.create_task(self._tell_sites(health))
            await self._stay()
            await changes.aclose()  # rather than cancelled: what is being written must be written as a whole
            await health.aclose()
        await self.line.write(sse_event("drain", msgspec.json.encode({"event": "drain"}), -1), more=False)

    async def _stay(self) -> None:
        while self.course.going_on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):
                    await self._over.wait()
            if self.course.going_on:
                await self.line.still_here()

    async def _tell_jobs(self, changes: JobWatch) -> None:
        async for info in changes:
            if self._guard.sees(self._principal, info):
                await self.line.write(sse_event("job", msgspec.json.encode(info_data(info)), -1))
            await asyncio.sleep(0)  # a service that knows many jobs must not keep others waiting
        self.course.reach(Phase.DRAINING)  # the session is about to end

    async def _tell_sites(self, health: SiteWatch) -> None:
        async for sites in health:
            data = msgspec.json.encode({"event": "sites", "sites": sites})
            await self.line.write(sse_event("sites", data, -1))
