"""Sends now and then what gathers all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Paced"]


class Paced:
    """Sends at the end of this turn of the loop, or when the pause since the last time is over.

    Args:
        pause: how many seconds lie between two times.
        send: sends what there is, and tells whether there was anything.
    """

    __slots__ = ("_due", "_pause", "_send", "_timer")

    def __init__(self, pause: float, send: Callable[[], bool]) -> None:
        self._pause = pause
        self._send = send
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """There is something to send."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._due, loop.time()), self.now)

    def now(self) -> None:
        """Sends without regard to the pause."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._send():
            self._due = asyncio.get_running_loop().time() + self._pause
