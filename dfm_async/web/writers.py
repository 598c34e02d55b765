"""Streams as clients get them: server-sent events and WebSockets of one job, server-sent events of the whole service.

They are written by hand, because a stream ends in several ways that a general writer does not know: with the job, when
the service drains, when the client reads nothing for too long; and each of them reports an offset.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from dfm_async.model.events import Event
from dfm_async.results.watching import ActivityReader
from dfm_async.session.watch import JobWatch, SiteWatch
from dfm_async.web.access import Principal
from dfm_async.web.limits import WebLimits
from dfm_async.web.open_streams import JobReader, StreamPhase, StreamSlot, StreamState, disconnected
from dfm_async.web.records import LogRecords, sse_event
from dfm_async.web.requests import flag, on_disconnect, read_after
from dfm_async.web.responses import info_data
from dfm_async.web.state import Handlers, State

_log = logging.getLogger(__name__)

_PIECE: Final = 64 * 1024
"""The number of bytes that are written at once: a server buffers little more of what a client does not read."""
_INTERVAL: Final = 0.2
"""The least number of seconds between two reports of jobs, or of what operations do."""
_SITE_INTERVAL: Final = 1.0
"""The least number of seconds between two reports of the workers."""
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else some proxies buffer the response
]
_END: Final = {"type": "http.response.body", "body": b"", "more_body": False}
_CLOSED: Final = 1000
"""The close code of a WebSocket whose job has ended."""
_DRAINING: Final = 1012
"""The close code of a service that restarts."""
_TRY_AGAIN: Final = 1013
"""The close code for a client that read nothing for too long."""
_TURN: Final = 8
"""The number of messages after which other tasks run: all readers that are ready write in one turn of the loop."""


def response_start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    """Return the message that begins a response."""
    return {"type": "http.response.start", "status": status, "headers": headers}


class ClientConnection:
    """The connection to one client, while a response of unknown length is written to it, or messages of a WebSocket.

    Args:
        client: receives from the client, and sends to it.
        state: the phase of the stream; notified if the client disconnects, or reads nothing.
        limits: the timeouts.
        where: returns the fields of log records about the stream.
        gone: the type of the message that the client has disconnected.
    """

    def __init__(
        self,
        client: tuple[Receive, Send],
        state: StreamState,
        limits: WebLimits,
        where: Callable[[], dict[str, Any]] = dict,
        gone: str = "http.disconnect",
    ) -> None:
        self._receive, self._sender = client
        self._state = state
        self._limits = limits
        self._where = where
        self._gone = gone
        self._writes: dict[asyncio.Timeout, float] = {}
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def events(
        self, status: int, headers: list[tuple[bytes, bytes]], body: Callable[[], Awaitable[None]]
    ) -> None:
        """Begin a stream of server-sent events; the body writes them."""
        retry = b"retry: %d\n\n" % round(self._limits.retry * 1000)
        first = {"type": "http.response.body", "body": retry, "more_body": True}
        await self.run(body, response_start(status, [*_HEADERS, *headers]), first)

    async def run(self, body: Callable[[], Awaitable[None]], *first: Message) -> None:
        """Send the first messages; then the body writes. Notices meanwhile whether the client disconnects."""
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen())
            self._check_at(asyncio.get_running_loop().time() + self._limits.stall)
            try:
                for message in first:
                    await self.send(message)
                await body()
            finally:
                listener.cancel()
                if self._timer is not None:
                    self._timer.cancel()

    async def keep(self, slot: StreamSlot, end: Message = _END) -> None:
        """Keep the slot of a client that reads nothing until it reads what the server has buffered, or is gone."""
        if self._state.phase is StreamPhase.STALLED:
            await slot.keep_until(self._sender(end), disconnected(self._receive, self._gone))

    def _check_at(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._check)

    def _check(self) -> None:
        """End writes that take too long. One check from time to time is much cheaper than a timer for each write."""
        now, stall = asyncio.get_running_loop().time(), self._limits.stall
        for timeout, since in self._writes.items():
            if since + stall <= now and not timeout.expired():
                timeout.reschedule(now)
        self._check_at(min((since for since in self._writes.values() if since + stall > now), default=now) + stall)

    async def _listen(self) -> None:
        await disconnected(self._receive, self._gone)
        self._state.reach(StreamPhase.GONE)

    async def heartbeat(self) -> None:
        """Write a heartbeat."""
        await self.write(b": heartbeat\n\n")

    async def event(self, data: dict[str, Any], offset: int = -1, more: bool = True) -> None:
        """Write an event that is not in a log; without an offset it has no id."""
        await self.write(sse_event(data["event"], msgspec.json.encode(data), offset), more)

    async def write(self, data: bytes, more: bool = True) -> None:
        """Write, unless the client is gone; ``more``: whether this is not the end.

        Data of several writers arrives whole, one after the other. Cancelling it leaves the response incomplete.
        """
        async with self._writing:
            for start in range(0, len(data) or 1, _PIECE):
                piece = data[start : start + _PIECE] if len(data) > _PIECE else data
                further = more or start + _PIECE < len(data)
                await self.send({"type": "http.response.body", "body": piece, "more_body": further})

    async def send(self, message: Message) -> None:
        """Send a message of the protocol, unless the client is gone."""
        if self._state.gone:
            return
        try:
            async with asyncio.timeout(None) as timeout:
                self._writes[timeout] = asyncio.get_running_loop().time()
                try:
                    await self._sender(message)
                finally:
                    del self._writes[timeout]
        except TimeoutError:
            self._state.reach(StreamPhase.STALLED)
            _log.info("a client read nothing for %g s: its stream ended", self._limits.stall, extra=self._where())
        except (OSError, WebSocketDisconnect):
            self._state.reach(StreamPhase.GONE)


class ServerSentEventWriter:
    """Writes the records of a job to one client as server-sent events; on request also what its operations do."""

    def __init__(
        self,
        request: tuple[Receive, Send],
        reader: JobReader,
        records: LogRecords,
        limits: WebLimits,
        activity: bool = False,
    ) -> None:
        self.connection = ClientConnection(request, reader.state, limits, reader.where)
        self._reader = reader
        self._records = records
        self._limits = limits
        self._activity = activity

    async def run(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Write until there is nothing more to come, the service drains, or the client is gone."""
        await self.connection.events(status, headers, self._write_all)

    async def _write_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            await self._write_log(group)
        await self.connection.event(self._reader.last_notice(), self._reader.position, more=False)

    async def _watch(self, activity: ActivityReader) -> None:
        async with activity:
            async for seen in activity:
                await self.connection.event({"event": "activity", **msgspec.structs.asdict(seen)})

    async def _write_log(self, group: asyncio.TaskGroup) -> None:
        reader, state = self._reader, self._reader.state
        watched: ActivityReader | None = None
        reported = False
        while state.open:
            job = reader.job
            resumed = watched is not None and watched.ended and not job.status.ended
            if self._activity and job.watched and (watched is None or resumed):
                watched = job.activity(_INTERVAL)
                group.create_task(self._watch(watched))
            events = await reader.follow(self._limits.heartbeat)
            if events:
                await self._write_events(events)
            elif reader.interrupted and not reported:
                await self.connection.event(reader.notice("interrupted"))
            elif state.open:
                await self.connection.heartbeat()
            reported = reader.interrupted
        if watched is not None and state.phase is not StreamPhase.ENDED:  # else it ends by itself, with the last totals
            await watched.aclose()

    async def _write_events(self, events: list[Event]) -> None:
        reader = self._reader
        for data, position in self._records.chunks(events, shared=reader.log.readers > 1):
            await self.connection.write(data)
            if reader.state.gone:
                return
            reader.position = position
            await asyncio.sleep(0)  # a client that reads everything at once must not keep others waiting


