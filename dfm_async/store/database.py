"""The SQLite file: its tables, and one connection in a thread of its own, whose errors say what to do.

SQLite itself does not wait for locks of other processes: a thread that waits inside SQLite cannot be interrupted.
Instead, the call fails at once and :meth:`Database.run` repeats it until the lock is free, so that cancelling takes
effect immediately.

What changes with every commit (``jobs``) is apart from what never changes (``plans``): SQLite rewrites whole rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import aiosqlite
import msgspec

from dfm_async.base.backoff import delays
from dfm_async.base.tasks import completed
from dfm_async.errors import StoreError
from dfm_async.store.rows import FENCES, VERSION, Damage, newer_format, storable

T = TypeVar("T")

_FIRST_WAIT: Final = 0.001
_LONGEST_WAIT: Final = 0.05
"""The number of seconds between two attempts to get the lock, at first and at most."""
_UNLOCK: Final = "End the process that holds a transaction open, and try again"
_CHOOSE: Final = "Pass the path of a store, or of a file that does not exist yet"
_RESTORE: Final = "Restore it from a copy, or delete the damaged job with session.forget"

_ADVICE = {
    sqlite3.SQLITE_BUSY: ("another process keeps it locked", _UNLOCK),
    sqlite3.SQLITE_LOCKED: ("it is locked", _UNLOCK),
    sqlite3.SQLITE_FULL: ("the disk is full", "Make room, and try again"),
    sqlite3.SQLITE_READONLY: ("it cannot be written", "Make the file and its folder writable"),
    sqlite3.SQLITE_CANTOPEN: ("it cannot be opened", "See that its folder exists and is writable"),
    sqlite3.SQLITE_IOERR: ("the disk failed to read or write it", "Check the disk and its free space"),
    sqlite3.SQLITE_NOTADB: ("it is not an SQLite database", _CHOOSE),
    sqlite3.SQLITE_CORRUPT: ("the database is damaged", "Restore it from a copy, or begin with a new file"),
}

_APPLICATION: Final = 0x44464D41
"""``PRAGMA application_id``: distinguishes stores from other databases."""
_MODE: Final = 0o600
_FILES: Final = ("", "-lock", "-wal", "-shm")
"""The suffixes of the files that belong to a store."""

_TABLES: Final = (
    "CREATE TABLE meta (version INTEGER NOT NULL, last_fence INTEGER NOT NULL)",
    "CREATE TABLE owners (fence INTEGER PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, address BLOB)",
    """
    CREATE TABLE jobs (
        job INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE, fence INTEGER NOT NULL,
        created REAL NOT NULL, finished REAL, status TEXT NOT NULL, reason TEXT, "end" INTEGER NOT NULL,
        frames INTEGER NOT NULL, stopped INTEGER NOT NULL, errors INTEGER, done INTEGER, pipeline TEXT, label TEXT
    )
    """,
    "CREATE INDEX jobs_by_fence ON jobs (fence)",
    "CREATE TABLE plans (job INTEGER PRIMARY KEY, plan BLOB NOT NULL, fingerprint TEXT, options BLOB NOT NULL)",
    "CREATE TABLE params (job INTEGER NOT NULL, frame INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (job, frame))",
    # The payload is last: reading the others does not touch the pages that it fills. With rowids: without them, a row
    # of a quarter of a page would take a page of its own.
    """
    CREATE TABLE entries (
        job INTEGER NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, kind INTEGER NOT NULL,
        head BLOB NOT NULL, payload BLOB NOT NULL, PRIMARY KEY (job, first)
    )
    """,
    f"PRAGMA application_id = {_APPLICATION}",
)
_MIGRATIONS: Final = {
    2: (
        """
        CREATE TABLE requests (
            number INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL, sender INTEGER NOT NULL, taken INTEGER,
            data BLOB NOT NULL, answer BLOB
        )
        """,
        "CREATE INDEX requests_by_job ON requests (job)",
        "CREATE TABLE garbage (job INTEGER PRIMARY KEY)",
        "CREATE INDEX jobs_by_end ON jobs (finished) WHERE finished IS NOT NULL",
    ),
}
"""What makes a store of each version from one of the version before it. A new store begins with version 1."""
_COLUMNS: Final = {
    "meta": {"version", "last_fence"},
    "owners": {"fence", "pid", "host", "address"},
    "jobs": {"job", "job_id", "fence", "created", "finished", "status", "reason", "end", "frames", "stopped"},
    "plans": {"job", "plan", "fingerprint", "options"},
    "params": {"job", "frame", "data"},
    "entries": {"job", "first", "count", "kind", "head", "payload"},
}
_COLUMNS_SINCE: Final = {2: {"requests": {"number", "job", "sender", "taken", "data", "answer"}, "garbage": {"job"}}}
_ADDED: Final = {"errors": "INTEGER", "done": "INTEGER", "pipeline": "TEXT", "label": "TEXT"}
"""Columns of ``jobs`` that the first files of this version lack; NULL means that the number is unknown."""
_INDEXES: Final = {
    "jobs_by_time": "(created, job_id)",
    "jobs_by_pipeline": "(pipeline, created, job_id)",
    "jobs_by_label": "(label, created, job_id) WHERE label IS NOT NULL",
    "jobs_not_finished": "(created, job_id) WHERE status <> 'finished'",
}
"""What lists of jobs are read with. Older files have none of these."""


def explain(path: str, error: sqlite3.Error | OSError) -> StoreError:
    """Return an error that describes what is wrong with the file, and what to do."""
    if isinstance(error, OSError):
        problem, advice = str(error.strerror or error), "See that its folder exists and is writable"
    else:
        code = getattr(error, "sqlite_errorcode", None)
        # The lower byte is the kind of the error, the others say more about it.
        known = _ADVICE.get(code & 0xFF) if code is not None else None
        problem, advice = known or ("the database reports an error", "Check the file")
        problem = f"{problem} ({error})"
    found = StoreError(path, problem, advice)
    found.__cause__ = error
    return found


class Database:
    """One connection. Functions run in its thread, one after the other, with the connection as their argument."""

    def __init__(self, path: str, role: str, busy_timeout: float) -> None:
        self.path = path
        self._busy_timeout = busy_timeout
        uri = f"{Path(path).absolute().as_uri()}?mode=rw"  # a file that is gone is an error, not a new file
        connection = aiosqlite.connect(uri, uri=True, timeout=0, isolation_level=None)
        # Up to 0.21 the connection is the thread.
        thread = cast("Any", connection if isinstance(connection, threading.Thread) else connection._thread)  # noqa: SLF001
        thread.daemon = True  # a store that nobody closed must not keep the interpreter from ending
        thread.name = f"dfm-store-{role}"
        self._thread: threading.Thread = thread
        self._connection = connection

    async def connect(self) -> None:
        """Open the connection. If cancelled, close it again."""
        await completed(self._connect(), lambda _: self.close())  # the thread would open it all the same

    async def _connect(self) -> None:
        try:
            await self._connection
        except (sqlite3.Error, OSError) as error:
            self._thread.join()
            raise explain(self.path, error) from error
        try:
            await self.run(_set_up)
        except StoreError:
            await self.close()
            raise

    async def run(self, call: Callable[[sqlite3.Connection], T], *, wait: bool = True) -> T:
        """Run a function in the connection's thread: one hop, however many statements it executes.

        While another process holds a lock that the function needs, it is repeated; so it must change nothing before it
        has the lock. Cancelling between two attempts takes effect at once.

        Args:
            call: the function.
            wait: whether to wait for locks, or to try only once.

        Raises:
            StoreError: the database or the file system reported an error, or the file holds what it should not.
        """
        connection = cast("Any", self._connection)
        loop = asyncio.get_running_loop()
        deadline, pauses = loop.time() + (self._busy_timeout if wait else 0), delays(_FIRST_WAIT, _LONGEST_WAIT)
        while True:
            try:
                # Every public method is one statement, and one hop.
                return cast("T", await connection._execute(_call, connection._conn, call))  # noqa: SLF001
            except Damage as error:
                raise StoreError(self.path, str(error), _RESTORE) from error
            except UnicodeError as error:  # it is part of a message of SQLite, which quotes the file
                problem, advice = _ADVICE[sqlite3.SQLITE_CORRUPT]
                raise StoreError(self.path, f"{problem} ({error})", advice) from error
            except (sqlite3.Error, OSError) as error:
                if not _is_busy(error) or loop.time() >= deadline:
                    raise explain(self.path, error) from error
            await asyncio.sleep(min(next(pauses), deadline - loop.time()))

    async def close(self) -> None:
        """Close the connection, and end its thread."""
        try:
            await self._connection.close()
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        self._thread.join()  # it has done its last work


def _is_busy(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _set_up(connection: sqlite3.Connection) -> None:
    # Text that is damaged must be an error of its row, not of the whole query.
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    connection.execute("PRAGMA trusted_schema = OFF")


def _call(connection: sqlite3.Connection, call: Callable[[sqlite3.Connection], T]) -> T:
    return call(connection)


def identity(path: str) -> tuple[int, int]:
    """Return the device and the inode of a file."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


