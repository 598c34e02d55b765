"""The stream of the whole service: what happens to all jobs, and how the workers are."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.types import Send

from dfm_async.session.session import Session
from dfm_async.session.watch import JobWatch
from dfm_async.web.access import Principal
from dfm_async.web.jobs import info_data
from dfm_async.web.records import sse_event
from dfm_async.web.sse import Writer
from dfm_async.web.state import State
from dfm_async.web.streams import Reader

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
            reader = ServiceReader()
            with seat.taken(reader):
                writer = ServiceWriter(reader, state, principal, session)
                await writer.run(request.receive, send, 200, [])


class ServiceReader(Reader):
    """Reads what happens to all jobs. It is a state: whoever comes back begins with everything that there is."""

    def __init__(self) -> None:
        super().__init__()
        self._over = asyncio.Event()

    def wake(self) -> None:
        """Has the stream end."""
        self._over.set()

    async def over(self) -> None:
        """Waits for a reason to end."""
        await self._over.wait()


class ServiceWriter(Writer):
    """Writes jobs and sites to one client as server-sent events without ids."""

    def __init__(self, reader: ServiceReader, state: State, principal: Principal, session: Session) -> None:
        super().__init__(reader, state.limits)
        self._service = reader
        self._guard = state.guard
        self._principal = principal
        self._session = session

    async def _stream(self, send: Send) -> None:
        async with self._session.changes(_JOBS) as changes, asyncio.TaskGroup() as group:
            tellers = [group.create_task(self._tell_jobs(send, changes))]
            if self._guard.allows(self._principal, "metrics"):
                tellers.append(group.create_task(self._tell_sites(send)))
            await self._stay(send)
            for teller in tellers:
                teller.cancel()
        if not self._service.gone:
            await self._write(send, sse_event("drain", msgspec.json.encode({"event": "drain"}), -1), more=False)

    async def _stay(self, send: Send) -> None:
        while self._service.going_on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.heartbeat):
                    await self._service.over()
            if self._service.going_on:
                await self._still_here(send)

    async def _tell_jobs(self, send: Send, changes: JobWatch) -> None:
        async for info in changes:
            if self._guard.sees(self._principal, info):
                await self._write(send, sse_event("job", msgspec.json.encode(info_data(info)), -1))
            await asyncio.sleep(0)  # a service that knows many jobs must not keep others waiting
        self._service.drain()  # the session is about to end

    async def _tell_sites(self, send: Send) -> None:
        async with self._session.health(_SITES) as health:
            async for sites in health:
                await self._write(send, sse_event("sites", msgspec.json.encode({"event": "sites", "sites": sites}), -1))
