"""What the logs of ended jobs may hold together."""

from __future__ import annotations

import weakref
from typing import Final

from dfm_async.results.log import ResultLog

__all__ = ["Retention"]

_LIMIT: Final = 64 * 1024 * 1024
_HEAVY: Final = 1024 * 1024


class Retention:
    """Bounds the memory that the logs of ended jobs take together.

    A session remembers many ended jobs. When their logs hold too much, they drop what was read, the oldest first, and
    the arenas of the sites that it came from are free again. When what nobody has read is too much as well, the logs of
    the oldest jobs are dropped as a whole; their readers get ``ResultsExpired``. The log of the job that has ended last
    always stays.

    Args:
        limit: how many bytes of encoded values large logs may hold that were read.
        unread_limit: how many bytes all logs may take, read or not.
    """

    def __init__(self, limit: int = _LIMIT, unread_limit: int | None = None) -> None:
        self._limit = limit
        self._unread_limit = unread_limit
        self._logs: list[weakref.ref[ResultLog]] = []
        self._all: list[weakref.ref[ResultLog]] = []
        self._weight = 0  # at most: what was dropped since the last look is counted

    def ended(self, log: ResultLog) -> None:
        """Add the log of a job that has ended."""
        if log.size >= _HEAVY:
            self._logs.append(weakref.ref(log))
            self.tidy()
        if self._unread_limit is not None:
            self._all.append(weakref.ref(log))
            self._weight += log.weight
            if self._weight > self._unread_limit:
                self._evict(self._unread_limit)

    def _evict(self, limit: int) -> None:
        logs = [log for log in (found() for found in self._all) if log is not None and log.held]
        self._weight = sum(log.weight for log in logs)
        for log in logs[:-1]:
            if self._weight <= limit:
                break
            before = log.weight
            log.expire()
            self._weight -= before - log.weight
        self._all = [weakref.ref(log) for log in logs if log.held]

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
