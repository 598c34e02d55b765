"""Directories of named blobs: on this machine's disk, or on another file system. Synchronous; used in threads."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

__all__ = ["BlobDirectory", "Entry", "GivenUp", "LocalDirectory", "RemoteDirectory"]

_CHUNK: Final = 4 * 1024 * 1024
_ABANDONED: Final = 3600.0
_TIMES: Final = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")


class GivenUp(Exception):
    """Nobody wants any more what is being written."""


class Entry(NamedTuple):
    """A blob: its name, its size, and when it was last used, or written where that is all that is known."""

    name: str
    size: int
    used: float


class BlobDirectory(Protocol):
    """What a cache needs of a directory. Names are hexadecimal digits."""

    def read(self, name: str, limit: int, now: float) -> bytes | None:
        """Gives a blob, and notes that it was used; None if there is none, or one that is too large to be ours."""
        ...

    def write(self, name: str, parts: Sequence[bytes | memoryview], now: float, given_up: Callable[[], bool]) -> None:
        """Puts a blob there: readers see all of it, or nothing.

        Raises:
            GivenUp: ``given_up`` said so; nothing is left of it.
        """
        ...

    def remove(self, name: str) -> None:
        """Removes a blob, if it is there."""
        ...

    def entries(self) -> list[Entry]:
        """Looks at all blobs."""
        ...

    def sweep(self) -> None:
        """Removes what writers that were killed have left."""
        ...


class LocalDirectory:
    """A directory on disk.

    A blob is written to a file of its own, which then takes the name. A writer holds a lock on its file as long as it
    lives: so what killed writers left is known by its lock, which the system has taken away.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._new = root / "new"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"

    def read(self, name: str, limit: int, now: float) -> bytes | None:
        """Gives a blob, and notes that it was used."""
        try:
            # Whatever else somebody put there is not waited for, or followed.
            fd = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(fd, "rb", buffering=0) as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
                return None
            with contextlib.suppress(OSError):  # somebody else's file: it is as good
                os.utime(fd, (now, now))
            return file.read()

    def write(self, name: str, parts: Sequence[bytes | memoryview], now: float, given_up: Callable[[], bool]) -> None:
        """Puts a blob there."""
        path, new = self._path(name), self._new / uuid.uuid4().hex
        for folder in (os.path.dirname(path), self._new):  # somebody may have removed all of it
            os.makedirs(folder, mode=0o700, exist_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for abandoned
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for chunk in _chunks(parts, given_up):
                _write_all(fd, chunk)
            os.utime(fd, (now, now))
            os.rename(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Removes a blob."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def entries(self) -> list[Entry]:
        """Looks at all files."""
        found = []
        for folder in _listed(self._root):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for file in _listed(folder):
                    with contextlib.suppress(FileNotFoundError):  # another process has removed it
                        info = file.stat(follow_symlinks=False)
                        found.append(Entry(file.name, info.st_size, info.st_mtime))
        return found

    def sweep(self) -> None:
        """Removes the files of writers that were killed."""
        for file in _listed(self._new):
            with contextlib.suppress(OSError):
                fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    info = os.fstat(fd)
                    # An empty one may be a moment old, and its lock on the way.
                    if info.st_size or time.time() - info.st_mtime > _ABANDONED:
                        os.unlink(file.path)
                finally:
                    os.close(fd)


def _listed(folder: os.DirEntry[str] | pathlib.Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _chunks(parts: Iterable[bytes | memoryview], given_up: Callable[[], bool]) -> Iterable[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            if given_up():
                raise GivenUp
            yield view[start : start + _CHUNK]


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


class RemoteDirectory:
    """A directory of another file system, by fsspec. Object stores show an object when all of it is there."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"

    def read(self, name: str, limit: int, now: float) -> bytes | None:
        """Gives a blob."""
        try:
            found = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return found if isinstance(found, bytes) and len(found) <= limit else None

    def write(self, name: str, parts: Sequence[bytes | memoryview], now: float, given_up: Callable[[], bool]) -> None:
        """Puts a blob there."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if given_up():
            raise GivenUp
        self._fs.pipe_file(path, b"".join(parts))

    def remove(self, name: str) -> None:
        """Removes a blob."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def entries(self) -> list[Entry]:
        """Looks at all blobs."""
        self._fs.invalidate_cache(self._root)
        found = self._fs.find(self._root, detail=True)
        return [Entry(path.rpartition("/")[2], info.get("size") or 0, _time(info)) for path, info in found.items()]

    def sweep(self) -> None:
        """Nothing: there are no files on their way to a name."""


def _time(info: dict[str, Any]) -> float:
    """When something was written, in whatever way its file system tells."""
    for key in _TIMES:
        value = info.get(key)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
