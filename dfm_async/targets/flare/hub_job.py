"""One job at the hub, and the applications that follow it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from dfm_async.engine.coordinator import Coordinator
from dfm_async.engine.durable_jobs import LeftOver
from dfm_async.engine.engine import Jobs
from dfm_async.engine.frames import Row
from dfm_async.errors import DfmError, PipelineError, Problem
from dfm_async.model.events import Failure, Result
from dfm_async.model.ids import Frame
from dfm_async.model.status import JobStatus
from dfm_async.net import spec
from dfm_async.planning.plan import Plan
from dfm_async.results.event_codec import encode_error
from dfm_async.results.log import LogReader, ResultLog
from dfm_async.results.record import JobRecord
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.event_messages import EventPacker, OpaqueValues, rows_of
from dfm_async.targets.flare.reliable_stream import ReliableStream
from dfm_async.telemetry.spans import APPLICATION, Origin
from dfm_async.wire import messages as msg

_log = logging.getLogger(__name__)

_BATCH: Final = 512
"""The largest number of events of a message."""
_BATCH_BYTES: Final = 1024 * 1024
_MOST_BACKLOG: Final = 64 * 1024 * 1024
"""The backlog to one application, in bytes, at which its jobs wait."""
_MOST_BACKLOG_OF_NOTICES: Final = 8 * 1024 * 1024
"""The backlog, in bytes, at which log records and reports are dropped and counted."""

_plan: Final = msgspec.json.Decoder(Plan)


class Application:
    """One session of an application, over whichever transport.

    Args:
        attach: its first message.
        on_message: is called with each of its messages.
        on_room: is called when its backlog has become smaller.
        largest: the size limit of a message of it, in bytes.
    """

    def __init__(
        self,
        attach: fm.Attach,
        on_message: Callable[[Application, bytes | memoryview], None],
        on_room: Callable[[Application], None],
        largest: int,
    ) -> None:
        hello = attach.hello
        self.name = attach.session
        self.hello = hello
        self.offers: set[str] = set()
        self.scheduler = Jobs(hello.lanes, hello.slots, hello.queue_limit)
        self.stream = ReliableStream(lambda data: on_message(self, data), lambda: on_room(self), largest)
        self.connection = ""
        """The name of its connection at the gateway, if it has one."""
        self.absence: asyncio.TimerHandle | None = None
        self.held_up = False
        """Whether a job waits for a smaller backlog."""
        self._left_out = 0

    def send(self, message: Any) -> None:
        """Send a message that must arrive."""
        self.stream.send(fm.encode(message))

    def notify(self, message: Any) -> None:
        """Send a message that is dropped while the backlog is large: log records, calls, reports."""
        if self.stream.backlog > _MOST_BACKLOG_OF_NOTICES:
            self._left_out += 1
            return
        if self._left_out and isinstance(message, fm.LogLines):
            message = msgspec.structs.replace(message, left_out=message.left_out + self._left_out)
            self._left_out = 0
        self.send(message)

    @property
    def full(self) -> bool:
        """Whether its backlog is so large that its jobs must wait."""
        return self.stream.backlog > _MOST_BACKLOG

    def end_absence(self) -> None:
        """Stop the absence timeout: the application is present, or has left."""
        if self.absence is not None:
            self.absence.cancel()
            self.absence = None


def read_plan(submit: fm.Submit) -> Plan:
    """Read the plan of a job without its literals: only the sites decode them.

    Raises:
        PipelineError: it is not a plan, or does not fit the nets of the sites.
    """
    try:
        plan = _plan.decode(submit.plan)
    except (ValueError, RecursionError) as error:
        raise PipelineError(None, [Problem("plan", f"cannot be read: {error}")]) from error
    count = len(plan.locations)
    if not count or len(plan.nets) != count or len(submit.nets) != count or len(plan.sites_at) != count:
        raise PipelineError(plan.pipeline, [Problem("plan", "has not one net for each of its locations")])
    return plan


class HubJob:
    """A job that the federation runs, with or without an application.

    Args:
        submit: what was submitted.
        plan: its plan.
        record: its record, if an earlier hub had the job.
    """

    def __init__(self, submit: fm.Submit, plan: Plan, record: JobRecord | None = None) -> None:
        self.submit = submit
        self._unfollowed: asyncio.TimerHandle | None = None
        self._emits = [_points_of(net) for net in plan.nets]
        self._done: dict[int, set[int]] = {}
        self.plan = plan
        self.followers: dict[str, _EventFollower] = {}
        """By the application that follows."""
        self.ever_read = 0
        """The offset behind what readers at applications have read."""
        self._writer = EventPacker(submit.spec.job_id, plan)
        record = self.record = JobRecord(submit.spec, plan) if record is None else record
        self.coordinator = Coordinator(record, OpaqueValues(), _as_rows)
        if submit.spec.watch:
            record.activity = _RelayedActivity(self.relay)  # type: ignore[assignment] # forwarded, not kept
        if submit.trace is not None:
            self.coordinator.trace = _RelayedTrace(submit.trace, self.relay)  # type: ignore[assignment] # as above
        rows = rows_of(submit.rows)
        self._first_bytes = self._sizes(rows)
        if rows:
            self.coordinator.add(rows)
        if submit.stopped:
            self.coordinator.stop()

    def _sizes(self, rows: Iterable[Row]) -> list[int]:
        """Return the number of bytes that each location gets of parameter sets."""
        rows = list(rows)
        return [sum(len(row[name]) for row in rows for name in names if name in row) for names in self.plan.params_at]

    def resume(self, left: LeftOver) -> None:
        """Begin where an earlier hub has ended."""
        history, coordinator = left.history, self.coordinator
        waits = itertools.chain.from_iterable(history.waits.values())
        coordinator.resume(left.rows, left.frames, history.seen, history.failed, waits)
        coordinator.frames.stopped = left.stopped
        self._first_bytes = self._sizes(left.rows.values())

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.record.job_id

    def state(self) -> fm.JobState:
        """How far it is."""
        coordinator, frames, record = self.coordinator, self.coordinator.frames, self.record
        waiting = coordinator.waiting()
        return fm.JobState(
            job_id=record.job_id,
            status=record.status,
            reason=record.reason,
            phase=coordinator.phase,
            waiting_for=waiting.waiting_for,
            added=frames.added - frames.unwritten,
            opened=frames.opened,
            open=len(frames.open),
            stopped=frames.stopped,
            outcomes=coordinator.outcomes,
            finished=record.finished,
            end=record.log.readable,
            cause=encode_error(record.cause) if record.decided.ended and isinstance(record.cause, DfmError) else b"",
            waits=waiting.waits,
        )

    def known(self) -> fm.Known:
        """What an application needs to follow it."""
        record, submit = self.record, self.submit
        return fm.Known(
            submit.spec,
            submit.plan,
            record.log.first if record.log.backing is None else 0,
            record.log.readable,
            list(self.coordinator.frames.open),
            self.state(),
        )

    @property
    def unread(self) -> bool:
        """Whether it has results or failures that nobody has read, and that end with the hub."""
        log = self.record.log
        if log.backing is not None:
            return False
        unread = range(max(self.ever_read, log.first), log.end)
        return any(isinstance(log.get(offset), Result | Failure) for offset in unread)

    def relay(self, message: Any) -> None:
        """Forward calls and spans of a location to the followers."""
        if self.followers:
            data = fm.Relayed(self.job_id, fm.encode(message))
            for follower in self.followers.values():
                follower.app.notify(data)

    def may_send(self, message: Any) -> bool:
        """Return whether a location may send a message: only for its own yields, and one end of each set."""
        kind, at = type(message), message.at
        if kind is msg.ResultBatch:
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
        """Note that what was in flight runs again."""
        self._done.clear()

    def request(self, number: int, at: int, lane: int) -> fm.Assign:
        """Describe a location for its site."""
        plan, site = self.plan, self.plan.sites_at[at]
        return fm.Assign(
            job=number,
            at=at,
            job_id=self.job_id,
            pipeline=plan.pipeline or "",
            location=plan.locations[at],
            sites=tuple(plan.sites_at),
            offer=self.submit.offers.get(site, ""),
            plan=plan.hash,
            net=self.submit.nets[at],
            lane=lane,
            size=self._first_bytes[at],
        )

    def wait_for_follower(self, seconds: float) -> None:
        """Note that nobody follows the job: if it can only wait for them, it ends after a while."""
        self._stop_waiting()
        self._unfollowed = asyncio.get_running_loop().call_later(seconds, self._still_unfollowed, seconds)

    def _still_unfollowed(self, seconds: float) -> None:
        self._unfollowed = None
        frames = self.coordinator.frames
        if self.followers or self.record.status.ended:
            return
        if self.coordinator.machine.waiting_for_reader or not (frames.stopped or frames.open or frames.waiting):
            reason = f"for {seconds:,.0f} s no application has read its results or given it further parameters"
            self.coordinator.halt(JobStatus.ABORTED, reason, self.coordinator.spec.grace)
        else:
            self.wait_for_follower(seconds)

    def _stop_waiting(self) -> None:
        if self._unfollowed is not None:
            self._unfollowed.cancel()
            self._unfollowed = None

    def ended(self) -> None:
        """Note that the job has ended: release what it needed to run."""
        self._stop_waiting()
        self._done.clear()
        self.submit = msgspec.structs.replace(self.submit, rows=b"", nets=())

    def close(self) -> None:
        """Detach all followers."""
        self._stop_waiting()
        for app in list(self.followers):
            self.unfollow(app)

    def follow(self, app: Application, start: int) -> None:
        """An application follows the job from an offset on.

        Raises:
            ResultsExpired: events that it wants are gone.
        """
        self.unfollow(app.name)
        self.followers[app.name] = _EventFollower(self, start, app, self._writer)
        self._stop_waiting()

    def unfollow(self, app: str) -> None:
        """An application follows no more."""
        follower = self.followers.pop(app, None)
        if follower is not None:
            follower.close()


class _EventFollower:
    """Sends the events of a job to one application, as far as that has room. What it has not got is kept."""

    def __init__(self, job: HubJob, start: int, app: Application, writer: EventPacker) -> None:
        self._job = job
        self.app = app
        self._writer = writer
        log = job.record.log
        self._reader: LogReader = log.reader(start - 1 if start else None)
        self._kept: LogReader = log.reader(start - 1 if start else None)
        self._ahead = log.limits.window_bytes
        """The largest number of bytes in flight."""
        self._until = start
        self._sent = 0
        self._taken = 0
        self._notified = -1
        """The offset up to which the application was notified that it must make room."""
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"followers of {job.job_id}")

    def taken(self, message: fm.EventsTaken) -> None:
        """Note that the application has got events, and has room for more."""
        self._until = max(self._until, message.until)
        self._taken = max(self._taken, message.size)
        have = min(message.have, self._reader.position)  # it cannot have what was not sent
        if have > self._kept.position:
            self._kept.position = have
            self._job.record.log.passed(have)
        self._job.record.log.changed.notify()

    async def _run(self) -> None:
        log, reader = self._job.record.log, self._reader
        while True:
            room = self._until - reader.position
            if room <= 0 or self._sent - self._taken >= self._ahead or self.app.full:
                self.app.held_up = self.app.held_up or self.app.full
                if reader.position < log.readable and self._notified < reader.position:
                    self._notified = reader.position
                    self.app.send(self._job.state())
                await log.changed.wait()
                continue
            events = _part(log, reader, min(room, _BATCH))
            if events:
                message = self._writer.write(events, log.readable)
                self._sent += message.size
                self.app.send(message)
                continue
            try:
                if not await reader.more():
                    return
            except DfmError as error:
                _log.warning("job %s cannot be read: %s", self._job.job_id, error)
                self.app.send(fm.Expired(self._job.job_id, None))
                return

    def close(self) -> None:
        """End it."""
        self.task.cancel()
        self._reader.close()
        self._kept.close()


def _part(log: ResultLog, reader: LogReader, most: int) -> list[Any]:
    """Return the next events that fit into one message; a single large value still makes one."""
    if reader.position < log.first:
        return reader.take_nowait(most)  # those that were read from the journal
    size = 0
    for count, offset in enumerate(range(reader.position, min(log.readable, reader.position + most))):
        value = getattr(log.get(offset), "value", b"")
        size += len(value) if isinstance(value, msgspec.Raw) else 64
        if count and size > _BATCH_BYTES:
            return reader.take_nowait(count)
    return reader.take_nowait(most)


def _points_of(net: spec.Net) -> frozenset[int]:
    """Return the yields that a net sends."""
    actions = (transition.action for transition in net.transitions)
    return frozenset(action.point for action in actions if isinstance(action, spec.Emit))


def _as_rows(_: Plan, row: Any) -> list[Any]:
    """A parameter set that another job has sent: its values are opaque, and cannot be checked here."""
    return [row]


# spans and calls


class _RelayedActivity:
    """Forwards the reports of locations about their calls."""

    def __init__(self, relay: Callable[[Any], None]) -> None:
        self._relay = relay

    def made(
        self,
        at: int,
        site: str,
        nodes: Iterable[tuple[str, int, int, int]],
        calls: Iterable[tuple[str, Frame, int, float, float, bool, float]],
        left_out: int,
    ) -> None:
        self._relay(msg.CallsMade(-1, at, list(nodes), list(calls), left_out))

    def restarted(self) -> None:
        self._relay(msg.CallsMade(-2, -1, [], [], 0))

    def close(self) -> None:
        """Do nothing: applications see the end of the job by its status."""


class _RelayedTrace:
    """Gives the locations their spans, and forwards those that they have made."""

    def __init__(self, traced: fm.Traced, relay: Callable[[Any], None]) -> None:
        self._traced = traced
        self._relay = relay
        self._runs = 0

    def launch(self) -> list[tuple[str, int, int]]:
        self._runs += 1
        return [(self._traced.trace_id, span, self._runs) for span in self._traced.spans]

    def origin(self) -> Origin:
        return Origin(self._traced.span, time.time_ns(), APPLICATION)

    def take(self, at: int, spans: bytes, count: int, *, last: bool) -> None:
        self._relay(msg.SpansMade(-1, at, count, spans, last))

    def arrived(self, origin: Origin, tokens: int, size: int) -> None:
        """Do nothing: the application records when values arrive there."""

    def lost(self, at: int, why: str) -> None:
        """Do nothing: the application sees that by the job's events."""

    def end(self, status: str, error: str | None) -> None:
        """Do nothing: the application's own span records how the job has ended."""
