"""A store of jobs in an SQLite file.

Two mechanisms decide which process may write a job:

- *Fencing.* Every open store has a number of its own, from a counter in the database. A job has the number of its
  owner, and every transaction checks it: a store that has lost a job cannot write it, however late it notices.
- *Liveness.* Every open store holds a lock on the byte at its number of the companion file ``<path>-lock``, which the
  kernel drops when the process ends. A job that has not ended, and whose owner's byte is free, is interrupted, and can
  be taken over. See :mod:`dfm_async.store.processes`.

Numbers are never reused, so an owner that is found dead is dead for good. Do not delete the companion file while a
store is open: owners would look dead, and lose their jobs to others (but could still not damage them).

A transaction holds everything that was queued since the one before it: after a crash at any moment, every job has its
events and parameter sets up to some point, without gaps. Commits survive the death of the process; after a power
failure, the last of them may be missing (``synchronous = NORMAL``).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Final

from dfm_async.errors import StoreError
from dfm_async.model.job_filter import ALL_JOBS, JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.store import queries
from dfm_async.store.base import READ_BYTES, Entry, Follower, NewJob, Position, Request, StoredJob
from dfm_async.store.batching import Batch
from dfm_async.store.database import Database, check_owner, create_file, explain, identity, prepare
from dfm_async.store.group_commit import GroupCommitStore, Writer
from dfm_async.store.processes import CommitFollower, Followers, open_locks
from dfm_async.store.queries import Ownership

_UNWRITABLE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
"""The errors of SQLite where a file can be read but not written."""
_SERVICE: Final = 1 << 62
"""The byte of the companion file that a web service holds; no fencing number is that large."""


class SqliteStore(GroupCommitStore):
    """A :class:`~dfm_async.store.Store` in an SQLite file.

    Args:
        path: the file.
        busy_timeout: the number of seconds to wait for another process that holds a transaction open.
    """

    largest = 1_000_000_000 - 1024

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 10.0) -> None:
        super().__init__(os.path.abspath(path))
        self._busy_timeout = busy_timeout
        self._changing = asyncio.Lock()
        self._file = (0, 0)
        self._stack: AsyncExitStack | None = None
        self._database: Database | None = None
        self._reader_: Database | None = None
        self._ownership_: Ownership | None = None
        self._followers: Followers | None = None

    # opening and closing

    async def open(self) -> None:
        """Open the store, and create it if it does not exist. Does nothing if it is open.

        Raises:
            StoreError: the file is not a store, has another version or owner, or cannot be opened.
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
            # Followers are notified of the end after the locks are released, not before.
            followers = self._followers = Followers(asyncio.get_running_loop(), lambda: self._call(self.on_request))
        except OSError as error:
            raise explain(self.path, error) from error
        stack.callback(followers.close)
        stack.callback(self._release)
        database = self._database = await self._connect(stack, "writer")
        self.migrated_from = await database.run(partial(prepare, path=self.path))
        try:
            ownership = self._ownership_ = Ownership(self.path, open_locks(f"{self.path}-lock"))
        except OSError as error:
            raise explain(self.path, error) from error
        try:
            await self._register(ownership)
        except StoreError as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF not in _UNWRITABLE:
                raise
            # What is on a full disk can be read; creating a job retries this.
        reader = await self._connect(stack, "reader")
        await reader.run(_read_only)
        self._reader_ = reader
        self._file = identity(self.path)
        settle = partial(database.run, _nothing)  # it runs behind a commit that was cancelled, in the same thread
        writer = Writer(self.path, self._commit, settle, self._committed, self._failed)
        stack.push_async_callback(writer.close)
        self._writer_ = writer

    async def _connect(self, stack: AsyncExitStack, role: str) -> Database:
        database = Database(self.path, role, self._busy_timeout)
        await database.connect()
        stack.push_async_callback(database.close)
        return database

    async def _register(self, ownership: Ownership) -> None:
        """Take a fencing number, if there is none yet: a store without one can own nothing."""
        if not self.fence and self._database is not None:
            address = None if self._followers is None else self._followers.address
            await self._database.run(partial(ownership.register, address=address))
            self.fence = ownership.fence

    def _release(self) -> None:
        ownership, self._ownership_ = self._ownership_, None
        if ownership is not None:
            ownership.locks.close()

    async def close(self) -> None:
        """Commit what is queued, and close the files. Does nothing if it is closed.

        Raises:
            StoreError: not everything could be committed. The store is closed nevertheless.
        """
        async with self._changing:
            stack, self._stack = self._stack, None
            if stack is not None:
                await stack.aclose()

    def claim_service(self) -> bool:
        """Make this the one open store that a web service serves, until it is closed; False if there is another one."""
        return self._ownership.locks.acquire(_SERVICE)

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

    async def create(self, job: NewJob) -> bool:
        """Store a new job, owned by this store. It is committed on return; False if its id is taken."""
        self._check_size(job.job_id, max(map(len, job.params), default=0))
        ownership, _ = self._ownership, self._writer
        await self._register(ownership)
        return await self._create(job, partial(ownership.create, job), partial(ownership.delete, job.job_id))

    async def take_over(self, job_id: str) -> StoredJob:
        """Make this store the owner of a job whose owner is dead. Cancelled, it leaves the job interrupted."""
        ownership, writer = self._ownership, self._writer
        await self._register(ownership)
        give_back = partial(ownership.give_back, job_id)
        found: StoredJob = await writer.command(partial(ownership.take_over, job_id), lambda _: give_back)
        return found

    async def delete(self, job_id: str) -> None:
        """Delete a job that this store owns or whose owner is dead."""
        await self._writer.command(partial(self._ownership.delete, job_id))
        await self._sweep()

    async def _sweep(self) -> None:
        """Delete what is left of deleted jobs, in parts: other commits go on in between."""
        while await self._writer.command(queries.sweep):
            pass

    async def prune(self, before: float, status: JobStatus | None = None, limit: int = 100) -> list[StoredJob]:
        """Delete jobs that ended before a time, those that ended first, at most ``limit``; return them."""
        pruned: list[StoredJob] = await self._writer.command(partial(self._ownership.prune, before, status, limit))
        await self._sweep()
        return pruned

    async def size(self) -> int:
        """Return the number of bytes that the file needs; it may be larger, until :meth:`vacuum`."""
        return await self._reader.run(_used)

    async def vacuum(self) -> None:
        """Give the space of deleted jobs back to the file system. Commits wait meanwhile."""
        await self._writer.flush()
        await self._sweep()
        assert self._database is not None  # noqa: S101 - it is open
        await self._database.run(_vacuum)

    async def check(self, progress: Callable[[int], object] | None = None) -> AsyncIterator[StoreError]:
        """Yield an error for everything in the store that is damaged. Each costs one job, not the store."""
        for (line,) in await self._reader.run(_quick_check):
            if line != "ok":
                yield StoreError(self.path, f"the database is damaged ({line})", "Restore the file from a copy")
        async for error in super().check(progress):
            yield error

    async def request(self, job_id: str, data: bytes, limit: int = 64) -> int | None:
        """Store a request to the owner of a job, which is notified; return its number. It is committed on return."""
        self._check_size(job_id, len(data))
        ownership, writer = self._ownership, self._writer
        await self._register(ownership)
        stored: tuple[int, int] | None = await writer.command(
            partial(ownership.request, job_id, data, limit), lambda stored: partial(ownership.end_request, stored[0])
        )
        if stored is None:
            return None
        number, owner = stored
        try:
            address = await self._reader.run(partial(queries.owner_address, fence=owner))
            with closing(CommitFollower(self.path, ownership.locks, owner, address)) as connection:
                connection.notify_owner()
        except BaseException:
            self.end_request(job_id, number)  # nobody knows its number
            raise
        return number

    async def take_request(self, request: Request) -> bool:
        """Reserve a request for this store before carrying it out; False if it was withdrawn, or its job is lost."""
        return bool(await self._writer.command(partial(self._ownership.take_request, request.number)))

    async def withdraw_request(self, job_id: str, number: int) -> bool:
        """Delete a request that was not carried out; False if it has an answer, or its owner is about to give one."""
        return bool(await self._writer.command(partial(self._ownership.withdraw_request, job_id, number)))

    def end_request(self, _job_id: str, number: int) -> None:
        """Queue the deletion of a request whose sender needs no answer any longer."""
        self._writer.queue(partial(self._ownership.end_request, number))

    async def _commit(self, batch: Batch, wait: bool) -> None:
        assert self._database is not None  # noqa: S101 - it is open
        work = partial(queries.commit, batch=batch, fence=self.fence, path=self.path, check=self._check_file)
        await self._database.run(work, wait=wait)

    def _check_file(self) -> None:
        """Raise if the file was deleted: SQLite would go on writing to it."""
        try:
            same = identity(self.path) == self._file
        except FileNotFoundError:
            same = False
        if not same:
            problem = "the file was deleted or replaced while it was open"
            raise StoreError(self.path, problem, "Put it back, or start again with a new one")

    def _notify_followers(self) -> None:
        if self._followers is not None:
            self._followers.notify()

    # reading

    async def find(self, job_id: str) -> StoredJob | None:
        """Return a job, or None."""
        locks, fence = self._ownership.locks, self.fence
        return await self._reader.run(lambda connection: queries.find_job(connection, locks, fence, job_id))

    async def jobs(
        self, wanted: JobFilter = ALL_JOBS, *, before: Position | None = None, limit: int = -1
    ) -> list[StoredJob]:
        """Return the jobs that fit, the newest first, at most ``limit`` or all."""
        locks, fence = self._ownership.locks, self.fence
        return await self._reader.run(
            lambda connection: queries.list_jobs(connection, locks, fence, wanted, before, limit)
        )

    async def read(self, job_id: str, start: int, max_bytes: int = READ_BYTES) -> list[Entry]:
        """Return the entry that holds an offset and those behind it, about ``max_bytes``, but at least one."""
        return await self._reader.run(lambda connection: queries.read_entries(connection, job_id, start, max_bytes))

    async def heads(self, job_id: str, after_first: int = 0) -> AsyncIterator[Entry]:
        """Yield the entries that begin at an offset or behind it, with empty payloads."""
        start = after_first
        while found := await self._reader.run(partial(queries.read_heads, job_id=job_id, start=start)):
            for entry in found:
                yield entry
            start = found[-1].first + 1

    async def params(self, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
        """Return parameter sets by their numbers; those that are not stored are missing."""
        return await self._reader.run(lambda connection: queries.read_params(connection, job_id, frames))

    async def requests(self) -> list[Request]:
        """Return the requests for the jobs of this store that have no answer, the oldest first."""
        return await self._reader.run(partial(queries.read_requests, fence=self.fence))

    async def answer_to(self, number: int) -> bytes | None:
        """Return the answer to a request, if it has one."""
        return await self._reader.run(partial(queries.read_answer, number=number))

    # following

    @asynccontextmanager
    async def follow(self, fence: int) -> AsyncIterator[Follower]:
        """Follow the commits of an owner. Enter this first and read then, so that nothing is missed."""
        address = await self._reader.run(partial(queries.owner_address, fence=fence))
        follower = CommitFollower(self.path, self._ownership.locks, fence, address)
        try:
            yield follower
        finally:
            follower.close()


def _nothing(_connection: sqlite3.Connection) -> None:
    """Do nothing, behind everything that was requested before."""


def _used(connection: sqlite3.Connection) -> int:
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size


def _vacuum(connection: sqlite3.Connection) -> None:
    connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _quick_check(connection: sqlite3.Connection) -> list[tuple[str]]:
    return connection.execute("PRAGMA quick_check").fetchall()


def _read_only(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")
