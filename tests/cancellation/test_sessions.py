"""Every call of a session, cancelled at each of its suspensions: once, and again while it cleans up.

Whatever was cancelled, the session goes on to work, every job that it or its store knows ends, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dfm_async import Advise, DfmError, Federation, Job, JobStatus, Pipeline, PlaceParam, Session, Yield
from tests.cancellation.rig import MOST, expected, fed, powers, site, square, tries, works
from tests.cancellation.steps import LIMIT, Cuts, cancelled_at, every_cut
from tests.conftest import TargetName
from tests.support.pipelines import pipeline_of
from tests.support.sessions import SHORT, all_values

pytestmark = pytest.mark.timeout(100)


@site.operation
async def endless(x: int) -> int:
    await asyncio.Event().wait()
    return x


with Pipeline("endless") as waits:
    Yield("begun", place="begun")
    Yield(endless(PlaceParam("x")), place="never")

with Pipeline("advice", mode="discovery") as advice:
    square(Advise())


async def test_execute_cancelled_leaves_no_job_behind(session: Session, times: int, store: str | None) -> None:
    async def call(number: int) -> None:
        await session.execute(powers, {"x": 3}, job_id=f"job-{number}")

    tried = await tries(session, times, call)
    assert tried or store is None
    for number in range(tried):  # submitting is safe to repeat
        async with asyncio.timeout(LIMIT):
            assert sorted(await all_values(session, powers, {"x": 3}, job_id=f"job-{number}")) == [9, 27]


async def test_execute_with_parameter_stream_cancelled(session: Session, times: int) -> None:
    async def numbers() -> AsyncIterator[dict[str, int]]:
        for x in range(3):
            await asyncio.sleep(0)
            yield {"x": x}

    async def call(number: int) -> None:
        await (await session.execute(powers, numbers()))

    assert await tries(session, times, call)


async def test_waiting_for_a_job_cancelled_leaves_the_job_alone(session: Session, times: int) -> None:
    job = await session.execute(waits, {"x": 1})
    await job.first("begun")

    async def first(number: int) -> None:
        await (await session.reattach(job.job_id)).first("never")

    async def wait(number: int) -> None:
        await job

    async def events(number: int) -> None:
        async for _ in job.events():
            pass

    for call in (first, wait, events):
        outcome = await cancelled_at(call(0), Cuts(tuple(range(times))))
        assert outcome.cancelled
    assert job.status is JobStatus.RUNNING
    await works(session)


async def test_job_cancel_cancelled_still_ends_the_job(session: Session, times: int) -> None:
    jobs: list[Job] = []

    async def call(number: int) -> None:
        job = await session.execute(waits, {"x": 1})
        jobs.append(job)
        await job.first("begun")
        await job.cancel("no longer needed")

    assert await tries(session, times, call)
    assert jobs
    assert all(job.status.ended for job in jobs)


async def test_parameter_sets_and_stop_cancelled(session: Session, times: int) -> None:
    async def call(number: int) -> None:
        job = await session.execute(powers, None, autostop=False)
        await job.send_input_params([{"x": x} for x in range(5)])
        await job.send_stop_frame()
        await job

    assert await tries(session, times, call)


async def test_discover_cancelled_leaves_no_job_behind(session: Session, times: int) -> None:
    async def call(number: int) -> None:
        await session.discover(advice)

    before = len(session.jobs())
    tried = await tries(session, times, call)
    assert tried
    assert len(session.jobs()) == before + tried + 1, "only the jobs that show that the session works are known"


async def test_lists_and_forgetting_cancelled(session: Session, times: int) -> None:
    async def call(number: int) -> None:
        job = await session.execute(powers, {"x": 1})
        await job
        await session.refresh_jobs()
        await session.reattach(job.job_id)
        await session.forget(job.job_id)

    assert await tries(session, times, call)


@pytest.mark.parametrize("target", ["inline"], indirect=True)
async def test_resume_cancelled_can_be_repeated(tmp_path: Path, target: TargetName, times: int) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    gate = asyncio.Event()
    federation = Federation("resumed")

    @federation.site("site").operation
    async def passes(x: int) -> int:
        await gate.wait()
        return x

    pipeline = pipeline_of(passes, "x")

    async with Session(federation, target=target, options=SHORT, store=store) as session:
        for number in range(MOST):
            await session.execute(pipeline, [{"x": 1}, {"x": 2}], job_id=f"job-{number}")
    async with Session(federation, target=target, options=SHORT, store=store) as session:

        async def call(job_id: str) -> Job:
            return await session.resume(job_id)

        for number, cuts in enumerate(every_cut(times)):
            outcome = await cancelled_at(call(f"job-{number}"), cuts)
            expected(outcome, cuts)
            if not outcome.delivered or number == MOST - 1:
                break
        assert number
        gate.set()
        for done in range(number + 1):
            async with asyncio.timeout(LIMIT):
                job = await session.reattach(f"job-{done}")
                if job.status is JobStatus.INTERRUPTED:
                    job = await session.resume(job.job_id)
                assert await job is JobStatus.FINISHED
                assert sorted(result.value for result in await job.collect()) == [1, 2]


@asynccontextmanager
async def owned(session: Session) -> AsyncIterator[None]:
    try:
        yield
    finally:
        async with asyncio.timeout(LIMIT):
            await session.close()


async def test_connect_cancelled_leaves_nothing(target: TargetName, store: str | None, times: int) -> None:
    for number, cuts in enumerate(every_cut(times)):
        session = Session(fed, target=target, options=SHORT, store=store)
        async with owned(session):
            outcome = await cancelled_at(session.connect(), cuts)
            expected(outcome, cuts)
            if outcome.error is None and not outcome.cancelled:
                await works(session)
            else:
                assert not session.connected
        if not outcome.delivered or number == MOST:
            break
    assert number


async def test_close_cancelled_leaves_nothing(target: TargetName, store: str | None, times: int) -> None:
    for number, cuts in enumerate(every_cut(times)):
        session = Session(fed, target=target, options=SHORT, store=store)
        async with owned(session):
            await session.connect()
            jobs = [await session.execute(waits, {"x": 1}) for _ in range(2)]
            await jobs[0].first("begun")
            outcome = await cancelled_at(session.close(), cuts)
            expected(outcome, cuts)
            assert not session.connected
            for job in jobs:
                with suppress(DfmError):
                    async with asyncio.timeout(LIMIT):
                        await job
                assert job.status.ended
        if not outcome.delivered or number == MOST:
            break
    assert number


@pytest.mark.parametrize("waits_for", [False, True], ids=["directly", "in a task of its own"])
async def test_close_from_a_callback_ends_the_session(target: TargetName, waits_for: bool) -> None:
    session = Session(fed, target=target, options=SHORT)
    begun = asyncio.Event()

    async def close(*_: object) -> None:
        begun.set()
        await (asyncio.wait_for(session.close(), LIMIT) if waits_for else session.close())

    async with owned(session):
        await session.connect()
        await session.execute(powers, {"x": 2}, default_callback=close)
        async with asyncio.timeout(LIMIT):
            await begun.wait()
