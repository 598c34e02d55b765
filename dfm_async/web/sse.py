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
from dfm_async.web.limits import WebLimits
from dfm_async.web.records import LogRecords, sse_event
from dfm_async.web.streams import JobReader

__all__ = ["EventWriter", "last_words"]

_log = logging.getLogger(__name__)

_CHUNK: Final = 64 * 1024
"""About how many bytes are written at once."""
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else some proxies hold back what they get
]


def last_words(reader: JobReader) -> dict[str, Any]:
    """What a client is told when its stream ends: why, and where to go on."""
    name = "end" if reader.ended else "drain"
    return {"event": name, "offset": reader.position, "status": reader.job.status.value}


class EventWriter:
    """Writes the records of a job to one client as server-sent events.

    Args:
        reader: reads the job.
        records: makes records of the job's events.
        limits: how long to wait for what.
    """

    def __init__(self, reader: JobReader, records: LogRecords, limits: WebLimits) -> None:
        self._reader = reader
        self._records = records
        self._limits = limits

    async def run(self, receive: Receive, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Writes until the job has ended, the service drains, or the client is gone."""
        start = {"type": "http.response.start", "status": status, "headers": [*_HEADERS, *headers]}
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen(receive))
            try:
                await self._send(send, start)
                await self._stream(send)
            finally:
                listener.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._reader.leave()

    async def _stream(self, send: Send) -> None:
        reader, limits = self._reader, self._limits
        await self._write(send, b"retry: %d\n\n" % round(limits.retry * 1000))
        while reader.going_on:
            events = await reader.batch(limits.heartbeat)
            if events:
                await self._write_events(send, events)
            elif reader.going_on:
                await self._write(send, b": still here\n\n")
        if not reader.gone:
            words = last_words(reader)
            await self._write(send, sse_event(words["event"], msgspec.json.encode(words), reader.position), more=False)

    async def _write_events(self, send: Send, events: list[Event]) -> None:
        reader = self._reader
        parts = self._records.batch(events)
        start = 0
        while start < len(parts):
            end = len(parts)
            if sum(map(len, parts)) > _CHUNK:  # seldom: values are small, or come one by one
                end = _chunk_end(parts, start)
            await self._write(send, b"".join(parts[start:end]))
            if reader.gone:
                return
            reader.position = events[end - 1].offset
            start = end
            await asyncio.sleep(0)  # a client that takes everything at once must not keep others waiting

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        reader = self._reader
        if reader.gone:
            return
        try:
            async with asyncio.timeout(self._limits.stall):
                await send(message)
        except TimeoutError:
            reader.stall()
            where = {"job": reader.job.job_id, "offset": reader.position}
            _log.info("a client took nothing for %g s: its stream ended", self._limits.stall, extra=where)
        except OSError:
            reader.leave()


def _chunk_end(parts: list[bytes], start: int) -> int:
    """The end of what is written at once: at least one event, and further ones while they fit."""
    size = 0
    for end in range(start, len(parts)):
        size += len(parts[end])
        if size > _CHUNK and end > start:
            return end
    return len(parts)
