"""Virtual time: the clock of the running loop is stopped, and the test advances it."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from dfm_async.base.wall_clock import replace_wall_clock
from dfm_async.runtime.threads import calls_of_loop

T = TypeVar("T")

_THREAD_GRACE: Final = 1.0
"""How many seconds of real time the clock waits for calls in threads before it moves."""
_LATE_GRACE: Final = 0.02
"""The same, if it has waited in vain and no call has begun or gone on since: they hang, or wait for another call."""


class VirtualClock:
    """The clock of a loop, controlled by a test. Made by :func:`virtual_time`."""

    def __init__(self, loop: asyncio.SelectorEventLoop, at: float | None = None) -> None:
        self._loop = loop
        # Without a fraction: sums of whole seconds are exact, so a timer is due when it should be.
        self._began = self._now = float(math.floor(loop.time()))
        self._goal: float | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._origin = time.time() if at is None else at
        self._late = 0
        """The steps of calls in threads when the clock last moved without waiting for all of them."""
        selector: selectors.BaseSelector = loop._selector  # type: ignore[attr-defined] # noqa: SLF001 - the only way
        self._attributes = vars(selector)
        self._poll: Callable[[float | None], list[Any]] = selector.select

    @property
    def now(self) -> float:
        """The number of seconds that have passed on it."""
        return self._now - self._began

    @property
    def wall(self) -> datetime:
        """The time of day, by which jobs start that have ``start_at`` or a schedule; in UTC."""
        return datetime.fromtimestamp(self._wall(), UTC)

    def _wall(self) -> float:
        return self._origin + self.now

    def set_wall(self, moment: datetime) -> None:
        """Change the time of day, as if the machine had slept, or somebody had set its clock.

        No timer fires by that: what waits for a time of day takes up to 30 seconds to notice it.
        """
        self._origin = _seconds(moment) - self.now

    async def advance(self, seconds: float) -> None:
        """Let time pass: timers fire one after the other, each at its own time, with all their effects.

        With 0 it returns when everything that is ready has run.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a finite number that is not negative, not {seconds}")
        await self._pass(seconds)

    async def until(self, awaitable: Awaitable[T], limit: float = 86400.0) -> T:
        """Wait for an awaitable, and let as much time pass as that takes.

        Args:
            awaitable: what to wait for; cancelled if this is cancelled, or the limit is reached.
            limit: the most seconds that may pass.

        Raises:
            TimeoutError: the limit was reached.
        """
        waiting = asyncio.ensure_future(awaitable)
        try:
            await self._pass(limit, waiting)
            if not waiting.done():
                raise TimeoutError(f"not done after {limit:g} s of virtual time: {waiting!r}")
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])

    async def _pass(self, seconds: float, waiting: asyncio.Future[Any] | None = None) -> None:
        if self._goal is not None:
            raise RuntimeError("another task advances the clock already")
        self._goal = self._now + seconds
        self._arrived = self._loop.create_future()
        try:
            await asyncio.wait([self._arrived, *([waiting] if waiting else [])], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._goal = None
            self._arrived.cancel()
            self._arrived = None

    # the loop

    def begin(self) -> None:
        """Replace the loop's own clock."""
        vars(self._loop)["time"] = lambda: self._now
        replace_wall_clock(self._loop, self._wall)
        self._attributes["select"] = self._select

    def end(self) -> None:
        """Restore the loop's clock. It continues from here: timers keep their distance."""
        vars(self._loop).pop("time")
        replace_wall_clock(self._loop, None)
        ahead, real = self._now - self._loop.time(), self._loop.time
        vars(self._loop)["time"] = lambda: real() + ahead
        del self._attributes["select"]

    def _select(self, timeout: float | None) -> list[Any]:
        """Replace ``select``, which the loop calls when it has nothing to do until a timeout."""
        if timeout is not None and timeout <= 0:
            return self._poll(timeout)
        found = self._poll(0)
        if found:
            return found
        if self._goal is None or self._arrived is None or self._arrived.done():
            return self._poll(None)  # the clock is stopped: only others can wake us
        busy, steps = calls_of_loop(self._loop)
        if busy:  # the return of a call wakes the poll
            found = self._poll(_LATE_GRACE if steps == self._late else _THREAD_GRACE)
            if found:
                return found
            self._late = steps
        # The time of the next timer itself: sums of floating-point numbers can be too small, and it would never fire.
        timers: Any = self._loop._scheduled  # type: ignore[attr-defined] # noqa: SLF001 - as above
        following = timers[0].when() if timeout is not None and timers else math.inf
        if following <= self._goal:
            self._now = following
        else:
            self._now = self._goal
            self._arrived.set_result(None)
        return []


def _seconds(moment: datetime) -> float:
    if moment.utcoffset() is None:
        raise ValueError(f"the moment must have a time zone, which {moment!r} has not: pass tzinfo=UTC")
    return moment.timestamp()


@asynccontextmanager
async def virtual_time(at: datetime | None = None) -> AsyncIterator[VirtualClock]:
    """Stop the clock of the running loop for a block; the test advances it.

    Timeouts, deadlines and retry delays of the loop then take no real time, and occur in the same order every time.
    Threads and processes continue in real time. Before the clock advances, it waits for calls of synchronous
    operations, up to a second of real time; it does not wait for synchronous generators, nor for processes.

    Args:
        at: the time of day when the block begins; by default that of the machine. It advances with the clock, and
            decides when jobs start that have ``start_at`` or a schedule.

    Raises:
        RuntimeError: the loop is not asyncio's own, or its time is already virtual.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.SelectorEventLoop):
        kind = f"{type(loop).__module__}.{type(loop).__name__}"
        raise RuntimeError(f"virtual time needs asyncio's own loop, not {kind}")  # noqa: TRY004 - it is not an argument
    clock = VirtualClock(loop, None if at is None else _seconds(at))
    if "select" in vars(loop._selector):  # type: ignore[attr-defined] # noqa: SLF001 - as above
        raise RuntimeError("the time of this loop is already virtual")
    clock.begin()
    try:
        yield clock
    finally:
        clock.end()
