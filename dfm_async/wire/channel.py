"""Messages over a socket: length-prefixed, in order, written once per turn of the loop.

What a message tells of is in shared memory, as far as it is large. The channel lends its blocks to the other end, and
gives back those that it was lent.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final, cast

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.wire.memory import Arena, Lease, Loans, Payload, PeerMemory
from dfm_async.wire.messages import CARRIERS, Memory, Message, Release, decoder, encoder

__all__ = ["Channel"]

_HEAD: Final = struct.Struct("<Q")
_LARGEST: Final = 1 << 34
_OURS: Final = frozenset({Memory, Release})


class Channel(asyncio.Protocol):
    """One end of a connection to another process.

    Args:
        on_message: is called for every message, in order, on the loop. Must not raise.
        on_lost: is called once, when the connection has ended for whatever reason.
    """

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[Exception | None], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._out = bytearray()
        self._scheduled = False
        self._in = bytearray()
        self._loop = asyncio.get_running_loop()
        self.lost = False
        self.bytes_in = 0
        self.bytes_out = 0
        self._deaf = False
        self._arena: Arena | None = None
        self._loans = Loans()
        self._peer: PeerMemory | None = None

    def send(self, message: Message) -> None:
        """Queues a message; it is written at the end of this turn of the loop. Ignored when the connection is lost."""
        if self.lost:
            return
        if type(message) in CARRIERS and type(message.payload) is Payload:  # type: ignore[union-attr]
            self._lend(message.payload)  # type: ignore[union-attr]
        self._queue(message)

    def _queue(self, message: Message) -> None:
        out = self._out
        start = len(out)
        out += b"\0\0\0\0\0\0\0\0"
        try:
            encoder.encode_into(message, out, start + 8)
        except BaseException:
            del out[start:]  # a message that cannot be encoded must not spoil those behind it
            raise
        _HEAD.pack_into(out, start, len(out) - start - 8)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Writes what is queued."""
        if self._out and self._transport is not None:
            out, self._out = self._out, bytearray()
            self.bytes_out += len(out)
            self._transport.write(out)

    def pause(self, *, paused: bool) -> None:
        """Stops reading, or goes on: whoever writes at the other end waits meanwhile."""
        transport = cast("asyncio.ReadTransport | None", self._transport)
        if transport is not None and not self.lost and transport.is_reading() is paused:
            (transport.pause_reading if paused else transport.resume_reading)()

    def close(self) -> None:
        """Writes what is queued and ends the connection."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once; what is queued is lost."""
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
            self._peer = None  # what was built on its memory has it
        on_lost = self._on_lost
        # Values that came from here may live on, and keep this object: they must not keep whoever used it.
        self._on_message = self._on_lost = _nothing
        on_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self.bytes_in += len(data)
        if self._in:
            self._in += data
            rest = self._parse(self._in)
            if rest:
                del self._in[:rest]
        else:
            rest = self._parse(data)
            if rest < len(data):
                self._in += memoryview(data)[rest:]

    def _parse(self, data: bytes | bytearray) -> int:
        """Handles all whole messages; tells where the rest begins."""
        view = memoryview(data)
        position, end = 0, len(data)
        try:
            while end - position >= 8:
                (size,) = _HEAD.unpack_from(view, position)
                if size > _LARGEST:
                    raise ValueError(f"a message of {size} bytes is too large")
                if end - position - 8 < size:
                    break
                position += 8
                with view[position : position + size] as part:
                    message = decoder.decode(part)
                position += size
                if self._deaf:
                    continue
                kind = type(message)
                if kind in CARRIERS:
                    if type(message.payload) is Payload:
                        self._borrow(message.payload)
                elif kind in _OURS:
                    self._about_memory(message)
                    continue
                self._on_message(message)
        finally:
            view.release()
        return position

    # shared memory

    def _lend(self, payload: Payload) -> None:
        if self._arena is None:
            self._arena = payload.blocks[0].arena
            self._queue(Memory(*self._arena.identity()))
        self._loans.lend(payload.blocks)

    def _borrow(self, payload: Payload) -> None:
        if self._peer is None:
            raise ValueError("a message tells of memory that is not known")
        payload.blocks = [Lease(self._peer, offset, size) for offset, size in payload.blocks]

    def _about_memory(self, message: Memory | Release) -> None:
        if isinstance(message, Memory):
            identity = (message.pid, message.file, message.size, message.device, message.inode)
            self._peer = PeerMemory(identity, self._give_back)
            if self._peer.gone:
                # It has died, and what it said last cannot be read: as if its connection had ended before.
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
    """Takes what comes after the end."""
