"""Metrics on their way from a program to its site: how many, and when there is room for more."""

from __future__ import annotations

import asyncio

__all__ = ["MetricQueue"]


class MetricQueue:
    """Counts what was sent and what was taken.

    Args:
        limit: how many may be on their way.
    """

    __slots__ = ("_changed", "_limit", "_sent", "_taken")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent = 0
        self._taken = 0
        self._changed: asyncio.Future[None] | None = None

    @property
    def missing(self) -> int:
        """How many the site has not taken yet."""
        return self._sent - self._taken

    @property
    def full(self) -> bool:
        """Whether as many are on their way as may be."""
        return self.missing >= self._limit

    def next(self) -> int:
        """The number of the next one, which is on its way from now on."""
        self._sent += 1
        return self._sent

    def taken(self, number: int) -> None:
        """The site has taken all up to this number."""
        self._taken = max(self._taken, min(number, self._sent))
        self.wake()

    def wake(self) -> None:
        """Lets everybody who waits look."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def changed(self, until: float | None = None) -> None:
        """Waits until something was taken, somebody wakes us, or it is that late."""
        loop = asyncio.get_running_loop()
        if self._changed is None or self._changed.done():
            self._changed = loop.create_future()
        await asyncio.wait({self._changed}, timeout=None if until is None else until - loop.time())
