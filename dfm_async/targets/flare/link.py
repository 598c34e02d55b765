"""Messages to one other process of the carrier: in order, each exactly once, in batches, acknowledged and sent again.

What carries a packet can fail, take long, and carry it twice. Packets have numbers: the other end puts them in order,
and drops those that it has. A packet that is not acknowledged is sent again, until it is, or the time for it is over:
then the link is broken, and whoever relied on it is told. What is said after that goes over a new link.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

__all__ = ["Inbox", "Link", "Refused", "Undelivered", "Wire", "new_life"]

_log = logging.getLogger(__name__)

_WINDOW: Final = 4
"""How many packets are under way at the same time. While they are, messages gather for the next one."""
_PACKET: Final = 1024 * 1024
"""How many bytes of messages make a packet; a larger message is a packet of its own."""
_PACKET_MESSAGES: Final = 4096
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_EARLY: Final = 4 * _WINDOW
"""How far ahead of one that is missing a packet may be; no honest sender comes near."""


class Undelivered(Exception):
    """A packet may not have arrived."""


class Refused(Exception):
    """The other end does not take a packet, and would not take it a second time."""


class Wire(Protocol):
    """Carries packets to other processes of the carrier."""

    async def carry(self, peer: str, packet: bytes) -> str:
        """Hands a packet to a peer; returns when the peer has it, with the peer's life.

        Raises:
            Undelivered: it may not have it.
            Refused: it never will.
        """
        ...


class _Packet(msgspec.Struct, frozen=True, array_like=True):
    """``link``: which link this belongs to; later ones of the same sender are larger."""

    link: tuple[int, int]
    number: int
    messages: list[bytes]


class _Received(msgspec.Struct, frozen=True, array_like=True):
    """The same at the other end: large messages are not copied."""

    link: tuple[int, int]
    number: int
    messages: list[memoryview]


_began: Final = time.time_ns()
_links: Final = itertools.count(1)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Received)


class Link:
    """The sending end.

    Args:
        peer: the other end.
        wire: what carries packets.
        patience: for how many seconds a packet is sent again.
        on_broken: is told, once, why the link does not work any more.
        on_refused: is told of messages that the other end does not take, and why; the link goes on without them.
        on_room: is called when what waits has become less.
    """

    def __init__(
        self,
        peer: str,
        wire: Wire,
        patience: float,
        on_broken: Callable[[Link, str], None],
        on_refused: Callable[[str, list[bytes], str], None],
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self.peer = peer
        self.broken: str | None = None
        """Why it does not work any more, if it does not."""
        self.backlog = 0
        """How many bytes wait, or are under way."""
        self.packets = 0
        """How many packets have arrived."""
        self.messages = 0
        """How many messages were in them."""
        self.resent = 0
        """How often a packet was sent again."""
        self._wire = wire
        self._link = (_began, next(_links))
        self.their_life: str | None = None
        """Which life of the peer has answered."""
        self._patience = patience
        self._on_broken = on_broken
        self._on_refused = on_refused
        self._on_room = on_room
        self._waiting: deque[bytes] = deque()
        self._number = 0
        self._scheduled = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Future[None] | None = None

    def send(self, message: bytes) -> None:
        """Queues a message; those of one turn of the loop go together. Ignored when the link is broken."""
        if self.broken is not None:
            return
        self._waiting.append(message)
        self.backlog += len(message)
        if not self._scheduled and len(self._under_way) < _WINDOW:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._under_way) < _WINDOW and self.broken is None:
            batch, size = self._next_batch()
            number, self._number = self._number, self._number + 1
            task = asyncio.get_running_loop().create_task(self._deliver(number, batch), name=f"to {self.peer}")
            self._under_way.add(task)
            task.add_done_callback(functools.partial(self._delivered, size))

    def _next_batch(self) -> tuple[list[bytes], int]:
        waiting = self._waiting
        batch = [waiting.popleft()]
        size = len(batch[0])
        while waiting and len(batch) < _PACKET_MESSAGES and size + len(waiting[0]) <= _PACKET:
            batch.append(waiting.popleft())
            size += len(batch[-1])
        return batch, size

    async def _deliver(self, number: int, batch: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        packet = _encoder.encode(_Packet(self._link, number, batch))
        began = loop.time()
        pause = _FIRST_PAUSE
        while self.broken is None:
            try:
                self._arrived(await self._wire.carry(self.peer, packet), len(batch))
            except Refused as error:
                if not batch:
                    self.fail(f"{self.peer} takes nothing: {error}")
                    return
                self._on_refused(self.peer, batch, str(error))
                batch = []  # the next ones wait for this number
                packet = _encoder.encode(_Packet(self._link, number, batch))
                continue
            except Undelivered as error:
                reason = str(error)
            else:
                return
            waited = loop.time() - began
            if waited + pause > self._patience:
                self.fail(f"{self.peer} has not taken a message for {waited:.1f} s: {reason}")
                return
            _log.debug("a packet for %s is sent again: %s", self.peer, reason)
            self.resent += 1
            await asyncio.sleep(pause)  # it failed just now: at once it would fail again
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _arrived(self, life: str, count: int) -> None:
        self.packets += 1
        self.messages += count
        if self.their_life is None:
            self.their_life = life
        elif self.their_life != life:
            self.fail(f"{self.peer} has started again, and does not know what it was told before")

    def _delivered(self, size: int, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if self.broken is None:
            self.backlog -= size
            if not task.cancelled() and task.exception() is not None:
                self.fail(f"{type(task.exception()).__name__}: {task.exception()}")
        if self._waiting:
            self._pump()
        elif not self._under_way:
            self._tell_idle()
        if self._on_room is not None:
            self._on_room()

    def _tell_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def fail(self, reason: str) -> None:
        """Gives up: what waits is not sent any more, and whoever relied on it is told."""
        if self.broken is None:
            self._stop(reason)
            self._on_broken(self, reason)

    def _stop(self, reason: str) -> None:
        self.broken = reason
        self._waiting.clear()
        self.backlog = 0
        self._tell_idle()

    async def drained(self) -> None:
        """Waits until everything has arrived, or the link is broken."""
        while (self._waiting or self._under_way) and self.broken is None:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    async def close(self) -> None:
        """Ends it at once; what has not arrived is lost."""
        if self.broken is None:
            self._stop("it was closed")
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)


def new_life() -> str:
    """Names a process, and no other."""
    return secrets.token_hex(8)


class Inbox:
    """The receiving end, for one peer.

    Packets can come late, after the link that they belong to was given up for another one. They must not be taken for
    those of a new link, also by an inbox that has never heard of theirs: links have an order.
    """

    def __init__(self) -> None:
        self._link = (0, 0)
        self._next = 0
        self._early: dict[int, list[memoryview]] = {}

    def take(self, packet: bytes) -> list[memoryview]:
        """Takes a packet; gives the messages that are in order now.

        Raises:
            ValueError: it is no packet, too many before it are missing, or its sender was there before the present one.
        """
        found = _decoder.decode(packet)
        if found.link < self._link:
            if found.link[0] == self._link[0]:
                return []  # its sender has given it up
            # The clock of its machine may have been set back: then its sender must hear of it.
            raise ValueError("it comes from a process that was there before the one that speaks now")
        if found.link > self._link:
            self._link, self._next = found.link, 0
            self._early.clear()
        if found.number < self._next:
            return []  # it came before
        if found.number > self._next:
            if found.number > self._next + _EARLY:
                raise ValueError("too many packets before it are missing")
            self._early[found.number] = found.messages
            return []
        messages = found.messages
        self._next += 1
        while self._early and self._next in self._early:
            messages = messages + self._early.pop(self._next)
            self._next += 1
        return messages