# the format


def check_owner(path: str) -> None:
    """Refuse files of another user, who could change what is read from them.

    Raises:
        StoreError: one of the files of the store belongs to another user.
    """
    for name in (path + suffix for suffix in _FILES):
        with contextlib.suppress(FileNotFoundError):
            owner = os.stat(name).st_uid
            if owner != os.geteuid():
                raise StoreError(
                    path,
                    f"the file {name} belongs to another user (uid {owner}, this process has {os.geteuid()})",
                    "Use a store of your own, or run as the user who owns it",
                )


def create_file(path: str) -> None:
    """Create an empty file that only its user can read, if it does not exist; SQLite's own files get its mode."""
    # One that exists is not opened: closing it would drop the locks that SQLite has on it in this process.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))


def prepare(connection: sqlite3.Connection, path: str) -> int | None:
    """Check that the database is a store of this version; migrate an older one, and make an empty file a store.

    Returns:
        the older version that was migrated, if it was one.

    Raises:
        StoreError: it is not a store, or has a newer version.
    """
    found = None
    if _version(connection, path) != VERSION or _missing(connection):
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            found = _version(connection, path)  # another process may have been faster
            _migrate(connection, found)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return None if found == VERSION else found


def _migrate(connection: sqlite3.Connection, version: int | None) -> None:
    """Bring a store of some version to this one; None: there is nothing yet."""
    if version is None:
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute("INSERT INTO meta (version, last_fence) VALUES (1, 0)")
    _add_missing(connection)
    for following in range((version or 1) + 1, VERSION + 1):
        for statement in _MIGRATIONS[following]:
            connection.execute(statement)
    connection.execute("UPDATE meta SET version = ?", (VERSION,))


