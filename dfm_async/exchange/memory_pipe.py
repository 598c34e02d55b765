"""Both ends in one process, for tests and for programs that are only a coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from dfm_async.base.signals import Signal
from dfm_async.exchange.bootstrap import Address
from dfm_async.exchange.connection import Listener, Pipe, Receiver
from dfm_async.exchange.program_messages import Chunk, Message, decode, encode


class MemoryPipe(Pipe):
    """One end of a pair. Messages are encoded and decoded, as on any other transport."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = self
        """The other end."""
        self.inbox: deque[tuple[bytes, bytes | None]] = deque()
        """What the other end has sent, and the receiver has not taken."""
        self.taken = Signal()
        """Is notified when all of that was taken."""
        self._loop = asyncio.get_running_loop()
        self._scheduled = False

    def open(self, receiver: Receiver) -> None:
        """Set the receiver."""
        super().open(receiver)
        if self._ended.done():
            self._deliver()
        else:
            self.wake()

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queue a message; the other end gets it in a later turn of the loop."""
        if not self._ended.done():
            self.peer.inbox.append((encode(message), None if data is None else bytes(data)))
            self.peer.wake()

    def wake(self) -> None:
        """Pass on what is in the inbox, in a later turn of the loop."""
        if not self._scheduled and self._receiver is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        receiver = self._receiver
        while self.inbox and receiver is not None and receiver is self._receiver:
            body, data = self.inbox.popleft()
            message = decode(body)
            room = None
            if data is not None and isinstance(message, Chunk):
                room = receiver.room(message, len(data))
                if room is not None:
                    room[: len(data)] = data
            receiver.received(message, 0 if room is None else len(room))
        if self.inbox:
            self.wake()  # another receiver takes the rest
            return
        self.taken.notify()
        if self._ended.done():
            self.lose("the connection was closed")

    async def drain(self) -> None:
        """Wait until the other end has taken what was sent."""
        await self.peer.taken.wait_until(lambda: not self.peer.inbox or self._ended.done())

    def close(self) -> None:
        """End the connection; the other end still gets what was sent."""
        self.end()
        self.peer.end()

    def end(self) -> None:
        """End this end of the connection."""
        if self._ended.settle(None):
            self.taken.notify()
            self.wake()

    def abort(self) -> None:
        """End the connection."""
        self.close()


def memory_pair() -> tuple[MemoryPipe, MemoryPipe]:
    """Make two ends that are connected."""
    one, other = MemoryPipe(), MemoryPipe()
    one.peer, other.peer = other, one
    return one, other


_listeners: Final[dict[str, Callable[[Pipe], None]]] = {}


async def listen(session: str, on_connect: Callable[[Pipe], None]) -> Listener:
    """Listen for connections within this process."""
    _listeners[session] = on_connect
    return Listener(Address(kind="memory", name=session), lambda: _listeners.pop(session, None))


async def connect(address: Address, stamp: int) -> MemoryPipe:
    """Connect to a listener within this process.

    Raises:
        ConnectionRefusedError: nothing listens at this address.
    """
    del stamp
    on_connect = _listeners.get(address.name)
    if on_connect is None:
        raise ConnectionRefusedError("the site is not in this process")
    ours, theirs = memory_pair()
    on_connect(theirs)
    return ours
