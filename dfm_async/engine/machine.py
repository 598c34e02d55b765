"""The decisions about one job: events in, effects out. No asyncio, no clock, no I/O.

:class:`JobMachine` counts parameter sets, gives credit to locations, stops them, and decides what becomes of the job
when a worker is lost. Its owner feeds it events by calling its methods, in any order, and carries out the effects that
they return, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Final, Protocol, TypeAlias

import msgspec

from dfm_async.engine.frames import FrameBatch, FrameLedger, Row
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.options import ResultLimits
from dfm_async.model.status import JobStatus

_LOSSES: Final = 3
"""A job is aborted when it loses this many workers in a row, with no parameter set done in between."""
_AT_ONCE: Final = 1.0
"""A location that stops within this many seconds has stopped at once."""


class Phase(Enum):
    """Where a job is between its submission and its end."""

    WAITING = "waiting"
    """For a slot, or for its workers."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A worker was lost; the rest of the run is being stopped, and then the job runs again."""
    STOPPING = "stopping"
    ENDED = "ended"


class StopOutcome(StrEnum):
    """How a location of a job stopped."""

    STOPPED = "stopped"
    AFTER_GRACE = "stopped after grace"
    KILLED = "killed"
    ABANDONED = "abandoned"
    RETIRED = "retired"


class Log(Protocol):
    """What the machine reads of the job's log."""

    @property
    def full(self) -> bool:
        """Whether it takes no further event that can wait."""

    @property
    def readers(self) -> int:
        """The number of its readers."""


class _Effect(msgspec.Struct, frozen=True, gc=False):
    pass


class Start(_Effect, frozen=True):
    """Start the job at all its locations, with these parameter sets."""

    batches: list[FrameBatch]


class Open(_Effect, frozen=True):
    """Open parameter sets at all locations."""

    batches: list[FrameBatch]


class CompleteFrames(_Effect, frozen=True):
    """Parameter sets are done at all locations."""

    indexes: list[int]


class Grant(_Effect, frozen=True):
    """Give credit to a location."""

    at: int
    items: int
    size: int


class CancelLocation(_Effect, frozen=True):
    """Ask a location to stop the job."""

    at: int


class Kill(_Effect, frozen=True):
    """Stop a location by force: the grace period is over."""

    at: int
    seen: bool
    """Whether it has seen the cancellation: its loop runs, and only an operation does not end."""


class SetGrace(_Effect, frozen=True):
    """Report :meth:`JobMachine.grace_over` after this many seconds; an earlier report that is due stays."""

    seconds: float


class Rerun(_Effect, frozen=True):
    """A worker was lost, and the parameter sets in flight will run again."""

    error: Exception


class Requeue(_Effect, frozen=True):
    """Nothing of the job runs, so no grace period matters: give it a slot and workers again."""

    restarted: bool
    """Whether it had begun."""


class Contain(_Effect, frozen=True):
    """A worker was lost, and the job goes on: notify the caller of the location, and find another worker."""

    at: int
    caller: int
    incarnation: int
    error: Exception


class Replace(_Effect, frozen=True):
    """Find a worker for a location that has none."""

    at: int


class Restart(_Effect, frozen=True):
    """Start the job at a location that has another worker, with the parameter sets that it is not done with."""

    at: int
    incarnation: int
    batches: list[FrameBatch]


class Restore(_Effect, frozen=True):
    """Have the caller of a location describe to its new worker where to begin."""

    at: int
    caller: int
    incarnation: int
    frames: list[int]


class Stalled(_Effect, frozen=True):
    """The job cannot go on before somebody reads its log."""


class End(_Effect, frozen=True):
    """The job has ended; ``status`` None means that everything is done, with or without errors."""

    status: JobStatus | None = None
    reason: str | None = None
    cause: Exception | None = None


