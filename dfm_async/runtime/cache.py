"""The cache of one site: values by key, in memory and in files, with one computation per missing key at a time."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import completed
from dfm_async.errors import EncodingError
from dfm_async.model.resources import CacheConfig
from dfm_async.runtime.threads import Threads
from dfm_async.site.cache_files import CacheFiles, NoRoom, WriteAbandoned, open_files
from dfm_async.wire.codec import Codec

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ITEMS: Final = 4096
_BYTES: Final = 256 * 1024 * 1024
_THREADS: Final = 4


class Ticket(msgspec.Struct, eq=False):
    """The right to compute the value of a missing key. Its holder must call ``keep`` or ``abandon``."""

    key: bytes
    refused: str
    """Why the key cannot be stored in files, if it cannot."""
    done: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class _CacheEntry(NamedTuple):
    data: bytes | memoryview
    written: float


class SiteCache:
    """Keep encoded values in memory, and in files if the site has a directory for them.

    The least recently used values are evicted first. Files are untrusted input: nothing in them is unpickled. What
    cannot be written without pickle stays in memory, as the codec encodes it.
    """

    def __init__(self, codec: Codec, stored: CachedFiles | None = None) -> None:
        self._codec = codec.plain
        self._keys = codec.for_keys()
        self._stored = stored
        self._file_codec = Codec.for_untrusted()
        self._file_keys = Codec.for_untrusted().for_keys()
        self._values: OrderedDict[bytes, _CacheEntry] = OrderedDict()
        self._size = 0
        self._tickets: dict[bytes, Ticket] = {}

    async def look_up(self, key: Any, *, wait: bool) -> tuple[bool, Any]:
        """Return ``(True, value)``, or ``(False, ticket)`` to the caller that has to compute it. The others wait.

        Without ``wait``, a caller does not wait for another one that computes the same value: both compute it.

        Raises:
            EncodingError: the key cannot be encoded.
        """
        encoded, refused = self._encode_key(key)
        while True:
            entry = self._remembered(encoded)
            if entry is not None:
                return True, self._codec.loads(entry.data)
            ticket = self._tickets.get(encoded)
            if ticket is None or not wait:
                break
            await ticket.done.wait()
        own = Ticket(encoded, refused)
        if ticket is None:
            self._tickets[encoded] = own  # from now on others wait, also while the files are read
        if self._stored is None or refused:
            return False, own
        try:
            return await self._look_into_files(self._stored, own)
        except BaseException:
            self.abandon(own)
            raise

    async def _look_into_files(self, stored: CachedFiles, ticket: Ticket) -> tuple[bool, Any]:
        found = await stored.read(ticket.key)
        if found is None:
            return False, ticket
        data, written = found
        try:
            value = self._file_codec.loads(data)
        except EncodingError:
            # A class whose module is not loaded here. No file can make us import one: it is computed once more.
            return False, ticket
        self._remember(ticket.key, _CacheEntry(data, written))
        self.abandon(ticket)
        return True, value

    def keep(self, ticket: Ticket, value: Any, node: str) -> bytes | None:
        """Keep the value in memory, and wake its waiters. Return what :meth:`write` has to write for the node.

        Raises:
            EncodingError: the value cannot be encoded; the ticket counts as abandoned.
        """
        try:
            data = None if self._stored is None else self._for_files(self._stored, ticket, value, node)
            self._remember(ticket.key, _CacheEntry(self._codec.encode(value) if data is None else data, time.time()))
            return data
        finally:
            self.abandon(ticket)

    async def write(self, ticket: Ticket, data: bytes, node: str) -> None:
        """Write what was kept into a file. Errors are logged."""
        assert self._stored is not None  # noqa: S101 - else there is nothing to write
        await self._stored.write(ticket.key, data, node)

    def abandon(self, ticket: Ticket) -> None:
        """Give the ticket back: one of its waiters gets it."""
        if self._tickets.get(ticket.key) is ticket:
            del self._tickets[ticket.key]
        ticket.done.set()

    def close(self) -> None:
        """Let the threads of the cache end."""
        if self._stored is not None:
            self._stored.close()

    def _encode_key(self, key: Any) -> tuple[bytes, str]:
        """Return the key as bytes, and why it cannot be stored in files if it cannot."""
        if self._stored is None:
            return self._keys.encode(key), ""
        try:
            return self._file_keys.encode(key), ""
        except EncodingError as error:
            return self._keys.encode(key), f"its key, {error}"

    def _for_files(self, stored: CachedFiles, ticket: Ticket, value: Any, node: str) -> bytes | None:
        if ticket.refused:
            stored.refused(node, ticket.refused)
            return None
        try:
            return self._file_codec.encode(value)
        except EncodingError as error:
            stored.refused(node, str(error))
            return None

    def _remembered(self, key: bytes) -> _CacheEntry | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        max_age = None if self._stored is None else self._stored.max_age
        if max_age is not None and time.time() - entry.written > max_age:
            self._forget(key)
            return None
        self._values.move_to_end(key)
        return entry

    def _remember(self, key: bytes, entry: _CacheEntry) -> None:
        self._forget(key)
        self._values[key] = entry
        self._size += len(entry.data)
        while self._values and (len(self._values) > _ITEMS or self._size > _BYTES):
            self._forget(next(iter(self._values)))

    def _forget(self, key: bytes) -> None:
        entry = self._values.pop(key, None)
        if entry is not None:
            self._size -= len(entry.data)


class CachedFiles:
    """Read and write values in the files of one site, in threads.

    A cache must not stop work that can be done without it: errors of the files are logged, each kind once, and the
    value counts as missing.
    """

    def __init__(self, config: CacheConfig, federation: str, site: str) -> None:
        self.max_age = config.max_age
        self._site = site
        self._open: Callable[[], CacheFiles] = functools.partial(open_files, config, federation, site)
        self._opening = threading.Lock()
        self._files: CacheFiles | None = None
        self._broken = False
        self._threads: Threads | None = None
        self._logged: set[str] = set()

    async def read(self, key: bytes) -> tuple[memoryview, float] | None:
        """Return the value of a key and the time at which it was written; None if it is missing."""
        if self._broken:
            return None
        return await self._start(lambda: self._try("read", lambda files: files.read(key)))

    async def write(self, key: bytes, value: bytes | memoryview, node: str) -> None:
        """Write a value. If cancelled, wait until the thread has stopped, and leave nothing behind."""
        if self._broken:
            return
        abandoned = threading.Event()

        def work() -> None:
            try:
                self._try("written", lambda files: files.write(key, value, abandoned.is_set))
            except NoRoom as error:
                self.refused(node, str(error))
            except WriteAbandoned:
                pass

        await completed(self._start(work).wait(), hurry=lambda _: abandoned.set())

    def refused(self, node: str, why: str) -> None:
        """Log that files cannot hold a value, or its key."""
        self._log_once(f"what {node} keeps", "%s at site %s is not kept in files: %s", node, self._site, why)

    def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.close()

    def _try(self, what: str, work: Callable[[CacheFiles], T]) -> T | None:
        """Use the files, in a thread."""
        with self._opening:
            if self._files is None and not self._broken:
                try:
                    self._files = self._open()
                except Exception as error:  # noqa: BLE001 - any library may open it
                    self._broken = True
                    text = "the cache of site %s is kept in memory only: its directory cannot be opened: %s"
                    self._log_once("open", text, self._site, _reason(error))
        if self._files is None:
            return None
        try:
            return work(self._files)
        except (NoRoom, WriteAbandoned):
            raise
        except Exception as error:  # noqa: BLE001 - any library may read and write it
            text = "the cache of site %s has values that cannot be %s; jobs go on without them: %s"
            self._log_once(what, text, self._site, what, _reason(error))
            return None

    def _start(self, work: Callable[[], T]) -> Outcome[T]:
        """Run ``work`` in a thread, to its end even if nobody waits for it any longer."""
        if self._threads is None:
            self._threads = Threads(_THREADS, f"{self._site}-cache")
        outcome: Outcome[T] = Outcome()

        def done(value: T, error: BaseException | None) -> None:
            if error is None:
                outcome.settle(value)
            else:
                outcome.fail(error)

        self._threads.run(contextvars.Context(), work, done)
        return outcome

    def _log_once(self, kind: str, text: str, *args: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(text, *args, extra={"site": self._site})


def _reason(error: BaseException) -> str:
    """Return why it failed, without texts of libraries: they may quote options of the storage, which may be secret."""
    name = type(error).__name__
    if isinstance(error, ImportError):
        return f"{name}: install the package of its protocol where the site runs, such as s3fs for s3"
    return f"{name}: {error.strerror}" if isinstance(error, OSError) and error.strerror else name
