"""Messages between an application and the hub: in order, exactly once, over changing transports.

Both ends have a stream. Messages are kept until the other end has them; when a transport is lost, the stream goes on
over the next one. There are two kinds of transports: over a connection, packets are pushed; with commands, the
application pulls, and each command and answer carries what the other end does not have yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from dfm_async.targets.flare.message_parts import MessagePart, Parts, Reassembler, batches, split

_PACKET: Final = 4 * 1024 * 1024
"""The size limit of a packet, in bytes of messages; a larger message is sent in parts."""
_CONFIRM: Final = 64
"""The number of messages after which they are confirmed, if there is nothing else to send."""
_CONFIRM_BYTES: Final = 1024 * 1024


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """Parts ``first, first + 1, ...``; ``have``: the sender has all of ours before this number."""

    first: int
    have: int
    parts: Parts


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Packet)


class ReliableStream:
    """One end.

    Args:
        on_message: is called with each message of the other end.
        on_room: is called when the backlog has become smaller.
        largest: the size limit of a message of the other end, in bytes; None means any size.
    """

    def __init__(
        self,
        on_message: Callable[[bytes | memoryview], None],
        on_room: Callable[[], None] | None = None,
        largest: int | None = None,
    ) -> None:
        self.backlog = 0
        """The number of bytes that the other end has not confirmed."""
        self.have = 0
        """The number of parts of messages that were received."""
        self._on_message = on_message
        self._on_room = on_room
        self._reassembler = Reassembler(largest, _PACKET)
        self._kept: deque[MessagePart] = deque()
        self._first = 0
        """The number of the first part that is kept."""
        self._unsent: deque[MessagePart] = deque()
        """Those of them that were not pushed yet."""
        self._sent = 0
        """The number of the first of these."""
        self._confirmed = 0
        self._unconfirmed_bytes = 0
        self._push: Callable[[bytes], None] | None = None
        self._scheduled = False
        self._wake: Callable[[], None] | None = None

    def send(self, message: bytes) -> None:
        """Send a message: in this turn of the loop, or with the next command or answer."""
        parts = list(split(message, _PACKET))
        self._kept += parts
        self.backlog += len(message)
        if self._push is not None:
            self._unsent += parts
        self._schedule()

    def _schedule(self) -> None:
        if self._push is not None and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._wake is not None:
            self._wake()

    def attach(self, push: Callable[[bytes], None], have: int) -> None:
        """Push packets over a connection from now on; ``have``: the parts that the other end has.

        Raises:
            ValueError: the other end cannot have these.
        """
        self._wake = None
        self.release(have)
        self._push = push
        self._unsent, self._sent = deque(self._kept), self._first
        self._schedule()

    def attach_pull(self, wake: Callable[[], None]) -> None:
        """Let packets be pulled from now on (:meth:`pull`); ``wake``: is called when there is something to send."""
        self.detach()
        self._wake = wake

    def detach(self) -> None:
        """Stop sending: there is no transport at present, and messages wait."""
        self._push = self._wake = None
        self._unsent.clear()

    @property
    def waiting(self) -> bool:
        """Whether there is something that the other end has not confirmed."""
        return bool(self._kept)

    def _flush(self) -> None:
        self._scheduled = False
        push, unsent = self._push, self._unsent
        while push is not None:
            parts: list[MessagePart] = next(batches(unsent, _PACKET), [])
            if not parts and self._confirmed == self.have:
                return
            for _ in parts:
                unsent.popleft()
            first, self._sent = self._sent, self._sent + len(parts)
            push(self._packet(first, parts))

    def pull(self) -> bytes:
        """Return a packet of what the other end does not have yet, as far as it fits."""
        return self._packet(self._first, next(batches(self._kept, _PACKET), []))

    def _packet(self, first: int, parts: list[MessagePart]) -> bytes:
        self._confirmed, self._unconfirmed_bytes = self.have, 0
        return _encoder.encode(Packet(first, self.have, parts))

    def take(self, data: bytes) -> None:
        """Take a packet of the other end.

        Raises:
            ValueError: it is not a packet, messages before it are missing, or a message is too large.
        """
        packet = _decoder.decode(data)
        self.release(packet.have)
        if packet.first > self.have:
            raise ValueError(f"messages {self.have} to {packet.first - 1} are missing")
        for part in packet.parts[self.have - packet.first :]:
            self.have += 1
            self._unconfirmed_bytes += len(part)
            message = self._reassembler.take(part)
            if message is not None:
                self._on_message(message)
        if self.have - self._confirmed >= _CONFIRM or self._unconfirmed_bytes >= _CONFIRM_BYTES:
            self._schedule()

    def release(self, have: int) -> None:
        """Drop the messages that the other end has; ``have``: their number in all.

        Raises:
            ValueError: it cannot have them.
        """
        if not self._first <= have <= self._first + len(self._kept):
            if have < self._first:
                return  # it is older than what we know already
            raise ValueError(f"the other end confirms {have} parts of {self._first + len(self._kept)}")
        for _ in range(have - self._first):
            self.backlog -= len(self._kept.popleft())
        if have > self._first:
            self._first = have
            if self._on_room is not None:
                self._on_room()
