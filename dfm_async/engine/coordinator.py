"""Runs one job: feeds its machine with what happens, and carries out what the machine decides."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from dfm_async.base.signals import Signal
from dfm_async.base.suspension import DeadlineTimer, suspension
from dfm_async.base.timers import Timer
from dfm_async.base.wall_clock import WallTimer, wall_time
from dfm_async.engine import machine as do
from dfm_async.engine import waits as do_wait
from dfm_async.engine.frames import Answer, FrameBatch, FrameLedger, IncomingSets, Row
from dfm_async.engine.intake import Intake, LoggedErrors, PayloadCodec, rebuild
from dfm_async.engine.machine import JobMachine, Phase, StopOutcome
from dfm_async.engine.waits import WAITS_SHOWN, WaitEvent, WaitLedger, check_event, read_event
from dfm_async.errors import DfmError, EncodingError, EventsFull, ParameterError, WorkerLost
from dfm_async.model.checks import FINITE, is_number
from dfm_async.model.events import EventSent, Failure, NoticeKind, WaitBegan, WaitEnded, WorkerNotice
from dfm_async.model.ids import JobNumber
from dfm_async.model.stats import Traffic
from dfm_async.model.status import JobStatus
from dfm_async.model.waiting import JobWait
from dfm_async.net.game import describe_error
from dfm_async.planning.plan import Plan
from dfm_async.results.record import JobRecord, Journal
from dfm_async.results.seen import Seen
from dfm_async.telemetry.spans import Origin
from dfm_async.telemetry.traces import JobTrace
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import weight
from dfm_async.wire.memory import Payload

_NOTICES: Final[dict[NoticeKind, str]] = {
    "unresponsive": "has not responded for {seconds:.1f} s",
    "responsive": "responds again",
    "retired": "takes no further jobs: {why}",
    "bound": "computes on one core: {why}",
}


_NO_WAITS: Final = WaitLedger(keep=False)
"""That of all jobs whose pipelines wait for nothing; it stays empty."""


class Assignment(Protocol):
    """One location of a run, on a worker that is ready or will be."""

    replaceable: bool
    """Whether the location can get another worker while the run goes on."""

    @property
    def address(self) -> str:
        """Where the other locations reach it."""

    def prepare(self) -> None:
        """Make the net of the location known to the worker."""

    def launched(self) -> None:
        """Note that the job was started."""

    def send(self, message: msg.Message) -> None:
        """Send a message to the location."""

    def stop_by_force(self, *, seen: bool) -> None:
        """End what has not stopped within its grace period, without harm to other jobs where that is possible.

        ``seen``: whether the location has seen the cancellation, so that the loop of its worker runs.
        """

    def release(self, *, succeeded: bool) -> None:
        """Leave the worker; ``succeeded``: the job has finished, so the worker is in order."""


class JobOwner(Protocol):
    """Who gives jobs slots and workers."""

    def requeue(self, job: Coordinator) -> None:
        """Give a job a slot and workers again, after it has lost one."""

    def replace(self, job: Coordinator, at: int) -> None:
        """Give a location of a job another worker, after it has lost one and the job goes on."""

    def job_ended(self, job: Coordinator) -> None:
        """Note that a job has ended, after everybody else was notified."""

    def queue(self, job: Coordinator) -> tuple[int, int | None]:
        """Return how many jobs have a slot, and how many get one before this job, if it waits for one."""


class Coordinator:
    """Run one job. What to do is decided by its :class:`JobMachine`; timers, log, traces and messages are here.

    ``pack_rows`` checks and packs parameter sets that other jobs send.
    """

    __slots__ = (
        "_alarm",
        "_assignments",
        "_codec",
        "_deadline",
        "_grace",
        "_incoming",
        "_intake",
        "_names",
        "_on_end",
        "_pack_rows",
        "_pending",
        "_recorded",
        "_room",
        "_unsent",
        "_waits",
        "_yielded",
        "_yielded_bytes",
        "frames",
        "machine",
        "owner",
        "plan",
        "record",
        "spec",
        "trace",
    )

    def __init__(
        self, record: JobRecord, codec: PayloadCodec, pack_rows: Callable[[Plan, Any], list[Row]] | None = None
    ) -> None:
        self.record = record
        self.plan = record.plan
        self.spec = spec = record.spec
        self._yielded = self._yielded_bytes = 0
        self.trace: JobTrace | None = None
        """The job's spans, if it is traced."""
        self.owner: JobOwner | None = None
        """Who gives the job a slot and workers."""
        may_rerun = spec.reruns > 0
        locations = self.plan.locations
        contained = self.plan.contained
        keep = may_rerun or bool(contained)
        self.frames = FrameLedger(record.open_frames, len(locations), spec.window, keep, _weigh, contained)
        self.machine = JobMachine(spec, locations, self.frames, record.log)
        self._intake = Intake(record, codec, may_rerun)
        self._codec = codec
        self._pack_rows = pack_rows
        self._assignments: Sequence[Assignment] = ()
        self._on_end: list[Callable[[Coordinator], None]] = []
        self._names = self.plan.params_at
        self._room: Signal | None = None
        self._incoming: IncomingSets | None = None
        self._deadline: DeadlineTimer | None = None
        self._grace: Timer | None = None
        self._pending: list[do.Effect] | None = None
        self._recorded = spec.stored and (spec.retry_of or spec.fork_of) is not None
        """Whether calls of the job may have been recorded, because it, or the job that it repeats, ran before."""
        self._waits = WaitLedger(keep=may_rerun) if self.plan.waits or self.plan.events else _NO_WAITS
        self._unsent: deque[tuple[int, do_wait.WaitReply]] | None = None
        """The answers to waits that are sent when the journal has them: the offset of the event, and the answer."""
        self._alarm: WallTimer | None = None
        record.log.owner = self
        record.execution = self.machine

    def _carry_out(self, effects: Sequence[do.Effect]) -> None:
        """Carry out effects in their order, also those of events that happen meanwhile."""
        if self._pending is not None:
            self._pending.extend(effects)
            return
        if not effects:
            return
        pending = self._pending = list(effects)
        try:
            for effect in pending:  # also those that are added meanwhile
                _EFFECTS[type(effect)](self, effect)
        finally:
            self._pending = None

    # queries

    @property
    def phase(self) -> Phase:
        """Where the job is between its submission and its end."""
        return self.machine.phase

    @property
    def yielded(self) -> Traffic:
        """The results that have come."""
        return Traffic(self._yielded, self._yielded_bytes)

    @property
    def state(self) -> str:
        """A description of the job's progress."""
        return self.machine.state

    def waiting(self) -> JobWait:
        """Return what is known about what the job waits for."""
        running, ahead = (0, None) if self.owner is None else self.owner.queue(self)
        log, frames, waits = self.record.log, self.frames, self.phase is Phase.WAITING
        return JobWait(
            waiting_for=self.machine.waiting_for if waits else "",
            ahead=ahead,
            running=running,
            priority=self.spec.priority,
            log_full=log.full,
            readers=log.readers,
            idle=self.accepts and not frames.open and not frames.waiting,
            waits=self._waits.waiting(WAITS_SHOWN),
        )

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        return self.machine.accepts

    @property
    def outcomes(self) -> dict[str, str]:
        """How each location stopped, if the job was stopped."""
        return {str(self.plan.locations[at]): how.value for at, how in self.machine.outcomes.items()}

    def resume(
        self, rows: Mapping[int, Row], added: int, seen: Seen, failed: LoggedErrors, waits: Iterable[WaitEvent] = ()
    ) -> None:
        """Begin where an earlier run has ended: with the ``rows`` that were not done, of ``added`` in all.

        ``seen`` and ``failed`` are their results and errors that the log has, ``waits`` its events about waits.
        """
        for event in waits:
            if event.frame[0] in rows and self._waits is not _NO_WAITS:
                self._waits.logged(event)
        self._recorded = True
        self.frames.resume(rows, added)
        self._intake.resume(seen, failed)

    def ended_before(self) -> None:
        """Note that the job has ended in an earlier process: its record has the outcome, and nothing of it runs."""
        self.machine.phase = Phase.ENDED
        self.frames.added = self.frames.opened = self.record.sets or 0
        self.frames.stopped = True
        self.record.log.owner = self.record.execution = None

    def on_end(self, call: Callable[[Coordinator], None]) -> None:
        """Call back when the job has ended."""
        self._on_end.append(call)

    # parameter sets

    def add(self, rows: Sequence[Row], *, last: bool = False) -> None:
        """Add parameter sets; they are opened as far as the window allows. ``last``: no further ones will come.

        With a journal, they are opened when it has written them: their numbers name what sites record of their calls,
        and a set that gets lost leaves its number to another one.
        """
        if self.machine.phase in (Phase.STOPPING, Phase.ENDED):
            return
        journal = self.record.journal
        if journal is not None:
            journal.params(self.frames.added, rows)
            if last:
                journal.stopped()
            if rows:
                self.frames.unwritten += len(rows)
                journal.when_written(functools.partial(self._rows_written, journal, len(rows)))
        self._carry_out(self.machine.add(rows, last=last))

    def _rows_written(self, journal: Journal, count: int) -> None:
        if self.record.journal is journal:
            self.frames.unwritten -= count
            self._carry_out(self.machine.add(()))

    def stop(self) -> None:
        """Take no further parameter set."""
        if self.frames.stopped:
            return
        if self.record.journal is not None:
            self.record.journal.stopped()
        self._carry_out(self.machine.stop_input())
        self._refuse_incoming()

    async def room(self) -> None:
        """Wait until there is room for a further parameter set, or the job takes none any longer."""
        if self._room is None:
            self._room = Signal()
        await self._room.wait_until(lambda: self.machine.has_room or not self.accepts)

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.notify()
        while self._incoming and self.machine.has_room and self.accepts:
            self.add([self._incoming.take()])

    def _open(self, effect: do.Open) -> None:
        for batch in effect.batches:
            for at, names in enumerate(self._names):
                self._send(at, self._opening(at, batch, names))
        self._opened(effect.batches)

    def _opened(self, batches: list[FrameBatch]) -> None:
        if batches:
            self.record.next_frame = self.frames.opened
        if self._room is not None or self._incoming:
            self._make_room()

    def _opening(self, at: int, batch: FrameBatch, names: Sequence[str]) -> msg.OpenFrames:
        payload, count = self._payload(batch.rows, names), len(batch.rows)
        return msg.OpenFrames(self.record.number, at, batch.first, count, payload, batch.last, self._origin())

    def _origin(self) -> Origin | None:
        """Return what a message with values reports about where it comes from, if the job is traced."""
        return None if self.trace is None else self.trace.origin()

    def _payload(self, rows: list[Row], names: Sequence[str]) -> bytes | Payload:
        if not names or not rows:
            return b""
        if len(rows) == 1:
            return self._codec.payload([[rows[0][name] for name in names]])
        return self._codec.payload([[row[name] for name in names] for row in rows])

    def refusal(self, problem: str) -> DfmError:
        """Return the error for what the job no longer takes: that it is interrupted, or else the problem."""
        status, reason = self.machine.final
        if self.machine.phase is Phase.STOPPING and status is JobStatus.INTERRUPTED:
            return self.record.interruption(reason)
        return self.record.refusal(problem)

    # events and times

    async def send_event(self, name: str, value: str, frame: int | None) -> None:
        """Send an event, with a value as JSON, to a parameter set; None: to the only one.

        Raises:
            ParameterError: the set does not take it.
            EventsFull: it would take it later.
            JobInterrupted: the job is interrupted, or about to be.
        """
        self.take_event(name, value, frame)

    def take_event(self, name: str, value: str, frame: int | None) -> None:
        """Do the same at once."""
        if self.machine.phase in (Phase.STOPPING, Phase.ENDED):
            raise self.refusal(f"job {self.record.job_id} takes no event {name!r}: it has ended, or is about to")
        index = self._set_for(name, frame)
        found, value = read_event(name, value)
        log = self.record.log
        full = self._waits.limit(index, name) or ("the log of the job is full: read its results" if log.full else None)
        if full is not None:
            raise EventsFull([f"event {name!r} cannot be kept: {full}"])
        sent = wall_time()
        self.record.add(EventSent(log.end, (index,), name, found, sent), len(value))
        self._carry_out_waits(self._waits.send(index, name, value, sent))
        log.changed.notify()
        if log.full:
            self.log_is_full()

    def _set_for(self, name: str, frame: int | None) -> int:
        """Return the parameter set that an event goes to."""
        frames = self.frames
        check_event(self.plan, name)
        if frame is None:
            if frames.added != 1:
                has = f"has {frames.added:,} parameter sets: choose one for event {name!r} by frame="
                raise ParameterError([f"job {self.record.job_id} {has}"])
            frame = 0
        if not 0 <= frame < frames.added:
            raise ParameterError([f"there is no parameter set {frame} for event {name!r}: there are {frames.added:,}"])
        if frame < frames.opened and frame not in frames.open:
            raise ParameterError([f"parameter set {frame} takes no event {name!r}: it is done"])
        return frame

    def _wait_requested(self, message: msg.WaitRequest) -> None:
        named = self.plan.waits.get(message.node) == (message.event, self.plan.locations[message.at])
        timed = is_number(message.seconds, most=FINITE) if message.seconds is not None else bool(message.event)
        in_flight = bool(message.frame) and message.frame[0] in self.frames.open
        if self.machine.phase is Phase.RUNNING and named and timed and in_flight:
            found = message.at, message.node, message.frame, message.event, message.seconds
            self._carry_out_waits(self._waits.begin(*found, wall_time()))
            self.record.log.changed.notify()
        self._used_credit(message.at, 1, 0)

    def _carry_out_waits(self, effects: Iterable[do_wait.Effect]) -> None:
        record, log = self.record, self.record.log
        for effect in effects:
            site = self.plan.sites_at[effect.at]
            match effect:
                case do_wait.Begun():
                    record.add(WaitBegan(log.end, effect.frame, site, effect.node, effect.event, effect.until))
                case do_wait.Over():
                    by: Literal["event", "time"] = "time" if effect.value is None else "event"
                    record.add(WaitEnded(log.end, effect.frame, site, effect.node, effect.event, by))
                case do_wait.WaitReply():
                    self._answer_wait(effect)
        record.changed()
        self._set_alarm()

    def _answer_wait(self, reply: do_wait.WaitReply) -> None:
        """Let a statement go on, when it is safe that it will get the same if it runs again."""
        record = self.record
        if record.journal is None or record.log.readable == record.log.end:
            self._send(reply.at, msg.WaitAnswer(record.number, reply.at, reply.node, reply.frame, reply.value))
            return
        if self._unsent is None:
            self._unsent = deque()
            record.on_written = self._written
        self._unsent.append((record.log.end, reply))

    def _written(self, end: int) -> None:
        while self._unsent and self._unsent[0][0] <= end:
            _, reply = self._unsent.popleft()
            self._send(reply.at, msg.WaitAnswer(self.record.number, reply.at, reply.node, reply.frame, reply.value))

    def _set_alarm(self) -> None:
        due = self._waits.due()
        if self._alarm is None:
            if due is None:
                return
            self._alarm = WallTimer(self._time_over)
        self._alarm.set(due)

    def _time_over(self, now: float) -> None:
        self._carry_out_waits(self._waits.expire(now))
        self.record.log.changed.notify()

    def _end_waits(self) -> None:
        self._waits.clear()
        self._unsent = self.record.on_written = None
        if self._alarm is not None:
            self._alarm.set(None)
            self._alarm = None

    # messages from and to other jobs

    def answer(self, at: int, message: msg.PlaceTaken) -> None:
        """Report to a location what became of a token that it sent to another job, if that run still goes on."""
        if self.record.number == message.job:
            self._send(at, message)

    def offer(self, place: str, key: str, value: Any, answer: Answer) -> None:
        """Take a value for a parameter from another job; ``answer`` is called with "" when it was, or why not.

        Values with the same key make one parameter set, which is taken when it is complete and there is room.
        """
        job_id = self.record.job_id
        if not self.accepts:
            answer(f"job {job_id} accepts no further parameter sets: its input was stopped, or it is about to end")
            return
        if self._incoming is None:
            assert self._pack_rows is not None  # noqa: S101 - the session gives it to every job
            self._incoming = IncomingSets(job_id, self.plan.params, functools.partial(self._pack_rows, self.plan))
        self._incoming.add(place, key, value, answer)
        self._make_room()

    def _refuse_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.refuse()

    # running

    def launch(self, number: JobNumber, assignments: Sequence[Assignment]) -> None:
        """Start the job at all its locations at once. ``number`` must be larger than that of any run before."""
        if self.machine.phase is Phase.WAITING:
            self.record.number = number
            self._assignments = assignments
            if contained := self.plan.contained:
                self.machine.callers = {at: by for at, by in contained.items() if assignments[at].replaceable}
            self._carry_out(self.machine.launch())

    def _send(self, at: int, message: msg.Message) -> None:
        if self._assignments and not self.machine.is_absent(at):  # else it was not launched there, or has ended
            self._assignments[at].send(message)

    def _kill(self, effect: do.Kill) -> None:
        if self._assignments:
            self._assignments[effect.at].stop_by_force(seen=effect.seen)

    def _start(self, effect: do.Start) -> None:
        record = self.record
        if record.decided is JobStatus.SUBMITTED:
            record.change(JobStatus.RUNNING)
        batches = effect.batches
        traced = None if self.trace is None else self.trace.launch()
        for at in range(len(self._names)):
            self._start_at(at, batches, None if traced is None else traced[at])
        self._opened(batches)

    def _start_at(
        self, at: int, batches: list[FrameBatch], traced: tuple[str, int, int] | None, incarnation: int = 0
    ) -> None:
        names, head = self._names[at], batches[0] if batches else FrameBatch(0, [], False)
        start = msg.StartJob(
            job=self.record.number,
            at=at,
            spec=self.spec,
            plan=self.plan.hash,
            routes=tuple([assignment.address for assignment in self._assignments]),
            first=head.first,
            count=len(head.rows),
            payload=self._payload(head.rows, names),
            last=head.last,
            trace=traced,
            origin=self._origin(),
            recorded=self._recorded or incarnation > 0,
            incarnation=incarnation,
        )
        self._send(at, start)
        for batch in batches[1:]:
            self._send(at, self._opening(at, batch, names))

    def watch_deadline(self, began: float) -> None:
        """Abort the job at its deadline, if it has one; ``began``: when the job began, by the loop's clock."""
        seconds = self.spec.deadline
        if seconds is not None:
            left = began + seconds - asyncio.get_running_loop().time()
            self._deadline = suspension().call_later(left, lambda: self._too_late(seconds))

    def _too_late(self, seconds: float) -> None:
        reason = f"the deadline of {seconds:g} s was exceeded"
        if self.machine.phase is Phase.WAITING:
            reason += f"; the job was waiting for {self.machine.waiting_for}"
        self.halt(JobStatus.ABORTED, reason, self.spec.grace, late=True)

    def receive(self, message: msg.Message) -> None:
        """Take a message from a location."""
        if self.machine.phase is Phase.RESTARTING:
            handler = _WHILE_RESTARTING.get(type(message))
            if handler is not None:  # else it belongs to what will run again
                handler(self, message)
        elif self.machine.phase is not Phase.ENDED:
            _HANDLERS[type(message)](self, message)

    # stopping

    def halt(self, status: JobStatus, reason: str, grace: float, *, late: bool = False) -> None:
        """Stop the job at all its locations; it ends with this status when all of them have confirmed.

        A location that has not confirmed after the grace period is killed.
        """
        self._carry_out(self.machine.halt(status, reason, grace, late=late))
        self._refuse_incoming()

    def shut_down(self, reason: str, grace: float) -> None:
        """Stop the job because the session is closed. One that is in a store can go on in another session."""
        status = JobStatus.ABORTED if self.record.journal is None else JobStatus.INTERRUPTED
        self.halt(status, reason, grace)

    def shorten(self, grace: float) -> None:
        """Kill what has not stopped after a further grace period, if that is earlier than before."""
        self._carry_out(self.machine.shorten(grace))

    def fail(self, error: DfmError) -> None:
        """End the job with an error of its own, such as a log that is full or parameters that cannot be read."""
        if self.machine.phase in (Phase.STOPPING, Phase.ENDED):
            return
        self.record.add_error(error)
        self.record.add(Failure(self.record.log.end, None, error, (), self.plan.homesite, "job"))
        self.halt(JobStatus.FAILED, str(error), self.spec.grace)

    def _set_grace(self, effect: do.SetGrace) -> None:
        if self._grace is None:
            self._grace = Timer(self._grace_over)
        self._grace.advance(asyncio.get_running_loop().time() + effect.seconds)

    def _clear_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()

    def _grace_over(self) -> None:
        self._carry_out(self.machine.grace_over())

    def _ended(self, effect: do.End) -> None:
        record = self.record
        status, reason = effect.status, effect.reason
        if status is None:
            status = JobStatus.FAILED if record.error_count > 0 else JobStatus.FINISHED
        if effect.cause is not None:
            record.cause = effect.cause
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._clear_grace()
        if self._waits is not _NO_WAITS:
            self._end_waits()
        record.sets, record.done = self.frames.added, self.frames.opened - len(self.frames.open)
        if self._room is not None:
            self._room.notify()
        if self._incoming is not None:
            self._incoming.refuse()
        self._intake.release_progress()
        record.log.owner = record.execution = None
        self._assignments, self._pack_rows = (), None
        if self.trace is not None:
            count = record.error_count
            failed = reason or (None if status is JobStatus.FINISHED else f"{count} error{'s' * (count != 1)}")
            self.trace.end(status.value, failed)
            self.trace = None
        record.change(status, reason)
        calls, self._on_end = self._on_end, []  # what is done is let go: a session has many jobs
        for call in calls:
            call(self)
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.job_ended(self)

    # workers

    def lost(self, at: int, error: WorkerLost) -> None:
        """Note that the worker of a location has ended, or did not start."""
        if self.trace is not None and self.machine.phase is not Phase.WAITING:
            self.trace.lost(at, str(error))
        if self.machine.phase is Phase.RUNNING and not error.operations:
            known = error.site, error.exit_code, error.detail, error.lines, error.out_of_memory
            error = WorkerLost(*known, operations=self.plan.operations_at(at))
        self._carry_out(self.machine.lost(at, error))

    def _rerun(self, effect: do.Rerun) -> None:
        error = effect.error
        site = error.site if isinstance(error, WorkerLost) else self.plan.homesite
        self.record.add(WorkerNotice(self.record.log.end, site, "lost", 0.0, str(error)))
        self.record.log.changed.notify()

    def _contain(self, effect: do.Contain) -> None:
        number, error, site = self.record.number, effect.error, self.plan.sites_at[effect.at]
        described = describe_error(error, "", site, "", "", (), 1, b"")
        if self.record.activity is not None:
            self.record.activity.restarted(effect.at)
        lost = msg.LocationLost(number, effect.caller, effect.at, effect.incarnation, described)
        self._send(effect.caller, lost)
        self.record.add(WorkerNotice(self.record.log.end, site, "lost", 0.0, str(error)))
        self.record.log.changed.notify()

    def _replace(self, effect: do.Replace) -> None:
        assert self.owner is not None  # noqa: S101 - the engine sets it
        self.owner.replace(self, effect.at)

    def replaced(self, at: int) -> None:
        """Note that a location has another worker, which is ready."""
        self._carry_out(self.machine.replaced(at))

    def _restart(self, effect: do.Restart) -> None:
        traced = None if self.trace is None else self.trace.relaunch(effect.at)
        self._start_at(effect.at, effect.batches, traced, effect.incarnation)

    def _restore(self, effect: do.Restore) -> None:
        number, address = self.record.number, self._assignments[effect.at].address
        back = msg.LocationBack(number, effect.caller, effect.at, effect.incarnation, address, effect.frames)
        self._send(effect.caller, back)

    def _requeue(self, effect: do.Requeue) -> None:
        self._clear_grace()
        self._waits.restart()
        self._set_alarm()
        if self._unsent is not None:
            self._unsent.clear()  # the statements ask again
        self._recorded = self._recorded or effect.restarted
        if effect.restarted and self.record.activity is not None:
            self.record.activity.restarted()
        assert self.owner is not None  # noqa: S101 - the engine sets it
        self.owner.requeue(self)

    def abandon(self, at: int, how: StopOutcome = StopOutcome.ABANDONED) -> None:
        """Do not wait any longer for a location that has not stopped and is not killed."""
        self._carry_out(self.machine.abandon(at, how))

    def notice(self, at: int, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        """Log that the worker of a location does not respond, responds again, or takes no further jobs."""
        if self.machine.phase in (Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING):
            location = self.plan.locations[at]
            detail = f"the worker of {str(location)!r} {_NOTICES[kind].format(seconds=seconds, why=why)}"
            self.record.add(WorkerNotice(self.record.log.end, location.site, kind, seconds, detail))
            self.record.log.changed.notify()

    # the log

    def log_is_full(self) -> None:
        """Fail the job if its log must not be full, or hold back its locations."""
        log = self.record.log
        if log.full and log.limits.overflow == "fail":
            self.fail(log_overflow(self.record))
        elif log.full:
            self._carry_out(self.machine.log_is_full())

    def log_has_room(self) -> None:
        """Let the locations go on."""
        if self.machine.phase is Phase.RUNNING:
            self._intake.release_progress()
            self._carry_out(self.machine.log_has_room())

    def _used_credit(self, at: int, items: int, size: int) -> None:
        self._carry_out(self.machine.used_credit(at, items, size))
        if self.record.log.full:
            self.log_is_full()

    # messages

    def _results(self, message: msg.ResultBatch) -> None:
        try:
            items, size = self._intake.results(message)
        except EncodingError as error:
            self.fail(error)
            return
        if self.trace is not None and message.origin is not None:
            self.trace.arrived(message.origin, items, size)
        self._yielded += items
        self._yielded_bytes += size
        self._carry_out(self.machine.used_credit(message.at, items, size, message.frames))
        if self.record.log.full:
            self.log_is_full()

    def _operation_error(self, message: msg.OperationError) -> None:
        new, found = self._intake.error(message.error), message.error
        if new is not None:
            self._carry_out(self.machine.operation_failed(found.node, found.type_name))
        self._used_credit(message.at, 1, 0)

    def _yield_failed(self, message: msg.YieldFailed) -> None:
        self._intake.failed_yield(message)
        self._used_credit(message.at, 1, 0)

    def _events_made(self, message: msg.EventsMade) -> None:
        self._intake.events(message)
        self._used_credit(message.at, len(message.events), 0)

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

    def _sets_done(self, effect: do.CompleteFrames) -> None:
        for index in effect.indexes:
            self._intake.frame_done(index)
            if self._waits:
                self._waits.done(index)
        self.record.log.changed.notify()
        self.record.changed()
        if self.record.log.full:
            self.log_is_full()


_EFFECTS: Final[dict[type, Callable[[Coordinator, Any], None]]] = {
    do.Start: Coordinator._start,  # noqa: SLF001 - same module
    do.Open: Coordinator._open,  # noqa: SLF001
    do.CompleteFrames: Coordinator._sets_done,  # noqa: SLF001
    do.Grant: lambda job, do: job._send(do.at, msg.Credit(job.record.number, do.at, do.items, do.size)),  # noqa: SLF001
    do.CancelLocation: lambda job, do: job._send(do.at, msg.CancelJob(job.record.number, do.at)),  # noqa: SLF001
    do.Kill: Coordinator._kill,  # noqa: SLF001
    do.SetGrace: Coordinator._set_grace,  # noqa: SLF001
    do.Rerun: Coordinator._rerun,  # noqa: SLF001
    do.Requeue: Coordinator._requeue,  # noqa: SLF001
    do.Contain: Coordinator._contain,  # noqa: SLF001
    do.Replace: Coordinator._replace,
    do.Restart: Coordinator._restart,  # noqa: SLF001
    do.Restore: Coordinator._restore,  # noqa: SLF001
    do.Stalled: lambda job, _: job.record.stalled(),
    do.End: Coordinator._ended,  # noqa: SLF001
}
_HANDLERS: Final[dict[type, Callable[[Coordinator, Any], None]]] = {
    msg.ResultBatch: Coordinator._results,  # noqa: SLF001
    msg.OperationError: Coordinator._operation_error,  # noqa: SLF001
    msg.YieldFailed: Coordinator._yield_failed,  # noqa: SLF001
    msg.ProgressMade: lambda job, found: job._intake.progress(found),  # noqa: SLF001
    msg.EventsMade: Coordinator._events_made,  # noqa: SLF001
    msg.CallsMade: Coordinator._calls_made,  # noqa: SLF001
    msg.SpansMade: Coordinator._spans_made,  # noqa: SLF001
    msg.WaitRequest: Coordinator._wait_requested,  # noqa: SLF001
    msg.ObjectsBuilt: lambda job, found: job._carry_out(job.machine.objects_built(found.at)),  # noqa: SLF001
    msg.ObjectsClosed: lambda job, found: job._carry_out(job.machine.objects_closed(found.at)),  # noqa: SLF001
    msg.FramesDone: lambda job, found: job._carry_out(job.machine.frames_done(found.frames, found.at)),  # noqa: SLF001
    msg.JobRestarted: lambda job, found: job._carry_out(job.machine.restarted(found.at)),  # noqa: SLF001
    msg.LossNotContained: lambda job, found: job._carry_out(  # noqa: SLF001
        job.machine.not_contained(found.at, found.location)
    ),
    msg.CancelSeen: lambda job, found: job._carry_out(job.machine.cancel_seen(found.at, found.waiting)),  # noqa: SLF001
    msg.JobStopped: lambda job, found: job._carry_out(job.machine.stopped(found.at, found.seconds)),  # noqa: SLF001
    msg.JobBroken: lambda job, found: job.fail(rebuild(found.error)),
}
FROM_LOCATIONS: Final = frozenset(_HANDLERS)
"""What locations send to the coordinator of their job."""
_WHILE_RESTARTING: Final[dict[type, Callable[[Coordinator, Any], None]]] = {
    kind: _HANDLERS[kind] for kind in (msg.CancelSeen, msg.JobStopped, msg.SpansMade)
}


def log_overflow(record: JobRecord) -> DfmError:
    """Return the error of a job whose log is full, if that is to end it."""
    limits = record.log.limits
    return DfmError(
        f"job {record.job_id}: the log holds {record.log.held:,} events that nobody has read, more than "
        f"ResultLimits(max_items={limits.max_items:,}, max_bytes={limits.max_bytes:,}) allows"
    )


def _weigh(row: Row) -> int:
    return weight(*row.values())
