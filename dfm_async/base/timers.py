"""A timer that can be moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Call a function once at a time of the running loop's clock, which can be changed until then.

    It knows the time itself: the handles of some event loops do not report when they are due.
    """

    __slots__ = ("_call", "_handle", "due")

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._handle: asyncio.Handle | None = None
        self.due: float | None = None
        """When the function is called; None if the timer is not set."""

    def set(self, due: float | None) -> None:
        """Call the function at this time and at no other one; None: never."""
        if due != self.due:
            self.cancel()
            if due is not None:
                self.due = due
                self._handle = asyncio.get_running_loop().call_at(due, self._fire)

    def advance(self, due: float) -> None:
        """Call the function at this time, unless it is called earlier."""
        if self.due is None or due < self.due:
            self.set(due)

    def cancel(self) -> None:
        """Do not call the function."""
        self.due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self.due = self._handle = None
        self._call()
