"""The interface of stores, and the values that they keep."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeAlias

import msgspec

from dfm_async.errors import StoreError
from dfm_async.model.job_filter import ALL_JOBS, JobFilter
from dfm_async.model.status import JobStatus

Position: TypeAlias = tuple[float, str]
"""A place in the list of jobs: the time when the job was created that is there, and its id."""

READ_BYTES: Final = 1 << 20
"""The number of bytes that one read returns, about."""


class Entry(msgspec.Struct, frozen=True):
    """One or more consecutive events of a job's log, opaque to the store.

    Attributes:
        first: the offset of the first of them. The offsets of a job have no gaps and begin with 0.
        count: their number.
        kind: their kind, for the writer.
        head: the part that scanning needs.
        payload: the rest.
    """

    first: int
    count: int
    kind: int
    head: bytes
    payload: bytes


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is about to begin.

    Attributes:
        job_id: its id.
        plan: the encoded plan.
        fingerprint: identifies what was submitted: two jobs with the same id must have the same.
        options: the encoded options.
        created: when it was created.
        params: its first parameter sets.
        stopped: no further parameter sets will come.
        pipeline: the name of its pipeline.
        label: what the application noted about it.
    """

    job_id: str
    plan: bytes
    fingerprint: str | None
    options: bytes
    created: float
    params: Sequence[bytes] = ()
    stopped: bool = False
    pipeline: str | None = None
    label: str | None = None


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The open store that may write a job.

    Attributes:
        fence: its fencing number; numbers are never reused.
        pid: its process.
        host: the host of the process.
        alive: whether the store is open, in a process that is alive.
        mine: whether it is the store that returned this value.
    """

    fence: int
    pid: int
    host: str
    alive: bool
    mine: bool


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """The committed state of one job.

    Attributes:
        job_id: its id.
        plan: as in :class:`NewJob`.
        fingerprint: as in :class:`NewJob`.
        options: as in :class:`NewJob`.
        created: when it was created.
        finished: when it ended, if it did.
        status: its state; ``INTERRUPTED`` if it has not ended and its owner is dead.
        reason: why it is in this state.
        end: the offset that its next event will get.
        frames: the number of stored parameter sets.
        stopped: no further parameter sets will come.
        errors: the number of errors; None in files that do not have it.
        done: the number of parameter sets that are done; None in files that do not have it.
        owner: the store that may write it.
        damage: what cannot be read, if anything; other values replace it.
    """

    job_id: str
    plan: bytes
    fingerprint: str | None
    options: bytes
    created: float
    finished: float | None
    status: JobStatus
    reason: str | None
    end: int
    frames: int
    stopped: bool
    errors: int | None
    done: int | None
    owner: Owner
    damage: str | None = None


class Request(msgspec.Struct, frozen=True):
    """A request of another process to the owner of a job, opaque to the store.

    Attributes:
        job_id: the job.
        number: its number. Those of a job are in the order of its requests, and numbers are never reused.
        data: what is requested.
    """

    job_id: str
    number: int
    data: bytes


class Follower(Protocol):
    """Is notified of the commits of another store."""

    async def changed(self) -> bool:
        """Wait until something was committed since the last call; the first call may return at once.

        Returns:
            True while more may come; False when the owner has ended, and everything it wrote can be read.
        """

    def jobs(self) -> Collection[str] | None:
        """Return the ids of the jobs that were changed since the last call; None: any of them may have been."""


class Store(Protocol):
    """Keeps jobs. All methods are called on the loop that opened it.

    Writing only queues; what was queued is committed as soon as the commit before it is done. Reading returns what is
    committed. A store for another database can build on ``dfm_async.store.group_commit``, which has the queue.

    Attributes:
        path: the location of the store, without passwords.
        checkpoints: the default folder for the values that sites record, if there is one.
        fence: the fencing number of this open store: the number of its jobs' owner.
        migrated_from: the version of the format that was migrated when it was opened, if it was an older one.
        on_commit: is called after every commit with the jobs that it changed, and the offset that each has reached.
        on_fenced: is called when writes for a job were left out because it has another owner, or is deleted.
        on_gap: is called when writes for a job were left out because others are missing before them; ``on_error`` if it
            is not set.
        on_interrupted: is called when the owner of jobs that have not ended was found dead. Stores on which only one
            service can be open need not call it.
        on_error: is called when a commit failed. What was queued stays queued; :meth:`flush` retries it.
        on_lost: is called when another store may have taken over jobs of this one, because it seemed dead. Writing one
            shows which: ``on_fenced``.
        on_request: is called when others may have stored requests for jobs of this store.
        on_change: is called when another store has committed, with the ids of the jobs that it has changed; None: any
            may have changed. Stores that cannot notify of commits of stores that they do not follow need not call it.
    """

    path: str
    checkpoints: str | None
    fence: int
    migrated_from: int | None
    on_commit: Callable[[dict[str, int]], None] | None
    on_fenced: Callable[[str], None] | None
    on_gap: Callable[[str, StoreError], None] | None
    on_error: Callable[[StoreError], None] | None
    on_interrupted: Callable[[], None] | None
    on_lost: Callable[[], None] | None
    on_request: Callable[[], None] | None
    on_change: Callable[[Collection[str] | None], None] | None

    def claim_service(self) -> bool:
        """Reserve the store for a web service until it is closed; False if another one has reserved it."""

    async def open(self) -> None:
        """Open the store, and create it if it does not exist."""

    async def close(self) -> None:
        """Commit what is queued, and close the store. Does nothing if it is closed.

        Raises:
            StoreError: not everything could be committed. The store is closed nevertheless.
        """

    @property
    def backlog(self) -> int:
        """About the number of bytes that are queued and not yet committed."""

    def append(self, job_id: str, entry: Entry, *, errors: int = 0, done: int = 0) -> None:
        """Queue the next events of a job of this store.

        Args:
            job_id: the job.
            entry: the events.
            errors: the number of errors that they report.
            done: the number of parameter sets that they report as done.
        """

    def discard(self, job_id: str) -> bool:
        """Drop what is queued for a job. Return whether there was anything."""

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Queue the next parameter sets of a job of this store; ``first`` is the number of the first of them."""

    def update(
        self,
        job_id: str,
        *,
        status: JobStatus | None = None,
        reason: str | None = None,
        finished: float | None = None,
        stopped: bool | None = None,
    ) -> None:
        """Queue a change of a job of this store. None keeps a value; reason and end are set with the status."""

    async def create(self, job: NewJob) -> bool:
        """Store a new job, owned by this store. It is committed on return; False if its id is taken.

        Cancelled, it leaves no job behind, and does not wait for locks of other processes.
        """

    def withdraw(self, job_id: str) -> None:
        """Let :meth:`create` return False, unless the transaction that stores the job has begun."""

    async def flush(self) -> None:
        """Wait until everything queued before is committed.

        Raises:
            StoreError: it cannot be committed. It stays queued.
        """

    async def find(self, job_id: str) -> StoredJob | None:
        """Return a job, or None."""

    async def jobs(
        self, wanted: JobFilter = ALL_JOBS, *, before: Position | None = None, limit: int = -1
    ) -> list[StoredJob]:
        """Return the jobs that fit, the newest first, at most ``limit`` or all.

        They are in the order of the time when they were created, and of their ids; only those before ``before`` are
        returned. A job whose time is damaged is the oldest. With a status that can still change, jobs with others that
        can are returned, too.
        """

    async def read(self, job_id: str, start: int, max_bytes: int = READ_BYTES) -> list[Entry]:
        """Return the entry that holds an offset and those behind it, about ``max_bytes``, but at least one.

        Nothing if the job has not reached the offset, or does not exist.
        """

    def heads(self, job_id: str, after_first: int = 0) -> AsyncIterator[Entry]:
        """Yield the entries that begin at an offset or behind it, with empty payloads."""

    async def params(self, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
        """Return parameter sets by their numbers; those that are not stored are missing."""

    async def take_over(self, job_id: str) -> StoredJob:
        """Make this store the owner of a job whose owner is dead. Cancelled, it leaves the job interrupted.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: its owner is alive.
            StoreError: what is stored of it is damaged.
        """

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended, or that this store owns, or whose owner is dead.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: its owner is alive.
        """

    # requests to the owners of jobs

    async def request(self, job_id: str, data: bytes, limit: int = 64) -> int | None:
        """Store a request to the owner of a job, which is notified; return its number. It is committed on return.

        None if nothing was stored: the job has ``limit`` requests already, has ended, or its owner is dead.

        Raises:
            JobNotFound: there is no such job.
        """

    async def requests(self) -> list[Request]:
        """Return the requests for the jobs of this store that have no answer, the oldest first."""

    async def take_request(self, request: Request) -> bool:
        """Reserve a request for this store before carrying it out; False if it was withdrawn, or its job is lost.

        A request can be taken again: by the same store, and by one that has taken its job over.
        """

    def answer(self, request: Request, data: bytes) -> None:
        """Queue the answer to a request. It is committed together with what was queued for the job at the same time."""

    async def answer_to(self, number: int) -> bytes | None:
        """Return the answer to a request, if it has one."""

    async def withdraw_request(self, job_id: str, number: int) -> bool:
        """Delete a request that was not carried out; False if it has an answer, or its owner is about to give one.

        If its owner is dead and may have begun with it, the job is interrupted for good: that owner cannot write it
        any longer.
        """

    def end_request(self, job_id: str, number: int) -> None:
        """Queue the deletion of a request whose sender needs no answer any longer."""

    # operations

    async def prune(self, before: float, status: JobStatus | None = None, limit: int = 100) -> list[StoredJob]:
        """Delete jobs that have ended for good before a time, those that ended first, at most ``limit``; return them.

        Only jobs with a status, if it is given. Other commits go on meanwhile.
        """

    def check(self, progress: Callable[[int], object] | None = None) -> AsyncIterator[StoreError]:
        """Yield an error for everything in the store that is damaged. Each costs one job, not the store.

        Args:
            progress: is called with the number of jobs that were checked.
        """

    async def size(self) -> int | None:
        """Return about the number of bytes that the store takes; None if its database counts differently."""

    async def vacuum(self) -> None:
        """Give the space of deleted jobs back to the file system, or to the database."""

    def follow(self, fence: int) -> AbstractAsyncContextManager[Follower]:
        """Follow the commits of an owner. Enter this first and read then, so that nothing is missed.

        Raises:
            StoreError: the owner is alive but cannot be reached.
        """
