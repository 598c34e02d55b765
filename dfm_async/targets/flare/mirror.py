"""A job that runs in the federation, as the application sees it: its log is a copy, its commands travel."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from dfm_async.errors import DfmError, EncodingError, JobExists, ParameterError, QueueFull, ResultsExpired
from dfm_async.model.events import Event, Failure, FrameCompleted, Result, StatusChanged
from dfm_async.model.ids import JobNumber
from dfm_async.model.stats import Traffic
from dfm_async.model.status import JobStatus
from dfm_async.results.error_values import decode_error, encode_error
from dfm_async.results.record import JobRecord
from dfm_async.results.seen import Seen
from dfm_async.runtime.site import encode_net
from dfm_async.targets.base import AlreadySubmitted
from dfm_async.targets.coordinator import Phase, log_overflow
from dfm_async.targets.failures import Told
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.connection import HubConnection
from dfm_async.targets.flare.event_wire import EventReader
from dfm_async.targets.flare.parts import TooLarge
from dfm_async.targets.frames import Row
from dfm_async.targets.rules import JobRules
from dfm_async.telemetry.traces import JobTrace
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

__all__ = ["RemoteFrames", "RemoteJob"]

_AHEAD: Final = 1024
"""How many events may be under way to us, at most."""
_ALL: Final = 1 << 40
_ROWS: Final = msg.BATCH_BYTES
"""How many bytes of parameter sets go together; a larger set goes alone."""
_TELL: Final = 256 * 1024
"""After how many bytes we tell the hub that we have taken them, at the latest."""
_STATUS: Final[dict[JobStatus, Literal["aborted", "failed", "interrupted"]]] = {
    JobStatus.ABORTED: "aborted",
    JobStatus.FAILED: "failed",
    JobStatus.INTERRUPTED: "interrupted",
}


class RemoteFrames:
    """How far the parameter sets are, as the hub has told."""

    def __init__(self) -> None:
        self.added = 0
        self.opened = 0
        self.open: range = range(0)
        self.stopped = False
        self.waiting = 0


class RemoteJob:
    """Steers one job in the federation, and fills the application's copy of its log.

    Args:
        record: the application's copy.
        codec: how values travel.
        rules: how the job deals with trouble.
        detach: whether it goes on when the session is closed.
    """

    def __init__(self, record: JobRecord, codec: Codec, rules: JobRules, *, detach: bool) -> None:
        self.record = record
        self.plan = record.plan
        self.rules = rules
        self.outcomes: dict[str, str] = {}
        self.trace: JobTrace | None = None
        self.measured = False
        self.frames = RemoteFrames()
        self.yielded = Traffic()
        self.phase = Phase.WAITING
        self.connection: HubConnection | None = None
        """The way to the hub that has the job."""
        self._codec = codec
        self._detach = detach
        self._reader = EventReader(record.plan, codec)
        self._rows: list[Row] = []
        self._submitted: asyncio.Future[fm.Submitted] | None = None
        self._known = False
        self._deadline: tuple[float, float] | None = None
        self._token = secrets.token_hex(8)
        self._on_end: list[Callable[[RemoteJob], None]] = []
        self._room: list[asyncio.Future[None]] = []
        self._state = "waits for the federation"
        self._size = 0
        self._granted = 0
        self._end_there = 0
        self._ending = False
        """Whether the job is about to end, so that nothing holds its last events up."""
        limits = record.log.limits
        # What is under way must fit into the hub's log, too: else that would wait for us, and we for it.
        self._ahead = min(_AHEAD, 4 * limits.window, limits.max_items)
        self._tell_after = min(_TELL, limits.window_bytes // 4, limits.max_bytes // 4)
        self._traced: fm.Traced | None = None
        record.log.on_room = self._has_room
        record.log.on_full = self._is_full
        record.blocked = self._is_blocked
        record.number = JobNumber(0)

    def _send(self, message: Any) -> None:
        if self.connection is not None:
            self.connection.send(message)

    # parameter sets

    def add(self, rows: Sequence[Row]) -> None:
        """Adds parameter sets; they are sent at once, if the hub knows the job."""
        if self.phase in (Phase.STOPPING, Phase.ENDED) or not rows:
            return
        first = self.frames.added
        self.frames.added += len(rows)
        for index in range(first, self.frames.added):
            self.record.open_frames[index] = 1
        self.record.next_frame = self.frames.added
        if not self._known:
            self._rows.extend(rows)
            return
        self._send_rows(rows)

    def _send_rows(self, rows: Sequence[Row]) -> None:
        """Sends parameter sets that the hub does not have, in messages that are not too large."""
        packed = self._codec.dumps(list(rows))
        if len(packed) > _ROWS and len(rows) > 1:
            self._send_rows(rows[: len(rows) // 2])
            self._send_rows(rows[len(rows) // 2 :])
            return
        try:
            self._send(fm.AddRows(self.record.job_id, packed))
        except TooLarge as error:
            self.fail(ParameterError([f"a parameter set cannot be sent: {error}"]))

    def stop(self) -> None:
        """Says that no further parameter set will come."""
        if not self.frames.stopped:
            self.frames.stopped = True
            if self._known:
                self._send(fm.StopFrames(self.record.job_id))

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        return not self.frames.stopped and self.phase not in (Phase.STOPPING, Phase.ENDED)

    async def room(self) -> None:
        """Waits until there is room for a further parameter set, or the job takes none any more."""
        while len(self.record.open_frames) >= 2 * self.rules.window and self.accepts:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    def _make_room(self) -> None:
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def resume(self, rows: Mapping[int, Row], added: int, seen: Seen, failed: Told) -> None:
        """Is not for jobs of a federation: they are not interrupted.

        Raises:
            DfmError: always.
        """
        raise DfmError("jobs on FLARE live in the federation: find them again with session.reattach")

    # life

    def on_end(self, call: Callable[[RemoteJob], None]) -> None:
        """Has something called when the job has ended."""
        self._on_end.append(call)

    def deadline(self, seconds: float, began: float) -> None:
        """Aborts the job if it has not ended so many seconds after it began, by the loop's clock."""
        self._deadline = (seconds, began)

    @property
    def state(self) -> str:
        """How far the job is, in words."""
        if self.phase is Phase.WAITING:
            return self._state
        frames = self.frames
        done = frames.added - len(self.record.open_frames)
        total = f"{frames.added}" if frames.stopped else f"{frames.added} so far"
        return f"{self.phase.value}, {done} of {total} parameter sets done"

    async def submit(self, priority: int, offers: dict[str, str]) -> None:
        """Gives the job to the hub; returns when the hub has it.

        Raises:
            JobExists: another job has its id.
            AlreadySubmitted: the same job was submitted before.
            QueueFull: too many jobs wait.
            ParameterError: it is too large.
            DfmError: it cannot be sent.
        """
        loop = asyncio.get_running_loop()
        record, plan, rules = self.record, self.plan, self.rules
        try:
            nets = tuple(encode_net(net, self._codec) for net in plan.nets)
            packed = plan.to_json()
        except EncodingError as error:
            raise DfmError(f"a literal of the pipeline cannot be sent to other organisations: {error}") from error
        if self.trace is not None:
            launched = self.trace.launch()
            self._traced = fm.Traced(self.trace.trace_id, self.trace.span, tuple(span for _, span, _ in launched))
        first = self._first_rows()  # the others follow when the hub knows the job
        stopped = self.frames.stopped and len(first) == len(self._rows)
        message = fm.Submit(
            record.job_id,
            packed,
            nets,
            {site: key for site, key in offers.items() if site in plan.sites_at},
            rules.on_error,
            rules.reruns,
            rules.window,
            rules.grace,
            record.log.limits,
            self._codec.dumps(first) if first else b"",
            stopped,
            record.fingerprint,
            record.label,
            priority,
            None if self._deadline is None else (self._deadline[0], loop.time() - self._deadline[1]),
            record.activity is not None,
            self._traced,
            self.measured,
            record.created,
            self._token,
            self._ahead,
        )
        self._granted = self._ahead
        self._submitted = loop.create_future()
        try:
            self._send(message)
        except TooLarge as error:
            self._submitted = None
            text = f"the pipeline and its first parameter set cannot be sent: {error} (max_message_bytes of its site)"
            raise ParameterError([text]) from None
        answer = await self._submitted
        if answer.outcome == "full":
            raise QueueFull(int(answer.reason or 0))
        if answer.outcome == "same":
            raise AlreadySubmitted
        if answer.outcome == "other":
            if answer.reason:
                raise DfmError(f"the federation cannot run the job: {answer.reason}")
            raise JobExists(record.job_id)
        late, self._rows = self._rows[len(first) :], []
        self._known = True
        if late:
            self._send_rows(late)
        if self.frames.stopped and not message.stopped:
            self._send(fm.StopFrames(record.job_id))

    def _first_rows(self) -> list[Row]:
        """The first parameter sets, as far as they are not too large together."""
        first = list(self._rows)
        while len(first) > 1 and len(self._codec.dumps(first)) > _ROWS:
            del first[len(first) // 2 :]
        return first

    def answered(self, answer: fm.Submitted) -> None:
        """The hub has said what became of the submission."""
        if self._submitted is not None and not self._submitted.done():
            self._submitted.set_result(answer)

    def follow(self) -> None:
        """Has the hub send the events that we do not have yet."""
        self._known = True
        end = self.record.log.end
        self._size = 0
        self._send(fm.Follow(self.record.job_id, end))
        self._grant(force=True)

    def halt(self, status: JobStatus, reason: str, grace: float) -> None:
        """Stops the job; it ends with this status when the federation has stopped it."""
        if self.phase is Phase.ENDED or self.phase is Phase.STOPPING:
            return
        if self._submitted is None and not self._known:
            self._end(status, reason)
            return
        self.phase = Phase.STOPPING
        token = self._token if self._submitted is not None else ""
        self._halting = fm.Halt(self.record.job_id, token, _STATUS[status], reason, grace)
        self._send(self._halting)
        self._take_the_rest()
        self._make_room()

    def shorten(self, grace: float) -> None:
        """Kills what has not stopped after a further grace."""
        if self.phase is Phase.STOPPING and grace < self._halting.grace:
            self._send(msgspec.structs.replace(self._halting, grace=grace))

    def shut_down(self, reason: str, grace: float) -> None:
        """The session is closed: the job ends, or goes on without the application."""
        if self.phase is Phase.ENDED:
            return
        if self._detach and self._known:
            self._end(JobStatus.INTERRUPTED, f"{reason}; the job goes on in the federation: session.reattach finds it")
        else:
            self.halt(JobStatus.ABORTED, reason, grace)

    def fail(self, error: DfmError) -> None:
        """Ends the job with an error of the application's side."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        if self._submitted is None and not self._known:
            self.record.add_error(error)
            self.record.add(Failure(self.record.log.end, None, error, (), self.plan.homesite, "job"))
            self._end(JobStatus.FAILED, str(error))
            return
        token = self._token if self._submitted is not None else ""
        self._send(fm.Fail(self.record.job_id, token, encode_error(error)))
        self._take_the_rest()

    def abandon(self, at: int, how: str = "abandoned") -> None:
        """Gives up on the job: nobody can tell any more what becomes of it."""
        self._end(JobStatus.ABORTED, "the session has ended")

    def lost(self, error: DfmError) -> None:
        """The federation cannot be reached any more."""
        if self.phase is not Phase.ENDED:
            if self._submitted is not None and not self._submitted.done():
                self._submitted.set_exception(error)
            self.record.cause = error
            self._end(JobStatus.ABORTED, str(error))

    def _end(self, status: JobStatus, reason: str | None) -> None:
        if self.phase is not Phase.ENDED:
            self._close(status, reason)
            self.record.change(status, reason)
            self._tell_end()

    def _close(self, status: JobStatus, reason: str | None) -> None:
        self.phase = Phase.ENDED
        self._make_room()
        log = self.record.log
        log.on_room = log.on_full = self.record.blocked = None
        if self._known:
            self._send(fm.Unfollow(self.record.job_id))
        if self.trace is not None:
            failed = reason or (None if status is JobStatus.FINISHED else f"{self.record.error_count} errors")
            self.trace.end(status.value, failed)
            self.trace = None

    def _tell_end(self) -> None:
        calls, self._on_end = self._on_end, []
        for call in calls:
            call(self)

    # what the hub tells

    def take_state(self, state: fm.JobState) -> None:
        """The hub tells how far the job is."""
        frames = self.frames
        frames.added = max(frames.added, state.added)
        frames.opened, frames.open, frames.waiting = state.opened, range(state.open), state.waiting
        frames.stopped = frames.stopped or state.stopped
        self._state = state.state
        self.outcomes = dict(state.outcomes)
        self._finished = state.finished
        if state.cause and self.record.cause is None:
            self.record.cause = decode_error(state.cause)
        self._end_there = max(self._end_there, state.end)
        if self.phase is Phase.WAITING and state.phase != "waiting":
            self.phase = Phase.RUNNING
        self.record.changed()
        self._check_stalled()
        status = JobStatus(state.status)
        if status.ended and not self._ending and self.phase is not Phase.ENDED and not self.record.log.readers:
            self._take_the_rest()
        if status.ended and self.record.log.end >= state.end and self.phase is not Phase.ENDED:
            # Its last event, which would have told us, is not kept any more.
            self._close(status, state.reason)
            self.record.adopt(status, state.reason, state.finished or time.time())
            self._tell_end()

    _finished: float | None = None

    def take_expired(self, message: fm.Expired) -> None:
        """Events that we do not have are gone: nothing may be missing in between, unless we have none at all."""
        log = self.record.log
        if message.first is None:
            self.lost(DfmError(f"the federation does not know job {self.record.job_id} any more"))
        elif log.begin_at(message.first):
            self.follow()
        else:
            self.lost(ResultsExpired(self.record.job_id, log.end, message.first))

    def take_events(self, message: fm.Events) -> None:
        """The hub sends events; those that we have already are left out."""
        if self.phase is Phase.ENDED:
            return
        log = self.record.log
        self._end_there = message.end
        if message.first + len(message.heads) <= log.end:
            return
        try:
            events = self._reader.read(message, log.end)
        except (EncodingError, ValueError) as error:
            self.lost(DfmError(f"what the federation sent of job {self.record.job_id} cannot be read: {error}"))
            return
        self._take(events[log.end - message.first :], message)
        self._size += message.size
        self._grant()

    def _take(self, events: list[Event], message: fm.Events) -> None:
        record, log = self.record, self.record.log
        if self.trace is not None and message.values:
            self.trace.arrived(self.trace.origin(), len(events), message.size)
        results, position = 0, 0
        last: StatusChanged | None = None
        for position, event in enumerate(events):
            if type(event) is Result:
                results += 1
            elif type(event) is FrameCompleted:
                record.open_frames.pop(event.frame[0], None)
                self._make_room()
            elif type(event) is Failure:
                if event.place is None or message.heads[position].kind == "r":
                    record.add_error(event.error)
            elif type(event) is StatusChanged:
                last = event
        self.yielded += Traffic(results, len(message.values))
        log.extend(events, message.size // max(1, len(events)))
        log.wake()
        record.changed()
        if last is not None:
            self._take_status(last)

    def _take_status(self, event: StatusChanged) -> None:
        if event.status.ended:
            self._close(event.status, event.reason)
            self.record.adopt(event.status, event.reason, self._finished or time.time())
            self._tell_end()
        else:
            self.phase = Phase.RUNNING if self.phase is Phase.WAITING else self.phase
            self.record.adopt(event.status, event.reason, None)

    def take_relayed(self, message: Any) -> None:
        """A location told of its calls or spans."""
        if isinstance(message, msg.CallsMade):
            activity = self.record.activity
            if activity is not None:
                if message.at < 0:
                    activity.restarted()
                else:
                    site = self.plan.sites_at[message.at]
                    activity.made(message.at, site, message.nodes, message.calls, message.left_out)
        elif isinstance(message, msg.SpansMade) and self.trace is not None:
            self.trace.take(message.at, message.spans, message.count, last=message.last)

    # room

    def _grant(self, *, force: bool = False) -> None:
        """Tells the hub how much further it may send: as far as our log has room."""
        log = self.record.log
        if log.full and not self._ending:
            self._check_stalled()
            return
        until = log.end + (_ALL if self._ending else self._ahead)
        if force or until - self._granted > self._ahead // 2 or self._size > self._told + self._tell_after:
            self._granted, self._told = until, self._size
            self._send(fm.Taken(self.record.job_id, log.end, until, self._size))

    _told = 0

    def _take_the_rest(self) -> None:
        """The job ends: its last events must come, whether somebody reads them or not. The hub's log bounds them."""
        self._ending = True
        self._grant(force=True)

    def _has_room(self) -> None:
        self._grant(force=True)

    def _is_full(self) -> None:
        """Our log is full, and can drop nothing: fails the job, or tells those who wait for it that it waits."""
        if self.record.log.limits.overflow == "fail":
            self.fail(log_overflow(self.record))
        else:
            self._check_stalled()

    def _check_stalled(self) -> None:
        if self._is_blocked():
            self.record.stalled()

    def _is_blocked(self) -> bool:
        log = self.record.log
        blocks = log.full and log.limits.overflow == "block" and not log.readers
        return bool(blocks and self._end_there > log.end and self.phase is Phase.RUNNING)
