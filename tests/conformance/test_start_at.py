"""Jobs that start later: ``execute(start_at=...)``."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from dfm_async import Federation, JobAborted, JobStatus, LocalOptions, Session
from dfm_async.errors import JobInterrupted, QueueFull
from dfm_async.testing import virtual_time
from tests.conftest import Connect, Open
from tests.support.pipelines import pipeline_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


fed = Federation("later")
lab = fed.site("lab")


@lab.operation
async def square(n: int) -> int:
    return n * n


@lab.operation
async def started_at(n: int) -> tuple[int, float]:
    return n, time.time()


squares = pipeline_of(square, "n")
starts = pipeline_of(started_at, "n")


async def test_job_starts_at_its_time(connect: Connect) -> None:
    async with connect(fed) as session:
        moment = time.time() + 0.2
        job = await session.execute(starts, {"n": 1}, start_at=moment)
        assert job.info().start_at == moment
        (result,) = await job.collect()
        assert result.value[0] == 1
        assert result.value[1] >= moment - 1e-3
        assert job.info().start_at == moment


async def test_time_in_the_past_means_at_once(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(squares, {"n": 3}, start_at=datetime(2020, 1, 1, tzinfo=UTC))
        assert [result.value async for result in job] == [9]


async def test_job_that_waits_for_its_time_can_be_cancelled(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(squares, {"n": 3}, start_at=time.time() + 3600)
        assert not job.status.ended
        assert str(job.info().waits_for).startswith("its start at 20")
        await job.cancel("not needed")
        with pytest.raises(JobAborted, match="not needed"):
            await job


async def test_closing_the_session_does_not_wait_for_the_time() -> None:
    async with Session(fed, target="inline") as session:
        job = await session.execute(squares, {"n": 3}, start_at=time.time() + 3600)
    assert job.status is JobStatus.ABORTED


async def test_jobs_start_in_the_order_of_their_times() -> None:
    async with virtual_time(NOON) as clock, Session(fed, target="inline") as session:
        late = await session.execute(squares, {"n": 2}, start_at=NOON + timedelta(hours=2))
        early = await session.execute(squares, {"n": 1}, start_at=NOON.timestamp() + 3600)
        assert repr(early) == f"<Job {early.job_id}: waits for its start at 2026-03-01T13:00:00Z, 0 events>"
        assert session.stats().running == 0
        await clock.advance(3599)
        assert (early.status, late.status) == (JobStatus.SUBMITTED, JobStatus.SUBMITTED)
        await clock.advance(1)
        assert (early.status, late.status) == (JobStatus.FINISHED, JobStatus.SUBMITTED)
        await clock.until(late)
        assert clock.wall == NOON + timedelta(hours=2)


async def test_machine_that_slept_starts_the_job_within_half_a_minute() -> None:
    async with virtual_time(NOON) as clock, Session(fed, target="inline") as session:
        job = await session.execute(squares, {"n": 1}, start_at=NOON + timedelta(hours=8))
        await clock.advance(60)
        clock.set_wall(NOON + timedelta(hours=9))
        await clock.until(job, limit=30)


async def test_deadline_begins_when_the_job_starts() -> None:
    async with virtual_time(NOON) as clock, Session(fed, target="inline") as session:
        job = await session.execute(squares, None, autostop=False, start_at=NOON + timedelta(hours=1), deadline=10)
        await clock.advance(3609)
        assert not job.status.ended
        await clock.advance(1)
        with pytest.raises(JobAborted, match="deadline of 10 s"):
            await job
        at_once = await session.execute(squares, None, autostop=False, start_at=NOON, deadline=10)
        await clock.advance(10)
        assert at_once.status is JobStatus.ABORTED


async def test_job_that_waits_for_its_time_takes_no_slot_and_no_place_in_the_queue() -> None:
    options = LocalOptions(max_concurrent_jobs=1, queue_limit=1, queue_overflow="fail")
    async with virtual_time(NOON) as clock, Session(fed, options=options) as session:  # nothing starts: no process
        later = await session.execute(squares, {"n": 1}, start_at=NOON + timedelta(hours=1))
        with pytest.raises(QueueFull, match="1 waiting jobs with start_at is reached"):
            await session.execute(squares, {"n": 1}, start_at=NOON + timedelta(hours=1))
        blocker = await session.execute(squares, None, autostop=False)
        waits = await session.execute(squares, {"n": 2})
        stats = session.stats()
        assert (stats.running, stats.waiting) == (1, 1)
        await clock.advance(3600)
        assert session.stats().waiting == 2
        assert later.info().waits_for == "a free slot: 1 job running, 1 ahead of it in the queue"
        await blocker.cancel()
        await waits  # the clock stands still: processes and threads run in real time
        await later


async def test_job_waits_again_after_a_restart(opens_inline: Open) -> None:
    async with virtual_time(NOON) as clock:
        async with opens_inline() as session:
            start = NOON + timedelta(hours=2)
            job = await session.execute(squares, {"n": 3}, job_id="later", start_at=start, deadline=60)
            await session.execute(squares, {"n": 4}, job_id="missed", start_at=NOON + timedelta(minutes=1))
        with pytest.raises(JobInterrupted):
            await job
        await clock.advance(3600)
        async with opens_inline() as session:
            assert session.infos()[0].start_at == start.timestamp()
            job = await session.resume("later")
            missed = await session.resume("missed")
            await missed  # the clock stands still: threads of the store run in real time
            assert str(job.info().waits_for) == "its start at 2026-03-01T14:00:00Z"
            await clock.advance(3600)
            await job
            assert [result.value async for result in job] == [9]
            again = await session.execute(squares, {"n": 3}, job_id="later", start_at=start + timedelta(hours=1))
            assert again.status is JobStatus.FINISHED  # the same job


async def test_interrupted_job_can_be_aborted_before_its_time(opens_inline: Open) -> None:
    async with opens_inline() as session:
        await session.execute(squares, {"n": 3}, job_id="later", start_at=time.time() + 3600)
    async with opens_inline() as session:
        job = await session.reattach("later")
        await job.cancel()
        assert job.status is JobStatus.ABORTED


async def test_retried_sets_do_not_wait_for_the_time_of_their_job(session: Session) -> None:
    job = await session.execute(squares, {"n": 3}, start_at=time.time() + 3600)
    await job.cancel()
    again = await job.retry_failed()
    assert again.info().start_at is None
    assert [result.value async for result in again] == [9]


@pytest.mark.parametrize(
    ("moment", "problem"),
    [
        (datetime(2026, 11, 20, 3), "must have a time zone.*tzinfo=UTC"),
        (float("nan"), "number from 0"),
        (float("inf"), "number from 0"),
        (-1, "number from 0"),
        ("tomorrow", "number from 0"),
        (True, "number from 0"),
    ],
)
async def test_invalid_times_are_refused(moment: Any, problem: str) -> None:
    async with Session(fed, target="inline") as session:
        with pytest.raises(ValueError, match=problem):
            await session.execute(squares, {"n": 1}, start_at=moment)


async def test_time_zones_count() -> None:
    async with Session(fed, target="inline") as session:
        moment = datetime(2020, 11, 20, 3, tzinfo=timezone(timedelta(hours=1)))
        job = await session.execute(squares, {"n": 1}, start_at=moment)
        assert job.info().start_at == datetime(2020, 11, 20, 2, tzinfo=UTC).timestamp()
        await job
