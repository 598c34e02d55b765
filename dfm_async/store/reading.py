"""The queries: what a store gives back of what it holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, Owner, StoredJob
from dfm_async.store.liveness import Locks

__all__ = ["all_jobs", "find_job", "read_entries", "read_heads", "read_params"]

_JOBS: Final = """
    SELECT job_id, plan, fingerprint, options, created, finished, status, reason, "end", frames, stopped, jobs.fence,
    pid, host FROM jobs JOIN plans USING (job) LEFT JOIN owners ON owners.fence = jobs.fence
"""
_STATUS, _STOPPED, _FENCE, _PID, _HOST = 6, 10, 11, 12, 13
_ONE: Final = f"{_JOBS} WHERE job_id = ?"
_ALL: Final = f"{_JOBS} ORDER BY job"
_NUMBER: Final = "SELECT job FROM jobs WHERE job_id = ?"
_ENTRIES: Final = """
    SELECT first, count, kind, head, payload FROM entries WHERE job = ?1 AND first >= (
        SELECT first FROM entries WHERE job = ?1 AND first <= ?2 ORDER BY first DESC LIMIT 1)
    ORDER BY first
"""
_HEADS: Final = "SELECT first, count, kind, head FROM entries WHERE job = ? AND first >= ? ORDER BY first LIMIT 1000"
_PARAMS: Final = "SELECT data FROM params WHERE job = ? AND frame = ?"
_OPEN: Final = frozenset({JobStatus.SUBMITTED, JobStatus.RUNNING})


def find_job(connection: sqlite3.Connection, locks: Locks, fence: int, job_id: str) -> StoredJob | None:
    """Gives a job, or None."""
    found = _load(connection, locks, fence, _ONE, (job_id,))
    return found[0] if found else None


def all_jobs(connection: sqlite3.Connection, locks: Locks, fence: int) -> list[StoredJob]:
    """Gives all jobs, in the order in which they were created."""
    return _load(connection, locks, fence, _ALL, ())


def _load(
    connection: sqlite3.Connection, locks: Locks, fence: int, query: str, arguments: tuple[str, ...]
) -> list[StoredJob]:
    dead: set[int] = set()
    while True:
        rows = connection.execute(query, arguments).fetchall()
        # An owner may have ended its jobs and itself since the rows were read. Read behind its death, they are final.
        fences = {row[_FENCE] for row in rows} - dead
        gone = {number for number in fences if not locks.held(number)}
        if not gone:
            return [_job(row, row[_FENCE] not in dead, fence) for row in rows]
        dead |= gone


def _job(row: tuple[Any, ...], alive: bool, fence: int) -> StoredJob:
    status = JobStatus(row[_STATUS])
    if status in _OPEN and not alive:
        status = JobStatus.INTERRUPTED
    owner = Owner(row[_FENCE], row[_PID] or 0, row[_HOST] or "", alive, row[_FENCE] == fence)
    values = (*row[:_STATUS], status, *row[_STATUS + 1 : _STOPPED], bool(row[_STOPPED]), owner)
    return StoredJob(*values)


def _number(connection: sqlite3.Connection, job_id: str) -> int | None:
    row = connection.execute(_NUMBER, (job_id,)).fetchone()
    return None if row is None else row[0]


def read_entries(connection: sqlite3.Connection, job_id: str, start: int, max_bytes: int) -> list[Entry]:
    """Gives the entry that holds an offset and those behind it, at least one."""
    found: list[Entry] = []
    size = 0
    rows = connection.execute(_ENTRIES, (_number(connection, job_id), start))
    try:
        for row in rows:
            if row[0] + row[1] <= start:
                continue  # the last entry, and the offset lies behind it
            size += len(row[3]) + len(row[4])
            if found and size > max_bytes:
                break
            found.append(Entry(*row))
    finally:
        rows.close()  # an open cursor would keep the log of writes from being emptied
    return found


def read_heads(connection: sqlite3.Connection, job_id: str, start: int) -> list[Entry]:
    """Gives the next entries that begin at an offset or behind it, without their payloads."""
    rows = connection.execute(_HEADS, (_number(connection, job_id), start)).fetchall()
    return [Entry(first, count, kind, head, b"") for first, count, kind, head in rows]


def read_params(connection: sqlite3.Connection, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
    """Gives parameter sets by their numbers, as far as they are stored."""
    job = _number(connection, job_id)
    found: dict[int, bytes] = {}
    for frame in frames:  # one by one: a statement takes a limited number of variables
        row = connection.execute(_PARAMS, (job, frame)).fetchone()
        if row is not None:
            found[frame] = row[0]
    return found
