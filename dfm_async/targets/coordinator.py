"""The application's side of one job: opens frames, takes results, counts completions, cancels."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal

from dfm_async.errors import DfmError, EncodingError, OperationFailed, WorkerLost
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.events import Event, Failure, FrameCompleted, Result, WorkerNotice
from dfm_async.model.ids import JobNumber
from dfm_async.model.status import JobStatus
from dfm_async.results.record import JobRecord
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken, Codec

__all__ = ["FRAME_WINDOW", "Coordinator", "Phase", "Row"]

FRAME_WINDOW: Final = 256
"""How many parameter sets are under way at the same time."""

Row = Mapping[str, Any]
"""One parameter set, packed by the codec."""


class Phase(Enum):
    """Where a job is between its submission and its end."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Coordinator:
    """Runs one job from the application's side.

    Args:
        record: where everything goes.
        codec: how values travel.
        on_error: whether the job goes on after an error.
    """

    def __init__(self, record: JobRecord, codec: Codec, on_error: Literal["continue", "stop"]) -> None:
        self.record = record
        self.plan = record.plan
        self.phase = Phase.WAITING
        self.outcomes: dict[str, str] = {}
        """For each location, how it stopped when the job was cancelled."""
        self._codec = codec
        self._on_error = on_error
        self._send: Callable[[int, msg.Message], None] = _nowhere
        self._kill: Callable[[int], None] = _nobody
        self._on_end: list[Callable[[Coordinator], None]] = []
        self._names = self.plan.params_at
        self._points = self.plan.points
        self._sites = self.plan.sites_at
        self._pending: deque[Row] = deque()
        self._room: list[asyncio.Future[None]] = []
        self._open = record.open_frames
        self._stopped = False
        self._told_last = False
        self._errors: dict[int, dict[str, DfmError]] = {}
        self._owed = [[0, 0] for _ in self.plan.locations]
        self._stopping: set[int] = set()
        self._final = (JobStatus.ABORTED, "cancelled")
        self._timers: list[asyncio.TimerHandle] = []
        record.log.on_room = self._grant
        record.log.on_full = self._check_full
        record.blocked = self._is_waiting

    def on_end(self, call: Callable[[Coordinator], None]) -> None:
        """Has something called when the job has ended."""
        self._on_end.append(call)

    # parameter sets

    def add(self, rows: Sequence[Row]) -> None:
        """Adds parameter sets; they are opened as far as the window allows."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        self._pending.extend(rows)
        if self.phase is Phase.RUNNING:
            self._open_frames()

    def stop(self) -> None:
        """Says that no further parameter set will come."""
        self._stopped = True
        if self.phase is Phase.RUNNING:
            self._open_frames()
            self._check_end()

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        return not self._stopped and self.phase in (Phase.WAITING, Phase.RUNNING)

    async def room(self) -> None:
        """Waits until there is room for a further parameter set, or the job takes none any more."""
        while len(self._pending) >= FRAME_WINDOW and self.accepts:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    def _make_room(self) -> None:
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _open_frames(self) -> None:
        batch = self._next_batch()
        if batch is None:
            return
        first, rows, last = batch
        number = self.record.number
        for at, names in enumerate(self._names):
            self._send(at, msg.OpenFrames(number, at, first, len(rows), self._payload(rows, names), last))
        if rows:
            self._make_room()

    def _next_batch(self) -> tuple[int, list[Row], bool] | None:
        """Takes the parameter sets that can be opened now: the first one's number, and whether they are the last."""
        record = self.record
        room = 0 if record.log.full else FRAME_WINDOW - len(self._open)
        count = min(room, len(self._pending))
        rows = [self._pending.popleft() for _ in range(count)]
        last = self._stopped and not self._pending
        if not rows and (not last or self._told_last):
            return None
        first = record.next_frame
        record.next_frame += count
        locations = len(self._names)
        for index in range(first, first + count):
            self._open[index] = locations
        self._told_last = self._told_last or last
        return first, rows, last

    def _payload(self, rows: list[Row], names: Sequence[str]) -> bytes:
        return self._codec.dumps([[row[name] for name in names] for row in rows]) if names and rows else b""

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
        self.phase = Phase.RUNNING
        record.change(JobStatus.RUNNING)
        limits = record.log.limits
        plan = self.plan.hash
        _, rows, last = self._next_batch() or (0, [], False)
        for at, names in enumerate(self._names):
            payload = self._payload(rows, names)
            send(
                at,
                msg.StartJob(
                    number,
                    at,
                    record.job_id,
                    plan,
                    routes,
                    limits.window,
                    limits.window_bytes,
                    len(rows),
                    payload,
                    last,
                ),
            )
        if self._room:
            self._make_room()
        self._check_end()

    def deadline(self, seconds: float) -> None:
        """Aborts the job if it has not ended by then."""
        reason = f"the deadline of {seconds:g} s is over"
        call = asyncio.get_running_loop().call_later(seconds, self.halt, JobStatus.ABORTED, reason, 5.0)
        self._timers.append(call)

    def receive(self, message: msg.Message) -> None:
        """Takes a message from a location."""
        if self.phase is not Phase.ENDED:
            _HANDLERS[type(message)](self, message)

    def halt(self, status: JobStatus, reason: str, grace: float) -> None:
        """Stops the job at all its locations; it ends with this status when all of them have confirmed.

        A location that has not confirmed after the grace is killed.
        """
        if self.phase is Phase.WAITING:
            self._end(status, reason)
        elif self.phase is Phase.RUNNING:
            self.phase = Phase.STOPPING
            self._final = (status, reason)
            self._stopping = set(range(len(self.plan.locations))) - self._stopping
            for at in list(self._stopping):
                self._send(at, msg.CancelJob(self.record.number, at))
            self._timers.append(asyncio.get_running_loop().call_later(grace, self._overdue))
            self._check_stopped()

    def shorten(self, grace: float) -> None:
        """Kills what has not stopped after a further grace."""
        if self.phase is Phase.STOPPING:
            self._timers.append(asyncio.get_running_loop().call_later(grace, self._overdue))

    def _overdue(self) -> None:
        for at in sorted(self._stopping):
            self._kill(at)

    def _job_stopped(self, message: msg.JobStopped) -> None:
        self._location_stopped(message.at, "stopped")

    def _job_broken(self, message: msg.JobBroken) -> None:
        self.fail(_rebuild(message.error))

    def _location_stopped(self, at: int, how: str) -> None:
        if self.phase is Phase.STOPPING and at in self._stopping:
            self._stopping.discard(at)
            self.outcomes[self.plan.locations[at]] = how
            self._check_stopped()

    def lost(self, at: int, error: WorkerLost) -> None:
        """The worker of a location has ended."""
        if self.phase is Phase.RUNNING:
            self.record.cause = error
            self._stopping = {at}  # it needs no telling
            self.halt(JobStatus.ABORTED, str(error), 5.0)
        else:
            self._location_stopped(at, "killed")

    def unresponsive(self, at: int, site: str, seconds: float) -> None:
        """The worker of a location does not respond."""
        self._notice(at, site, "unresponsive", seconds, f"has not responded for {seconds:.1f} s")

    def responsive(self, at: int, site: str) -> None:
        """The worker of a location responds again."""
        self._notice(at, site, "responsive", 0.0, "responds again")

    def _notice(
        self, at: int, site: str, kind: Literal["unresponsive", "responsive"], seconds: float, what: str
    ) -> None:
        if self.phase in (Phase.RUNNING, Phase.STOPPING):
            log = self.record.log
            detail = f"the worker of {self.plan.locations[at]!r} {what}"
            log.append(WorkerNotice(log.end, site, kind, seconds, detail))
            log.wake()

    def abandon(self, at: int) -> None:
        """Gives up on a location that does not stop and cannot be killed."""
        self._location_stopped(at, "abandoned")

    def fail(self, error: DfmError) -> None:
        """Ends the job with an error of its own, such as a log that is full or parameters that cannot be read."""
        if self.phase not in (Phase.WAITING, Phase.RUNNING):
            return
        self.record.add_error(error)
        log = self.record.log
        log.append(Failure(log.end, None, error, (), self.plan.homesite, "job"))
        self.halt(JobStatus.FAILED, str(error), 5.0)

    def _check_stopped(self) -> None:
        if self.phase is Phase.STOPPING and not self._stopping:
            self._end(*self._final)

    def _check_end(self) -> None:
        if self._stopped and not self._pending and not self._open and self.phase is Phase.RUNNING:
            failed = self.record.error_count > 0
            self._end(JobStatus.FAILED if failed else JobStatus.FINISHED, None)

    def _end(self, status: JobStatus, reason: str | None) -> None:
        self.phase = Phase.ENDED
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._pending.clear()
        self._make_room()
        self.record.log.on_room = self.record.log.on_full = self.record.blocked = None
        self._send, self._kill = _nowhere, _nobody
        self.record.change(status, reason)
        calls, self._on_end = self._on_end, []  # what is done is let go: a session has many jobs
        for call in calls:
            call(self)

    # messages

    def _results(self, message: msg.Results) -> None:
        log = self.record.log
        site = self._sites[message.at]
        try:
            values = self._codec.loads_batch(message.payload)
        except EncodingError as error:
            self.fail(error)
            return
        offset = log.end
        events: list[Event] = []
        position = 0
        for point, frame, start, count in message.runs:
            place, node = self._points[point]
            for index in range(count):
                value = values[position]
                position += 1
                full = frame if start < 0 else (*frame, start + index)
                if type(value) is Broken:
                    broken = EncodingError(node, "value", f"it cannot be rebuilt in the application: {value.error}")
                    broken.__cause__ = value.error
                    self.record.add_error(broken)
                    events.append(Failure(offset, place, broken, full, site, node))
                else:
                    events.append(Result(offset, place, value, full, site, node))
                offset += 1
        log.extend(events, len(message.payload) // max(1, len(events)))
        log.wake()
        owed = self._owed[message.at]
        owed[0] += len(events)
        owed[1] += len(message.payload)
        limits = log.limits
        if log.full:
            self._check_full()
        elif owed[0] * 2 >= limits.window or owed[1] * 2 >= limits.window_bytes:
            self._send(message.at, msg.Credit(self.record.number, message.at, owed[0], owed[1]))
            owed[:] = (0, 0)
        if message.frames:
            self._close_frames(message.frames)

    def _check_full(self) -> None:
        """The log is full, and can drop nothing: fails the job, or tells those who wait for it that it waits."""
        log = self.record.log
        if not log.full:
            return
        if log.limits.overflow == "fail":
            self.fail(_overflow(self.record))
        elif self.waiting_for_reader:
            self.record.stalled()

    @property
    def waiting_for_reader(self) -> bool:
        """Whether the job cannot go on before somebody reads its log."""
        log = self.record.log
        window, window_bytes = log.limits.window, log.limits.window_bytes
        blocked = self._pending or any(items >= window or size >= window_bytes for items, size in self._owed)
        return bool(log.full and not log.readers and blocked and self.phase is Phase.RUNNING)

    def _is_waiting(self) -> bool:
        return self.waiting_for_reader

    def _grant(self) -> None:
        """The log has room again: the sites may send what they could not."""
        if self.phase is Phase.RUNNING:
            self._open_frames()
            for at, owed in enumerate(self._owed):
                if owed[0]:
                    self._send(at, msg.Credit(self.record.number, at, owed[0], owed[1]))
                    owed[:] = (0, 0)

    def _operation_error(self, message: msg.OperationError) -> None:
        found = message.error
        known = self._errors.setdefault(found.frame[0] if found.frame else -1, {})
        if found.id in known:
            return
        error = known[found.id] = _rebuild(found)
        self.record.add_error(error)
        log = self.record.log
        log.append(Failure(log.end, None, error, found.frame, found.site, found.node), len(found.traceback))
        log.wake()
        self._check_full()
        if self._on_error == "stop" and self.phase is Phase.RUNNING:
            self.halt(JobStatus.FAILED, f"stopped at the first error: {found.node} raised {found.type_name}", 5.0)

    def _yield_failed(self, message: msg.YieldFailed) -> None:
        place, node = self._points[message.point]
        error = self._errors.get(message.frame[0], {}).get(message.error)
        if error is None:
            error = self._errors.get(-1, {}).get(message.error) or DfmError(f"error {message.error}")
        log = self.record.log
        log.append(Failure(log.end, place, error, message.frame, self._sites[message.at], node))
        log.wake()

    def _frames_done(self, message: msg.FramesDone) -> None:
        self._close_frames(message.frames)

    def _close_frames(self, frames: list[int]) -> None:
        log = self.record.log
        done = False
        for index in frames:
            left = self._open[index] - 1
            if left:
                self._open[index] = left
            else:
                del self._open[index]
                self._errors.pop(index, None)
                log.append(FrameCompleted(log.end, (index,)))
                done = True
        if done:
            log.wake()
            if self.phase is Phase.RUNNING:
                self._open_frames()
                self._check_end()
                self._check_full()


_HANDLERS: Final[dict[type, Callable[[Coordinator, Any], None]]] = {
    msg.Results: Coordinator._results,  # noqa: SLF001 - same module
    msg.OperationError: Coordinator._operation_error,  # noqa: SLF001
    msg.YieldFailed: Coordinator._yield_failed,  # noqa: SLF001
    msg.FramesDone: Coordinator._frames_done,  # noqa: SLF001
    msg.JobStopped: Coordinator._job_stopped,  # noqa: SLF001
    msg.JobBroken: Coordinator._job_broken,  # noqa: SLF001
}


def _rebuild(found: ErrorRecord) -> OperationFailed:
    error = OperationFailed(
        found.site,
        found.operation,
        found.node,
        found.frame,
        found.attempt,
        found.type_name,
        found.message,
        found.traceback,
    )
    if found.cause:
        try:
            cause = pickle.loads(found.cause)  # noqa: S301 - from a process of our own tree
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a class that is not known here, or raises: the text must do
            cause = None
        if isinstance(cause, BaseException):
            error.__cause__ = cause
    return error


def _overflow(record: JobRecord) -> DfmError:
    limits = record.log.limits
    return DfmError(
        f"job {record.job_id}: the log holds {record.log.held:,} events that nobody has read, more than "
        f"ResultLimits(max_items={limits.max_items:,}, max_bytes={limits.max_bytes:,}) allows"
    )


def _nowhere(_at: int, _message: msg.Message) -> None:
    """Before the launch there is nobody to tell."""


def _nobody(_at: int) -> None:
    """Before the launch there is nobody to kill."""
