"""Messages to one other process of the host job: in order, each exactly once, in batches, acknowledged and sent again.

What carries a packet can fail, take long, and carry it twice. Packets have numbers: the other end puts them in order,
and drops those that it has. A packet that is not acknowledged is sent again, until it is, or the time for it is over:
then the link is broken, and its owner is notified. Later messages go over a new link.

A link begins with a handshake, which authenticates both ends and agrees on the keys that packets are encrypted with
(see :mod:`~dfm_async.targets.flare.authentication`). The answer names the incarnation of the peer and the size limit of
its messages: larger ones are refused before anything of them is sent. Packets have a size limit of their own; a larger
message travels in parts, over several packets.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from dfm_async.base.backoff import delays
from dfm_async.base.signals import Signal
from dfm_async.targets.flare.authentication import TAG, Credentials, Forged, Keys
from dfm_async.targets.flare.message_parts import MessagePart, Parts, Reassembler, batches, split

_log = logging.getLogger(__name__)

_WINDOW: Final = 4
"""The number of packets in flight at the same time. Meanwhile, messages gather for the next one."""
_PACKET: Final = 1024 * 1024
"""The size limit of a packet, in bytes of messages; a larger message is sent in parts."""
LARGEST_PACKET: Final = _PACKET + 64 * 1024
"""The size limit of a packet in bytes, with what is added to its messages."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_EARLY: Final = 4 * _WINDOW
"""How far ahead of one that is missing a packet may be; no honest sender comes near."""
_GREETING: Final = b"g"
_MESSAGES: Final = b"m"
_TAKEN: Final = b"t"
_UNKNOWN: Final = b"u"


T = TypeVar("T")


class Undelivered(Exception):
    """A packet may not have arrived."""


class _Unacknowledged(Undelivered):
    """The answer to a packet is not its acknowledgement."""


class Wire(Protocol):
    """Carries packets to other processes of the host job."""

    async def carry(self, peer: str, packet: bytes) -> bytes:
        """Hand a packet to a peer; return the answer of its :class:`Inboxes`.

        Raises:
            Undelivered: it may not have it.
        """
        ...


class _Greeting(msgspec.Struct, frozen=True, array_like=True):
    """``link``: which link this begins; later ones of the same sender are larger."""

    link: tuple[int, int]


class _PeerState(msgspec.Struct, frozen=True, array_like=True):
    """``incarnation``: the incarnation of the peer; ``largest``: the size limit of messages to it."""

    incarnation: str
    largest: int


_began: Final = time.time_ns()
_links: Final = itertools.count(1)
_encoder: Final = msgspec.msgpack.Encoder()
_greeting: Final = msgspec.msgpack.Decoder(_Greeting)
_answer: Final = msgspec.msgpack.Decoder(_PeerState)
_parts: Final = msgspec.msgpack.Decoder(Parts)
_head: Final = struct.Struct(">cQQQ")
"""What a packet begins with, in the clear: its kind, its link, and its number."""