Effect: TypeAlias = (
    Start
    | Open
    | CompleteFrames
    | Grant
    | CancelLocation
    | Kill
    | SetGrace
    | Rerun
    | Requeue
    | Contain
    | Replace
    | Restart
    | Restore
    | Stalled
    | End
)
_NOTHING: Final[tuple[Effect, ...]] = ()
_NO_CREDIT: Final = (0, 0)
_NOWHERE: Final[frozenset[int]] = frozenset()
_NO_CALLERS: Final[Mapping[int, int]] = {}
_NO_OUTCOMES: Final[Mapping[int, StopOutcome]] = {}
_CANCELLED: Final[tuple[JobStatus, str]] = (JobStatus.ABORTED, "cancelled")


class _Credit:
    """How much each location has sent that it has no credit for yet."""

    __slots__ = ("_limits", "_owed")

    def __init__(self, limits: ResultLimits) -> None:
        self._owed: dict[int, tuple[int, int]] = {}
        self._limits = limits

    def owe(self, at: int, items: int, size: int, *, full: bool) -> Grant | None:
        """A location has used up credit. It gets it back in batches, unless the log is full."""
        limits = self._limits
        before = self._owed.get(at, _NO_CREDIT)
        items, size = self._owed[at] = before[0] + items, before[1] + size
        if full or not (items * 2 >= limits.window or size * 2 >= limits.window_bytes):
            return None
        return self._grant(at)

    def _grant(self, at: int) -> Grant:
        return Grant(at, *self._owed.pop(at))

    def release(self) -> Iterable[Grant]:
        """Note that the log has room: return all credit that was held back."""
        return [self._grant(at) for at in sorted(self._owed) if self._owed[at][0]]

    @property
    def exhausted(self) -> bool:
        """Whether a location has to wait for credit."""
        window, window_bytes = self._limits.window, self._limits.window_bytes
        return any(items >= window or size >= window_bytes for items, size in self._owed.values())

    def reset(self, at: int | None = None) -> None:
        """Note that a location begins anew, or that all do."""
        if at is None:
            self._owed.clear()
        else:
            self._owed.pop(at, None)


