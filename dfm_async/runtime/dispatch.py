"""Where the synchronous calls of a process run: here, or in another worker of the site. Events in, decisions out.

No asyncio, no clock, no threads: :class:`Dispatcher` is notified of what happens, and :meth:`Dispatcher.pump` returns
the calls that start, and where.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from dfm_async.runtime.fair_queue import FairQueue, JobCalls

_DISPATCH: Final = 0.0003
"""About how many seconds it costs to have a call run in another process."""
QUICK: Final = 0.0001
"""A call that takes fewer seconds costs less than to wake a thread for it."""
_BYTES_PER_SECOND: Final = 1e9
"""About how many bytes of arguments and results are copied in a second."""
_WAITS: Final = 0.05
"""A call that uses a processor for a smaller part of its time waits for something else."""
_BUSY: Final = 0.25
"""Calls that use a processor for a larger part of their time compute."""
_AHEAD: Final = 0.008
"""For how many seconds of work calls are sent to another worker in advance."""
_MOST_AHEAD: Final = 12
_SHORT: Final = 0.1
"""Of calls that take fewer seconds, a worker may have a second one while many wait."""
_RECENT: Final = 0.2
"""How much the last call counts in an average."""


class OperationCost:
    """What the calls of one operation have cost so far, on average."""

    __slots__ = ("checked", "computes", "count", "pinned", "quick", "size", "stays", "used", "wall")

    def __init__(self) -> None:
        self.count = 0
        self.stays = False
        """Whether calls need not run elsewhere: they hardly compute, or mostly wait for something else."""
        self.quick = False
        """Whether one thread runs calls one after the other as fast as several do."""
        self.computes = False
        """Whether a call was seen to compute for longer than it takes to have one run elsewhere."""
        self.checked = False
        """Whether it is known that a result can be sent, or cannot."""
        self.pinned = False
        """Whether its calls have to run where the net is: their results cannot be sent."""
        self.wall = 0.0
        """The number of seconds that a call takes."""
        self.used = 0.0
        """The number of seconds that it uses a processor."""
        self.size = 0.0
        """The number of bytes of its arguments and its result."""

    def measured(self, wall: float, used: float) -> bool:
        """Note the times of a call that has ended; return whether calls do not stay any longer."""
        self.count += 1
        part = max(_RECENT, 1 / self.count)
        self.wall += part * (wall - self.wall)
        self.used += part * (used - self.used)
        return self._judge()

    def exceeded(self, used: float) -> bool:
        """Note for how long a running call has used a processor; return whether calls do not stay any longer."""
        if self.count and used > self.used:
            self.wall = self.used = used
        return self._judge()

    def sent(self, size: int) -> None:
        """Note the size of the values of a call that runs elsewhere."""
        self.size += _RECENT * (size - self.size)
        self._judge()

    def _judge(self) -> bool:
        stayed, used = self.stays, self.used
        cheap = used < _DISPATCH + self.size / _BYTES_PER_SECOND
        self.stays = self.count > 0 and (cheap or used < _WAITS * self.wall)
        self.quick = self.stays and self.wall < QUICK
        return stayed and not self.stays

    @property
    def known(self) -> bool:
        """Whether a call has ended."""
        return self.count > 0

    @classmethod
    def expected(cls, seconds: float) -> OperationCost:
        """Return the cost of calls that compute for so long, and take turns."""
        cost = cls()
        cost.wall = cost.used = seconds
        cost.quick = True
        return cost

    @property
    def turn(self) -> float:
        """For how many seconds a call computes, if calls that are sent in advance wait for those before them; else 0.

        Threads of one process that compute at the same time slow each other down.
        """
        computes = self.known and self.used >= _BUSY * self.wall
        return self.wall if computes and self.used < _SHORT else 0.0

    @property
    def ahead(self) -> int:
        """The number of calls that a worker may have, so that it need not wait for the next one."""
        return max(1, min(_MOST_AHEAD, 1 + int(_AHEAD / self.wall))) if self.wall > 0 else 1


class Spreadable(Protocol):
    """A call that may run in another worker."""

    cost: OperationCost
    """That of its operation."""
    pinned: bool
    """Whether it has to run here, for instance because its arguments cannot be sent."""
    stream: Any
    """What takes its elements, if it is a generator: such a call may wait for others of its kind to be read."""


C = TypeVar("C", bound=Spreadable)


class Dispatcher(Generic[C]):
    """Decides where calls run that compute.

    They run in workers that were lent to this process, or here if no other such call does. The first call of an
    operation runs here at once: it shows what its calls cost.

    Args:
        always: take every call for one that computes; for tests.
        enough: with how many workers this process does not compute itself, so that its event loop has a core: beside a
            thread that computes, each message that it sends takes about a millisecond. None: it always does.
    """

    def __init__(self, *, always: bool = False, enough: int | None = None) -> None:
        self._always = always
        self._enough = enough
        self._queue: FairQueue[C] = FairQueue()
        self._turns: dict[Hashable, JobCalls[C]] = {}
        """The waiting calls of each job."""
        self._waiting: dict[C, Hashable] = {}
        """The job of each."""
        self._head: C | None = None
        self._here: dict[C, bool | None] = {}
        """The calls that run here, and whether each computes; None if that is not known yet."""
        self._lent: dict[str, dict[C, None]] = {}
        """The workers that were lent to this process, with the calls that run there."""
        self._recalled: set[str] = set()
        self._beside = 1
        """The number of calls that may compute here at the same time: more when some take long."""
        self._where: dict[C, str] = {}

    # calls

    def stays(self, call: C) -> bool:
        """Return whether a call need not run elsewhere."""
        return call.cost.stays and not self._always

    def put(self, job: Hashable, priority: int, call: C) -> None:
        """Add a call of a job that waits for its turn."""
        turns = self._turns.get(job)
        if turns is None:
            turns = self._turns[job] = JobCalls(priority)
        self._waiting[call] = job
        self._queue.put(turns, call)

    def _taken(self, call: C) -> None:
        job = self._waiting.pop(call)
        turns = self._turns.get(job)
        if turns is not None and not turns.calls:
            del self._turns[job]

    def pump(self, overdue: C | None = None) -> Iterator[tuple[C, str | None]]:
        """Take the calls that start now, each with the worker that it runs in; None for this process.

        ``overdue``: a call that has waited for too long, and starts here although others compute.
        """
        while (call := self._head or self._queue.take()) is not None:
            self._head = call
            stays = self.stays(call)  # it was not known to, when it came
            worker = None if stays else self._find_worker(call)
            if worker is None and not (stays or self._may_start_here(call)):
                worker = self._find_worker_ahead(call)
                if worker is None:
                    if call is not overdue:
                        return
                    if call.stream is None:  # others need not wait as long as this one
                        self._beside = 1 + len(self._computing_beside(call))
                    else:
                        worker = self._least_loaded(call)
            self._head = None
            self._begin(call, worker, stays)
            yield call, worker

    def pump_generators(self) -> Iterator[tuple[C, str | None]]:
        """Take all generators that wait behind functions: those that run here may need their elements to end."""
        for call in self._queue.take_all(lambda call: call.stream is not None):
            stays = self.stays(call)
            worker = None if stays else self._find_worker(call) or self._least_loaded(call)
            self._begin(call, worker, stays)
            yield call, worker

    def _begin(self, call: C, worker: str | None, stays: bool) -> None:
        self._taken(call)
        if worker is not None:
            self._where[call] = worker
            self._lent[worker][call] = None
        elif not stays:
            self._here[call] = call.cost.known or None

    def _may_start_here(self, call: C) -> bool:
        """Return whether no other call computes here, as far as is known, or this is the first of its operation."""
        first = not call.cost.known and not any(other.cost is call.cost for other in self._here)
        if self._enough is not None and len(self._lent) >= self._enough and self._may_be_sent(call):
            return False
        return first or len(self._computing_beside(call)) < self._beside

    def _computing_beside(self, call: C) -> list[C]:
        """Return what computes here, or may. Generators and functions do not wait for each other."""
        streams = call.stream is not None
        found = (other for other, computes in self._here.items() if computes is not False)
        return [other for other in found if (other.stream is not None) is streams]

    @staticmethod
    def _may_be_sent(call: C) -> bool:
        cost = call.cost
        return not (call.pinned or cost.pinned) and (cost.known or cost.computes)

    def _lendable(self, call: C) -> tuple[int, str | None]:
        """Return the worker with the fewest calls, and their number."""
        if not self._may_be_sent(call):
            return 0, None
        loads = ((len(calls), worker) for worker, calls in self._lent.items() if worker not in self._recalled)
        return min(loads, default=(0, None))

    def _find_worker(self, call: C) -> str | None:
        """Return the worker with the fewest calls, if it may have another one of this kind."""
        load, worker = self._lendable(call)
        return worker if load < call.cost.ahead else None

    def _find_worker_ahead(self, call: C) -> str | None:
        """Return a worker that need not wait for its next call then, if enough others are left for those that do."""
        short = call.stream is None and call.cost.known and call.cost.used < _SHORT
        if not short or len(self._waiting) <= 2 * (1 + len(self._lent)):
            return None
        load, worker = self._lendable(call)
        return worker if load < 2 else None

    def _least_loaded(self, call: C) -> str | None:
        """Return the worker with the fewest calls, or None if fewer generators run here."""
        load, worker = self._lendable(call)
        return worker if load <= len(self._computing_beside(call)) else None

    def begin_here(self, call: C) -> None:
        """Note a call that stays, and is checked like those that compute."""
        self._here[call] = False

    def is_here(self, call: C) -> bool:
        """Return whether a call runs here that others may have to wait for."""
        return call in self._here

    def seen(self, call: C, elapsed: float, used: float) -> None:
        """Note for how long a call runs here, and how much of that it computes; if it does not, another one may start.

        If its operation was taken for cheap, it is not any longer.
        """
        if call in self._here:
            computes = self._here[call] = self._always or used >= _BUSY * elapsed
            call.cost.computes = call.cost.computes or computes
            if computes and call.cost.stays:
                call.cost.exceeded(used)

    def overran(self, running: Mapping[C, tuple[float, float]]) -> list[OperationCost]:
        """Note how long calls run that were expected to be cheap, and for how much of that time they compute.

        Returns:
            the operations whose calls do not stay any longer: those that wait for a thread can run elsewhere.
        """
        operations: dict[OperationCost, list[C]] = {}
        for call in running:
            if call.cost.stays:
                operations.setdefault(call.cost, []).append(call)
        found = []
        for cost, calls in operations.items():  # together, since they share a processor
            elapsed, used = max(running[call][0] for call in calls), sum(running[call][1] for call in calls)
            if used >= _BUSY * elapsed and cost.exceeded(used / len(calls)):
                found.append(cost)
                self._here.update(dict.fromkeys(calls, True))
        return found

    def left(self, call: C) -> str | None:
        """Note that a call has ended or was abandoned; return the worker that is now idle and was recalled, if any."""
        worker = self._where.pop(call, None)
        if worker is None:
            self._here.pop(call, None)
            if self._beside > 1 and not any(self._here.values()):
                self._beside = 1
            return None
        calls = self._lent[worker]
        del calls[call]
        return worker if not calls and worker in self._recalled else None

    def withdraw(self, job: Hashable) -> list[C]:
        """Remove and return the calls of a job that wait."""
        turns = self._turns.pop(job, None)
        found = [] if turns is None else self._queue.withdraw(turns)
        if self._head is not None and self._waiting[self._head] == job:
            found.insert(0, self._head)
            self._head = None
        for call in found:
            del self._waiting[call]
        return found

    def take(self, call: C) -> bool:
        """Remove a call that waits; return whether it did."""
        if call not in self._waiting:
            return False
        if call is self._head:
            self._head = None
        else:
            self._queue.remove(self._turns[self._waiting[call]], call)
        self._taken(call)
        return True

    @property
    def head(self) -> C | None:
        """The call that waits for the longest time, and starts next."""
        return self._head

    # workers

    @property
    def queued(self) -> int:
        """The number of calls that have not started. Any thread may read it."""
        return len(self._waiting)

    @property
    def waiting(self) -> int:
        """The number of calls that wait because others compute."""
        busy = any(self._here.values()) or any(self._lent.values())
        return len(self._waiting) if busy else 0

    @property
    def idle_workers(self) -> list[str]:
        """The workers that were lent to this process, and have no calls."""
        return [worker for worker, calls in self._lent.items() if not calls]

    def calls_at(self, worker: str) -> list[C]:
        """Return the calls that run in a worker."""
        return list(self._lent.get(worker, ()))

    def lend(self, worker: str) -> None:
        """Note that calls may run in a worker."""
        self._lent.setdefault(worker, {})
        self._recalled.discard(worker)

    def recall(self, worker: str) -> bool:
        """Start no further calls in a worker; return whether it can be returned at once."""
        if worker in self._lent:
            self._recalled.add(worker)
        return worker in self._lent and not self._lent[worker]

    def gone(self, worker: str) -> list[C]:
        """Note that a worker was returned or lost; return the calls that have not ended there."""
        self._recalled.discard(worker)
        calls = list(self._lent.pop(worker, ()))
        for call in calls:
            del self._where[call]
        return calls
