"""The transactions and queries of a store in SQLite."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from dfm_async.errors import JobNotFound, JobOwned, StoreError
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, NewJob, Position, Request, StoredJob
from dfm_async.store.batching import Batch, Committed, JobBeforeCommit
from dfm_async.store.processes import Locks
from dfm_async.store.rows import (
    FENCES,
    JOB,
    LAST_TIME,
    arguments,
    conditions,
    entry_of,
    is_number,
    is_text,
    page,
    params_of,
    request_of,
    storable,
    stored_job,
)

_JOBS: Final = f"SELECT {JOB} FROM jobs LEFT JOIN plans USING (job) LEFT JOIN owners ON owners.fence = jobs.fence"  # noqa: S608 - a constant
_FENCE: Final = 13
_ONE: Final = f"{_JOBS} WHERE job_id = ?"
_HAS_TIME: Final = f"typeof(created) = 'real' AND created >= 0 AND created < {LAST_TIME}"
_CONTAINS: Final = "instr(lower({text}), {word}) > 0"
_OWNERS: Final = "SELECT fence FROM owners"
_NUMBER: Final = "SELECT job FROM jobs WHERE job_id = ?"
_ENTRIES: Final = """
    SELECT first, count, kind, head, payload FROM entries WHERE job = ? AND first >= (
        SELECT first FROM entries WHERE job = ? AND first <= ? ORDER BY first DESC LIMIT 1)
    ORDER BY first
"""
_HEADS: Final = "SELECT first, count, kind, head FROM entries WHERE job = ? AND first >= ? ORDER BY first LIMIT 1000"
_PARAMS: Final = "SELECT data FROM params WHERE job = ? AND frame = ?"
_ADDRESS: Final = "SELECT address FROM owners WHERE fence = ?"
_IDLE: Final = "SELECT fence FROM owners WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.fence = owners.fence)"
_LAST_EVENT: Final = "SELECT first + count FROM entries WHERE job = ? ORDER BY first DESC LIMIT 1"
_PARAMS_STORED: Final = "SELECT count(*), coalesce(max(frame) + 1, 0) FROM params WHERE job = ? AND frame >= 0"
_DELETE: Final = (
    "INSERT INTO garbage (job) VALUES (?)",
    *(f"DELETE FROM {table} WHERE job = ?" for table in ("requests", "plans", "jobs")),  # noqa: S608 - constants
)
"""Delete a job; its events and parameter sets are swept later."""
_SWEPT: Final = 1000
"""The number of rows that one transaction sweeps, about."""
_SWEEP: Final = tuple(
    f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE job = ? LIMIT ?)"  # noqa: S608 - constants
    for table in ("entries", "params")
)
_ENDED: Final = ", ".join(f"'{status.value}'" for status in JobStatus if status.terminal)
_PRUNED: Final = f"""
    {_JOBS} WHERE finished < :before AND status IN ({_ENDED}) AND status = coalesce(:status, status)
    ORDER BY finished LIMIT :limit
"""
_STATE: Final = 'SELECT job, fence, "end", frames FROM jobs WHERE job_id = ?'
_CHANGE: Final = """
    UPDATE jobs SET "end" = :end, frames = :frames, errors = errors + :errors, done = done + :done,
    status = coalesce(:status, status), stopped = coalesce(:stopped, stopped),
    reason = CASE WHEN :status IS NULL THEN reason ELSE :reason END,
    finished = CASE WHEN :status IS NULL THEN finished ELSE :finished END WHERE job = :job
"""
_ADD_ENTRY: Final = "INSERT INTO entries (job, first, count, kind, head, payload) VALUES (?, ?, ?, ?, ?, ?)"
_ADD_PARAMS: Final = "INSERT INTO params (job, frame, data) VALUES (?, ?, ?)"
_ANSWER: Final = "UPDATE requests SET answer = ? WHERE number = ? AND job = ?"
_REQUESTS: Final = """
    SELECT job_id, number, data FROM requests JOIN jobs USING (job) WHERE fence = ? AND answer IS NULL ORDER BY number