class JobMachine:
    """One job, from its submission to its end."""

    __slots__ = (
        "_cause",
        "_contained_error",
        "_credit",
        "_effects",
        "_gone",
        "_holding",
        "_incarnations",
        "_late",
        "_locations",
        "_log",
        "_losses",
        "_restarting",
        "_seen",
        "_spec",
        "_stopping",
        "callers",
        "final",
        "frames",
        "outcomes",
        "phase",
        "waiting_for",
    )

    def __init__(self, spec: JobSpec, locations: Sequence[object], frames: FrameLedger, log: Log) -> None:
        self.phase = Phase.WAITING
        self.waiting_for = "its workers"
        """What a job in the phase WAITING waits for."""
        self.frames = frames
        self._spec = spec
        self._locations = locations
        self._log = log
        self._credit = _Credit(spec.limits)
        self.outcomes: Mapping[int, StopOutcome] = _NO_OUTCOMES
        """How each location stopped, if the job was stopped."""
        self._stopping: frozenset[int] = _NOWHERE
        """Locations that were asked to stop, and have not."""
        self._seen: frozenset[int] = _NOWHERE
        """Those that have seen the cancellation."""
        self._gone: frozenset[int] = _NOWHERE
        """Locations whose workers have ended in this run."""
        self._holding: frozenset[int] = _NOWHERE
        """Locations that have to close objects before the job has ended."""
        self.callers: Mapping[int, int] = _NO_CALLERS
        """The locations that can be lost without the job, and the location that calls each of them."""
        self._incarnations: dict[int, int] = {}
        """How often such locations were lost in this run."""
        self._restarting: dict[int, list[int]] = {}
        """Those that begin again, and with which parameter sets."""
        self._contained_error: Exception | None = None
        """The last loss that was contained."""
        self._losses = 0
        self.final = _CANCELLED
        """The status with which the job ends when it has stopped, and the reason."""
        self._cause: Exception | None = None
        self._late = False
        self._effects: list[Effect] = []

    def _drain(self) -> Sequence[Effect]:
        if not self._effects:
            return _NOTHING
        effects, self._effects = self._effects, []
        return effects

    # queries

    @property
    def state(self) -> str:
        """A description of the job's progress."""
        if self.phase is Phase.WAITING:
            return f"waits for {self.waiting_for}"
        frames = self.frames
        done = frames.opened - len(frames.open)
        total = f"{frames.added}" if frames.stopped else f"{frames.added} so far"
        return f"{self.phase.value}, {done} of {total} parameter sets done"

    def is_absent(self, at: int) -> bool:
        """Return whether a location has no worker that the job was started at."""
        return at in self._gone and at not in self._restarting

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        return not self.frames.stopped and self.phase not in (Phase.STOPPING, Phase.ENDED)

    @property
    def has_room(self) -> bool:
        """Whether a further parameter set need not wait."""
        return self.frames.waiting < self._spec.window

    @property
    def waiting_for_reader(self) -> bool:
        """Whether the job cannot go on before somebody reads its log."""
        log = self._log
        if self._spec.limits.overflow == "spill" or not log.full or log.readers:
            return False  # with "spill" it waits for the store, if for anything
        running = self.phase is Phase.RUNNING and not self.frames.finished
        return running and bool(self.frames.waiting or self._credit.exhausted)

    # parameter sets

    def add(self, rows: Sequence[Row], *, last: bool = False) -> Sequence[Effect]:
        """Add parameter sets; they are opened as far as the window allows. ``last``: no further ones will come."""
        self.frames.add(rows)
        if last:
            self.frames.stopped = True
        if self.phase is Phase.RUNNING:
            self._open()
            self._check_end()
        return self._drain()

    def stop_input(self) -> Sequence[Effect]:
        """No further parameter set will come."""
        return self.add((), last=True)

    def _open(self) -> None:
        batches = self.frames.take(allow_new=not self._log.full)
        if batches:
            self._effects.append(Open(batches))
            for frames in self._restarting.values():
                frames += _indexes(batches)

    def frames_done(self, frames: Collection[int], at: int = -1) -> Sequence[Effect]:
        """A location is done with parameter sets."""
        self._frames_done(frames, at)
        return self._drain()

    def _frames_done(self, frames: Collection[int], at: int) -> None:
        if self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return  # of a run that begins anew
        done = [index for index in frames if self.frames.done(index, at)]
        if self._gone:
            for other in sorted(self._gone):
                if self.callers.get(other) == at:  # what its caller is done with needs nothing of it
                    done += [index for index in frames if self.frames.done(index, other)]
        if done:
            self._effects.append(CompleteFrames(done))
            self._losses = 0
            if self.phase is Phase.RUNNING:
                self._open()
                self._check_end()
                if self._log.full:
                    self._check_stalled()

    # running

    def launch(self) -> Sequence[Effect]:
        """Note that all locations have workers that are ready."""
        if self.phase is Phase.WAITING:
            self.phase = Phase.RUNNING
            self._holding = self._gone = _NOWHERE
            self._incarnations.clear()
            self._restarting.clear()
            self._credit.reset()
            self._effects.append(Start(self.frames.take(allow_new=not self._log.full)))
            self._check_end()
        return self._drain()

    def used_credit(self, at: int, items: int, size: int, frames: Collection[int] = ()) -> Sequence[Effect]:
        """A location has sent results, errors or metrics, which are in the log now, and is done with ``frames``."""
        full = self._log.full
        grant = self._credit.owe(at, items, size, full=full)
        if grant is not None:
            self._effects.append(grant)
        if full:
            self._check_stalled()
        if frames:
            self._frames_done(frames, at)
        return self._drain()

    def log_has_room(self) -> Sequence[Effect]:
        """Note that the log takes events again: the locations may send what they held back."""
        if self.phase is Phase.RUNNING:
            self._open()
            self._effects += self._credit.release()
        return self._drain()

    def log_is_full(self) -> Sequence[Effect]:
        """Note that the log is full, and can drop nothing."""
        self._check_stalled()
        return self._drain()

    def _check_stalled(self) -> None:
        if self.waiting_for_reader:
            self._effects.append(Stalled())

    def operation_failed(self, node: str, kind: str) -> Sequence[Effect]:
        """An operation has raised an error that the log has now."""
        if self._spec.on_error == "stop" and self.phase is Phase.RUNNING:
            self._halt(JobStatus.FAILED, f"stopped at the first error: {node} raised {kind}", self._spec.grace)
        return self._drain()

    def objects_built(self, at: int) -> Sequence[Effect]:
        """A location has objects that have to be closed before the job has ended."""
        self._holding |= {at}
        return _NOTHING

    def objects_closed(self, at: int) -> Sequence[Effect]:
        """Note that the objects of a location are closed."""
        self._holding -= {at}
        self._check_end()
        return self._drain()

    def _check_end(self) -> None:
        if self.frames.finished and self.phase is Phase.RUNNING and not self._holding:
            if self._restarting:
                self._effects += [CancelLocation(at) for at in sorted(self._restarting)]
            self._end(End())

    def _end(self, end: End) -> None:
        self.phase = Phase.ENDED
        self.frames.clear()
        self._effects.append(end)

    # stopping

    def halt(self, status: JobStatus, reason: str, grace: float, *, late: bool = False) -> Sequence[Effect]:
        """Stop the job; it ends with this status when all locations have stopped.

        A location that has not stopped after the grace period is stopped by force. ``late``: the deadline is over, so
        that it matters which calls were still waiting.
        """
        self._late = self._late or late
        self._halt(status, reason, grace)
        return self._drain()

    def _halt(self, status: JobStatus, reason: str, grace: float) -> None:
        if self.phase is Phase.WAITING:
            self._end(End(status, reason, self._cause))
        elif self.phase is Phase.RUNNING:
            self.phase = Phase.STOPPING
            self.final = (status, reason)
            self._stop_locations(grace)
        elif self.phase is Phase.RESTARTING:
            self.phase = Phase.STOPPING
            self.final = (status, reason)
            self._effects.append(SetGrace(grace))

    def shorten(self, grace: float) -> Sequence[Effect]:
        """Stop by force what has not stopped after a further grace period, if that is earlier than before."""
        if self.phase in (Phase.STOPPING, Phase.RESTARTING):
            self._effects.append(SetGrace(grace))
        return self._drain()

    def _stop_locations(self, grace: float) -> None:
        locations = frozenset(range(len(self._locations))) - (self._gone - self._restarting.keys())
        self._restarting.clear()
        self._stopping, self._seen = locations, frozenset()
        self._effects += [CancelLocation(at) for at in sorted(locations)]
        self._effects.append(SetGrace(grace))
        self._check_stopped()

    def grace_over(self) -> Sequence[Effect]:
        """Note that the grace period is over."""
        return [Kill(at, at in self._seen) for at in sorted(self._stopping)]

    def cancel_seen(self, at: int, waiting: int) -> Sequence[Effect]:
        """A location has seen the cancellation, when ``waiting`` of its calls were waiting for a thread."""
        self._seen |= {at}
        if waiting and self._late and self.phase is Phase.STOPPING:
            status, reason = self.final
            calls = f"{waiting} call{'s were' if waiting > 1 else ' was'}"
            self.final = (status, f"{reason}; {calls} waiting for a thread at {str(self._locations[at])!r}")
        return _NOTHING

    def stopped(self, at: int, seconds: float) -> Sequence[Effect]:
        """A location has stopped, after this many seconds."""
        self._location_stopped(at, StopOutcome.STOPPED if seconds < _AT_ONCE else StopOutcome.AFTER_GRACE)
        return self._drain()

    def abandon(self, at: int, how: StopOutcome = StopOutcome.ABANDONED) -> Sequence[Effect]:
        """Do not wait any longer for a location that has not stopped and is not killed."""
        self._location_stopped(at, how)
        return self._drain()

    def _location_stopped(self, at: int, how: StopOutcome) -> None:
        if self.phase in (Phase.STOPPING, Phase.RESTARTING) and at in self._stopping:
            self._stopping -= {at}
            self.outcomes = {**self.outcomes, at: how}
            self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stopping:
            return
        if self.phase is Phase.STOPPING:
            self._end(End(*self.final, self._cause))
        elif self.phase is Phase.RESTARTING:
            self.phase = Phase.WAITING
            self.outcomes = _NO_OUTCOMES
            self._effects.append(Requeue(restarted=True))

    # lost workers

    def lost(self, at: int, error: Exception) -> Sequence[Effect]:
        """Note that the worker of a location has ended."""
        if self.phase is Phase.WAITING:
            self._lose(error, in_flight=at not in self.callers)
        elif self.phase is Phase.RUNNING:
            absent = at in self._gone
            self._gone |= {at}
            if self.frames.finished:  # only objects were left to be closed: they are gone with their worker
                self._holding -= {at}
                self._check_end()
            elif self.callers.get(at, at) in self._gone:
                self._lose(error)
            elif absent:
                self._replace(at, error)
            else:
                self._contain(at, error)
        else:
            self._location_stopped(at, StopOutcome.KILLED)
        return self._drain()

    # losses that the job survives

    def _contain(self, at: int, error: Exception) -> None:
        """Go on without what a location was doing: its caller decides what becomes of it."""
        incarnation = self._incarnations[at] = self._incarnations.get(at, 0) + 1
        self._holding -= {at}
        self._credit.reset(at)
        self._contained_error = error
        caller = self.callers[at]
        self._frames_done(self.frames.reopen(at, caller), caller)
        if self.phase is Phase.RUNNING and not self.frames.over_for(at):
            self._effects += [Contain(at, caller, incarnation, error), Replace(at)]

    def _replace(self, at: int, error: Exception) -> None:
        """Find another worker in the place of one that was lost before the location had begun."""
        self._restarting.pop(at, None)
        if self._losses + 1 >= _LOSSES:
            self._lose(error)
        else:
            self._losses += 1
            self._effects.append(Replace(at))

    def replaced(self, at: int) -> Sequence[Effect]:
        """Note that a location has another worker, which is ready."""
        if self.phase is Phase.RUNNING and at in self._gone and not self.frames.over_for(at):
            batches = self.frames.taken_by(at)
            self._restarting[at] = _indexes(batches)
            self._effects.append(Restart(at, self._incarnations[at], batches))
        return self._drain()

    def restarted(self, at: int) -> Sequence[Effect]:
        """Note that a location has begun anew, and has to know where."""
        frames = self._restarting.pop(at, None)
        if self.phase is Phase.RUNNING and frames is not None:
            self._gone -= {at}
            self._losses = 0
            self._effects.append(Restore(at, self.callers[at], self._incarnations[at], frames))
        return self._drain()

    def not_contained(self, at: int, location: int) -> Sequence[Effect]:
        """The job cannot go on without a location that was lost, as its caller reports."""
        if self.phase is Phase.RUNNING and self.callers.get(location) == at and self._contained_error is not None:
            self._lose(self._contained_error)
        return self._drain()

    def _lose(self, error: Exception, *, in_flight: bool = True) -> None:
        """Run the job again, or abort it. Unless parameter sets were in flight, none is lost."""
        self._losses += 1
        tries = self.frames.requeue() if in_flight else 0
        if tries > self._spec.reruns or self._losses >= _LOSSES:
            self._cause = error
            often = f"it has lost {self._losses} workers in a row; the last: " if self._losses >= _LOSSES else ""
            self._halt(JobStatus.ABORTED, f"{often}{error}", self._spec.grace)
            return
        self._effects.append(Rerun(error))
        if self.phase is Phase.RUNNING:
            self.phase = Phase.RESTARTING
            self._stop_locations(self._spec.grace)
        else:
            self._effects.append(Requeue(restarted=False))


def _indexes(batches: Iterable[FrameBatch]) -> list[int]:
    return [index for batch in batches for index in range(batch.first, batch.first + len(batch.rows))]
