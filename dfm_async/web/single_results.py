"""Handlers: a single result of a job, as JSON, or as an Arrow IPC stream if it is a table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final
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
from dfm_async.wire.codec.registry import Unsupported

ARROW: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"

_PIECE: Final = 64 * 1024
"""The number of bytes that are written at once, and up to which a response is not written as a stream is."""
_HEADERS: Final = {"cache-control": "no-store", "vary": "accept"}


class _Table:
    """A table as the parts of an Arrow stream; shared by connections that write it at the same time."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class ResultHandlers(Handlers):
    """Serves results one by one."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        # Weakly: a client with many requests must not have a table converted for each of them.
        self._tables: WeakKeyDictionary[ResultLog, WeakValueDictionary[int, _Table]] = WeakKeyDictionary()
        self._converting = anyio.Lock()

    async def result(self, request: Request, send: Send) -> Response | None:
        """Return the result with an offset: as an Arrow stream if the client names that type, otherwise as JSON."""
        state = self._state
        principal, job, info = await state.job(request, "read")
        offset = whole_number(QueryParams({"offset": request.path_params["offset"]}), "offset", 0, 0)
        event, log = await self._event(job, info, offset)
        accept = request.headers.get("accept", "*/*")
        json, arrow = quality(accept, JSON), quality(accept, ARROW, named=True)
        table: _Table | None = None
        if arrow and arrow >= json:
            try:
                table = await self._table(log, event)
            except Unsupported as error:
                if not json:
                    raise Refusal(406, "table", f"the table cannot be sent as Arrow: {error}. Accept {JSON}") from error
        if table is not None:
            return await self._answer(request, send, principal, ARROW, table.parts)
        if not json:
            message = f"the value of type {type_name(type(event.value))} is not a table: accept {JSON}"
            raise Refusal(406, "table", message if arrow else f"results are sent as {JSON}, tables also as {ARROW}")
        record = state.records_for(principal, info, log).json(event)
        return await self._answer(request, send, principal, JSON, [record])

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

    async def _table(self, log: ResultLog, event: Result) -> _Table | None:
        """Return a value as the parts of an Arrow stream; None if it is not a table."""
        known = self._tables.setdefault(log, WeakValueDictionary())
        async with self._converting:
            found = known.get(event.offset)
            if found is None:
                parts = await in_thread(lambda: arrow_parts(event.value), "arrow")
                if parts is None:
                    return None
                found = known[event.offset] = _Table(parts)
        return found

    async def _answer(
        self, request: Request, send: Send, principal: Principal, media: str, parts: Sequence[Any]
    ) -> Response | None:
        """Respond with these bytes; many are written as a stream is: as fast as the client reads it."""
        state = self._state
        size = sum(map(len, parts))
        if size <= _PIECE:
            return Response(b"".join(map(bytes, parts)), headers=_HEADERS, media_type=media)
        with state.streams.slot(principal) as slot:
            stream = StreamState(lambda: None)
            connection = ClientConnection((request.receive, send), stream, state.limits)
            with slot.used(stream):
                headers = {**_HEADERS, "content-type": media, "content-length": str(size)}
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
