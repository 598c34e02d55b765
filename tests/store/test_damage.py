"""Store files with damaged rows: the other jobs can be used, and every error is one of ours."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async import DfmError, Federation, Job, JobNotFound, JobStatus, LocalOptions, Session
from dfm_async.errors import StoreError
from tests.cli.rig import invoked
from tests.store.helpers import sql
from tests.support.pipelines import pipeline_of

JOBS = ("failed", "finished", "open", "waiting")

fed = Federation("damaged")
site = fed.site("site")


@site.operation
async def inverse(x: int) -> float:
    if x > 5:
        await asyncio.Event().wait()
    return 1 / x


inverses = pipeline_of(inverse, "x", place="y")


def opened(path: Path) -> Session:
    return Session(fed, target="inline", store=f"sqlite:///{path}", options=LocalOptions(shutdown_grace=0.1))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with jobs in different states."""
    path = tmp_path_factory.mktemp("damage") / "jobs.db"

    async def fill() -> None:
        async with opened(path) as session:
            await (await session.execute(inverses, [{"x": 0}, {"x": 1}], job_id="failed")).wait_until_finished()
            await (await session.execute(inverses, [{"x": 1}, {"x": 2}], job_id="finished"))
            await session.execute(inverses, {"x": 1}, autostop=False, job_id="open")
            await (await session.execute(inverses, [{"x": 4}, {"x": 9}, {"x": 9}], job_id="waiting")).first()

    asyncio.run(fill())
    return path


def copy(original: Path, folder: str | Path) -> Path:
    path = Path(folder) / "jobs.db"
    shutil.copy(original, path)
    return path


async def read(job: Job) -> list[Any]:
    return [(type(event), event.offset, getattr(event, "value", None)) async for event in job.events()]


async def story(session: Session, job_id: str) -> list[Any]:
    job = await session.reattach(job_id)
    if not job.was_found:
        raise JobNotFound(job_id)
    async with job.results(ordered=True, errors="yield") as results:
        ordered: list[Any] = []
        try:
            async for result in results:
                ordered.append(result.offset)
        except DfmError as error:
            ordered.append(type(error))
    return [job.status, await read(job), ordered, job.info()]


