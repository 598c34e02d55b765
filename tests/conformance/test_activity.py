"""Watched jobs: what their operations do can be looked at, and what happens to all jobs of a session."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from dfm_async import (
    DfmError,
    Federation,
    ForEach,
    JobInfo,
    JobStatus,
    Pipeline,
    PlaceParam,
    RetryPolicy,
    Session,
    Yield,
)
from dfm_async.events import Activity, CallMade, NodeActivity
from dfm_async.model.stats import SiteStats
from tests.conformance.conftest import NewSession
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of

fed = Federation("watched")
lab, desk = fed.site("lab"), fed.site("desk")


@lab.operation
async def numbers(count: int) -> list[int]:
    return list(range(count))


@desk.operation
def double(value: int) -> int:
    if value == 3:
        raise ValueError("three")
    return 2 * value


@lab.operation
async def counted(count: int) -> AsyncIterator[int]:
    for i in range(count):
        yield i


@desk.operation
def counted_in_thread(count: int) -> Iterator[int]:
    yield from range(count)


@desk.operation
async def first_of(values: AsyncIterator[int]) -> int:
    return await anext(values)


@lab.operation(retry=RetryPolicy(attempts=3, backoff=0.0))
async def flaky(path: str) -> str:
    with open(path, "a") as file:  # noqa: ASYNC230 - one byte
        file.write("x")
    if os.path.getsize(path) < 3:  # noqa: ASYNC240
        raise OSError("not yet")
    return path


@lab.operation
async def forever() -> None:
    await asyncio.Event().wait()


@desk.operation(retry=RetryPolicy(on_worker_lost=1))
async def dies_once(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "alive"
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


with Pipeline("doubles") as doubles:
    with ForEach(numbers(PlaceParam("count"))) as number:
        Yield(double(number))

with Pipeline("streams") as streams:
    Yield(counted(PlaceParam("count", multiuse=True)), place="async")
    Yield(counted_in_thread(PlaceParam("count", multiuse=True)), place="thread")

with Pipeline("firsts") as firsts:
    Yield(first_of(counted(PlaceParam("count", multiuse=True))), place="async")
    Yield(first_of(counted_in_thread(PlaceParam("count", multiuse=True))), place="thread")

flakes = pipeline_of(flaky, "path")
endless = pipeline_of(forever)
dying = pipeline_of(dies_once, "path")


def joined(found: list[Activity]) -> dict[str, tuple[str, int, int, int]]:
    """What a reader knows after it has seen all items."""
    nodes: dict[str, NodeActivity] = {}
    for activity in found:
        nodes.update({node.node: node for node in activity.nodes})
    return {name.split("#")[0]: (node.site, node.started, node.done, node.failed) for name, node in nodes.items()}


async def watch(session: Session, pipeline: Pipeline, **params: object) -> tuple[list[Activity], list[CallMade]]:
    job = await session.execute(pipeline, params, watch=True)
    found = [activity async for activity in job.activity()]
    await job.wait_until_finished()
    return found, [call for activity in found for call in activity.calls]


async def test_calls_are_counted_at_the_sites_that_make_them(session: Session) -> None:
    found, calls = await watch(session, doubles, count=6)
    assert joined(found) == {"numbers": ("lab", 1, 1, 0), "double": ("desk", 6, 5, 1)}
    assert sorted(call.frame for call in calls if call.site == "desk") == [(0, i) for i in range(6)]
    assert [call.frame for call in calls if call.failed] == [(0, 3)]
    assert all(call.start <= call.end and call.attempt == 1 for call in calls)


async def test_newest_calls_are_reported_and_all_are_counted(session: Session) -> None:
    job = await session.execute(doubles, {"count": 3_000}, watch=True)
    await job.wait_until_finished()
    found = [activity async for activity in job.activity()]
    assert len(found) == 1
    assert joined(found) == {"numbers": ("lab", 1, 1, 0), "double": ("desk", 3_000, 2_999, 1)}
    assert 1 <= len(found[0].calls) <= 512
    assert found[0].left_out >= 3_001 - 64 * 60


async def test_a_generator_is_a_call_until_it_has_ended(session: Session) -> None:
    found, _ = await watch(session, streams, count=10)
    assert joined(found) == {"counted": ("lab", 1, 1, 0), "counted_in_thread": ("desk", 1, 1, 0)}


async def test_abandoned_generator_does_not_stay_running(session: Session) -> None:
    found, _ = await watch(session, firsts, count=100_000)
    told = joined(found)
    assert told["counted"] == ("lab", 1, 1, 0)
    assert told["counted_in_thread"] == ("desk", 1, 1, 0)


async def test_every_attempt_counts(session: Session, tmp_path: os.PathLike[str]) -> None:
    found, calls = await watch(session, flakes, path=os.fspath(tmp_path) + "/tries")
    assert joined(found) == {"flaky": ("lab", 3, 1, 2)}
    assert [(call.attempt, call.failed) for call in calls] == [(1, True), (2, True), (3, False)]


async def test_running_call_is_reported_and_reader_ends_with_the_job(session: Session) -> None:
    job = await session.execute(endless, watch=True)
    async with job.activity() as reader:
        first = await anext(reader)
        while not first.nodes:
            first = await anext(reader)
        assert first.nodes[0].running == 1
        await job.cancel()
        (last,) = [activity async for activity in reader]
        assert ([node.running for node in last.nodes], last.calls) == ([0], ())
        assert (job.info().sets, job.info().done) == (1, 0)


async def test_readers_come_at_any_time_and_each_gets_all_counts(session: Session) -> None:
    job = await session.execute(doubles, {"count": 500}, watch=True)

    async def look() -> dict[str, tuple[str, int, int, int]]:
        return joined([activity async for activity in job.activity(interval=0)])

    early = await asyncio.gather(*(look() for _ in range(5)))
    late = await look()
    assert all(found == late for found in early)
    assert late["double"] == ("desk", 500, 499, 1)


async def test_closing_an_activity_reader_ends_its_waiters(session: Session) -> None:
    job = await session.execute(endless, watch=True)
    reader = job.activity()
    taking = asyncio.ensure_future(_all(reader))
    await asyncio.sleep(0)
    await reader.aclose()
    assert isinstance(await taking, list)
    await job.cancel()


async def _all(reader: AsyncIterator[Activity]) -> list[Activity]:
    return [activity async for activity in reader]


async def test_calls_of_a_killed_worker_do_not_stay_running(tmp_path: os.PathLike[str]) -> None:
    async with Session(fed) as session:
        found, _ = await watch(session, dying, path=os.fspath(tmp_path) + "/once")
    site, started, done, failed = joined(found)["dies_once"]
    assert (site, done, failed) == ("desk", 1, 0)
    assert started == 1


async def test_activity_of_an_unwatched_job_raises(session: Session) -> None:
    job = await session.execute(doubles, {"count": 1})
    assert not job.watched
    with pytest.raises(DfmError, match="watch=True"):
        job.activity()
    await job


async def test_changes_report_all_jobs_until_the_session_ends(connect: Connect) -> None:
    seen: list[JobInfo] = []
    async with connect(fed) as session:
        before = await session.execute(doubles, {"count": 1}, job_id="before")
        await before
        changes = session.changes(interval=0)

        async def look() -> None:
            seen.extend([info async for info in changes])

        looking = asyncio.create_task(look())
        job = await session.execute(doubles, {"count": 5}, job_id="after")
        await job.wait_until_finished()
    await looking
    assert seen[0].job_id == "before"
    assert seen[0].status is JobStatus.FINISHED
    after = [info for info in seen if info.job_id == "after"]
    assert after[-1].status is JobStatus.FAILED
    assert (after[-1].errors, after[-1].sets, after[-1].done) == (1, 1, 1)


async def test_changes_report_jobs_that_end_with_the_session(new_session: NewSession) -> None:
    async with new_session(fed) as session:
        changes = session.changes(interval=60)
        await session.execute(doubles, None, job_id="not-ended")
        assert (await anext(changes)).status in (JobStatus.SUBMITTED, JobStatus.RUNNING)
    assert [info.status async for info in changes] == [JobStatus.ABORTED]


async def test_health_ends_with_the_session(connect: Connect) -> None:
    async with connect(fed) as session:
        health = session.health(interval=0)
        assert await anext(health) == {}  # no worker was needed yet
    with pytest.raises(StopAsyncIteration):
        await anext(health)


async def test_health_reports_started_busy_and_lost_workers() -> None:
    async with Session(fed) as session, session.health(interval=0) as health:

        async def until(fits: Callable[[SiteStats], bool]) -> SiteStats:
            async for sites in health:
                if "lab" in sites and fits(sites["lab"]):
                    return sites["lab"]
            raise AssertionError("the session has ended")

        job = await session.execute(doubles, {"count": 1}, autostop=False)
        await until(lambda lab: lab.jobs == 1)
        await job.send_stop_frame()
        await job
        worker = (await until(lambda lab: lab.jobs == 0)).workers[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)  # nobody uses it: no job can tell
        found = await until(lambda lab: lab.restarts == 1 and lab.workers[0].pid is not None)
        assert found.workers[0].pid != worker.pid


async def test_changes_are_coalesced_for_a_slow_reader(session: Session) -> None:
    async with session.changes() as changes:
        jobs = [await session.execute(doubles, {"count": 1}) for _ in range(10)]
        await asyncio.gather(*jobs)
        infos = [await anext(changes) for _ in range(10)]
        assert {info.job_id for info in infos} == {job.job_id for job in jobs}
        assert {info.status for info in infos} == {JobStatus.FINISHED}


async def test_invalid_interval_is_refused() -> None:
    wrong: list[Any] = ["soon", None, -1, math.nan]
    async with Session(fed, target="inline") as session:
        job = await session.execute(doubles, None, watch=True)
        for look in (session.changes, session.health, job.changes, job.activity):
            for interval in wrong:
                with pytest.raises(ValueError, match="interval must be a number of seconds"):
                    look(interval)
