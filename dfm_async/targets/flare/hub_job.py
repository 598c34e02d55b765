"""One job at the hub: who runs it, where it is seated, and which applications follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dfm_async.errors import DfmError, PipelineError, Problem
from dfm_async.model.events import Failure, Result
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.status import JobStatus
from dfm_async.net import spec
from dfm_async.planner.plan import Plan
from dfm_async.results.error_values import encode_error
from dfm_async.results.log import LogReader, ResultLog
from dfm_async.results.record import JobRecord
from dfm_async.targets.coordinator import Coordinator
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.application import Application
from dfm_async.targets.flare.event_wire import EventWriter
from dfm_async.targets.flare.relay import RelayedActivity, RelayedTrace
from dfm_async.targets.flare.sealed import SealedValues, rows_of
from dfm_async.targets.flare.slots import Slots
from dfm_async.targets.rules import JobRules
from dfm_async.wire import messages as msg

__all__ = ["Follower", "HubJob", "Run", "read_plan"]

_BATCH: Final = 512
"""How many events are put into one message."""
_BATCH_BYTES: Final = 1024 * 1024

_plan: Final = msgspec.json.Decoder(Plan)


def read_plan(submit: fm.Submit) -> Plan:
    """Reads the plan of a job without its literals: they are the sites' affair, and stay as they are.

    Raises:
        PipelineError: it is none, or does not fit to what the sites are to run.
    """
    try:
        plan = _plan.decode(submit.plan)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PipelineError(None, [Problem("plan", f"cannot be read: {error}")]) from error
    count = len(plan.locations)
    if not count or len(plan.nets) != count or len(submit.nets) != count or len(plan.sites_at) != count:
        raise PipelineError(plan.pipeline, [Problem("plan", "has not one net for each of its locations")])
    return plan


class Run:
    """One run of a job: its number, and which of its locations are seated where."""

    def __init__(self, number: int, locations: int, lane: int) -> None:
        self.number = number
        self.lane = lane
        self.addresses = [""] * locations
        self.missing = set(range(locations))
        """The locations that have no seat yet."""


class HubJob:
    """A job that the federation runs, with or without an application.

    Args:
        submit: what was submitted.
        plan: its plan.
        on_change: is told when something of it has changed.
        slots: where it has, or waits for, one.
    """

    def __init__(self, submit: fm.Submit, plan: Plan, on_change: Callable[[HubJob], None], slots: Slots) -> None:
        self.submit = submit
        self.slots = slots
        self._alone: asyncio.TimerHandle | None = None
        self._site_timer: asyncio.TimerHandle | None = None
        self._emits = [_points_of(net) for net in plan.nets]
        self._done: dict[int, set[int]] = {}
        self.plan = plan
        self.run: Run | None = None
        self.followers: dict[str, Follower] = {}
        """By the application that follows."""
        self.seated_anew = 0
        """How often it has asked for seats again, because a site has started again."""
        self.ever_read = 0
        """The offset behind what readers at applications have read."""
        self._writer = EventWriter(submit.job_id, plan)
        record = self.record = JobRecord(JobId(submit.job_id), JobNumber(-1), plan, submit.limits)
        record.fingerprint, record.label, record.created = submit.fingerprint, submit.label, submit.created
        rules = JobRules(on_error=submit.on_error, reruns=submit.reruns, window=submit.window, grace=submit.grace)
        self.coordinator = Coordinator(record, SealedValues(), rules, _as_rows)
        if submit.watch:
            record.activity = RelayedActivity(self.relay)  # type: ignore[assignment] # told on, not kept
        if submit.trace is not None:
            self.coordinator.trace = RelayedTrace(submit.trace, self.relay)  # type: ignore[assignment] # as above
            self.coordinator.measured = submit.measured
        self._on_change = on_change
        rows = rows_of(submit.rows)
        self.first_bytes = [
            sum(len(row[name]) for row in rows for name in names if name in row) for names in plan.params_at
        ]
        """For each location, how many bytes of parameters it begins with."""
        self.coordinator.add(rows)
        if submit.stopped:
            self.coordinator.stop()

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.record.job_id

    def watch_changes(self) -> None:
        """Tells of changes from now on; the table of jobs has its own way before."""
        record, table = self.record, self.record.changes
        record.changes = _Changes(lambda: self._on_change(self), table)  # type: ignore[assignment] # it only marks

    def add_rows(self, message: fm.AddRows) -> None:
        """Takes further parameter sets."""
        self.coordinator.add(rows_of(message.rows))

    def state(self) -> fm.JobState:
        """How far it is."""
        coordinator, frames, record = self.coordinator, self.coordinator.frames, self.record
        return fm.JobState(
            record.job_id,
            record.status.value,
            record.reason,
            coordinator.state,
            frames.added,
            frames.opened,
            len(frames.open),
            frames.waiting,
            frames.stopped,
            coordinator.accepts,
            dict(coordinator.outcomes),
            record.finished,
            record.log.end,
            coordinator.phase.value,
            encode_error(record.cause) if record.status.ended and isinstance(record.cause, DfmError) else b"",
        )

    def known(self) -> fm.Known:
        """What an application needs to follow it."""
        record, submit = self.record, self.submit
        return fm.Known(
            record.job_id,
            submit.plan,
            submit.limits,
            record.fingerprint,
            record.label,
            record.created,
            record.log.first,
            record.log.end,
            list(self.coordinator.frames.open),
            self.state(),
        )

    @property
    def unread(self) -> bool:
        """Whether it has results or failures that nobody has read."""
        log = self.record.log
        unread = range(max(self.ever_read, log.first), log.end)
        return any(isinstance(log.get(offset), Result | Failure) for offset in unread)

    def relay(self, message: Any) -> None:
        """Tells followers what a location said of its calls and spans."""
        if self.followers:
            data = fm.Relayed(self.job_id, fm.encode(message))
            for follower in self.followers.values():
                follower.app.tell(data)

    def may_say(self, message: Any) -> bool:
        """Whether a location may say something: it speaks for its own yields only, and is done with a set once."""
        kind, at = type(message), message.at
        if kind is msg.Results:
            return all(point in self._emits[at] for point, *_ in message.runs) and self._is_done(at, message.frames)
        if kind is msg.FramesDone:
            return self._is_done(at, message.frames)
        return kind is not msg.YieldFailed or message.point in self._emits[at]

    def _is_done(self, at: int, frames: list[int]) -> bool:
        count = len(self.plan.locations)
        for index in frames:
            if index not in self.coordinator.frames.open:
                return False
            if count > 1:
                done = self._done.setdefault(index, set())
                if at in done:
                    return False
                done.add(at)
                if len(done) == count:
                    del self._done[index]
        return True

    def runs_again(self) -> None:
        """What was under way begins anew."""
        self._done.clear()

    @property
    def waits_for_site(self) -> bool:
        """Whether it cannot be seated before a site is there."""
        return self._site_timer is not None

    def wait_for_site(self, seconds: float, give_up: Callable[[], None]) -> None:
        """A site is not there: waits for it, for a while."""
        self.stop_waiting_for_site()
        self._site_timer = asyncio.get_running_loop().call_later(seconds, give_up)

    def stop_waiting_for_site(self) -> None:
        """It is seated, or has ended."""
        if self._site_timer is not None:
            self._site_timer.cancel()
            self._site_timer = None

    def wait_for_somebody(self, seconds: float) -> None:
        """Nobody follows the job: if it can only wait for somebody, it ends after a while."""
        self._stop_waiting()
        self._alone = asyncio.get_running_loop().call_later(seconds, self._still_alone, seconds)

    def _still_alone(self, seconds: float) -> None:
        self._alone = None
        frames = self.coordinator.frames
        if self.followers or self.record.status.ended:
            return
        if self.coordinator.waiting_for_reader or not (frames.stopped or frames.open or frames.waiting):
            reason = f"for {seconds:,.0f} s no application has read its results or given it further parameters"
            self.coordinator.halt(JobStatus.ABORTED, reason, self.coordinator.rules.grace)
        else:
            self.wait_for_somebody(seconds)

    def _stop_waiting(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def ended(self) -> None:
        """The job has ended: what it needed to run is let go."""
        self._stop_waiting()
        self.stop_waiting_for_site()
        self._done.clear()
        self.submit = msgspec.structs.replace(self.submit, rows=b"", nets=())

    def close(self) -> None:
        """Lets all followers go."""
        self._stop_waiting()
        self.stop_waiting_for_site()
        for app in list(self.followers):
            self.unfollow(app)

    def follow(self, app: Application, start: int) -> None:
        """An application follows the job from an offset on.

        Raises:
            ResultsExpired: events that it wants are gone.
        """
        self.unfollow(app.name)
        self.followers[app.name] = Follower(self, start, app, self._writer)
        self._stop_waiting()

    def unfollow(self, app: str) -> None:
        """An application follows no more."""
        follower = self.followers.pop(app, None)
        if follower is not None:
            follower.close()


class Follower:
    """Sends the events of a job to one application, as far as that has room. What it has not got is kept."""

    def __init__(self, job: HubJob, start: int, app: Application, writer: EventWriter) -> None:
        self._job = job
        self.app = app
        self._writer = writer
        log = job.record.log
        self._reader: LogReader = log.reader(start - 1 if start else None)
        self._kept: LogReader = log.reader(start - 1 if start else None)
        self._ahead = log.limits.window_bytes
        """How many bytes may be under way."""
        self._until = start
        self._sent = 0
        self._taken = 0
        self._told = -1
        """Up to where the application has been told that it must make room."""
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"followers of {job.job_id}")

    def taken(self, message: fm.Taken) -> None:
        """The application has got events, and has room for more."""
        self._until = max(self._until, message.until)
        self._taken = max(self._taken, message.size)
        have = min(message.have, self._reader.position)  # it cannot have what was not sent
        if have > self._kept.position:
            self._kept.position = have
            self._job.record.log.passed(have)
        self._job.record.log.wake()

    async def _run(self) -> None:
        log, reader = self._job.record.log, self._reader
        while True:
            room = self._until - reader.position
            if room <= 0 or self._sent - self._taken >= self._ahead or self.app.full:
                self.app.held_up = self.app.held_up or self.app.full
                if reader.position < log.end and self._told < reader.position:
                    self._told = reader.position
                    self.app.send(self._job.state())
                await log.wait()
                continue
            events = _part(log, reader, min(room, _BATCH))
            if events:
                message = self._writer.write(events, log.end)
                self._sent += message.size
                self.app.send(message)
            elif log.closed:
                return
            else:
                await log.wait()

    def close(self) -> None:
        """Ends it."""
        self.task.cancel()
        self._reader.close()
        self._kept.close()


def _part(log: ResultLog, reader: LogReader, most: int) -> list[Any]:
    """The next events, so many that their message is not too large; a single large value still makes one."""
    size = 0
    for count, offset in enumerate(range(reader.position, min(log.end, reader.position + most))):
        value = getattr(log.get(offset), "value", b"")
        size += len(value) if isinstance(value, msgspec.Raw) else 64
        if count and size > _BATCH_BYTES:
            return reader.take_nowait(count)
    return reader.take_nowait(most)


def _points_of(net: spec.Net) -> frozenset[int]:
    """The yields that a net sends."""
    actions = (transition.action for transition in net.transitions)
    return frozenset(action.point for action in actions if isinstance(action, spec.Emit))


def _as_rows(row: Any) -> list[Any]:
    """A parameter set that another job has sent: its values are sealed, and cannot be checked here."""
    return [row]


class _Changes:
    """Tells both the table of jobs and the job's followers."""

    def __init__(self, tell: Callable[[], None], table: Any) -> None:
        self._tell = tell
        self._table = table

    def mark(self, job_id: str) -> None:
        self._tell()
        if self._table is not None:
            self._table.mark(job_id)
