"""The application's side of one job: opens frames, takes results, counts completions, cancels, runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal

from dfm_async.errors import DfmError, EncodingError, WorkerLost
from dfm_async.model.events import Failure, WorkerNotice
from dfm_async.model.ids import JobNumber
from dfm_async.model.stats import Traffic
from dfm_async.model.status import JobStatus
from dfm_async.results.record import JobRecord
from dfm_async.results.seen import Seen
from dfm_async.targets.failures import Told, rebuild
from dfm_async.targets.frames import Batch, FrameLedger, Row
from dfm_async.targets.intake import Intake
from dfm_async.targets.offers import Answer, Offers
from dfm_async.targets.rules import JobRules
from dfm_async.targets.values import Values
from dfm_async.telemetry.spans import Origin
from dfm_async.telemetry.traces import JobTrace
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import weight
from dfm_async.wire.memory import Payload

__all__ = ["FOR_COORDINATOR", "Coordinator", "Phase", "log_overflow"]

_LOSSES: Final = 3
"""After how many lost workers in a row, with no parameter set done in between, a job is given up."""
_MOST_PRIORITY: Final = 1 << 31
_AT_ONCE: Final = 0.1
"""What stops within that many seconds has stopped at once."""


class Phase(Enum):
    """Where a job is between its submission and its end."""

    WAITING = "waiting"
    """For a slot, or for its workers."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A worker was lost; what is left of the run is being stopped, and then it runs again."""
    STOPPING = "stopping"
    ENDED = "ended"


