"""Deadlines stand still while they are suspended."""

from __future__ import annotations

import asyncio

from dfm_async.base.suspension import suspension
from dfm_async.testing import virtual_time


async def test_timers_go_on_where_they_were_suspended() -> None:
    async with virtual_time() as clock:
        found, begun = suspension(), asyncio.get_running_loop().time()
        fired: list[float] = []
        changes: list[bool] = []
        found.subscribe(changes.append)

        def fire() -> None:
            fired.append(asyncio.get_running_loop().time() - begun)

        found.call_later(10.0, fire)
        await clock.advance(4.0)
        found.hold()
        found.hold()
        found.call_later(1.0, fire)
        cancelled = found.call_later(2.0, fire)
        await clock.advance(100.0)
        found.release()
        await clock.advance(100.0)
        assert (fired, found.active, found.lost) == ([], True, 200.0)
        cancelled.cancel()
        found.release()
        await clock.advance(100.0)
        assert (fired, found.active, found.lost) == ([205.0, 210.0], False, 200.0)
        assert changes == [True, False]
        found.unsubscribe(changes.append)
