"""Which jobs run, on which lane, and which of them wait: for a slot, or for their time. Pure: no asyncio, no I/O."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Generic, TypeVar

J = TypeVar("J")


class Scheduler(Generic[J]):
    """Give slots to jobs: the highest priority first, among equals the first that came, on the lane with the fewest.

    Args:
        lanes: how many lanes there are.
        slots: how many jobs may run at the same time.
        limit: how many jobs may wait; further ones are kept, but their submitters have to wait.
    """

    def __init__(self, lanes: int, slots: int, limit: int) -> None:
        self._loads: list[dict[J, None]] = [{} for _ in range(lanes)]
        self._slots = slots
        self._limit = limit
        self._lane_of: dict[J, int] = {}
        self._heap: list[tuple[int, int, J]] = []
        self._waiting: set[J] = set()
        self._numbers = itertools.count(1)
        self._front = itertools.count(-1, -1)
        self._excess: deque[J] = deque()
        self._later: list[tuple[float, int, int, J]] = []
        self._delayed: set[J] = set()
        self._ranks: dict[J, int] | None = None
        """The positions of the jobs that wait, if they are known."""

    @property
    def running(self) -> int:
        """The number of jobs that have a slot."""
        return len(self._lane_of)

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for one."""
        return len(self._waiting)

    @property
    def delayed(self) -> int:
        """The number of jobs whose time to start has not come."""
        return len(self._delayed)

    @property
    def due(self) -> float | None:
        """The time at which the next of them starts."""
        while self._later and self._later[0][-1] not in self._delayed:
            heapq.heappop(self._later)
        return self._later[0][0] if self._later else None

    @property
    def empty(self) -> bool:
        """Whether neither jobs nor submitters wait."""
        return not self._heap and not self._excess

    @property
    def overflows(self) -> bool:
        """Whether a further job would exceed the limit of those that wait for a slot."""
        return len(self._lane_of) >= self._slots and len(self._waiting) >= self._limit

    @property
    def full_of_delayed(self) -> bool:
        """Whether as many jobs wait for their time as may wait for a slot."""
        return len(self._delayed) >= self._limit

    def lane(self, index: int) -> list[J]:
        """Return the jobs of a lane."""
        return list(self._loads[index])

    def waits(self, job: J) -> bool:
        """Return whether a job waits for a slot, or for its time."""
        return job in self._waiting or job in self._delayed

    def ahead(self, job: J) -> int | None:
        """Return the number of jobs that get a slot before a job that waits; None if it does not wait."""
        if job not in self._waiting:
            return None
        if self._ranks is None:  # once for all of them: it takes time
            self._ranks = {}
            for *_, other in sorted(entry for entry in self._heap if entry[2] in self._waiting):
                self._ranks.setdefault(other, len(self._ranks))
        return self._ranks[job]

    def start(self, job: J) -> int | None:
        """Give a slot to a job that need not wait; return its lane, or None if it has to wait."""
        if self._waiting or len(self._lane_of) >= self._slots:
            return None
        return self._enter_lane(job)

    def _enter_lane(self, job: J) -> int:
        sizes = [len(load) for load in self._loads]
        lane = sizes.index(min(sizes))
        self._loads[lane][job] = None
        self._lane_of[job] = lane
        return lane

    def put(self, job: J, priority: int) -> bool:
        """Add a job; return whether its submitter need not wait."""
        excess = self.overflows
        self._push(job, priority, next(self._numbers))
        if excess:
            self._excess.append(job)
        return not excess

    def delay(self, job: J, priority: int, until: float) -> None:
        """Add a job that waits for a slot only from a time on. Until then it counts nowhere but in ``delayed``."""
        heapq.heappush(self._later, (until, next(self._numbers), priority, job))
        self._delayed.add(job)

    def advance(self, now: float) -> list[J]:
        """Note the time; return the jobs whose time has come, in its order. They wait for slots now."""
        come = []
        while (due := self.due) is not None and due <= now:
            _, _, priority, job = heapq.heappop(self._later)
            self._delayed.discard(job)
            self._push(job, priority, next(self._numbers))
            come.append(job)
        return come

    def put_back(self, job: J, priority: int) -> None:
        """Take a slot from a job that has to run again: it is the next one of its priority."""
        self._leave_lane(job)
        self._push(job, priority, next(self._front))

    def _push(self, job: J, priority: int, number: int) -> None:
        heapq.heappush(self._heap, (-priority, number, job))
        self._waiting.add(job)
        self._ranks = None

    def take(self) -> tuple[J, int] | None:
        """Give a slot to the next job; return the job and its lane, or None if no slot is free or no job waits."""
        while self._heap and len(self._lane_of) < self._slots:
            *_, job = heapq.heappop(self._heap)
            if job in self._waiting:
                self._waiting.discard(job)
                self._ranks = None
                return job, self._enter_lane(job)
        return None

    def release(self, job: J) -> None:
        """Forget a job that has ended: it has no slot, and does not wait for one, nor for its time."""
        self._leave_lane(job)
        if job in self._delayed:
            self._delayed.discard(job)
            if len(self._later) > 2 * len(self._delayed) + 64:
                self._later = [entry for entry in self._later if entry[-1] in self._delayed]
                heapq.heapify(self._later)
        if job in self._waiting:
            self._waiting.discard(job)
            self._ranks = None
            if len(self._heap) > 2 * len(self._waiting) + 64:  # what was taken out is not kept for ever
                self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
                heapq.heapify(self._heap)

    def _leave_lane(self, job: J) -> None:
        lane = self._lane_of.pop(job, None)
        if lane is not None:
            del self._loads[lane][job]

    def take_accepted(self) -> list[J]:
        """Return the jobs whose submitters need not wait any longer."""
        if not self._excess:
            return []
        accepted = [job for job in self._excess if job not in self._waiting]
        if accepted:
            self._excess = deque(job for job in self._excess if job in self._waiting)
        while self._excess and len(self._waiting) - len(self._excess) < self._limit:
            accepted.append(self._excess.popleft())
        return accepted
