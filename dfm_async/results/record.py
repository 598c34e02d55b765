"""The record of one job: its status, errors, times and log, and the journal that keeps them in a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from dfm_async.base.signals import Signal
from dfm_async.base.wall_clock import wall_time
from dfm_async.errors import (
    DecodingError,
    DfmError,
    JobAborted,
    JobFailed,
    JobInterrupted,
    ParameterError,
    ResultsUnread,
)
from dfm_async.model.events import Event, Failure, FrameCompleted, StatusChanged
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.event_codec import Run
from dfm_async.results.log import Backing, ResultLog
from dfm_async.results.watching import JobActivity, JobChanges

ERRORS_KEPT: Final = 100
"""The number of errors of a job that are kept; the others are counted."""


class Journal(Protocol):
    """Writes the events of one job to a store. Nothing waits: the job's record is notified when they are safe."""

    def event(self, event: Event, point: int) -> None:
        """Write one event; ``point``: the yield that it is about, or -1."""

    def results(
        self, first: int, at: int, runs: Sequence[Run], values: Sequence[Any], payload: bytes, broken: int
    ) -> None:
        """Write results of a location from an offset on, as they came.

        ``payload`` has all values encoded, or is empty. ``broken`` is the number of values that could not be rebuilt;
        they count as errors.
        """

    def flush(self) -> None:
        """Write what was collected."""

    def params(self, first: int, rows: Sequence[Any]) -> None:
        """Write parameter sets."""

    def stopped(self) -> None:
        """Write that no further parameter set will come."""

    def when_written(self, call: Callable[[], None]) -> None:
        """Call back when everything so far is written; never, if it cannot be."""

    def status(self, status: JobStatus, reason: str | None, finished: float | None) -> None:
        """Write the status."""


class Execution(Protocol):
    """What a record needs of what runs the job."""

    @property
    def waiting_for_reader(self) -> bool:
        """Whether the job cannot go on before somebody reads its log."""


class JobSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of the record that is kept of a job that ended long ago."""

    spec: JobSpec
    plan: Plan
    status: JobStatus
    reason: str | None
    finished: float | None
    events: int
    error_count: int
    error: DfmError | None
    sets: int | None = None
    done: int | None = None

    @property
    def job_id(self) -> JobId:
        """The job's id."""
        return self.spec.job_id

    @property
    def created(self) -> float:
        """When the job was submitted."""
        return self.spec.created


