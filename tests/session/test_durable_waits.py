"""Parameter sets that wait go on waiting after a lost worker, an interruption, or the death of their program."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Federation,
    ForEach,
    Job,
    JobStatus,
    Pipeline,
    PlaceParam,
    RetryPolicy,
    Session,
    Sleep,
    Wait,
    Yield,
    collect,
)
from dfm_async.base.wall_clock import replace_wall_clock
from dfm_async.errors import EventsFull, JobInterrupted
from dfm_async.events import EventSent, WaitBegan, WaitEnded, WorkerNotice
from tests.support.postgres import PostgresServer
from tests.support.sessions import SHORT
from tests.support.waiting import first_event

fed = Federation("durable waits")
home, lab = fed.site("home"), fed.site("lab")


@home.operation
async def pair(first: Any, second: Any) -> Any:
    return [first, second]


@lab.operation
async def die_once(folder: str, value: int) -> int:
    """Kill the worker in the first call."""
    if not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


with Pipeline("two") as two:
    earlier = Wait("first", int, 3600)
    Yield(pair(earlier, Wait("second", int, after=earlier)))

with Pipeline("loop") as loop:
    with ForEach([0, 1, 2]) as element:
        both = pair(element, Wait("each", int))
    Yield(pair(collect(both), Wait("end", int)))

with Pipeline("timers") as timers:
    Yield("slept", place="slept", after=Sleep(3600))
    Yield(Wait("never", int, 1800, fallback=0), place="fallback")


@pytest.fixture(params=["inline", "local"])
def place(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def url(place: str, store_url: str, request: pytest.FixtureRequest) -> str:
    if place != "postgres":
        return store_url
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.new_database())


def opened(place: str, url: str) -> Session:
    return Session(fed, target="local" if place == "local" else "inline", store=url, options=SHORT)


async def waits_for(job: Job, *names: str) -> None:
    async for info in job.changes(interval=0):
        if {found.name for found in info.waits} >= set(names):
            return


async def of_kind(job: Job, kind: type) -> list[Any]:
    return [event async for event in job.events() if isinstance(event, kind)]


@pytest.mark.parametrize("place", ["inline", "local", "postgres"])
async def test_events_that_were_sent_are_not_asked_for_again(place: str, url: str) -> None:
    async with opened(place, url) as session:
        job = await session.execute(two, job_id="two")
        await job.send("first", 1)
        await waits_for(job, "second")
    assert job.status is JobStatus.INTERRUPTED
    async with opened(place, url) as session:
        found = await session.reattach("two")
        with pytest.raises(JobInterrupted, match=r"resume\(job_id\) continues it"):
            await found.send("second", 2)
        job = await session.resume("two")
        await waits_for(job, "second")
        assert [wait.name for wait in job.info().waits] == ["second"]
        await job.send("second", 2)
        assert (await job.first()).value == [1, 2]
        assert await job is JobStatus.FINISHED
        assert [len(await of_kind(job, kind)) for kind in (WaitBegan, EventSent, WaitEnded)] == [2, 2, 2]


async def test_jobs_of_a_session_that_closes_refuse_what_is_sent_as_interrupted(store_url: str) -> None:
    closing, ended = asyncio.Event(), asyncio.Event()
    here = Federation("here")

    @here.site("home").operation
    async def stubborn(value: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            closing.set()
            await ended.wait()

    with Pipeline("stubborn") as held:
        stubborn(PlaceParam("value"))
        Yield(Wait("approval", bool))

    async with Session(here, target="inline", store=store_url) as other:
        async with Session(here, target="inline", store=store_url) as session:
            job = await session.execute(held, {"value": 1}, autostop=False, job_id="held")
            await waits_for(job, "approval")
            elsewhere = await other.reattach("held")
            close = asyncio.create_task(session.close())
            await closing.wait()
            with pytest.raises(JobInterrupted, match="the session was closed"):
                await job.send("approval", True)
            with pytest.raises(JobInterrupted, match="the session was closed"):
                await job.send_input_params({"value": 2})
            calls = elsewhere.send("approval", True, frame=0), elsewhere.send_input_params({"value": 2})
            tasks = [asyncio.create_task(call) for call in calls]
            ended.set()
            await close
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, JobInterrupted)


async def test_events_are_kept_that_nothing_has_taken(place: str, url: str) -> None:
    async with opened(place, url) as session:
        job = await session.execute(two, job_id="two")
        await job.send("second", 2)
        await waits_for(job, "first")
    async with opened(place, url) as session:
        job = await session.resume("two")
        await job.send("first", 1)
        assert (await job.first()).value == [1, 2]


async def test_each_execution_keeps_the_event_that_it_has_taken(place: str, url: str) -> None:
    async with opened(place, url) as session:
        job = await session.execute(loop, job_id="loop")
        await waits_for(job, "each", "end")
        for value in (10, 20, 30):
            await job.send("each", value)
        ended: dict[tuple[int, ...], int] = {}
        async for event in job.events():
            if isinstance(event, WaitEnded):
                ended[event.frame] = len(ended)
                if len(ended) == 3:
                    break
    async with opened(place, url) as session:
        job = await session.resume("loop")
        await job.send("end", 0)
        expected = [[number, 10 * (ended[0, number] + 1)] for number in range(3)]
        assert (await job.first()).value == [expected, 0]


async def test_times_end_when_they_would_have_ended(place: str, url: str) -> None:
    async with opened(place, url) as session:
        job = await session.execute(timers, job_id="timers")
        await waits_for(job, "", "never")
        until = {wait.name: wait.until for wait in job.info().waits}
    later = 1900.0
    replace_wall_clock(asyncio.get_running_loop(), lambda: time.time() + later)
    async with opened(place, url) as session:
        job = await session.resume("timers")
        assert (await job.first()).value == 0
        await waits_for(job, "")
        assert [wait.until for wait in job.info().waits] == [until[""]]
    later = 3700.0
    async with opened(place, url) as session:
        job = await session.resume("timers")
        assert {result.place: result.value async for result in job} == {"slept": "slept", "fallback": 0}
        assert [event.by for event in await of_kind(job, WaitEnded)] == ["time", "time"]


async def test_a_sender_in_another_session_learns_that_too_many_events_are_kept(store_url: str) -> None:
    async with opened("inline", store_url) as session, opened("inline", store_url) as other:
        job = await session.execute(two)
        await asyncio.gather(*(job.send("second", number) for number in range(1000)))
        found = await other.reattach(job.job_id)
        with pytest.raises(EventsFull, match="has 1,000 events that were not taken, which is the limit"):
            await found.send("second", 1000)
        await found.send("first", 7)
        assert (await job.first()).value == [7, 0]


async def test_a_set_that_lost_its_worker_keeps_its_events(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        value = Wait("go", int)
        Yield(pair(die_once(PlaceParam("folder"), value), Wait("end", int)))
    async with Session(fed, target="local", options=SHORT) as session:
        retry = RetryPolicy(on_worker_lost=2)
        job = await session.execute(pipeline, {"folder": str(tmp_path)}, retry=retry)
        await job.send("go", 1)
        await first_event(job, WorkerNotice)
        await job.send("end", 2)
        assert (await job.first()).value == [1, 2]
        assert await job is JobStatus.FINISHED


CHILD = """
import asyncio, os, sys
from dfm_async import Session
from tests.session.test_durable_waits import loop, opened

async def main():
    async with opened("inline", sys.argv[1]) as session:
        job = await session.execute(loop, job_id="loop")
        for value in range(int(sys.argv[2])):
            await job.send("each" if value < 3 else "end", value)
        os._exit(7)

asyncio.run(main())
"""


async def test_an_event_is_safe_when_send_returns(store_url: str) -> None:
    """The program dies at once after sending some events."""
    sent = 3
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, store_url, str(sent))
    assert await child.wait() == 7
    async with opened("inline", store_url) as session:
        job = await session.resume("loop")
        for value in range(sent, 4):
            await job.send("each" if value < 3 else "end", value)
        elements, end = (await job.first()).value
        assert sorted(value for _, value in elements) == [0, 1, 2]
        assert end == 3
        assert await job is JobStatus.FINISHED
        assert [event.value for event in await of_kind(job, EventSent)] == [0, 1, 2, 3]
