"""One connection to the file, in a thread of its own; SQL errors become errors that say what to do."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import aiosqlite

from dfm_async.errors import StoreError

__all__ = ["Database", "explain", "identity"]

T = TypeVar("T")

_ADVICE = {
    sqlite3.SQLITE_BUSY: ("another process keeps it locked", "End whatever holds a transaction open, and try again"),
    sqlite3.SQLITE_LOCKED: ("it is locked", "End whatever holds a transaction open, and try again"),
    sqlite3.SQLITE_FULL: ("the disk is full", "Make room, and try again"),
    sqlite3.SQLITE_READONLY: ("it cannot be written", "Make the file and its folder writable"),
    sqlite3.SQLITE_CANTOPEN: ("it cannot be opened", "See that its folder exists and is writable"),
    sqlite3.SQLITE_IOERR: ("the disk failed to read or write it", "Check the disk and its free space"),
    sqlite3.SQLITE_NOTADB: ("this is no SQLite database", "Give the path of a store, or of no file yet"),
    sqlite3.SQLITE_CORRUPT: ("the database is damaged", "Restore it from a copy, or begin with a new file"),
}


def explain(path: str, error: sqlite3.Error | OSError) -> StoreError:
    """Says what is wrong with the file, and what to do."""
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
        uri = f"{Path(path).absolute().as_uri()}?mode=rw"  # a file that is gone is an error, not a new file
        connection = aiosqlite.connect(uri, uri=True, timeout=busy_timeout, isolation_level=None)
        # Up to 0.21 the connection is the thread.
        thread = cast("Any", connection if isinstance(connection, threading.Thread) else connection._thread)  # noqa: SLF001
        thread.daemon = True  # a store that nobody closed must not keep the interpreter from ending
        thread.name = f"dfm-store-{role}"
        self._thread: threading.Thread = thread
        self._connection = connection

    async def connect(self) -> None:
        """Opens the connection."""
        try:
            await self._connection
        except (sqlite3.Error, OSError) as error:
            self._thread.join()
            raise explain(self.path, error) from error

    async def run(self, call: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a function in the connection's thread: one hop, however many statements it executes.

        Raises:
            StoreError: the database or the file system reported an error.
        """
        connection = cast("Any", self._connection)
        try:
            # Every public method is one statement, and one hop.
            return cast("T", await connection._execute(_call, connection._conn, call))  # noqa: SLF001
        except (sqlite3.Error, OSError) as error:
            raise explain(self.path, error) from error

    async def close(self) -> None:
        """Closes the connection and ends its thread."""
        try:
            await self._connection.close()
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        self._thread.join()  # it has done its last work


def _call(connection: sqlite3.Connection, call: Callable[[sqlite3.Connection], T]) -> T:
    return call(connection)


def identity(path: str) -> tuple[int, int]:
    """Which file a path names."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
