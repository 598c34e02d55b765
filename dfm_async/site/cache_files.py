"""What ``TryFromCache`` keeps in files: one for each key, with limits of size and age. Synchronous; used in threads.

The files are blobs in a directory, on this machine's disk or on another file system.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import os
import pathlib
import stat
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import xxhash

from dfm_async.model.resources import CacheConfig
from dfm_async.site.cache_storage import LOCAL, value_storage

_MAGIC: Final = b"DFMcache"
_FRONT: Final = struct.Struct("<8sdIQ")  # when it was written, the sizes of key and value; then a checksum of all
_HEAD: Final = _FRONT.size + 16
_FILES: Final = 100_000
"""The largest number of files: small values must not make directories that cannot be listed."""
_LIST_AGAIN: Final = 10
"""The directory is listed again after a tenth of its limit was written: others may write there, too."""
_CHUNK: Final = 4 * 1024 * 1024
_ABANDONED: Final = 3600.0
_TIMES: Final = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")


class NoRoom(Exception):
    """A value is too large, together with others that are being written."""


def open_files(config: CacheConfig, federation: str, site: str) -> CacheFiles:
    """Open the files of a site. Does I/O."""
    path = value_storage(config, federation, site)
    local = config.protocol in LOCAL
    directory = LocalDirectory(pathlib.Path(path.path)) if local else RemoteDirectory(path.fs, path.path)
    return CacheFiles(directory, max_bytes=config.max_bytes, max_age=config.max_age)


class CacheFiles:
    """Values by key. What is damaged, too old, or of another key with the same name counts as missing.

    The directory may be shared with other processes. It is not listed with every write: its largest possible size is
    computed from the last listing, and what was written since. Values are too old after ``max_age`` seconds.
    """

    def __init__(
        self, directory: BlobDirectory, *, max_bytes: int, max_age: float | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes: int | None = None  # the upper limit; None: not listed yet
        self._count = 0
        self._since = 0
        self._writing = 0

    def read(self, key: bytes) -> tuple[memoryview, float] | None:
        """Return the value of a key and when it was written; None if it is missing."""
        name, now = _name(key), self._clock()
        data = self._directory.read(name, self._max_bytes, now)
        if data is None:
            return None
        found = _opened(data, key)
        if found is None or self._too_old(found[1], now):
            self._directory.remove(name)
            return None
        return found

    def write(self, key: bytes, value: bytes | memoryview, abandoned: Callable[[], bool]) -> None:
        """Keep a value; the least recently used ones are evicted for it.

        Raises:
            NoRoom: it is larger than all that may be kept, or than what others leave that are being written.
            WriteAbandoned: ``abandoned`` returned True.
        """
        if abandoned():
            raise WriteAbandoned
        now = self._clock()
        front = _FRONT.pack(_MAGIC, now, len(key), len(value))
        size = _HEAD + len(key) + len(value)
        if size > self._max_bytes:
            raise NoRoom(f"it has {size} bytes, and all that is kept may have {self._max_bytes}")
        with self._lock:
            self._make_room(size, now)
            self._writing += size
        try:
            parts = (front, _checksum(front, key, value), key, value)
            self._directory.write(_name(key), parts, now, abandoned)
        finally:
            with self._lock:
                self._writing -= size

    def _make_room(self, size: int, now: float) -> None:
        """Evict values before a write, so that the files do not exceed their limit while it is written."""
        limit = self._max_bytes
        if self._bytes is None:
            self._directory.sweep()
        elif self._bytes + size <= limit and self._count < _FILES and self._since <= limit // _LIST_AGAIN:
            self._bytes += size
            self._count += 1
            self._since += size
            return
        entries = sorted(self._directory.entries(), key=lambda entry: entry.used, reverse=True)
        held, count = sum(entry.size for entry in entries) + self._writing, len(entries)
        full = held + size > limit or count >= _FILES
        # Space for a few more, so that not each of them has to list the directory.
        goal = max(limit - limit // _LIST_AGAIN - size, 0) if full else limit
        most = _FILES - _FILES // _LIST_AGAIN if full else _FILES
        while entries and (held > goal or count > most or self._too_old(entries[-1].used, now)):
            entry = entries.pop()
            self._directory.remove(entry.name)
            held -= entry.size
            count -= 1
        if full:
            self._directory.sweep()
        if held + size > limit:
            self._bytes, self._count, self._since = held, count, 0
            raise NoRoom(f"others that are being written leave {limit - held} bytes, and it has {size}")
        self._bytes, self._count, self._since = held + size, count + 1, size

    def _too_old(self, written: float, now: float) -> bool:
        return self._max_age is not None and now - written > self._max_age


def _name(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=20).hexdigest()


def _checksum(front: bytes | memoryview, *parts: bytes | memoryview) -> bytes:
    check = xxhash.xxh3_128(front)
    for part in parts:
        check.update(part)
    return check.digest()


def _opened(data: bytes, key: bytes) -> tuple[memoryview, float] | None:
    """Return the value in a file and when it was written, if the file is complete and has this key."""
    if len(data) < _HEAD:
        return None
    magic, written, key_size, value_size = _FRONT.unpack_from(data)
    start = _HEAD + key_size
    view = memoryview(data)
    if magic != _MAGIC or len(data) != start + value_size or view[_HEAD:start] != key:
        return None
    if _checksum(view[: _FRONT.size], view[_HEAD:]) != view[_FRONT.size : _HEAD]:
        return None
    return view[start:], written


# directories


class WriteAbandoned(Exception):
    """A write was abandoned by its caller; nothing is left of it."""


class CachedBlob(NamedTuple):
    """A blob: its name, its size, and when it was last used (or written, where only that is known)."""

    name: str
    size: int
    used: float


class LocalDirectory:
    """The directory of a cache on disk. Names are hexadecimal digits.

    A blob is written to a temporary file, which is then renamed. A writer holds a lock on its file as long as it is
    alive: the system releases the locks of killed writers, which identifies their files.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._new = root / "new"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"

    def read(self, name: str, limit: int, now: float) -> bytes | None:
        """Return a blob, and note that it was used; None if it does not exist, or is larger than the limit."""
        try:
            # Pipes and links at this path are neither waited for nor followed.
            fd = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(fd, "rb", buffering=0) as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
                return None
            with contextlib.suppress(OSError):  # the file of another user: it is as good
                os.utime(fd, (now, now))
            return file.read()

    def write(self, name: str, parts: Sequence[bytes | memoryview], now: float, abandoned: Callable[[], bool]) -> None:
        """Write a blob: readers see all of it, or nothing.

        Raises:
            WriteAbandoned: ``abandoned`` returned True; nothing is left of it.
        """
        path, new = self._path(name), self._new / uuid.uuid4().hex
        for folder in (os.path.dirname(path), self._new):  # another process may have removed them
            os.makedirs(folder, mode=0o700, exist_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then no file is taken for abandoned
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for chunk in _chunks(parts, abandoned):
                _write_all(fd, chunk)
            os.utime(fd, (now, now))
            os.rename(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a blob, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def entries(self) -> list[CachedBlob]:
        """Return all blobs."""
        found = []
        for folder in _listed(self._root):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for file in _listed(folder):
                    with contextlib.suppress(FileNotFoundError):  # another process has removed it
                        info = file.stat(follow_symlinks=False)
                        found.append(CachedBlob(file.name, info.st_size, info.st_mtime))
        return found

    def sweep(self) -> None:
        """Remove the files of killed writers."""
        for file in _listed(self._new):
            with contextlib.suppress(OSError):
                fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    info = os.fstat(fd)
                    # An empty one may be new, and not locked yet.
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


def _chunks(parts: Iterable[bytes | memoryview], abandoned: Callable[[], bool]) -> Iterable[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            if abandoned():
                raise WriteAbandoned
            yield view[start : start + _CHUNK]


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


class RemoteDirectory:
    """The same on another file system, by fsspec. Object stores show an object when it is complete."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"

    def read(self, name: str, limit: int, now: float) -> bytes | None:
        """Return a blob."""
        try:
            found = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return found if isinstance(found, bytes) and len(found) <= limit else None

    def write(self, name: str, parts: Sequence[bytes | memoryview], now: float, abandoned: Callable[[], bool]) -> None:
        """Write a blob."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if abandoned():
            raise WriteAbandoned
        self._fs.pipe_file(path, b"".join(parts))

    def remove(self, name: str) -> None:
        """Remove a blob."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def entries(self) -> list[CachedBlob]:
        """Return all blobs."""
        self._fs.invalidate_cache(self._root)
        found = self._fs.find(self._root, detail=True)
        return [CachedBlob(path.rpartition("/")[2], info.get("size") or 0, _time(info)) for path, info in found.items()]

    def sweep(self) -> None:
        """Do nothing: there are no temporary files."""


BlobDirectory: TypeAlias = LocalDirectory | RemoteDirectory


def _time(info: dict[str, Any]) -> float:
    """Return when something was written, from whatever field its file system has."""
    for key in _TIMES:
        value = info.get(key)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
