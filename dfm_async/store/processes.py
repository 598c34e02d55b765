"""Coordination of processes that share a file: locks show which are alive, sockets announce commits.

*Liveness.* Every open store holds a lock on one byte of a companion file: the byte at its fencing number. The kernel
drops the lock when the process ends, however it ends, and keeps it for a process that is merely stopped or slow. So
liveness is known at once and for certain, without heartbeats, clocks or guesses about pids.

On Linux the locks are those of an open file description (``F_OFD_SETLK``), which two stores in one process do not
share. Elsewhere they are locks of the process (``lockf``); the stores of one process then share one descriptor, because
closing any descriptor of a file drops all such locks of the process.

*Commits.* Every open store has an abstract Unix socket, and sends a byte per commit. A byte means that something was
committed since the byte before it; the end of the connection, that the owner has ended. A byte in the other direction
means that a request to the owner was committed. Nothing else is ever sent, so an end that does not read need not be
waited for: when its buffer is full, it has a byte to read anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final, Protocol

from dfm_async.base.descriptors import close_in_children
from dfm_async.base.sockets import require_same_user, same_user
from dfm_async.base.tasks import in_thread
from dfm_async.errors import StoreError

_FLOCK: Final = struct.Struct("hhqqi0q")
"""``struct flock`` of Linux: type, whence, start, length, pid, and padding up to its alignment."""
_MODE: Final = 0o600
_ABSTRACT: Final = sys.platform == "linux"
_PREFIX: Final = b"\0dfm_async-"
_BACKLOG: Final = 1024
_READ: Final = 4096


class Locks(Protocol):
    """Locks on single bytes of a file."""

    def acquire(self, byte: int) -> bool:
        """Take the lock on a byte; False if it is taken."""

    def wait(self, byte: int) -> None:
        """Block until no other owner has the lock on a byte."""

    def held(self, byte: int) -> bool:
        """Return whether the lock on a byte is taken, perhaps by this object."""

    def release(self, byte: int) -> None:
        """Release a lock."""

    def close(self) -> None:
        """Release all locks."""


def open_locks(path: str) -> Locks:
    """Open the companion file of a database, and create it if it does not exist."""
    # macOS defines F_OFD_SETLK as well, but its struct flock has another layout.
    return OfdLocks(path) if sys.platform == "linux" else ProcessLocks(path)


def _open_file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)


class OfdLocks:
    """Locks of an open file description."""

    def __init__(self, path: str) -> None:
        self._fd = _open_file(path)
        self._own: set[int] = set()
        close_in_children(self)

    def _set(self, command: int, kind: int, byte: int) -> bytes:
        return fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    def acquire(self, byte: int) -> bool:
        """Take the lock on a byte; False if it is taken."""
        try:
            self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        self._own.add(byte)
        return True

    def wait(self, byte: int) -> None:
        """Block until no other owner has the lock on a byte."""
        if byte not in self._own:
            self._set(fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, byte)
            self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def held(self, byte: int) -> bool:
        """Return whether the lock on a byte is taken, perhaps by this object."""
        if byte in self._own:
            return True
        found: int = _FLOCK.unpack(self._set(fcntl.F_OFD_GETLK, fcntl.F_RDLCK, byte))[0]
        return found != fcntl.F_UNLCK

    def release(self, byte: int) -> None:
        """Release a lock."""
        self._own.discard(byte)
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def close(self) -> None:
        """Release all locks."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._own.clear()
            os.close(fd)

    close_in_child = close
    """The lock belongs to the parent, which still has the file open."""


class _Shared:
    """The one descriptor that a process has of a companion file."""

    files: dict[str, _Shared] = {}  # noqa: RUF012 - of the process, as the locks are

    def __init__(self, path: str) -> None:
        self.fd = _open_file(path)
        self.users = 0
        self.held: set[int] = set()


