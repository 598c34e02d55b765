"""What is queued between two commits, and how it becomes one transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dfm_async.errors import DfmError, StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry

__all__ = ["Batch", "Command", "Committed", "Run"]

_WRITE = 64
"""About how many bytes a queued write takes besides its data."""

_JOB = 'SELECT job, fence, "end", frames FROM jobs WHERE job_id = ?'
_CHANGE = """
    UPDATE jobs SET "end" = :end, frames = :frames, errors = errors + :errors, done = done + :done,
    status = coalesce(:status, status), stopped = coalesce(:stopped, stopped),
    reason = CASE WHEN :status IS NULL THEN reason ELSE :reason END,
    finished = CASE WHEN :status IS NULL THEN finished ELSE :finished END WHERE job = :job
"""
_ENTRY = "INSERT INTO entries (job, first, count, kind, head, payload) VALUES (?, ?, ?, ?, ?, ?)"
_PARAMS = "INSERT INTO params (job, frame, data) VALUES (?, ?, ?)"


Run = Callable[[sqlite3.Connection, dict[str, int]], Any]
"""What a command does: gets the connection, and the jobs that the commit touches, with their ends."""


class Command:
    """Something whose caller waits for its outcome: it runs behind the writes of its batch.

    It may be withdrawn until the transaction that it belongs to has the database's lock.
    """

    __slots__ = ("_begun", "_lock", "_withdrawn", "error", "outcome", "result", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Gets what ``run`` returned, or the error that it raised or that the commit failed with."""
        self.result: Any = None
        self.error: DfmError | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._withdrawn = False

    def begin(self) -> bool:
        """Tells whether it is to run; from then on it cannot be withdrawn. Called in the writer's thread."""
        with self._lock:
            self._begun = not self._withdrawn
            return self._begun

    def withdraw(self) -> bool:
        """Tells whether it will never run. Called on the loop."""
        with self._lock:
            self._withdrawn = not self._begun
            return self._withdrawn

    def done(self, result: Any, error: DfmError | None) -> None:
        """Tells the caller what became of it."""
        if not self.outcome.done():
            if error is None:
                self.outcome.set_result(result)
            else:
                self.outcome.set_exception(error)


class Committed(msgspec.Struct):
    """What a commit did: the ends of the jobs that it touched, and the jobs that it left out."""

    ends: dict[str, int]
    fenced: list[str]
    gaps: list[tuple[str, StoreError]]


class _Writes:
    """What is queued for one job."""

    __slots__ = ("done", "entries", "errors", "finished", "params", "reason", "size", "status", "stopped")

    def __init__(self) -> None:
        self.size = 0
        self.errors = 0
        self.done = 0
        self.entries: list[Entry] = []
        self.params: list[tuple[int, bytes]] = []
        self.status: str | None = None
        self.reason: str | None = None
        self.finished: float | None = None
        self.stopped: bool | None = None

    def merge(self, later: _Writes) -> None:
        self.entries += later.entries
        self.params += later.params
        self.size += later.size
        self.errors += later.errors
        self.done += later.done
        if later.status is not None:
            self.status, self.reason, self.finished = later.status, later.reason, later.finished
        self.stopped = later.stopped if later.stopped is not None else self.stopped


