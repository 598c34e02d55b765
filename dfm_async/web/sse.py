"""Server-sent events, written by hand.

A stream has to end in several ways that a general writer does not know: with the job, when the service drains, when the
client reads nothing for too long; and each of them says at which offset. Writing the format itself is a few lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.types import Receive, Send

from dfm_async.model.events import Event
from dfm_async.results.watching import ActivityReader
from dfm_async.web.course import Course, Phase
from dfm_async.web.limits import WebLimits
from dfm_async.web.records import LogRecords, sse_event
from dfm_async.web.streams import JobReader, Seat

__all__ = ["EventWriter", "Line", "interruption", "last_words"]

_log = logging.getLogger(__name__)

_PIECE: Final = 64 * 1024
"""The number of bytes that are written at once: a server buffers little more of what a client does not read."""
_INTERVAL: Final = 0.2
"""The least number of seconds between two reports of what operations do."""
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else some proxies hold back what they get
]


def last_words(reader: JobReader) -> dict[str, Any]:
    """What a client is told when its stream ends: why, and where to go on."""
    name = "end" if reader.course.phase is Phase.ENDED else "drain"
    return {"event": name, "offset": reader.position, "status": reader.job.status.value}


def interruption(reader: JobReader) -> dict[str, Any]:
    """What a client is told when its job was interrupted; the stream goes on when the job is resumed."""
    return {"event": "interrupted", "offset": reader.position, "status": reader.job.status.value}


class Line:
    """The connection to one client, while an answer of unknown length is written to it.

    Args:
        request: receives from the client, and sends to it.
        course: the phase of the stream; notified if the client leaves, or reads nothing.
        limits: how long to wait for what.
        where: what a line in the log says about the stream.
    """

    def __init__(
        self,
        request: tuple[Receive, Send],
        course: Course,
        limits: WebLimits,
        where: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._receive, self._sender = request
        self._course = course
        self._limits = limits
        self._where = where
        self._writes: dict[asyncio.Timeout, float] = {}
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def events(
        self, status: int, headers: list[tuple[bytes, bytes]], body: Callable[[], Awaitable[None]]
    ) -> None:
        """Begins a stream of server-sent events, and has the body write them."""

        async def write() -> None:
            await self.write(b"retry: %d\n\n" % round(self._limits.retry * 1000))
            await body()

        await self.run(status, [*_HEADERS, *headers], write)

    async def run(self, status: int, headers: list[tuple[bytes, bytes]], body: Callable[[], Awaitable[None]]) -> None:
        """Begins the answer, and has the body write it; notices meanwhile whether the client leaves."""
        start = {"type": "http.response.start", "status": status, "headers": headers}
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen())
            self._look_at(loop.time() + self._limits.stall)
            try:
                await self._send(start)
                await body()
            finally:
                listener.cancel()
                if self._timer is not None:
                    self._timer.cancel()

    async def linger(self, seat: Seat) -> None:
        """Keeps the seat of a client that reads nothing until it reads what the server has buffered, or is gone."""
        if self._course.phase is Phase.STALLED:
            end = {"type": "http.response.body", "body": b"", "more_body": False}
            await seat.linger(self._sender(end), self._until_gone())

    def _look_at(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """Ends writes that take too long. One look from time to time is much cheaper than a timer for each write."""
        now, stall = asyncio.get_running_loop().time(), self._limits.stall
        for patience, since in self._writes.items():
            if since + stall <= now and not patience.expired():
                patience.reschedule(now)
        self._look_at(min((since for since in self._writes.values() if since + stall > now), default=now) + stall)

    async def _listen(self) -> None:
        await self._until_gone()
        self._course.reach(Phase.GONE)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def still_here(self) -> None:
        """Writes a heartbeat."""
        await self.write(b": still here\n\n")

    async def write(self, data: bytes, more: bool = True) -> None:
        """Writes, unless the client is gone; ``more``: whether this is not the end.

        Data of several writers comes whole, one after the other. Cancelling it leaves the answer in pieces.
        """
        async with self._writing:
            for start in range(0, len(data) or 1, _PIECE):
                piece = data[start : start + _PIECE] if len(data) > _PIECE else data
                further = more or start + _PIECE < len(data)
                await self._send({"type": "http.response.body", "body": piece, "more_body": further})

    async def _send(self, message: dict[str, Any]) -> None:
        if self._course.gone:
            return
        try:
            async with asyncio.timeout(None) as patience:
                self._writes[patience] = asyncio.get_running_loop().time()
                try:
                    await self._sender(message)
                finally:
                    del self._writes[patience]
        except TimeoutError:
            self._course.reach(Phase.STALLED)
            _log.info("a client read nothing for %g s: its stream ended", self._limits.stall, extra=self._where())
        except OSError:
            self._course.reach(Phase.GONE)


class EventWriter:
    """Writes the records of a job to one client as server-sent events.

    Args:
        request: receives from the client, and sends to it.
        reader: reads the job.
        records: makes records of the job's events.
        limits: how long to wait for what.
        activity: whether the client also wants to see what the operations of the job do.
    """

    def __init__(
        self,
        request: tuple[Receive, Send],
        reader: JobReader,
        records: LogRecords,
        limits: WebLimits,
        activity: bool = False,
    ) -> None:
        self.line = Line(request, reader.course, limits, self._where)
        self._reader = reader
        self._records = records
        self._limits = limits
        self._activity = activity

    async def run(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Writes until there is nothing more to come, the service drains, or the client is gone."""
        await self.line.events(status, headers, self._write_all)

    async def _write_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            await self._write_log(group)
        reader = self._reader
        words = last_words(reader)
        data = sse_event(words["event"], msgspec.json.encode(words), reader.position)
        await self.line.write(data, more=False)

    async def _watch(self, activity: ActivityReader) -> None:
        async with activity:
            async for seen in activity:
                data = msgspec.json.encode({"event": "activity", **msgspec.structs.asdict(seen)})
                await self.line.write(sse_event("activity", data, -1))

    async def _write_log(self, group: asyncio.TaskGroup) -> None:
        reader, course = self._reader, self._reader.course
        watched: ActivityReader | None = None
        told = False
        while course.going_on:
            job = reader.job
            resumed = watched is not None and watched.ended and not job.status.ended
            if self._activity and job.watched and (watched is None or resumed):
                watched = job.activity(_INTERVAL)
                group.create_task(self._watch(watched))
            events = await reader.follow(self._limits.heartbeat)
            if events:
                await self._write_events(events)
            elif reader.interrupted and not told:
                words = interruption(reader)
                await self.line.write(sse_event(words["event"], msgspec.json.encode(words), -1))
            elif course.going_on:
                await self.line.still_here()
            told = reader.interrupted
        if watched is not None and course.phase is not Phase.ENDED:  # else it ends by itself, with the last totals
            await watched.aclose()

    async def _write_events(self, events: list[Event]) -> None:
        reader = self._reader
        for data, position in self._records.chunks(events, shared=reader.log.readers > 1):
            await self.line.write(data)
            if reader.course.gone:
                return
            reader.position = position
            await asyncio.sleep(0)  # a client that reads everything at once must not keep others waiting

    def _where(self) -> dict[str, Any]:
        return {"job": self._reader.job.job_id, "offset": self._reader.position}
