"""The gateway of the homesite: forwards messages between applications of the same machine and the hub.

An application connects to an abstract socket address. Both prove to each other that they know a secret, without sending
it: the hub sends it only to the user that FLARE has authenticated.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import platform
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.base.framing import HEAD, FrameTooLarge, Unframer
from dfm_async.base.sockets import user_of
from dfm_async.targets.flare.message_parts import batches
from dfm_async.targets.flare.protocol import AppBytes, AppGone

_log = logging.getLogger(__name__)

_LARGEST: Final = 1 << 31
_SECRET: Final = 32
_WORD: Final = 64
"""The largest message of a connection that is not authenticated yet, in bytes."""
_MOST_UNAUTHENTICATED: Final = 32
"""The largest number of such connections, for each user of the machine."""
_TIMEOUT: Final = 5.0
"""The time for authentication, in seconds."""
_BATCH_BYTES: Final = 1024 * 1024
"""The largest size of a batch of messages for, or of, one application."""
_ADDRESS: Final = re.compile(r"(dfm-async-gateway-[0-9a-f]{16}):([0-9a-f]{64})")


def split_address(address: str) -> tuple[str, bytes]:
    """Return the name of the socket and the secret of an address.

    Raises:
        ValueError: it is not one.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError("not the address of a gateway")
    return f"\0{found[1]}", found[2].encode()


def prove(secret: bytes, who: bytes, challenge: bytes) -> bytes:
    """Return the proof that one knows the secret."""
    return hmac.digest(secret, who + challenge, "sha256")


class Frames(asyncio.Protocol):
    """One end of a connection between an application and the gateway: whole messages, in order.

    Args:
        on_frame: is called for every message, on the loop. Must not raise.
        on_lost: is called once, when the connection has ended.
        largest: the size limit of a message, in bytes.
        on_made: is called when the connection is open, with the user of the peer.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
        largest: int = _LARGEST,
        on_made: Callable[[Frames, int | None], None] | None = None,
    ) -> None:
        self.on_frame = on_frame
        self.on_lost = on_lost
        self._on_made = on_made
        self._transport: asyncio.WriteTransport | None = None
        self.unframer = Unframer(largest)
        self.lost = False

    def send(self, data: bytes) -> None:
        """Write a message; ignored when the connection has ended, or is about to."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((HEAD.pack(len(data)), data))

    def close(self) -> None:
        """End the connection when everything is written."""
        if self._transport is not None:
            self._transport.close()

    @property
    def connected(self) -> bool:
        """Whether there is a connection that has not ended."""
        return self._transport is not None and not self.lost

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self, *, paused: bool) -> None:
        """Read nothing more, or go on."""
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
        try:
            self.unframer.feed(data, lambda message: self.on_frame(bytes(message)))
        except FrameTooLarge as error:
            _log.warning("a connection is closed: %s", error)
            self.abort()


class AppBatches:
    """Sends the messages of, or for, one application: those of one turn of the loop together.

    Args:
        app: the application's connection at the gateway.
        send: sends a batch to the other end.
    """

    def __init__(self, app: str, send: Callable[[AppBytes], None]) -> None:
        self._app = app
        self._send = send
        self._waiting: list[bytes] = []

    def add(self, data: bytes) -> None:
        """Send a message at the end of this turn of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(data)

    def flush(self) -> None:
        """Send what waits."""
        for messages in batches(self._waiting, _BATCH_BYTES):
            self._send(AppBytes(self._app, messages))
        self._waiting.clear()


class Gateway:
    """Listens for applications.

    Args:
        send: sends messages to the hub.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._name = f"dfm-async-gateway-{secrets.token_hex(8)}"
        self._secret = secrets.token_hex(_SECRET)
        self._server: asyncio.AbstractServer | None = None
        self._unauthenticated: dict[Frames, int | None] = {}
        """Connections that are not authenticated yet, with the users that they come from."""
        self._apps: dict[str, Frames] = {}
        self._paused = False

    @property
    def address(self) -> str:
        """The name of its socket, and the secret."""
        return f"{self._name}:{self._secret}"

    async def open(self) -> None:
        """Begin to listen."""
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
                _log.warning("a connection to the gateway was refused: wrong secret")
                connection.abort()
                return
            timer.cancel()
            self._unauthenticated.pop(connection, None)
            self._welcome(connection)

        def lost() -> None:
            timer.cancel()
            self._unauthenticated.pop(connection, None)

        connection = Frames(asked, lost, _WORD, self._meet)
        timer = loop.call_later(_TIMEOUT, connection.abort)
        return connection

    def _meet(self, connection: Frames, user: int | None) -> None:
        """Count a new connection among those of its user: no user can displace the connections of another."""
        theirs = [other for other, known in self._unauthenticated.items() if known == user]
        if len(theirs) >= _MOST_UNAUTHENTICATED:
            # At DEBUG: another user of the machine could fill the log.
            _log.debug("user %s has %d unauthenticated connections: the oldest is closed", user, _MOST_UNAUTHENTICATED)
            self._unauthenticated.pop(theirs[0])
            theirs[0].abort()
        self._unauthenticated[connection] = user

    def _welcome(self, connection: Frames) -> None:
        name = secrets.token_hex(8)
        messages = AppBatches(name, self._send)

        def lost() -> None:
            messages.flush()
            if self._apps.pop(name, None) is not None:
                self._send(AppGone(name))

        connection.on_frame, connection.on_lost, connection.unframer.largest = messages.add, lost, _LARGEST
        self._apps[name] = connection
        connection.pause(paused=self._paused)

    def receive(self, message: AppBytes | AppGone) -> None:
        """Take messages of the hub for an application. The hub bounds their number."""
        connection = self._apps.get(message.app)
        if connection is None:
            return
        if isinstance(message, AppGone):
            connection.abort()
            return
        for data in message.data:
            connection.send(data)

    def disconnect(self, app: str) -> None:
        """End the connection of an application whose messages did not arrive."""
        connection = self._apps.get(app)
        if connection is not None:
            connection.abort()

    def pause(self, *, paused: bool) -> None:
        """Stop reading from the applications, or go on."""
        if paused is not self._paused:
            self._paused = paused
            for connection in self._apps.values():
                connection.pause(paused=paused)

    async def close(self) -> None:
        """Disconnect all applications."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._unauthenticated, *self._apps.values()]:
            connection.close()


class _GatewayAddress(msgspec.Struct, frozen=True):
    host: str
    host_job: str
    address: str


class GatewayMemory:
    """A file in the user's startup kit, which has their private key, too: nobody else can read it.

    Args:
        kit: the startup kit.
        host_job: the name of the host job.
    """

    def __init__(self, kit: Path, host_job: str) -> None:
        self._path = kit / "local" / f".{host_job}.gateway"
        self._host_job = host_job

    def address(self) -> str | None:
        """Return where the gateway was, if it was on this machine."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_GatewayAddress)
        except (OSError, ValueError):
            return None
        return found.address if (found.host, found.host_job) == (platform.node(), self._host_job) else None

    def keep(self, address: str) -> None:
        """Note where the gateway is; a kit that cannot be written to is left as it is."""
        data = msgspec.json.encode(_GatewayAddress(platform.node(), self._host_job, address))
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            new.parent.mkdir(exist_ok=True)
            new.touch(mode=0o600)
            new.write_bytes(data)
            new.replace(self._path)

    def forget(self) -> None:
        """Forget the gateway, which is gone."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
