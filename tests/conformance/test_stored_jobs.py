"""Stored jobs in later sessions, and files of stores that are locked, foreign or large."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, JobInfo, JobStatus, LocalOptions, PipelineError, Session
from dfm_async.errors import StoreError
from dfm_async.store import queries, rows
from dfm_async.store.sqlite import SqliteStore
from tests.conftest import Open, TargetName
from tests.store.helpers import new_job
from tests.support.pipelines import pipeline_of
from tests.support.sessions import SHORT
from tests.support.stores import execute_sql, locked
from tests.support.waiting import file_created

fed = Federation("stored")
site = fed.site("site")


@site.operation
async def inverse(folder: str, x: int) -> float:
    """Wait for a file if the number is negative."""
    if x < 0:
        await file_created(f"{folder}/open")
    return 1 / x


inverses = pipeline_of(inverse, "folder", "x")


@pytest.fixture(params=["inline", "local"])
def target(request: pytest.FixtureRequest) -> TargetName:
    return request.param  # type: ignore[no-any-return]


def sets(store_path: Path, *numbers: int) -> list[dict[str, Any]]:
    return [{"folder": str(store_path.parent), "x": number} for number in numbers]


# infos of jobs


async def test_a_later_session_knows_what_the_session_of_a_job_knew(opens: Open, store_path: Path) -> None:
    before: dict[str, JobInfo] = {}
    async with opens() as session:
        ended = {
            "finished": await session.execute(inverses, sets(store_path, 1, 2), job_id="finished", label="mine"),
            "failed": await session.execute(inverses, sets(store_path, 0, 1, 0), job_id="failed"),
            "stopped": await session.execute(inverses, sets(store_path, 0), job_id="stopped", on_error="stop"),
            "empty": await session.execute(inverses, [], job_id="empty"),
            "late": await session.execute(inverses, sets(store_path, -1), job_id="late", deadline=0.3),
        }
        for job in ended.values():
            await job.wait_until_finished()
        aborted = await session.execute(inverses, sets(store_path, 1, 0, -1), job_id="aborted", concurrency=3)
        async with aborted.events() as events:
            while (aborted.info().done or 0) < 2:
                await anext(events)
        await aborted.cancel("enough")
        for job_id, job in {**ended, "aborted": aborted}.items():
            before[job_id] = job.info()
        broken = await session.execute(inverses, sets(store_path, 1, 0, -1, -1), job_id="interrupted", concurrency=3)
        waiting = await session.execute(inverses, None, job_id="open")
        async with broken.events() as events:
            while (broken.info().done or 0) < 2:
                await anext(events)
    before["interrupted"], before["open"] = broken.info(), waiting.info()
    assert {job_id: info.status.value for job_id, info in before.items()} == {
        "finished": "finished",
        "failed": "failed",
        "stopped": "failed",
        "empty": "finished",
        "late": "aborted",
        "aborted": "aborted",
        "interrupted": "interrupted",
        "open": "interrupted",
    }
    assert (before["failed"].errors, before["failed"].done, before["failed"].sets) == (2, 3, 3)
    assert (before["interrupted"].errors, before["interrupted"].done, before["interrupted"].sets) == (1, 2, 4)
    assert (before["aborted"].errors, before["aborted"].done, before["aborted"].sets) == (1, 2, 3)
    async with opens() as session:
        assert {info.job_id: info for info in session.infos()} == before
        assert {job.job_id: job.info() for job in session.jobs()} == before
        for job_id, info in before.items():
            assert (await session.reattach(job_id)).info() == info
        (store_path.parent / "open").touch()
        again = await session.resume("interrupted")
        await again.wait_until_finished()
        resumed = again.info()
        assert (resumed.status, resumed.reason, resumed.errors) == (JobStatus.FAILED, None, 1)
        assert (resumed.done, resumed.sets) == (4, 4)
        other = await session.resume("open")
        assert (other.info().reason, other.info().finished) == (None, None)
        await other.send_stop_frame()
        assert await other is JobStatus.FINISHED
        finished = other.info()
    async with opens() as session:
        assert (await session.reattach("interrupted")).info() == resumed
        assert (await session.reattach("open")).info() == finished
        assert finished.reason is None


async def test_cancelling_an_interrupted_job_keeps_its_counts(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline() as session:
        job = await session.execute(inverses, sets(store_path, 1, 0, -1), job_id="x", concurrency=3)
        async with job.events() as events:
            while (job.info().done or 0) < 2:
                await anext(events)
    async with opens_inline() as session:
        job = await session.reattach("x")
        await job.cancel("enough")
        info = job.info()
        assert (info.status, info.reason, info.errors) == (JobStatus.ABORTED, "enough", 1)
        assert (info.done, info.sets) == (2, 3)
        assert session.infos() == [info]
    async with opens_inline() as session:
        assert (await session.reattach("x")).info() == info


async def test_summary_of_a_job_equals_its_info(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline(options=LocalOptions(keep_finished=0)) as session:
        job = await session.execute(inverses, sets(store_path, 1, 0), job_id="x")
        await job.wait_until_finished()
        assert session.infos() == [job.info()] == [found.info() for found in session.jobs()]
        assert (job.info().errors, job.info().done, job.info().sets) == (1, 2, 2)


async def test_a_file_of_an_earlier_version_is_read_and_gets_the_counts(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline() as session:
        await (await session.execute(inverses, sets(store_path, 1), job_id="old"))
    execute_sql(store_path, *(f"ALTER TABLE jobs DROP COLUMN {column}" for column in ("errors", "done")))
    async with opens_inline() as session:
        old = (await session.reattach("old")).info()
        assert (old.status, old.errors, old.sets, old.done) == (JobStatus.FINISHED, 0, 1, 1)
        failed = await session.execute(inverses, sets(store_path, 0), job_id="new")
        await failed.wait_until_finished()
    async with opens_inline() as session:
        assert (await session.reattach("new")).info().errors == 1


# resuming after a change of the code


def changed(code: Callable[..., Any]) -> Federation:
    other = Federation("stored")
    code.__name__ = "inverse"
    other.site("site").operation(code)
    return other


async def renamed(folder: str, number: int) -> float:
    return 1 / number


async def required(folder: str, x: int, base: float) -> float:
    return base / x


async def fewer(x: int) -> float:
    return 1 / x


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (renamed, "operation 'inverse' has no parameter 'x'"),
        (renamed, "parameter 'number' of operation 'inverse' is missing"),
        (required, "parameter 'base' of operation 'inverse' is missing"),
        (fewer, "operation 'inverse' has no parameter 'folder'"),
    ],
)
async def test_a_job_whose_operation_takes_other_parameters_stays_interrupted(
    opens_inline: Open, store_path: Path, code: Callable[..., Any], problem: str
) -> None:
    async with opens_inline() as session:
        await (await session.execute(inverses, sets(store_path, 1, -1), job_id="x")).first()
    async with opens_inline(changed(code)) as session:
        with pytest.raises(PipelineError, match=problem):
            await session.resume("x")
        assert (await session.reattach("x")).status is JobStatus.INTERRUPTED
    (store_path.parent / "open").touch()
    async with opens_inline() as session:
        assert await (await session.resume("x")) is JobStatus.FINISHED


async def more(folder: str, x: int, base: float = 1.0, **others: Any) -> float:
    return base / x


async def test_a_job_whose_operation_takes_more_is_resumed(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline() as session:
        await (await session.execute(inverses, sets(store_path, 1, -1), job_id="x")).first()
    async with opens_inline(changed(more)) as session:
        assert await (await session.resume("x", accept_changes=True)) is JobStatus.FINISHED


# files that others have locked


async def test_waiting_for_a_locked_file_can_be_cancelled_at_once(opens_inline: Open, store_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with opens_inline() as session:
        await session.execute(inverses, None, job_id="here")
        async with opens_inline() as other:
            await (await other.execute(inverses, sets(store_path, 1, -1), job_id="left")).first()
        await session.refresh_jobs()
        unopened = opens_inline()
        waits: dict[str, Callable[[], Any]] = {
            "execute": lambda: session.execute(inverses, sets(store_path, 1), job_id="new"),
            "execute without an id": lambda: session.execute(inverses, sets(store_path, 1)),
            "resume": lambda: session.resume("left"),
            "forget": lambda: session.forget("left"),
            "connect": unopened.connect,
        }
        with locked(store_path):
            for what, wait in waits.items():
                began = loop.time()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await wait()
                assert loop.time() - began < 8, what  # of the ten seconds that it would wait
        statuses = {job.job_id: job.status for job in await session.refresh_jobs()}
        assert statuses.pop("here") is JobStatus.RUNNING
        assert statuses == {"left": JobStatus.INTERRUPTED}
        job = await session.execute(inverses, sets(store_path, 1), job_id="new")
        assert await job is JobStatus.FINISHED
        (store_path.parent / "open").touch()
        assert await (await session.resume("left")) is JobStatus.FINISHED


async def test_a_locked_file_is_waited_for(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline() as session:
        with locked(store_path):
            executing = asyncio.create_task(session.execute(inverses, sets(store_path, 1), job_id="x"))
            done, _ = await asyncio.wait([executing], timeout=0.2)
            assert not done
        assert await (await executing) is JobStatus.FINISHED


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_cancelled_creation_leaves_no_job(store_path: Path, cancels: int) -> None:
    store = SqliteStore(store_path)
    await store.open()
    try:
        for turns in range(12):
            creating = asyncio.create_task(store.create(new_job(f"j{turns}")))
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            for _ in range(cancels):
                creating.cancel()
                await asyncio.sleep(0)
            await asyncio.wait([creating])
            await store.flush()
            kept = await store.find(f"j{turns}") is not None
            assert kept is not creating.cancelled()
    finally:
        await store.close()


# files of others


@pytest.mark.parametrize("suffix", ["", "-lock", "-wal"])
async def test_a_file_of_another_user_is_refused(opens_inline: Open, store_path: Path, suffix: str) -> None:
    async with opens_inline() as session:
        await (await session.execute(inverses, sets(store_path, 1)))
    victim = Path(f"{store_path}{suffix}")
    victim.touch()  # noqa: ASYNC240 - a small local file
    os.chown(victim, 12345, -1)
    with pytest.raises(StoreError, match="belongs to another user"):
        async with opens_inline():
            pass
    assert victim.stat().st_uid == 12345  # noqa: ASYNC240


# very many jobs


async def test_large_store_reads_only_the_listed_jobs(
    opens_inline: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, listed = 20_000, 50
    async with opens_inline() as session:
        await (await session.execute(inverses, sets(store_path, 1), job_id="oldest"))
    multiply(store_path, many)
    built = 0
    build = rows.stored_job

    def counted(*arguments: Any) -> Any:
        nonlocal built
        built += 1
        return build(*arguments)

    monkeypatch.setattr(queries, "stored_job", counted)
    options = msgspec.structs.replace(SHORT, keep_summaries=listed)
    store = SqliteStore(store_path)
    steps = 0

    async with Session(fed, target="inline", options=options, store=store) as session:
        assert built == listed
        assert len(session.jobs()) == listed
        assert session.jobs()[-1].job_id == f"copy {many}"

        def step() -> None:
            nonlocal steps
            steps += 1

        reader = store._reader
        await reader.run(lambda connection: connection.set_progress_handler(step, 1000))
        await session.refresh_jobs()
        assert steps * 1000 < 20 * many, "the database has not read every job"
        oldest = await session.reattach("oldest")
        assert [result.value for result in await oldest.collect()] == [1.0]
        assert built <= 2 * listed + 5


def multiply(store_path: Path, many: int) -> None:
    """Copy the first job, each copy with a later time."""
    connection = sqlite3.connect(store_path)
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < {many})"
    jobs = 'fence, finished, status, reason, "end", frames, stopped, errors, done'
    for table, more, values, columns in (
        ("jobs", "job_id, created,", "'copy ' || i, created + i,", jobs),
        ("plans", "", "", "plan, fingerprint, options"),
    ):
        connection.execute(
            f"{numbers} INSERT INTO {table} (job, {more} {columns}) SELECT i, {values} {columns} FROM {table}, n"
        )
    connection.commit()
    connection.close()
