"""What ``TryFromCache`` keeps in files: one for each key, with limits of size and age. Synchronous; used in threads."""

from __future__ import annotations

import hashlib
import pathlib
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

import xxhash

from dfm_async.model.resources import CacheConfig
from dfm_async.site.cache_directory import BlobDirectory, GivenUp, LocalDirectory, RemoteDirectory
from dfm_async.site.cache_storage import LOCAL, value_storage

__all__ = ["CacheFiles", "NoRoom", "open_files"]

_MAGIC: Final = b"DFMcache"
_FRONT: Final = struct.Struct("<8sdIQ")  # when it was written, the sizes of key and value; then a checksum of all
_HEAD: Final = _FRONT.size + 16
_FILES: Final = 100_000
"""How many files there are at most: small values must not make directories that nobody can list."""
_LOOK_AGAIN: Final = 10
"""The directory is looked at again after a tenth of its limit was written: others may write there, too."""


class NoRoom(Exception):
    """A value is too large, beside others that are being written."""


def open_files(config: CacheConfig, federation: str, site: str) -> CacheFiles:
    """Opens the files of a site. Does I/O."""
    path = value_storage(config, federation, site)
    directory: BlobDirectory
    if config.protocol in LOCAL:
        directory = LocalDirectory(pathlib.Path(path.path))
    else:
        directory = RemoteDirectory(path.fs, path.path)
    return CacheFiles(directory, max_bytes=config.max_bytes, max_age=config.max_age)


class CacheFiles:
    """Values by key. What is damaged, too old, or of another key with the same name counts as missing.

    The directory may be shared with other processes. It is not looked at with every write: what it holds at most is
    reckoned from the last look, and what was written since.

    Args:
        directory: where the files are.
        max_bytes: how many bytes they have at most.
        max_age: after how many seconds a value is too old.
        clock: tells the time, in seconds since 1970.
    """

    def __init__(
        self,
        directory: BlobDirectory,
        *,
        max_bytes: int,
        max_age: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes: int | None = None  # at most so many are there; None: not looked yet
        self._count = 0
        self._since = 0
        self._writing = 0

    def read(self, key: bytes) -> tuple[memoryview, float] | None:
        """Gives the value of a key and when it was written; None if it is missing."""
        name, now = _name(key), self._clock()
        data = self._directory.read(name, self._max_bytes, now)
        if data is None:
            return None
        found = _opened(data, key)
        if found is None or self._too_old(found[1], now):
            self._directory.remove(name)
            return None
        return found

    def write(self, key: bytes, value: bytes | memoryview, given_up: Callable[[], bool]) -> None:
        """Keeps a value; the least recently used make room for it.

        Raises:
            NoRoom: it is larger than all that may be kept, or than what others leave that are being written.
            GivenUp: ``given_up`` said so.
        """
        if given_up():
            raise GivenUp
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
            self._directory.write(_name(key), parts, now, given_up)
        finally:
            with self._lock:
                self._writing -= size

    def _make_room(self, size: int, now: float) -> None:
        """Before a write: also while it is written, the files are not too large."""
        limit = self._max_bytes
        if self._bytes is None:
            self._directory.sweep()
        elif self._bytes + size <= limit and self._count < _FILES and self._since <= limit // _LOOK_AGAIN:
            self._bytes += size
            self._count += 1
            self._since += size
            return
        entries = sorted(self._directory.entries(), key=lambda entry: entry.used, reverse=True)
        held, count = sum(entry.size for entry in entries) + self._writing, len(entries)
        full = held + size > limit or count >= _FILES
        # Room for a few more, so that not each of them has to look.
        goal = max(limit - limit // _LOOK_AGAIN - size, 0) if full else limit
        most = _FILES - _FILES // _LOOK_AGAIN if full else _FILES
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
    """The value in a file and when it was written, if the file is whole and has this key."""
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
