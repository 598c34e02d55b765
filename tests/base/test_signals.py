"""Signals, outcomes and throttled calls."""

from __future__ import annotations

import asyncio

import pytest

from dfm_async.base.signals import Outcome, Signal, Throttle
from dfm_async.testing import virtual_time


async def turns(count: int = 3) -> None:
    """Let everything happen that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_signal_wakes_every_waiter() -> None:
    signal = Signal()
    waiters = [asyncio.ensure_future(signal.wait()) for _ in range(3)]
    await turns()
    assert len(signal) == 3
    signal.notify()
    assert await asyncio.gather(*waiters) == [True, True, True]
    assert not len(signal)


async def test_signal_keeps_no_notification() -> None:
    signal = Signal()
    signal.notify()
    waiter = asyncio.ensure_future(signal.wait())
    await turns()
    assert not waiter.done()
    signal.notify()
    assert await waiter


async def test_signal_survives_the_cancellation_of_a_waiter() -> None:
    signal = Signal()
    first, second = asyncio.ensure_future(signal.wait()), asyncio.ensure_future(signal.wait())
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    assert len(signal) == 1
    signal.notify()
    assert await second


async def test_signal_raises_the_cancellation_that_comes_with_a_notification() -> None:
    signal = Signal()
    waiter = asyncio.ensure_future(signal.wait())
    await turns()
    signal.notify()
    waiter.cancel()
    await turns()
    assert waiter.cancelled()
    assert not len(signal)


async def test_signal_notified_after_a_cancellation_in_the_same_turn() -> None:
    signal = Signal()
    waiter = asyncio.ensure_future(signal.wait())
    await turns()
    waiter.cancel()
    signal.notify()
    await turns()
    assert waiter.cancelled()


async def test_signal_wait_ends_at_its_time() -> None:
    async with virtual_time() as clock:
        signal, now = Signal(), asyncio.get_running_loop().time()
        assert not await clock.until(signal.wait(now + 5))
        assert clock.now == pytest.approx(5)
        assert not len(signal)
        assert not await clock.until(signal.wait(now))


async def test_signal_notified_before_the_time_leaves_no_timer() -> None:
    async with virtual_time() as clock:
        signal = Signal()
        waiter = asyncio.ensure_future(signal.wait(asyncio.get_running_loop().time() + 5))
        await clock.advance(1)
        signal.notify()
        assert await waiter
        await clock.advance(10)


async def test_signal_wait_until_checks_after_each_notification() -> None:
    signal, values = Signal(), list[int]()
    waiter = asyncio.ensure_future(signal.wait_until(lambda: len(values) == 2))
    for value in range(2):
        await turns()
        assert not waiter.done()
        values.append(value)
        signal.notify()
    await waiter


async def test_signal_wait_until_returns_at_once_if_the_condition_is_true() -> None:
    await Signal().wait_until(lambda: True)


async def test_outcome_keeps_the_first_result() -> None:
    outcome: Outcome[int] = Outcome()
    assert outcome.settle(1)
    assert not outcome.settle(2)
    assert not outcome.fail(ValueError())
    assert await outcome.wait() == await outcome == 1


async def test_outcome_raises_its_error_in_every_waiter() -> None:
    outcome: Outcome[int] = Outcome()
    waiters = [asyncio.ensure_future(outcome.wait()) for _ in range(2)]
    await turns()
    assert outcome.fail(KeyError("missing"))
    assert not outcome.settle(1)
    for waiter in waiters:
        with pytest.raises(KeyError, match="missing"):
            await waiter


async def test_outcome_carries_stop_iteration_as_a_cause() -> None:
    outcome: Outcome[int] = Outcome()
    outcome.fail(StopIteration(3))
    with pytest.raises(RuntimeError) as found:
        await outcome.wait()
    assert isinstance(found.value.__cause__, StopIteration)


async def test_outcome_survives_the_cancellation_of_a_waiter() -> None:
    outcome: Outcome[str] = Outcome()
    first, second = asyncio.ensure_future(outcome.wait()), asyncio.ensure_future(outcome.wait())
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    outcome.settle("result")
    assert await second == "result"


async def test_throttle_calls_once_for_many_requests() -> None:
    calls: list[float] = []
    async with virtual_time() as clock:
        throttle = Throttle(1.0, lambda: calls.append(clock.now))
        for _ in range(3):
            throttle.request()
        assert not calls
        await clock.advance(0)
        assert calls == [0.0]
        throttle.request()
        throttle.request()
        await clock.advance(0.9)
        assert len(calls) == 1
        await clock.advance(5)
        assert calls == pytest.approx([0.0, 1.0])
        throttle.request()
        await clock.advance(0)
        assert calls == pytest.approx([0.0, 1.0, 5.9])


async def test_throttle_waits_for_its_delay() -> None:
    calls: list[float] = []
    async with virtual_time() as clock:
        throttle = Throttle(1.0, lambda: calls.append(clock.now), delay=0.5)
        throttle.request()
        await clock.advance(0.4)
        assert not calls
        await clock.advance(1)
        assert calls == pytest.approx([0.5])


async def test_throttle_flush_does_not_wait_and_drops_the_scheduled_call() -> None:
    calls: list[float] = []
    async with virtual_time() as clock:
        throttle = Throttle(1.0, lambda: calls.append(clock.now))
        throttle.request()
        throttle.flush()
        assert calls == [0.0]
        await clock.advance(5)
        assert calls == [0.0]


async def test_throttle_starts_no_interval_if_there_was_nothing_to_do() -> None:
    calls: list[float] = []

    def call() -> bool:
        calls.append(clock.now)
        return False

    async with virtual_time() as clock:
        throttle = Throttle(1.0, call)
        throttle.flush()
        throttle.request()
        await clock.advance(0)
        assert calls == [0.0, 0.0]


async def test_throttle_cancel_drops_the_scheduled_call() -> None:
    calls: list[float] = []
    async with virtual_time() as clock:
        throttle = Throttle(1.0, lambda: calls.append(clock.now))
        throttle.cancel()
        throttle.request()
        throttle.cancel()
        await clock.advance(5)
        assert not calls