"""
_TAKE: Final = """
    UPDATE requests SET taken = ? WHERE number = ? AND answer IS NULL
    AND (SELECT fence FROM jobs WHERE jobs.job = requests.job) = ?
"""
_ANSWERED: Final = "SELECT number, sender FROM requests WHERE job = ? AND answer IS NOT NULL"
_END: Final = "DELETE FROM requests WHERE number = ?"


# writing


def commit(connection: sqlite3.Connection, batch: Batch, fence: int, path: str, check: Callable[[], None]) -> None:
    """Carry out a batch in one transaction: all of it, or nothing if it raises.

    Writes for jobs with another fence are left out. ``check`` raises if the transaction must not be committed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        done = Committed({}, [], [])
        _write(connection, batch, fence, path, done)
        for command in batch.commands:
            command.run(connection, done.ends)
        check()
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
    batch.committed = done


def _write(connection: sqlite3.Connection, batch: Batch, fence: int, path: str, done: Committed) -> None:
    def load(job_id: str) -> JobBeforeCommit | None:
        row = connection.execute(_STATE, (job_id,)).fetchone()
        return None if row is None else JobBeforeCommit(*row)

    entries: list[tuple[Any, ...]] = []
    params: list[tuple[Any, ...]] = []
    answers: list[tuple[Any, ...]] = []
    changes: list[dict[str, Any]] = []
    for change in batch.changes(load, fence, path, done):
        job, writes = change.key, change.writes
        entries += [(job, e.first, e.count, e.kind, e.head, e.payload) for e in writes.entries]
        params += [(job, number, data) for number, data in writes.params]
        answers += [(data, number, job) for number, data in writes.answers]
        changes.append(
            {
                "job": job,
                "end": change.end,
                "frames": change.frames,
                "errors": writes.errors,
                "done": writes.done,
                "status": None if writes.status is None else writes.status.value,
                "reason": writes.reason,
                "finished": writes.finished,
                "stopped": writes.stopped,
            }
        )
    for statement, rows in ((_ADD_ENTRY, entries), (_ADD_PARAMS, params), (_CHANGE, changes), (_ANSWER, answers)):
        if rows:
            connection.executemany(statement, rows)


