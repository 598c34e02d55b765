"""A job that runs in the federation, as the application sees it: its log is a copy, its commands travel."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dfm_async.base.signals import Outcome, Signal
from dfm_async.base.wall_clock import moment_text
from dfm_async.engine.coordinator import log_overflow
from dfm_async.engine.engine import starts_later
from dfm_async.engine.frames import Row
from dfm_async.engine.intake import LoggedErrors
from dfm_async.engine.machine import Phase, StopOutcome
from dfm_async.engine.target import AlreadySubmitted
from dfm_async.engine.waits import WAITS_SHOWN, WaitEvent
from dfm_async.errors import DfmError, EncodingError, EventsFull, JobExists, ParameterError, QueueFull, ResultsExpired
from dfm_async.model.events import Event, Failure, FrameCompleted, Result, StatusChanged, WaitBegan, WaitEnded
from dfm_async.model.ids import Frame, JobNumber
from dfm_async.model.info import WaitInfo
from dfm_async.model.stats import Traffic
from dfm_async.model.status import JobStatus
from dfm_async.model.waiting import JobWait
from dfm_async.results.event_codec import decode_error, encode_error
from dfm_async.results.record import JobRecord
from dfm_async.results.seen import Seen
from dfm_async.runtime.site_runtime import encode_net
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.event_messages import EventReader
from dfm_async.targets.flare.hub_connection import HubConnection
from dfm_async.targets.flare.message_parts import TooLarge
from dfm_async.telemetry.traces import JobTrace
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

_AHEAD: Final = 1024
"""The largest number of events in flight to us."""
_ALL: Final = 1 << 40
_ROWS: Final = msg.BATCH_BYTES
"""The largest number of bytes of parameter sets in one message; a larger set goes alone."""
_CONFIRM: Final = 256 * 1024
"""The number of bytes after which they are confirmed to the hub, at the latest."""


@dataclass(slots=True)
class _RemoteFrames:
    """The progress of the parameter sets, as the hub has reported it."""

    added: int = 0
    opened: int = 0
    open: range = range(0)
    stopped: bool = False


class RemoteJob:
    """Steers one job in the federation, and fills the application's copy of its log.

    Args:
        record: the application's copy.
        codec: how values travel.
        detach: whether it goes on when the session is closed.
    """

    def __init__(self, record: JobRecord, codec: Codec, *, detach: bool) -> None:
        self.record = record
        self.plan = record.plan
        self.spec = record.spec
        self.outcomes: dict[str, str] = {}
        self.trace: JobTrace | None = None
        self.frames = _RemoteFrames()
        self.yielded = Traffic()
        self.phase = Phase.WAITING
        self.connection: HubConnection | None = None
        """The connection to the hub that has the job."""
        self._codec = codec
        self._detach = detach
        self._recovering = False
        """Whether the hub is lost, and another one is being looked for."""
        self._reader = EventReader(record.plan, codec)
        self._rows: list[Row] = []
        self._submitted: Outcome[fm.Submitted] | None = None
        self._known = False
        """Whether the hub has the job."""
        self._began = asyncio.get_running_loop().time()
        self._token = ""
        """Names our submission of the job; empty if we have not submitted it."""
        self._on_end: list[Callable[[RemoteJob], None]] = []
        self._room = Signal()
        self._waiting_for = "the federation"
        if record.spec.start_at is not None and starts_later(record.spec):
            self._waiting_for = f"its start at {moment_text(record.spec.start_at)}"
        self._waits: dict[tuple[str, Frame], WaitInfo] = {}
        """What waits, by the hub's reports and by the events that follow them."""
        self._sending: dict[int, Outcome[fm.EventTaken | None]] = {}
        """The events that the hub has not answered."""
        self._last_request = 0
        self._finished: float | None = None
        self._size = 0
        """The number of bytes of events that were received."""
        self._confirmed = 0
        self._granted = 0
        self._end_there = 0
        """The end of the hub's log."""
        self._ending = False
        """Whether the job is about to end, so that nothing holds its last events up."""
        self._final: fm.JobState | None = None
        """The last report that the job has ended, if it was."""
        self._submission: fm.Submit | None = None
        """What was sent to submit the job, while the hub has not answered."""
        self._last_words: fm.Halt | fm.Fail | None = None
        """What was sent to end the job."""
        self._unstored: deque[Row] = deque()
        """The newest parameter sets, which the journal of the hub may not have."""
        self._foreign = False
        """Whether others have sent parameter sets, so that the numbers of ours are not known."""
        limits = record.log.limits
        # What is in flight must fit into the hub's log, too: else that would wait for us, and we for it.
        self._ahead = min(_AHEAD, 4 * limits.window, limits.max_items)
        self._confirm_after = min(_CONFIRM, limits.window_bytes // 4, limits.max_bytes // 4)
        record.log.owner = self
        record.execution = self
        record.number = JobNumber(0)

    def _send(self, message: Any) -> None:
        if self.connection is not None:
            self.connection.send(message)

    # parameter sets

    def add(self, rows: Sequence[Row], *, last: bool = False) -> None:
        """Add parameter sets; they are sent at once, if the hub knows the job. ``last``: no further ones will come."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        first = self.frames.added
        self.frames.added += len(rows)
        for index in range(first, self.frames.added):
            self.record.open_frames[index] = 1
        self.record.next_frame = self.frames.added
        if not self._known:
            self._rows.extend(rows)
        elif rows:
            self._send_new(rows)
        if last:
            self.stop()

    def _send_new(self, rows: Sequence[Row]) -> None:
        if self._has_journal:
            self._unstored.extend(rows)
        self._send_rows(rows)

    @property
    def _has_journal(self) -> bool:
        return self.connection is not None and self.connection.journal

    def _send_rows(self, rows: Sequence[Row]) -> None:
        """Send parameter sets that the hub does not have, in messages that are not too large."""
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
        """Note that no further parameter set will come."""
        if not self.frames.stopped:
            self.frames.stopped = True
            if self._known:
                self._send(fm.StopFrames(self.record.job_id))

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        return not self.frames.stopped and self.phase not in (Phase.STOPPING, Phase.ENDED)

    async def room(self) -> None:
        """Wait until there is room for a further parameter set, or the job takes none any longer."""
        most = 2 * self.spec.window
        await self._room.wait_until(lambda: len(self.record.open_frames) < most or not self.accepts)

    def refusal(self, problem: str) -> DfmError:
        """Return the error for what the job no longer takes: that it is interrupted, or else the problem."""
        return self.record.refusal(problem)

    # events

    async def send_event(self, name: str, value: str, frame: int | None) -> None:
        """Send an event, with a value as JSON, to a parameter set; None: to the only one. Return when the hub has it.

        Raises:
            ParameterError: the set does not take it.
            EventsFull: it would take it later.
            DfmError: it cannot be sent.
        """
        if self.phase in (Phase.STOPPING, Phase.ENDED) or self.connection is None:
            raise self.refusal(f"job {self.record.job_id} takes no event {name!r}: it has ended, or is about to")
        self._last_request += 1
        number, answer = self._last_request, Outcome[fm.EventTaken | None]()
        self._sending[number] = answer
        try:
            self._send(fm.SendEvent(self.record.job_id, number, name, frame, value))
            taken = await answer
        except TooLarge as error:
            raise ParameterError([f"event {name!r} cannot be sent: {error}"]) from None
        finally:
            del self._sending[number]
        if taken is None:
            why = "the federation could not be reached" if self._recovering else "it has ended"
            ended = f"it is not known whether event {name!r} was taken by job {self.record.job_id}: {why}"
            raise self.record.cause if isinstance(self.record.cause, DfmError) else ParameterError([ended])
        if taken.problems:
            raise (EventsFull if taken.full else ParameterError)(list(taken.problems))

    def take_answer(self, message: fm.EventTaken) -> None:
        """Take the hub's answer to an event."""
        answer = self._sending.get(message.request)
        if answer is not None:
            answer.settle(message)

    def resume(
        self, rows: Mapping[int, Row], added: int, seen: Seen, failed: LoggedErrors, waits: Iterable[WaitEvent] = ()
    ) -> None:
        """Refuse: the federation itself goes on with jobs that were interrupted.

        Raises:
            DfmError: always.
        """
        raise DfmError("jobs on FLARE live in the federation: find them again with session.reattach")

    # lifecycle

    def on_end(self, call: Callable[[RemoteJob], None]) -> None:
        """Call back when the job has ended."""
        self._on_end.append(call)

    def watch_deadline(self, began: float) -> None:
        """Abort the job at its deadline, if it has one; ``began``: when the job began, by the loop's clock."""
        self._began = began

    @property
    def state(self) -> str:
        """The state of the job, as text."""
        if self.phase is Phase.WAITING:
            return f"waits for {self._waiting_for}"
        frames = self.frames
        done = frames.added - len(self.record.open_frames)
        total = f"{frames.added}" if frames.stopped else f"{frames.added} so far"
        return f"{self.phase.value}, {done} of {total} parameter sets done"

    def waiting(self) -> JobWait:
        """Return what is known about what the job waits for."""
        waits = self.phase is Phase.WAITING
        shown = tuple(itertools.islice(self._waits.values(), WAITS_SHOWN))
        return JobWait(waiting_for=self._waiting_for if waits else "", waits=shown)

    async def submit(self, offers: dict[str, str]) -> None:
        """Submit the job to the hub; return when the hub has it.

        Raises:
            JobExists: another job has its id.
            AlreadySubmitted: the same job was submitted before.
            QueueFull: too many jobs wait.
            ParameterError: it is too large.
            DfmError: it cannot be sent.
        """
        record, plan = self.record, self.plan
        try:
            nets = tuple(encode_net(net, self._codec) for net in plan.nets)
            packed = plan.to_json()
        except EncodingError as error:
            raise DfmError(f"a literal of the pipeline cannot be sent to other organisations: {error}") from error
        traced = None
        if self.trace is not None:
            launched = self.trace.launch()
            traced = fm.Traced(self.trace.trace_id, self.trace.span, tuple(span for _, span, _ in launched))
        first = self._first_rows()  # the others follow when the hub knows the job
        self._token = secrets.token_hex(8)
        message = fm.Submit(
            spec=self.spec,
            plan=packed,
            nets=nets,
            offers={site: key for site, key in offers.items() if site in plan.sites_at},
            rows=self._codec.dumps(first) if first else b"",
            stopped=self.frames.stopped and len(first) == len(self._rows),
            elapsed=asyncio.get_running_loop().time() - self._began,
            trace=traced,
            token=self._token,
            until=self._ahead,
        )
        self._granted = self._ahead
        self._submitted, self._submission = Outcome(), message
        try:
            self._send(message)
        except TooLarge as error:
            self._submitted = None
            text = f"the pipeline and its first parameter set cannot be sent: {error} (max_message_bytes of its site)"
            raise ParameterError([text]) from None
        answer = await self._submitted
        self._submission = None
        if answer.outcome == "full":
            raise QueueFull(int(answer.reason or 0), later=starts_later(self.spec))
        if answer.outcome == "same":
            raise AlreadySubmitted
        if answer.outcome == "other":
            if answer.reason:
                raise DfmError(f"the federation cannot run the job: {answer.reason}")
            raise JobExists(record.job_id)
        late, self._rows = self._rows[len(first) :], []
        self._known = True
        if late:
            self._send_new(late)
        if self.frames.stopped and not message.stopped:
            self._send(fm.StopFrames(record.job_id))

    def _first_rows(self) -> list[Row]:
        """Return the first parameter sets, as far as they are not too large together."""
        first = list(self._rows)
        while len(first) > 1 and len(self._codec.dumps(first)) > _ROWS:
            del first[len(first) // 2 :]
        return first

    def answered(self, answer: fm.Submitted) -> None:
        """Note the hub's answer to the submission."""
        if self._submitted is not None:
            self._submitted.settle(answer)

    @property
    def _only_here(self) -> bool:
        """Whether the hub was never sent the job."""
        return self._submitted is None and not self._known

    def follow(self) -> None:
        """Have the hub send the events that we do not have yet."""
        self._known = True
        self._size = 0
        self._send(fm.Follow(self.record.job_id, self.record.log.end))
        self._grant(force=True)

    def halt(self, status: JobStatus, reason: str, grace: float) -> None:
        """Stop the job; it ends with this status when the federation has stopped it."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        if self._only_here:
            self._end(status, reason)
            return
        self.phase = Phase.STOPPING
        kind: Any = status.value  # one of those that Halt may have: no other ends a job early
        self._halting = self._last_words = fm.Halt(self.record.job_id, self._token, kind, reason, grace)
        self._send(self._halting)
        self._take_the_rest()
        self._room.notify()

    def shorten(self, grace: float) -> None:
        """Kill what has not stopped after a further grace."""
        if self.phase is Phase.STOPPING and grace < self._halting.grace:
            self._send(msgspec.structs.replace(self._halting, grace=grace))

    def shut_down(self, reason: str, grace: float) -> None:
        """Note that the session is closed: the job ends, or goes on without the application."""
        if self.phase is Phase.ENDED:
            return
        if self._recovering:
            self._interrupt(f"{reason} while the federation could not be reached")
        elif self._detach and self._known:
            self._end(JobStatus.INTERRUPTED, f"{reason}; the job continues in the federation (session.reattach)")
        else:
            self.halt(JobStatus.ABORTED, reason, grace)

    def fail(self, error: DfmError) -> None:
        """End the job with an error of the application's side."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        if self._only_here:
            self.record.add_error(error)
            self.record.add(Failure(self.record.log.end, None, error, (), self.plan.homesite, "job"))
            self._end(JobStatus.FAILED, str(error))
            return
        self._last_words = fm.Fail(self.record.job_id, self._token, encode_error(error))
        self._send(self._last_words)
        self._take_the_rest()

    def abandon(self, at: int, how: StopOutcome = StopOutcome.ABANDONED) -> None:
        """Abandon the job: its outcome cannot be known any longer."""
        self._end(JobStatus.ABORTED, "the session has ended")

    def lost(self, error: DfmError) -> None:
        """Note that the federation cannot be reached any longer."""
        if self.phase is not Phase.ENDED:
            if self._submitted is not None:
                self._submitted.fail(error)
            self.record.cause = error
            self._end(JobStatus.ABORTED, str(error))

    # the loss of a hub that keeps a journal

    @property
    def recoverable(self) -> bool:
        """Whether another hub can go on with the job."""
        return self._has_journal and self.phase is not Phase.ENDED

    def suspend(self) -> None:
        """Note that the hub is lost, and that another one may go on with the job."""
        self._recovering = True
        if self.phase is Phase.RUNNING:
            self.phase = Phase.WAITING
        self._waiting_for = "the federation, which cannot be reached"
        for answer in self._sending.values():
            answer.settle(None)
        self.record.changed()

    @property
    def suspended(self) -> bool:
        """Whether no hub goes on with the job yet."""
        return self._recovering and self.phase is not Phase.ENDED

    @property
    def submitting(self) -> bool:
        """Whether no hub has answered the submission."""
        return self._submission is not None

    def submit_again(self, connection: HubConnection) -> None:
        """Send the submission to another hub; if the journal has it, it is the same."""
        self.connection, self._recovering = connection, False
        self._reader = EventReader(self.plan, self._codec)
        assert self._submission is not None  # noqa: S101 - the caller has looked
        self._send(self._submission)

    def recover(self, connection: HubConnection, found: fm.Known) -> None:
        """Go on at another hub, which has the job now: read on, and repeat what the journal does not have."""
        self.connection, self._recovering = connection, False
        self._reader = EventReader(self.plan, self._codec)  # errors have other numbers there
        if found.state.end < self.record.log.end:
            problem = f"the journal lacks events of job {self.record.job_id} that were delivered already"
            self.lost(DfmError(f"{problem}: the machine of the server may have crashed"))
            return
        stored, stopped = found.state.added, self.frames.stopped
        first = self.frames.added - len(self._unstored)  # the number of the first set that may be missing
        missing = list(self._unstored)[max(0, stored - first) :]
        lost = bool(self._unstored) and (self._foreign or stored > self.frames.added)
        self.take_state(found.state)
        self.follow()
        if lost:
            many = f"the last {len(self._unstored)} parameter sets that this program has sent may be missing"
            self.fail(DfmError(f"{many}: others had sent some, too, when the federation could not be reached"))
            return
        self._unstored = deque(missing)
        if missing:
            self._send_rows(missing)
        if self._last_words is not None:
            self._send(self._last_words)
        elif stopped and not found.state.stopped:
            self._send(fm.StopFrames(self.record.job_id))

    def not_found(self, error: DfmError) -> None:
        """Note that no hub could be reached in time: the job is interrupted, as far as it is known here."""
        if self.phase is not Phase.ENDED:
            if self._submitted is not None:
                self._submitted.fail(error)
            self.record.cause = error
            self._interrupt(f"{error}")

    def _interrupt(self, reason: str) -> None:
        later = "it goes on when the federation can be reached again (session.reattach)"
        self._end(JobStatus.INTERRUPTED, f"{reason}; {later}")

    def _end(self, status: JobStatus, reason: str | None) -> None:
        if self.phase is not Phase.ENDED:
            self._close(status, reason)
            self.record.change(status, reason)
            self._notify_end()

    def _ended_there(self, status: JobStatus, reason: str | None) -> None:
        """Note that the job has ended in the federation."""
        self._close(status, reason)
        self.record.adopt(status, reason, self._finished or time.time())
        self._notify_end()

    def _close(self, status: JobStatus, reason: str | None) -> None:
        self.phase = Phase.ENDED
        self._room.notify()
        for answer in self._sending.values():
            answer.settle(None)
        self._unstored.clear()
        log = self.record.log
        log.owner = self.record.execution = None
        if self._known:
            self._send(fm.Unfollow(self.record.job_id))
        if self.trace is not None:
            failed = reason or (None if status is JobStatus.FINISHED else f"{self.record.error_count} errors")
            self.trace.end(status.value, failed)
            self.trace = None

    def _notify_end(self) -> None:
        calls, self._on_end = self._on_end, []
        for call in calls:
            call(self)

    # messages of the hub

    def take_state(self, state: fm.JobState) -> None:
        """Take a progress report of the hub."""
        frames = self.frames
        self._foreign = self._foreign or state.added > frames.added
        frames.added = max(frames.added, state.added)
        frames.opened, frames.open = state.opened, range(state.open)
        frames.stopped = frames.stopped or state.stopped
        self._waiting_for = state.waiting_for
        if state.end > self.record.log.end:  # else what we know from events is newer
            self._waits = {(wait.node, wait.frame): wait for wait in state.waits}
        self.outcomes = dict(state.outcomes)
        self._finished = state.finished
        if state.cause and self.record.cause is None:
            self.record.cause = decode_error(state.cause)
        self._end_there = max(self._end_there, state.end)
        if self.phase is Phase.WAITING and state.phase is not Phase.WAITING:
            self.phase = Phase.RUNNING
        self.record.changed()
        self._check_stalled()
        self._final = state if state.status.ended else None
        ending = self._final is not None and not self._ending and self.phase is not Phase.ENDED
        left = state.end - self.record.log.end
        if ending and not self.record.log.readers and not (self._has_journal and left > self.spec.limits.max_items):
            self._take_the_rest()
        self._check_ended()

    def _check_ended(self) -> None:
        """End, if the hub has reported that: the last event may not be kept, or the job is interrupted."""
        state = self._final
        if state is not None and self.record.log.end >= state.end and self.phase is not Phase.ENDED:
            self._ended_there(state.status, state.reason)

    def take_stored(self, message: fm.RowsStored) -> None:
        """Note that the journal of the hub has parameter sets."""
        self._foreign = self._foreign or message.first != self.frames.added - len(self._unstored)
        for _ in range(min(message.count, len(self._unstored))):
            self._unstored.popleft()

    def take_expired(self, message: fm.Expired) -> None:
        """Note that events that we do not have are gone: the log may begin later, but must have no gap."""
        log = self.record.log
        if message.first is None:
            self.lost(DfmError(f"the federation does not know job {self.record.job_id} any longer"))
        elif log.begin_at(message.first):
            self.follow()
        else:
            self.lost(ResultsExpired(self.record.job_id, log.end, message.first))

    def take_events(self, message: fm.Events) -> None:
        """Take events of the hub, except those that we have already."""
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
                self._room.notify()
                record.note(event)
            elif type(event) is Failure:
                record.note(event)
                if event.place is None or message.heads[position].kind == "result":
                    record.add_error(event.error)
            elif type(event) is StatusChanged:
                last = event
            elif type(event) is WaitBegan:
                known = WaitInfo(name=event.name, frame=event.frame, node=event.node, until=event.until)
                self._waits[event.node, event.frame] = known
            elif type(event) is WaitEnded:
                self._waits.pop((event.node, event.frame), None)
        self.yielded += Traffic(results, len(message.values))
        log.extend(events, message.size // max(1, len(events)))
        log.changed.notify()
        record.changed()
        if last is not None:
            self._take_status(last)
        self._check_ended()

    def _take_status(self, event: StatusChanged) -> None:
        if event.status is JobStatus.INTERRUPTED:
            return  # another hub goes on with the job, unless this one reports that it is interrupted
        if event.status.ended:
            self._ended_there(event.status, event.reason)
        else:
            self.phase = Phase.RUNNING if self.phase is Phase.WAITING else self.phase
            self.record.adopt(event.status, event.reason, None)

    def take_relayed(self, relayed: fm.Relayed) -> None:
        """Take a location's report of calls or spans."""
        message = msg.decoder.decode(relayed.message)
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
        """Grant the hub credit: as far as our log has room."""
        log = self.record.log
        if log.full and not self._ending:
            self._check_stalled()
            return
        until = log.end + (_ALL if self._ending else self._ahead)
        if force or until - self._granted > self._ahead // 2 or self._size > self._confirmed + self._confirm_after:
            self._granted, self._confirmed = until, self._size
            self._send(fm.EventsTaken(self.record.job_id, log.end, until, self._size))

    def _take_the_rest(self) -> None:
        """Have the last events of an ending job sent, even if nobody reads them. The hub's log bounds them."""
        self._ending = True
        self._grant(force=True)

    def log_has_room(self) -> None:
        """Let the hub send more."""
        self._grant(force=True)

    def log_is_full(self) -> None:
        """Fail the job, or notify its waiters: our log is full, and can drop nothing."""
        if self.record.log.limits.overflow == "fail":
            self.fail(log_overflow(self.record))
        else:
            self._check_stalled()

    def _check_stalled(self) -> None:
        if self.waiting_for_reader:
            self.record.stalled()

    @property
    def waiting_for_reader(self) -> bool:
        """Whether the job cannot go on before somebody reads its log."""
        log = self.record.log
        blocks = log.full and log.limits.overflow == "block" and not log.readers
        return bool(blocks and self._end_there > log.end and self.phase is Phase.RUNNING)
