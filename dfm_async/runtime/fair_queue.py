"""The queue of calls that wait for a thread: jobs take turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_SHARE: Final = 4
"""Each n-th call is one of the least recently served priority."""


class JobCalls(Generic[T]):
    """The calls of one job that wait, first in, first out."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.calls: deque[T] = deque()
        self.listed = False
        """Whether the job is among those that take turns."""


class _PriorityLevel(Generic[T]):
    """The jobs of one priority that have calls waiting."""

    def __init__(self, served: int) -> None:
        self.jobs: deque[JobCalls[T]] = deque()
        self.served = served


class FairQueue(Generic[T]):
    """Serves the job with the highest priority first; jobs of equal priority take turns, one call each.

    Every fourth call is that of the priority that was served the longest ago, so that no job starves. Any thread may
    call every method.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityLevel[T]] = {}
        self._served = 0
        self._lock = threading.Lock()

    def put(self, job: JobCalls[T], call: T) -> None:
        """Add a call of a job."""
        with self._lock:
            job.calls.append(call)
            if not job.listed:
                job.listed = True
                level = self._levels.get(job.priority)
                if level is None:
                    level = self._levels[job.priority] = _PriorityLevel(self._served)
                level.jobs.append(job)

    def take(self) -> T | None:
        """Remove and return the next call; None if none waits."""
        with self._lock:
            levels = self._levels
            while levels:
                self._served += 1
                if self._served % _SHARE or len(levels) == 1:
                    priority = max(levels)
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

    def remove(self, job: JobCalls[T], call: T) -> bool:
        """Remove a call of a job that still waits; return whether it was the last of the job."""
        with self._lock:
            job.calls.remove(call)
            if job.calls or not job.listed:
                return not job.calls
            job.listed = False
            level = self._levels[job.priority]
            level.jobs.remove(job)
            if not level.jobs:
                del self._levels[job.priority]
            return True

    def withdraw(self, job: JobCalls[T]) -> list[T]:
        """Remove and return all calls of a job that still wait."""
        with self._lock:
            found = list(job.calls)
            job.calls.clear()
            return found

    def count(self) -> int:
        """Return the number of calls that wait."""
        with self._lock:
            return sum(len(job.calls) for level in self._levels.values() for job in level.jobs)

    def take_all(self, wanted: Callable[[T], bool]) -> list[T]:
        """Remove and return all calls that wait and are wanted."""
        found: list[T] = []
        with self._lock:
            for level in self._levels.values():
                for job in level.jobs:
                    calls = list(job.calls)
                    job.calls.clear()
                    for call in calls:
                        (found if wanted(call) else job.calls).append(call)
        return found

    def clear(self) -> list[T]:
        """Remove and return all calls that wait."""
        with self._lock:
            found = [call for level in self._levels.values() for job in level.jobs for call in job.calls]
            for level in self._levels.values():
                for job in level.jobs:
                    job.calls.clear()
                    job.listed = False
            self._levels.clear()
            return found