class Ownership:
    """The transactions that create, take over and delete jobs, under the fencing number of one open store.

    The methods run in the writer's thread and, except :meth:`register`, inside its transaction. ``ends`` gets the jobs
    that they change, and the offset that each has reached.
    """

    def __init__(self, path: str, locks: Locks) -> None:
        self.locks = locks
        self.fence = 0
        """Its number; 0 if it could not be written yet: then the store can own nothing."""
        self._path = path

    def register(self, connection: sqlite3.Connection, address: bytes | None) -> None:
        """Take the next fencing number and its lock; remove owners that own nothing."""
        if self.fence:
            return  # another call has taken it meanwhile
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            idle = connection.execute(_IDLE).fetchall()
            gone = [row for row in idle if row[0] not in FENCES or not self.locks.held(row[0])]
            connection.executemany("DELETE FROM owners WHERE fence = ?", gone)
            fence = connection.execute("SELECT last_fence FROM meta").fetchone()[0] + 1
            while not self.locks.acquire(fence):  # held by one whose database was deleted, and its counter with it
                fence += 1
            try:
                connection.execute("UPDATE meta SET last_fence = ?", (fence,))
                row = (fence, os.getpid(), socket.gethostname(), address)
                connection.execute("INSERT INTO owners (fence, pid, host, address) VALUES (?, ?, ?, ?)", row)
                connection.execute("COMMIT")
            except BaseException:  # the number is not ours
                self.locks.release(fence)
                raise
        self.fence = fence

    def create(self, job: NewJob, connection: sqlite3.Connection, ends: dict[str, int]) -> bool:
        """Store a new job; False if its id is taken."""
        cursor = connection.execute(
            'INSERT INTO jobs (job_id, fence, created, status, "end", frames, stopped, errors, done, pipeline, label) '
            "VALUES (?, ?, ?, ?, 0, ?, ?, 0, 0, ?, ?) ON CONFLICT (job_id) DO NOTHING",
            (
                job.job_id,
                self.fence,
                job.created,
                JobStatus.SUBMITTED.value,
                len(job.params),
                job.stopped,
                storable(job.pipeline),
                storable(job.label),
            ),
        )
        if not cursor.rowcount:
            return False
        connection.execute(
            "INSERT INTO plans (job, plan, fingerprint, options) VALUES (?, ?, ?, ?)",
            (cursor.lastrowid, job.plan, job.fingerprint, job.options),
        )
        connection.executemany(_ADD_PARAMS, [(cursor.lastrowid, *numbered) for numbered in enumerate(job.params)])
        ends[job.job_id] = 0
        return True

    def take_over(self, job_id: str, connection: sqlite3.Connection, ends: dict[str, int]) -> StoredJob:
        """Make this store the owner of a job."""
        found = self._available(connection, job_id)
        self._check(connection, found)
        if found.status.terminal:
            connection.execute("UPDATE jobs SET fence = ? WHERE job_id = ?", (self.fence, job_id))
        else:  # it does not run yet: it must look neither interrupted nor running
            connection.execute(
                "UPDATE jobs SET fence = ?, status = ? WHERE job_id = ?",
                (self.fence, JobStatus.SUBMITTED.value, job_id),
            )
        found = self._available(connection, job_id)
        ends[job_id] = found.end
        return found

    def give_back(self, job_id: str, connection: sqlite3.Connection, _ends: dict[str, int]) -> None:
        """Undo :meth:`take_over`: the job is interrupted as before."""
        connection.execute(
            "UPDATE jobs SET status = ? WHERE job_id = ? AND fence = ? AND status = ?",
            (JobStatus.INTERRUPTED.value, job_id, self.fence, JobStatus.SUBMITTED.value),
        )

    def _check(self, connection: sqlite3.Connection, found: StoredJob) -> None:
        """Refuse a job that cannot go on because its rows do not belong together."""
        problem = found.damage
        if problem is None:
            number = connection.execute(_NUMBER, (found.job_id,)).fetchone()
            last = connection.execute(_LAST_EVENT, number).fetchone()
            end, frames = 0 if last is None else last[0], connection.execute(_PARAMS_STORED, number).fetchone()
            if end != found.end:
                problem = f"it has {found.end} events, but those that are stored end at {end}"
            elif frames != (found.frames, found.frames):
                problem = f"it has {found.frames} parameter sets, but {frames[0]} are stored"
        if problem is not None:
            raise StoreError(self._path, f"job {found.job_id} is damaged: {problem}", "Restore the file from a copy")

    def delete(self, job_id: str, connection: sqlite3.Connection, ends: dict[str, int]) -> None:
        """Delete a job."""
        found = find_job(connection, self.locks, self.fence, job_id)
        if found is None or not found.status.terminal:
            self._available(connection, job_id)
        _delete(connection, job_id)
        ends.pop(job_id, None)

    def prune(
        self,
        before: float,
        status: JobStatus | None,
        limit: int,
        connection: sqlite3.Connection,
        _ends: dict[str, int],
    ) -> list[StoredJob]:
        """Delete jobs that ended before a time; return them."""
        given = {"before": before, "status": None if status is None else status.value, "limit": limit}
        found = _load(connection, self.locks, self.fence, _PRUNED, given, set())
        for job in found:
            _delete(connection, job.job_id)
        return found

    def request(
        self, job_id: str, data: bytes, limit: int, connection: sqlite3.Connection, _ends: dict[str, int]
    ) -> tuple[int, int] | None:
        """Store a request; return its number, and the owner of the job."""
        found = find_job(connection, self.locks, self.fence, job_id)
        if found is None:
            raise JobNotFound(job_id)
        (job,) = connection.execute(_NUMBER, (job_id,)).fetchone()
        for number, sender in connection.execute(_ANSWERED, (job,)).fetchall():
            if sender not in FENCES or not self.locks.held(sender):
                connection.execute(_END, (number,))
        (count,) = connection.execute("SELECT count(*) FROM requests WHERE job = ?", (job,)).fetchone()
        if found.status.ended or count >= limit:
            return None
        row = (job, self.fence, data)
        number = connection.execute("INSERT INTO requests (job, sender, data) VALUES (?, ?, ?)", row).lastrowid
        return None if number is None else (number, found.owner.fence)

    def take_request(self, number: int, connection: sqlite3.Connection, _ends: dict[str, int]) -> bool:
        """Reserve a request for this store."""
        return bool(connection.execute(_TAKE, (self.fence, number, self.fence)).rowcount)

    def withdraw_request(self, job_id: str, number: int, connection: sqlite3.Connection, _ends: dict[str, int]) -> bool:
        """Delete a request that was not carried out, and will not be."""
        row = connection.execute("SELECT taken, answer FROM requests WHERE number = ?", (number,)).fetchone()
        found = find_job(connection, self.locks, self.fence, job_id)
        if row is not None and found is not None:
            taken, answer = row
            if answer is not None or (taken == found.owner.fence and not found.status.ended):
                return False
            if taken == found.owner.fence:  # it may be stopped, and go on
                fence = self._next_fence(connection)
                connection.execute("UPDATE jobs SET fence = ? WHERE job_id = ?", (fence, job_id))
                connection.execute("UPDATE meta SET last_fence = ?", (fence,))
        connection.execute(_END, (number,))
        return True

    def end_request(self, number: int, connection: sqlite3.Connection, _ends: dict[str, int]) -> None:
        """Delete a request."""
        connection.execute(_END, (number,))

    def _next_fence(self, connection: sqlite3.Connection) -> int:
        fence: int = connection.execute("SELECT last_fence FROM meta").fetchone()[0] + 1
        while self.locks.held(fence):  # by one whose database was deleted, and its counter with it
            fence += 1
        return fence

    def _available(self, connection: sqlite3.Connection, job_id: str) -> StoredJob:
        found = find_job(connection, self.locks, self.fence, job_id)
        if found is None:
            raise JobNotFound(job_id)
        if found.owner.alive and not found.owner.mine:
            raise JobOwned(job_id, found.owner.pid, found.owner.host)
        return found


