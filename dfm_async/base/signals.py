"""Waiting and notifying on one loop: repeated signals, outcomes that come once, throttled calls and signals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Let any number of tasks wait until something has changed.

    A signal keeps no state: :meth:`notify` wakes the tasks that wait at that moment, and each of them has to check its
    condition again, as :meth:`wait_until` does. No change is missed as long as there is no ``await`` between the check
    and the wait. The cancellation of one waiter does not affect the others.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[bool], None] | None = None  # made when there is one: signals are many

    def __len__(self) -> int:
        """Return the number of tasks that wait."""
        return len(self._waiters) if self._waiters else 0

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, None
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(True)

    async def wait(self, until: float | None = None) -> bool:
        """Wait for the next notification.

        Args:
            until: the time of the loop at which to stop waiting.

        Returns:
            whether there was a notification.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        if self._waiters is None:
            self._waiters = {}
        self._waiters[waiter] = None
        timer = None if until is None else loop.call_at(until, _time_out, waiter)
        try:
            return await waiter
        finally:
            if self._waiters:
                self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()

    async def wait_until(self, condition: Callable[[], object]) -> None:
        """Return once a condition is true. It is checked now, and after each notification."""
        while not condition():
            await self.wait()


def _time_out(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class Outcome(asyncio.Future[T]):
    """A result or an error that comes once, from whichever source is first.

    As a future it can be passed to :func:`asyncio.wait`. Use :meth:`wait` where several tasks may wait: a task that is
    cancelled while it awaits a future directly cancels the future as well.

    Args:
        loop: the loop of its waiters, if it is not the running one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(loop=asyncio.get_running_loop() if loop is None else loop)

    def settle(self, value: T) -> bool:
        """Set the result, unless there is an outcome already. Return whether this was the first."""
        if self.done():
            return False
        self.set_result(value)
        return True

    def fail(self, error: BaseException) -> bool:
        """Set an error, unless there is an outcome already. Return whether this was the first.

        An error that nobody receives is not reported.
        """
        if self.done():
            return False
        if isinstance(error, StopIteration):  # futures refuse it
            cause, error = error, RuntimeError("StopIteration was raised")
            error.__cause__ = cause
        self.set_exception(error)
        self.exception()
        return True

    async def wait(self) -> T:
        """Return the result, or raise the error. The cancellation of a waiter does not cancel the outcome."""
        if not self.done():
            await asyncio.wait([self])
        return self.result()


class Throttle:
    """Call a function soon after each request, but at most once per interval: requests are coalesced.

    Args:
        interval: the number of seconds between two calls.
        call: is called without arguments, on the loop. If it returns False, there was nothing to do, and the next call
            does not wait for the interval.
        delay: the number of seconds that a request waits at least; 0 for the end of the current turn of the loop.
    """

    __slots__ = ("_call", "_delay", "_due", "_interval", "_timer")

    def __init__(self, interval: float, call: Callable[[], bool | None], delay: float = 0.0) -> None:
        self._interval = interval
        self._call = call
        self._delay = delay
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Schedule a call, unless one is scheduled."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._due, loop.time() + self._delay), self.flush)

    def flush(self) -> None:
        """Call now, whether requested or not, without regard to the interval."""
        self.cancel()
        if self._call() is not False:
            self._due = asyncio.get_running_loop().time() + self._interval

    def cancel(self) -> None:
        """Drop a scheduled call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_interval(interval: float) -> float:
    """Return an interval between notifications.

    Raises:
        ValueError: it is not a number of seconds.
    """
    if not isinstance(interval, (int, float)) or not interval >= 0:
        raise ValueError(f"interval must be a number of seconds, 0 or more, not {interval!r}")
    return interval


class ThrottledSignal:
    """Wakes one reader at most once per interval: notifications while it is busy, or too early, are coalesced."""

    def __init__(self, interval: float) -> None:
        self._interval = check_interval(interval)
        self._notified = asyncio.Event()
        self._ended = asyncio.Event()
        self._next = 0.0

    @property
    def closed(self) -> bool:
        """Whether nothing will change any longer."""
        return self._ended.is_set()

    def notify(self) -> None:
        """Report a change."""
        self._notified.set()

    def close(self) -> None:
        """Report the last change: it wakes the reader without delay."""
        self._ended.set()
        self._notified.set()

    async def wait(self) -> None:
        """Wait until there was a notification and the interval is over, or until it is closed."""
        await self._notified.wait()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next):
                await self._ended.wait()
        self._notified.clear()
        self._next = loop.time() + self._interval


class Notifier:
    """Notifies all subscribers of the changes of one thing."""

    def __init__(self) -> None:
        self._signals: set[ThrottledSignal] = set()
        self._closed = False

    def subscribe(self, interval: float) -> ThrottledSignal:
        """Return a signal of its own for a subscriber. It is notified at once, to get the present state."""
        signal = ThrottledSignal(interval)
        signal.notify()
        if self._closed:
            signal.close()
        self._signals.add(signal)
        return signal

    def unsubscribe(self, signal: ThrottledSignal) -> None:
        """Remove a subscriber."""
        self._signals.discard(signal)

    def notify(self) -> None:
        """Report a change."""
        for signal in self._signals:
            signal.notify()

    def close(self) -> None:
        """Report the last change."""
        self._closed = True
        for signal in self._signals:
            signal.close()
