"""The tables, transactions and queries of a store in PostgreSQL.

A batch takes two round trips, however many jobs it has: one that locks the rows of its jobs, and one that writes. The
first decides which jobs the store still owns; without it, a batch would be at most a tenth faster. Results are arrays,
which go with the rest of the batch; values are sent and read in binary form. COPY has the same throughput for batches
of 1,000 results, but is a quarter slower for a single one: it cannot be part of a pipeline, so it takes two round trips
more.

All times are those of the server, so the clocks of the owners do not matter.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from psycopg import AsyncConnection, Error

from dfm_async.errors import JobNotFound, JobOwned, StoreError
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, NewJob, Position, Request, StoredJob
from dfm_async.store.batching import Batch, Committed, JobBeforeCommit, JobChange
from dfm_async.store.rows import (
    JOB,
    OPEN,
    VERSION,
    arguments,
    conditions,
    entry_of,
    is_number,
    is_text,
    newer_format,
    page,
    params_of,
    request_of,
    storable,
    stored_job,
)

Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]

_MARK: Final = "jobs of dfm_async"
"""The comment of the schema: distinguishes stores from other schemas of the same name."""
_CHUNK: Final = 16 << 20
"""About the number of bytes that one statement inserts."""
_PAGE: Final = 1000
"""How many rows one read examines at most."""
_PAYLOAD: Final = 7900
"""The number of bytes of jobs in a notification. PostgreSQL refuses payloads of 8000 bytes."""

_ALIVE: Final = "coalesce(owners.seen + make_interval(secs => owners.lease) > clock_timestamp(), false)"
_LEFT: Final = "SELECT extract(epoch FROM seen - clock_timestamp()) + lease FROM owners WHERE fence = %s"
_DEAD: Final = (
    f"SELECT DISTINCT jobs.fence FROM jobs LEFT JOIN owners USING (fence) "  # noqa: S608 - constants
    f"WHERE status IN ({OPEN}) AND NOT {_ALIVE}"
)
_JOBS: Final = (
    f"SELECT {JOB}, {_ALIVE} FROM jobs LEFT JOIN plans USING (job) LEFT JOIN owners ON owners.fence = jobs.fence"  # noqa: S608 - a constant
)
_ONE: Final = f"{_JOBS} WHERE job_id = %s"
_PRUNED: Final = f"""
    {_JOBS} WHERE jobs.job IN (
        SELECT job FROM jobs WHERE finished < %s AND status = ANY(%s) ORDER BY finished LIMIT %s FOR UPDATE SKIP LOCKED
    )
"""  # noqa: S608 - constants
_LOCK: Final = "SELECT 1 FROM jobs WHERE job_id = %s FOR UPDATE"
_ID: Final = 'job_id COLLATE "C"'
"""The id of a job, in the order of its code points."""
_CONTAINS: Final = 'strpos(lower(({text}) COLLATE "C"), {word}) > 0'
_STATES: Final = 'SELECT job_id, job, fence, "end", frames FROM jobs WHERE job_id = ANY(%s) ORDER BY job FOR UPDATE'
_SEEN: Final = """
    INSERT INTO owners (fence, pid, host, lease, batch, seen) VALUES (%s, %s, %s, %s, %s, clock_timestamp())
    ON CONFLICT (fence) DO UPDATE SET seen = excluded.seen, batch = coalesce(excluded.batch, owners.batch)
"""
_ADD_ENTRIES: Final = """
    INSERT INTO entries (job, first, count, kind, head, payload)
    SELECT * FROM unnest(%b::bigint[], %b::bigint[], %b::bigint[], %b::int[], %b::bytea[], %b::bytea[])
"""
_ADD_PARAMS: Final = (
    "INSERT INTO params (job, frame, data) SELECT * FROM unnest(%b::bigint[], %b::bigint[], %b::bytea[])"
)
_CHANGE: Final = """
    UPDATE jobs SET "end" = new."end", frames = new.frames, errors = jobs.errors + new.errors,
    done = jobs.done + new.done, status = coalesce(new.status, jobs.status),
    stopped = coalesce(new.stopped, jobs.stopped),
    reason = CASE WHEN new.status IS NULL THEN jobs.reason ELSE new.reason END,
    finished = CASE WHEN new.status IS NULL THEN jobs.finished ELSE new.finished END
    FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::text[],
    %s::float8[], %s::boolean[]) AS new (job, "end", frames, errors, done, status, reason, finished, stopped)
    WHERE jobs.job = new.job