def _delete(connection: sqlite3.Connection, job_id: str) -> None:
    number = connection.execute(_NUMBER, (job_id,)).fetchone()
    for statement in _DELETE:
        connection.execute(statement, number)


def sweep(connection: sqlite3.Connection, _ends: dict[str, int]) -> bool:
    """Delete some rows of jobs that were deleted; return whether there may be more."""
    left = _SWEPT
    for job in connection.execute("SELECT job FROM garbage LIMIT ?", (_SWEPT,)).fetchall():
        for statement in _SWEEP:
            left -= connection.execute(statement, (*job, max(left, 0))).rowcount
        if left <= 0:
            return True
        connection.execute("DELETE FROM garbage WHERE job = ?", job)
    return connection.execute("SELECT 1 FROM garbage LIMIT 1").fetchone() is not None


# reading


def find_job(connection: sqlite3.Connection, locks: Locks, fence: int, job_id: str) -> StoredJob | None:
    """Return a job, or None."""
    if not is_text(job_id):
        return None  # nothing can be stored under such an id
    found = _load(connection, locks, fence, _ONE, (job_id,), set())
    return found[0] if found else None


def list_jobs(
    connection: sqlite3.Connection, locks: Locks, fence: int, wanted: JobFilter, before: Position | None, limit: int
) -> list[StoredJob]:
    """Return the jobs that fit, the newest first."""
    given = arguments(wanted, before, limit)
    owners = [row[0] for row in connection.execute(_OWNERS)]
    dead = {number for number in owners if number in FENCES and not locks.held(number)}
    fitting = " AND ".join([_HAS_TIME, *conditions(wanted, before, ":{}", _CONTAINS)])
    query = f"{_JOBS} WHERE {fitting} ORDER BY created DESC, job_id DESC LIMIT :limit"
    found = _load(connection, locks, fence, query, given, dead)
    if limit < 0 or len(found) < limit:
        untimed = msgspec.structs.replace(wanted, since=None, until=None)
        fitting = " AND ".join([f"({_HAS_TIME}) IS NOT TRUE", *conditions(untimed, None, ":{}", _CONTAINS)])
        damaged = _load(connection, locks, fence, f"{_JOBS} WHERE {fitting}", given, dead)
        damaged = [job for job in damaged if before is None or (job.created, job.job_id) < before]
        damaged.sort(key=lambda job: job.job_id, reverse=True)
        found += damaged if limit < 0 else damaged[: limit - len(found)]
    return found


