"""Stores that commit in groups: whatever was queued during a commit goes into the next one. For every database."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Final

from dfm_async.base.signals import Outcome, Signal
from dfm_async.base.tasks import completed
from dfm_async.errors import DfmError, StoreError
from dfm_async.model.job_filter import ALL_JOBS, JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, NewJob, Position, Request, StoredJob
from dfm_async.store.batching import Batch, Committed

_log = logging.getLogger(__name__)

_CHECKED: Final = 500
"""The number of jobs, and of parameter sets, that a check reads at once."""

Run = Callable[[Any, dict[str, int]], Any]
"""A part of a transaction: is called with the connection, and the jobs that the transaction changes with their ends.

On an asynchronous connection, what it returns is awaited.
"""


class Command:
    """A part of a transaction whose caller waits for the outcome. It runs behind the writes of its batch.

    It can be withdrawn until the transaction that it belongs to has the database's lock.

    Attributes:
        job_id: the job that it is about, if it is about one. Databases that lock rows lock those of all jobs of a batch
            in the same order, before anything else.
        outcome: what ``run`` returned, or the error that it raised or that the commit failed with.
    """

    __slots__ = ("_begun", "_error", "_lock", "_result", "_run", "_withdrawn", "job_id", "outcome")

    def __init__(self, run: Run, job_id: str | None = None) -> None:
        self._run = run
        self.job_id: str | None = job_id
        self.outcome: Outcome[Any] = Outcome()
        self._result: Any = None
        self._error: DfmError | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._withdrawn = False

    def _begin(self) -> bool:
        """Return whether it was not withdrawn; from then on it cannot be."""
        with self._lock:
            self._begun = not self._withdrawn
            return self._begun

    def run(self, connection: Any, ends: dict[str, int]) -> None:
        """Run it inside the transaction, unless it was withdrawn. May run in a thread."""
        if self._begin():
            try:
                self._result, self._error = self._run(connection, ends), None
            except DfmError as error:  # it has changed nothing
                self._result, self._error = None, error

    async def run_async(self, connection: Any, ends: dict[str, int]) -> None:
        """Run it inside the transaction of an asynchronous connection, unless it was withdrawn."""
        if self._begin():
            try:
                found = self._run(connection, ends)
                self._result, self._error = (await found if inspect.isawaitable(found) else found), None
            except DfmError as error:  # it has changed nothing
                self._result, self._error = None, error

    def withdraw(self) -> bool:
        """Return whether it will never run. Called on the loop."""
        with self._lock:
            self._withdrawn = not self._begun
            return self._withdrawn

    def committed(self, done: Committed) -> None:
        """Pass the outcome to the caller, after the commit."""
        error = self._error or (done.gaps[0][1] if done.gaps and self._run is _flush else None)
        if error is None:
            self.outcome.settle(self._result)
        else:
            self.outcome.fail(error)


class Writer:
    """Commit batches, one after the other, without waiting in between.

    When a commit fails, its writes stay at the head of the queue, unless the store discards them. They are retried with
    the next flush or command, and when twice as much is queued: a retry with every write would repeat the work of all
    before it each time.

    Args:
        path: the store, for errors.
        commit: carries out a batch in one transaction: all of it, or nothing if it raises. Its changes are written, and
            then its commands run; ``batch.committed`` is set at the end. The second argument says whether to wait for
            locks of other processes.
        settle: waits until a commit that was cancelled has ended, with or without success.
        on_commit: is called with the outcome of each commit.
        on_error: is called when a commit has failed.
    """

    def __init__(
        self,
        path: str,
        commit: Callable[[Batch, bool], Awaitable[None]],
        settle: Callable[[], Awaitable[None]],
        on_commit: Callable[[Committed], None],
        on_error: Callable[[StoreError], None],
    ) -> None:
        self._path = path
        self._commit_batch = commit
        self._settle = settle
        self._on_commit = on_commit
        self._on_error = on_error
        self.batch: Batch = Batch()
        self._committing: Batch | None = None
        self._retry_size = 0
        self._queued = Signal()
        self._closing = False
        self._lost: StoreError | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dfm-store-writer")

    @property
    def backlog(self) -> int:
        """About the number of bytes that are queued or being committed."""
        return (0 if self._committing is None else self._committing.size) + self.batch.size

    @property
    def ended(self) -> bool:
        """Whether nothing will be committed any longer."""
        return self._closing or self._task.done()

    def wake(self) -> None:
        """Commit what was added to :attr:`batch`."""
        if self._ready():
            self._queued.notify()

    def _ready(self) -> bool:
        batch = self.batch
        if batch.commands or self._closing:
            return True
        return bool(batch.writes) and batch.size >= self._retry_size

    async def command(self, run: Run, undo: Callable[[Any], Run] | None = None, job_id: str | None = None) -> Any:
        """Run something in the next transaction, behind what was queued before, and wait for the commit.

        Cancelled, it changes nothing: what has not begun is withdrawn, also while another process has the database
        locked; what has is waited for, and undone by the next transaction. ``undo`` gets the result.
        """
        return await self.outcome(self.queue(run, job_id), undo)

    async def outcome(self, command: Command, undo: Callable[[Any], Run] | None = None) -> Any:
        """Wait for a command, as :meth:`command` does."""
        try:
            return await command.outcome.wait()
        except asyncio.CancelledError:
            if command.withdraw():
                command.outcome.cancel()
                raise
            try:
                await completed(asyncio.wait([command.outcome]))  # soon: its transaction has the lock
            finally:
                if command.outcome.exception() is None and (result := command.outcome.result()) and undo is not None:
                    self.queue(undo(result), command.job_id)
            raise

    def queue(self, run: Run, job_id: str | None = None) -> Command:
        """Add something to the next transaction."""
        command = Command(run, job_id)
        self.batch.commands.append(command)
        self.wake()
        return command

    async def flush(self) -> None:
        """Wait until everything queued before is committed."""
        if self._committing is not None or self.batch:
            await self.command(_flush)

    async def close(self) -> None:
        """Commit the rest, and end the task.

        Raises:
            StoreError: not everything could be committed.
        """
        self._closing = True
        self.wake()
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._lost is not None:
            raise self._lost

    async def _run(self) -> None:
        try:
            while True:
                await self._queued.wait_until(self._ready)
                if not self.batch:
                    return  # closing
                if not await self._commit() and self._closing and not self.batch.commands:
                    return
        except asyncio.CancelledError:  # the loop ends, and nobody has closed the store
            self._closing = True
            if self.batch:
                await self._commit(wait=False)
            raise
        finally:
            self._end()

    async def _commit(self, *, wait: bool = True) -> bool:
        batch, self.batch = self.batch, Batch()
        self._committing = batch
        try:
            await self._commit_batch(batch, wait)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self._settle()
            if batch.committed is None:
                self._failed(batch, None)
            else:
                self._succeeded(batch, batch.committed)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and nothing is lost
            self._failed(batch, error)
            return False
        if batch.committed is not None:
            self._succeeded(batch, batch.committed)
        return True

    def _succeeded(self, batch: Batch, done: Committed) -> None:
        self._committing = None
        self._retry_size = 0
        for command in batch.commands:
            command.committed(done)
        self._on_commit(done)

    def _failed(self, batch: Batch, cause: Exception | None) -> None:
        if isinstance(cause, StoreError):
            error = cause
        else:
            why = "the loop ends" if cause is None else f"{type(cause).__name__}: {cause}"
            error = StoreError(self._path, f"a commit failed ({why})", "Close the store before the loop ends")
            error.__cause__ = cause
        if self._closing and batch.writes:
            self._lost = error
        commands, batch.commands = batch.commands, []
        batch.merge(self.batch)
        self.batch = batch
        self._committing = None
        for command in commands:
            command.outcome.fail(error)
        self._on_error(error)
        self._retry_size = 2 * self.batch.size

    def _end(self) -> None:
        """Report what is left in the queue, because a commit failed or the loop ends."""
        if not self.batch:
            return
        error = StoreError(
            self._path,
            f"it was closed before the last {self.batch.size:,} bytes were committed",
            "See the errors before this one",
        )
        error.__cause__ = self._lost
        self._lost = error
        for command in self.batch.commands:
            command.outcome.fail(error)
        self._on_error(error)


def _flush(_connection: Any, _ends: dict[str, int]) -> None:
    """Do nothing: the commit is all that a flush needs."""


class GroupCommitStore:
    """The part of a :class:`~dfm_async.store.Store` that is the same for every database: queue and callbacks.

    A store opens its database, sets ``_writer_``, and adds the methods that read, create, take over and delete.

    Args:
        path: the location of the store, without passwords.
    """

    largest: int = 1 << 30
    """The largest number of bytes that a row can hold."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.checkpoints: str | None = f"{path}-checkpoints"
        self.fence = 0
        self.migrated_from: int | None = None
        self.on_commit: Callable[[dict[str, int]], None] | None = None
        self.on_fenced: Callable[[str], None] | None = None
        self.on_gap: Callable[[str, StoreError], None] | None = None
        self.on_error: Callable[[StoreError], None] | None = None
        self.on_interrupted: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.on_request: Callable[[], None] | None = None
        self.on_change: Callable[[Collection[str] | None], None] | None = None
        self._writer_: Writer | None = None
        self._creating: dict[str, Command] = {}

    @property
    def _writer(self) -> Writer:
        writer = self._writer_
        if writer is None or writer.ended:
            raise self._closed()
        return writer

    def _closed(self) -> StoreError:
        return StoreError(self.path, "it is not open", "Use it between open() and close()")

    def _check_size(self, job_id: str, size: int) -> None:
        if size > self.largest:
            problem = f"{size:,} bytes of job {job_id} are more than a row can hold"
            raise StoreError(self.path, problem, "Make smaller values")

    # writing

    @property
    def backlog(self) -> int:
        """About the number of bytes that are queued and not yet committed."""
        return 0 if self._writer_ is None else self._writer_.backlog

    def append(self, job_id: str, entry: Entry, *, errors: int = 0, done: int = 0) -> None:
        """Queue the next events of a job of this store."""
        writer = self._writer
        self._check_size(job_id, len(entry.payload) + len(entry.head))
        writer.batch.append(job_id, entry, errors, done)
        writer.wake()

    def discard(self, job_id: str) -> bool:
        """Drop what is queued for a job. Return whether there was anything."""
        return self._writer_ is not None and self._writer_.batch.discard(job_id)

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Queue the next parameter sets of a job of this store; ``first`` is the number of the first of them."""
        writer = self._writer
        self._check_size(job_id, max(map(len, rows), default=0))
        writer.batch.add_params(job_id, first, rows)
        writer.wake()

    def update(
        self,
        job_id: str,
        *,
        status: JobStatus | None = None,
        reason: str | None = None,
        finished: float | None = None,
        stopped: bool | None = None,
    ) -> None:
        """Queue a change of a job of this store."""
        writer = self._writer
        writer.batch.update(job_id, status, reason, finished, stopped)
        writer.wake()

    def answer(self, request: Request, data: bytes) -> None:
        """Queue the answer to a request. It is committed together with what was queued for the job at the same time."""
        writer = self._writer
        writer.batch.answer(request.job_id, request.number, data)
        writer.wake()

    async def size(self) -> int | None:
        """Return about the number of bytes that the store takes; None if its database counts differently."""
        return None

    async def flush(self) -> None:
        """Wait until everything queued before is committed."""
        await self._writer.flush()

    async def _create(self, job: NewJob, run: Run, undo: Run) -> bool:
        """Run a command that stores a new job, which :meth:`withdraw` can withdraw."""
        writer = self._writer
        command = self._creating[job.job_id] = writer.queue(run, job.job_id)
        try:
            return bool(await writer.outcome(command, lambda _: undo))
        finally:
            self._creating.pop(job.job_id, None)

    def withdraw(self, job_id: str) -> None:
        """Let the creation of a job return False, unless the transaction that stores the job has begun."""
        command = self._creating.get(job_id)
        if command is not None and command.withdraw():
            command.outcome.settle(False)

    # reading, as other methods of the store do

    async def find(self, job_id: str) -> StoredJob | None:
        """Return a job, or None."""
        raise NotImplementedError

    async def jobs(
        self, wanted: JobFilter = ALL_JOBS, *, before: Position | None = None, limit: int = -1
    ) -> list[StoredJob]:
        """Return the jobs that fit, the newest first, at most ``limit`` or all."""
        raise NotImplementedError

    def heads(self, job_id: str, after_first: int = 0) -> AsyncIterator[Entry]:
        """Yield the entries that begin at an offset or behind it, with empty payloads."""
        raise NotImplementedError

    async def params(self, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
        """Return parameter sets by their numbers; those that are not stored are missing."""
        raise NotImplementedError

    async def check(self, progress: Callable[[int], object] | None = None) -> AsyncIterator[StoreError]:
        """Yield an error for everything in the store that is damaged. Each costs one job, not the store."""
        before: Position | None = None
        count = 0
        while page := await self.jobs(before=before, limit=_CHECKED):
            for job in page:
                problem = job.damage or await self._problem(job)
                if problem is not None and await self.find(job.job_id) is not None:  # else it was deleted meanwhile
                    problem = f"job {job.job_id} is damaged: {problem}"
                    yield StoreError(self.path, problem, "Restore the store from a copy, or forget the job")
                count += 1
                if progress is not None:
                    progress(count)
            before = page[-1].created, page[-1].job_id

    async def _problem(self, job: StoredJob) -> str | None:
        """Return what is wrong with the events and parameter sets of a job."""
        end = 0
        try:
            async for entry in self.heads(job.job_id):
                if entry.first != end:
                    return f"its events {end} to {entry.first - 1} are missing"
                end += entry.count
            if end < job.end:
                return f"it has {job.end} events, but those that are stored end at {end}"
            for first in range(0, job.frames, _CHECKED):
                numbers = range(first, min(first + _CHECKED, job.frames))
                missing = set(numbers) - (await self.params(job.job_id, numbers)).keys()
                if missing:
                    return f"its parameter set {min(missing)} is missing"
        except StoreError as error:
            return error.problem.removeprefix(f"job {job.job_id}: ")
        return None

    # the outcomes of commits

    def _committed(self, done: Committed) -> None:
        if done.ends:
            self._notify_followers()
            self._call(self.on_commit, done.ends)
        for job_id in done.fenced:
            if self.on_fenced is None:
                _log.error("store %s: job %s has another owner; writes for it were left out", self.path, job_id)
            self._call(self.on_fenced, job_id)
        for job_id, error in done.gaps:
            if self.on_gap is None:
                self._failed(error)
            else:
                self._call(self.on_gap, job_id, error)

    def _notify_followers(self) -> None:
        """Notify other processes of a commit."""
        raise NotImplementedError

    def _failed(self, error: StoreError) -> None:
        if self.on_error is None:
            _log.error("%s", error)
        self._call(self.on_error, error)

    def _call(self, callback: Callable[..., None] | None, *arguments: Any) -> None:
        if callback is not None:
            try:
                callback(*arguments)
            except Exception:  # noqa: BLE001 - the store goes on
                _log.exception("store %s: a callback raised", self.path)
