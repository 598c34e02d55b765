"""The queries: what a store gives back of what it holds.

A file may be damaged, or come from anywhere: every value is checked before it is used. A row of ``jobs`` that cannot be
read is still listed, with what is wrong with it; other rows raise :class:`~dfm_async.store.database.Damage`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, Owner, StoredJob
from dfm_async.store.database import Damage
from dfm_async.store.liveness import Locks
from dfm_async.store.schema import FENCES

__all__ = ["LARGEST_NUMBER", "find_job", "newest_jobs", "owner_address", "read_entries", "read_heads", "read_params"]

LARGEST_NUMBER: Final = 1 << 53
"""No offset and no count reaches this."""
_LAST_TIME: Final = 253_370_764_800.0
"""The beginning of the year 9999: later times cannot be shown in every time zone."""
_STATES: Final = frozenset(status.value for status in JobStatus) - {JobStatus.UNKNOWN.value}
_OPEN: Final = frozenset({JobStatus.SUBMITTED, JobStatus.RUNNING})

_JOBS: Final = """
    SELECT job_id, plan, fingerprint, options, created, finished, status, reason, "end", frames, stopped, errors, done,
    jobs.fence, pid, host FROM jobs LEFT JOIN plans USING (job) LEFT JOIN owners ON owners.fence = jobs.fence
"""
_FENCE: Final = 13
_ONE: Final = f"{_JOBS} WHERE job_id = ?"
_NEWEST: Final = f"{_JOBS} ORDER BY job DESC LIMIT ?"
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


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or value.encode("utf-8", "replace").decode() == value)


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < _LAST_TIME


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < LARGEST_NUMBER


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_CHECKS: Final[tuple[tuple[str, Callable[[Any], bool], Any], ...]] = (
    ("job_id", lambda value: _is_text(value) and bool(value), ""),
    ("plan", _is_bytes, b""),
    ("fingerprint", _or_null(_is_text), None),
    ("options", _is_bytes, b""),
    ("created", _is_time, 0.0),
    ("finished", _or_null(_is_time), None),
    ("status", lambda value: isinstance(value, str) and value in _STATES, JobStatus.INTERRUPTED.value),
    ("reason", _or_null(_is_text), None),
    ("end", _is_number, 0),
    ("frames", _is_number, 0),
    ("stopped", _is_number, 0),
    ("errors", _or_null(_is_number), None),
    ("done", _or_null(_is_number), None),
    ("fence", lambda value: isinstance(value, int) and value in FENCES, 0),
)
"""The columns of a job: what each must hold, and what stands in its place if it does not."""


def find_job(connection: sqlite3.Connection, locks: Locks, fence: int, job_id: str) -> StoredJob | None:
    """Gives a job, or None."""
    if not _is_text(job_id):
        return None  # nothing can be stored under such an id
    found = _load(connection, locks, fence, _ONE, (job_id,), set())
    return found[0] if found else None


def newest_jobs(connection: sqlite3.Connection, locks: Locks, fence: int, limit: int) -> list[StoredJob]:
    """Gives the newest jobs, in the order in which they were created."""
    owners = [row[0] for row in connection.execute(_OWNERS)]
    dead = {number for number in owners if number in FENCES and not locks.held(number)}
    return _load(connection, locks, fence, _NEWEST, (limit,), dead)[::-1]


def _load(
    connection: sqlite3.Connection, locks: Locks, fence: int, query: str, arguments: tuple[Any, ...], dead: set[int]
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
            return [_job(row, row[_FENCE] in fences, fence) for row in rows]
        dead |= gone


def _job(row: list[Any], alive: bool, fence: int) -> StoredJob:
    damage = None
    if not _CHECKS[0][1](row[0]):
        damage = f"column 'job_id' cannot be read ({_shown(row[0])})"
        raw = row[0] if isinstance(row[0], bytes) else str(row[0]).encode("utf-8", "surrogateescape")
        row[0] = raw.decode("utf-8", "backslashreplace")
    for at, (column, check, instead) in enumerate(_CHECKS[1:], 1):
        if not check(row[at]):
            damage = damage or f"column {column!r} cannot be read ({_shown(row[at])})"
            row[at] = instead
    *values, found_fence, pid, host = row
    status = values[6] = JobStatus(values[6])
    if status in _OPEN:
        values[5] = values[7] = None  # those of an interruption that is over
        if not alive:
            values[6] = JobStatus.INTERRUPTED
    values[10] = bool(values[10])
    owner = Owner(
        found_fence,
        pid if isinstance(pid, int) else 0,
        host if _is_text(host) else "",
        alive,
        alive and found_fence == fence,
    )
    return StoredJob(*[*values, owner, damage])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(connection: sqlite3.Connection, job_id: str) -> int | None:
    row = connection.execute(_NUMBER, (job_id,)).fetchone() if _is_text(job_id) else None
    return None if row is None else row[0]


def _entry(job_id: str, expected: int | None, row: tuple[Any, ...]) -> Entry:
    first, count, kind, head, payload = row
    whole = _is_number(first) and _is_number(count) and count and first + count < LARGEST_NUMBER
    if not whole or not _is_number(kind) or not isinstance(head, bytes) or not isinstance(payload, bytes):
        raise Damage(f"job {job_id}: a row of its events cannot be read ({_shown(row)})")
    if expected is not None and first != expected:
        raise Damage(f"job {job_id}: its events {expected} to {first - 1} are missing")
    return Entry(first, count, kind, head, payload)


def read_entries(connection: sqlite3.Connection, job_id: str, start: int, max_bytes: int) -> list[Entry]:
    """Gives the entry that holds an offset and those behind it, at least one."""
    found: list[Entry] = []
    size = 0
    job = _number(connection, job_id)
    if not _is_number(start):
        return []
    rows = connection.execute(_ENTRIES, (job, job, start))
    try:
        expected = None
        for row in rows:
            entry = _entry(job_id, expected, row)
            expected = entry.first + entry.count
            if expected <= start:
                continue  # the last entry, or one before a gap
            if entry.first > start and not found:
                raise Damage(f"job {job_id}: its events {start} to {entry.first - 1} are missing")
            size += len(entry.head) + len(entry.payload)
            if found and size > max_bytes:
                break
            found.append(entry)
    finally:
        rows.close()  # an open cursor would keep the log of writes from being emptied
    return found


def read_heads(connection: sqlite3.Connection, job_id: str, start: int) -> list[Entry]:
    """Gives the next entries that begin at an offset or behind it, without their payloads."""
    rows = connection.execute(_HEADS, (_number(connection, job_id), start)).fetchall()
    return [_entry(job_id, None, (*row, b"")) for row in rows]


def read_params(connection: sqlite3.Connection, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
    """Gives parameter sets by their numbers, as far as they are stored."""
    job = _number(connection, job_id)
    found: dict[int, bytes] = {}
    for frame in frames:  # one by one: a statement takes a limited number of variables
        row = connection.execute(_PARAMS, (job, frame)).fetchone()
        if row is not None:
            if not isinstance(row[0], bytes):
                raise Damage(f"job {job_id}: parameter set {frame} cannot be read ({_shown(row[0])})")
            found[frame] = row[0]
    return found


def owner_address(connection: sqlite3.Connection, fence: int) -> bytes | None:
    """Gives the address at which an owner announces its commits."""
    row = connection.execute(_ADDRESS, (fence,)).fetchone()
    return row[0] if row is not None and isinstance(row[0], bytes) else None
