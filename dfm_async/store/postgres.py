"""A store of jobs in a PostgreSQL database, which any number of processes and machines can share.

Two mechanisms decide which process may write a job:

- *Fencing.* Every open store has a number of its own, from a sequence. A job has the number of its owner, and every
  transaction checks it: a store that has lost a job cannot write it, however late it notices.
- *Leases.* An open store renews its lease several times per period. Once a lease has expired, because the process has
  ended, is stopped, or has no connection, the jobs of the store are interrupted, and others can take them over.

Every commit notifies the other stores of the jobs that it has changed, and they show what it has written.

A commit whose connection breaks is repeated on another connection. It may have succeeded nevertheless, so every batch
has a number, which its transaction writes: nothing is written twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from dfm_async.base.backoff import delays
from dfm_async.base.signals import Outcome, Signal
from dfm_async.base.tasks import OwnedTasks, completed
from dfm_async.errors import StoreError
from dfm_async.model.job_filter import ALL_JOBS, JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.store import postgres_queries as queries
from dfm_async.store.base import READ_BYTES, Entry, Follower, NewJob, Position, Request, StoredJob
from dfm_async.store.batching import Batch, Committed
from dfm_async.store.group_commit import GroupCommitStore, Writer
from dfm_async.store.postgres_queries import Connection, Ownership
from dfm_async.store.rows import Damage

_log = logging.getLogger(__name__)
T = TypeVar("T")

_READERS: Final = 4
"""The largest number of connections that read at the same time."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
"""The number of seconds between two attempts to connect, at first and at most."""
_RENEWALS: Final = 4
"""How often a lease is renewed per period."""
_LONGEST_TIMEOUT: Final = 3600
"""The largest number of seconds that a connection may go without an answer, whatever the lease."""
_CHANGED: Final = 1000
"""The number of changed jobs whose ids a follower keeps; if there are more, any may have changed."""
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")

_ADVICE: Final[tuple[tuple[type[psycopg.Error], str, str], ...]] = (
    (errors.DiskFull, "the disk of the server is full", "Make room, and try again"),
    (errors.InsufficientPrivilege, "the user may not do that", "Grant the rights, or use another user"),
    (errors.ReadOnlySqlTransaction, "the server is read-only", "Connect to the primary server"),
    (errors.TooManyConnections, "the server has too many connections", "Raise max_connections, or use fewer processes"),
    (errors.UndefinedTable, "a table is missing", "Restore the schema from a backup, or use a new one"),
    (psycopg.OperationalError, "the server cannot be reached", "See that it runs and accepts connections"),
)
_RESTORE: Final = "Restore it from a backup, or delete the damaged job with session.forget"


