"""One run of a job: the workers of its locations, from the first request to the last message."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Protocol

from dfm_async.engine.coordinator import Assignment, Coordinator
from dfm_async.engine.machine import Phase, StopOutcome
from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.events import NoticeKind
from dfm_async.model.ids import JobNumber, Location
from dfm_async.model.status import JobStatus

_RESTARTS: Final = 3
"""The number of times that a job requests workers again because one has ended before the job started."""
_NOWHERE: Final[frozenset[int]] = frozenset()


@functools.cache
def _all(count: int) -> frozenset[int]:
    """Return the numbers of all locations of a job; one for all jobs, because they are many."""
    return frozenset(range(count))


class Host(Protocol):
    """One site, on this machine or elsewhere: gives workers to the locations of jobs."""

    def assign(self, run: Run, at: int) -> Assignment:
        """Find a worker for a location; the run is notified when it is ready, maybe at once."""


class RunOwner(Protocol):
    """Who begins runs."""

    def register(self, run: Run) -> JobNumber:
        """Return a number for a run, which is larger than all before."""

    def restart(self, run: Run) -> None:
        """Begin another run in the place of one that has not started."""


class Run:
    """One run of a job. It starts when all its locations have workers that are ready.

    Args:
        lane: which worker of each site it gets.
        restarts: the number of runs before this one that have not started.
    """

    __slots__ = (
        "_missing",
        "_number",
        "_owner",
        "_released",
        "_requested",
        "assignments",
        "coordinator",
        "lane",
        "locations",
        "restarts",
        "started",
    )

    def __init__(self, owner: RunOwner, coordinator: Coordinator, lane: int, restarts: int) -> None:
        self._owner = owner
        self._number: JobNumber | None = None
        self.coordinator = coordinator
        self.lane = lane
        self.restarts = restarts
        self.assignments: list[Assignment] = []
        self.started = False
        self.locations: tuple[Location, ...] = coordinator.plan.locations
        """The locations of the job."""
        self._missing = _all(len(self.locations))
        self._requested: frozenset[int] = _NOWHERE
        """The locations for which another worker is being requested."""
        self._released = False

    @property
    def number(self) -> JobNumber:
        """Names the run, and no other.

        It is given when it is first needed: by hosts elsewhere with the request for workers, on this machine at the
        start. Workers here rely on that: a message for a run with a smaller number than the last one that has started
        is late, and is ignored.
        """
        if self._number is None:
            self._number = self._owner.register(self)
        return self._number

    def begin(self, host: Callable[[str], Host]) -> None:
        """Request workers."""
        self.coordinator.machine.waiting_for = "its workers to start"
        for at, location in enumerate(self.locations):
            try:
                assignment = host(location.site).assign(self, at)
            except DfmError as error:
                self.refused(at, error)
                return
            if self._released:
                assignment.release(succeeded=False)
                return
            self.assignments.append(assignment)
        self._start()

    def assigned(self, at: int) -> None:
        """Note that the worker of a location is ready."""
        self._missing -= {at}
        if self.started:
            self._replaced(at)
        elif len(self.assignments) == len(self.locations):  # else the others are being requested
            self._start()

    def _start(self) -> None:
        if self._missing or self.started or self._released:
            return
        coordinator = self.coordinator
        if coordinator.phase is not Phase.WAITING:
            return  # cancelled in the meantime
        assignments = self.assignments
        try:
            for assignment in assignments:
                assignment.prepare()
        except Exception as error:  # noqa: BLE001 - a plan that nobody can run ends its own job, not others
            coordinator.fail(DfmError(f"the plan cannot be given to the sites: {type(error).__name__}: {error}"))
            return
        self.started = True
        coordinator.launch(self.number, assignments)
        for assignment in assignments:
            assignment.launched()

    def replace(self, at: int, host: Callable[[str], Host]) -> None:
        """Request another worker for a location that has lost its own."""
        self._missing |= {at}
        self._requested |= {at}
        self.assignments[at].release(succeeded=False)
        try:
            assignment = host(self.locations[at].site).assign(self, at)
        except DfmError as error:
            self.refused(at, error)
            return
        self._requested -= {at}
        if self._released:
            assignment.release(succeeded=False)
            return
        self.assignments[at] = assignment
        self._replaced(at)

    def _replaced(self, at: int) -> None:
        if at in self._missing or at in self._requested or self._released:
            return
        assignment = self.assignments[at]
        assignment.prepare()
        self.coordinator.replaced(at)
        assignment.launched()

    def release(self, *, succeeded: bool) -> None:
        """Leave all workers: the job has ended, or another run takes the place of this one."""
        if not self._released:
            self._released = True
            assignments, self.assignments = self.assignments, []  # they and the run refer to each other
            for assignment in assignments:
                assignment.release(succeeded=succeeded)

    # what happens to workers

    @property
    def may_restart(self) -> bool:
        """Whether the job may request workers again, if it has not started."""
        return self.restarts < _RESTARTS

    def lost(self, at: int, error: WorkerLost) -> None:
        """Note that the worker of a location has ended, or did not start."""
        if self._released:
            return
        if not self.started and at not in self._missing and self.may_restart:
            self._owner.restart(self)  # it was ready, and nothing is lost yet
        else:
            self.coordinator.lost(at, error)

    def refused(self, at: int, error: BaseException) -> None:
        """Note that a location gets no worker."""
        if self._released:
            return
        if isinstance(error, DfmError):
            self.coordinator.fail(error)
        else:
            self.coordinator.record.cause = error
            reason = f"a worker of site {self.locations[at].site!r} cannot start: {error}"
            self.coordinator.halt(JobStatus.ABORTED, reason, 0)

    def abandon(self, at: int, how: StopOutcome = StopOutcome.ABANDONED) -> None:
        """Do not wait any longer for a location that has not stopped."""
        self.coordinator.abandon(at, how)

    def notice(self, at: int, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        """Log that the worker of a location does not respond, responds again, or takes no further jobs."""
        self.coordinator.notice(at, kind, seconds, why)
