"""Virtual time: what takes hours happens at once, in the right order."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import uvloop

from dfm_async import Federation, JobAborted, JobFailed, JobStatus, OperationContext, RetryPolicy, Session
from dfm_async.testing import Faults, virtual_time
from tests.support.pipelines import pipeline_of

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


@lab.operation(retry=RetryPolicy(attempts=4, backoff=60, max_backoff=3600, jitter=0))
async def flaky() -> str:
    return "done"


released = threading.Event()


@lab.operation(deadline=5)
def blocking(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@lab.operation(deadline=5)
def hanging() -> None:
    released.wait()


@lab.operation(deadline=5)
def waiting(seconds: float, context: OperationContext) -> float:
    context.wait(asyncio.sleep(seconds))
    return seconds


waits = pipeline_of(wait, "seconds")
lates = pipeline_of(late, "seconds")
flakies = pipeline_of(flaky)


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


async def test_advancing_by_zero_runs_what_is_ready() -> None:
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
        with pytest.raises(TimeoutError, match="100 s"):
            await clock.until(waiting, limit=100)
        assert (waiting.cancelled(), clock.now) == (True, pytest.approx(100))
        assert await clock.until(asyncio.sleep(1, "x"), limit=1) == "x"


async def test_thread_wakes_the_loop_while_the_clock_is_stopped() -> None:
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


async def test_invalid_times_are_refused() -> None:
    async with virtual_time() as clock:
        with pytest.raises(RuntimeError, match="already virtual"):
            async with virtual_time():
                pass
        with pytest.raises(ValueError, match="not -1"):
            await clock.advance(-1)
        moving = asyncio.ensure_future(clock.until(asyncio.Event().wait()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
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


async def test_the_clock_waits_for_synchronous_operations() -> None:
    pipeline = pipeline_of(blocking, "seconds")
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        job = await session.execute(pipeline, [{"seconds": 0.02}] * 20)
        assert await clock.until(job) is JobStatus.FINISHED
        assert clock.now < 5


async def test_a_synchronous_operation_that_hangs_exceeds_its_deadline() -> None:
    pipeline = pipeline_of(hanging)
    released.clear()
    try:
        async with virtual_time() as clock, Session(fed, target="inline") as session:
            with pytest.raises(JobFailed, match="deadline of 5 s"):
                await clock.until(await session.execute(pipeline))
            released.set()
    finally:
        released.set()


async def test_a_synchronous_operation_can_wait_for_virtual_time() -> None:
    pipeline = pipeline_of(waiting, seconds=4.0)
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        assert await clock.until(await session.execute(pipeline)) is JobStatus.FINISHED
        assert clock.now == pytest.approx(4.0)