class PostgresStore(GroupCommitStore):
    """A :class:`~dfm_async.store.Store` in a PostgreSQL database.

    Args:
        url: the database, in the form of libpq: ``postgresql://user@host/database``.
        schema: the schema for the tables, which is created if it does not exist.
        lease: after how many seconds without a sign of this store others may take over its jobs. Also for how long
            reading and writing are retried while the server cannot be reached, and after how long a connection that
            gets no answer is considered broken.
    """

    largest = 900_000_000
    fence: int

    def __init__(self, url: str, *, schema: str = "dfm_async", lease: float = 10.0) -> None:
        try:
            info: dict[str, Any] = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            form = "Write postgresql://user@host/database"
            raise StoreError(_without_password(url), f"this is not a URL of a database ({error})", form) from error
        if not _NAME.fullmatch(schema):
            raise ValueError(f"schema must be a name of lower-case letters, digits and underscores, not {schema!r}")
        if not 0 < lease < float("inf"):
            raise ValueError(f"lease must be a number of seconds above 0, not {lease!r}")
        super().__init__(_without_password(url))
        options = f"{info.get('options') or ''} -c search_path={schema}".strip()
        self._conninfo = make_conninfo(**{**_timeouts(lease), **info, "options": options})
        self._schema = schema
        self._lease = lease
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        name = hashlib.sha256(f"{self.path} {schema}".encode()).hexdigest()[:16]
        self.checkpoints = str(state / "dfm_async" / "checkpoints" / name)
        self._changing = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._connection: Connection | None = None
        self._ownership: Ownership | None = None
        self._numbers = itertools.count(1)
        self._tasks = OwnedTasks()
        self._committing: asyncio.Task[None] | None = None
        self._followers: set[_CommitFollower] = set()

    # opening and closing

    async def open(self) -> None:
        """Open the store, and create it if it does not exist. Does nothing if it is open.

        Raises:
            StoreError: the server cannot be reached, or the schema is not a store, or has another version.
        """
        async with self._changing:
            if self._stack is not None:
                return
            async with AsyncExitStack() as stack:  # closes in reverse order
                try:
                    await self._open(stack)
                except psycopg.Error as error:
                    raise self._explained(error) from error
                self._stack = stack.pop_all()

    async def _open(self, stack: AsyncExitStack) -> None:
        connection = await self._connected()
        stack.push_async_callback(self._disconnect)
        self.migrated_from = await queries.prepare(connection, self._schema, self.path)
        pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._conninfo,
            kwargs={"autocommit": True},
            min_size=1,
            max_size=_READERS,
            reconnect_timeout=min(self._lease, _LONGEST_TIMEOUT),  # its pauses grow until then, whoever waits
            open=False,
            name="dfm-store",
        )
        await pool.open()
        stack.push_async_callback(pool.close)
        self._pool = pool
        ownership = self._ownership = Ownership(self.path, self._schema, self._lease)
        await ownership.register(connection)
        self.fence = ownership.fence
        listening: Outcome[None] = Outcome()
        self._tasks.spawn(self._listen(ownership, listening), "dfm-store-listener")
        stack.push_async_callback(self._leave, ownership)
        await listening.wait()  # else commits of others could be missed
        writer = Writer(self.path, self._commit, self._settle, self._committed, self._failed)
        stack.push_async_callback(writer.close)
        self._writer_ = writer

    async def _connected(self) -> Connection:
        """Return the connection that writes."""
        if self._connection is None or self._connection.closed:
            await self._disconnect()
            self._connection = await self._connect()
        return self._connection

    async def _connect(self) -> Connection:
        return await AsyncConnection.connect(self._conninfo, autocommit=True)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _leave(self, ownership: Ownership) -> None:
        """Give up the lease, so that others need not wait for its end."""
        await self._tasks.close()
        try:
            await ownership.leave(await self._connected())
        except psycopg.Error as error:
            _log.warning("store %s: the lease of this store ends by itself (%s)", self.path, _text(error))
        for follower in self._followers:
            follower.notify(ended=True)

    async def close(self) -> None:
        """Commit what is queued, and close the connections. Does nothing if it is closed.

        Raises:
            StoreError: not everything could be committed. The store is closed nevertheless.
        """
        async with self._changing:
            stack, self._stack = self._stack, None
            if stack is not None:
                await completed(stack.aclose())

    def claim_service(self) -> bool:
        """Return True: any number of services can share a database."""
        return True

    # the lease, and commits of others

    async def _listen(self, ownership: Ownership, listening: Outcome[None]) -> None:
        """Renew the lease, and receive the notifications of other stores, until this is cancelled.

        ``listening`` gets the outcome of the first attempt; if that fails, there is no other.
        """
        pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                async with await self._connect() as connection:
                    await connection.execute(f"LISTEN {self._schema}".encode())
                    pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)
                    listening.settle(None)
                    for follower in self._followers:  # notifications may have been missed
                        follower.notify()
                    self._call(self.on_request)
                    self._call(self.on_lost)
                    self._call(self.on_change, None)
                    dead: set[int] = set()
                    while True:
                        await ownership.renew(connection)
                        dead = await self._check_owners(connection, dead)
                        async for notification in connection.notifies(timeout=self._lease / _RENEWALS):
                            self._notified(notification.payload)
            except psycopg.Error as error:
                if listening.fail(error):
                    return
                _log.warning("store %s: the connection of the lease was lost (%s)", self.path, _text(error))
            await asyncio.sleep(next(pauses))

    async def _check_owners(self, connection: Connection, known: set[int]) -> set[int]:
        """Report the death of other owners; return those that are dead."""
        if self.on_interrupted is None:
            return known
        dead = await queries.dead_owners(connection)
        if dead - known:
            self._call(self.on_interrupted)
        return dead

    def _notified(self, payload: str) -> None:
        fence, _, what = payload.partition(" ")
        what, _, changed = what.partition(" ")
        if fence == str(self.fence) and what in ("request", "lost"):
            self._call(self.on_request if what == "request" else self.on_lost)
        if what == "request":
            return
        jobs = queries.jobs_of(changed)
        for follower in self._followers:
            if str(follower.fence) == fence:
                follower.notify(jobs, ended=what == "end")
        if what == "commit" and fence != str(self.fence):
            self._call(self.on_change, jobs)

    def _notify_followers(self) -> None:
        """Do nothing: the transaction has notified them."""

    # writing

    async def create(self, job: NewJob) -> bool:
        """Store a new job, owned by this store. It is committed on return; False if its id is taken."""
        self._check_size(job.job_id, max(map(len, job.params), default=0))
        if not queries.is_storable(job.job_id):
            problem = f"the job id {job.job_id!r} has characters that PostgreSQL cannot hold"
            raise StoreError(self.path, problem, "Use another id")
        _, ownership = self._writer, self._owner
        return await self._create(job, partial(ownership.create, job), partial(ownership.delete, job.job_id))

    async def take_over(self, job_id: str) -> StoredJob:
        """Make this store the owner of a job whose owner is dead. Cancelled, it leaves the job interrupted."""
        writer, ownership = self._writer, self._owner
        give_back = partial(ownership.give_back, job_id)
        found: StoredJob = await writer.command(partial(ownership.take_over, job_id), lambda _: give_back, job_id)
        return found

    async def delete(self, job_id: str) -> None:
        """Delete a job that this store owns or whose owner is dead."""
        await self._writer.command(partial(self._owner.delete, job_id), job_id=job_id)

    async def request(self, job_id: str, data: bytes, limit: int = 64) -> int | None:
        """Store a request to the owner of a job, which is notified; return its number. It is committed on return."""
        self._check_size(job_id, len(data))
        run = partial(self._owner.request, job_id, data, limit)
        undo = partial(partial, self._owner.end_request)
        number: int | None = await self._writer.command(run, undo, job_id)
        return number

    async def take_request(self, request: Request) -> bool:
        """Reserve a request for this store before carrying it out; False if it was withdrawn, or its job is lost."""
        run = partial(self._owner.take_request, request.number)
        return bool(await self._writer.command(run, job_id=request.job_id))

    async def withdraw_request(self, job_id: str, number: int) -> bool:
        """Delete a request that was not carried out; False if it has an answer, or its owner is about to give one."""
        run = partial(self._owner.withdraw_request, job_id, number)
        return bool(await self._writer.command(run, job_id=job_id))

    def end_request(self, job_id: str, number: int) -> None:
        """Queue the deletion of a request whose sender needs no answer any longer."""
        self._writer.queue(partial(self._owner.end_request, number), job_id)

    async def prune(self, before: float, status: JobStatus | None = None, limit: int = 100) -> list[StoredJob]:
        """Delete jobs that ended before a time, those that ended first, at most ``limit``; return them."""
        return await self._read(lambda connection: queries.prune(connection, self.fence, before, status, limit))

    async def vacuum(self) -> None:
        """Give the space of deleted jobs back to the database."""
        await self._read(queries.vacuum)

    @property
    def _owner(self) -> Ownership:
        if self._ownership is None:
            raise self._closed()
        return self._ownership

    async def _commit(self, batch: Batch, wait: bool) -> None:
        loop = asyncio.get_running_loop()
        self._committing = loop.create_task(
            self._transact(batch, self._lease if wait else 0.0), name="dfm-store-commit"
        )
        await asyncio.shield(self._committing)

    async def _settle(self) -> None:
        """Wait until a commit that was cancelled has ended."""
        if self._committing is not None:
            await asyncio.wait([self._committing])

    async def _transact(self, batch: Batch, patience: float) -> None:
        """Carry out a batch; repeat it while the server cannot be reached, for a limited time."""
        number = next(self._numbers)
        tried: list[Committed] = []

        async def attempt() -> Committed:
            connection = await self._connected()
            if tried and await self._owner.committed(connection, number):
                return tried[-1]
            tried.append(Committed({}, [], []))
            await self._owner.commit(connection, batch, number, tried[-1])
            return tried[-1]

        batch.committed = await self._repeated(attempt, patience)

    async def _repeated(self, attempt: Callable[[], Awaitable[T]], patience: float) -> T:
        """Return what a call returns; repeat it while the server cannot be reached, for a limited time.

        Raises:
            StoreError: the time is over, the server has reported another error, or a row is damaged.
        """
        loop = asyncio.get_running_loop()
        deadline, pauses = loop.time() + patience, delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                return await attempt()
            except Damage as error:
                raise StoreError(self.path, str(error), _RESTORE) from error
            except (psycopg.Error, PoolTimeout) as error:
                if not _is_outage(error) or loop.time() >= deadline:
                    raise self._explained(error) from error
            await asyncio.sleep(min(next(pauses), max(deadline - loop.time(), 0)))

    def _explained(self, error: psycopg.Error) -> StoreError:
        for kind, problem, advice in _ADVICE:
            if isinstance(error, kind):
                return StoreError(self.path, f"{problem} ({_text(error)})", advice)
        return StoreError(self.path, f"the server reports an error ({_text(error)})", "See the log of the server")

    # reading

    async def _read(self, query: Callable[[Connection], Awaitable[T]]) -> T:
        if self._stack is None or self._pool is None:
            raise self._closed()
        pool = self._pool

        async def attempt() -> T:
            async with pool.connection(timeout=self._lease) as connection:
                return await query(connection)

        return await self._repeated(attempt, self._lease)

    async def find(self, job_id: str) -> StoredJob | None:
        """Return a job, or None."""
        return await self._read(lambda connection: queries.find_job(connection, self.fence, job_id))

    async def jobs(
        self, wanted: JobFilter = ALL_JOBS, *, before: Position | None = None, limit: int = -1
    ) -> list[StoredJob]:
        """Return the jobs that fit, the newest first, at most ``limit`` or all."""
        return await self._read(lambda connection: queries.list_jobs(connection, self.fence, wanted, before, limit))

    async def read(self, job_id: str, start: int, max_bytes: int = READ_BYTES) -> list[Entry]:
        """Return the entry that holds an offset and those behind it, about ``max_bytes``, but at least one."""
        return await self._read(lambda connection: queries.read_entries(connection, job_id, start, max_bytes))

    async def heads(self, job_id: str, after_first: int = 0) -> AsyncIterator[Entry]:
        """Yield the entries that begin at an offset or behind it, with empty payloads."""
        start = after_first
        while found := await self._read(partial(queries.read_heads, job_id=job_id, start=start)):
            for entry in found:
                yield entry
            start = found[-1].first + 1

    async def params(self, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
        """Return parameter sets by their numbers; those that are not stored are missing."""
        return await self._read(lambda connection: queries.read_params(connection, job_id, frames))

    async def requests(self) -> list[Request]:
        """Return the requests for the jobs of this store that have no answer, the oldest first."""
        return await self._read(lambda connection: queries.read_requests(connection, self.fence))

    async def answer_to(self, number: int) -> bytes | None:
        """Return the answer to a request, if it has one."""
        return await self._read(lambda connection: queries.read_answer(connection, number))

    @asynccontextmanager
    async def follow(self, fence: int) -> AsyncIterator[Follower]:
        """Follow the commits of an owner. Enter this first and read then, so that nothing is missed."""
        follower = _CommitFollower(
            fence, lambda: self._read(lambda connection: queries.seconds_left(connection, fence))
        )
        self._followers.add(follower)
        try:
            await follower.check()
            yield follower
        finally:
            self._followers.discard(follower)


class _CommitFollower:
    """Follows the commits of one owner."""

    def __init__(self, fence: int, seconds_left: Callable[[], Awaitable[float]]) -> None:
        self.fence = fence
        self._seconds_left = seconds_left
        self._expires = 0.0
        self._changed = True
        self._jobs: set[str] | None = None
        self._ended = False
        self._signal = Signal()

    def notify(self, jobs: Collection[str] | None = None, *, ended: bool = False) -> None:
        """Note that jobs were changed, None: any of them; or that the owner has ended."""
        self._changed = True
        if jobs is None or (self._jobs is not None and len(self._jobs) >= _CHANGED):
            self._jobs = None
        elif self._jobs is not None:
            self._jobs.update(jobs)
        self._ended = self._ended or ended
        self._signal.notify()

    async def check(self) -> None:
        """Find out when the lease of the owner expires: an owner that is killed does not notify."""
        left = await self._seconds_left()
        self._expires = asyncio.get_running_loop().time() + left
        if left <= 0:
            self.notify(ended=True)

    async def changed(self) -> bool:
        """Wait until something was committed since the last call; False when the owner has ended."""
        while not self._changed:
            if not await self._signal.wait(self._expires):
                await self.check()
        self._changed = False
        return not self._ended

    def jobs(self) -> Collection[str] | None:
        """Return the jobs that were changed since the last call; None: any of them may have been."""
        jobs, self._jobs = self._jobs, set()
        return jobs


def _timeouts(lease: float) -> dict[str, int]:
    """Return the options of libpq by which a connection breaks within about a lease if the network drops packets.

    What is sent must be acknowledged within the lease; keepalives do the same for connections that only wait.
    """
    return {
        "connect_timeout": min(max(math.ceil(lease), 2), 10),
        "tcp_user_timeout": math.ceil(min(lease, _LONGEST_TIMEOUT) * 1000),
        "keepalives_idle": max(int(min(lease, _LONGEST_TIMEOUT) / 2), 1),
        "keepalives_interval": max(int(min(lease, _LONGEST_TIMEOUT) / _RENEWALS), 1),
        "keepalives_count": 2,
    }


def _is_outage(error: psycopg.Error) -> bool:
    """Return whether the server may be reached again soon."""
    if isinstance(error, (errors.DiskFull, errors.InsufficientPrivilege)):
        return False
    conflicts = (errors.SerializationFailure, errors.DeadlockDetected)
    return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, *conflicts))


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _without_password(url: str) -> str:
    """Return a URL of a database for messages."""
    with contextlib.suppress(psycopg.ProgrammingError):
        info = conninfo_to_dict(url)
        host = str(info.get("host") or "")
        user = f"{info['user']}@" if info.get("user") else ""
        port = f":{info['port']}" if info.get("port") else ""
        name = f"/{info['dbname']}" if info.get("dbname") else ""
        return f"postgresql://{user}{host if not host.startswith('/') else ''}{port}{name}" + (
            f"?host={host}" if host.startswith("/") else ""
        )
    return re.sub(r"//[^@/]*@", "//", url)
