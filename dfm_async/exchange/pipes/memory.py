"""Both ends in one process, for tests and for programs that are only a coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from dfm_async.exchange.messages import Chunk, Message, decode, encode
from dfm_async.exchange.pipes.base import Receiver

__all__ = ["MemoryPipe", "memory_pair"]

_CLOSED: Final = "the connection was closed"


class _Way:
    """One direction: what was sent, and who takes it."""

    def __init__(self) -> None:
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, bytes | None]] = deque()
        self._scheduled = False
        self._taken: asyncio.Future[None] | None = None
        self.receiver: Receiver | None = None

    def put(self, message: Message, data: memoryview | None) -> None:
        if not self.ended:
            self._queue.append((encode(message), None if data is None else bytes(data)))
            self.wake()

    def wake(self) -> None:
        if not self._scheduled and self.receiver is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver_later)

    def _deliver_later(self) -> None:
        self._scheduled = False
        self.deliver()

    def deliver(self) -> None:
        """Hands over what was put."""
        receiver = self.receiver
        while self._queue and receiver is not None and receiver is self.receiver:
            body, data = self._queue.popleft()
            message = decode(body)
            if data is not None and isinstance(message, Chunk):
                room = receiver.room(message, len(data))
                if room is not None:
                    room[: len(data)] = data
                receiver.received(message, len(data) if room is not None else 0)
            else:
                receiver.received(message, 0)
        if self._queue:
            self.wake()  # somebody else takes the rest
        else:
            self._all_taken()

    def end(self) -> None:
        """Nothing more can be put; what was put before is delivered, if somebody takes it."""
        self.ended = True
        self._all_taken()

    def _all_taken(self) -> None:
        if self._taken is not None:
            self._taken.set_result(None)
            self._taken = None

    async def taken(self) -> None:
        """Waits until everything was taken."""
        while self._queue and not self.ended:
            if self._taken is None:
                self._taken = self._loop.create_future()
            await asyncio.shield(self._taken)


class MemoryPipe:
    """One end of a pair. Messages are encoded and decoded, as on any other way."""

    can_resend = True
    shows_progress = True
    silence = 0.0
    has_metrics = True

    def __init__(self, incoming: _Way, outgoing: _Way, connected: asyncio.Future[None]) -> None:
        self.stamp: int | None = None
        self._in = incoming
        self._out = outgoing
        self._connected = connected
        self._told = False
        connected.add_done_callback(self._lost)

    def open(self, receiver: Receiver) -> None:
        """Names who takes what comes."""
        self._in.receiver = receiver
        if self._told:
            self._in.deliver()
            receiver.lost(_CLOSED)
        else:
            self._in.wake()

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queues a message; the other end gets it in a later turn of the loop."""
        self._out.put(message, data)

    async def drain(self) -> None:
        """Waits until the other end has taken what was sent."""
        await self._out.taken()

    def close(self) -> None:
        """Ends the connection; the other end still gets what was sent."""
        if not self._connected.done():
            self._connected.set_result(None)

    def abort(self) -> None:
        """Ends the connection."""
        self.close()

    async def wait_closed(self) -> None:
        """Waits until the connection has ended."""
        await asyncio.shield(self._connected)

    def _lost(self, _: object) -> None:
        # After what was sent before: that is delivered by a call that was scheduled earlier.
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._told = True
        self._in.end()
        receiver = self._in.receiver
        if receiver is not None:
            self._in.deliver()
            if self._in.receiver is receiver:  # else the one that took its place was told when it did
                receiver.lost(_CLOSED)


def memory_pair() -> tuple[MemoryPipe, MemoryPipe]:
    """Makes two ends that are connected."""
    there, back = _Way(), _Way()
    connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return MemoryPipe(there, back, connected), MemoryPipe(back, there, connected)
