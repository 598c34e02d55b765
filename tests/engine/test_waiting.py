"""Why a job waits, in words: the text for each reason, and the reasons of real jobs."""

from __future__ import annotations

import asyncio

import pytest

from dfm_async import Federation, ForEach, LocalOptions, Pipeline, PlaceParam, ResultLimits, Session, Yield
from dfm_async.model.call_limits import CallLimits
from dfm_async.model.waiting import JobWait, explain_waiting
from dfm_async.stats import LimitStats, SiteStats, WorkerStats
from tests.support.waiting import until

GPU = LimitStats(limit="gpus", used=1, capacity=2, waiting=3)
MEMORY = LimitStats(limit="memory", used=1e9, capacity=2e9, waiting=1)
LIMIT = LimitStats(limit="limit", operation="fit", used=4, capacity=2, waiting=1, key="user")
RATE = LimitStats(limit="rate", operation="fit", used=None, capacity=0.5, waiting=2)
LOST = WorkerStats(pid=7, jobs=1, unresponsive=True)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (JobWait(), None),
        (JobWait(ahead=0, running=1, waiting_for="a slot"), "a free slot: 1 job running, 0 ahead of it in the queue"),
        (
            JobWait(ahead=2, running=4, priority=-3),
            "a free slot: 4 jobs running, 2 ahead of it in the queue, priority -3",
        ),
        (JobWait(waiting_for="site 'lab'"), "site 'lab'"),
        (JobWait(log_full=True), "a reader: its log of results is full"),
        (JobWait(log_full=True, readers=1), "its reader, which is slow: its log of results is full"),
        (JobWait(idle=True), "further parameter sets"),
    ],
)
def test_the_engine_knows_what_a_job_waits_for(job: JobWait, text: str | None) -> None:
    assert explain_waiting(job) == text


@pytest.mark.parametrize(
    ("site", "limits", "text"),
    [
        (SiteStats(), CallLimits(gpus=1), None),
        (SiteStats(limits=(GPU,)), CallLimits(gpus=1), "gpus of site 'lab': 1 of 2 in use, 3 calls waiting"),
        (SiteStats(limits=(GPU,)), CallLimits(cpus=1), None),
        (SiteStats(limits=(GPU,)), None, None),
        (
            SiteStats(limits=(MEMORY,)),
            CallLimits(memory=5),
            "memory of site 'lab': 1 GB of 2 GB in use, 1 call waiting",
        ),
        (
            SiteStats(limits=(LIMIT, RATE)),
            CallLimits(limit=2, rate="0.5/s", key="user"),
            "the limit of 'fit' at site 'lab' for each 'user': 4 of 2 in use, 1 call waiting; "
            "the rate of 'fit' at site 'lab': 0.5 calls per second, 2 calls waiting",
        ),
        (SiteStats(workers=(LOST,)), None, "site 'lab': none of its workers responds"),
    ],
)
def test_sites_hold_up_the_jobs_that_need_them(site: SiteStats, limits: CallLimits | None, text: str | None) -> None:
    assert explain_waiting(JobWait(), [("lab", "fit", limits)], {"lab": site}) == text
    assert explain_waiting(JobWait(), [("desk", "fit", limits)], {"lab": site}) is None


fed = Federation("waiting")
lab = fed.site("lab")


@lab.operation(limit=1)
async def fit(number: int) -> None:
    await asyncio.Event().wait()


@lab.operation
async def echo(number: int) -> int:
    return number


with Pipeline("fits") as fits:
    with ForEach([1, 2, 3]) as each:
        Yield(fit(each))

with Pipeline("echoes") as echoes:
    Yield(echo(PlaceParam("number")))


async def test_jobs_report_what_they_wait_for() -> None:
    options = LocalOptions(max_concurrent_jobs=1, cancel_grace=0.5, shutdown_grace=0.5)
    async with Session(fed, options=options) as session:
        first = await session.execute(fits)
        second = await session.execute(echoes, {"number": 1})
        third = await session.execute(echoes, {"number": 1}, priority=2)
        limit = "the limit of 'fit' at site 'lab': 1 of 1 in use, 2 calls waiting"
        await until(lambda: first.info().waits_for == limit)
        queued = "a free slot: 1 job running, 1 ahead of it in the queue"
        urgent = "a free slot: 1 job running, 0 ahead of it in the queue, priority 2"
        assert [second.info().waits_for, third.info().waits_for] == [queued, urgent]
        assert {info.job_id: info.waits_for for info in session.infos()} == {
            first.job_id: limit,
            second.job_id: queued,
            third.job_id: urgent,
        }
        await first.cancel()
        await asyncio.gather(second, third)
        assert {info.waits_for for info in session.infos()} == {None}


async def test_jobs_wait_for_readers_and_for_parameter_sets() -> None:
    async with Session(fed, target="inline") as session:
        job = await session.execute(echoes, None, autostop=False)
        await until(lambda: job.info().waits_for == "further parameter sets")
        await job.send_stop_frame()
        await job
        limits = ResultLimits(max_items=4, window=2)
        full = await session.execute(echoes, [{"number": n} for n in range(100)], options=limits, concurrency=4)
        await until(lambda: full.info().waits_for == "a reader: its log of results is full")
        assert len(await full.collect()) == 100
