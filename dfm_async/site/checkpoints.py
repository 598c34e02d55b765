"""The values of completed calls in a file of the site: a job that runs again does not repeat these calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from dfm_async.base.backoff import delays
from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import OwnedTasks, in_thread
from dfm_async.base.text import size_text
from dfm_async.errors import StoreError
from dfm_async.model.ids import Frame

_SUFFIX: Final = ".sqlite"
_BUSY: Final = 60.0
"""How many seconds a commit waits for other processes of the site."""
_ATTEMPT: Final = 0.05
"""How many seconds of them it waits in SQLite, where nothing can interrupt it."""
_LONGEST_PAUSE: Final = 0.05
_LARGEST: Final = 1_000_000_000
"""The largest number of bytes that a row can hold."""
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS checkpoints (
    job TEXT NOT NULL, node TEXT NOT NULL, frame TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (job, node, frame)
)
"""
_INSERT: Final = "INSERT OR REPLACE INTO checkpoints (job, node, frame, data) VALUES (?, ?, ?, ?)"
_SELECT: Final = "SELECT data FROM checkpoints WHERE job = ? AND node = ? AND frame = ?"
_DELETE: Final = "DELETE FROM checkpoints WHERE job = ?"
_SETS: Final = "CREATE TEMP TABLE sets (old TEXT PRIMARY KEY, new TEXT NOT NULL)"
_COPY: Final = """
INSERT OR REPLACE INTO checkpoints (job, node, frame, data)
SELECT ?, node, new || substr(frame, length(old) + 1), data FROM checkpoints
JOIN sets ON old = substr(frame, 1, instr(frame || '.', '.') - 1) WHERE job = ?
"""
_USED: Final = (
    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)

_Key: TypeAlias = tuple[str, str, str]
"""The checkpoints of a job, the node, and the frame of a call."""


class _Request:
    """A value to write, or to find if there is no data."""

    __slots__ = ("data", "key", "outcome")

    def __init__(self, key: _Key, data: bytes | None) -> None:
        self.key = key
        self.data = data
        self.outcome: Outcome[bytes | None] = Outcome()


class Checkpoints:
    """The checkpoints of one site, as one of its processes uses them.

    Requests are carried out in groups, in a thread: those that come during a commit go into the next one. A request
    that fails does not affect the others of its group.

    Args:
        folder: where the files of all sites are.
        site: the site.
        limit: how many bytes the file may take. Beyond it, values are refused with an error.
    """

    def __init__(self, folder: str, site: str, limit: int) -> None:
        self.path = _path(Path(folder), site)
        self._limit = limit
        self._connection: sqlite3.Connection | None = None
        self._requests: list[_Request] = []
        self._tasks = OwnedTasks()
        self._working = False
        self._closing = False

    def of(self, job: str) -> JobCheckpoints:
        """Return the checkpoints of a job, by a name that no other job has, not even one with the same id."""
        return JobCheckpoints(self, job)

    async def record(self, job: str, node: str, frame: Frame, data: bytes) -> None:
        """Write the value of a call. It is committed on return.

        Raises:
            StoreError: it cannot be written.
        """
        await self._carry_out(_Request(_key(job, node, frame), data))

    async def find(self, job: str, node: str, frame: Frame) -> bytes | None:
        """Return the value of a call, or None.

        Raises:
            StoreError: the file cannot be read.
        """
        return await self._carry_out(_Request(_key(job, node, frame), None))

    async def _carry_out(self, request: _Request) -> bytes | None:
        self._requests.append(request)
        if not self._working:
            self._working = True  # not the number of tasks: one that has left its loop is still counted for a moment
            self._tasks.spawn(self._work(), "checkpoints")
        return await request.outcome.wait()

    async def _work(self) -> None:
        try:
            while self._requests:
                group, self._requests = self._requests, []
                try:
                    found = await self._committed(group)
                except Exception as error:  # noqa: BLE001 - whatever it is, no call may wait for ever
                    found = [_explained(self.path, error)] * len(group)
                for request, outcome in zip(group, found, strict=True):
                    if isinstance(outcome, StoreError):
                        request.outcome.fail(outcome)
                    else:
                        request.outcome.settle(outcome)
        finally:
            self._working = False

    async def _committed(self, group: list[_Request]) -> list[bytes | StoreError | None]:
        """Carry out a group; repeat it while another process has the file locked."""
        loop = asyncio.get_running_loop()
        deadline, pauses = loop.time() + _BUSY, delays(_ATTEMPT, _LONGEST_PAUSE)
        while True:
            try:
                return await in_thread(lambda: self._commit(group), "checkpoints")
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or self._closing or loop.time() >= deadline:
                    raise
            await asyncio.sleep(next(pauses))

    def _commit(self, group: list[_Request]) -> list[bytes | StoreError | None]:
        connection = self._connection
        if connection is None:
            connection = self._connection = _open(self.path)
        refused = self._refused(connection, group)
        new = [
            (*request.key, request.data) for request in group if request.data is not None and request.key not in refused
        ]
        if new:
            _in_transaction(connection, lambda: connection.executemany(_INSERT, new))
        return [self._found(connection, request, refused) for request in group]

    def _refused(self, connection: sqlite3.Connection, group: list[_Request]) -> dict[_Key, StoreError]:
        """Return the values that are too large, or do not fit, with the reason."""
        refused: dict[_Key, StoreError] = {}
        used: int | None = None
        for request in group:
            if request.data is None:
                continue
            size = len(request.data)
            if size > _LARGEST:
                problem = f"a value of {size_text(size)} is larger than a checkpoint can be ({size_text(_LARGEST)})"
                refused[request.key] = StoreError(str(self.path), problem, "Return less, or do not record this call")
                continue
            if used is None:
                used = connection.execute(_USED).fetchone()[0]
            if used + size > self._limit:
                total = size_text(used + size)
                problem = f"the checkpoints would take {total}, more than the limit of {size_text(self._limit)}"
                advice = "Forget jobs that are not needed any longer, or raise LocalOptions(checkpoint_bytes=...)"
                refused[request.key] = StoreError(str(self.path), problem, advice)
            else:
                used += size
        return refused

    @staticmethod
    def _found(
        connection: sqlite3.Connection, request: _Request, refused: Mapping[_Key, StoreError]
    ) -> bytes | StoreError | None:
        if request.data is not None:
            return refused.get(request.key)
        row = connection.execute(_SELECT, request.key).fetchone()
        return None if row is None else row[0]

    async def close(self) -> None:
        """Complete what was requested, without waiting for other processes, and close the file."""
        self._closing = True
        await self._tasks.wait()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class JobCheckpoints:
    """The checkpoints of one job at one site."""

    __slots__ = ("_all", "_job")

    def __init__(self, checkpoints: Checkpoints, job: str) -> None:
        self._all = checkpoints
        self._job = job

    async def record(self, node: str, frame: Frame, data: bytes) -> None:
        """Write the value of a call. It is committed on return.

        Raises:
            StoreError: it cannot be written.
        """
        await self._all.record(self._job, node, frame, data)

    async def find(self, node: str, frame: Frame) -> bytes | None:
        """Return the value of a call, or None.

        Raises:
            StoreError: the file cannot be read.
        """
        return await self._all.find(self._job, node, frame)


