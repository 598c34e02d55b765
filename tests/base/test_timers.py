"""Timers call once, at the time that was set last, on every event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from dfm_async.base.timers import Timer


async def _in_the_past() -> None:
    fired = asyncio.Event()
    timer = Timer(fired.set)
    now = asyncio.get_running_loop().time()
    timer.set(now - 1)
    timer.advance(now + 1000)
    assert timer.due == now - 1
    await asyncio.wait_for(fired.wait(), 10)
    assert timer.due is None


async def _moved() -> None:
    calls: list[str] = []
    timer = Timer(lambda: calls.append("called"))
    now = asyncio.get_running_loop().time()
    timer.advance(now + 1000)
    timer.advance(now)
    timer.set(now + 1000)
    timer.set(None)
    assert timer.due is None
    timer.set(now)
    timer.cancel()
    other = asyncio.Event()
    Timer(other.set).set(now + 0.01)
    await asyncio.wait_for(other.wait(), 10)
    assert calls == []


async def _set_again_by_its_call() -> None:
    fired = asyncio.Event()
    left = 3

    def call() -> None:
        nonlocal left
        left -= 1
        if left:
            timer.set(asyncio.get_running_loop().time())
        else:
            fired.set()

    timer = Timer(call)
    timer.set(0.0)
    await asyncio.wait_for(fired.wait(), 10)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("check", [_in_the_past, _moved, _set_again_by_its_call])
def test_timer_calls_at_the_time_that_was_set_last(
    loop: Callable[[], asyncio.AbstractEventLoop], check: Callable[[], object]
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())  # type: ignore[arg-type]
