"""Virtual time: what takes hours happens at once, in the right order."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from dfm_async import Federation, JobAborted, JobFailed, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.testing import Faults, virtual_time

fed = Federation("slow")
lab = fed.site("lab")


@lab.operation
async def wait(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@lab.operation(deadline=30)
async def late(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@lab.operation(retry=RetryPolicy(attempts=4, backoff=60, max_backoff=3600))
async def flaky() -> str:
    return "done"


with Pipeline("waits") as waits:
    Yield(wait(PlaceParam("seconds")))

with Pipeline("lates") as lates:
    Yield(late(PlaceParam("seconds")))

with Pipeline("flaky") as flakies:
    Yield(flaky())


async def test_timers_fire_in_order_each_at_its_own_time() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, clock.now))
        if name == "b":
            await asyncio.sleep(1)
            seen.append(("after b", clock.now))

    async with virtual_time() as clock, asyncio.TaskGroup() as group:
        for name, seconds in (("c", 5), ("a", 1), ("b", 2)):
            group.create_task(note(name, seconds))
        await clock.advance(3.5)
        assert [(name, round(at, 6)) for name, at in seen] == [("a", 1), ("b", 2), ("after b", 3)]
        assert clock.now == pytest.approx(3.5)
        await clock.advance(1e6)
        assert seen[-1] == ("c", pytest.approx(5))


async def test_nothing_happens_before_its_time() -> None:
    async with virtual_time() as clock:
        task = asyncio.ensure_future(asyncio.sleep(10))
        await clock.advance(9.999)
        assert not task.done()
        await clock.advance(0.001)
        assert task.done()


async def test_advancing_by_nothing_lets_happen_what_can() -> None:
    async with virtual_time() as clock:
        steps = []

        async def step() -> None:
            for number in range(5):
                await asyncio.sleep(0)
                steps.append(number)

        task = asyncio.ensure_future(step())
        await clock.advance(0)
        assert (steps, task.done(), clock.now) == ([0, 1, 2, 3, 4], True, 0)


async def test_a_deadline_of_a_job_takes_no_time() -> None:
    began = time.monotonic()
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        job = await session.execute(waits, {"seconds": 1e9}, deadline=3600)
        await clock.advance(3599)
        assert not job.status.terminal
        await clock.advance(1)
        with pytest.raises(JobAborted, match="deadline of 3600 s"):
            await job
    assert time.monotonic() - began < 5


async def test_a_deadline_of_an_operation_takes_no_time() -> None:
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        job = await session.execute(lates, [{"seconds": 29}, {"seconds": 31}])
        with pytest.raises(JobFailed, match="the deadline of 30 s"):
            await clock.until(job)
        assert clock.now == pytest.approx(30)


async def test_retry_pauses_take_no_time() -> None:
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        Faults(session).fail_operation("flaky", OSError, times=3)
        job = await session.execute(flakies)
        assert (await clock.until(job.first())).value == "done"
        assert clock.now == pytest.approx(60 + 120 + 240)


async def test_a_delay_takes_no_time() -> None:
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        Faults(session).delay("wait", 500)
        await clock.until(await session.execute(waits, {"seconds": 20}))
        assert clock.now == pytest.approx(520)


async def test_waiting_has_a_limit() -> None:
    async with virtual_time() as clock:
        event = asyncio.Event()
        waiting = asyncio.ensure_future(event.wait())
        with pytest.raises(TimeoutError, match="100 s have passed"):
            await clock.until(waiting, limit=100)
        assert (waiting.cancelled(), clock.now) == (True, pytest.approx(100))
        assert await clock.until(asyncio.sleep(1, "x"), limit=1) == "x"


async def test_a_thread_can_wake_the_loop_while_time_stands_still() -> None:
    async with virtual_time() as clock:
        assert await asyncio.to_thread(lambda: 7) == 7
        assert clock.now == 0
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_the_loop_has_its_clock_back_and_timers_keep_their_distance() -> None:
    loop = asyncio.get_running_loop()
    async with virtual_time() as clock:
        await clock.advance(1000)
        fired = loop.create_future()
        loop.call_later(0.01, fired.set_result, None)
    began = time.monotonic()
    await fired
    assert 0 < time.monotonic() - began < 5
    await asyncio.sleep(0.001)
    async with virtual_time() as clock:
        await clock.until(asyncio.sleep(50))
        assert clock.now == pytest.approx(50)


async def test_what_cannot_be_is_refused() -> None:
    async with virtual_time() as clock:
        with pytest.raises(RuntimeError, match="virtual already"):
            async with virtual_time():
                pass
        with pytest.raises(ValueError, match="not -1"):
            await clock.advance(-1)
        moving = asyncio.ensure_future(clock.until(asyncio.Event().wait()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="somebody else"):
            await clock.advance(1)
        moving.cancel()
        await asyncio.wait([moving])
        await clock.advance(1)


def test_a_loop_whose_clock_cannot_be_stopped_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"not uvloop\.Loop"):
            async with virtual_time():
                pass

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
