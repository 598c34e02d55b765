"""The tables, and how a file becomes a store of ours.

What changes with every commit (``jobs``) is apart from what never changes (``plans``): SQLite rewrites whole rows.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import Final

from dfm_async.errors import StoreError

__all__ = ["VERSION", "create_file", "prepare"]

VERSION: Final = 1
"""The version of the format. A store of another version is not opened."""
_APPLICATION: Final = 0x44464D41
"""``PRAGMA application_id``: tells our files from other databases."""
_MODE: Final = 0o600

_TABLES: Final = (
    "CREATE TABLE meta (version INTEGER NOT NULL, last_fence INTEGER NOT NULL)",
    "CREATE TABLE owners (fence INTEGER PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, address BLOB)",
    """
    CREATE TABLE jobs (
        job INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE, fence INTEGER NOT NULL,
        created REAL NOT NULL, finished REAL, status TEXT NOT NULL, reason TEXT, "end" INTEGER NOT NULL,
        frames INTEGER NOT NULL, stopped INTEGER NOT NULL
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
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _is_new(connection: sqlite3.Connection, path: str) -> bool:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or tables:
            raise StoreError(
                path, "this is a database, but no store of jobs", "Give the path of a store, or of no file yet"
            )
        return True
    (version,) = connection.execute("SELECT version FROM meta").fetchone()
    if version != VERSION:
        what = "Use a newer dfm_async" if version > VERSION else "Use the dfm_async that wrote it"
        raise StoreError(path, f"its format has version {version}, this is for version {VERSION}", what)
    return False
