"""Many jobs on few workers: slots, lanes, the queue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, Job, JobAborted, JobStatus, LocalOptions, Session
from dfm_async.errors import QueueFull
from tests.conformance import weather as w
from tests.support.pipelines import pipeline_of, yielding
from tests.support.waiting import file_created, running

echo = pipeline_of(w.echo, "n", site="lab")

never = pipeline_of(w.wait_for_ever)

pid = yielding(lambda: w.lab_process(1))


@asynccontextmanager
async def occupied(**options: Any) -> AsyncIterator[tuple[Session, Job]]:
    """A session that runs one job at a time, and the job that runs."""
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1, **options)) as session:
        first = await session.execute(never)
        await running(first)
        yield session, first


async def test_waiting_jobs_start_by_priority_and_then_in_order() -> None:
    async with occupied() as (session, first):
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


async def test_runs_are_numbered_in_the_order_in_which_they_start() -> None:
    # A worker takes a message for a run with a smaller number than its last one for a late one, and drops it: the token
    # of another site, which may come before the start of the run, would be lost.
    fed = Federation("numbers")
    lab = fed.site("lab")

    @lab.operation
    def here(x: int) -> int:
        return x

    @lab.operation(in_process=True)
    def apart(x: int) -> int:
        return x

    near, far = pipeline_of(here, x=1), pipeline_of(apart, x=here(2))
    async with Session(fed) as session:
        await (await session.execute(near))
        slow = await session.execute(far)  # waits for its own process to start
        quick = await session.execute(near)
        await quick
        assert slow.status is JobStatus.SUBMITTED
        await slow
        numbers = {job.job_id: record.number for job in (slow, quick) if (record := session._jobs.find(job.job_id))}
        assert numbers[slow.job_id] > numbers[quick.job_id]


async def test_a_deadline_covers_the_waiting() -> None:
    async with occupied() as (session, _):
        late = await session.execute(echo, {"n": 1}, deadline=0.05)
        with pytest.raises(JobAborted, match="was waiting for a free slot"):
            await late
        assert session.stats().waiting == 0


async def test_a_job_that_waits_can_be_cancelled_and_is_not_run() -> None:
    async with occupied() as (session, first):
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
    async with occupied(queue_limit=2) as (session, first):
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
    async with occupied(queue_limit=1) as (session, _):
        await session.execute(echo, {"n": 1})
        late = await session.execute(echo, {"n": 2}, deadline=0.05)
        assert late.status is JobStatus.ABORTED


async def test_a_full_queue_can_be_an_error() -> None:
    async with occupied(queue_limit=1, queue_overflow="fail") as (session, _):
        await session.execute(echo, {"n": 1})
        with pytest.raises(QueueFull, match="queue_limit"):
            await session.execute(echo, {"n": 2}, job_id="too-much")
        assert (await session.reattach("too-much")).status is JobStatus.UNKNOWN
        assert session.stats().waiting == 1


async def test_each_lane_has_workers_of_its_own_and_starts_when_it_is_needed(tmp_path: Path) -> None:
    fed = Federation("lanes")
    site, single = fed.site("site"), fed.site("single", workers=1)

    @site.operation
    async def hold(gate: str) -> int:
        await file_created(gate)
        return os.getpid()

    single.operation(hold)

    holds = pipeline_of(hold, "gate", site="site")
    shares = pipeline_of(hold, "gate", site="single")
    async with Session(fed, options=LocalOptions(lanes=2, jobs_per_lane=2)) as session:
        await (await session.execute(holds, {"gate": str(tmp_path)}))
        assert len(session.stats().sites["site"].workers) == 1
        jobs = [await session.execute(holds, {"gate": str(tmp_path / "open")}) for _ in range(4)]
        assert [lane.jobs for lane in session.stats().lanes] == [2, 2]
        (tmp_path / "open").touch()
        assert len({(await job.first()).value for job in jobs}) == 2
        jobs = [await session.execute(shares, {"gate": str(tmp_path)}) for _ in range(4)]
        assert len({(await job.first()).value for job in jobs}) == 1


async def test_closing_a_session_ends_the_jobs_that_wait() -> None:
    async with Session(w.fed, options=LocalOptions(max_concurrent_jobs=1)) as session:
        jobs = [await session.execute(never) for _ in range(5)]
        await running(jobs[0])
    assert [job.status for job in jobs] == [JobStatus.ABORTED] * 5


@pytest.mark.parametrize(
    "wrong",
    [{"lanes": 0}, {"jobs_per_lane": 0}, {"max_concurrent_jobs": -1}, {"queue_limit": 0}, {"queue_overflow": "drop"}],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LocalOptions(**wrong)
