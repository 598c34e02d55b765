"""Which calls of a site may start: how many at the same time, how often, and with what. Events in, grants out.

No asyncio and no clock: the time comes with the events, and :attr:`SiteLimits.due` says when to look again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

import msgspec

from dfm_async.model.call_limits import SHARED, CallLimits, Shared, SiteCapacity
from dfm_async.model.stats import LimitStats
from dfm_async.runtime.fair_queue import FairQueue, JobCalls

C = TypeVar("C", bound=Hashable)

_RECENT: Final = 16
"""The number of sets of GPUs that are remembered, so that calls get a set again that was used before."""


class AllowedCall(msgspec.Struct, Generic[C], frozen=True):
    """A call may start.

    Attributes:
        call: the call.
        gpus: the indexes of the GPUs that it may use.
        waited_for: the limit that it waited for; empty if it did not have to wait.
    """

    call: C
    gpus: tuple[int, ...] = ()
    waited_for: str = ""


class _Waiting(msgspec.Struct, Generic[C], eq=False):
    """A call that waits."""

    call: C
    job: Hashable
    group: _Group[C]
    delayed: bool = False
    """Whether it was not granted when it came."""


class _Group(Generic[C]):
    """The calls of one operation, or of one value of its key: the first of them that cannot start delays the others."""

    __slots__ = (
        "blocked",
        "head",
        "jobs",
        "limits",
        "name",
        "next_start",
        "queue",
        "running",
        "since",
        "timer",
        "waiting",
    )

    def __init__(self, name: tuple[str, str], limits: CallLimits) -> None:
        self.name = name
        self.limits = limits
        self.queue: FairQueue[_Waiting[C]] = FairQueue()
        self.jobs: dict[Hashable, JobCalls[_Waiting[C]]] = {}
        """The waiting calls of each job."""
        self.waiting = 0
        self.running = 0
        self.head: _Waiting[C] | None = None
        """The next call, if only shared resources are missing for it."""
        self.since = 0
        """The larger, the later the head came to be the head."""
        self.blocked = ""
        """The limit that its calls wait for."""
        self.next_start = -math.inf
        """When calls have started evenly, the next one would start then."""
        self.timer = math.inf
        """When it is looked at again."""

    def ready_at(self) -> float:
        """Return when the rate allows the next call."""
        if self.limits.rate is None:
            return -math.inf
        return self.next_start - (self.limits.burst - 1) / self.limits.per_second

    def started(self, now: float) -> None:
        """Count a call that starts now."""
        self.running += 1
        if self.limits.rate is not None:
            self.next_start = max(self.next_start, now) + 1 / self.limits.per_second

    def next(self) -> _Waiting[C] | None:
        """Remove and return the call that is the next by the turns of the jobs."""
        found = self.queue.take()
        if found is not None and not self.jobs[found.job].calls:
            del self.jobs[found.job]
        return found

    def put(self, waiting: _Waiting[C], priority: int) -> None:
        """Add a call that waits."""
        calls = self.jobs.get(waiting.job)
        if calls is None:
            calls = self.jobs[waiting.job] = JobCalls(priority)
        self.queue.put(calls, waiting)
        self.waiting += 1

    def remove(self, waiting: _Waiting[C]) -> None:
        """Remove a call that waits."""
        self.waiting -= 1
        if self.head is waiting:
            self.head = None
        elif self.queue.remove(self.jobs[waiting.job], waiting):
            del self.jobs[waiting.job]


class _Held(msgspec.Struct, Generic[C], frozen=True):
    """What a call holds that was granted."""

    group: _Group[C]
    limits: CallLimits
    gpus: tuple[int, ...]


class SiteLimits(Generic[C]):
    """The limits of all operations of a site, the calls that wait for them, and what the others hold.

    Calls are grouped by operation and value of the key; within a group the jobs take turns, see :class:`FairQueue`. The
    groups get shared resources in the order in which their first calls came to be the first. A call that has to wait
    for them reserves what it needs, so that smaller ones do not keep it waiting for ever.

    Args:
        capacity: what the site has. Nothing of it may be None.
    """

    def __init__(self, capacity: SiteCapacity) -> None:
        self._capacity = capacity
        self._groups: dict[tuple[str, str], _Group[C]] = {}
        self._waiting: dict[C, _Waiting[C]] = {}
        self._held: dict[C, _Held[C]] = {}
        self._short: dict[_Group[C], None] = {}
        """The groups whose heads wait for shared resources."""
        self._timed: list[tuple[float, int, _Group[C]]] = []
        """When groups may start a call by their rates, and when others with a rate can be forgotten."""
        self._used: dict[Shared, int] = dict.fromkeys(SHARED, 0)
        self._gpus = set(range(capacity.gpus))
        """The indexes of those that are free."""
        self._recent: list[tuple[int, ...]] = []
        self._count = itertools.count()

    # events

    def resize(self, capacity: SiteCapacity, now: float) -> list[AllowedCall[C]]:
        """Change what the site has."""
        in_use = {index for held in self._held.values() for index in held.gpus}
        self._capacity = capacity
        self._gpus = set(range(capacity.gpus)) - in_use
        return self._settle((), now)

    def request(
        self, call: C, job: Hashable, priority: int, operation: str, key: str, limits: CallLimits, now: float
    ) -> list[AllowedCall[C]]:
        """Add a call of a job.

        Raises:
            ValueError: the site does not have what it needs.
        """
        lacks = self._capacity.lacks(limits)
        if lacks is not None:
            raise ValueError(f"operation {operation!r} {lacks}")
        name = (operation, key if limits.key is not None else "")
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name, limits)
        group.limits = limits  # newer code may have others
        waiting = self._waiting[call] = _Waiting(call, job, group)
        group.put(waiting, priority)
        granted = self._settle((group,), now)
        waiting.delayed = True
        return granted

    def leave(self, call: C, now: float) -> list[AllowedCall[C]]:
        """Note that a call has ended, or waits no longer."""
        waiting = self._waiting.pop(call, None)
        if waiting is not None:
            waiting.group.remove(waiting)
            return self._settle((waiting.group,), now)
        held = self._held.pop(call, None)
        if held is None:
            return []
        held.group.running -= 1
        for name in SHARED:
            self._used[name] -= getattr(held.limits, name)
        if held.gpus:
            self._gpus.update(index for index in held.gpus if index < self._capacity.gpus)
            self._recent = [held.gpus, *(gpus for gpus in self._recent if gpus != held.gpus)][:_RECENT]
        return self._settle((held.group,), now)

    def tick(self, now: float) -> list[AllowedCall[C]]:
        """Look again: the time that :attr:`due` has returned has come."""
        return self._settle((), now)

    # queries

    @property
    def due(self) -> float | None:
        """When to call :meth:`tick`; None if only other events can change anything."""
        return self._timed[0][0] if self._timed else None

    def stats(self) -> tuple[LimitStats, ...]:
        """Return what is used and what waits, for each limit that a call has met so far."""
        blocked: dict[tuple[str, str | None], int] = {}
        operations: dict[str, list[_Group[C]]] = {}
        for group in self._groups.values():
            operation = group.name[0]
            operations.setdefault(operation, []).append(group)
            shared = group.blocked in SHARED
            reason = (group.blocked, None if shared else operation)
            blocked[reason] = blocked.get(reason, 0) + group.waiting
        found = []
        for name in SHARED:
            there = getattr(self._capacity, name) or 0
            waiting = blocked.get((name, None), 0)
            if self._used[name] or waiting or (name == "gpus" and there):
                found.append(LimitStats(limit=name, used=self._used[name], capacity=there, waiting=waiting))
        for operation, groups in operations.items():
            limits = groups[0].limits
            if limits.limit is not None:
                found.append(
                    LimitStats(
                        limit="limit",
                        operation=operation,
                        used=sum(group.running for group in groups),
                        capacity=limits.limit,
                        waiting=blocked.get(("limit", operation), 0),
                        key=limits.key,
                    )
                )
            if limits.rate is not None:
                waiting = blocked.get(("rate", operation), 0)
                found.append(
                    LimitStats(
                        limit="rate",
                        operation=operation,
                        used=None,
                        capacity=limits.per_second,
                        waiting=waiting,
                        key=limits.key,
                    )
                )
        return tuple(found)

    # decisions

    def _settle(self, changed: Iterable[_Group[C]], now: float) -> list[AllowedCall[C]]:
        """Grant what can start, after groups have changed or time has passed."""
        candidates = dict.fromkeys(changed)
        while self._timed and self._timed[0][0] <= now:
            group = heapq.heappop(self._timed)[2]
            group.timer = math.inf
            candidates[group] = None
        for group in candidates:
            self._choose_head(group, now)
        granted: list[AllowedCall[C]] = []
        if self._short:
            granted = self._share(now)
        for group in candidates:
            self._forget(group, now)
        return granted

    def _choose_head(self, group: _Group[C], now: float) -> None:
        """Find the next call of a group, if its own limits allow one."""
        if group.head is None:
            self._short.pop(group, None)
            if not group.waiting:
                group.blocked = ""
                return
            if group.limits.limit is not None and group.running >= group.limits.limit:
                group.blocked = "limit"
                return
            ready_at = group.ready_at()
            if ready_at > now:
                group.blocked = "rate"
                self._look_again(group, ready_at)
                return
            group.head = group.next()
            group.since = next(self._count)
        self._short[group] = None

    def _share(self, now: float) -> list[AllowedCall[C]]:
        """Give shared resources to the heads of groups, in their order."""
        granted: list[AllowedCall[C]] = []
        free = {name: (getattr(self._capacity, name) or 0) - self._used[name] for name in SHARED}
        order = [(group.since, group) for group in self._short]
        heapq.heapify(order)  # the number of each is different
        while order:
            group = heapq.heappop(order)[1]
            head = group.head
            assert head is not None  # noqa: S101 - else it would not be here
            needed = {name: count for name in SHARED if (count := getattr(group.limits, name))}
            missing = next((name for name, count in needed.items() if count > free[name]), None)
            for name, count in needed.items():  # granted or reserved: it is not for others
                free[name] -= count
            if missing is not None:
                group.blocked = missing
                continue
            granted.append(self._grant(group, head, now))
            self._choose_head(group, now)
            if group.head is not None:
                heapq.heappush(order, (group.since, group))
        return granted

    def _grant(self, group: _Group[C], head: _Waiting[C], now: float) -> AllowedCall[C]:
        group.head = None
        group.waiting -= 1
        group.started(now)
        del self._waiting[head.call]
        gpus = self._choose_gpus(group.limits.gpus)
        self._gpus.difference_update(gpus)
        for name in SHARED:
            self._used[name] += getattr(group.limits, name)
        self._held[head.call] = _Held(group, group.limits, gpus)
        return AllowedCall(head.call, gpus, group.blocked if head.delayed else "")

    def _choose_gpus(self, count: int) -> tuple[int, ...]:
        """Return free GPUs: a set that was used before, if there is one, because a process may be ready for it."""
        if not count:
            return ()
        for gpus in self._recent:
            if len(gpus) == count and self._gpus.issuperset(gpus):
                return gpus
        return tuple(sorted(self._gpus)[:count])

    def _forget(self, group: _Group[C], now: float) -> None:
        """Drop a group that has no calls, as soon as its rate does not delay a further one."""
        if group.waiting or group.running or self._groups.get(group.name) is not group:
            return
        if group.limits.rate is not None and group.next_start > now:
            self._look_again(group, group.next_start)
        else:
            del self._groups[group.name]

    def _look_again(self, group: _Group[C], when: float) -> None:
        if when < group.timer:
            group.timer = when
            heapq.heappush(self._timed, (when, next(self._count), group))
