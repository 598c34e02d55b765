"""The locations of jobs at a site: each has a seat on a worker, until it has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from dfm_async.errors import WorkerLost
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.accounts import Account
from dfm_async.targets.flare.crew import Crew
from dfm_async.targets.flare.wanted import Wanted
from dfm_async.wire import messages as msg
from dfm_async.workers.site_worker import SiteWorker

__all__ = ["Seat", "SeatOwner", "Seats", "stop_by_force"]


class SeatOwner(Protocol):
    """Who wants to know what becomes of seats."""

    def seat_lost(self, seat: Seat, error: WorkerLost) -> None:
        """The worker of a seat has ended."""
        ...

    def tell(self, message: Any) -> None:
        """Tells the hub something."""
        ...


class Seat:
    """One location of one job: what its worker's pool tells of the worker.

    Args:
        owner: who wants to know what becomes of it.
        request: what the hub has asked for.
        wanted: what the location does.
        account: how many bytes its job has sent.
        crew: the workers for its code.
        worker: that which it is on.
    """

    def __init__(
        self, owner: SeatOwner, request: fm.Seat, wanted: Wanted, account: Account, crew: Crew, worker: SiteWorker
    ) -> None:
        self.request = request
        self.wanted = wanted
        self.account = account
        self.crew = crew
        self.worker = worker
        self.announced = False
        """Whether its worker knows of it: one that is not ready yet must not be told anything."""
        self.started = False
        """Whether the job was told to begin."""
        self.stopped = False
        """Whether it was told to stop, and has."""
        self.seen = False
        """Whether it has seen that it is to stop: then the loop of its worker still answers."""
        self.patience: asyncio.TimerHandle | None = None
        """Ends it by force, if it does not leave."""
        self._owner = owner

    @property
    def key(self) -> tuple[int, int]:
        """The run of the job, and which of its locations this is."""
        return (self.request.job, self.request.at)

    @property
    def described(self) -> dict[str, Any]:
        """What the audit log says of it."""
        return {"job": self.request.job_id, "location": self.request.location, "bytes": self.account.taken}

    def lost(self, _at: int, error: WorkerLost) -> None:
        """Its worker has ended."""
        self._owner.seat_lost(self, error)

    def unresponsive(self, at: int, _site: str, seconds: float) -> None:
        """Its worker does not answer."""
        self._owner.tell(fm.SeatSilent(self.request.job, at, seconds))

    def responsive(self, at: int, _site: str) -> None:
        """Its worker answers again."""
        self._owner.tell(fm.SeatResponds(self.request.job, at))

    def retired(self, at: int, _site: str, why: str) -> None:
        """Its worker takes no further jobs."""
        self._owner.tell(fm.SeatRetired(self.request.job, at, why))


class Seats:
    """The seats of a site: those that are taken, and those whose locations leave.

    Args:
        grace: for how many seconds a location that is to leave may take.
        on_free: is told of each seat that has become free.
    """

    def __init__(self, grace: float, on_free: Callable[[Seat], None]) -> None:
        self._grace = grace
        self._on_free = on_free
        self._jobs: dict[int, dict[int, Seat]] = {}
        self._leaving: dict[tuple[int, int], Seat] = {}

    def __iter__(self) -> Iterator[Seat]:
        """Those that are taken."""
        return (seat for seats in self._jobs.values() for seat in seats.values())

    def find(self, message: Any) -> Seat | None:
        """The seat that a message is for, or about."""
        return self._jobs.get(message.job, {}).get(message.at)

    def leaving(self, message: Any) -> Seat | None:
        """The same among those that leave."""
        return self._leaving.get((message.job, message.at))

    def of(self, job: int) -> Mapping[int, Seat]:
        """The seats of one run of a job, by location."""
        return self._jobs.get(job, {})

    def take(self, seat: Seat) -> None:
        """A location comes to a worker."""
        seat.worker.seats[seat, seat.request.at] = None
        seat.crew.seats += 1
        seat.account.seats += 1
        self._jobs.setdefault(seat.request.job, {})[seat.request.at] = seat

    def release(self, seat: Seat, *, well: bool) -> None:
        """A location has left its worker."""
        if self.take_out(seat):
            seat.worker.leave(seat, seat.request.at, well=well)
            self._on_free(seat)

    def lost(self, seat: Seat) -> bool:
        """The worker of a location has ended; tells whether it was there."""
        found = self.take_out(seat)
        if found:
            self._on_free(seat)
        return found

    def take_out(self, seat: Seat) -> bool:
        """Forgets a seat; tells whether it was there."""
        if seat.patience is not None:
            seat.patience.cancel()
        found = self._leaving.pop(seat.key, None) is seat or self._unlist(seat)
        if found:
            seat.crew.seats -= 1
            seat.account.seats -= 1
        return found

    def _unlist(self, seat: Seat) -> bool:
        job, at = seat.key
        seats = self._jobs.get(job, {})
        if seats.get(at) is not seat:
            return False
        del seats[at]
        if not seats:
            del self._jobs[job]
        return True

    def let_go(self, seat: Seat, *, well: bool) -> None:
        """A location leaves. One that still runs is stopped first: its worker is not free before."""
        if well or seat.stopped or not seat.started:
            if seat.announced and not seat.started and seat.worker.channel is not None:
                seat.worker.channel.send(msg.Withdraw(*seat.key))
            self.release(seat, well=well)
            return
        self._unlist(seat)
        self._leaving[seat.key] = seat
        seat.patience = asyncio.get_running_loop().call_later(self._grace, self._overdue, seat)
        if seat.worker.channel is not None:
            seat.worker.channel.send(msg.CancelJob(*seat.key))

    def _overdue(self, seat: Seat) -> None:
        """A location that was to leave is still there after the grace."""
        if seat.seen and seat.worker.shared:
            seat.worker.abandon(*seat.key)
            self.release(seat, well=False)
        else:
            stop_by_force(seat)

    def clear(self) -> None:
        """What becomes of them does not matter any more."""
        for seat in self._leaving.values():
            if seat.patience is not None:
                seat.patience.cancel()
        self._jobs.clear()
        self._leaving.clear()


def stop_by_force(seat: Seat) -> None:
    """Ends the worker of a location that has not stopped."""
    seat.worker.kill(f"a job on it ({seat.request.job_id}) was to stop, and did not within its grace")
