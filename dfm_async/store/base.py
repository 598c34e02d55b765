"""What a store of jobs holds, and what it can do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from dfm_async.errors import StoreError
from dfm_async.model.status import JobStatus

__all__ = ["READ_BYTES", "Entry", "Follower", "NewJob", "Owner", "Store", "StoredJob"]

READ_BYTES: Final = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """One or more consecutive events of a job's log. The store does not look inside.

    Attributes:
        first: the offset of the first of them. The offsets of a job have no gaps and begin with 0.
        count: how many they are.
        kind: what they are, for whoever wrote them.
        head: the part that scanning needs.
        payload: the rest.
    """

    first: int
    count: int
    kind: int
    head: bytes
    payload: bytes


class NewJob(msgspec.Struct, frozen=True):
    """A job that is about to begin.

    Attributes:
        job_id: its id.
        plan: what it runs.
        fingerprint: what two jobs with the same id must agree in.
        options: how it runs.
        created: when it was created.
        params: its first parameter sets.
        stopped: no further parameter sets will come.
    """

    job_id: str
    plan: bytes
    fingerprint: str | None
    options: bytes
    created: float
    params: Sequence[bytes] = ()
    stopped: bool = False


class Owner(msgspec.Struct, frozen=True):
    """Who may write a job.

    Attributes:
        fence: the number of the open store that owns the job; none is given twice.
        pid: its process.
        host: where the process runs.
        alive: whether that store is open, in a process that lives.
        mine: whether it is the store that was asked.
    """

    fence: int
    pid: int
    host: str
    alive: bool
    mine: bool


class StoredJob(msgspec.Struct, frozen=True):
    """What is committed of one job.

    Attributes:
        job_id: its id.
        plan: as given when it was created.
        fingerprint: as given when it was created.
        options: as given when it was created.
        created: when it was created.
        finished: when it ended, if it did.
        status: its state; ``INTERRUPTED`` if it has not ended and its owner is dead.
        reason: why it is in this state.
        end: the offset that its next event will get.
        frames: how many parameter sets are stored.
        stopped: no further parameter sets will come.
        errors: how many errors there were; None in files that do not have the number.
        done: how many parameter sets are done; None in files that do not have the number.
        owner: who may write it.
        damage: what cannot be read of it, if anything; other values stand in the place of such ones then.
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


class Follower(Protocol):
    """Hears of the commits of another store."""

    async def changed(self) -> bool:
        """Waits until something was committed since the last call; the first call may return at once.

        Returns:
            Whether there may be more to come. False: the owner has ended, and everything it wrote can be read.
        """
        ...


class Store(Protocol):
    """Keeps jobs. Everything is called on the loop that opened it.

    Writing only queues; what was queued is committed as soon as the commit before it is done. Reading shows what is
    committed.

    Attributes:
        fence: the number that this open store owns its jobs by.
        on_commit: is called after every commit with the jobs that it touched, and the offset that each has reached.
        on_fenced: is called when writes for a job were left out because it belongs to somebody else, or is deleted.
        on_gap: is called when writes for a job were left out because others are missing before them; ``on_error`` if it
            is not set.
        on_error: is called when a commit failed. What was queued stays queued; :meth:`flush` tries again.
    """

    @property
    def path(self) -> str:
        """Where the store is."""
        ...

    fence: int
    on_commit: Callable[[dict[str, int]], None] | None
    on_fenced: Callable[[str], None] | None
    on_gap: Callable[[str, StoreError], None] | None
    on_error: Callable[[StoreError], None] | None

    def claim_service(self) -> bool:
        """Makes this the one open store that a web service serves; False if another one is. Ends when it is closed."""
        ...

    async def open(self) -> None:
        """Opens the store, and creates it if there is none."""
        ...

    async def close(self) -> None:
        """Commits what is queued and lets go of everything. Harmless when closed.

        Raises:
            StoreError: not everything could be committed. The store is closed nevertheless.
        """
        ...

    @property
    def backlog(self) -> int:
        """About how many bytes are queued and not yet committed."""
        ...

    def append(self, job_id: str, entry: Entry, *, errors: int = 0, done: int = 0) -> None:
        """Queues the next events of a job of ours.

        Args:
            job_id: the job.
            entry: the events.
            errors: how many errors they report.
            done: how many parameter sets they report as done.
        """
        ...

    def discard(self, job_id: str) -> bool:
        """Drops what is queued for a job; tells whether there was anything."""
        ...

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Queues the next parameter sets of a job of ours; ``first`` is the number of the first of them."""
        ...

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
        ...

    async def create(self, job: NewJob) -> bool:
        """Stores a new job, which is ours. It is committed on return; False if its id is taken.

        Cancelled, it leaves no job behind, and does not wait for locks of other processes.
        """
        ...

    def withdraw(self, job_id: str) -> None:
        """Has :meth:`create` return False, unless the transaction that stores the job has begun."""
        ...

    async def flush(self) -> None:
        """Waits until everything queued before is committed.

        Raises:
            StoreError: it could not be. It stays queued.
        """
        ...

    async def find(self, job_id: str) -> StoredJob | None:
        """Gives a job, or None."""
        ...

    async def jobs(self, limit: int = -1) -> list[StoredJob]:
        """Gives the newest jobs, in the order in which they were created: at most so many, or all."""
        ...

    async def read(self, job_id: str, start: int, max_bytes: int = READ_BYTES) -> list[Entry]:
        """Gives the entry that holds an offset and those behind it, about as much as ``max_bytes``, but at least one.

        Nothing if the job has not reached the offset, or does not exist.
        """
        ...

    def heads(self, job_id: str, after_first: int = 0) -> AsyncIterator[Entry]:
        """Gives the entries that begin at an offset or behind it, with empty payloads."""
        ...

    async def params(self, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
        """Gives parameter sets by their numbers; those that are not stored are missing."""
        ...

    async def take_over(self, job_id: str) -> StoredJob:
        """Makes a job ours if its owner is dead. Cancelled, it leaves the job interrupted.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: its owner is alive.
            StoreError: what is stored of it is damaged.
        """
        ...

    async def delete(self, job_id: str) -> None:
        """Deletes a job that is ours or whose owner is dead.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: its owner is alive.
        """
        ...

    def follow(self, fence: int) -> AbstractAsyncContextManager[Follower]:
        """Listens to the commits of an owner. Enter it first and read then, so that nothing is missed.

        Raises:
            StoreError: the owner is alive but cannot be reached.
        """
        ...