def _load(
    connection: sqlite3.Connection, locks: Locks, fence: int, query: str, arguments: Any, dead: set[int]
) -> list[StoredJob]:
    while True:
        texts: dict[bytes, bytes] = {}  # many jobs have the same plan and options: one copy of each is enough
        rows = []
        for row in connection.execute(query, arguments):
            values = list(row)
            for at in (1, 3):
                if isinstance(values[at], bytes):
                    values[at] = texts.setdefault(values[at], values[at])
            rows.append(values)
        # An owner may have ended its jobs and itself since the rows were read. Read behind its death, they are final.
        fences = {row[_FENCE] for row in rows if isinstance(row[_FENCE], int) and row[_FENCE] in FENCES} - dead
        gone = {number for number in fences if not locks.held(number)}
        if not gone:
            return [stored_job(row, row[_FENCE] in fences, fence) for row in rows]
        dead |= gone


def _number(connection: sqlite3.Connection, job_id: str) -> int | None:
    row = connection.execute(_NUMBER, (job_id,)).fetchone() if is_text(job_id) else None
    return None if row is None else row[0]


def read_entries(connection: sqlite3.Connection, job_id: str, start: int, max_bytes: int) -> list[Entry]:
    """Return the entry that holds an offset and those behind it, at least one."""
    job = _number(connection, job_id)
    if not is_number(start):
        return []
    found = connection.execute(_ENTRIES, (job, job, start))
    try:
        return page(job_id, found, start, max_bytes)
    finally:
        found.close()  # an open cursor would keep the log of writes from being emptied


def read_heads(connection: sqlite3.Connection, job_id: str, start: int) -> list[Entry]:
    """Return the next entries that begin at an offset or behind it, without their payloads."""
    rows = connection.execute(_HEADS, (_number(connection, job_id), start)).fetchall()
    return [entry_of(job_id, None, (*row, b"")) for row in rows]


def read_params(connection: sqlite3.Connection, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
    """Return parameter sets by their numbers, as far as they are stored."""
    job = _number(connection, job_id)
    found: dict[int, bytes] = {}
    for frame in frames:  # one by one: a statement takes a limited number of variables
        row = connection.execute(_PARAMS, (job, frame)).fetchone()
        if row is not None:
            found[frame] = params_of(job_id, frame, row[0])
    return found


def read_requests(connection: sqlite3.Connection, fence: int) -> list[Request]:
    """Return the requests for the jobs of an owner that have no answer, the oldest first."""
    return [request_of(row) for row in connection.execute(_REQUESTS, (fence,)).fetchall()]


def read_answer(connection: sqlite3.Connection, number: int) -> bytes | None:
    """Return the answer to a request, if it has one."""
    row = connection.execute("SELECT answer FROM requests WHERE number = ?", (number,)).fetchone()
    return row[0] if row is not None and isinstance(row[0], bytes) else None


def owner_address(connection: sqlite3.Connection, fence: int) -> bytes | None:
    """Return the address at which an owner announces its commits."""
    row = connection.execute(_ADDRESS, (fence,)).fetchone()
    return row[0] if row is not None and isinstance(row[0], bytes) else None
