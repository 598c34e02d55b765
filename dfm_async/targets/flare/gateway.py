"""The gateway of the homesite: takes messages between applications of the same machine and the hub.

An application finds it at an address without a file, and shows a secret that it was told by the hub, which only the
user that FLARE has authenticated can ask.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from collections.abc import Callable
from typing import Any, Final

from dfm_async.targets.flare.messages import AppBytes, AppGone

__all__ = ["Frames", "Gateway", "split_address"]

_log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<Q")
_LARGEST: Final = 1 << 32
_SECRET: Final = 32
_FULL: Final = 64 * 1024 * 1024


def split_address(address: str) -> tuple[str, bytes]:
    """Takes an address apart: the name of the socket, and the secret."""
    name, _, secret = address.partition(":")
    return f"\0{name}", secret.encode()


class Frames(asyncio.Protocol):
    """One end of a connection between an application and the gateway: whole messages, in order.

    Args:
        on_frame: is called for every message, on the loop. Must not raise.
        on_lost: is called once, when the connection has ended.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._in = bytearray()
        self.lost = False

    def send(self, data: bytes) -> None:
        """Writes a message; ignored when the connection is lost."""
        if self._transport is not None and not self.lost:
            self._transport.writelines((_HEAD.pack(len(data)), data))

    @property
    def backlog(self) -> int:
        """How many bytes wait to be written."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Ends the connection when everything is written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = transport  # type: ignore[assignment] # a stream has one to write to

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if not self.lost:
            self.lost = True
            self._on_lost()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._in += data
        position, end = 0, len(self._in)
        while end - position >= 8:
            (size,) = _HEAD.unpack_from(self._in, position)
            if size > _LARGEST:
                _log.error("a message of %d bytes is too large", size)
                self.close()
                return
            if end - position - 8 < size:
                break
            position += 8
            self._on_frame(bytes(self._in[position : position + size]))
            position += size
        if position:
            del self._in[:position]


class Gateway:
    """Listens for applications.

    Args:
        send: takes messages to the hub.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._name = f"dfm-async-gateway-{secrets.token_hex(8)}"
        self._secret = secrets.token_hex(_SECRET)
        self._server: asyncio.AbstractServer | None = None
        self._apps: dict[str, Frames] = {}

    @property
    def address(self) -> str:
        """Where applications find it, and the secret that they show."""
        return f"{self._name}:{self._secret}"

    async def open(self) -> None:
        """Begins to listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept, path=f"\0{self._name}")

    def _accept(self) -> Frames:
        name = secrets.token_hex(8)
        known = False
        waiting: list[bytes] = []

        def flush() -> None:
            if waiting:
                messages = waiting[:]
                waiting.clear()
                self._send(AppBytes(name, messages))

        def frame(data: bytes) -> None:
            nonlocal known
            if known:
                if not waiting:  # those of one turn of the loop go together
                    asyncio.get_running_loop().call_soon(flush)
                waiting.append(data)
            elif hmac.compare_digest(data, self._secret.encode()):
                known = True
                self._apps[name] = connection
            else:
                _log.warning("somebody came to the gateway without its secret")
                connection.close()

        def lost() -> None:
            flush()
            if self._apps.pop(name, None) is not None:
                self._send(AppGone(name))

        connection = Frames(frame, lost)
        return connection

    def receive(self, message: AppBytes) -> None:
        """Takes messages of the hub for an application."""
        connection = self._apps.get(message.app)
        if connection is not None:
            for data in message.data:
                connection.send(data)
            if connection.backlog > _FULL:
                _log.warning("an application does not read, and is let go; it can come again")
                connection.close()

    async def close(self) -> None:
        """Lets all applications go."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._apps.values()):
            connection.close()
