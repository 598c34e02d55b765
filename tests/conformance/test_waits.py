"""``Wait`` and ``Sleep``: parameter sets that wait for events and times."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Literal

import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    If,
    Job,
    JobFailed,
    JobStatus,
    ParameterError,
    Pipeline,
    PlaceParam,
    Repeat,
    Result,
    Sleep,
    Wait,
    Yield,
    collect,
)
from dfm_async.errors import EventsFull
from dfm_async.events import EventSent, FailureHandled, FrameCompleted, WaitBegan, WaitEnded
from tests.conftest import Connect
from tests.support.waiting import first_event

fed = Federation("waits")
home = fed.site("home")
lab = fed.site("lab")


@lab.operation
async def build(version: int) -> str:
    return f"release {version}"


@lab.operation
async def publish(report: str) -> str:
    return f"published {report}"


@home.operation
async def plus(x: int, y: int) -> int:
    return x + y


with Pipeline("release") as release:
    report = build(PlaceParam("version"))
    approved = Wait("approval", type=bool, timeout=3600, after=report)
    with If(approved):
        Yield(publish(report))

with Pipeline("sums") as sums:
    with ForEach(PlaceParam("numbers")) as number:
        total = plus(number, Wait("more", int))
    Yield(collect(total))
    with Repeat(0, times=2) as current:
        current.next(plus(current, Wait("each", int)))
    Yield(current, place="repeated")

with Pipeline("limits") as limits:
    Yield(Wait("a", int, PlaceParam("seconds"), fallback=7), place="fallback")
    Yield(Wait("b", int, PlaceParam("seconds")), place="fails")
    Yield("slept", place="time", after=Sleep(PlaceParam("seconds")))


async def waiting(job: Job, name: str = "approval", count: int = 1) -> None:
    """Wait until executions wait for an event."""
    async for info in job.changes(interval=0):
        if sum(found.name == name for found in info.waits) >= count:
            return


async def values(job: Job) -> dict[str, Any]:
    return {result.place: result.value async for result in job}


async def test_a_set_waits_for_its_event(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(release, {"version": 1})
        await waiting(job)
        info = job.info()
        assert info.waits_for == "the event 'approval'"
        assert info.events_awaited == {"approval": {"type": "boolean"}}
        (found,) = info.waits
        assert (found.name, found.frame, found.node) == ("approval", (0,), "Wait#1")
        assert found.until is not None
        assert 3500 < found.until - time.time() < 3700
        await job.send("approval", "yes")
        assert await values(job) == {"yield": "published release 1"}
        assert (job.info().waits, job.info().waits_for) == ((), None)
        kinds = (WaitBegan, EventSent, WaitEnded)
        logged = [event async for event in job.events() if isinstance(event, kinds)]
        assert [type(event) for event in logged] == list(kinds)
        assert [getattr(event, "value", None) for event in logged] == [None, True, None]
        assert getattr(logged[2], "by", None) == "event"


async def test_each_set_has_events_of_its_own(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(release, [{"version": 1}, {"version": 2}])
        with pytest.raises(ParameterError, match="has 2 parameter sets: choose one for event 'approval' by frame="):
            await job.send("approval", True)
        await job.send("approval", False, frame=1)
        await job.send("approval", True, frame=0)
        assert [result.value async for result in job] == ["published release 1"]


async def test_each_execution_takes_the_next_event(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(sums, {"numbers": [10, 20]})
        await job.send("each", 1)
        for number in (1, 2):
            await job.send("more", number)
        await waiting(job, "each")
        await job.send("each", 5)
        found = await values(job)
        assert sum(found["yield"]) == 33
        assert found["repeated"] == 6


async def test_what_the_sender_does_wrong_is_an_error_of_the_sender(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(release, {"version": 1})
        for name, value, frame, message in (
            ("aproval", True, None, r"waits for no event 'aproval' \(it waits for: 'approval'\)"),
            ("approval", "perhaps", None, "event 'approval': Input should be a valid boolean.*, not 'perhaps'"),
            ("approval", True, 1, "there is no parameter set 1 for event 'approval': there are 1"),
            ("approval", True, -1, "there is no parameter set -1"),
            ("approval", True, (0,), r"frame= is the number of a parameter set, such as 0, not \(0,\)"),
        ):
            with pytest.raises(ParameterError, match=message):
                await job.send(name, value, frame=frame)  # type: ignore[arg-type] # what users without mypy write
        await job.send("approval", False)
        assert await job is JobStatus.FINISHED
        with pytest.raises(ParameterError, match="takes no event 'approval': it"):
            await job.send("approval", True)
        assert not [event async for event in job.events() if isinstance(event, Failure)]


async def test_more_events_than_are_kept_are_refused(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(sums, {"numbers": []})
        await asyncio.gather(*(job.send("more", number) for number in range(1000)))
        with pytest.raises(EventsFull, match=r"'more' cannot be kept: parameter set 0 has 1,000 events"):
            await job.send("more", 1)
        await waiting(job, "each")
        await job.send("each", 1)  # a statement takes it at once
        await job.cancel()


async def test_a_set_that_is_done_takes_no_event(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(release, [{"version": 1}, {"version": 2}])
        await job.send("approval", False, frame=0)
        await first_event(job, FrameCompleted)
        with pytest.raises(ParameterError, match="parameter set 0 takes no event 'approval': it is done"):
            await job.send("approval", True, frame=0)
        await job.cancel()


async def test_times_end_waits(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(limits, {"seconds": 0.01})
        events = [event async for event in job.events()]
        results = {event.place: event.value for event in events if isinstance(event, Result)}
        assert results == {"fallback": 7, "time": "slept"}
        (failed,) = (event for event in events if isinstance(event, Failure) and event.place is None)
        assert "TimeoutError: no event 'b' was sent to parameter set 0 within 0.01 s" in str(failed.error)
        (handled,) = (event for event in events if isinstance(event, FailureHandled))
        assert (handled.type_name, handled.node) == ("TimeoutError", "Wait#0")
        with pytest.raises(JobFailed):
            await job


@pytest.mark.parametrize("seconds", [-1, "1", True, None, float("inf")])
async def test_a_time_that_is_no_number_of_seconds_is_an_error_of_the_statement(connect: Connect, seconds: Any) -> None:
    async with connect(fed) as session:
        job = await session.execute(limits, {"seconds": seconds})
        with pytest.raises(JobFailed, match=r"of a (Wait|Sleep) must be a number that is not negative"):
            await job


async def test_a_job_that_waits_can_be_cancelled(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(release, {"version": 1})
        await waiting(job)
        await job.cancel()
        assert job.status is JobStatus.ABORTED
        assert job.info().waits == ()
        with pytest.raises(ParameterError):
            await job.send("approval", True)


async def test_many_sets_wait_without_calls(connect: Connect) -> None:
    with Pipeline("many") as many:
        Yield(plus(Wait("go", int), 1))
    async with connect(fed) as session:
        job = await session.execute(many, [{} for _ in range(200)])
        await waiting(job, "go", 50)
        await asyncio.gather(*(job.send("go", index, frame=index) for index in range(200)))
        assert sorted([result.value async for result in job]) == list(range(1, 201))


async def test_values_have_the_declared_type(connect: Connect) -> None:
    with Pipeline("types") as types:
        Yield(Wait("choice", Literal["a", "b"]), place="choice")
        Yield(Wait("list", list[int]), place="list")
        Yield(Wait("any"), place="any")
        Yield(Wait("dict", dict[str, float | None]), place="dict")
    async with connect(fed) as session:
        job = await session.execute(types)
        for name, value in (
            ("choice", "c"),
            ("list", [1, "x"]),
            ("any", object()),
            ("any", float("nan")),
            ("dict", {1: 2}),
            ("any", "x" * 70_000),
        ):
            with pytest.raises(ParameterError, match=f"event '{name}'"):
                await job.send(name, value)
        await job.send("choice", "b")
        await job.send("list", ["1", 2])
        await job.send("any", {"é": [1.5, None, 10**30]})
        await job.send("dict", {"x": 1})
        found = await values(job)
        assert found == {"choice": "b", "list": [1, 2], "any": {"é": [1.5, None, 10**30]}, "dict": {"x": 1.0}}


async def test_an_event_and_the_end_of_its_time_are_one_or_the_other(connect: Connect) -> None:
    """A set gets either its event or the fallback, never both, whichever comes first."""
    with Pipeline("race") as race:
        first = Wait("go", int, 0.02, fallback=0)
        Yield(plus(first, Wait("go", int, 0.02, fallback=0, after=first)))
    async with connect(fed) as session:
        job = await session.execute(race, [{} for _ in range(20)])
        for index in range(20):
            await asyncio.sleep(0.002)
            with suppress(ParameterError):  # it is done
                await job.send("go", 1, frame=index)
        found = [result.value async for result in job]
        assert len(found) == 20
        assert set(found) <= {0, 1}