class SocketHandlers(Handlers):
    """Serves WebSockets: the same records as JSON text."""

    async def stream(self, socket: WebSocket) -> None:
        """Send the records of a job, one per message."""
        state = self._state
        principal, job, info = await state.job(socket, "read")
        gone = on_disconnect(socket)
        if gone == "cancel":
            state.guard.check_job(principal, "cancel", info)
        after = read_after(socket, info)
        with state.streams.slot(principal) as slot:
            async with slot.reading(state.session, job, after) as reader:
                await socket.accept()
                records = state.records_for(principal, info, reader.log)
                client = (socket.receive, socket.send)
                connection = ClientConnection(client, reader.state, state.limits, reader.where, "websocket.disconnect")
                await connection.run(lambda: _send_records(connection, reader, records, state.limits.heartbeat))
            if reader.state.gone and gone == "cancel":
                await job.cancel("the reader of its stream has gone")
            await connection.keep(slot, {"type": "websocket.close", "code": _TRY_AGAIN})


async def _send_records(connection: ClientConnection, reader: JobReader, records: LogRecords, heartbeat: float) -> None:
    async def send(text: bytes) -> None:
        await connection.send({"type": "websocket.send", "text": text.decode()})

    reported = False
    while reader.state.open:
        # The server itself sends heartbeats: there is nothing to write meanwhile.
        for count, event in enumerate(await reader.follow(heartbeat)):
            if count % _TURN == 0:
                await asyncio.sleep(0)  # a client that reads everything at once must not keep others waiting
            await send(records.message(event))
            if reader.state.gone:
                return
            reader.position = event.offset
        if reader.interrupted and not reported:
            await send(msgspec.json.encode(reader.notice("interrupted")))
        reported = reader.interrupted
    await send(msgspec.json.encode(reader.last_notice()))
    code = _CLOSED if reader.state.phase is StreamPhase.ENDED else _DRAINING
    await connection.send({"type": "websocket.close", "code": code})


