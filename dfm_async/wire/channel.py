"""Messages over a socket: length-prefixed, in order, written once per turn of the loop."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final, cast

from dfm_async.wire.messages import Message, decoder, encoder

__all__ = ["Channel"]

_HEAD: Final = struct.Struct("<Q")
_LARGEST: Final = 1 << 34


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

    def send(self, message: Message) -> None:
        """Queues a message; it is written at the end of this turn of the loop. Ignored when the connection is lost."""
        if self.lost:
            return
        out = self._out
        start = len(out)
        out += b"\0\0\0\0\0\0\0\0"
        encoder.encode_into(message, out, start + 8)
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

    def close(self) -> None:
        """Writes what is queued and ends the connection."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast("asyncio.WriteTransport", transport)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.lost = True
        self._on_lost(exc)

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
                self._on_message(message)
        finally:
            view.release()
        return position
