"""The values of completed calls in a file of the site: a job that runs again does not repeat these calls.

The elements of a generator are recorded in batches, as they are read. A batch without elements marks the end.

What was recorded first is never replaced: a process that was stopped, and whose job another one has resumed meanwhile,
may record the same call. Both go on with the value that was recorded first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

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
_PAGE: Final = 1 << 20
"""The number of bytes of recorded elements that are read at once, apart from the last batch."""
_TABLES: Final = (
    """
    CREATE TABLE IF NOT EXISTS checkpoints (
        job TEXT NOT NULL, node TEXT NOT NULL, frame TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (job, node, frame)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS elements (
        job TEXT NOT NULL, node TEXT NOT NULL, frame TEXT NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (job, node, frame, first)
    )
    """,
)
_INSERT: Final = "INSERT OR IGNORE INTO checkpoints (job, node, frame, data) VALUES (?, ?, ?, ?)"
_INSERT_ELEMENTS: Final = """
INSERT INTO elements (job, node, frame, first, count, data) SELECT * FROM
(SELECT ? AS job, ? AS node, ? AS frame, ? AS first, ? AS count, ? AS data) AS new WHERE coalesce((
    SELECT last.count > 0 AND last.first + last.count <= new.first FROM elements AS last
    WHERE last.job = new.job AND last.node = new.node AND last.frame = new.frame ORDER BY last.first DESC LIMIT 1
), 1)
"""
"""Insert a batch behind those that are recorded, unless they are all."""
_SELECT: Final = "SELECT data FROM checkpoints WHERE job = ? AND node = ? AND frame = ?"
_BATCH: Final = "SELECT count, data FROM elements WHERE job = ? AND node = ? AND frame = ? AND first = ?"
_LAST: Final = "SELECT first, count FROM elements WHERE job = ? AND node = ? AND frame = ? ORDER BY first DESC LIMIT 1"
_BATCHES: Final = """
SELECT first, count, data FROM elements WHERE job = ? AND node = ? AND frame = ? AND first >= ? AND count > 0
ORDER BY first
"""
_FRAMES: Final = """
SELECT frame FROM checkpoints WHERE job = ? AND node = ? UNION SELECT frame FROM elements WHERE job = ? AND node = ?
"""
_DELETE: Final = ("DELETE FROM checkpoints WHERE job = ?", "DELETE FROM elements WHERE job = ?")
_SETS: Final = "CREATE TEMP TABLE sets (old TEXT PRIMARY KEY, new TEXT NOT NULL)"
_COPY: Final = """
INSERT OR IGNORE INTO {table} (job, node, frame, {columns})
SELECT ?, node, new || substr(frame, length(old) + 1), {columns} FROM {table}
JOIN sets ON old = substr(frame, 1, instr(frame || '.', '.') - 1) WHERE job = ? AND is_kept(node, frame)
"""
_COPIES: Final = (
    _COPY.format(table="checkpoints", columns="data"),
    _COPY.format(table="elements", columns="first, count, data"),
)
_USED: Final = (
    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)

_Key: TypeAlias = tuple[str, str, str]
"""The checkpoints of a job, the node, and the frame of a call."""


@dataclass(frozen=True, slots=True)
class RecordedElements:
    """How many elements of a generator are recorded, from the first one on, and whether they are all."""

    count: int
    ended: bool


_Done: TypeAlias = Callable[[Any], object]
"""Gets the result of a request, or a :class:`StoreError`, on the loop."""


class _Write:
    """A row to insert."""

    __slots__ = ("done", "insert", "row")

    def __init__(self, insert: str, row: tuple[Any, ...], done: _Done) -> None:
        self.insert = insert
        self.row = row
        self.done = done

    @property
    def size(self) -> int:
        """The number of bytes of its value."""
        return len(self.row[-1])


class _Read:
    """Something to read from the file."""

    __slots__ = ("done", "read")

    def __init__(self, read: Callable[[sqlite3.Connection], Any], done: _Done) -> None:
        self.read = read
        self.done = done


_Request: TypeAlias = _Write | _Read


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

    def carry_out(self, request: _Request) -> None:
        """Carry out a request with the next group. Its ``done`` is called when it is committed."""
        self._requests.append(request)
        if not self._working:
            self._working = True  # not the number of tasks: one that has left its loop is still counted for a moment
            self._tasks.spawn(self._work(), "checkpoints")

    async def _work(self) -> None:
        try:
            while self._requests:
                group, self._requests = self._requests, []
                try:
                    found = await self._committed(group)
                except Exception as error:  # noqa: BLE001 - whatever it is, no call may wait for ever
                    found = [_explained(self.path, error)] * len(group)
                for request, outcome in zip(group, found, strict=True):
                    request.done(outcome)
        finally:
            self._working = False

    async def _committed(self, group: list[_Request]) -> list[Any]:
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

    def _commit(self, group: list[_Request]) -> list[Any]:
        connection = self._connection
        if connection is None:
            connection = self._connection = _open(self.path)
        refused = self._refused(connection, group)
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for request in group:
            if isinstance(request, _Write) and request not in refused:
                rows.setdefault(request.insert, []).append(request.row)

        kept: set[str] = set()  # the statements some of whose rows were not inserted

        def insert() -> None:
            for statement, found in rows.items():
                if connection.executemany(statement, found).rowcount < len(found):
                    kept.add(statement)

        if rows:
            _in_transaction(connection, insert)

        def outcome(request: _Request) -> Any:
            if isinstance(request, _Read):
                return request.read(connection)
            if request in refused:
                return refused[request]
            return _recorded(connection, request) if request.insert in kept else None

        return [outcome(request) for request in group]

    def _refused(self, connection: sqlite3.Connection, group: list[_Request]) -> dict[_Write, StoreError]:
        """Return the values that are too large, or do not fit, with the reason."""
        refused: dict[_Write, StoreError] = {}
        used: int | None = None
        for request in group:
            if isinstance(request, _Read):
                continue
            size = request.size
            if size > _LARGEST:
                problem = f"a value of {size_text(size)} is larger than a checkpoint can be ({size_text(_LARGEST)})"
                refused[request] = StoreError(str(self.path), problem, "Return less, or do not record this call")
                continue
            if used is None:
                used = connection.execute(_USED).fetchone()[0]
            if used + size > self._limit:
                total = size_text(used + size)
                problem = f"the checkpoints would take {total}, more than the limit of {size_text(self._limit)}"
                advice = "Forget jobs that are not needed any longer, or raise LocalOptions(checkpoint_bytes=...)"
                refused[request] = StoreError(str(self.path), problem, advice)
            else:
                used += size
        return refused

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

    def record(self, node: str, frame: Frame, data: bytes, done: Callable[[bytes | StoreError | None], object]) -> None:
        """Write the value of a call; ``done`` is called when it is committed, or with the error if it cannot be.

        If another value is recorded already, ``done`` gets that, and this one is dropped.
        """
        self._all.carry_out(_Write(_INSERT, (*_key(self._job, node, frame), data), done))

    async def record_elements(
        self, node: str, frame: Frame, first: int, count: int, data: bytes
    ) -> RecordedElements | None:
        """Write a batch of elements of a generator, or that it has ended, if there are none. Committed on return.

        Returns:
            If other elements are recorded from the first one on, or the end, then these; the batch was dropped.

        Raises:
            StoreError: it cannot be written.
        """
        row = (*_key(self._job, node, frame), first, count, data)
        found: RecordedElements | None = await _outcome(
            lambda done: self._all.carry_out(_Write(_INSERT_ELEMENTS, row, done))
        )
        return found

    async def find(self, node: str, frame: Frame) -> bytes | RecordedElements | None:
        """Return the value of a call, or what is known of its elements, or None.

        Raises:
            StoreError: the file cannot be read.
        """
        key = _key(self._job, node, frame)
        found: bytes | RecordedElements | None = await self._read(lambda file: _find(file, key))
        return found

    async def elements(self, node: str, frame: Frame, start: int) -> list[tuple[int, bytes]]:
        """Return batches of elements from one on, not all at once: the number of the first of each, and the data.

        Raises:
            StoreError: the file cannot be read.
        """
        key = (*_key(self._job, node, frame), start)
        found: list[tuple[int, bytes]] = await self._read(lambda file: _elements(file, key))
        return found

    async def _read(self, read: Callable[[sqlite3.Connection], Any]) -> Any:
        return await _outcome(lambda done: self._all.carry_out(_Read(read, done)))


async def _outcome(begin: Callable[[_Done], None]) -> Any:
    """Begin a request, and wait for its result."""
    outcome: Outcome[Any] = Outcome()

    def done(found: Any) -> None:
        if isinstance(found, StoreError):
            outcome.fail(found)
        else:
            outcome.settle(found)

    begin(done)
    return await outcome.wait()


def _key(job: str, node: str, frame: Frame) -> _Key:
    return job, node, ".".join(map(str, frame))


def _frame(text: str) -> Frame:
    return tuple(map(int, text.split(".")))


def _find(connection: sqlite3.Connection, key: _Key) -> bytes | RecordedElements | None:
    row = connection.execute(_SELECT, key).fetchone()
    if row is not None:
        return bytes(row[0])
    return _last(connection, key)


def _last(connection: sqlite3.Connection, key: _Key) -> RecordedElements | None:
    row = connection.execute(_LAST, key).fetchone()
    return None if row is None else RecordedElements(row[0] + row[1], ended=row[1] == 0)


def _recorded(connection: sqlite3.Connection, request: _Write) -> bytes | RecordedElements | None:
    """Return what was recorded before a row; None if it is the same, or nothing."""
    *key, data = request.row
    if request.insert == _INSERT:
        row = connection.execute(_SELECT, key).fetchone()
        return None if row is None or row[0] == data else bytes(row[0])
    job, node, frame, first, count = key
    if connection.execute(_BATCH, (job, node, frame, first)).fetchone() == (count, data):
        return None
    return _last(connection, (job, node, frame))


def _elements(connection: sqlite3.Connection, key: tuple[Any, ...]) -> list[tuple[int, bytes]]:
    found, size = [], 0
    with contextlib.closing(connection.execute(_BATCHES, key)) as rows:
        for first, _, data in rows:
            found.append((first, data))
            size += len(data)
            if size >= _PAGE:
                break
    return found


def delete(folder: str, job: str) -> None:
    """Delete the checkpoints of a job at all sites. Blocks: to be called in a thread.

    Raises:
        StoreError: a file cannot be written.
    """

    def change(connection: sqlite3.Connection) -> None:
        for statement in _DELETE:
            connection.execute(statement, (job,))

    _in_all_files(folder, change)


def recorded_frames(folder: str, job: str, node: str) -> list[Frame]:
    """Return the frames in which calls of a node are recorded, in order. Blocks: to be called in a thread.

    Raises:
        StoreError: a file cannot be read.
    """
    found: set[Frame] = set()

    def read(connection: sqlite3.Connection) -> None:
        found.update(_frame(text) for (text,) in connection.execute(_FRAMES, (job, node, job, node)))

    _in_all_files(folder, read)
    return sorted(found)


def copy(
    folder: str,
    job: str,
    new_job: str,
    sets: Mapping[int, int],
    is_kept: Callable[[str, Frame], bool] = lambda _node, _frame: True,
) -> None:
    """Copy the checkpoints of some parameter sets of a job to another job. Blocks: to be called in a thread.

    Args:
        folder: where the files of all sites are.
        job: the job whose checkpoints are copied.
        new_job: the job that gets them.
        sets: the numbers of the parameter sets in the new job, by those in the other one.
        is_kept: tells whether a call is copied, by its node and its frame in the other job.

    Raises:
        StoreError: a file cannot be read or written.
    """

    def insert(connection: sqlite3.Connection) -> None:
        connection.create_function("is_kept", 2, lambda node, frame: is_kept(node, _frame(frame)), deterministic=True)
        connection.execute(_SETS)
        connection.executemany("INSERT INTO sets VALUES (?, ?)", [(str(old), str(new)) for old, new in sets.items()])
        for statement in _COPIES:
            connection.execute(statement, (new_job, job))

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
        for table in _TABLES:
            connection.execute(table)
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