class Link:
    """The sending end.

    Args:
        peer: the other end.
        wire: what carries packets.
        credentials: who we are.
        timeout: the number of seconds for which a packet is retried.
        on_broken: is called once with the reason when the link is broken.
        on_refused: is called with a message that is too large for the other end, and the reason.
        on_room: is called when what waits has become less.
    """

    def __init__(
        self,
        peer: str,
        wire: Wire,
        credentials: Credentials,
        timeout: float,
        on_broken: Callable[[Link, str], None],
        on_refused: Callable[[str, bytes, str], None],
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self.peer = peer
        self.broken: str | None = None
        """Why it does not work any longer, if it does not."""
        self.backlog = 0
        """The number of bytes that wait or are in flight."""
        self._wire = wire
        self._link = (_began, next(_links))
        self._opening = credentials.greet(peer, _encoder.encode(_Greeting(self._link)))
        self._keys: Keys | None = None
        self.their_incarnation: str | None = None
        """Which incarnation of the peer has answered."""
        self._largest: int | None = None
        """The size limit of messages; None before the peer has answered."""
        self._timeout = timeout
        self._on_broken = on_broken
        self._on_refused = on_refused
        self._on_room = on_room
        self._before: list[bytes] = []
        """Messages from before the peer has answered."""
        self._waiting: deque[MessagePart] = deque()
        self._number = 0
        self._scheduled = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._idle = Signal()

    def send(self, message: bytes) -> None:
        """Queue a message; those of one turn of the loop go together. Ignored when the link is broken."""
        if self.broken is not None:
            return
        self.backlog += len(message)
        if self._largest is None:
            self._before.append(message)
        else:
            self._queue(message, self._largest)
        if not self._scheduled and len(self._in_flight) < _WINDOW:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _queue(self, message: bytes, largest: int) -> None:
        if len(message) <= largest:
            self._waiting.extend(split(message, _PACKET))
            return
        self.backlog -= len(message)
        reason = (
            f"it takes messages of at most {largest:,} bytes (max_message_bytes), and this one has {len(message):,}"
        )
        asyncio.get_running_loop().call_soon(self._on_refused, self.peer, message, reason)

    def _pump(self) -> None:
        self._scheduled = False
        if self._largest is None:
            if not self._in_flight and self.broken is None:
                self._start(self._greet(asyncio.get_running_loop().time()), 0)
            return
        while self._waiting and len(self._in_flight) < _WINDOW and self.broken is None:
            batch = next(batches(self._waiting, _PACKET))
            for _ in batch:
                self._waiting.popleft()
            number, self._number = self._number, self._number + 1
            self._start(self._deliver(number, batch), sum(map(len, batch)))

    def _start(self, work: Coroutine[Any, Any, None], size: int) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"to {self.peer}")
        self._in_flight.add(task)
        task.add_done_callback(functools.partial(self._delivered, size))

    async def _greet(self, began: float) -> None:
        found = await self._carry(_GREETING + self._opening.greeting, self._opening.finish, began)
        if found is None:
            return
        keys, content = found
        answer = _answer.decode(content)
        if self.their_incarnation is None:
            self.their_incarnation = answer.incarnation
        elif self.their_incarnation != answer.incarnation:
            self.fail(f"{self.peer} has started again, and has lost earlier messages")
            return
        if self._largest is None:
            self._keys, self._largest = keys, answer.largest
            before, self._before = self._before, []
            for message in before:
                self._queue(message, answer.largest)

    async def _deliver(self, number: int, batch: list[MessagePart]) -> None:
        keys = self._keys
        assert keys is not None  # noqa: S101 - nothing is sent before the handshake
        head = _head.pack(_MESSAGES, *self._link, number)
        packet = head + keys.encrypt(number, head, _encoder.encode(batch))  # once: a retry sends the same bytes
        taken = _TAKEN + keys.acknowledgement(number)

        def check(answer: bytes) -> None:
            if not hmac.compare_digest(answer, taken):
                raise _Unacknowledged("the answer does not acknowledge it")

        await self._carry(packet, check, asyncio.get_running_loop().time())

    async def _carry(self, packet: bytes, read: Callable[[bytes], T], began: float) -> T | None:
        """Send a packet until its answer can be read; None if the link is broken before.

        Answers are not authentic before they are read: a wrong one is a failed attempt, and no more.
        """
        loop, pauses = asyncio.get_running_loop(), delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while self.broken is None:
            pause = next(pauses)
            try:
                return read(await self._wire.carry(self.peer, packet))
            except (Undelivered, Forged) as error:
                reason = str(error)
                if isinstance(error, _Unacknowledged):
                    await self._greet(began)  # the peer may have started again, and not know this link
            waited = loop.time() - began
            if waited + pause > self._timeout:
                self.fail(f"{self.peer} has not taken a message for {waited:.1f} s: {reason}")
                break
            _log.debug("a packet for %s is sent again: %s", self.peer, reason)
            await asyncio.sleep(pause)  # it failed just now: at once it would fail again
        return None

    def _delivered(self, size: int, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if self.broken is None:
            self.backlog -= size
            if not task.cancelled() and task.exception() is not None:
                self.fail(f"{type(task.exception()).__name__}: {task.exception()}")
        if self._waiting:
            self._pump()
        elif not self._in_flight:
            self._idle.notify()
        if self._on_room is not None:
            self._on_room()

    def fail(self, reason: str) -> None:
        """Break the link: drop what waits, and notify the owner."""
        if self.broken is None:
            self._stop(reason)
            self._on_broken(self, reason)

    def _stop(self, reason: str) -> None:
        self.broken = reason
        self._waiting.clear()
        self._before.clear()
        self.backlog = 0
        self._idle.notify()

    async def drained(self) -> None:
        """Wait until everything has arrived, or the link is broken."""
        await self._idle.wait_until(
            lambda: self.broken is not None or not (self._waiting or self._before or self._in_flight)
        )

    async def close(self) -> None:
        """End it at once; what has not arrived is lost."""
        if self.broken is None:
            self._stop("it was closed")
        for task in self._in_flight:
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight)


