"""One connection to the file, in a thread of its own; SQL errors become errors that say what to do.

SQLite itself does not wait for locks of other processes: a thread that waits inside SQLite cannot be interrupted.
Instead, the call fails at once and :meth:`Database.run` repeats it until the lock is free, so that cancelling takes
effect immediately.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import aiosqlite

from dfm_async.base.completion import completed
from dfm_async.errors import StoreError

__all__ = ["Damage", "Database", "explain", "identity"]

T = TypeVar("T")

_FIRST_WAIT: Final = 0.001
_LONGEST_WAIT: Final = 0.05
"""How many seconds lie between two attempts to get the lock, at first and at most."""
_RESTORE: Final = "Restore it from a copy, or delete the damaged job with session.forget"

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


class Damage(Exception):
    """A row that no store of ours has written; the message says which."""


class Database:
    """One connection. Functions run in its thread, one after the other, with the connection as their argument.

    Args:
        path: the file.
        role: what the connection is for; names its thread.
        busy_timeout: how many seconds to wait for another process that holds a lock.
    """

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
        """Opens the connection. If it is cancelled, the connection is closed again."""
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
        deadline, pause = loop.time() + (self._busy_timeout if wait else 0), _FIRST_WAIT
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
            await asyncio.sleep(min(pause, deadline - loop.time()))
            pause = min(2 * pause, _LONGEST_WAIT)

    async def close(self) -> None:
        """Closes the connection and ends its thread."""
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
    """Which file a path names."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
