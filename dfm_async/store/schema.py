"""The tables, and how a file becomes a store of ours.

What changes with every commit (``jobs``) is apart from what never changes (``plans``): SQLite rewrites whole rows.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import Final

from dfm_async.errors import StoreError

__all__ = ["FENCES", "VERSION", "check_owner", "create_file", "prepare"]

VERSION: Final = 1
"""The version of the format. A store of another version is not opened."""
FENCES: Final = range(1, 1 << 62)
"""The fencing numbers that there can be: each is the position of a byte in a file."""
_APPLICATION: Final = 0x44464D41
"""``PRAGMA application_id``: tells our files from other databases."""
_MODE: Final = 0o600
_FILES: Final = ("", "-lock", "-wal", "-shm")
"""What is appended to the path for each of the files that belong to a store."""

_TABLES: Final = (
    "CREATE TABLE meta (version INTEGER NOT NULL, last_fence INTEGER NOT NULL)",
    "CREATE TABLE owners (fence INTEGER PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, address BLOB)",
    """
    CREATE TABLE jobs (
        job INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE, fence INTEGER NOT NULL,
        created REAL NOT NULL, finished REAL, status TEXT NOT NULL, reason TEXT, "end" INTEGER NOT NULL,
        frames INTEGER NOT NULL, stopped INTEGER NOT NULL, errors INTEGER, done INTEGER
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
_COLUMNS: Final = {
    "meta": {"version", "last_fence"},
    "owners": {"fence", "pid", "host", "address"},
    "jobs": {"job", "job_id", "fence", "created", "finished", "status", "reason", "end", "frames", "stopped"},
    "plans": {"job", "plan", "fingerprint", "options"},
    "params": {"job", "frame", "data"},
    "entries": {"job", "first", "count", "kind", "head", "payload"},
}
_ADDED: Final = ("errors", "done")
"""Columns of ``jobs`` that the first files of this version lack; NULL means that the number is not known."""


def check_owner(path: str) -> None:
    """Refuse files that another user has put there: that user could change what is read from them.

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
    """Makes an empty file that only its user can read, if there is none; SQLite's own files take its mode."""
    # One that exists is not opened: closing it would drop the locks that SQLite has on it in this process.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Checks that the database is a store of ours, and makes it one if it is empty.

    Raises:
        StoreError: it is something else, or of another version.
    """
    if _is_new(connection, path):
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            if _is_new(connection, path):  # else somebody else was faster
                for statement in _TABLES:
                    connection.execute(statement)
                connection.execute("INSERT INTO meta (version, last_fence) VALUES (?, 0)", (VERSION,))
    elif _missing(connection):
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            for name in _missing(connection):
                connection.execute(f"ALTER TABLE jobs ADD COLUMN {name} INTEGER")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _missing(connection: sqlite3.Connection) -> list[str]:
    return [name for name in _ADDED if name not in _columns(connection, "jobs")]


def _columns(connection: sqlite3.Connection, table: str) -> dict[str, int]:
    """The columns of a table, and whether each is computed rather than stored."""
    return {row[1]: row[6] for row in connection.execute(f"PRAGMA table_xinfo({table})")}


def _is_new(connection: sqlite3.Connection, path: str) -> bool:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or tables:
            raise StoreError(
                path, "this is a database, but no store of jobs", "Give the path of a store, or of no file yet"
            )
        return True
    _check_tables(connection, path)
    row = connection.execute("SELECT version, last_fence FROM meta").fetchone()
    if row is None or not all(isinstance(value, int) for value in row) or row[1] + 1 not in FENCES:
        raise _damaged(path, f"table 'meta' holds {row!r}, not a version and a fencing number")
    version = row[0]
    if version != VERSION:
        what = "Use a newer dfm_async" if version > VERSION else "Use the dfm_async that wrote it"
        raise StoreError(path, f"its format has version {version}, this is for version {VERSION}", what)
    return False


def _check_tables(connection: sqlite3.Connection, path: str) -> None:
    """Refuse what could run code of its own when it is read or written: views, virtual tables, triggers."""
    objects = connection.execute("SELECT type, name, rootpage FROM sqlite_master").fetchall()
    stored = {name for kind, name, page in objects if kind == "table" and page}
    for table, columns in _COLUMNS.items():
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
