"""``gather(..., within=...)``: the time of a call includes everything that the call waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dfm_async import Federation, Pipeline, RetryPolicy, Session, Yield, gather
from dfm_async.testing import virtual_time
from tests.support.waiting import until

fed = Federation("within")
site, narrow = fed.site("site"), fed.site("narrow", threads=1)
running: list[int] = []
released = threading.Event()


@site.operation(limit=1)
async def in_turn(n: int) -> int:
    running.append(n)
    await asyncio.sleep(8)
    return n


@site.operation(deadline=8)
async def too_slow(n: int) -> int:
    await asyncio.sleep(100)
    return n


@narrow.operation
def blocking(n: int) -> int:
    running.append(n)
    released.wait()
    return n


def two_of(operation: object, within: float) -> Pipeline:
    with Pipeline("two") as pipeline:
        replies = gather([operation(n) for n in range(2)], at_least=0, within=within)  # type: ignore[operator]
        Yield([replies, replies.failures])
    return pipeline


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    running.clear()
    released.clear()


async def test_within_includes_the_wait_for_a_limit_of_the_site() -> None:
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        job = await session.execute(two_of(in_turn, 10))
        good, failures = (await clock.until(job.first())).value
        assert clock.now == pytest.approx(10)
    assert [reply.value for reply in good] == [0]
    assert [failure.message for failure in failures] == ["no result of 'in_turn' within 10 s"]
    assert running == [0, 1]


async def test_a_call_that_waits_for_too_long_does_not_run() -> None:
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        job = await session.execute(two_of(in_turn, 7))
        good, failures = (await clock.until(job.first())).value
        assert clock.now == pytest.approx(7)
        await clock.advance(100)
    assert not good
    assert [failure.message for failure in failures] == [
        "no result of 'in_turn' within 7 s",
        "no result of 'in_turn' within 7 s: it was still waiting",
    ]
    assert running == [0]


async def test_within_includes_the_wait_for_a_thread() -> None:
    async with asyncio.timeout(10), Session(fed, target="inline") as session:
        first = asyncio.create_task(session.call(blocking, 9))
        await until(lambda: running == [9])
        good, failures = (await (await session.execute(two_of(blocking, 0.2))).first()).value
        released.set()
        assert await first == 9
    assert not good
    assert [failure.message for failure in failures] == [
        "no result of 'blocking' within 0.2 s: it was still waiting",
    ] * 2
    assert running == [9]


async def test_within_limits_all_attempts_and_a_deadline_each_of_them() -> None:
    with Pipeline("attempts") as pipeline:
        policy = RetryPolicy(attempts=5, backoff=1, jitter=0)
        Yield(gather([too_slow(1, retry=policy)], at_least=0, within=20).failures)
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        (failure,) = (await clock.until((await session.execute(pipeline)).first())).value
        assert clock.now == pytest.approx(20)  # 8, 1, 8, 2, 1
    assert failure.message == "no result of 'too_slow' within 20 s"