class Coordinator:
    """Runs one job from the application's side.

    Args:
        record: where everything goes.
        codec: how values travel.
        rules: how the job deals with trouble.
        pack_rows: checks and packs parameter sets that other jobs send.
    """

    def __init__(
        self,
        record: JobRecord,
        codec: Values,
        rules: JobRules,
        pack_rows: Callable[[Any], list[Row]] | None = None,
    ) -> None:
        self.record = record
        self.plan = record.plan
        self.rules = rules
        self.phase = Phase.WAITING
        self.resumed = False
        """Whether it goes on where an earlier run has ended."""
        self.waiting_for = "its workers"
        """What a job in the phase WAITING waits for."""
        self.yielded = Traffic()
        """The results that have come."""
        self.outcomes: dict[str, str] = {}
        """For each location, how it stopped when the job was cancelled."""
        self.trace: JobTrace | None = None
        """The job's spans, if it is traced."""
        self.measured = False
        """Whether they tell the sizes of what operations take and return."""
        self.priority = 0
        """Which job's calls get a free thread first."""
        self.resubmit: Callable[[Coordinator], None] | None = None
        """Gives the job new workers, after it has lost one."""
        self.frames = FrameLedger(record.open_frames, len(self.plan.locations), rules.window, rules.reruns > 0, _weigh)
        self._intake = Intake(record, codec, rules.reruns > 0)
        self._codec = codec
        self._pack_rows = pack_rows
        self._send: Callable[[int, msg.Message], None] = _nowhere
        self._kill: Callable[[int], None] = _nobody
        self._on_end: list[Callable[[Coordinator], None]] = []
        self._names = self.plan.params_at
        self._room: list[asyncio.Future[None]] = []
        self._offers: Offers | None = None
        self._owed = [[0, 0] for _ in self.plan.locations]
        self._stopping: frozenset[int] = frozenset()
        self._acknowledged: frozenset[int] = frozenset()
        self._holding: frozenset[int] = frozenset()
        self._losses = 0
        self._final = (JobStatus.ABORTED, "cancelled")
        self._late = False
        self._deadline: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        record.log.on_room = self._grant
        record.log.on_full = self._check_full
        record.blocked = self._is_waiting

    @property
    def state(self) -> str:
        """How far the job is, in words."""
        if self.phase is Phase.WAITING:
            return f"waits for {self.waiting_for}"
        frames = self.frames
        done = frames.opened - len(frames.open)
        total = f"{frames.added}" if frames.stopped else f"{frames.added} so far"
        return f"{self.phase.value}, {done} of {total} parameter sets done"

    def resume(self, rows: Mapping[int, Row], added: int, seen: Seen, failed: Told) -> None:
        """Begins where an earlier run has ended.

        Args:
            rows: the parameter sets that were not done.
            added: how many there were in all.
            seen: the results of those that the log has.
            failed: the errors of those that the log has.
        """
        self.resumed = True
        self.frames.resume(rows, added)
        self._intake.resume(seen, failed)

    def on_end(self, call: Callable[[Coordinator], None]) -> None:
        """Has something called when the job has ended."""
        self._on_end.append(call)

    # parameter sets

    def add(self, rows: Sequence[Row]) -> None:
        """Adds parameter sets; they are opened as far as the window allows."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        self._take(rows)
        if self.phase is Phase.RUNNING:
            self._open_frames()

    def _take(self, rows: Sequence[Row]) -> None:
        if self.record.journal is not None:
            self.record.journal.params(self.frames.added, rows)
        self.frames.add(rows)

    def stop(self) -> None:
        """Says that no further parameter set will come."""
        if self.frames.stopped:
            return
        self.frames.stopped = True
        if self.record.journal is not None:
            self.record.journal.stopped()
        self._refuse_offers()
        if self.phase is Phase.RUNNING:
            self._open_frames()
            self._check_end()

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        return not self.frames.stopped and self.phase not in (Phase.STOPPING, Phase.ENDED)

    async def room(self) -> None:
        """Waits until there is room for a further parameter set, or the job takes none any more."""
        while self.frames.waiting >= self.rules.window and self.accepts:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    def _make_room(self) -> None:
        if self._room:
            waiting, self._room = self._room, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        while self._offers and self.frames.waiting < self.rules.window and self.accepts:
            self._take([self._offers.take()])

    def _open_frames(self) -> None:
        batches = self._next_batches()
        if not batches:
            return
        for batch in batches:
            for at, names in enumerate(self._names):
                self._send(at, self._opening(at, batch, names))

    def _opening(self, at: int, batch: Batch, names: Sequence[str]) -> msg.OpenFrames:
        payload, count = self._payload(batch.rows, names), len(batch.rows)
        return msg.OpenFrames(self.record.number, at, batch.first, count, payload, batch.last, self._origin())

    def _origin(self) -> Origin | None:
        """What a message with values tells of where it comes from, if the job is traced."""
        return None if self.trace is None else self.trace.origin()

    def _next_batches(self) -> list[Batch]:
        batches = self.frames.take(allow_new=not self.record.log.full)
        if batches:
            self.record.next_frame = self.frames.opened
            if self._room or self._offers:
                self._make_room()
        return batches

    def _payload(self, rows: list[Row], names: Sequence[str]) -> bytes | Payload:
        return self._codec.payload([[row[name] for name in names] for row in rows]) if names and rows else b""

    # tokens from and to other jobs

    def answer(self, at: int, message: msg.PlaceTaken) -> None:
        """Tells a location what became of a token that it sent to another job, if that run still goes on."""
        if self.record.number == message.job:
            self._send(at, message)

    def offer(self, place: str, key: str, value: Any, answer: Answer) -> None:
        """Takes a value for a parameter from another job; ``answer`` is told "" when it was, or why not.

        Values with the same key make one parameter set, which is taken when it is complete and there is room.
        """
        if not self.accepts:
            job_id = self.record.job_id
            answer(f"job {job_id} takes no further parameter sets: it was told to stop, or is about to end")
            return
        if self._offers is None:
            assert self._pack_rows is not None  # noqa: S101 - the session gives it to every job
            self._offers = Offers(self.record.job_id, self.plan.params, self._pack_rows)
        self._offers.add(place, key, value, answer)
        self._make_room()
        if self.phase is Phase.RUNNING:
            self._open_frames()

    def _refuse_offers(self) -> None:
        if self._offers is not None:
            self._offers.refuse()

    # life

    def launch(
        self,
        number: JobNumber,
        routes: tuple[str, ...],
        send: Callable[[int, msg.Message], None],
        kill: Callable[[int], None],
    ) -> None:
        """Starts the job at all its locations at once. ``number`` must be larger than that of any job before."""
        if self.phase is not Phase.WAITING:
            return
        record = self.record
        record.number = number
        self._send = send
        self._kill = kill
        self._holding = frozenset()
        self.phase = Phase.RUNNING
        if record.decided is JobStatus.SUBMITTED:
            record.change(JobStatus.RUNNING)
        limits = record.log.limits
        plan = self.plan.hash
        batches = self._next_batches()
        head = batches[0] if batches else Batch(0, [], False)
        traced = None if self.trace is None else self.trace.launch()
        for at, names in enumerate(self._names):
            self._owed[at][:] = (0, 0)
            payload = self._payload(head.rows, names)
            start = msg.StartJob(
                number,
                at,
                record.job_id,
                plan,
                routes,
                limits.window,
                limits.window_bytes,
                head.first,
                len(head.rows),
                payload,
                head.last,
                record.journal is not None,
                record.activity is not None,
                None if traced is None else traced[at],
                self._origin(),
                self.measured,
                max(-_MOST_PRIORITY, min(self.priority, _MOST_PRIORITY)),
            )
            send(at, start)
            for batch in batches[1:]:
                send(at, self._opening(at, batch, names))
        if self._room:
            self._make_room()
        self._check_end()

    def deadline(self, seconds: float, began: float) -> None:
        """Aborts the job if it has not ended so many seconds after it began, by the loop's clock."""
        self._deadline = asyncio.get_running_loop().call_at(began + seconds, self._too_late, seconds)

    def _too_late(self, seconds: float) -> None:
        reason = f"the deadline of {seconds:g} s is over"
        if self.phase is Phase.WAITING:
            reason += f"; the job was waiting for {self.waiting_for}"
        self._late = True
        self.halt(JobStatus.ABORTED, reason, self.rules.grace)

    def receive(self, message: msg.Message) -> None:
        """Takes a message from a location."""
        if self.phase is Phase.RESTARTING:
            handler = _WHILE_RESTARTING.get(type(message))
            if handler is not None:  # else it belongs to what will run again
                handler(self, message)
        elif self.phase is not Phase.ENDED:
            _HANDLERS[type(message)](self, message)

    def halt(self, status: JobStatus, reason: str, grace: float) -> None:
        """Stops the job at all its locations; it ends with this status when all of them have confirmed.

        A location that has not confirmed after the grace is killed.
        """
        if self.phase is Phase.WAITING:
            self._end(status, reason)
        elif self.phase in (Phase.RUNNING, Phase.RESTARTING):
            running = self.phase is Phase.RUNNING
            self.phase = Phase.STOPPING
            self._final = (status, reason)
            self._refuse_offers()
            if running:
                self._stop_locations(self._others(), grace)
            else:
                self.shorten(grace)

    def shut_down(self, reason: str, grace: float) -> None:
        """Stops the job because the session is closed. One that is written down can go on in another session."""
        status = JobStatus.ABORTED if self.record.journal is None else JobStatus.INTERRUPTED
        self.halt(status, reason, grace)

    def _others(self) -> frozenset[int]:
        """All locations but those that need no telling."""
        return frozenset(range(len(self.plan.locations))) - self._stopping

    def _stop_locations(self, locations: frozenset[int], grace: float) -> None:
        self._stopping = locations
        self._acknowledged = frozenset()
        for at in sorted(locations):
            self._send(at, msg.CancelJob(self.record.number, at))
        self.shorten(grace)
        self._check_stopped()

    def shorten(self, grace: float) -> None:
        """Kills what has not stopped after a further grace, if that is earlier than it would be killed otherwise."""
        if self.phase not in (Phase.STOPPING, Phase.RESTARTING):
            return
        loop = asyncio.get_running_loop()
        if self._patience is not None:
            if self._patience.when() <= loop.time() + grace:
                return
            self._patience.cancel()
        self._patience = loop.call_later(grace, self._overdue)

    def _overdue(self) -> None:
        self._patience = None
        for at in sorted(self._stopping):
            self._kill(at)

    def _cancel_seen(self, message: msg.CancelSeen) -> None:
        self._acknowledged |= {message.at}
        if message.waiting and self._late and self.phase is Phase.STOPPING:
            status, reason = self._final
            calls = f"{message.waiting} call{'s were' if message.waiting > 1 else ' was'}"
            self._final = (status, f"{reason}; {calls} waiting for a thread at {self.plan.locations[message.at]!r}")

    def has_seen_cancel(self, at: int) -> bool:
        """Whether a location has answered the cancellation: then its loop runs, and only an operation does not end."""
        return at in self._acknowledged

    def _job_stopped(self, message: msg.JobStopped) -> None:
        self._location_stopped(message.at, "stopped" if message.seconds < _AT_ONCE else "stopped after grace")

    def _job_broken(self, message: msg.JobBroken) -> None:
        self.fail(rebuild(message.error))

    def _location_stopped(self, at: int, how: str) -> None:
        if self.phase in (Phase.STOPPING, Phase.RESTARTING) and at in self._stopping:
            self._stopping -= {at}
            self.outcomes[self.plan.locations[at]] = how
            self._check_stopped()

    def lost(self, at: int, error: WorkerLost) -> None:
        """The worker of a location has ended."""
        if self.trace is not None:
            self.trace.lost(at, str(error))
        if self.phase is Phase.RUNNING and self.frames.finished:
            # Only objects were left to be closed: those of this worker are gone with it.
            self._stopping |= {at}
            self._release(at)
        elif self.phase is Phase.RUNNING:
            self._stopping = frozenset({at})  # it needs no telling
            self._lost(error)
        else:
            self._location_stopped(at, "killed")

    def lost_before_start(self, error: WorkerLost) -> None:
        """A worker has ended before the job could begin on it."""
        if self.phase is Phase.WAITING:
            self._lost(error)

    def _lost(self, error: WorkerLost) -> None:
        self._losses += 1
        tries = self.frames.again()
        if tries > self.rules.reruns or self._losses >= _LOSSES or self.resubmit is None:
            self.record.cause = error
            often = f"it has lost {self._losses} workers in a row; the last: " if self._losses >= _LOSSES else ""
            self.halt(JobStatus.ABORTED, f"{often}{error}", self.rules.grace)
            return
        log = self.record.log
        self.record.add(WorkerNotice(log.end, error.site, "lost", 0.0, str(error)))
        log.wake()
        if self.phase is Phase.RUNNING:
            self.phase = Phase.RESTARTING
            self._stop_locations(self._others(), self.rules.grace)
        else:
            self.resubmit(self)

    def abandon(self, at: int, how: str = "abandoned") -> None:
        """Gives up on a location that does not stop and is not killed."""
        self._location_stopped(at, how)

    def unresponsive(self, at: int, site: str, seconds: float) -> None:
        """The worker of a location does not respond."""
        self._notice(at, site, "unresponsive", seconds, f"has not responded for {seconds:.1f} s")

    def responsive(self, at: int, site: str) -> None:
        """The worker of a location responds again."""
        self._notice(at, site, "responsive", 0.0, "responds again")

    def retired(self, at: int, site: str, why: str) -> None:
        """The worker of a location takes no further jobs."""
        self._notice(at, site, "retired", 0.0, f"takes no further jobs: {why}")

    def _notice(
        self, at: int, site: str, kind: Literal["unresponsive", "responsive", "retired"], seconds: float, what: str
    ) -> None:
        if self.phase in (Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING):
            detail = f"the worker of {self.plan.locations[at]!r} {what}"
            self.record.add(WorkerNotice(self.record.log.end, site, kind, seconds, detail))
            self.record.log.wake()

    def fail(self, error: DfmError) -> None:
        """Ends the job with an error of its own, such as a log that is full or parameters that cannot be read."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        self.record.add_error(error)
        log = self.record.log
        self.record.add(Failure(log.end, None, error, (), self.plan.homesite, "job"))
        self.halt(JobStatus.FAILED, str(error), self.rules.grace)

    def _check_stopped(self) -> None:
        if self._stopping:
            return
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self.phase is Phase.STOPPING:
            self._end(*self._final)
        elif self.phase is Phase.RESTARTING:
            assert self.resubmit is not None  # noqa: S101 - else it would not restart
            self.phase = Phase.WAITING
            self.outcomes.clear()
            if self.record.activity is not None:
                self.record.activity.restarted()
            self.resubmit(self)

    def _check_end(self) -> None:
        if self.frames.finished and self.phase is Phase.RUNNING and not self._holding:
            failed = self.record.error_count > 0
            self._end(JobStatus.FAILED if failed else JobStatus.FINISHED, None)

    def _end(self, status: JobStatus, reason: str | None) -> None:
        self.phase = Phase.ENDED
        for timer in (self._deadline, self._patience):
            if timer is not None:
                timer.cancel()
        self._deadline = self._patience = None
        self.record.sets, self.record.done = self.frames.added, self.frames.opened - len(self.frames.open)
        self.frames.clear()
        if self._room:
            self._make_room()
        if self._offers:
            self._refuse_offers()
        self._intake.release_progress()
        self.record.log.on_room = self.record.log.on_full = self.record.blocked = None
        self._send, self._kill, self.resubmit, self._pack_rows = _nowhere, _nobody, None, None
        if self.trace is not None:
            failed = reason or (None if status is JobStatus.FINISHED else _errors(self.record.error_count))
            self.trace.end(status.value, failed)
            self.trace = None
        self.record.change(status, reason)
        calls, self._on_end = self._on_end, []  # what is done is let go: a session has many jobs
        for call in calls:
            call(self)

    # messages

    def _results(self, message: msg.Results) -> None:
        try:
            items, size = self._intake.results(message)
        except EncodingError as error:
            self.fail(error)
            return
        if self.trace is not None and message.origin is not None:
            self.trace.arrived(message.origin, items, size)
        self.yielded += Traffic(items, size)
        self._owe(message.at, items, size)
        if message.frames:
            self._close_frames(message.frames)

    def _owe(self, at: int, items: int, size: int) -> None:
        """A location has used up credit; gets it back, unless the log is full."""
        log = self.record.log
        owed = self._owed[at]
        owed[0] += items
        owed[1] += size
        limits = log.limits
        if log.full:
            self._check_full()
        elif owed[0] * 2 >= limits.window or owed[1] * 2 >= limits.window_bytes:
            self._send(at, msg.Credit(self.record.number, at, owed[0], owed[1]))
            owed[:] = (0, 0)

    def _check_full(self) -> None:
        """The log is full, and can drop nothing: fails the job, or tells those who wait for it that it waits."""
        log = self.record.log
        if not log.full:
            return
        if log.limits.overflow == "fail":
            self.fail(log_overflow(self.record))
        elif self.waiting_for_reader:
            self.record.stalled()

    @property
    def waiting_for_reader(self) -> bool:
        """Whether the job cannot go on before somebody reads its log."""
        log = self.record.log
        if log.limits.overflow == "spill":
            return False  # it waits for the store, if for anything
        window, window_bytes = log.limits.window, log.limits.window_bytes
        blocked = self.frames.waiting or any(items >= window or size >= window_bytes for items, size in self._owed)
        running = self.phase is Phase.RUNNING and not self.frames.finished
        return bool(log.full and not log.readers and blocked and running)

    def _is_waiting(self) -> bool:
        return self.waiting_for_reader

    def _grant(self) -> None:
        """The log has room again: the sites may send what they could not."""
        if self.phase is Phase.RUNNING:
            self._intake.release_progress()
            self._open_frames()
            for at, owed in enumerate(self._owed):
                if owed[0]:
                    self._send(at, msg.Credit(self.record.number, at, owed[0], owed[1]))
                    owed[:] = (0, 0)

    def _operation_error(self, message: msg.OperationError) -> None:
        new, found = self._intake.error(message.error), message.error
        if new is not None and self.rules.on_error == "stop" and self.phase is Phase.RUNNING:
            reason = f"stopped at the first error: {found.node} raised {found.type_name}"
            self.halt(JobStatus.FAILED, reason, self.rules.grace)
        self._owe(message.at, 1, 0)

    def _yield_failed(self, message: msg.YieldFailed) -> None:
        self._intake.failed_yield(message)
        self._owe(message.at, 1, 0)

    def _progress_made(self, message: msg.ProgressMade) -> None:
        self._intake.progress(message)

    def _metrics_made(self, message: msg.MetricsMade) -> None:
        self._intake.metrics(message)
        self._owe(message.at, len(message.reports), 0)

    def _calls_made(self, message: msg.CallsMade) -> None:
        activity = self.record.activity
        if activity is not None:
            site = self.plan.sites_at[message.at]
            activity.made(message.at, site, message.nodes, message.calls, message.left_out)

    def _spans_made(self, message: msg.SpansMade) -> None:
        if self.trace is not None:
            self.trace.take(message.at, message.spans, message.count, last=message.last)
            if not message.last:
                self._send(message.at, msg.SpansTaken(message.job, message.at, message.count))

    def _objects_built(self, message: msg.ObjectsBuilt) -> None:
        self._holding |= {message.at}

    def _objects_closed(self, message: msg.ObjectsClosed) -> None:
        self._release(message.at)

    def _release(self, at: int) -> None:
        self._holding -= {at}
        self._check_end()

    def _frames_done(self, message: msg.FramesDone) -> None:
        self._close_frames(message.frames)

    def _close_frames(self, frames: list[int]) -> None:
        log = self.record.log
        done = False
        for index in frames:
            if self.frames.done(index):
                self._intake.frame_done(index)
                done = True
        if done:
            self._losses = 0
            log.wake()
            self.record.changed()
            if self.phase is Phase.RUNNING:
                self._open_frames()
                self._check_end()
                self._check_full()


_HANDLERS: Final[dict[type, Callable[[Coordinator, Any], None]]] = {
    msg.Results: Coordinator._results,  # noqa: SLF001 - same module
    msg.OperationError: Coordinator._operation_error,  # noqa: SLF001
    msg.YieldFailed: Coordinator._yield_failed,  # noqa: SLF001
    msg.ProgressMade: Coordinator._progress_made,  # noqa: SLF001
    msg.MetricsMade: Coordinator._metrics_made,  # noqa: SLF001
    msg.CallsMade: Coordinator._calls_made,  # noqa: SLF001
    msg.SpansMade: Coordinator._spans_made,  # noqa: SLF001
    msg.ObjectsBuilt: Coordinator._objects_built,  # noqa: SLF001
    msg.ObjectsClosed: Coordinator._objects_closed,  # noqa: SLF001
    msg.FramesDone: Coordinator._frames_done,  # noqa: SLF001
    msg.CancelSeen: Coordinator._cancel_seen,  # noqa: SLF001
    msg.JobStopped: Coordinator._job_stopped,  # noqa: SLF001
    msg.JobBroken: Coordinator._job_broken,  # noqa: SLF001
}
FOR_COORDINATOR: Final = frozenset(_HANDLERS)
"""What locations say to the one who runs their job."""
_WHILE_RESTARTING: Final[dict[type, Callable[[Coordinator, Any], None]]] = {
    kind: _HANDLERS[kind] for kind in (msg.CancelSeen, msg.JobStopped, msg.SpansMade)
}


def log_overflow(record: JobRecord) -> DfmError:
    """The error of a job whose log is full, if that is to end it."""
    limits = record.log.limits
    return DfmError(
        f"job {record.job_id}: the log holds {record.log.held:,} events that nobody has read, more than "
        f"ResultLimits(max_items={limits.max_items:,}, max_bytes={limits.max_bytes:,}) allows"
    )


def _errors(count: int) -> str:
    return f"{count} error{'s' * (count != 1)}"


def _weigh(row: Row) -> int:
    return sum([weight(value) for value in row.values()])


def _nowhere(_at: int, _message: msg.Message) -> None:
    """Before the launch there is nobody to tell."""


def _nobody(_at: int) -> None:
    """Before the launch there is nobody to kill."""