class LiveHandlers(Handlers):
    """Answers clients that watch the whole service."""

    async def stream(self, request: Request, send: Send) -> None:
        """Stream the state of all jobs that the client may see, and of the workers."""
        state = self._state
        principal = await state.authorize(request, "list")
        with state.streams.slot(principal) as slot:
            active = flag(request.query_params, "active")
            writer = _ServiceWriter((request.receive, send), state, principal, active)
            with slot.used(writer.state):
                await writer.run()
            await writer.connection.keep(slot)


class _ServiceWriter:
    """Writes jobs and sites to one client as server-sent events without ids.

    They are a state, not a history: a client that reconnects gets everything anew.
    """

    def __init__(self, request: tuple[Receive, Send], state: State, principal: Principal, active: bool) -> None:
        self._ending = asyncio.Event()
        self.state = StreamState(self._ending.set)
        self.connection = ClientConnection(request, self.state, state.limits)
        self._heartbeat = state.limits.heartbeat
        self._guard = state.guard
        self._principal = principal
        self._session = state.session
        self._active = active

    async def run(self) -> None:
        """Write until the service drains, or the client is gone."""
        await self.connection.events(200, [], self._write_all)

    async def _write_all(self) -> None:
        changes = self._session.changes(_INTERVAL, active=self._active)
        health = self._session.health(_SITE_INTERVAL)
        async with changes, health, asyncio.TaskGroup() as group:
            group.create_task(self._write_jobs(changes))
            if self._guard.allows(self._principal, "metrics"):
                group.create_task(self._write_sites(health))
            while self.state.open:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat):
                        await self._ending.wait()
                if self.state.open:
                    await self.connection.heartbeat()
            await changes.aclose()  # rather than cancelled: an event must be written as a whole
            await health.aclose()
        await self.connection.event({"event": "drain"}, more=False)

    async def _write_jobs(self, changes: JobWatch) -> None:
        async for info in changes:
            if self._guard.sees(self._principal, info):
                await self.connection.write(sse_event("job", msgspec.json.encode(info_data(info)), -1))
            await asyncio.sleep(0)  # a service that knows many jobs must not keep others waiting
        self.state.reach(StreamPhase.DRAINING)  # the session is about to end

    async def _write_sites(self, health: SiteWatch) -> None:
        async for sites in health:
            await self.connection.event({"event": "sites", "sites": sites})
