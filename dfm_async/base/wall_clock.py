"""The time of day, by which jobs start: it goes on while the machine sleeps, and can be changed."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from dfm_async.base.timers import Timer

_LONGEST: Final = 30.0
"""After how many seconds a timer compares the clocks again.

The clock of the event loop stands still while the machine sleeps, and does not follow changes of the time of day: a
timer that slept until its moment would be late by that time. No event reports either of them on every system.
"""
_TOLERANCE: Final = 1e-6
"""By how many seconds a timer may be early: sums of floating-point numbers can be too small."""

_virtual: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Callable[[], float]]] = weakref.WeakKeyDictionary()
"""The clocks of loops whose time is virtual."""


_any_virtual = False
"""Whether there are any, or were: few programs have one, and the time is needed often."""


def replace_wall_clock(loop: asyncio.AbstractEventLoop, clock: Callable[[], float] | None) -> None:
    """Let another clock tell the time of day to what runs on a loop; None: that of the machine."""
    global _any_virtual
    if clock is None:
        _virtual.pop(loop, None)
    else:
        _virtual[loop] = clock
        _any_virtual = True


def wall_time() -> float:
    """Return the time of day, in seconds since 1970."""
    if _any_virtual:
        clock = _virtual.get(asyncio.get_running_loop())
        if clock is not None:
            return clock()
    return time.time()


def moment_text(moment: float) -> str:
    """Return a moment as text, in UTC, such as ``2026-11-20T03:00:00Z``; fractions of a second are left out."""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%dT%H:%M:%SZ}"


class WallTimer:
    """Call a function once when the time of day has come that was set.

    It is called with the time of day. It is at most half a minute late after the machine slept, or its clock was
    changed.
    """

    __slots__ = ("_call", "_moment", "_timer")

    def __init__(self, call: Callable[[float], object]) -> None:
        self._call = call
        self._moment: float | None = None
        self._timer = Timer(self._check)

    def set(self, moment: float | None) -> None:
        """Call the function at this moment and at no other one; None: never."""
        if moment != self._moment:
            self._moment = moment
            self._arm()

    def _arm(self) -> None:
        if self._moment is None:
            self._timer.cancel()
            return
        left = max(0.0, self._moment - wall_time())
        self._timer.set(asyncio.get_running_loop().time() + min(left, _LONGEST))

    def _check(self) -> None:
        moment, now = self._moment, wall_time()
        assert moment is not None  # noqa: S101 - else the timer was cancelled
        if moment - now > _TOLERANCE:
            self._arm()
        else:
            self._moment = None
            self._call(max(now, moment))


async def sleep_until(moment: float) -> None:
    """Return when the time of day has come; at most half a minute late, as a :class:`WallTimer`."""
    come = asyncio.Event()
    timer = WallTimer(lambda _: come.set())
    timer.set(moment)
    try:
        await come.wait()
    finally:
        timer.set(None)
