"""Calls that wait for a thread: the jobs take turns."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Generic, TypeVar

__all__ = ["FairQueue", "JobCalls"]

T = TypeVar("T")

_SHARE: Final = 4
"""Every so many calls, the turn goes to the priority that was served the longest ago."""


class JobCalls(Generic[T]):
    """The calls of one job that wait, in the order in which they came."""

    __slots__ = ("calls", "listed", "priority")

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.calls: deque[T] = deque()
        self.listed = False
        """Whether the job is among those that take turns."""


class _Level(Generic[T]):
    """The jobs of one priority that have calls waiting."""

    __slots__ = ("jobs", "served")

    def __init__(self) -> None:
        self.jobs: deque[JobCalls[T]] = deque()
        self.served = 0


class FairQueue(Generic[T]):
    """Serves the job with the highest priority first; jobs of equal priority take turns, one call each.

    Every fourth call is that of the priority that was served the longest ago, so that no job starves. Any thread may
    call every method.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._served = 0
        self._lock = threading.Lock()

    def put(self, job: JobCalls[T], call: T) -> None:
        """Adds a call of a job."""
        with self._lock:
            job.calls.append(call)
            if not job.listed:
                job.listed = True
                level = self._levels.get(job.priority)
                if level is None:
                    level = self._levels[job.priority] = _Level()
                    level.served = self._served
                level.jobs.append(job)

    def take(self) -> T | None:
        """Takes the next call; None if none waits."""
        with self._lock:
            levels = self._levels
            while levels:
                self._served += 1
                if len(levels) == 1:
                    ((priority, level),) = levels.items()
                elif self._served % _SHARE:
                    priority = max(levels)
                    level = levels[priority]
                else:
                    priority = min(levels, key=lambda found: levels[found].served)
                    level = levels[priority]
                level.served = self._served
                job = level.jobs.popleft()
                call = job.calls.popleft() if job.calls else None
                if job.calls:
                    level.jobs.append(job)
                else:
                    job.listed = False
                    if not level.jobs:
                        del levels[priority]
                if call is not None:  # else they were withdrawn
                    return call
            return None

    def withdraw(self, job: JobCalls[T]) -> list[T]:
        """Takes all calls of a job that still wait."""
        with self._lock:
            found = list(job.calls)
            job.calls.clear()
            return found

    def clear(self) -> list[T]:
        """Takes all calls that wait."""
        with self._lock:
            found = [call for level in self._levels.values() for job in level.jobs for call in job.calls]
            for level in self._levels.values():
                for job in level.jobs:
                    job.calls.clear()
                    job.listed = False
            self._levels.clear()
            return found
