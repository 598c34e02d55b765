"""Which worker of a site runs calls for which other one. Events in, effects out; no asyncio, no clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec

W = TypeVar("W", bound=Hashable)


class Lend(msgspec.Struct, Generic[W], frozen=True):
    """Let a worker run calls of another one."""

    worker: W
    to: W


class Recall(msgspec.Struct, Generic[W], frozen=True):
    """Ask for a worker back."""

    worker: W
    lent_to: W


class StartWorker(msgspec.Struct, frozen=True):
    """Start a further worker, if the limits allow it."""


LeaseEffect: TypeAlias = Lend[W] | Recall[W] | StartWorker


class WorkerLeases(Generic[W]):
    """The workers of one site that are ready, what they want, and what was lent to them.

    A worker that has calls waiting itself is not lent. Workers that want others get equal shares: if one has more than
    its share while another has less, it is asked for one back.
    """

    def __init__(self) -> None:
        self._wanted: dict[W, int] = {}
        """The workers that are ready, and how many others each could use."""
        self._lent: dict[W, W] = {}
        """For each worker that was lent: to which one."""
        self._recalled: set[W] = set()
        self._starting = 0

    # events

    def ready(self, worker: W) -> list[LeaseEffect[W]]:
        """Note that a worker is ready."""
        self._wanted.setdefault(worker, 0)
        self._starting = max(0, self._starting - 1)
        return self._settle()

    def gone(self, worker: W) -> list[LeaseEffect[W]]:
        """Note that a worker has ended, or takes no further calls."""
        self._wanted.pop(worker, None)
        self._drop(worker)
        for lent in self.held_by(worker):
            self._drop(lent)
        return self._settle()

    def retired(self, worker: W) -> list[LeaseEffect[W]]:
        """Note that a worker ends with its jobs: it is not lent any longer, and gets no further workers."""
        self._wanted.pop(worker, None)
        if worker not in self._lent or worker in self._recalled:
            return []
        self._recalled.add(worker)
        return [Recall(worker, self._lent[worker])]

    def not_started(self) -> None:
        """Note that a worker that was asked for does not start."""
        self._starting = max(0, self._starting - 1)

    def wants(self, worker: W, count: int) -> list[LeaseEffect[W]]:
        """Note how many others a worker could use, besides those that it has."""
        if worker in self._wanted:
            self._wanted[worker] = count
        return self._settle()

    def returned(self, worker: W, by: W) -> list[LeaseEffect[W]]:
        """Note that a worker that was lent is free again."""
        if self._lent.get(worker) == by:
            self._drop(worker)
        return self._settle()

    def _drop(self, worker: W) -> None:
        self._lent.pop(worker, None)
        self._recalled.discard(worker)

    # queries

    @property
    def idle(self) -> list[W]:
        """The workers that are not lent, and neither have nor want others."""
        busy = {*self._lent, *self._lent.values()}
        return [worker for worker, count in self._wanted.items() if not count and worker not in busy]

    @property
    def wanting(self) -> list[W]:
        """The workers that could use others."""
        return [worker for worker, count in self._wanted.items() if count]

    def holder(self, worker: W) -> W | None:
        """Return the worker that another one was lent to."""
        return self._lent.get(worker)

    def held_by(self, worker: W) -> list[W]:
        """Return the workers that were lent to a worker."""
        return [lent for lent, to in self._lent.items() if to == worker]

    def _holds(self, worker: W) -> int:
        return len(self.held_by(worker))

    # decisions

    def _settle(self) -> list[LeaseEffect[W]]:
        effects: list[LeaseEffect[W]] = []
        for worker, count in self._wanted.items():
            if count and worker in self._lent and worker not in self._recalled:  # it needs itself
                self._recalled.add(worker)
                effects.append(Recall(worker, self._lent[worker]))
        free = self.idle
        while free and (taker := self._neediest()) is not None:
            worker = free.pop(0)
            if worker == taker:
                continue
            self._lent[worker] = taker
            self._wanted[taker] -= 1
            effects.append(Lend(worker, taker))
        if not free:
            effects += self._share()
            missing = sum(self._wanted.values())
            if missing > self._starting:
                self._starting += 1
                effects.append(StartWorker())
        return effects

    def _neediest(self) -> W | None:
        wanting = [worker for worker, count in self._wanted.items() if count]
        return min(wanting, key=self._holds) if wanting else None

    def _share(self) -> Iterator[LeaseEffect[W]]:
        """Ask for a worker back from one that has more than its share."""
        poorest = self._neediest()
        if poorest is None or self._recalled:
            return
        holders = [to for to in self._lent.values() if to != poorest]
        richest = max(holders, key=self._holds, default=None)
        if richest is not None and self._holds(richest) > self._holds(poorest) + 1:
            worker = next(lent for lent, to in self._lent.items() if to == richest)
            self._recalled.add(worker)
            yield Recall(worker, richest)