"""
_ENTRIES: Final = """
    SELECT first, count, kind, head, payload FROM (
        SELECT *, sum(octet_length(head) + octet_length(payload)) OVER (ORDER BY first) AS total FROM (
            SELECT first, count, kind, head, payload FROM entries
            WHERE job = (SELECT job FROM jobs WHERE job_id = %(job)s) AND first >= coalesce((
                SELECT max(first) FROM entries
                WHERE job = (SELECT job FROM jobs WHERE job_id = %(job)s) AND first <= %(start)s), %(start)s)
            ORDER BY first LIMIT %(rows)s
        ) AS next
    ) AS sized WHERE total - octet_length(head) - octet_length(payload) <= %(bytes)s ORDER BY first
"""
_HEADS: Final = """
    SELECT first, count, kind, head, ''::bytea FROM entries
    WHERE job = (SELECT job FROM jobs WHERE job_id = %s) AND first >= %s ORDER BY first LIMIT %s
"""
_PARAMS: Final = """
    SELECT frame, data FROM params WHERE job = (SELECT job FROM jobs WHERE job_id = %s) AND frame = ANY(%s::bigint[])
"""
_LAST_EVENT: Final = """
    SELECT coalesce(max(first + count), 0) FROM entries WHERE job = (SELECT job FROM jobs WHERE job_id = %s)
    AND first = (SELECT max(first) FROM entries WHERE job = (SELECT job FROM jobs WHERE job_id = %s))
"""
_ANSWER: Final = """
    UPDATE requests SET answer = new.answer
    FROM unnest(%b::bigint[], %b::bigint[], %b::bytea[]) AS new (job, number, answer)
    WHERE requests.number = new.number AND requests.job = new.job
"""
_REQUESTS: Final = """
    SELECT job_id, number, data FROM requests JOIN jobs USING (job) WHERE fence = %s AND answer IS NULL ORDER BY number
"""
_TAKE: Final = """
    UPDATE requests SET taken = jobs.fence FROM jobs
    WHERE number = %s AND answer IS NULL AND jobs.job = requests.job AND jobs.fence = %s RETURNING number
"""
_END_UNREAD: Final = f"""
    DELETE FROM requests USING jobs WHERE jobs.job = requests.job AND job_id = %s AND answer IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM owners WHERE fence = sender AND {_ALIVE})
"""  # noqa: S608 - constants
_ADD_REQUEST: Final = """
    INSERT INTO requests (job, sender, data) SELECT job, %(sender)s, %(data)s FROM jobs WHERE job_id = %(job)s
    AND (SELECT count(*) FROM requests WHERE requests.job = jobs.job) < %(limit)s RETURNING number
"""
_END: Final = "DELETE FROM requests WHERE number = %s"
_PARAMS_STORED: Final = """
    SELECT count(*), coalesce(max(frame) + 1, 0) FROM params WHERE job = (SELECT job FROM jobs WHERE job_id = %s)
