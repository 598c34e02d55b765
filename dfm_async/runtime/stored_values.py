"""The files of a site's cache, as the loop sees them: they are read and written in threads."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from dfm_async.model.resources import CacheConfig
from dfm_async.runtime.threads import Threads
from dfm_async.site.cache_directory import GivenUp
from dfm_async.site.cache_files import CacheFiles, NoRoom, open_files

__all__ = ["StoredValues"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS: Final = 4


class _State(enum.Enum):
    NEW = "nobody has asked yet"
    OPEN = "the directory is there"
    BROKEN = "it cannot be used"


class StoredValues:
    """Values in the files of one site.

    A cache must not stop work that can be done without it: what goes wrong with the files is told to the log, each
    kind once, and counts as missing.

    Args:
        config: where the files are.
        federation: the name of the federation.
        site: the name of the site.
    """

    def __init__(self, config: CacheConfig, federation: str, site: str) -> None:
        self.max_age = config.max_age
        self._site = site
        self._open: Callable[[], CacheFiles] = functools.partial(open_files, config, federation, site)
        self._opening = threading.Lock()
        self._state = _State.NEW
        self._files: CacheFiles | None = None
        self._threads: Threads | None = None
        self._told: set[str] = set()

    async def read(self, key: bytes) -> tuple[memoryview, float] | None:
        """Gives the value of a key and when it was written; None if it is missing."""
        if self._state is _State.BROKEN:
            return None
        value, error = await self._start(lambda: self._try("read", lambda files: files.read(key)))
        if error is not None:
            raise error
        return value

    async def write(self, key: bytes, value: bytes | memoryview, node: str) -> None:
        """Writes a value. If that is cancelled, it waits until the thread has let go, and nothing is left of it."""
        if self._state is _State.BROKEN:
            return
        given_up = threading.Event()

        def work() -> None:
            try:
                self._try("written", lambda files: files.write(key, value, given_up.is_set))
            except NoRoom as error:
                self.refused(node, str(error))
            except GivenUp:
                pass

        writing, cancelled = self._start(work), None
        while not writing.done():
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError as error:  # raised again when the thread has let go
                cancelled = error
                given_up.set()
        if cancelled is not None:
            raise cancelled
        failure = writing.result()[1]
        if failure is not None:
            raise failure

    def refused(self, node: str, why: str) -> None:
        """A value, or a key, is not of a kind that files can hold."""
        self._tell(f"what {node} keeps", "%s at site %s is not kept in files: %s", node, self._site, why)

    def close(self) -> None:
        """Lets the threads end."""
        if self._threads is not None:
            self._threads.close()

    def _try(self, what: str, work: Callable[[CacheFiles], T]) -> T | None:
        """In a thread: does something with the files."""
        with self._opening:
            if self._state is _State.NEW:
                try:
                    self._files = self._open()
                    self._state = _State.OPEN
                except Exception as error:  # noqa: BLE001 - any library may open it
                    self._state = _State.BROKEN
                    text = "the cache of site %s is kept in memory only: its directory cannot be opened: %s"
                    self._tell("open", text, self._site, _reason(error))
        if self._files is None:
            return None
        try:
            return work(self._files)
        except (NoRoom, GivenUp):
            raise
        except Exception as error:  # noqa: BLE001 - any library may read and write it
            text = "the cache of site %s has values that cannot be %s; jobs go on without them: %s"
            self._tell(what, text, self._site, what, _reason(error))
            return None

    def _start(self, work: Callable[[], T]) -> asyncio.Future[tuple[T, BaseException | None]]:
        """Does something in a thread, also if nobody waits for it any more."""
        if self._threads is None:
            self._threads = Threads(_THREADS, f"{self._site}-cache")
        future: asyncio.Future[tuple[T, BaseException | None]] = asyncio.get_running_loop().create_future()

        def done(value: T, error: BaseException | None) -> None:
            if not future.done():
                future.set_result((value, error))

        self._threads.run(contextvars.Context(), work, done)
        return future

    def _tell(self, kind: str, text: str, *args: object) -> None:
        if kind not in self._told:
            self._told.add(kind)
            _log.warning(text, *args, extra={"site": self._site})


def _reason(error: BaseException) -> str:
    """Why it failed. Texts of libraries may quote options of the storage, which may be secret: they are left out."""
    name = type(error).__name__
    if isinstance(error, ImportError):
        return f"{name}: install the package of its protocol where the site runs, such as s3fs for s3"
    return f"{name}: {error.strerror}" if isinstance(error, OSError) and error.strerror else name