class ProcessLocks:
    """Locks of the process."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)
        self._shared: _Shared | None = _Shared.files.get(self._path) or _Shared(self._path)
        _Shared.files[self._path] = self._shared
        self._shared.users += 1
        self._own: set[int] = set()
        close_in_children(self)

    @property
    def _file(self) -> _Shared:
        if self._shared is None:
            raise ValueError("the locks are closed")
        return self._shared

    def acquire(self, byte: int) -> bool:
        """Take the lock on a byte; False if it is taken."""
        file = self._file
        if byte in file.held:
            return byte in self._own
        try:
            fcntl.lockf(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        file.held.add(byte)
        self._own.add(byte)
        return True

    def wait(self, byte: int) -> None:
        """Block until no other owner has the lock on a byte."""
        if byte not in self._file.held:
            fcntl.lockf(self._file.fd, fcntl.LOCK_SH, 1, byte)
            fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, byte)

    def held(self, byte: int) -> bool:
        """Return whether the lock on a byte is taken, perhaps by this object."""
        file = self._file
        if byte in file.held:
            return True
        try:
            # Shared: two processes that check at the same time must not take each other for the owner.
            fcntl.lockf(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(file.fd, fcntl.LOCK_UN, 1, byte)
        return False

    def release(self, byte: int) -> None:
        """Release a lock."""
        self._own.discard(byte)
        self._file.held.discard(byte)
        fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, byte)

    def close(self) -> None:
        """Release all locks."""
        if self._shared is None:
            return
        for byte in list(self._own):
            self.release(byte)
        shared, self._shared = self._shared, None
        shared.users -= 1
        if not shared.users:
            _Shared.files.pop(self._path, None)
            os.close(shared.fd)

    def close_in_child(self) -> None:
        """Close the descriptor of a forked child, which has none of its parent's locks."""
        shared, self._shared = self._shared, None
        if shared is not None and _Shared.files.pop(self._path, None) is not None:
            with contextlib.suppress(OSError):
                os.close(shared.fd)


class Followers:
    """The processes that follow the commits of this store. ``on_request`` is called when one has stored a request.

    Attributes:
        address: the address to connect to; None where there are no abstract addresses.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_request: Callable[[], None]) -> None:
        self.address: bytes | None = None
        self._loop = loop
        self._on_request = on_request
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
        except OSError:  # it has closed the connection again
            return
        if not same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._receive, connection)
        self._send(connection)  # for what was committed after it connected and before it was accepted

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_READ)
        except BlockingIOError:
            return
        except OSError:  # it was closed; what it had sent is lost
            data = b""
            self._on_request()
        if data:
            self._on_request()
        else:
            self._drop(connection)

    def notify(self) -> None:
        """Notify all followers of a commit."""
        for connection in tuple(self._connections):
            self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        # One that has enough bytes to read needs no further one. One that was closed may have sent something before.
        with contextlib.suppress(OSError):
            connection.send(b"\1")

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._loop.remove_reader(connection)
            connection.close()

    def close(self) -> None:
        """Notify all followers of the end."""
        for connection in tuple(self._connections):
            self._drop(connection)
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            # Also those that are not accepted yet: the kernel ends their connections.
            listener.close()

    def close_in_child(self) -> None:
        """Close the descriptors of a forked child. The loop belongs to its parent."""
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

    def notify_owner(self) -> None:
        """Notify the owner that a request for one of its jobs was committed."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has enough bytes to read, or has ended
                self._socket.send(b"\1")

    async def changed(self) -> bool:
        """Wait until something was committed since the last call; False when the owner has ended."""
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

    def jobs(self) -> None:
        """Return None: any job of the owner may have been changed."""

    async def _released(self) -> None:
        """Wait for the lock: a process that is killed may lose its connections a moment before its locks."""

        def wait() -> None:
            with contextlib.suppress(OSError, ValueError):  # this store was closed meanwhile
                self._locks.wait(self._fence)

        await in_thread(wait, "store-wait")

    def close(self) -> None:
        """End the connection."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
