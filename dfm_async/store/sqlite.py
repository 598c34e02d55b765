"""A store of jobs in an SQLite file.

Who may write a job is settled by two things:

- *Fencing.* Every open store has a number of its own, from a counter in the database. A job has the number of its
  owner, and every transaction checks it: whoever lost a job can write no more of it, however late it notices.
- *Liveness.* Every open store holds a lock on the byte at its number of the companion file ``<path>-lock``, which the
  kernel drops when the process ends. A job that has not ended, and whose owner's byte is free, is interrupted, and
  may be taken over. See :mod:`dfm_async.store.liveness`.

Numbers are never used twice, so that whoever is found dead is dead for good. Do not delete the companion file while
a store is open: owners would look dead, and lose their jobs to others (but could still not damage them).

A transaction holds everything that was queued since the one before it, so that after a crash at any moment every job
has its events and parameter sets up to some point, without gaps. Commits survive the death of the process; in a loss
of power the last of them may be lost (``synchronous = NORMAL``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from dfm_async.errors import StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store import reading
from dfm_async.store.base import READ_BYTES, Entry, Follower, NewJob, StoredJob
from dfm_async.store.batch import Command
from dfm_async.store.database import Database, explain
from dfm_async.store.followers import CommitFollower, Followers
from dfm_async.store.liveness import open_locks
from dfm_async.store.ownership import Ownership
from dfm_async.store.schema import check_owner, create_file, prepare
from dfm_async.store.writer import Writer

__all__ = ["SqliteStore"]

_log = logging.getLogger(__name__)
_LARGEST: Final = 1_000_000_000 - 1024
"""About the size of the largest row that SQLite takes."""
_UNWRITABLE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
"""What SQLite reports where a file can only be read."""


_SERVICE: Final = 1 << 62
"""The byte of the companion file that a web service holds; no fencing number comes that far."""


class SqliteStore:
    """Keeps jobs in a file.

    Args:
        path: the file.
        busy_timeout: how many seconds to wait for another process that holds a transaction open.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 10.0) -> None:
        self.path = os.path.abspath(path)
        self.fence = 0
        self.on_commit: Callable[[dict[str, int]], None] | None = None
        self.on_fenced: Callable[[str], None] | None = None
        self.on_gap: Callable[[str, StoreError], None] | None = None
        self.on_error: Callable[[StoreError], None] | None = None
        self._busy_timeout = busy_timeout
        self._changing = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._writer_: Writer | None = None
        self._reader_: Database | None = None
        self._ownership_: Ownership | None = None
        self._followers: Followers | None = None
        self._creating: dict[str, Command] = {}

    # opening and closing

    async def open(self) -> None:
        """Opens the store, and creates it if there is none. Harmless when open.

        Raises:
            StoreError: the file is no store, or of another version, or another user's, or cannot be opened.
        """
        async with self._changing:
            if self._stack is not None:
                return
            async with AsyncExitStack() as stack:  # closes in reverse order
                await self._open(stack)
                self._stack = stack.pop_all()

    async def _open(self, stack: AsyncExitStack) -> None:
        self.fence = 0
        try:
            check_owner(self.path)
            create_file(self.path)
            # Followers hear of our end when we have no lock any more: not before.
            followers = self._followers = Followers(asyncio.get_running_loop())
        except OSError as error:
            raise explain(self.path, error) from error
        stack.callback(followers.close)
        stack.callback(self._release)
        database = await self._connect(stack, "writer")
        await database.run(partial(prepare, path=self.path))
        try:
            ownership = self._ownership_ = Ownership(self.path, open_locks(f"{self.path}-lock"))
        except OSError as error:
            raise explain(self.path, error) from error
        try:
            await self._register(database, ownership)
        except StoreError as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF not in _UNWRITABLE:
                raise
            # What is on a full disk can be read; creating a job tries again.
        reader = await self._connect(stack, "reader")
        await reader.run(_read_only)
        self._reader_ = reader
        writer = Writer(database, ownership, self)
        stack.push_async_callback(writer.close)
        self._writer_ = writer

    async def _connect(self, stack: AsyncExitStack, role: str) -> Database:
        database = Database(self.path, role, self._busy_timeout)
        await database.connect()
        stack.push_async_callback(database.close)
        return database

    async def _register(self, database: Database, ownership: Ownership) -> None:
        """Takes a fencing number, if there is none yet: whoever has none can own nothing."""
        if not self.fence:
            address = None if self._followers is None else self._followers.address
            await database.run(partial(ownership.register, address=address))
            self.fence = ownership.fence

    def _release(self) -> None:
        ownership, self._ownership_ = self._ownership_, None
        if ownership is not None:
            ownership.locks.close()

    async def close(self) -> None:
        """Commits what is queued and lets go of everything. Harmless when closed.

        Raises:
            StoreError: not everything could be committed. The store is closed nevertheless.
        """
        async with self._changing:
            stack, self._stack = self._stack, None
            if stack is not None:
                await stack.aclose()

    def claim_service(self) -> bool:
        """Makes this the one open store that a web service serves; False if another one is. Ends when it is closed."""
        return self._ownership.locks.acquire(_SERVICE)

    def _closed(self) -> StoreError:
        return StoreError(self.path, "it is not open", "Use it between open() and close()")

    @property
    def _writer(self) -> Writer:
        writer = self._writer_
        if writer is None or writer.ended:
            raise self._closed()
        return writer

    @property
    def _reader(self) -> Database:
        if self._stack is None or self._reader_ is None:
            raise self._closed()
        return self._reader_

    @property
    def _ownership(self) -> Ownership:
        if self._stack is None or self._ownership_ is None:
            raise self._closed()
        return self._ownership_

    # writing

    @property
    def backlog(self) -> int:
        """About how many bytes are queued and not yet committed."""
        return 0 if self._writer_ is None else self._writer_.backlog

    def append(self, job_id: str, entry: Entry, *, errors: int = 0, done: int = 0) -> None:
        """Queues the next events of a job of ours.

        Args:
            job_id: the job.
            entry: the events.
            errors: how many errors they report.
            done: how many parameter sets they report as done.
        """
        writer = self._writer
        if len(entry.payload) + len(entry.head) > _LARGEST:
            raise self._too_large(job_id, len(entry.payload) + len(entry.head))
        writer.batch.append(job_id, entry, errors, done)
        writer.wake()

    def discard(self, job_id: str) -> bool:
        """Drops what is queued for a job; tells whether there was anything."""
        return self._writer_ is not None and self._writer_.batch.discard(job_id)

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Queues the next parameter sets of a job of ours; ``first`` is the number of the first of them."""
        writer = self._writer
        largest = max(map(len, rows), default=0)
        if largest > _LARGEST:
            raise self._too_large(job_id, largest)
        writer.batch.add_params(job_id, first, rows)
        writer.wake()

    def _too_large(self, job_id: str, size: int) -> StoreError:
        return StoreError(
            self.path, f"{size:,} bytes of job {job_id} are more than a row can hold", "Make smaller values"
        )

    def update(
        self,
        job_id: str,
        *,
        status: JobStatus | None = None,
        reason: str | None = None,
        finished: float | None = None,
        stopped: bool | None = None,
    ) -> None:
        """Queues a change of a job of ours. None leaves a value as it is; but reason and end belong to the status."""
        writer = self._writer
        writer.batch.update(job_id, status, reason, finished, stopped)
        writer.wake()

    async def flush(self) -> None:
        """Waits until everything queued before is committed.

        Raises:
            StoreError: it could not be. It stays queued.
        """
        await self._writer.flush()

    async def create(self, job: NewJob) -> bool:
        """Stores a new job, which is ours. It is committed on return; False if its id is taken.

        Cancelled, it leaves no job behind, and does not wait for locks of other processes.
        """
        largest = max(map(len, job.params), default=0)
        if largest > _LARGEST:
            raise self._too_large(job.job_id, largest)
        ownership, writer = self._ownership, self._writer
        await self._register(writer.database, ownership)
        command = self._creating[job.job_id] = writer.queue(partial(ownership.create, job))
        try:
            return bool(await writer.outcome(command, partial(ownership.delete, job.job_id)))
        finally:
            self._creating.pop(job.job_id, None)

    def withdraw(self, job_id: str) -> None:
        """Has :meth:`create` return False, unless the transaction that stores the job has begun."""
        command = self._creating.get(job_id)
        if command is not None and command.withdraw():
            command.done(False, None)

    async def take_over(self, job_id: str) -> StoredJob:
        """Makes a job ours if its owner is dead. Cancelled, it leaves the job interrupted.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: its owner is alive.
            StoreError: what is stored of it is damaged.
        """
        ownership, writer = self._ownership, self._writer
        await self._register(writer.database, ownership)
        give_back = partial(ownership.give_back, job_id)
        found: StoredJob = await writer.command(partial(ownership.take_over, job_id), give_back)
        return found

    async def delete(self, job_id: str) -> None:
        """Deletes a job that is ours or whose owner is dead.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: its owner is alive.
        """
        await self._writer.command(partial(self._ownership.delete, job_id))

    # what became of the commits

    def committed(self, ends: dict[str, int]) -> None:
        """A commit is done."""
        if self._followers is not None:
            self._followers.tell()
        self._call(self.on_commit, ends)

    def fenced(self, job_id: str) -> None:
        """Writes for a job were left out."""
        if self.on_fenced is None:
            _log.error("store %s: job %s belongs to somebody else; writes for it were left out", self.path, job_id)
        self._call(self.on_fenced, job_id)

    def gap(self, job_id: str, error: StoreError) -> None:
        """Writes for a job were left out, because others are missing before them."""
        if self.on_gap is None:
            self.failed(error)
            return
        try:
            self.on_gap(job_id, error)
        except Exception:  # noqa: BLE001 - the store goes on
            _log.exception("store %s: a callback raised", self.path)

    def failed(self, error: StoreError) -> None:
        """A commit failed."""
        if self.on_error is None:
            _log.error("%s", error)
        self._call(self.on_error, error)

    def _call(self, callback: Callable[[Any], None] | None, argument: Any) -> None:
        if callback is not None:
            try:
                callback(argument)
            except Exception:  # noqa: BLE001 - the store goes on
                _log.exception("store %s: a callback raised", self.path)

    # reading

    async def find(self, job_id: str) -> StoredJob | None:
        """Gives a job, or None."""
        locks, fence = self._ownership.locks, self.fence
        return await self._reader.run(lambda connection: reading.find_job(connection, locks, fence, job_id))

    async def jobs(self, limit: int = -1) -> list[StoredJob]:
        """Gives the newest jobs, in the order in which they were created: at most so many, or all."""
        locks, fence = self._ownership.locks, self.fence
        return await self._reader.run(lambda connection: reading.newest_jobs(connection, locks, fence, limit))

    async def read(self, job_id: str, start: int, max_bytes: int = READ_BYTES) -> list[Entry]:
        """Gives the entry that holds an offset and those behind it, about as much as ``max_bytes``, but at least one.

        Nothing if the job has not reached the offset, or does not exist.
        """
        return await self._reader.run(lambda connection: reading.read_entries(connection, job_id, start, max_bytes))

    async def heads(self, job_id: str, after_first: int = 0) -> AsyncIterator[Entry]:
        """Gives the entries that begin at an offset or behind it, with empty payloads."""
        start = after_first
        while found := await self._reader.run(partial(reading.read_heads, job_id=job_id, start=start)):
            for entry in found:
                yield entry
            start = found[-1].first + 1

    async def params(self, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
        """Gives parameter sets by their numbers; those that are not stored are missing."""
        return await self._reader.run(lambda connection: reading.read_params(connection, job_id, frames))

    # following

    @asynccontextmanager
    async def follow(self, fence: int) -> AsyncIterator[Follower]:
        """Listens to the commits of an owner. Enter it first and read then, so that nothing is missed.

        Raises:
            StoreError: the owner is alive but cannot be reached.
        """
        address = await self._reader.run(partial(reading.owner_address, fence=fence))
        follower = CommitFollower(self.path, self._ownership.locks, fence, address)
        try:
            yield follower
        finally:
            follower.close()


def _read_only(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")
