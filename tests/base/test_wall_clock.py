"""Timers by the time of day: the machine sleeps, and its clock is changed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from dfm_async.base.wall_clock import WallTimer, moment_text, wall_time
from dfm_async.testing import virtual_time

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


async def test_wall_timer_fires_at_its_moment_and_not_before() -> None:
    fired: list[float] = []
    async with virtual_time(NOON) as clock:
        timer = WallTimer(fired.append)
        timer.set(NOON.timestamp() + 86400.5)
        await clock.advance(86400.4)
        assert fired == []
        await clock.advance(0.1)
        assert fired == [NOON.timestamp() + 86400.5]
        await clock.advance(86400)
        assert len(fired) == 1


async def test_wall_timer_can_be_moved_and_cleared() -> None:
    fired: list[float] = []
    async with virtual_time(NOON) as clock:
        timer = WallTimer(fired.append)
        timer.set(NOON.timestamp() + 100)
        timer.set(NOON.timestamp() + 50)
        await clock.advance(60)
        assert fired == [NOON.timestamp() + 50]
        timer.set(NOON.timestamp() + 100)
        timer.set(None)
        await clock.advance(100)
        assert len(fired) == 1
        timer.set(NOON.timestamp())  # it is over
        await clock.advance(0)
        assert fired[1:] == [NOON.timestamp() + 160]


@pytest.mark.parametrize("slept", [3600, 7 * 86400])
async def test_wall_timer_is_not_late_by_the_time_that_the_machine_slept(slept: int) -> None:
    fired: list[float] = []
    async with virtual_time(NOON) as clock:
        WallTimer(fired.append).set(NOON.timestamp() + 3600)
        await clock.advance(10)
        clock.set_wall(NOON + timedelta(seconds=10 + slept))
        await clock.advance(30)
        assert len(fired) == 1


async def test_wall_timer_waits_again_if_the_clock_is_set_back() -> None:
    fired: list[float] = []
    async with virtual_time(NOON) as clock:
        WallTimer(fired.append).set(NOON.timestamp() + 60)
        await clock.advance(40)
        clock.set_wall(NOON)
        await clock.advance(59)
        assert fired == []
        await clock.advance(1)
        assert fired == [NOON.timestamp() + 60]


async def test_virtual_time_of_day_begins_where_the_test_says() -> None:
    async with virtual_time(NOON) as clock:
        await clock.advance(1.5)
        assert (wall_time(), clock.wall) == (NOON.timestamp() + 1.5, NOON + timedelta(seconds=1.5))
        with pytest.raises(ValueError, match="time zone"):
            clock.set_wall(datetime(2026, 3, 1))
    assert abs(datetime.now(UTC).timestamp() - wall_time()) < 60
    with pytest.raises(ValueError, match="time zone"):
        async with virtual_time(datetime(2026, 3, 1)):
            pass
    await asyncio.sleep(0)


def test_moments_are_written_in_utc() -> None:
    assert moment_text(NOON.timestamp() + 0.9) == "2026-03-01T12:00:00Z"