def _key(job: str, node: str, frame: Frame) -> _Key:
    return job, node, ".".join(map(str, frame))


def delete(folder: str, job: str) -> None:
    """Delete the checkpoints of a job at all sites. Blocks: to be called in a thread.

    Raises:
        StoreError: a file cannot be written.
    """
    _in_all_files(folder, lambda connection: connection.execute(_DELETE, (job,)))


def copy(folder: str, job: str, new_job: str, sets: Mapping[int, int]) -> None:
    """Copy the checkpoints of some parameter sets of a job to another job. Blocks: to be called in a thread.

    ``sets`` has the numbers of the parameter sets in the new job, by those in the other one.

    Raises:
        StoreError: a file cannot be read or written.
    """

    def insert(connection: sqlite3.Connection) -> None:
        connection.execute(_SETS)
        connection.executemany("INSERT INTO sets VALUES (?, ?)", [(str(old), str(new)) for old, new in sets.items()])
        connection.execute(_COPY, (new_job, job))

    _in_all_files(folder, insert)


def _in_all_files(folder: str, change: Callable[[sqlite3.Connection], object]) -> None:
    for path in Path(folder).glob(f"*{_SUFFIX}"):
        deadline, pauses = time.monotonic() + _BUSY, delays(_ATTEMPT, _LONGEST_PAUSE)
        while True:
            try:
                with contextlib.closing(_open(path)) as connection:
                    _in_transaction(connection, lambda: change(connection))
                break
            except (sqlite3.Error, OSError) as error:
                if not _is_busy(error) or time.monotonic() >= deadline:
                    raise _explained(path, error) from error
            time.sleep(next(pauses))


def _in_transaction(connection: sqlite3.Connection, change: Callable[[], object]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        change()


def _is_busy(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _path(folder: Path, site: str) -> Path:
    return folder / f"{urllib.parse.quote(site, safe='')}{_SUFFIX}"


def _open(path: Path) -> sqlite3.Connection:
    """Open the file of a site, and create it if it does not exist: only its user can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for found in (path.parent, path):
        with contextlib.suppress(FileNotFoundError):
            state = found.stat()
            if state.st_uid != os.geteuid() or (found == path and not stat.S_ISREG(state.st_mode)):
                raise StoreError(str(found), "it belongs to another user, or is not a file", "Use a folder of your own")
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=_ATTEMPT, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(_TABLE)
    except BaseException:
        connection.close()
        raise
    return connection


def _explained(path: Path, error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    if _is_busy(error):
        problem, advice = "another process keeps the checkpoints locked", "End the process that has the file open"
    else:
        problem, advice = f"checkpoints cannot be read or written ({error})", "Check the disk and its free space"
    found = StoreError(str(path), problem, advice)
    found.__cause__ = error
    return found