def _missing(connection: sqlite3.Connection) -> list[str]:
    """Return what the table of jobs lacks that was added to the format later: columns and indexes."""
    indexes = {row[1] for row in connection.execute("PRAGMA index_list(jobs)")}
    columns = _columns(connection, "jobs")
    return [name for name in _ADDED if name not in columns] + [name for name in _INDEXES if name not in indexes]


def _add_missing(connection: sqlite3.Connection) -> None:
    missing = _missing(connection)
    for name in missing:
        if name in _ADDED:
            connection.execute(f"ALTER TABLE jobs ADD COLUMN {name} {_ADDED[name]}")
    if "label" in missing:
        rows = connection.execute("SELECT plan, options, job FROM plans")
        connection.executemany("UPDATE jobs SET pipeline = ?, label = ? WHERE job = ?", _described(rows))
    for name in missing:
        if name in _INDEXES:
            connection.execute(f"CREATE INDEX {name} ON jobs {_INDEXES[name]}")


class _Named(msgspec.Struct):
    """What a list shows of a plan, and of the options of a job."""

    pipeline: str | None = None
    label: str | None = None


def _described(rows: Iterable[tuple[Any, Any, Any]]) -> Iterator[tuple[str | None, str | None, Any]]:
    """Yield the name of the pipeline and the label of each job, from its encoded plan and options."""
    decode_plan = functools.lru_cache(64)(msgspec.json.Decoder(_Named).decode)
    decode_options = functools.lru_cache(64)(msgspec.msgpack.Decoder(_Named).decode)
    for plan, options, job in rows:
        pipeline = label = None
        with contextlib.suppress(ValueError, TypeError):  # a damaged job has none
            pipeline = decode_plan(plan).pipeline
        with contextlib.suppress(ValueError, TypeError):
            label = decode_options(options).label
        yield storable(pipeline), storable(label), job


def _columns(connection: sqlite3.Connection, table: str) -> dict[str, int]:
    """Return the columns of a table, and whether each is computed rather than stored."""
    return {row[1]: row[6] for row in connection.execute(f"PRAGMA table_xinfo({table})")}


def _version(connection: sqlite3.Connection, path: str) -> int | None:
    """Return the version of a store; None if the database is empty.

    Raises:
        StoreError: it is not a store, or has a newer version.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION:
        (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or count:
            raise StoreError(path, "this is a database, but not a store of jobs", _CHOOSE)
        return None
    _check_tables(connection, path, _COLUMNS)
    row = connection.execute("SELECT version, last_fence FROM meta").fetchone()
    if row is None or not all(isinstance(value, int) for value in row) or row[1] + 1 not in FENCES or row[0] < 1:
        raise _damaged(path, f"table 'meta' holds {row!r}, not a version and a fencing number")
    version: int = row[0]
    if version > VERSION:
        raise newer_format(path, version, VERSION)
    for since, tables in _COLUMNS_SINCE.items():
        if since <= version:
            _check_tables(connection, path, tables)
    return version


def _check_tables(connection: sqlite3.Connection, path: str, expected: Mapping[str, set[str]]) -> None:
    """Refuse what could run code of its own when it is read or written: views, virtual tables, triggers."""
    objects = connection.execute("SELECT type, name, rootpage FROM sqlite_master").fetchall()
    stored = {name for kind, name, page in objects if kind == "table" and page}
    for table, columns in expected.items():
        if table not in stored:
            raise _damaged(path, f"{table!r} is missing, or not a table")
        found = _columns(connection, table)
        if columns - found.keys() or any(found.values()):
            raise _damaged(path, f"table {table!r} does not have the columns that it should have")
    for kind, name, _ in objects:
        if kind == "trigger":
            raise _damaged(path, f"it has a trigger ({name!r})")


def _damaged(path: str, problem: str) -> StoreError:
    return StoreError(path, problem, "Restore it from a copy, or begin with a new file")
