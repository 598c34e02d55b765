"""Server-sent events, written by hand.

A stream has to end in several ways that a general writer does not know: with the job, when the service drains, when the
client takes nothing for too long; and each of them says at which offset. Writing the format itself is a few lines.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec
from starlette.types import Receive, Send

from dfm_async.model.events import Event
from dfm_async.results.watching import ActivityReader
from dfm_async.web.limits import WebLimits
from dfm_async.web.records import LogRecords, sse_event
from dfm_async.web.streams import JobReader, Reader

__all__ = ["EventWriter", "Writer", "last_words"]

_log = logging.getLogger(__name__)

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else some proxies hold back what they get
]


def last_words(reader: JobReader) -> dict[str, Any]:
    """What a client is told when its stream ends: why, and where to go on."""
    name = "end" if reader.ended else "drain"
    return {"event": name, "offset": reader.position, "status": reader.job.status.value}


class Writer:
    """Writes server-sent events to one client.

    Args:
        reader: what the client reads.
        limits: how long to wait for what.
    """

    def __init__(self, reader: Reader, limits: WebLimits) -> None:
        self._reader = reader
        self._limits = limits
        self._writes: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, receive: Receive, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Writes until there is nothing more to come, the service drains, or the client is gone."""
        start = {"type": "http.response.start", "status": status, "headers": [*_HEADERS, *headers]}
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen(receive))
            self._look_at(loop.time() + self._limits.stall)
            try:
                await self._send(send, start)
                await self._write(send, b"retry: %d\n\n" % round(self._limits.retry * 1000))
                await self._stream(send)
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

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._reader.leave()

    async def _stream(self, send: Send) -> None:
        """Writes everything that is between the first words and the end."""
        raise NotImplementedError

    async def _still_here(self, send: Send) -> None:
        await self._write(send, b": still here\n\n")

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        reader = self._reader
        if reader.gone:
            return
        try:
            async with asyncio.timeout(None) as patience:
                self._writes[patience] = asyncio.get_running_loop().time()
                try:
                    await send(message)
                finally:
                    del self._writes[patience]
        except TimeoutError:
            reader.stall()
            _log.info("a client took nothing for %g s: its stream ended", self._limits.stall, extra=self._where())
        except OSError:
            reader.leave()

    def _where(self) -> dict[str, Any]:
        """What a line in the log tells about the stream."""
        return {}


class EventWriter(Writer):
    """Writes the records of a job to one client as server-sent events.

    Args:
        reader: reads the job.
        records: makes records of the job's events.
        limits: how long to wait for what.
        activity: what the operations of the job do, if the client wants to see it.
    """

    def __init__(
        self, reader: JobReader, records: LogRecords, limits: WebLimits, activity: ActivityReader | None = None
    ) -> None:
        super().__init__(reader, limits)
        self._job = reader
        self._records = records
        self._activity = activity

    async def _stream(self, send: Send) -> None:
        if self._activity is None:
            await self._write_log(send)
        else:
            async with self._activity as activity, asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch(send, activity))
                await self._write_log(send)
                if not self._job.ended:  # else it ends by itself, and the totals at the end are seen
                    watcher.cancel()
        await self._write_end(send)

    async def _watch(self, send: Send, activity: ActivityReader) -> None:
        async for seen in activity:
            data = msgspec.json.encode({"event": "activity", **msgspec.structs.asdict(seen)})
            await self._write(send, sse_event("activity", data, -1))

    async def _write_log(self, send: Send) -> None:
        reader, limits = self._job, self._limits
        while reader.going_on:
            events = await reader.follow(limits.heartbeat)
            if events:
                await self._write_events(send, events)
            elif reader.going_on:
                await self._still_here(send)

    async def _write_end(self, send: Send) -> None:
        reader = self._job
        if not reader.gone:
            words = last_words(reader)
            await self._write(send, sse_event(words["event"], msgspec.json.encode(words), reader.position), more=False)

    def _where(self) -> dict[str, Any]:
        return {"job": self._job.job.job_id, "offset": self._job.position}

    async def _write_events(self, send: Send, events: list[Event]) -> None:
        reader = self._job
        for data, position in self._records.chunks(events, shared=reader.log.readers > 1):
            await self._write(send, data)
            if reader.gone:
                return
            reader.position = position
            await asyncio.sleep(0)  # a client that takes everything at once must not keep others waiting