class JobRecord:
    """Status, errors, times and the log of one job. Outlives the execution.

    A job with a journal enters a state when that is written: ``decided`` is ahead of ``status`` until then.
    """

    __slots__ = (
        "_completion",
        "_cut_off",
        "_ended_or_blocked",
        "activity",
        "cause",
        "changes",
        "created",
        "decided",
        "done",
        "ended_at",
        "error_count",
        "errors",
        "execution",
        "fingerprint",
        "finished",
        "job_id",
        "journal",
        "label",
        "loader",
        "log",
        "next_frame",
        "number",
        "on_written",
        "open_elsewhere",
        "open_frames",
        "plan",
        "reason",
        "sets",
        "spec",
        "status",
        "unwritten",
    )

    def __init__(self, spec: JobSpec, plan: Plan, backing: Backing | None = None, start: int = 0) -> None:
        self.spec: JobSpec = spec
        self.job_id: JobId = spec.job_id
        self.created: float = spec.created
        self.label: str | None = spec.label
        self.fingerprint: str | None = spec.fingerprint
        self.number: JobNumber = JobNumber(-1)
        """The number of the present run, or -1: the job does not run here."""
        self.plan: Plan = plan
        self.log: ResultLog = ResultLog(spec.job_id, spec.limits, backing, start)
        self.journal: Journal | None = None
        self.status: JobStatus = JobStatus.SUBMITTED
        self.decided: JobStatus = JobStatus.SUBMITTED
        """The status that the job has reached, written or not."""
        self.reason: str | None = None
        self.cause: BaseException | None = None
        self.errors: tuple[DfmError, ...] = ()
        self.error_count: int = 0
        self._completion: asyncio.Event | None = None
        self.finished: float | None = None
        self.ended_at: float = 0.0
        """When it was added to the ended jobs of a session, by the loop's clock."""
        self.open_frames: dict[int, int] = {}
        """The parameter sets in flight, and the number of locations that are not done with each."""
        self.next_frame: int = 0
        """The number of the next parameter set."""
        self.sets: int | None = None
        """The number of parameter sets, once nothing of the job runs here."""
        self.done: int | None = None
        """The number of those that are done."""
        self.open_elsewhere: bool = False
        """Whether another process runs the job, which takes further parameter sets."""
        self._ended_or_blocked: Signal | None = None
        self.loader: Callable[[], Awaitable[None]] | None = None
        """Reads the errors of a job that did not run here, when they are first needed."""
        self._cut_off: DfmError | None = None
        self.unwritten: DfmError | None = None
        """Why the job can no longer be written, if so: it is interrupted then."""
        self.execution: Execution | None = None
        """What runs the job, while it runs here."""
        self.activity: JobActivity | None = None
        """What its operations do, if the job is watched."""
        self.on_written: Callable[[int], None] | None = None
        """Is called with the offset of the first event that the journal has not written, when it has written some."""
        self.changes: JobChanges | None = None
        """The readers of changes of all jobs."""

    @property
    def completion_event(self) -> asyncio.Event:
        """Is set when the job has ended. It is made when it is first needed."""
        if self._completion is None:
            self._completion = asyncio.Event()
            if self.status.ended:
                self._completion.set()
        return self._completion

    @property
    def runs_here(self) -> bool:
        """Whether this application runs the job, or ran it."""
        return self.number >= 0

    def changed(self) -> None:
        """Notify the readers of changes that this job has changed."""
        if self.changes is not None and self.changes.readers:
            self.changes.mark(self.job_id)

    def add(self, event: Event, size: int = 0, point: int = -1) -> None:
        """Add an event to the log, whose offset must be the log's end; ``point``: the yield that it is about."""
        if self.journal is not None:
            self.journal.event(event, point)
        elif self.log.unfinished is not None:
            self.note(event)
        self.log.append(event, size)  # last: a log that is full by it may fail the job, which adds further events

    def note(self, event: Event) -> None:
        """Note what an event means for the parameter sets that are kept for a retry."""
        sets = self.log.unfinished
        if sets is None:
            return
        if type(event) is FrameCompleted:
            sets.completed(event.frame[0])
        elif type(event) is Failure:
            sets.failed(event.frame, event.error)

    def change(self, status: JobStatus, reason: str | None = None) -> None:
        """Enter another state. One that ends the job ends the log, and the terminal ones never change."""
        if self.unwritten is not None:
            if status.ended:
                self._interrupt()
            return
        if self.decided.terminal:
            return
        self.decided = status
        self.reason = reason
        if status.ended:
            self.finished = wall_time()
        self.add(StatusChanged(self.log.end, status, reason))
        if self.journal is not None:
            self.journal.status(status, reason, self.finished)
        else:
            self._settle()

    def adopt(self, status: JobStatus, reason: str | None, finished: float | None) -> None:
        """Enter the state of a job that runs elsewhere; its event is in the log already."""
        if self.decided.terminal:
            return
        self.decided, self.reason = status, reason
        if status.ended:
            self.finished = finished
        self._settle()

    def written(self, end: int) -> None:
        """Publish the events before this offset, which the journal has written."""
        self.log.publish(end)
        if self.on_written is not None:
            self.on_written(end)
        if end >= self.log.end and self.status is not self.decided:
            self._settle()

    def stop_writing(self, error: DfmError, *, running: bool) -> None:
        """End the log after the last written event, because nothing more can be written.

        Events that were not written are never shown: the job is interrupted, as it is for readers of the file. Its
        readers and waiters get the error. If it is running, it is stopped, and :meth:`change` is called then.
        """
        self.unwritten, self.journal = error, None
        self.sets = self.done = None  # they may count what was not written
        dropped = [event for event in self.log.cut() if type(event) is Failure]
        counted = sum(event.place is None or isinstance(event.error, DecodingError) for event in dropped)
        self.error_count = max(0, self.error_count - counted)
        self.errors = self.errors[: self.error_count]
        if not running or self.decided.ended:
            self._interrupt()

    def _interrupt(self) -> None:
        self.decided, self.reason = JobStatus.INTERRUPTED, str(self.unwritten)
        self.finished = None
        self._settle()

    def _settle(self) -> None:
        self.status = self.decided
        self.changed()
        if self.status.ended:
            if self.activity is not None:
                self.activity.close()
            if self.status is JobStatus.FINISHED:
                self.log.unfinished = None
            self.log.close()
            if self._completion is not None:
                self._completion.set()
            self._notify_waiters()
        else:
            self.log.changed.notify()

    def follow(self, status: JobStatus, reason: str | None, end: int) -> None:
        """Take over the stored state of a job that does not run here."""
        self.log.publish(end)
        self.decided, self.reason = status, reason
        if self.status is not status:
            self.unwritten = None
            if self.status.ended:  # it was interrupted, and goes on
                self.log.reopen()
                self._not_completed()
            self._settle()

    def _not_completed(self) -> None:
        if self._completion is not None:
            self._completion.clear()

    def cut_off(self, error: DfmError) -> None:
        """End for readers and waiters with an error: the state of a job that does not run here is no longer known."""
        self._cut_off = error
        self.log.close()
        self._notify_waiters()

    async def load(self) -> None:
        """Read what :meth:`outcome` needs, if it was not read before."""
        loader, self.loader = self.loader, None
        if loader is not None:
            await loader()

    def reopen(self) -> None:
        """Continue an interrupted job."""
        self.log.reopen()
        self.open_elsewhere = False
        self.unwritten = None
        self.sets = self.done = None
        self._not_completed()
        self.status = self.decided = JobStatus.SUBMITTED
        self.reason = None
        self.finished = None
        self.changed()

    async def wait(self) -> None:
        """Wait for the end.

        Raises:
            ResultsUnread: the job cannot continue, because its log is full and has no reader.
        """
        while not self.status.ended and self._cut_off is None:
            if self.execution is not None and self.execution.waiting_for_reader:
                raise ResultsUnread(self.job_id, self.log.held, self.log.limit_reached)
            if self._ended_or_blocked is None:
                self._ended_or_blocked = Signal()
            await self._ended_or_blocked.wait()

    def _notify_waiters(self) -> None:
        if self._ended_or_blocked is not None:
            self._ended_or_blocked.notify()

    def stalled(self) -> None:
        """Notify the waiters that the job cannot continue until its log is read."""
        self._notify_waiters()

    def add_error(self, error: DfmError) -> None:
        """Count an error, and keep it if it is among the first."""
        if self.unwritten is not None:
            return
        self.error_count += 1
        self.changed()
        if len(self.errors) < ERRORS_KEPT:
            self.errors += (error,)

    def expire(self) -> JobSummary:
        """Return a summary, and drop the log as soon as it has no reader."""
        self.errors = self.errors[:1]
        self.log.expire()
        return JobSummary(
            spec=self.spec,
            plan=self.plan,
            status=self.decided,
            reason=self.reason,
            finished=self.finished,
            events=self.log.end,
            error_count=self.error_count,
            error=self.errors[0] if self.errors else None,
            sets=self.sets,
            done=self.done,
        )

    @classmethod
    def from_summary(cls, summary: JobSummary, backing: Backing | None = None) -> JobRecord:
        """Make the record of a job of which only a summary was kept; ``backing``: its stored log, if there is one."""
        record = cls(summary.spec, summary.plan, backing, summary.events)
        record.finished, record.error_count = summary.finished, summary.error_count
        record.sets, record.done, record.next_frame = summary.sets, summary.done, summary.sets or 0
        if summary.error is not None:
            record.errors = (summary.error,)
        record.follow(summary.status, summary.reason, summary.events)
        record.log.expire()
        return record

    def outcome(self) -> DfmError | None:
        """Return the error that waiting for this job raises, if it ended with one."""
        if self.unwritten is not None and self.status.ended:
            return self.unwritten
        if self.status is JobStatus.FAILED:
            return JobFailed(self.job_id, self.errors, self.error_count)
        if self.status is JobStatus.ABORTED:
            aborted = JobAborted(self.job_id, self.reason or "cancelled")
            aborted.__cause__ = self.cause
            return aborted
        if self.status is JobStatus.INTERRUPTED:
            return self.interruption(self.reason)
        return self.hidden

    def interruption(self, reason: str | None) -> JobInterrupted:
        """Return the error of a job that is interrupted, or about to be."""
        reason = reason or "the application that ran it has ended"
        return JobInterrupted(self.job_id, reason, resumable=self.log.backing is not None)

    def refusal(self, problem: str) -> DfmError:
        """Return the error for what the job no longer takes: that it is interrupted, or else the problem."""
        interrupted = self.decided is JobStatus.INTERRUPTED
        return self.interruption(self.reason) if interrupted else ParameterError([problem])

    @property
    def hidden(self) -> DfmError | None:
        """Why the state of the job is not known, if it is not."""
        return self.unwritten if self.status.ended else self._cut_off