@pytest.fixture(scope="module")
def intact(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What an intact copy says of each job."""
    path = copy(original, tmp_path_factory.mktemp("intact"))

    async def stories() -> dict[str, list[Any]]:
        async with opened(path) as session:
            return {job_id: await story(session, job_id) for job_id in JOBS}

    return asyncio.run(stories())


async def survey(path: Path, intact: dict[str, list[Any]], damaged: set[str]) -> None:
    """Uses everything in a file. Only damaged jobs may be otherwise than before, and only our errors are raised."""
    async with opened(path) as session:
        for job in session.jobs():
            repr(job)
            info = job.info()
            if info.status is JobStatus.UNKNOWN:
                assert job.job_id in (info.reason or "")
                with pytest.raises(StoreError):
                    await job
        for job_id in JOBS:
            try:
                found = await story(session, job_id)
            except DfmError:
                assert job_id in damaged
                continue
            assert job_id in damaged or found == intact[job_id]
        for job_id in JOBS:
            try:
                job = await session.resume(job_id)
            except DfmError:
                assert job_id in damaged or intact[job_id][0] is not JobStatus.INTERRUPTED
            else:
                assert job_id in damaged or intact[job_id][0] is JobStatus.INTERRUPTED
                await job.cancel()
        for job_id in damaged:
            with suppress(JobNotFound):  # its id may be what was damaged
                await session.forget(job_id)
        assert await (await session.execute(inverses, {"x": 3})) is JobStatus.FINISHED


COUNTS = ("stopped", "errors", "done")
COLUMNS = {
    "jobs": (
        "job_id",
        "fence",
        "created",
        "finished",
        "status",
        "reason",
        "end",
        "frames",
        "stopped",
        "errors",
        "done",
    ),
    "plans": ("job", "plan", "fingerprint", "options"),
    "params": ("job", "frame", "data"),
    "entries": ("job", "first", "count", "kind", "head", "payload"),
}
PLACES = [(table, column) for table, columns in COLUMNS.items() for column in columns]
WRONG: list[Any] = [None, 0, -1, 3, 2_000_000_000, 2**63 - 1, -(2**63), 1e300, -5.5, float("inf")]
WRONG += ["", "running", "\ud800", "x" * 99]
WRONG += [b"", b"\xff\xfe", b"\x81\xa1x\x01", b"\xc1" * 50, b"[" * 3000, b"\x91" * 3000]


async def _damage(path: Path, table: str, column: str, number: int, value: Any) -> set[str] | None:
    """Changes one value; gives the jobs that it may concern, or None if SQLite does not take it."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        rows = connection.execute(f"SELECT rowid, job FROM {table}").fetchall()
        rowid, job = rows[number % len(rows)]
        (job_id,) = connection.execute("SELECT job_id FROM jobs WHERE job = ?", (job,)).fetchone()
        if isinstance(value, tuple):
            position, byte = value
            old = connection.execute(f'SELECT "{column}" FROM {table} WHERE rowid = ?', (rowid,)).fetchone()[0]
            data = bytearray(old if isinstance(old, bytes) else str(old).encode())
            if data:
                data[position % len(data)] = byte
            value = bytes(data) if isinstance(old, bytes) else bytes(data).decode("utf-8", "replace")
        statement = f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?'
        if isinstance(value, str) and not value.isascii():  # text that is not UTF-8
            statement, value = statement.replace("= ? WHERE", "= CAST(? AS TEXT) WHERE"), b"\xff\xfe"
        connection.execute(statement, (value, rowid))
    except (sqlite3.IntegrityError, sqlite3.OperationalError):
        return None
    else:
        return set(JOBS) if column == "job" else {str(job_id)}
    finally:
        connection.close()


@settings(max_examples=40)
@given(
    st.sampled_from(PLACES),
    st.integers(0, 30),
    st.one_of(st.sampled_from(WRONG), st.tuples(st.integers(0, 5000), st.integers(0, 255)), st.binary(max_size=40)),
)
async def test_a_damaged_value_harms_only_its_own_job(
    original: Path, intact: dict[str, list[Any]], place: tuple[str, str], number: int, value: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = copy(original, folder)
        damaged = await _damage(path, *place, number, value)
        if damaged is not None:
            await survey(path, intact, damaged)


@pytest.mark.parametrize(("table", "column"), PLACES)
async def test_every_column_may_hold_anything(
    original: Path, intact: dict[str, list[Any]], tmp_path: Path, table: str, column: str
) -> None:
    for number, value in enumerate([b"\xff\xfe", 2_000_000_000]):
        (tmp_path / str(number)).mkdir()
        path = copy(original, tmp_path / str(number))
        damaged = await _damage(path, table, column, 3, value)
        if damaged is not None:
            await survey(path, intact, damaged)


async def test_a_damaged_job_is_listed_with_what_cannot_be_read(original: Path, tmp_path: Path) -> None:
    path = copy(original, tmp_path)
    sql(path, "UPDATE plans SET plan = ? WHERE job = (SELECT job FROM jobs WHERE job_id = 'waiting')", b"\x81\xa1x")
    sql(path, "UPDATE jobs SET created = 1e300 WHERE job_id = 'failed'")
    async with opened(path) as session:
        infos = {info.job_id: info for info in session.infos()}
        assert set(infos) == set(JOBS)
        assert infos["finished"].status is JobStatus.FINISHED
        for job_id, column in ("waiting", "plan"), ("failed", "created"):
            assert infos[job_id].status is JobStatus.UNKNOWN
            assert f"job {job_id} is damaged: column {column!r} cannot be read" in (infos[job_id].reason or "")
            for use in session.reattach, session.resume:
                with pytest.raises(StoreError, match=f"job {job_id} is damaged: column '{column}'"):
                    await use(job_id)
            with pytest.raises(StoreError, match=column):
                await session.execute(inverses, {"x": 1}, job_id=job_id)
        await session.forget("waiting")
        assert "waiting" not in {job.job_id for job in await session.refresh_jobs()}


async def test_a_job_without_its_plan_is_damaged(original: Path, tmp_path: Path) -> None:
    path = copy(original, tmp_path)
    sql(path, "DELETE FROM plans WHERE job = 1")
    async with opened(path) as session:
        assert session.jobs()[0].status is JobStatus.UNKNOWN
        assert len(session.jobs()) == len(JOBS)


@pytest.mark.parametrize(
    ("frames", "kept"), [(2_000_000_000, 3), (2, 3), (3, 2)], ids=["far too many", "too few", "one is missing"]
)
async def test_a_job_whose_parameter_sets_do_not_add_up_is_not_resumed(
    original: Path, tmp_path: Path, frames: int, kept: int
) -> None:
    path = copy(original, tmp_path)
    sql(path, "UPDATE jobs SET frames = ? WHERE job_id = 'waiting'", frames)
    sql(path, "DELETE FROM params WHERE frame >= ?", kept)
    async with opened(path) as session:
        for _ in range(2):
            with pytest.raises(StoreError, match="parameter sets"):
                await session.resume("waiting")
        job = await session.reattach("waiting")
        assert job.status is JobStatus.INTERRUPTED
        assert [result.value async for result in _until_error(job)] == [0.25]


async def _until_error(job: Job) -> AsyncIterator[Any]:
    async with job.results(ordered=True) as results:
        try:
            async for result in results:
                yield result
        except DfmError:
            return


ENDLESS = "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) "
HOSTILE = {
    "a view": ("ALTER TABLE entries RENAME TO gone", f"CREATE VIEW entries AS {ENDLESS} SELECT n AS job FROM more"),
    "a view of its version": (
        "DROP TABLE meta",
        f"CREATE VIEW meta AS {ENDLESS} SELECT n AS version, n AS last_fence FROM more ORDER BY n",
    ),
    "a virtual table": ("DROP TABLE params", "CREATE VIRTUAL TABLE params USING fts5(job, frame, data)"),
    "a computed column": ("DROP TABLE owners", "CREATE TABLE owners (fence, pid, host, address, more AS (fence + 1))"),
    "a trigger": (f"CREATE TRIGGER t AFTER INSERT ON owners BEGIN {'SELECT 1'}; END",),
    "a missing table": ("DROP TABLE plans",),
    "missing columns": ("ALTER TABLE jobs DROP COLUMN reason",),
    "no version": ("DELETE FROM meta",),
    "a version that is text": ("UPDATE meta SET version = 'one'",),
    "a counter at its end": (f"UPDATE meta SET last_fence = {2**63 - 1}",),
    "a negative counter": ("UPDATE meta SET last_fence = -7",),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_foreign_tables_are_refused(original: Path, tmp_path: Path, what: str) -> None:
    path = copy(original, tmp_path)
    for statement in HOSTILE[what]:
        sql(path, statement)
    with pytest.raises(StoreError):
        async with opened(path):
            pass


@pytest.mark.parametrize("fence", [-1, 0, 2**63 - 1])
async def test_damaged_owners_are_forgotten(original: Path, tmp_path: Path, fence: int) -> None:
    path = copy(original, tmp_path)
    sql(path, "INSERT INTO owners VALUES (?, 'x', ?, 7)", fence, b"\xff")
    async with opened(path) as session:
        assert len(session.jobs()) == len(JOBS)


@pytest.mark.parametrize(
    ("column", "value"),
    [("created", 1e300), ("finished", 1e300), ("created", b"x"), ("status", 7), ("end", -4), ("frames", 2_000_000_000)],
)
def test_the_commands_read_damaged_stores(original: Path, tmp_path: Path, column: str, value: Any) -> None:
    path = copy(original, tmp_path)
    sql(path, f"UPDATE jobs SET \"{column}\" = ? WHERE job_id = 'waiting'", value)
    store = ["--store", f"sqlite:///{path}"]
    for command in ["jobs"], ["jobs", "--json"], ["attach", "waiting"], ["logs", "waiting"], ["cancel", "waiting"]:
        done = invoked(*command, *store)
        assert done.exit_code in (0, 1, 3), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert "Traceback" not in done.output
    assert "finished" in invoked("jobs", *store).output
    assert invoked("logs", "finished", *store).exit_code == 0


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 20]), st.booleans())
async def test_a_file_with_random_bytes_raises_only_errors_of_ours(
    original: Path, seed: int, count: int, cut: bool
) -> None:
    random = Random(seed)
    data = bytearray(original.read_bytes())
    for _ in range(count):
        data[random.randrange(len(data))] = random.randrange(256)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"
        path.write_bytes(data[: random.randrange(len(data)) if cut else len(data)])
        with suppress(StoreError):
            async with opened(path) as session:
                for job in session.jobs():
                    assert repr(job)
                for job_id in JOBS:
                    with suppress(DfmError):
                        await story(session, job_id)
                    with suppress(DfmError):
                        await (await session.resume(job_id)).cancel()


async def test_a_schema_that_is_no_text_is_damage(original: Path, tmp_path: Path) -> None:
    path = copy(original, tmp_path)
    data = path.read_bytes()
    assert b"CREATE TABLE jobs" in data
    path.write_bytes(data.replace(b"CREATE TABLE jobs", b"CREATE TABLE \xd6\xd6\xd6\xd6"))
    with pytest.raises(StoreError):
        async with opened(path):
            pass
