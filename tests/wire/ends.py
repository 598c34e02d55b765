"""The ends of a connection between two channels."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from dfm_async.wire.channel import Channel
from dfm_async.wire.messages import Message


class End:
    """One end of a connection, with what it got."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.lost: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.channel = Channel(self._message, self._lost)

    def _message(self, message: Message) -> None:
        self.got.append(message)
        self.changed.set()

    def _lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.changed.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


E = TypeVar("E", bound=End)


@contextlib.asynccontextmanager
async def connected(make: Callable[[], E]) -> AsyncIterator[tuple[E, E]]:
    """Connect two ends by a pair of sockets."""
    ends = make(), make()
    loop = asyncio.get_running_loop()
    for end, sock in zip(ends, socket.socketpair(), strict=True):
        sock.setblocking(False)
        await loop.create_connection(lambda end=end: end.channel, sock=sock)  # type: ignore[misc]
    try:
        yield ends
    finally:
        for end in ends:
            end.channel.close()
        for end in ends:
            await end.until(lambda end=end: end.lost)  # type: ignore[misc]
