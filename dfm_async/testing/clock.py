"""Virtual time: the clock of the running loop stands still, until the test moves it."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

__all__ = ["VirtualClock", "virtual_time"]

T = TypeVar("T")


class VirtualClock:
    """The clock of a loop, in the hand of a test. Made by :func:`virtual_time`."""

    def __init__(self, loop: asyncio.SelectorEventLoop) -> None:
        self._loop = loop
        self._began = self._now = loop.time()
        self._goal: float | None = None
        self._arrived: asyncio.Future[None] | None = None
        selector: selectors.BaseSelector = loop._selector  # type: ignore[attr-defined] # noqa: SLF001 - the only way
        self._attributes = vars(selector)
        self._poll: Callable[[float | None], list[Any]] = selector.select

    @property
    def now(self) -> float:
        """How many seconds have passed on it."""
        return self._now - self._began

    async def advance(self, seconds: float) -> None:
        """Lets so much time pass: timers fire one after the other, each at its own time, and what they cause happens.

        With 0 it returns when everything that can happen now has happened.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"time passes by a number of seconds, not {seconds}")
        await self._pass(seconds)

    async def until(self, awaitable: Awaitable[T], limit: float = 86400.0) -> T:
        """Waits for something, and lets as much time pass as that takes.

        Args:
            awaitable: what to wait for; cancelled if this is, or if the limit is reached.
            limit: how many seconds may pass.

        Raises:
            TimeoutError: the limit was reached.
        """
        waiting = asyncio.ensure_future(awaitable)
        try:
            await self._pass(limit, waiting)
            if not waiting.done():
                raise TimeoutError(f"{limit:g} s have passed, and it has not happened: {waiting!r}")
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])

    async def _pass(self, seconds: float, waiting: asyncio.Future[Any] | None = None) -> None:
        if self._goal is not None:
            raise RuntimeError("somebody else moves the clock already")
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
        """Takes the place of the loop's own clock."""
        vars(self._loop)["time"] = lambda: self._now
        self._attributes["select"] = self._select

    def end(self) -> None:
        """Gives the loop its clock back. It goes on from here: timers that are set keep their distance."""
        vars(self._loop).pop("time")
        ahead, real = self._now - self._loop.time(), self._loop.time
        vars(self._loop)["time"] = lambda: real() + ahead
        del self._attributes["select"]

    def _select(self, timeout: float | None) -> list[Any]:
        """What the loop asks when it has nothing to do for so long."""
        if timeout is not None and timeout <= 0:
            return self._poll(timeout)
        found = self._poll(0)
        if found:
            return found
        if self._goal is None or self._arrived is None or self._arrived.done():
            return self._poll(None)  # time stands still: only others can wake us
        following = math.inf if timeout is None else self._now + timeout
        if following <= self._goal:
            self._now = following
        else:
            self._now = self._goal
            self._arrived.set_result(None)
        return []


@asynccontextmanager
async def virtual_time() -> AsyncIterator[VirtualClock]:
    """Stops the clock of the running loop for a block; the test moves it.

    Timeouts, deadlines and retry pauses of the loop take no real time then, and happen in the same order every time.
    Only what runs on this loop is meant: threads (synchronous operations) and processes go on in real time, and the
    clock does not wait for them.

    Raises:
        RuntimeError: the loop is not asyncio's own, or its time is virtual already.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.SelectorEventLoop):
        kind = f"{type(loop).__module__}.{type(loop).__name__}"
        raise RuntimeError(f"virtual time needs asyncio's own loop, not {kind}")  # noqa: TRY004 - nobody passed it
    clock = VirtualClock(loop)
    if "select" in vars(loop._selector):  # type: ignore[attr-defined] # noqa: SLF001 - as above
        raise RuntimeError("the time of this loop is virtual already")
    clock.begin()
    try:
        yield clock
    finally:
        clock.end()
