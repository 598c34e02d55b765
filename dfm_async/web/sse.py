"""Server-sent events, written by hand.

A stream has to end in several ways that a general writer does not know: with the job, when the service drains, when the
client takes nothing for too long; and each of them says at which offset. Writing the format itself is a few lines.
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
from dfm_async.web.streams import JobReader

__all__ = ["EventWriter", "Line", "last_words"]

_log = logging.getLogger(__name__)

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else some proxies hold back what they get
]


def last_words(reader: JobReader) -> dict[str, Any]:
    """What a client is told when its stream ends: why, and where to go on."""
    name = "end" if reader.course.phase is Phase.ENDED else "drain"
    return {"event": name, "offset": reader.position, "status": reader.job.status.value}


class Line:
    """The connection to one client, while server-sent events are written to it.

    Args:
        request: how to hear and to write.
        course: how the stream goes on; told if the client leaves, or takes nothing.
        limits: how long to wait for what.
        where: what a line in the log tells about the stream.
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
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, status: int, headers: list[tuple[bytes, bytes]], body: Callable[[], Awaitable[None]]) -> None:
        """Begins the answer, and has the body write all that comes then; hears meanwhile whether the client leaves."""
        start = {"type": "http.response.start", "status": status, "headers": [*_HEADERS, *headers]}
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen())
            self._look_at(loop.time() + self._limits.stall)
            try:
                await self._send(start)
                await self.write(b"retry: %d\n\n" % round(self._limits.retry * 1000))
                await body()
            finally:
                listener.cancel()
                if self._timer is not None:
                    self._timer.cancel()

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
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._course.reach(Phase.GONE)

    async def still_here(self) -> None:
        """Gives a sign of life."""
        await self.write(b": still here\n\n")

    async def write(self, data: bytes, more: bool = True) -> None:
        """Writes, unless nobody is there any more; ``more``: whether this is not the end."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

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
            _log.info("a client took nothing for %g s: its stream ended", self._limits.stall, extra=self._where())
        except OSError:
            self._course.reach(Phase.GONE)


class EventWriter:
    """Writes the records of a job to one client as server-sent events.

    Args:
        request: how to hear and to write.
        reader: reads the job.
        records: makes records of the job's events.
        limits: how long to wait for what.
        activity: what the operations of the job do, if the client wants to see it.
    """

    def __init__(
        self,
        request: tuple[Receive, Send],
        reader: JobReader,
        records: LogRecords,
        limits: WebLimits,
        activity: ActivityReader | None = None,
    ) -> None:
        self._line = Line(request, reader.course, limits, self._where)
        self._reader = reader
        self._records = records
        self._limits = limits
        self._activity = activity

    async def run(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Writes until there is nothing more to come, the service drains, or the client is gone."""
        await self._line.run(status, headers, self._write_all)

    async def _write_all(self) -> None:
        if self._activity is None:
            await self._write_log()
        else:
            async with self._activity as activity, asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch(activity))
                await self._write_log()
                if self._reader.course.phase is not Phase.ENDED:  # else it ends by itself, with the last totals
                    watcher.cancel()
        reader = self._reader
        words = last_words(reader)
        data = sse_event(words["event"], msgspec.json.encode(words), reader.position)
        await self._line.write(data, more=False)

    async def _watch(self, activity: ActivityReader) -> None:
        async for seen in activity:
            data = msgspec.json.encode({"event": "activity", **msgspec.structs.asdict(seen)})
            await self._line.write(sse_event("activity", data, -1))

    async def _write_log(self) -> None:
        reader, course = self._reader, self._reader.course
        while course.going_on:
            events = await reader.follow(self._limits.heartbeat)
            if events:
                await self._write_events(events)
            elif course.going_on:
                await self._line.still_here()

    async def _write_events(self, events: list[Event]) -> None:
        reader = self._reader
        for data, position in self._records.chunks(events, shared=reader.log.readers > 1):
            await self._line.write(data)
            if reader.course.gone:
                return
            reader.position = position
            await asyncio.sleep(0)  # a client that takes everything at once must not keep others waiting

    def _where(self) -> dict[str, Any]:
        return {"job": self._reader.job.job_id, "offset": self._reader.position}
