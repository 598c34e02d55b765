"""What the logs of ended jobs may hold together."""

from __future__ import annotations

import weakref
from typing import Final

from dfm_async.results.log import ResultLog

__all__ = ["Retention"]

_LIMIT: Final = 64 * 1024 * 1024
_HEAVY: Final = 1024 * 1024


class Retention:
    """Has the logs of ended jobs drop what was read, the oldest first, when they hold too much together.

    A session remembers many ended jobs. Without this, large results that everybody has seen would fill the memory, and
    the arenas of the sites that they came from. What nobody has read is never dropped.

    Args:
        limit: how many bytes of encoded values these logs may hold.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._logs: list[weakref.ref[ResultLog]] = []

    def ended(self, log: ResultLog) -> None:
        """Adds the log of a job that has ended. Those of small ones do not matter."""
        if log.size >= _HEAVY:
            self._logs.append(weakref.ref(log))
            self.tidy()

    def tidy(self) -> None:
        """Drops what may be dropped. Called when a job ends, and when another one begins."""
        if not self._logs:
            return
        logs = [log for log in (found() for found in self._logs) if log is not None]
        total = sum(log.size for log in logs)
        for log in logs:
            if total <= self._limit:
                break
            before = log.size
            log.shed()
            total -= before - log.size
        self._logs = [weakref.ref(log) for log in logs if log.size >= _HEAVY]
