"""Messages over a stream socket. The bytes of a chunk are read straight to where they belong."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Final, cast

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.base.sockets import LocalListener, connect_local, same_user
from dfm_async.exchange.bootstrap import Address
from dfm_async.exchange.connection import Listener, Pipe
from dfm_async.exchange.program_messages import Chunk, Message, ResultOffer, TaskAnswer, TaskOffer, decode, encode

_AWAITED: Final = frozenset({TaskOffer, TaskAnswer, ResultOffer})
"""Messages that the other end waits for: they are written at once, with what is queued before them.

That a task was accepted is among them because the program may compute on its loop from then on.
"""
_HEAD: Final = struct.Struct("<IIQ")
"""The sizes of the message and of what is behind it, and the stamp."""
_BUFFER: Final = 64 * 1024
_LARGEST_MESSAGE: Final = 1 << 30
_LARGEST_UNKNOWN: Final = 16 * 1024
"""The largest message of a peer that is not known yet."""
_LARGEST_CHUNK: Final = 16 * 1024 * 1024
_KERNEL: Final = 1024 * 1024
"""How much a Unix socket may hold, as far as the system allows it: with less, both sides wait for each other."""
_HEADS: Final = 1024
"""How much is read behind a chunk: another one is likely to come, whose bytes would have to be copied."""
_HIGH: Final = 0
"""From how many unsent bytes on :meth:`SocketPipe.drain` waits: what the kernel does not take is copied."""


class SocketPipe(Pipe, asyncio.BufferedProtocol):
    """One end of a Unix or TCP connection.

    Args:
        stamp: what every frame must carry; None until the peer is known, which allows only short messages.

    Attributes:
        ignored: how many frames came that do not belong to this launch.
    """

    def __init__(self, stamp: int | None = None) -> None:
        super().__init__()
        self.stamp = stamp
        self.ignored = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._seen = 0
        self._met = False
        self._out = bytearray()
        self._file = -1
        self._scheduled = False
        self._writable: asyncio.Future[None] | None = None
        self._problem = ""
        self._closing = False
        self._in = bytearray(_BUFFER)
        self._begin = self._end = 0
        self._chunk: Chunk | None = None
        self._room: memoryview | None = None
        self._size = self._filled = 0
        self._scratch: bytearray | None = None
        self._after_chunk = False

    # Pipe

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queue a message; it is written at the end of this turn of the loop."""
        if self.lost is not None:
            return
        body = encode(message)
        size = 0 if data is None else len(data)
        self._out += _HEAD.pack(len(body), size, self._seen if self.stamp is None else self.stamp)
        self._out += body
        if data is not None:
            self._flush_with(data)
        elif type(message) in _AWAITED:
            self._flush()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            out, self._out = self._out, bytearray()
            self._transport.write(out)

    def _flush_with(self, data: memoryview) -> None:
        """Write what is queued, and a chunk behind it.

        In one call if the kernel has room: the other side is woken once, and a transport would copy what is left over.
        """
        transport = self._transport
        if transport is None:
            return
        if transport.is_closing() or transport.get_write_buffer_size():  # what was queued there comes first
            self._flush()
            transport.write(data)
            return
        out, self._out = self._out, bytearray()
        try:
            sent = os.writev(self._file, (out, data))
        except OSError:
            sent = 0  # there is no room; or the connection has ended, which the transport will report
        if sent < len(out):
            transport.write(out[sent:])
            sent = len(out)
        if sent < len(out) + len(data):
            transport.write(data[sent - len(out) :])

    async def drain(self) -> None:
        """Wait until there is room for more."""
        while self._writable is not None and self.lost is None:
            await asyncio.shield(self._writable)

    def close(self) -> None:
        """Send what is queued, and end the connection."""
        self._flush()
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH)
        found = transport.get_extra_info("socket")
        self._file = found.fileno()
        close_in_children(self)
        if found.family == socket.AF_UNIX:  # TCP finds a size by itself, unless one is set
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL)
        self._flush()
        if self._closing:  # it was refused before it was made
            self._transport.close()

    def close_in_child(self) -> None:
        """Disconnect the socket, in a forked child: the peer must see the end of this process, not of its children."""
        if self._transport is not None:
            disconnect(self._file)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._out.clear()
        self._room = None
        self._transport = None  # it may not be closed again: some raise then
        self.resume_writing()
        self._ended.settle(None)
        self.lose(self._problem or (f"the connection broke: {exc}" if exc is not None else "the connection was closed"))

    def pause_writing(self) -> None:  # noqa: D102
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:  # noqa: D102
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102
        del sizehint
        if self._size:
            return self._target()[self._filled : self._size]
        if self._after_chunk:
            return memoryview(self._in)[self._end : self._end + _HEADS]
        return memoryview(self._in)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
        if self._size:
            self._filled += nbytes
            if self._filled == self._size:
                self._chunk_done()
            return
        self._end += nbytes
        self._after_chunk = False
        try:
            self._parse()
        except ValueError as error:
            self._broken(str(error))

    def eof_received(self) -> None:  # noqa: D102
        return None

    def _parse(self) -> None:
        """Handle all whole messages that are in the buffer."""
        data = memoryview(self._in)
        while self._end - self._begin >= _HEAD.size:
            body, behind, stamp = _HEAD.unpack_from(data, self._begin)
            self._check(body, behind)
            start = self._begin + _HEAD.size
            if self._end - start < body:
                break
            self._begin = start + body
            if not self._is_ours(stamp):
                self.ignored += 1
                if behind and not self._begin_chunk(None, behind):
                    break
                continue
            with data[start : start + body] as part:
                message = decode(part)
            if behind:
                if not isinstance(message, Chunk):
                    raise ValueError("bytes came behind a message that is not a chunk")
                if not self._begin_chunk(message, behind):
                    break
            else:
                if self._early:
                    raise ValueError("more than a hello came before the handshake")
                self.deliver(message)
        data.release()
        self._make_room()

    def _check(self, body: int, behind: int) -> None:
        known = self.stamp is not None
        if body > (_LARGEST_MESSAGE if known else _LARGEST_UNKNOWN) or behind > (_LARGEST_CHUNK if known else 0):
            raise ValueError(f"a message of {body + behind:,} bytes is too large")

    def _is_ours(self, stamp: int) -> bool:
        self._seen = stamp
        if self.stamp is None or stamp == self.stamp:
            self._met = True
            return True
        # A peer that has received nothing from us has no stamp yet, for example if it refuses us at once.
        return stamp == 0 and not self._met

    def _begin_chunk(self, chunk: Chunk | None, size: int) -> bool:
        """Take the bytes of a chunk that have come, None if it is not for us; return whether it is complete."""
        self._chunk, self._size, self._filled = chunk, size, 0
        receiver = self._receiver
        self._room = receiver.room(chunk, size) if receiver is not None and chunk is not None else None
        there = min(size, self._end - self._begin)
        self._target()[:there] = memoryview(self._in)[self._begin : self._begin + there]
        self._begin += there
        self._filled = there
        if there < size:
            return False
        self._chunk_done()
        return True

    def _target(self) -> memoryview:
        if self._room is not None:
            return self._room
        if self._scratch is None or len(self._scratch) < self._size:
            self._scratch = bytearray(self._size)
        return memoryview(self._scratch)

    def _chunk_done(self) -> None:
        chunk, size = self._chunk, self._size if self._room is not None else 0
        self._chunk = self._room = None
        self._after_chunk = True
        self._size = 0
        if chunk is not None and self._receiver is not None:
            self._receiver.received(chunk, size)

    def _make_room(self) -> None:
        """Move the rest to the front; grow the buffer if the next message is larger than it."""
        rest = self._end - self._begin
        need = _BUFFER
        if rest >= _HEAD.size and not self._size:
            body, _, _ = _HEAD.unpack_from(self._in, self._begin)
            need = max(need, _HEAD.size + body)
        if len(self._in) < need or (len(self._in) > need and not rest):
            grown = bytearray(need)
            grown[:rest] = self._in[self._begin : self._end]
            self._in = grown
        elif rest and self._begin:
            self._in[:rest] = self._in[self._begin : self._end]
        self._begin, self._end = 0, rest

    def _broken(self, why: str) -> None:
        self._problem = f"the peer violates the protocol: {why}"
        self._begin = self._end = 0
        self.abort()