"""

_INDEXES: Final = {
    "jobs_by_time": f"(created, {_ID})",
    "jobs_by_pipeline": f"(pipeline, created, {_ID})",
    "jobs_by_label": f"(label, created, {_ID}) WHERE label IS NOT NULL",
    "jobs_not_finished": f"(created, {_ID}) WHERE status <> 'finished'",
}
"""What lists of jobs are read with."""
_TABLES: Final = (
    "CREATE TABLE meta (version integer NOT NULL)",
    """
    CREATE TABLE owners (
        fence bigint PRIMARY KEY, pid integer NOT NULL, host text NOT NULL, lease float8 NOT NULL,
        seen timestamptz NOT NULL, batch bigint
    ) WITH (fillfactor = 50)
    """,
    "CREATE SEQUENCE fences",
    """
    CREATE TABLE jobs (
        job bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id text NOT NULL UNIQUE, fence bigint NOT NULL,
        created float8 NOT NULL, finished float8, status text NOT NULL, reason text, "end" bigint NOT NULL,
        frames bigint NOT NULL, stopped boolean NOT NULL, errors bigint NOT NULL, done bigint NOT NULL,
        pipeline text, label text
    ) WITH (fillfactor = 70)
    """,
    "CREATE INDEX jobs_by_fence ON jobs (fence)",
    """
    CREATE TABLE plans (
        job bigint PRIMARY KEY REFERENCES jobs ON DELETE CASCADE, plan bytea NOT NULL, fingerprint text,
        options bytea NOT NULL
    )
    """,
    """
    CREATE TABLE params (
        job bigint NOT NULL REFERENCES jobs ON DELETE CASCADE, frame bigint NOT NULL, data bytea NOT NULL,
        PRIMARY KEY (job, frame)
    )
    """,
    """
    CREATE TABLE entries (
        job bigint NOT NULL REFERENCES jobs ON DELETE CASCADE, first bigint NOT NULL, count bigint NOT NULL,
        kind integer NOT NULL, head bytea NOT NULL, payload bytea NOT NULL, PRIMARY KEY (job, first)
    )
    """,
    # Compressing costs more time than it saves; without it, sizes are known without reading the values.
    "ALTER TABLE entries ALTER COLUMN payload SET STORAGE EXTERNAL",
    "ALTER TABLE params ALTER COLUMN data SET STORAGE EXTERNAL",
)
_MIGRATIONS: Final = {
    2: (
        # The first stores of version 1 have neither.
        "ALTER TABLE jobs ADD COLUMN IF NOT EXISTS pipeline text, ADD COLUMN IF NOT EXISTS label text",
        *(f"CREATE INDEX IF NOT EXISTS {name} ON jobs {columns}" for name, columns in _INDEXES.items()),
        """
        CREATE TABLE requests (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            job bigint NOT NULL REFERENCES jobs ON DELETE CASCADE,
            sender bigint NOT NULL, taken bigint, data bytea NOT NULL, answer bytea
        )
        """,
        "CREATE INDEX requests_by_job ON requests (job)",
        "CREATE INDEX jobs_by_end ON jobs (finished) WHERE finished IS NOT NULL",
        f"CREATE INDEX jobs_open ON jobs (fence) WHERE status IN ({OPEN})",
    ),
}
"""What makes a store of each version from one of the version before it. A new store begins with version 1."""


# the format


async def prepare(connection: Connection, schema: str, path: str) -> int | None:
    """Check that the schema is a store of this version; migrate an older one, and create it if it does not exist.

    Returns:
        the older version that was migrated, if it was one.

    Raises:
        StoreError: it is not a store, or has a newer version.
    """
    if await _version(connection, schema, path) == VERSION:
        return None
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (_MARK,))
        version = found = await _version(connection, schema, path)  # another process may have been faster
        if version is None:
            version = 1
            await connection.execute(f"CREATE SCHEMA {schema}".encode())
            await connection.execute(f"COMMENT ON SCHEMA {schema} IS '{_MARK}'".encode())
            for statement in _TABLES:
                await connection.execute(statement.encode())
            await connection.execute("INSERT INTO meta (version) VALUES (1)")
        for following in range(version + 1, VERSION + 1):
            for statement in _MIGRATIONS[following]:
                await connection.execute(statement.encode())
        await connection.execute("UPDATE meta SET version = %s", (VERSION,))
    return None if found == VERSION else found


async def _version(connection: Connection, schema: str, path: str) -> int | None:
    """Return the version of a store; None if the schema does not exist.

    Raises:
        StoreError: it is not a store, or has a newer version.
    """
    comment = await _row(
        connection, "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s", (schema,)
    )
    if comment is None:
        return None
    if comment[0] != _MARK:
        advice = "Pass the schema of a store, or of one that does not exist yet: PostgresStore(url, schema=...)"
        raise StoreError(path, f"the schema {schema!r} exists, but is not a store of jobs", advice)
    row = await _row(connection, "SELECT version FROM meta", ())
    if row is None or row[0] < 1:
        raise StoreError(path, f"its table 'meta' holds {row!r}, not a version", "Restore it from a backup")
    version: int = row[0]
    if version > VERSION:
        raise newer_format(path, version, VERSION)
    return version


def _payload(jobs: Iterable[str]) -> str:
    """Return the ids of jobs for a notification; empty if they are too large for one."""
    data = msgspec.json.encode(list(jobs))
    return data.decode() if len(data) <= _PAYLOAD else ""


def jobs_of(payload: str) -> list[str] | None:
    """Return the ids of jobs from a notification; None if it has none."""
    try:
        return msgspec.json.decode(payload, type=list[str])
    except ValueError:
        return None


async def _row(connection: Connection, query: str, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    return await (await connection.execute(query.encode(), arguments)).fetchone()


# writing


class Ownership:
    """The transactions of one open store, under its fencing number.

    ``lease``: for how many seconds the store owns its jobs after it was seen for the last time.
    """

    def __init__(self, path: str, channel: str, lease: float) -> None:
        self.fence = 0
        self._path = path
        self._channel = channel
        self._lease = lease

    async def register(self, connection: Connection) -> None:
        """Take the next fencing number; remove owners that own nothing."""
        async with connection.transaction():
            idle = "NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.fence = owners.fence)"
            await connection.execute(f"DELETE FROM owners WHERE NOT {_ALIVE} AND {idle}".encode())  # noqa: S608 - constants
            row = await _row(connection, "SELECT nextval('fences')", ())
            assert row is not None  # noqa: S101 - it has always a next value
            self.fence = row[0]
            await self.renew(connection)

    async def renew(self, connection: Connection, batch: int | None = None) -> None:
        """Note that the store is alive, and the number of the batch that is being committed."""
        await connection.execute(_SEEN, (self.fence, os.getpid(), socket.gethostname(), self._lease, batch))

    async def leave(self, connection: Connection) -> None:
        """Note that the store owns nothing any longer, and notify its followers of the end."""
        await connection.execute("UPDATE owners SET seen = 'epoch' WHERE fence = %s", (self.fence,))
        await self._notify(connection, "end")

    async def _notify(self, connection: Connection, what: str) -> None:
        await self._notify_of(connection, self.fence, what)

    async def _notify_of(self, connection: Connection, fence: int, what: str) -> None:
        await connection.execute("SELECT pg_notify(%s, %s)", (self._channel, f"{fence} {what}"))

    async def committed(self, connection: Connection, number: int) -> bool:
        """Return whether the batch with a number was committed, if it is the last one that was tried."""
        row = await _row(connection, "SELECT batch FROM owners WHERE fence = %s", (self.fence,))
        return row == (number,)

    async def commit(self, connection: Connection, batch: Batch, number: int, done: Committed) -> None:
        """Carry out a batch in one transaction: all of it, or nothing if it raises.

        Writes for jobs with another fence are left out. ``done`` gets the outcome.
        """
        failure: Exception | None = None
        try:
            async with connection.pipeline():  # what needs no answer of the server goes with the next that does
                try:
                    await self._carry_out(connection, batch, number, done)
                except Exception as error:  # noqa: BLE001 - raised below: the end of the pipeline would log another one
                    failure = error
        except Error as error:
            failure = failure or error
        if failure is not None:
            if not connection.closed:
                await connection.rollback()
            raise failure

    async def _carry_out(self, connection: Connection, batch: Batch, number: int, done: Committed) -> None:
        await connection.execute("BEGIN")
        await self.renew(connection, number)
        about = {command.job_id for command in batch.commands if command.job_id is not None}
        if batch.writes or about:
            await self._write(connection, batch, about, done)
        for command in batch.commands:
            await command.run_async(connection, done.ends)
        if done.ends:
            await self._notify(connection, f"commit {_payload(done.ends)}")
        await connection.execute("COMMIT")

    async def _write(self, connection: Connection, batch: Batch, about: set[str], done: Committed) -> None:
        # All rows that are locked at all, in one order: two stores that lock jobs of each other must not deadlock.
        locked = [job_id for job_id in about.union(batch.writes) if is_storable(job_id)]
        rows = await (await connection.execute(_STATES, (locked,))).fetchall()
        states = {job_id: JobBeforeCommit(*state) for job_id, *state in rows}
        changes = list(batch.changes(states.get, self.fence, self._path, done))
        for entries in _chunks([(change.key, entry) for change in changes for entry in change.writes.entries]):
            columns = [
                [job for job, _ in entries],
                *([getattr(entry, name) for _, entry in entries] for name in Entry.__struct_fields__),
            ]
            await connection.execute(_ADD_ENTRIES, columns)
        for chunk in _params_chunks(changes):
            await connection.execute(_ADD_PARAMS, [list(column) for column in zip(*chunk, strict=True)])
        answers = [(change.key, number, data) for change in changes for number, data in change.writes.answers]
        if answers:
            await connection.execute(_ANSWER, [list(column) for column in zip(*answers, strict=True)])
        if changes:
            await connection.execute(_CHANGE, [list(column) for column in zip(*map(_changed, changes), strict=True)])

    async def create(self, job: NewJob, connection: Connection, ends: dict[str, int]) -> bool:
        """Store a new job; False if its id is taken."""
        row = await _row(
            connection,
            'INSERT INTO jobs (job_id, fence, created, status, "end", frames, stopped, errors, done, pipeline, label) '
            "VALUES (%s, %s, %s, %s, 0, %s, %s, 0, 0, %s, %s) ON CONFLICT (job_id) DO NOTHING RETURNING job",
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
        if row is None:
            return False
        await connection.execute(
            "INSERT INTO plans (job, plan, fingerprint, options) VALUES (%s, %s, %s, %s)",
            (row[0], job.plan, job.fingerprint, job.options),
        )
        for chunk in _sized([(row[0], frame, data) for frame, data in enumerate(job.params)]):
            await connection.execute(_ADD_PARAMS, [list(column) for column in zip(*chunk, strict=True)])
        ends[job.job_id] = 0
        return True

    async def take_over(self, job_id: str, connection: Connection, ends: dict[str, int]) -> StoredJob:
        """Make this store the owner of a job."""
        found = await self._available(connection, job_id)
        await self._check(connection, found)
        # One that has not ended does not run yet: it must look neither interrupted nor running.
        status = found.status if found.status.terminal else JobStatus.SUBMITTED
        change = "UPDATE jobs SET fence = %s, status = %s WHERE job_id = %s"
        await connection.execute(change, (self.fence, status.value, job_id))
        if not found.owner.mine:
            await self._notify_of(connection, found.owner.fence, "lost")
        found = await self._available(connection, job_id)
        ends[job_id] = found.end
        return found

    async def give_back(self, job_id: str, connection: Connection, _ends: dict[str, int]) -> None:
        """Undo :meth:`take_over`: the job is interrupted as before."""
        await connection.execute(
            "UPDATE jobs SET status = %s WHERE job_id = %s AND fence = %s AND status = %s",
            (JobStatus.INTERRUPTED.value, job_id, self.fence, JobStatus.SUBMITTED.value),
        )

    async def _check(self, connection: Connection, found: StoredJob) -> None:
        """Refuse a job that cannot go on because its rows do not belong together."""
        problem = found.damage
        if problem is None:
            end = await _row(connection, _LAST_EVENT, (found.job_id, found.job_id))
            frames = await _row(connection, _PARAMS_STORED, (found.job_id,))
            if end != (found.end,):
                problem = f"it has {found.end} events, but those that are stored end at {end and end[0]}"
            elif frames != (found.frames, found.frames):
                problem = f"it has {found.frames} parameter sets, but {frames and frames[0]} are stored"
        if problem is not None:
            raise StoreError(self._path, f"job {found.job_id} is damaged: {problem}", "Restore it from a backup")

    async def delete(self, job_id: str, connection: Connection, ends: dict[str, int]) -> None:
        """Delete a job."""
        found = await self._locked(connection, job_id)
        if found is None or not found.status.terminal:
            await self._available(connection, job_id)
        await connection.execute("DELETE FROM jobs WHERE job_id = %s", (job_id,))
        ends.pop(job_id, None)

    async def request(
        self, job_id: str, data: bytes, limit: int, connection: Connection, _ends: dict[str, int]
    ) -> int | None:
        """Store a request, and notify the owner of the job; return its number."""
        found = await self._locked(connection, job_id)
        if found is None:
            raise JobNotFound(job_id)
        await connection.execute(_END_UNREAD.encode(), (job_id,))
        if found.status.ended:
            return None
        given = {"sender": self.fence, "data": data, "job": job_id, "limit": limit}
        row = await (await connection.execute(_ADD_REQUEST, given)).fetchone()
        if row is None:
            return None
        await self._notify_of(connection, found.owner.fence, "request")
        number: int = row[0]
        return number

    async def take_request(self, number: int, connection: Connection, _ends: dict[str, int]) -> bool:
        """Reserve a request for this store."""
        return await _row(connection, _TAKE, (number, self.fence)) is not None

    async def withdraw_request(self, job_id: str, number: int, connection: Connection, _ends: dict[str, int]) -> bool:
        """Delete a request that was not carried out, and will not be."""
        found = await self._locked(connection, job_id)
        row = await _row(connection, "SELECT taken, answer FROM requests WHERE number = %s FOR UPDATE", (number,))
        if row is not None and found is not None:
            taken, answer = row
            if answer is not None or (taken == found.owner.fence and not found.status.ended):
                return False
            if taken == found.owner.fence:  # it may be stopped, and go on
                change = "UPDATE jobs SET fence = nextval('fences') WHERE job_id = %s"
                await connection.execute(change, (job_id,))
                await self._notify_of(connection, found.owner.fence, "lost")
        await connection.execute(_END, (number,))
        return True

    async def end_request(self, number: int, connection: Connection, _ends: dict[str, int]) -> None:
        """Delete a request."""
        await connection.execute(_END, (number,))

    async def _locked(self, connection: Connection, job_id: str) -> StoredJob | None:
        # A statement that waits for a row sees the new row, but the old rows that it was joined with.
        if is_storable(job_id):
            await connection.execute(_LOCK, (job_id,))
        return await find_job(connection, self.fence, job_id)

    async def _available(self, connection: Connection, job_id: str) -> StoredJob:
        found = await self._locked(connection, job_id)
        if found is None:
            raise JobNotFound(job_id)
        if found.owner.alive and not found.owner.mine:
            raise JobOwned(job_id, found.owner.pid, found.owner.host)
        return found


def _changed(change: JobChange) -> tuple[Any, ...]:
    writes = change.writes
    status = None if writes.status is None else writes.status.value
    reason = None if writes.reason is None else storable(writes.reason)
    return (
        change.key,
        change.end,
        change.frames,
        writes.errors,
        writes.done,
        status,
        reason,
        writes.finished,
        writes.stopped,
    )


def _chunks(entries: list[tuple[Any, Entry]]) -> Iterator[list[tuple[Any, Entry]]]:
    return _split(entries, [len(entry.head) + len(entry.payload) for _, entry in entries])


def _params_chunks(changes: Sequence[JobChange]) -> Iterator[list[tuple[Any, ...]]]:
    return _sized([(change.key, frame, data) for change in changes for frame, data in change.writes.params])


def _sized(params: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    return _split(params, [len(data) for *_, data in params])


def _split(rows: list[Any], sizes: list[int]) -> Iterator[list[Any]]:
    """Yield the rows in parts of a limited size: a statement can have 1 GiB."""
    begin = total = 0
    for at, size in enumerate(sizes):
        if total and total + size > _CHUNK:
            yield rows[begin:at]
            begin, total = at, 0
        total += size
    if begin < len(rows):
        yield rows[begin:]


def is_storable(text: str) -> bool:
    """Return whether PostgreSQL can hold a text: it cannot hold NUL."""
    return is_text(text) and "\0" not in text


async def prune(
    connection: Connection, fence: int, before: float, status: JobStatus | None, limit: int
) -> list[StoredJob]:
    """Delete jobs that ended before a time; return them."""
    statuses = [known.value for known in JobStatus if known.terminal and status in (None, known)]
    async with connection.transaction():
        rows = await (await connection.execute(_PRUNED.encode(), (before, statuses, limit))).fetchall()
        found = [_job(row, fence) for row in rows]
        await connection.execute("DELETE FROM jobs WHERE job_id = ANY(%s)", ([job.job_id for job in found],))
    return found


async def vacuum(connection: Connection) -> None:
    """Give the space of deleted rows back to the database."""
    for table in ("jobs", "plans", "params", "entries", "requests", "owners"):
        await connection.execute(f"VACUUM (ANALYZE) {table}".encode())


# reading


def _job(row: tuple[Any, ...], fence: int) -> StoredJob:
    *columns, alive = row
    return stored_job(columns, alive, fence)


async def find_job(connection: Connection, fence: int, job_id: str) -> StoredJob | None:
    """Return a job, or None."""
    row = await _row(connection, _ONE, (job_id,)) if is_storable(job_id) else None
    return None if row is None else _job(row, fence)


async def list_jobs(
    connection: Connection, fence: int, wanted: JobFilter, before: Position | None, limit: int
) -> list[StoredJob]:
    """Return the jobs that fit, the newest first."""
    fitting = " AND ".join(conditions(wanted, before, "%({})s", _CONTAINS, _ID)) or "true"
    query = f"{_JOBS} WHERE {fitting} ORDER BY created DESC, {_ID} DESC LIMIT %(limit)s"
    texts: dict[bytes, bytes] = {}  # many jobs have the same plan and options: one copy of each is enough
    found = []
    async with connection.cursor(binary=True) as cursor:
        await cursor.execute(query.encode(), arguments(wanted, before, limit if limit >= 0 else None))
        async for row in cursor:
            values = list(row)
            for at in (1, 3):
                if isinstance(values[at], bytes):
                    values[at] = texts.setdefault(values[at], values[at])
            found.append(_job(tuple(values), fence))
    return found


async def read_entries(connection: Connection, job_id: str, start: int, max_bytes: int) -> list[Entry]:
    """Return the entry that holds an offset and those behind it, at least one."""
    if not is_storable(job_id) or not is_number(start):
        return []
    arguments = {"job": job_id, "start": start, "rows": _PAGE, "bytes": max(max_bytes, 1)}
    rows = await (await connection.execute(_ENTRIES, arguments, binary=True)).fetchall()
    return page(job_id, rows, start, max_bytes)


async def read_heads(connection: Connection, job_id: str, start: int) -> list[Entry]:
    """Return the next entries that begin at an offset or behind it, without their payloads."""
    if not is_storable(job_id):
        return []
    rows = await (await connection.execute(_HEADS, (job_id, start, _PAGE), binary=True)).fetchall()
    return [entry_of(job_id, None, row) for row in rows]


async def read_params(connection: Connection, job_id: str, frames: Sequence[int]) -> dict[int, bytes]:
    """Return parameter sets by their numbers, as far as they are stored."""
    if not is_storable(job_id):
        return {}
    rows = await (await connection.execute(_PARAMS, (job_id, list(frames)), binary=True)).fetchall()
    return {frame: params_of(job_id, frame, data) for frame, data in rows}


async def read_requests(connection: Connection, fence: int) -> list[Request]:
    """Return the requests for the jobs of an owner that have no answer, the oldest first."""
    return [request_of(row) for row in await (await connection.execute(_REQUESTS, (fence,))).fetchall()]


async def read_answer(connection: Connection, number: int) -> bytes | None:
    """Return the answer to a request, if it has one."""
    row = await _row(connection, "SELECT answer FROM requests WHERE number = %s", (number,))
    return None if row is None else row[0]


async def dead_owners(connection: Connection) -> set[int]:
    """Return the owners of jobs that have not ended, as far as they are dead."""
    rows = await (await connection.execute(_DEAD.encode())).fetchall()
    return {fence for (fence,) in rows}


async def seconds_left(connection: Connection, fence: int) -> float:
    """Return for how long the lease of an owner lasts unless it is renewed; 0 or less if it is dead."""
    row = await _row(connection, _LEFT, (fence,))
    return 0.0 if row is None else float(row[0])
