"""The events of a job over a WebSocket: the same records as JSON text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Final

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from dfm_async.web.course import Phase
from dfm_async.web.jobs import on_disconnect, read_after
from dfm_async.web.limits import WebLimits
from dfm_async.web.records import LogRecords
from dfm_async.web.sse import interruption, last_words
from dfm_async.web.state import State
from dfm_async.web.streams import JobReader

__all__ = ["SocketHandlers"]

_log = logging.getLogger(__name__)

_ENDED: Final = 1000
_DRAINING: Final = 1012
"""The close code that says that the service starts again."""
_TRY_AGAIN: Final = 1013
"""The close code for a client that read nothing for too long."""
_TURN: Final = 8
"""After how many messages others run: all readers that are ready write as much in one turn of the loop."""


class SocketHandlers:
    """Serves WebSockets."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def stream(self, socket: WebSocket) -> None:
        """Sends the records of a job, one per message."""
        state = self._state
        principal = await state.guard.principal(socket)
        job, info = await state.job(principal, "read", socket.path_params["job_id"])
        gone = on_disconnect(socket)
        if gone == "cancel":
            state.guard.check_job(principal, "cancel", info)
        after = read_after(socket, info)
        with state.streams.seat(principal) as seat:
            async with seat.reading(state.session, job, after) as reader:
                await socket.accept()
                await _Writer(socket, reader, state.records_for(principal, info, reader.log), state.limits).run()
            if reader.course.gone and gone == "cancel":
                await job.cancel("the reader of its stream has gone")
            if reader.course.phase is Phase.STALLED:
                await seat.linger(_closed(socket), _until_gone(socket))


async def _closed(socket: WebSocket) -> None:
    with contextlib.suppress(OSError, WebSocketDisconnect, RuntimeError):  # it is gone
        await socket.close(_TRY_AGAIN)


async def _until_gone(socket: WebSocket) -> None:
    # What a client sends is of no interest, only that it leaves.
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


class _Writer:
    def __init__(self, socket: WebSocket, reader: JobReader, records: LogRecords, limits: WebLimits) -> None:
        self._socket = socket
        self._reader = reader
        self._records = records
        self._limits = limits

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen())
            try:
                await self._stream()
            finally:
                listener.cancel()

    async def _listen(self) -> None:
        await _until_gone(self._socket)
        self._reader.course.reach(Phase.GONE)

    async def _stream(self) -> None:
        reader, socket = self._reader, self._socket
        told = False
        while reader.course.going_on:
            # The server itself sends heartbeats: there is nothing to write meanwhile.
            for count, event in enumerate(await reader.follow(self._limits.heartbeat)):
                if count % _TURN == 0:
                    await asyncio.sleep(0)  # a client that reads everything at once must not keep others waiting
                await self._bounded(socket.send_text(self._records.message(event).decode()))
                if reader.course.gone:
                    return
                reader.position = event.offset
            if reader.interrupted and not told:
                await self._bounded(socket.send_text(msgspec.json.encode(interruption(reader)).decode()))
            told = reader.interrupted
        if not reader.course.gone:
            await self._bounded(socket.send_text(msgspec.json.encode(last_words(reader)).decode()))
        if not reader.course.gone:
            await self._bounded(socket.close(_ENDED if reader.course.phase is Phase.ENDED else _DRAINING))

    async def _bounded(self, work: Awaitable[None]) -> None:
        reader = self._reader
        try:
            async with asyncio.timeout(self._limits.stall):
                await work
        except TimeoutError:
            reader.course.reach(Phase.STALLED)
            where = {"job": reader.job.job_id, "offset": reader.position}
            _log.info("a client read nothing for %g s: its stream ended", self._limits.stall, extra=where)
        except (OSError, WebSocketDisconnect):
            reader.course.reach(Phase.GONE)
