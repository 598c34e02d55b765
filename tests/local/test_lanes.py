"""Many jobs on few workers: slots, lanes, the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dfm_async import (
    Federation,
    JobAborted,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    QueueFull,
    Session,
    Yield,
)
from dfm_async.targets.local import FederationRunner
from tests.conformance import weather as w
from tests.waiting import running

with Pipeline("echo") as echo:
    Yield(w.echo(PlaceParam("n"), site="lab"))

with Pipeline("never") as never:
    Yield(w.wait_for_ever())

with Pipeline("pid") as pid:
    Yield(w.lab_process(1))


async def test_jobs_beyond_the_limit_wait_highest_priority_first_then_in_their_order() -> None:
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1)) as session:
        first = await session.execute(never)
        await running(first)
        order: list[str] = []
        jobs = []
        for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)]:
            job = await session.execute(
                echo, {"n": name}, priority=priority, default_callback=lambda *args: order.append(args[-1])
            )
            jobs.append(job)
        assert [job.status for job in jobs] == [JobStatus.SUBMITTED] * 5
        assert (session.stats().running, session.stats().waiting) == (1, 5)
        assert "5 waiting" in repr(session)
        await first.cancel()
        assert [await job for job in jobs] == [JobStatus.FINISHED] * 5
        assert order == ["b", "d", "a", "c", "e"]
        assert (session.stats().running, session.stats().waiting) == (0, 0)


async def test_a_deadline_covers_the_waiting() -> None:
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1)) as session:
        first = await session.execute(never)
        await running(first)
        late = await session.execute(echo, {"n": 1}, deadline=0.05)
        with pytest.raises(JobAborted, match="was waiting for a free slot"):
            await late
        assert session.stats().waiting == 0


async def test_a_job_that_waits_can_be_cancelled_and_is_not_run() -> None:
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1)) as session:
        first = await session.execute(never)
        await running(first)
        second, third = [await session.execute(echo, {"n": n}) for n in (2, 3)]
        assert await second.cancel() == {}
        assert second.status is JobStatus.ABORTED
        await first.cancel()
        assert (await third.first()).value == 3
        assert second.status is JobStatus.ABORTED


async def test_a_finished_job_frees_its_slot_at_once() -> None:
    async with Session(w.fed, options=LocalOptions(lanes=1, jobs_per_lane=2)) as session:
        jobs = [await session.execute(echo, {"n": n}) for n in range(100)]
        assert [(await job.first()).value for job in jobs] == list(range(100))


async def test_execute_waits_while_the_queue_is_full_and_can_be_cancelled_then() -> None:
    options = LocalOptions(max_concurrent_jobs=1, queue_limit=2)
    async with Session(w.fed, options=options) as session:
        first = await session.execute(never)
        await running(first)
        queued = [await session.execute(echo, {"n": n}) for n in range(2)]
        crowd = [asyncio.create_task(session.execute(echo, {"n": n}, job_id=f"job-{n}")) for n in (10, 11, 12)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in crowd)
        crowd[1].cancel()
        await asyncio.wait([crowd[1]])
        assert crowd[1].cancelled()
        assert (await session.reattach("job-11")).status is JobStatus.UNKNOWN
        await queued[0].cancel()  # the queue has room for one again
        tenth = await crowd[0]
        assert not crowd[2].done()
        await first.cancel()
        twelfth = await crowd[2]
        assert [(await job.first()).value for job in (queued[1], tenth, twelfth)] == [1, 10, 12]


async def test_a_deadline_ends_the_wait_for_the_queue_too() -> None:
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1, queue_limit=1)) as session:
        first = await session.execute(never)
        await running(first)
        await session.execute(echo, {"n": 1})
        late = await session.execute(echo, {"n": 2}, deadline=0.05)
        assert late.status is JobStatus.ABORTED


async def test_a_full_queue_can_be_an_error() -> None:
    options = LocalOptions(max_concurrent_jobs=1, queue_limit=1, queue_overflow="fail")
    async with Session(w.fed, options=options) as session:
        await running(await session.execute(never))
        await session.execute(echo, {"n": 1})
        with pytest.raises(QueueFull, match="queue_limit"):
            await session.execute(echo, {"n": 2}, job_id="too-much")
        assert (await session.reattach("too-much")).status is JobStatus.UNKNOWN
        assert session.stats().waiting == 1


async def test_each_lane_has_workers_of_its_own_and_starts_when_it_is_needed() -> None:
    fed = Federation("lanes")
    site, single = fed.site("site"), fed.site("single", workers=1)

    @site.operation
    async def hold(gate: float) -> int:
        import os

        await asyncio.sleep(gate)
        return os.getpid()

    single.operation(hold)

    with Pipeline("hold") as holds:
        Yield(hold(PlaceParam("gate"), site="site"))
    with Pipeline("share") as shares:
        Yield(hold(PlaceParam("gate"), site="single"))
    async with Session(fed, options=LocalOptions(lanes=2, jobs_per_lane=2)) as session:
        await (await session.execute(holds, {"gate": 0}))
        assert len(session.stats().sites["site"].workers) == 1
        jobs = [await session.execute(holds, {"gate": 0.2}) for _ in range(4)]
        assert [lane.jobs for lane in session.stats().lanes] == [2, 2]
        assert len({(await job.first()).value for job in jobs}) == 2
        jobs = [await session.execute(shares, {"gate": 0.1}) for _ in range(4)]
        assert len({(await job.first()).value for job in jobs}) == 1


async def test_closing_a_session_ends_the_jobs_that_wait() -> None:
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1)) as session:
        jobs = [await session.execute(never) for _ in range(5)]
        await running(jobs[0])
    assert [job.status for job in jobs] == [JobStatus.ABORTED] * 5


async def test_the_runner_knows_its_jobs_by_their_ids() -> None:
    runner = FederationRunner(LocalOptions())
    async with Session(w.fed, target=runner) as session:
        job = await session.execute(echo, {"n": 7}, job_id="seven")
        assert runner.is_known_job_id("seven")
        assert await runner.wait_until_finished("seven") is JobStatus.FINISHED
        assert runner.find_job_handle("seven") is None
        assert runner.get_job_handle_any("seven") is not None
        assert runner.get_job_status("nobody") is JobStatus.UNKNOWN
        reader = runner.attach_client("seven")
        assert [type(event).__name__ async for event in job.events()] == [
            type(event).__name__ for event in iter(reader.next_nowait, None)
        ]
        runner.detach_client(reader)
        other = await session.execute(never, job_id="other")
        await running(other)
        assert await runner.cancel_job("other") == {"lab": "stopped"}
        assert await runner.cancel_job("other") == {}


@pytest.mark.parametrize(
    "wrong",
    [{"lanes": 0}, {"jobs_per_lane": 0}, {"max_concurrent_jobs": -1}, {"queue_limit": 0}, {"queue_overflow": "drop"}],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LocalOptions(**wrong)
