"""Handlers: a single result of a job: as JSON, as an Arrow IPC stream if it is a table, or as the file of an image."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.base.tasks import in_thread
from dfm_async.errors import ResultsExpired
from dfm_async.model.events import Result
from dfm_async.model.info import JobInfo
from dfm_async.results.log import ResultLog
from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.open_streams import JobReader, StreamState
from dfm_async.web.requests import quality, whole_number
from dfm_async.web.responses import Refusal
from dfm_async.web.state import Handlers, State
from dfm_async.web.writers import ClientConnection, response_start
from dfm_async.wire.codec import type_name
from dfm_async.wire.codec.arrow_streams import arrow_parts
from dfm_async.wire.codec.images import image_file
from dfm_async.wire.codec.registry import Unsupported

ARROW: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"

_PIECE: Final = 64 * 1024
"""The number of bytes that are written at once, and up to which a response is not written as a stream is."""
_HEADERS: Final = {"cache-control": "no-store", "vary": "accept"}
_IMAGE_HEADERS: Final = {
    "cache-control": "no-store",
    # Whatever a file contains besides an image, browsers neither show nor run it, and no other site embeds it.
    "content-security-policy": "default-src 'none'; sandbox",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


class _Converted:
    """A value in another format, in parts; shared by connections that write it at the same time."""

    __slots__ = ("__weakref__", "media", "parts")

    def __init__(self, media: str, parts: Sequence[Any]) -> None:
        self.media = media
        self.parts = parts


_Shared: TypeAlias = "WeakKeyDictionary[ResultLog, WeakValueDictionary[int, _Converted]]"
"""Values that were converted, by the logs and offsets of their events."""


def _table(value: Any) -> _Converted | None:
    parts = arrow_parts(value)
    return None if parts is None else _Converted(ARROW, parts)


def _image(value: Any) -> _Converted | None:
    found = image_file(value)
    return None if found is None else _Converted(found.media, [found.data])


class ResultHandlers(Handlers):
    """Serves results one by one."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        # Weakly: a client with many requests must not have a value converted for each of them.
        self._tables: _Shared = WeakKeyDictionary()
        self._images: _Shared = WeakKeyDictionary()
        self._converting = anyio.Lock()

    async def result(self, request: Request, send: Send) -> Response | None:
        """Return the result with an offset: as an Arrow stream if the client names that type, otherwise as JSON."""
        state = self._state
        principal, info, event, log = await self._found(request)
        accept = request.headers.get("accept", "*/*")
        json, arrow = quality(accept, JSON), quality(accept, ARROW, named=True)
        table: _Converted | None = None
        if arrow and arrow >= json:
            try:
                table = await self._converted(self._tables, log, event, _table)
            except Unsupported as error:
                if not json:
                    raise Refusal(406, "table", f"the table cannot be sent as Arrow: {error}. Accept {JSON}") from error
        if table is not None:
            return await self._answer(request, send, principal, table, _HEADERS)
        if not json:
            message = f"the value of type {type_name(type(event.value))} is not a table: accept {JSON}"
            raise Refusal(406, "table", message if arrow else f"results are sent as {JSON}, tables also as {ARROW}")
        record = state.records_for(principal, info, log).json(event)
        return await self._answer(request, send, principal, _Converted(JSON, [record]), _HEADERS)

    async def image(self, request: Request, send: Send) -> Response | None:
        """Return a preview of the result with an offset, if it is an image: a PNG, JPEG or WebP file."""
        principal, _, event, log = await self._found(request)
        try:
            found = await self._converted(self._images, log, event, _image)
        except Unsupported as error:
            raise Refusal(404, "image", f"there is no preview: {error}") from error
        if found is None:
            raise Refusal(404, "image", f"the value of type {type_name(type(event.value))} is not an image")
        return await self._answer(request, send, principal, found, _IMAGE_HEADERS)

    async def _found(self, request: Request) -> tuple[Principal, JobInfo, Result, ResultLog]:
        """Return the principal of a request, and the result that it is about."""
        principal, job, info = await self._state.job(request, "read")
        offset = whole_number(QueryParams({"offset": request.path_params["offset"]}), "offset", 0, 0)
        return principal, info, *await self._event(job, info, offset)

    async def _event(self, job: Job, info: JobInfo, offset: int) -> tuple[Result, ResultLog]:
        if offset >= info.events:
            raise Refusal(404, "result", f"the job has no event {offset} yet: it has {max(info.events, 0)}")
        reader = JobReader(self._state.session, job, offset - 1)
        try:
            event = await reader.stored()
        finally:
            await reader.close()
        if event is not None and event.offset > offset:
            raise ResultsExpired(job.job_id, offset, event.offset)
        if not isinstance(event, Result):
            raise Refusal(404, "result", f"event {offset} of the job is not a result")
        return event, reader.log

    async def _converted(
        self, shared: _Shared, log: ResultLog, event: Result, convert: Callable[[Any], _Converted | None]
    ) -> _Converted | None:
        """Return a value in another format; None if it is of another kind."""
        known = shared.setdefault(log, WeakValueDictionary())
        async with self._converting:
            found = known.get(event.offset)
            if found is None:
                found = await in_thread(lambda: convert(event.value), "conversion")
                if found is not None:
                    known[event.offset] = found
        return found

    async def _answer(
        self, request: Request, send: Send, principal: Principal, found: _Converted, headers: dict[str, str]
    ) -> Response | None:
        """Respond with these bytes; many are written as a stream is: as fast as the client reads it."""
        state, parts = self._state, found.parts
        size = sum(map(len, parts))
        headers = {**headers, "content-type": found.media}
        if size <= _PIECE:
            return Response(b"".join(map(bytes, parts)), headers=headers)
        with state.streams.slot(principal) as slot:
            stream = StreamState(lambda: None)
            connection = ClientConnection((request.receive, send), stream, state.limits)
            with slot.used(stream):
                headers["content-length"] = str(size)
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await connection.run(lambda: _write(connection, stream, size, parts), response_start(200, raw))
            # A response that is cut off stays incomplete: half of a table can look like a whole one.
            await connection.keep(slot, {"type": "http.response.body", "body": b"", "more_body": True})
        return None


async def _write(connection: ClientConnection, stream: StreamState, size: int, parts: Sequence[Any]) -> None:
    for piece in _pieces(parts):
        if not stream.open:  # the client is gone, or the service drains
            return
        size -= len(piece)
        await connection.write(piece, more=size > 0)
        await asyncio.sleep(0)  # a client that reads everything at once must not keep others waiting


def _pieces(parts: Sequence[Any]) -> Iterator[bytes]:
    """Yield the content of buffers in pieces of about the same size."""
    held = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _PIECE):
            held += view[start : start + _PIECE]
            if len(held) >= _PIECE:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)
