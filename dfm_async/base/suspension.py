"""Deadlines that are paused while a person debugs code of the event loop, or of a process that it has started."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from typing import Final


def _now() -> float:
    return asyncio.get_running_loop().time()


class Suspension:
    """Suspends the deadlines of one event loop."""

    def __init__(self) -> None:
        self._holds = 0
        self._since: float | None = None
        self._lost = 0.0
        self._timers: set[DeadlineTimer] = set()
        self._subscribers: dict[Callable[[bool], None], None] = {}

    @property
    def active(self) -> bool:
        """Whether deadlines are suspended."""
        return self._since is not None

    @property
    def lost(self) -> float:
        """For how many seconds deadlines have been suspended so far."""
        since = self._since
        return self._lost if since is None else self._lost + _now() - since

    @property
    def time(self) -> float:
        """The time of a clock that is paused while deadlines are suspended."""
        return _now() - self.lost

    def overdue(self, now: float) -> float:
        """Return for how many seconds a deadline is over that the loop has not noticed. Any thread may call it.

        Args:
            now: the time of the loop, which may be blocked.
        """
        return max((now - timer.due for timer in tuple(self._timers)), default=0.0)

    def hold(self) -> None:
        """Suspend deadlines until :meth:`release` was called as often."""
        self._holds += 1
        if self._holds == 1:
            self._since = _now()
            self._changed()

    def release(self) -> None:
        """Let deadlines go on."""
        self._holds -= 1
        if not self._holds:
            self._lost, self._since = self.lost, None
            self._changed()

    def _changed(self) -> None:
        for timer in self._timers:
            timer.suspend(suspended=self.active)
        for call in list(self._subscribers):
            call(self.active)

    def subscribe(self, call: Callable[[bool], None]) -> None:
        """Call back with whether deadlines are suspended, whenever that changes."""
        self._subscribers[call] = None

    def unsubscribe(self, call: Callable[[bool], None]) -> None:
        """Stop calling back."""
        self._subscribers.pop(call, None)

    def call_later(self, seconds: float, call: Callable[[], object]) -> DeadlineTimer:
        """Call back after this number of seconds, not counting those in which deadlines are suspended."""
        timer = DeadlineTimer(seconds, call, self._timers)
        if not self.active:
            timer.suspend(suspended=False)
        return timer


class DeadlineTimer:
    """A timer that can be suspended."""

    __slots__ = ("_among", "_call", "_due", "_handle", "_left")

    def __init__(self, seconds: float, call: Callable[[], object], among: set[DeadlineTimer]) -> None:
        self._left = seconds
        self._due = 0.0
        self._call = call
        self._handle: asyncio.TimerHandle | None = None
        self._among = among
        among.add(self)

    @property
    def due(self) -> float:
        """When it calls back; infinite while it is suspended."""
        return math.inf if self._handle is None else self._due

    def suspend(self, *, suspended: bool) -> None:
        """Stop the timer, or let it go on."""
        loop = asyncio.get_running_loop()
        if not suspended:
            self._due = loop.time() + self._left
            self._handle = loop.call_at(self._due, self._fire)
        elif self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self._left = max(0.0, self._due - loop.time())

    def cancel(self) -> None:
        """Do not call back."""
        self._among.discard(self)
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._among.discard(self)
        self._handle = None
        self._call()


_suspensions: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Suspension]] = weakref.WeakKeyDictionary()


def suspension() -> Suspension:
    """Return what suspends the deadlines of the running loop."""
    loop = asyncio.get_running_loop()
    found = _suspensions.get(loop)
    if found is None:
        found = _suspensions[loop] = Suspension()
    return found
