"""Whether the owner of a job is alive, as the kernel knows it.

Every open store holds a lock on one byte of a companion file: the byte at its fencing number. The kernel drops the
lock when the process ends, however it ends, and holds it for a process that is merely stopped or slow. So liveness is
known at once and for certain, without heartbeats, clocks or guesses about pids.

On Linux the locks are those of an open file description (``F_OFD_SETLK``), which two stores in one process do not
share. Elsewhere locks of the process (``lockf``) serve; the stores of one process then have one descriptor together,
because closing any descriptor of a file drops all such locks of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from typing import Protocol

from dfm_async.base.descriptors import close_in_children

__all__ = ["Locks", "OfdLocks", "ProcessLocks", "open_locks"]

_FLOCK = struct.Struct("hhqqi0q")
"""``struct flock`` of Linux: type, whence, start, length, pid, and padding up to its alignment."""
_MODE = 0o600


class Locks(Protocol):
    """Locks on single bytes of a file."""

    def acquire(self, byte: int) -> bool:
        """Takes the lock on a byte; False if somebody else has it."""
        ...

    def wait(self, byte: int) -> None:
        """Blocks until nobody else has the lock on a byte."""
        ...

    def held(self, byte: int) -> bool:
        """Whether somebody, perhaps ourselves, has the lock on a byte."""
        ...

    def release(self, byte: int) -> None:
        """Gives a lock back."""
        ...

    def close(self) -> None:
        """Gives all locks back."""
        ...


def open_locks(path: str) -> Locks:
    """Opens the companion file of a database, and creates it if there is none."""
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
        """Takes the lock on a byte; False if somebody else has it."""
        try:
            self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        self._own.add(byte)
        return True

    def wait(self, byte: int) -> None:
        """Blocks until nobody else has the lock on a byte."""
        if byte not in self._own:
            self._set(fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, byte)
            self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def held(self, byte: int) -> bool:
        """Whether somebody, perhaps ourselves, has the lock on a byte."""
        if byte in self._own:
            return True
        found: int = _FLOCK.unpack(self._set(fcntl.F_OFD_GETLK, fcntl.F_RDLCK, byte))[0]
        return found != fcntl.F_UNLCK

    def release(self, byte: int) -> None:
        """Gives a lock back."""
        self._own.discard(byte)
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def close(self) -> None:
        """Gives all locks back."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._own.clear()
            os.close(fd)

    close_in_child = close
    """The lock itself is the parent's, who still has the file open."""


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
        """Takes the lock on a byte; False if somebody else has it."""
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
        """Blocks until nobody else has the lock on a byte."""
        if byte not in self._file.held:
            fcntl.lockf(self._file.fd, fcntl.LOCK_SH, 1, byte)
            fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, byte)

    def held(self, byte: int) -> bool:
        """Whether somebody, perhaps ourselves, has the lock on a byte."""
        file = self._file
        if byte in file.held:
            return True
        try:
            # Shared: two that look at the same time must not take each other for the owner.
            fcntl.lockf(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(file.fd, fcntl.LOCK_UN, 1, byte)
        return False

    def release(self, byte: int) -> None:
        """Gives a lock back."""
        self._own.discard(byte)
        self._file.held.discard(byte)
        fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, byte)

    def close(self) -> None:
        """Gives all locks back."""
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
        """Closes the descriptor of this process, which has none of its parent's locks."""
        shared, self._shared = self._shared, None
        if shared is not None and _Shared.files.pop(self._path, None) is not None:
            with contextlib.suppress(OSError):
                os.close(shared.fd)
