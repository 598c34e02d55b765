"""Jobs that wait for a slot: the highest priority first, among equals the first that came."""

from __future__ import annotations

import heapq
import itertools

from dfm_async.targets.coordinator import Coordinator

__all__ = ["JobQueue"]


class JobQueue:
    """A priority queue from which any job can be taken out, because jobs are cancelled while they wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Coordinator]] = []
        self._waiting: set[Coordinator] = set()
        self._numbers = itertools.count(1)
        self._front = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, coordinator: Coordinator) -> bool:
        return coordinator in self._waiting

    def put(self, coordinator: Coordinator, priority: int, *, front: bool = False) -> None:
        """Adds a job; ``front`` puts it before all others of its priority, because it has waited before."""
        number = next(self._front if front else self._numbers)
        heapq.heappush(self._heap, (-priority, number, coordinator))
        self._waiting.add(coordinator)

    def take(self) -> Coordinator | None:
        """Takes the next job out, if there is one."""
        while self._heap:
            *_, coordinator = heapq.heappop(self._heap)
            if coordinator in self._waiting:
                self._waiting.discard(coordinator)
                return coordinator
        return None

    def discard(self, coordinator: Coordinator) -> bool:
        """Takes a job out; tells whether it was in."""
        if coordinator not in self._waiting:
            return False
        self._waiting.discard(coordinator)
        if len(self._heap) > 2 * len(self._waiting) + 64:  # what was taken out is not kept for ever
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
        return True
