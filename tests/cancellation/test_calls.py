"""Calls beyond those that submit, steer and read jobs, cancelled at each suspension: once, and while they clean up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import pytest

from dfm_async import Job, JobStatus, ParameterError, Pipeline, PlaceParam, Session, Wait, Yield
from dfm_async.base.wall_clock import replace_wall_clock
from dfm_async.errors import JobNotFound
from tests.cancellation.rig import MOST, cancels, cube, ends, fed, powers, site, square, tries
from tests.cancellation.steps import LIMIT
from tests.support.pipelines import pipeline_of

pytestmark = [pytest.mark.timeout(100), pytest.mark.parametrize("target", ["inline"], indirect=True)]
stored = pytest.mark.parametrize("store", [True], ids=["store"], indirect=True)


@site.operation
async def inverse(x: int) -> float:
    return 1 / x


@site.operation(checkpoint=True)
async def recorded(x: int) -> int:
    return x


inverses = pipeline_of(inverse, "x")

with Pipeline("chain") as chain:
    Yield(square(recorded(PlaceParam("x"))))

with Pipeline("events") as events:
    Yield(square(Wait("number", int)))


@fed.pipeline
def fourth_power(x: int) -> Any:
    return square(square(x))


async def called(session: Session) -> None:
    assert await session.call(square, 3) == 9


async def run(session: Session) -> None:
    assert await session.run(fourth_power, 2) == 16


async def mapped(session: Session) -> None:
    assert [value async for value in session.map(square, range(3))] == [0, 1, 4]


async def mapped_in_a_block(session: Session) -> None:
    async with session.map(cube, range(3)) as values:
        assert [value async for value in values] == [0, 1, 8]


async def called_at_each_site(session: Session) -> None:
    assert [reply.value async for reply in session.each(square, 3)] == [9]


DIRECT = [called, run, mapped, mapped_in_a_block, called_at_each_site]


@pytest.mark.parametrize("call", DIRECT, ids=[call.__name__ for call in DIRECT])
async def test_direct_calls_cancelled_leave_no_job(
    session: Session, times: int, call: Callable[[Session], Coroutine[Any, Any, None]]
) -> None:
    assert await cancels(session, times, lambda _: call(session))
    await ends(session)


async def test_events_whose_sending_was_cancelled_can_be_sent_again(
    session: Session, times: int, store: str | None
) -> None:
    job = await session.execute(events, [{}] * MOST)
    tried = await cancels(session, times, lambda number: job.send("number", number, frame=number))
    assert tried or store is None
    for number in range(MOST):
        with suppress(ParameterError):  # it was sent, and its set is done
            await job.send("number", number, frame=number)
    async with asyncio.timeout(LIMIT):
        assert sorted([result.value async for result in job]) == [number**2 for number in range(MOST)]


async def test_reading_failures_cancelled(session: Session, times: int, store: str | None) -> None:
    job = await session.execute(inverses, [{"x": 1}, {"x": 0}])
    await job.wait_until_finished()
    tried = await cancels(session, times, lambda _: job.failures())
    assert tried or store is None
    assert [failed.params for failed in await job.failures()] == [{"x": 0}]


async def test_retry_of_failed_sets_cancelled_leaves_no_job_unfinished(session: Session, times: int) -> None:
    job = await session.execute(inverses, [{"x": 1}, {"x": 0}])
    await job.wait_until_finished()

    async def call(_: int) -> None:
        again = await job.retry_failed()
        assert await again.wait_until_finished()
        assert again.info().errors == 1

    assert await cancels(session, times, call)
    await ends(session)


@stored
async def test_fork_cancelled_leaves_no_job_unfinished(session: Session, times: int) -> None:
    job = await session.execute(chain, {"x": 3})
    await job

    async def call(_: int) -> None:
        again = await job.fork("square#1")
        assert await again is JobStatus.FINISHED
        assert (await again.first()).value == 9

    assert await cancels(session, times, call)
    await ends(session)


@stored
async def test_lists_of_stored_jobs_and_checks_cancelled(session: Session, times: int) -> None:
    async def call(_: int) -> None:
        async with aclosing(session.find_jobs(status=JobStatus.FINISHED)) as found:
            assert [info async for info in found]
        async with aclosing(session.check_store()) as problems:
            assert [problem async for problem in problems] == []

    assert await tries(session, times, call)


@stored
async def test_pruning_cancelled_deletes_whole_jobs(session: Session, times: int) -> None:
    running = await session.execute(events, job_id="running")
    tried = await cancels(session, times, lambda _: session.prune(1e-9))
    assert tried
    async with aclosing(session.check_store()) as problems:
        assert [problem async for problem in problems] == []
    async with aclosing(session.find_jobs()) as found:
        for job_id in [info.job_id async for info in found]:
            assert (await session.reattach(job_id)).was_found
    await session.prune(1e-9)
    async with aclosing(session.find_jobs()) as found:
        assert [info.job_id async for info in found] == ["running"]
    await running.send("number", 3)
    assert (await running.first()).value == 9


@stored
async def test_forgetting_cancelled_keeps_the_job_or_deletes_it(session: Session, times: int) -> None:
    async def call(number: int) -> None:
        await (await session.execute(powers, {"x": 2}, job_id=f"job-{number}"))
        await session.forget(f"job-{number}")

    for number in range(await cancels(session, times, call)):
        with suppress(JobNotFound):
            await session.forget(f"job-{number}")
        assert not (await session.reattach(f"job-{number}")).was_found


@pytest.fixture
async def before_tick() -> AsyncIterator[Callable[[], None]]:
    """Sets the clock of the loop to a moment before the next full hour, which is later each time."""
    loop, hour = asyncio.get_running_loop(), 500_000

    def set_clock() -> None:
        nonlocal hour
        hour += 1
        ahead = hour * 3600 - 0.005 - time.time()
        replace_wall_clock(loop, lambda: time.time() + ahead)

    yield set_clock
    replace_wall_clock(loop, None)


async def test_schedule_cancelled_ends_and_leaves_its_jobs_alone(
    session: Session, times: int, before_tick: Callable[[], None]
) -> None:
    async def call(number: int) -> None:
        before_tick()
        async with session.schedule(f"hourly-{number}", powers, {"x": 2}, every=3600) as schedule:
            job: Job = await anext(schedule)
            assert await job is JobStatus.FINISHED

    assert await cancels(session, times, call)
    await ends(session)
