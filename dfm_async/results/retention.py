"""A common bound for the logs of ended jobs."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from typing import Final

from dfm_async.results.log import ResultLog

_LIMIT: Final = 64 * 1024 * 1024
_HEAVY: Final = 1024 * 1024


class Retention:
    """Bounds the memory that the logs of ended jobs take together.

    A session keeps many ended jobs. When their logs hold too much, they drop the events that were read, the oldest
    first, and the arenas of the sites that the values came from are free again. When the unread events are too much as
    well, logs are evicted as a whole: the oldest one of the label whose logs take the most, until the rest fits. So the
    jobs of one user cannot displace those of others. Their readers get ``ResultsExpired``. The log of the job that has
    ended last always stays. A log counts until :meth:`forget` is called for it.

    Args:
        limit: the number of bytes of encoded values that were read and large logs may still hold.
        unread_limit: the number of bytes that all logs may take, read or not.
    """

    def __init__(self, limit: int = _LIMIT, unread_limit: int | None = None) -> None:
        self._limit = limit
        self._unread_limit = unread_limit
        self._logs: list[weakref.ref[ResultLog]] = []
        self._all: dict[ResultLog, str | None] = {}  # and the label of its job
        self._weight = 0  # an upper bound: what was dropped since the last check is counted

    def ended(self, log: ResultLog, label: str | None = None) -> None:
        """Add the log of a job that has ended, and the label of the job."""
        if log.size >= _HEAVY:
            self._logs.append(weakref.ref(log))
            self.tidy()
        if self._unread_limit is not None:
            self._all[log] = label
            self._weight += log.weight
            if self._weight > self._unread_limit:
                self._evict(self._unread_limit)

    def forget(self, log: ResultLog) -> None:
        """Note that a log is no longer kept: it was dropped, or goes with its last reader."""
        self._all.pop(log, None)

    def _evict(self, limit: int) -> None:
        self._all = {log: label for log, label in self._all.items() if log.weight}
        self._weight = sum(log.weight for log in self._all)
        weights: Counter[str | None] = Counter()
        oldest: dict[str | None, deque[ResultLog]] = {}
        for number, (log, label) in enumerate(self._all.items(), 1):
            weights[label] += log.weight
            if number < len(self._all):
                oldest.setdefault(label, deque()).append(log)
        while self._weight > limit and oldest:
            label = max(oldest, key=weights.__getitem__)
            log = oldest[label].popleft()
            before = log.weight
            log.expire()
            self._weight -= before - log.weight
            weights[label] -= before - log.weight
            if not oldest[label]:
                del oldest[label]

    def tidy(self) -> None:
        """Drop what may be dropped. Called when a job ends, and when another one begins."""
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
