"""Who owns which job: the transactions that create, take over and delete jobs."""

from __future__ import annotations

import os
import socket
import sqlite3
from typing import Final

from dfm_async.errors import JobNotFound, JobOwned, StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store.base import NewJob, StoredJob
from dfm_async.store.liveness import Locks
from dfm_async.store.reading import find_job
from dfm_async.store.schema import FENCES

__all__ = ["Ownership"]

_IDLE: Final = "SELECT fence FROM owners WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.fence = owners.fence)"
_LAST_EVENT: Final = "SELECT first + count FROM entries WHERE job = ? ORDER BY first DESC LIMIT 1"
_PARAMS: Final = "SELECT count(*), coalesce(max(frame) + 1, 0) FROM params WHERE job = ? AND frame >= 0"
_DELETE: Final = tuple(f"DELETE FROM {table} WHERE job = ?" for table in ("entries", "params", "plans", "jobs"))  # noqa: S608 - names of ours


class Ownership:
    """What one open store owns, under its fencing number.

    The methods run in the writer's thread; except :meth:`register`, inside its transaction. ``ends`` gets the jobs
    that they touch, and the offset that each has reached.
    """

    def __init__(self, path: str, locks: Locks) -> None:
        self.locks = locks
        self.fence = 0
        """Its number; 0 if it could not be written yet, so that nothing can be owned."""
        self._path = path

    def register(self, connection: sqlite3.Connection, address: bytes | None) -> None:
        """Takes the next fencing number and the lock that belongs to it; forgets owners that own nothing."""
        if self.fence:
            return  # somebody else has asked for it meanwhile
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
        """Stores a new job; False if its id is taken."""
        cursor = connection.execute(
            'INSERT INTO jobs (job_id, fence, created, status, "end", frames, stopped, errors, done) '
            "VALUES (?, ?, ?, ?, 0, ?, ?, 0, 0) ON CONFLICT (job_id) DO NOTHING",
            (job.job_id, self.fence, job.created, JobStatus.SUBMITTED.value, len(job.params), job.stopped),
        )
        if not cursor.rowcount:
            return False
        connection.execute(
            "INSERT INTO plans (job, plan, fingerprint, options) VALUES (?, ?, ?, ?)",
            (cursor.lastrowid, job.plan, job.fingerprint, job.options),
        )
        connection.executemany(
            "INSERT INTO params (job, frame, data) VALUES (?, ?, ?)",
            [(cursor.lastrowid, frame, data) for frame, data in enumerate(job.params)],
        )
        ends[job.job_id] = 0
        return True

    def take_over(self, job_id: str, connection: sqlite3.Connection, ends: dict[str, int]) -> StoredJob:
        """Makes a job ours."""
        found = self._available(connection, job_id)
        self._check(connection, found)
        if found.status.terminal:
            connection.execute("UPDATE jobs SET fence = ? WHERE job_id = ?", (self.fence, job_id))
        else:  # it is ours, and not under way yet: nobody must take it for interrupted, or for running
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
            number = connection.execute("SELECT job FROM jobs WHERE job_id = ?", (found.job_id,)).fetchone()
            last = connection.execute(_LAST_EVENT, number).fetchone()
            end, frames = 0 if last is None else last[0], connection.execute(_PARAMS, number).fetchone()
            if end != found.end:
                problem = f"it has {found.end} events, but those that are stored end at {end}"
            elif frames != (found.frames, found.frames):
                problem = f"it has {found.frames} parameter sets, but {frames[0]} are stored"
        if problem is not None:
            raise StoreError(self._path, f"job {found.job_id} is damaged: {problem}", "Restore the file from a copy")

    def delete(self, job_id: str, connection: sqlite3.Connection, ends: dict[str, int]) -> None:
        """Deletes a job."""
        self._available(connection, job_id)
        number = connection.execute("SELECT job FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        for statement in _DELETE:
            connection.execute(statement, number)
        ends.pop(job_id, None)

    def _available(self, connection: sqlite3.Connection, job_id: str) -> StoredJob:
        found = find_job(connection, self.locks, self.fence, job_id)
        if found is None:
            raise JobNotFound(job_id)
        if found.owner.alive and not found.owner.mine:
            raise JobOwned(job_id, found.owner.pid, found.owner.host)
        return found
