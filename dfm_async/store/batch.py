"""What is queued between two commits, and how it becomes one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dfm_async.errors import DfmError, StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry

__all__ = ["Batch", "Command", "Committed"]

_WRITE = 64
"""About how many bytes a queued write takes besides its data."""

_JOB = 'SELECT job, fence, "end", frames FROM jobs WHERE job_id = ?'
_CHANGE = """
    UPDATE jobs SET "end" = ?, frames = ?, status = coalesce(?, status), reason = coalesce(?, reason),
    finished = coalesce(?, finished), stopped = coalesce(?, stopped) WHERE job = ?
"""
_ENTRY = "INSERT INTO entries (job, first, count, kind, head, payload) VALUES (?, ?, ?, ?, ?, ?)"
_PARAMS = "INSERT INTO params (job, frame, data) VALUES (?, ?, ?)"


class Command:
    """Something whose caller waits for its outcome: it runs behind the writes of its batch."""

    __slots__ = ("done", "error", "result", "run")

    def __init__(
        self,
        run: Callable[[sqlite3.Connection, dict[str, int]], Any],
        done: Callable[[Any, DfmError | None], None],
    ) -> None:
        self.run = run
        """Gets the connection, and the jobs that the commit touches."""
        self.done = done
        """Gets what ``run`` returned, or the error that it raised or that the commit failed with."""
        self.result: Any = None
        self.error: DfmError | None = None


class Committed(msgspec.Struct):
    """What a commit did: the ends of the jobs that it touched, and the jobs that it left out."""

    ends: dict[str, int]
    fenced: list[str]
    gaps: list[tuple[str, StoreError]]


class _Writes:
    """What is queued for one job."""

    __slots__ = ("entries", "finished", "params", "reason", "status", "stopped")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.params: list[tuple[int, bytes]] = []
        self.status: str | None = None
        self.reason: str | None = None
        self.finished: float | None = None
        self.stopped: bool | None = None

    def merge(self, later: _Writes) -> None:
        self.entries += later.entries
        self.params += later.params
        self.status = later.status or self.status
        self.reason = later.reason if later.reason is not None else self.reason
        self.finished = later.finished if later.finished is not None else self.finished
        self.stopped = later.stopped if later.stopped is not None else self.stopped


class Batch:
    """Writes by job, and commands."""

    __slots__ = ("commands", "committed", "size", "writes")

    def __init__(self) -> None:
        self.writes: dict[str, _Writes] = {}
        self.commands: list[Command] = []
        self.size = 0
        self.committed: Committed | None = None

    def __bool__(self) -> bool:
        return bool(self.writes or self.commands)

    def _of(self, job_id: str) -> _Writes:
        writes = self.writes.get(job_id)
        if writes is None:
            writes = self.writes[job_id] = _Writes()
        return writes

    def append(self, job_id: str, entry: Entry) -> None:
        """Adds events."""
        self._of(job_id).entries.append(entry)
        self.size += len(entry.head) + len(entry.payload) + _WRITE

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Adds parameter sets."""
        self._of(job_id).params += enumerate(rows, first)
        self.size += sum(map(len, rows)) + _WRITE * len(rows)

    def update(
        self,
        job_id: str,
        status: JobStatus | None,
        reason: str | None,
        finished: float | None,
        stopped: bool | None,
    ) -> None:
        """Changes a job."""
        writes = self._of(job_id)
        if status is not None:
            writes.status = status.value
        if reason is not None:
            writes.reason = reason
        if finished is not None:
            writes.finished = finished
        if stopped is not None:
            writes.stopped = stopped
        self.size += _WRITE

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
        changes: list[tuple[Any, ...]] = []
        for job_id, writes in self.writes.items():
            row = connection.execute(_JOB, (job_id,)).fetchone()
            if row is None or row[1] != fence:
                done.fenced.append(job_id)
                continue
            job, _, end, frames = row
            problem = None
            for entry in writes.entries:
                if entry.first != end or entry.count < 1:
                    problem = _gap(path, job_id, "event", entry.first, end)
                    break
                end += entry.count
            for number, _data in writes.params:
                if number != frames:
                    problem = _gap(path, job_id, "parameter set", number, frames)
                    break
                frames += 1
            if problem is not None:
                done.gaps.append((job_id, problem))
                continue
            entries += [(job, e.first, e.count, e.kind, e.head, e.payload) for e in writes.entries]
            params += [(job, number, data) for number, data in writes.params]
            changes.append((end, frames, writes.status, writes.reason, writes.finished, writes.stopped, job))
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
