"""Messages over a socket: length-prefixed, in order, written once per turn of the loop.

Large parts of values are in shared memory. The channel lends the blocks of the messages that it sends to its peer, and
releases those that the peer has lent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Any, Final, cast

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.base.framing import HEAD, Unframer
from dfm_async.wire.memory import Arena, Lease, Loans, Payload, PeerMemory
from dfm_async.wire.messages import WITH_PAYLOAD, Envelope, Memory, Message, Release, decoder, encoder, peek

_LARGEST: Final = 1 << 34
_OURS: Final = frozenset({Memory, Release})


class Channel(asyncio.Protocol):
    """One end of a connection to another process.

    Args:
        on_message: is called for every message, in order, on the loop. Must not raise.
        on_lost: is called once, when the connection has ended for whatever reason.
        forwarded: the kinds of messages that are not decoded: ``on_message`` gets them as envelopes.
        on_malformed: is called with the run, the location and the error of a message of a job that cannot be decoded.
            Without it, such a message ends the connection.
    """

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
        *,
        forwarded: Container[type] = (),
        on_malformed: Callable[[int, int, Exception], None] | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._forwarded = forwarded
        self._on_malformed = on_malformed
        self._transport: asyncio.WriteTransport | None = None
        self._out = bytearray()
        self._scheduled = False
        self._unframer = Unframer(_LARGEST)
        self._loop = asyncio.get_running_loop()
        self.lost = False
        self.bytes_in = 0
        self.bytes_out = 0
        self._deaf = False
        self._arena: Arena | None = None
        self._loans = Loans()
        self._peer: PeerMemory | None = None

    def send(self, message: Message | Envelope) -> None:
        """Queue a message; it is written at the end of this turn of the loop. Ignored when the connection is lost."""
        if self.lost:
            return
        if isinstance(message, Envelope):
            self._out += HEAD.pack(len(message.data)) + message.data
            self._schedule()
            return
        if type(message) in WITH_PAYLOAD and type(message.payload) is Payload:  # type: ignore[union-attr]
            self._lend(message.payload)  # type: ignore[union-attr]
        self._queue(message)

    def _queue(self, message: Message) -> None:
        out = self._out
        start = len(out)
        out += b"\0\0\0\0\0\0\0\0"
        try:
            encoder.encode_into(message, out, start + 8)
        except BaseException:
            del out[start:]  # a message that cannot be encoded must not spoil those after it
            raise
        HEAD.pack_into(out, start, len(out) - start - 8)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write the queued messages."""
        if self._out and self._transport is not None:
            out, self._out = self._out, bytearray()
            self.bytes_out += len(out)
            self._transport.write(out)

    def pause(self, *, paused: bool) -> None:
        """Stop or resume reading: the peer waits meanwhile when it writes."""
        transport = cast("asyncio.ReadTransport | None", self._transport)
        if transport is not None and not self.lost and transport.is_reading() is paused:
            (transport.pause_reading if paused else transport.resume_reading)()

    def close(self) -> None:
        """Write the queued messages and end the connection."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once; the queued messages are lost."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast("asyncio.WriteTransport", transport)
        close_in_children(self)
        self.flush()

    def close_in_child(self) -> None:
        """Disconnect the socket, in a forked child: the peer must see the end of this process, not of its children."""
        if self._transport is not None and not self.lost:
            disconnect(self._transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.lost = True
        self._out.clear()
        self._loans.clear()
        if self._arena is not None:
            self._arena.rest(self._loop)
        if self._peer is not None:
            self._peer.close()
            self._peer = None  # objects that are built on its memory keep it
        on_lost = self._on_lost
        # Received values may live on, and keep this object: they must not keep its user.
        self._on_message = self._on_lost = _nothing
        on_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self.bytes_in += len(data)
        self._unframer.feed(data, self._received)

    def _received(self, part: memoryview) -> None:
        """Decode a message, or put it into an envelope, and pass it on."""
        if self._deaf:
            return
        if self._forwarded and (head := peek(part)) is not None and head[0] in self._forwarded:
            self._on_message(Envelope(*head, bytes(part)))
            return
        try:
            message = decoder.decode(part)
            if type(message) in WITH_PAYLOAD and type(message.payload) is Payload:
                self._borrow(message.payload)
        except ValueError as error:
            head = peek(part)
            if self._on_malformed is None or head is None:
                raise
            self._on_malformed(head[1], head[2], error)
            return
        if type(message) in _OURS:
            self._about_memory(message)
        else:
            self._on_message(message)

    # shared memory

    def _lend(self, payload: Payload) -> None:
        if self._arena is None:
            self._arena = payload.blocks[0].arena
            self._queue(Memory(*self._arena.identity()))
        self._loans.lend(payload.blocks)

    def _borrow(self, payload: Payload) -> None:
        if self._peer is None:
            raise ValueError("a message refers to unknown memory")
        payload.blocks = [Lease(self._peer, offset, size) for offset, size in payload.blocks]

    def _about_memory(self, message: Memory | Release) -> None:
        if isinstance(message, Memory):
            identity = (message.pid, message.file, message.size, message.device, message.inode)
            self._peer = PeerMemory(identity, self._give_back)
            if self._peer.gone:
                # It has died, and its last messages cannot be read: as if its connection had ended before.
                self._deaf = True
                if self._transport is not None:
                    self._transport.abort()
        else:
            self._loans.give_back(message.offsets)
            if self._arena is not None and not self._loans:
                self._arena.rest(self._loop)

    def _give_back(self, offsets: list[int]) -> None:
        self.send(Release(offsets))


def _nothing(_: object) -> None:
    """Ignore what comes after the end."""
