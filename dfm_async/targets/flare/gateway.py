"""The gateway of the homesite: takes messages between applications of the same machine and the hub.

An application finds it at an address without a file. Both prove to each other that they know a secret, without telling
it: the hub has told it to the application, and only the user that FLARE has authenticated can ask the hub.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import struct
from collections.abc import Callable
from typing import Any, Final

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.targets.flare.messages import AppBytes, AppGone
from dfm_async.targets.flare.parts import together
from dfm_async.wire.local_sockets import user_of

__all__ = ["TOGETHER", "Frames", "Gateway", "prove", "split_address"]

_log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<Q")
_LARGEST: Final = 1 << 31
_SECRET: Final = 32
_WORD: Final = 64
"""How many bytes somebody may say who has not shown that they know the secret."""
_STRANGERS: Final = 32
"""How many of them may be connected, of each user of the machine."""
_PATIENCE: Final = 5.0
"""For how many seconds."""
TOGETHER: Final = 1024 * 1024
"""How many bytes of messages for, or of, one application go together."""
_ADDRESS: Final = re.compile(r"(dfm-async-gateway-[0-9a-f]{16}):([0-9a-f]{64})")


def split_address(address: str) -> tuple[str, bytes]:
    """Takes an address apart: the name of the socket, and the secret.

    Raises:
        ValueError: it is none.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError("this is not the address of a gateway")
    return f"\0{found[1]}", found[2].encode()


def prove(secret: bytes, who: bytes, challenge: bytes) -> bytes:
    """What only somebody can say who knows the secret."""
    return hmac.digest(secret, who + challenge, "sha256")


class Frames(asyncio.Protocol):
    """One end of a connection between an application and the gateway: whole messages, in order.

    Args:
        on_frame: is called for every message, on the loop. Must not raise.
        on_lost: is called once, when the connection has ended.
        largest: how many bytes a message may have.
        on_made: is called when the connection is there, with the user of the peer.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
        largest: int = _LARGEST,
        on_made: Callable[[Frames, int | None], None] | None = None,
    ) -> None:
        self.on_frame = on_frame
        self.largest = largest
        self.on_lost = on_lost
        self._on_made = on_made
        self._transport: asyncio.WriteTransport | None = None
        self._in = bytearray()
        self.lost = False

    def send(self, data: bytes) -> None:
        """Writes a message; ignored when the connection has ended, or is about to."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((_HEAD.pack(len(data)), data))

    @property
    def backlog(self) -> int:
        """How many bytes wait to be written."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Ends the connection when everything is written."""
        if self._transport is not None:
            self._transport.close()

    @property
    def connected(self) -> bool:
        """Whether there is a connection that has not ended."""
        return self._transport is not None and not self.lost

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self, *, paused: bool) -> None:
        """Reads nothing more, or goes on."""
        transport = self._transport
        if isinstance(transport, asyncio.Transport) and not transport.is_closing():
            if paused:
                transport.pause_reading()
            else:
                transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = transport  # type: ignore[assignment] # a stream has one to write to
        close_in_children(self)
        if self._on_made is not None:
            self._on_made(self, user_of(transport.get_extra_info("socket")))

    def close_in_child(self) -> None:
        """Disconnect the socket, in a forked child: the peer must see the end of this process, not of its children."""
        if self._transport is not None and not self.lost:
            disconnect(self._transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if not self.lost:
            self.lost = True
            self.on_lost()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._in += data
        position, end = 0, len(self._in)
        while end - position >= 8:
            (size,) = _HEAD.unpack_from(self._in, position)
            if size > self.largest:
                _log.warning("a message of %d bytes is larger than the %d that are allowed", size, self.largest)
                self.abort()
                return
            if end - position - 8 < size:
                break
            position += 8
            self.on_frame(bytes(self._in[position : position + size]))
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
        self._strangers: dict[Frames, int | None] = {}
        """Connections that have not shown that they know the secret, with the users that they come from."""
        self._apps: dict[str, Frames] = {}
        self._paused = False

    @property
    def address(self) -> str:
        """Where applications find it, and the secret."""
        return f"{self._name}:{self._secret}"

    async def open(self) -> None:
        """Begins to listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept, path=f"\0{self._name}")

    def _accept(self) -> Frames:
        loop = asyncio.get_running_loop()
        secret, challenge = self._secret.encode(), secrets.token_bytes(16)

        def asked(data: bytes) -> None:
            connection.on_frame = proven
            connection.send(prove(secret, b"gateway", data) + challenge)

        def proven(data: bytes) -> None:
            if not hmac.compare_digest(data, prove(secret, b"application", challenge)):
                _log.warning("somebody came to the gateway without its secret")
                connection.abort()
                return
            timer.cancel()
            self._strangers.pop(connection, None)
            self._welcome(connection)

        def lost() -> None:
            timer.cancel()
            self._strangers.pop(connection, None)

        connection = Frames(asked, lost, _WORD, self._meet)
        timer = loop.call_later(_PATIENCE, connection.abort)
        return connection

    def _meet(self, connection: Frames, user: int | None) -> None:
        """Count a new connection among those of its user: no user can displace the connections of another."""
        theirs = [other for other, known in self._strangers.items() if known == user]
        if len(theirs) >= _STRANGERS:
            # At DEBUG: another user of the machine could fill the log.
            _log.debug("user %s has %d connections without the secret: the oldest is closed", user, _STRANGERS)
            self._strangers.pop(theirs[0])
            theirs[0].abort()
        self._strangers[connection] = user

    def _welcome(self, connection: Frames) -> None:
        name = secrets.token_hex(8)
        waiting: list[bytes] = []

        def flush() -> None:
            for messages in together(waiting, TOGETHER):
                self._send(AppBytes(name, messages))
            waiting.clear()

        def frame(data: bytes) -> None:
            if not waiting:  # those of one turn of the loop go together
                asyncio.get_running_loop().call_soon(flush)
            waiting.append(data)

        def lost() -> None:
            flush()
            if self._apps.pop(name, None) is not None:
                self._send(AppGone(name))

        connection.on_frame, connection.on_lost, connection.largest = frame, lost, _LARGEST
        self._apps[name] = connection
        connection.pause(paused=self._paused)

    def receive(self, message: AppBytes | AppGone) -> None:
        """Takes messages of the hub for an application. How many there can be is the hub's affair."""
        connection = self._apps.get(message.app)
        if connection is None:
            return
        if isinstance(message, AppGone):
            connection.abort()
            return
        for data in message.data:
            connection.send(data)

    def let_go(self, app: str) -> None:
        """Ends the connection of an application: what it has said did not arrive."""
        connection = self._apps.get(app)
        if connection is not None:
            connection.abort()

    def pause(self, *, paused: bool) -> None:
        """Reads nothing more of the applications, or goes on."""
        if paused is not self._paused:
            self._paused = paused
            for connection in self._apps.values():
                connection.pause(paused=paused)

    async def close(self) -> None:
        """Lets all applications go."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._strangers, *self._apps.values()]:
            connection.close()