# listening and connecting


class _AcceptedPipe(SocketPipe):
    """A connection to a listener. Those of other users of the machine are not even counted: they could be many."""

    def __init__(self, on_connect: Callable[[Pipe], None]) -> None:
        super().__init__()
        self._on_connect = on_connect

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if same_user(transport.get_extra_info("socket")):
            self._on_connect(self)
        else:
            self.abort()


async def _start(server: asyncio.Server, address: Address, local: LocalListener | None = None) -> Listener:
    def close() -> None:
        server.close()  # not wait_closed(): that may wait for programs that were accepted
        if local is not None:
            local.close()

    try:
        await server.start_serving()
    except BaseException:
        close()
        raise
    return Listener(address, close)


async def listen_unix(session: str, on_connect: Callable[[Pipe], None]) -> Listener:
    """Listen on a Unix socket."""
    local = LocalListener(f"dfm-async-{session}")
    # This does not suspend: nothing can be cancelled between the socket and its owner.
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: _AcceptedPipe(on_connect), sock=local.socket, start_serving=False
    )
    return await _start(server, Address(kind="unix", name=local.address.replace("\0", "@", 1)), local)


async def listen_tcp(session: str, on_connect: Callable[[Pipe], None]) -> Listener:
    """Listen on a TCP port of this machine."""
    del session
    server = await asyncio.get_running_loop().create_server(
        lambda: _AcceptedPipe(on_connect), "127.0.0.1", 0, start_serving=False
    )
    return await _start(server, Address(kind="tcp", port=server.sockets[0].getsockname()[1]))


async def connect_unix(address: Address, stamp: int) -> SocketPipe:
    """Connect to a Unix socket.

    Raises:
        PermissionError: a process of another user listens there.
        TimeoutError: it has not accepted connections for a long time.
        OSError: nobody listens there.
    """
    name = "\0" + address.name[1:] if address.name.startswith("@") else address.name
    return await connect_local(lambda: SocketPipe(stamp), name)


async def connect_tcp(address: Address, stamp: int) -> SocketPipe:
    """Connect to a TCP port of this machine.

    Raises:
        OSError: nobody listens there.
    """
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: SocketPipe(stamp), "127.0.0.1", address.port))[1]