class Inbox:
    """The receiving end of one link.

    Args:
        link: which link of its sender.
        largest: the size limit of a message, in bytes.
        keys: those of the link.
        greeting: what the link began with.
        answer: what that was answered with.
    """

    def __init__(self, link: tuple[int, int], largest: int, keys: Keys, greeting: bytes, answer: bytes) -> None:
        self.link = link
        self.keys = keys
        self.greeting = greeting
        self.answer = answer
        self._next = 0
        self._early: dict[int, list[MessagePart]] = {}
        self._reassembler = Reassembler(largest, _PACKET)
        self._failed: ValueError | None = None
        """Why nothing more is taken: a part of a message was dropped."""

    def take(self, number: int, data: bytes) -> list[bytes | memoryview]:
        """Take a packet, which is authentic; return the messages that are complete and in order now.

        Raises:
            ValueError: too many packets before it are missing, it is malformed, or a message is too large.
        """
        if self._failed is not None:
            raise self._failed
        if number < self._next:
            return []  # it came before
        if number > self._next + _EARLY:
            raise ValueError("too many packets before it are missing")
        self._early[number] = _parts.decode(data)
        messages = []
        try:
            while self._next in self._early:
                joined = [self._reassembler.take(part) for part in self._early.pop(self._next)]
                messages += [message for message in joined if message is not None]
                self._next += 1
        except ValueError as error:
            self._failed = error
            self._early.clear()
            raise
        return messages


class Inboxes:
    """The receiving ends of all links to a process, one for each peer.

    Packets can come late, after their link was replaced by another one. They must not be taken for
    those of a new link: links have an order.

    Args:
        credentials: who we are.
        incarnation: the incarnation of this process.
        largest: the size limit of a message, in bytes.
        peers: the participants that packets are accepted from; None means all of the federation.
    """

    def __init__(
        self, credentials: Credentials, incarnation: str, largest: int, peers: Iterable[str] | None = None
    ) -> None:
        self._credentials = credentials
        self._incarnation = incarnation
        self._largest = largest
        self._accepted = None if peers is None else frozenset(peers)
        self._inboxes: dict[str, Inbox] = {}

    def take(self, peer: str, packet: bytes) -> tuple[bytes, list[bytes | memoryview]]:
        """Take a packet of a peer; return the answer, and the messages that are complete and in order now.

        Raises:
            Forged: it does not come from the peer that it names, or this peer may not send any.
            ValueError: it is not a packet, its sender is an earlier incarnation, or a message is too large.
        """
        if self._accepted is not None and peer not in self._accepted:
            raise Forged(f"{peer} does not take part in this host job")
        kind = packet[:1]
        if kind == _GREETING:
            return self._greeted(peer, packet[1:]), []
        if kind != _MESSAGES or len(packet) < _head.size + TAG:
            raise ValueError("it is not a packet")
        head, body = packet[: _head.size], memoryview(packet)[_head.size :]
        _, *link, number = _head.unpack(head)
        inbox = self._inboxes.get(peer)
        if inbox is None or tuple(link) != inbox.link:
            return _UNKNOWN, []
        messages = inbox.take(number, inbox.keys.decrypt(number, head, body))
        return _TAKEN + inbox.keys.acknowledgement(number), messages

    def _greeted(self, peer: str, greeting: bytes) -> bytes:
        inbox = self._inboxes.get(peer)
        if inbox is not None and greeting == inbox.greeting:
            return inbox.answer  # it comes again: the keys stay as they are
        link = _greeting.decode(self._credentials.read_greeting(peer, greeting)).link
        if inbox is not None and link <= inbox.link:
            # The clock of its machine may have been set back: then its sender must be notified.
            raise ValueError("it comes from a process, or belongs to a link, that was replaced by a later one")
        keys, answer = self._credentials.answer(
            peer, greeting, _encoder.encode(_PeerState(self._incarnation, self._largest))
        )
        self._inboxes[peer] = Inbox(link, self._largest, keys, greeting, answer)
        return answer
