"""How many jobs of one application run at the same time, on which lane, and which of them wait."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dfm_async.targets.flare.hub_job import HubJob

__all__ = ["Slots"]


class Slots:
    """The highest priority first, among equals the first that came; each on the lane with the fewest jobs."""

    def __init__(self, lanes: int, most: int) -> None:
        self._loads = [0] * lanes
        self._most = most
        self._lane_of: dict[HubJob, int] = {}
        self._heap: list[tuple[int, int, HubJob]] = []
        self._waiting: dict[HubJob, None] = {}
        self._numbers = itertools.count(1)
        self._front = itertools.count(-1, -1)
        self.admitting = False
        """Whether somebody gives slots to jobs just now."""

    @property
    def running(self) -> int:
        """How many jobs have a slot."""
        return len(self._lane_of)

    @property
    def waiting(self) -> int:
        """How many jobs wait for one."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether a further job must wait."""
        return len(self._lane_of) >= self._most

    def put(self, job: HubJob, priority: int, *, front: bool = False) -> None:
        """A job wants a slot; ``front`` puts it before all others of its priority, because it has waited before."""
        number = next(self._front if front else self._numbers)
        heapq.heappush(self._heap, (-priority, number, job))
        self._waiting[job] = None

    def take(self) -> tuple[HubJob, int] | None:
        """Gives a slot to the next job, with its lane; None if there is no slot, or nobody waits."""
        while self._heap and not self.full:
            *_, job = heapq.heappop(self._heap)
            if job in self._waiting:
                del self._waiting[job]
                lane = self._loads.index(min(self._loads))
                self._loads[lane] += 1
                self._lane_of[job] = lane
                return job, lane
        return None

    def release(self, job: HubJob) -> None:
        """A job has ended, or runs again: it has no slot any more, and does not wait for one."""
        self._waiting.pop(job, None)
        lane = self._lane_of.pop(job, None)
        if lane is not None:
            self._loads[lane] -= 1
