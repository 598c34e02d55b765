"""How other processes hear of commits: an abstract Unix socket per open store, and a byte per commit.

A byte means that something was committed since the byte before it; the end of the connection, that the owner has
ended. Nothing else is ever sent, so that a follower that does not read need not be waited for: when its buffer is
full, it has a byte to read anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
import threading

from dfm_async.base.descriptors import close_in_children
from dfm_async.errors import StoreError
from dfm_async.store.liveness import Locks
from dfm_async.wire.local_sockets import require_same_user, same_user

__all__ = ["CommitFollower", "Followers"]

_ABSTRACT = sys.platform == "linux"
_PREFIX = b"\0dfm_async-"
_BACKLOG = 1024
_READ = 4096


class Followers:
    """Those who follow our commits. ``address`` is where they find us, None where there are no such addresses."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.address: bytes | None = None
        self._loop = loop
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        if not _ABSTRACT:
            return
        address = _PREFIX + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
            loop.add_reader(listener, self._accept)
        except BaseException:
            listener.close()
            raise
        self._listener, self.address = listener, address
        close_in_children(self)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        if not same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._drop, connection)  # followers send nothing: it can only be the end
        self._tell(connection)  # of what was committed after it connected and before it was accepted

    def tell(self) -> None:
        """Something was committed."""
        for connection in tuple(self._connections):
            self._tell(connection)

    def _tell(self, connection: socket.socket) -> None:
        try:
            connection.send(b"\1")
        except BlockingIOError:
            pass  # it has bytes enough to read
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._loop.remove_reader(connection)
            connection.close()

    def close(self) -> None:
        """Tells all followers that we have ended."""
        for connection in tuple(self._connections):
            self._drop(connection)
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            # Those who are not accepted yet are told, too: the kernel ends their connections.
            listener.close()

    def close_in_child(self) -> None:
        """Closes the descriptors of a forked child. The loop, which is its parent's, is left alone."""
        for connection in self._connections:
            connection.close()
        if self._listener is not None:
            self._listener.close()


class CommitFollower:
    """Follows the commits of one owner."""

    def __init__(self, path: str, locks: Locks, fence: int, address: bytes | None) -> None:
        self._path = path
        self._locks = locks
        self._fence = fence
        self._socket: socket.socket | None = None
        if not locks.held(fence):
            return
        if not address or not _ABSTRACT:
            raise StoreError(
                path,
                "the commits of another process cannot be followed on this platform",
                "Wait for the job where it was started, or read it again later",
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if not address.startswith(_PREFIX):
                raise ConnectionError("its address is damaged")
            connection.connect(address)  # on this machine it succeeds or fails at once
            require_same_user(connection)
        except OSError as error:
            connection.close()
            if not locks.held(fence):
                return
            raise StoreError(
                path,
                f"the owner of the job is alive but cannot be reached ({error})",
                "Follow it as the same user, and in the same network namespace or container",
            ) from error
        self._socket = connection

    async def changed(self) -> bool:
        """Waits until something was committed since the last call; False when the owner has ended."""
        if self._socket is None:
            return False
        loop = asyncio.get_running_loop()
        try:
            data = await loop.sock_recv(self._socket, _READ)
        except ConnectionError:
            data = b""
        if data:
            return True
        self.close()
        try:
            alive = self._locks.held(self._fence)
        except ValueError as error:
            advice = "Leave the follower before the store is closed"
            raise StoreError(self._path, "it was closed while it followed another", advice) from error
        if alive:
            await self._released()
        return False

    async def _released(self) -> None:
        """A process that is killed may lose its connections a moment before its locks."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wait() -> None:
            with contextlib.suppress(OSError, ValueError):  # our own store was closed meanwhile
                self._locks.wait(self._fence)
            with contextlib.suppress(RuntimeError):  # or its loop
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=wait, name="dfm-store-wait", daemon=True).start()
        await done.wait()

    def close(self) -> None:
        """Ends the connection."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