class Batch:
    """Writes by job, and commands."""

    __slots__ = ("commands", "committed", "size", "writes")

    def __init__(self) -> None:
        self.writes: dict[str, _Writes] = {}
        self.commands: list[Command] = []
        self.size = 0
        """About how many bytes the writes have."""
        self.committed: Committed | None = None

    def __bool__(self) -> bool:
        return bool(self.writes or self.commands)

    def _of(self, job_id: str, size: int) -> _Writes:
        """What is queued for a job; so many bytes are about to be added."""
        writes = self.writes.get(job_id)
        if writes is None:
            writes = self.writes[job_id] = _Writes()
        writes.size += size
        self.size += size
        return writes

    def append(self, job_id: str, entry: Entry, errors: int, done: int) -> None:
        """Adds events."""
        writes = self._of(job_id, len(entry.head) + len(entry.payload) + _WRITE)
        writes.entries.append(entry)
        writes.errors += errors
        writes.done += done

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Adds parameter sets."""
        writes = self._of(job_id, sum(map(len, rows)) + _WRITE * len(rows))
        writes.params += enumerate(rows, first)

    def update(
        self,
        job_id: str,
        status: JobStatus | None,
        reason: str | None,
        finished: float | None,
        stopped: bool | None,
    ) -> None:
        """Changes a job."""
        writes = self._of(job_id, _WRITE)
        if status is not None:
            writes.status, writes.reason, writes.finished = status.value, reason, finished
        if stopped is not None:
            writes.stopped = stopped

    def discard(self, job_id: str) -> bool:
        """Drops what is queued for a job; tells whether there was anything."""
        writes = self.writes.pop(job_id, None)
        if writes is not None:
            self.size -= writes.size
        return writes is not None

    def merge(self, later: Batch) -> None:
        """Takes over what was queued later."""
        for job_id, writes in later.writes.items():
            mine = self.writes.get(job_id)
            if mine is None:
                self.writes[job_id] = writes
            else:
                mine.merge(writes)
        self.commands += later.commands
        self.size += later.size

    def commit(self, connection: sqlite3.Connection, fence: int, path: str, check: Callable[[], None]) -> None:
        """Carries everything out in one transaction: all of it, or nothing if it raises.

        Args:
            connection: the connection.
            fence: the owner that jobs must have; writes for others are left out.
            path: the file, for errors.
            check: is called before the end of the transaction, and raises if it must not be committed.
        """
        connection.execute("BEGIN IMMEDIATE")
        try:
            done = self._write(connection, fence, path)
            for command in self.commands:
                if not command.begin():
                    continue
                try:
                    command.result, command.error = command.run(connection, done.ends), None
                except DfmError as error:  # it has changed nothing
                    command.result, command.error = None, error
            check()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.rollback()
            raise
        self.committed = done

    def _write(self, connection: sqlite3.Connection, fence: int, path: str) -> Committed:
        done = Committed({}, [], [])
        entries: list[tuple[Any, ...]] = []
        params: list[tuple[Any, ...]] = []
        changes: list[dict[str, Any]] = []
        for job_id, writes in self.writes.items():
            row = connection.execute(_JOB, (job_id,)).fetchone()
            if row is None or row[1] != fence:
                done.fenced.append(job_id)
                continue
            job, _, end, frames = row
            problem = None
            if not isinstance(end, int) or not isinstance(frames, int):
                problem = _gap(path, job_id, "event", writes.entries[0].first if writes.entries else 0, end)
            for entry in writes.entries:
                if problem is not None or entry.first != end or entry.count < 1:
                    problem = problem or _gap(path, job_id, "event", entry.first, end)
                    break
                end += entry.count
            for number, _data in writes.params:
                if problem is not None or number != frames:
                    problem = problem or _gap(path, job_id, "parameter set", number, frames)
                    break
                frames += 1
            if problem is not None:
                done.gaps.append((job_id, problem))
                continue
            entries += [(job, e.first, e.count, e.kind, e.head, e.payload) for e in writes.entries]
            params += [(job, number, data) for number, data in writes.params]
            changes.append(
                {
                    "job": job,
                    "end": end,
                    "frames": frames,
                    "errors": writes.errors,
                    "done": writes.done,
                    "status": writes.status,
                    "reason": writes.reason,
                    "finished": writes.finished,
                    "stopped": writes.stopped,
                }
            )
            done.ends[job_id] = end
        if entries:
            connection.executemany(_ENTRY, entries)
        if params:
            connection.executemany(_PARAMS, params)
        if changes:
            connection.executemany(_CHANGE, changes)
        return done


def _gap(path: str, job_id: str, what: str, first: int, expected: int) -> StoreError:
    return StoreError(
        path,
        f"job {job_id}: {what} {first} came where {expected} is next, and what came with it was left out",
        "Write the numbers of a job without gaps; take the job over to learn where it stands",
    )
