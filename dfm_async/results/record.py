"""What is known of one job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from dfm_async.errors import DecodingError, DfmError, JobAborted, JobFailed, JobInterrupted, ResultsUnread
from dfm_async.model.events import Event, Failure, StatusChanged
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.limits import ResultLimits
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.journal import Journal
from dfm_async.results.log import Backing, ResultLog
from dfm_async.results.watching import JobActivity, JobChanges

__all__ = ["ERRORS_KEPT", "JobRecord", "JobSummary"]

ERRORS_KEPT: Final = 100
"""How many errors of a job are kept; the others are counted."""


class JobSummary(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a job that ended long ago."""

    job_id: JobId
    plan: Plan
    status: JobStatus
    reason: str | None
    fingerprint: str | None
    created: float
    finished: float | None
    events: int
    error_count: int
    error: DfmError | None
    label: str | None = None
    sets: int | None = None
    done: int | None = None


class JobRecord:
    """Status, errors, times and the log of one job. Outlives the execution.

    A job with a journal has reached a state when that is written down: ``decided`` is ahead of ``status`` until then.
    """

    def __init__(
        self,
        job_id: JobId,
        number: JobNumber,
        plan: Plan,
        limits: ResultLimits,
        backing: Backing | None = None,
        start: int = 0,
    ) -> None:
        self.job_id = job_id
        self.number = number
        self.plan = plan
        self.log = ResultLog(job_id, limits, backing, start)
        self.journal: Journal | None = None
        self.status = JobStatus.SUBMITTED
        self.decided = JobStatus.SUBMITTED
        """The status that the job has reached, written down or not."""
        self.reason: str | None = None
        self.cause: BaseException | None = None
        self.errors: list[DfmError] = []
        self.error_count = 0
        self.completion_event = asyncio.Event()
        self.created = time.time()
        self.finished: float | None = None
        self.ended_at = 0.0
        """When it ended, by the loop's clock."""
        self.fingerprint: str | None = None
        """What was submitted, for jobs whose id the caller chose."""
        self.label: str | None = None
        """What the application noted about the job."""
        self.open_frames: dict[int, int] = {}
        """The parameter sets that are under way, and how many locations are not done with each."""
        self.next_frame = 0
        """The number that the next parameter set will get."""
        self.sets: int | None = None
        """How many parameter sets have come, once nothing of the job runs here."""
        self.done: int | None = None
        """How many of them are done."""
        self._waiters: set[asyncio.Future[None]] = set()
        self.loader: Callable[[], Awaitable[None]] | None = None
        """Reads the errors of a job that did not run here, when they are first wanted."""
        self._cut_off: DfmError | None = None
        self.unwritten: DfmError | None = None
        """Why the job can no longer be written, if so: it is interrupted then."""
        self.blocked: Callable[[], bool] | None = None
        """Tells whether the job cannot go on before somebody reads its log."""
        self.activity: JobActivity | None = None
        """What its operations do, if the job is watched."""
        self.changes: JobChanges | None = None
        """Who is told that something of the job has changed."""

    @property
    def runs_here(self) -> bool:
        """Whether this application runs the job, or ran it."""
        return self.number >= 0

    def changed(self) -> None:
        """Tells those who watch all jobs that something of this one has changed."""
        if self.changes is not None:
            self.changes.mark(self.job_id)

    def add(self, event: Event, size: int = 0, point: int = -1) -> None:
        """Adds an event to the log, whose offset must be the log's end; ``point``: the yield that it is about."""
        if self.journal is not None:
            self.journal.event(event, point)
        self.log.append(event, size)  # last: a log that is full by it may fail the job, which adds further events

    def change(self, status: JobStatus, reason: str | None = None) -> None:
        """Enters another state. One that ends the job ends the log, and the terminal ones never change."""
        if self.unwritten is not None:
            if status.ended:
                self._interrupt()
            return
        if self.decided.terminal:
            return
        self.decided = status
        self.reason = reason
        if status.ended:
            self.finished = time.time()
            self.ended_at = asyncio.get_running_loop().time()
        self.add(StatusChanged(self.log.end, status, reason))
        if self.journal is not None:
            self.journal.status(status, reason, self.finished)
        else:
            self._settle()

    def adopt(self, status: JobStatus, reason: str | None, finished: float | None) -> None:
        """Enters the state that a job has reached which runs elsewhere; its event stands in the log already."""
        if self.decided.terminal:
            return
        self.decided, self.reason = status, reason
        if status.ended:
            self.finished = finished
            self.ended_at = asyncio.get_running_loop().time()
        self._settle()

    def written(self, end: int) -> None:
        """With a journal: the events before this offset are written down."""
        self.log.publish(end)
        if end >= self.log.end and self.status is not self.decided:
            self._settle()

    def stop_writing(self, error: DfmError, *, running: bool) -> None:
        """End the log behind what is written, because nothing more can be written.

        What was not written is never shown: the job is interrupted, as it is for those who read the file. Its readers,
        and those who wait for it, get the error.

        Args:
            error: why.
            running: whether the job still has to be stopped; :meth:`change` is called when that is done.
        """
        self.unwritten, self.journal = error, None
        self.sets = self.done = None  # they may count what was not written
        dropped = [event for event in self.log.cut() if type(event) is Failure]
        counted = sum(event.place is None or isinstance(event.error, DecodingError) for event in dropped)
        self.error_count = max(0, self.error_count - counted)
        del self.errors[self.error_count :]
        if not running or self.decided.ended:
            self._interrupt()

    def _interrupt(self) -> None:
        self.decided, self.reason = JobStatus.INTERRUPTED, str(self.unwritten)
        self.finished = None
        self.ended_at = asyncio.get_running_loop().time()
        self._settle()

    def _settle(self) -> None:
        self.status = self.decided
        self.changed()
        if self.status.ended:
            if self.activity is not None:
                self.activity.close()
            self.log.close()
            self.completion_event.set()
            self._tell_waiters()
        else:
            self.log.wake()

    def _tell_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def follow(self, status: JobStatus, reason: str | None, end: int) -> None:
        """Takes over what is written down of a job that does not run here."""
        self.log.publish(end)
        self.decided, self.reason = status, reason
        if self.status is not status:
            self.unwritten = None
            if self.status.ended:  # it was interrupted, and goes on
                self.log.reopen()
                self.completion_event.clear()
            self._settle()

    def cut_off(self, error: DfmError) -> None:
        """What happens to a job that does not run here can no longer be known: tells whoever reads or waits."""
        self._cut_off = error
        self.log.close()
        self._tell_waiters()

    async def load(self) -> None:
        """Reads what :meth:`outcome` needs, if it was not read before."""
        loader, self.loader = self.loader, None
        if loader is not None:
            await loader()

    def reopen(self) -> None:
        """An interrupted job goes on."""
        self.log.reopen()
        self.unwritten = None
        self.sets = self.done = None
        self.completion_event.clear()
        self.status = self.decided = JobStatus.SUBMITTED
        self.reason = None
        self.finished = None
        self.changed()

    async def wait(self) -> None:
        """Waits for the end.

        Raises:
            ResultsUnread: the job cannot go on, because its log is full and nobody reads it.
        """
        if self.status.ended or self._cut_off is not None:
            return
        if self.blocked is not None and self.blocked():
            raise ResultsUnread(self.job_id, self.log.held)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def stalled(self) -> None:
        """The job cannot go on before somebody reads its log: tells those who wait for its end."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ResultsUnread(self.job_id, self.log.held))

    def add_error(self, error: DfmError) -> None:
        """Counts an error, and keeps it if it is among the first."""
        if self.unwritten is not None:
            return
        self.error_count += 1
        self.changed()
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(error)

    def expire(self) -> JobSummary:
        """Keeps only a summary: the log goes, unless somebody reads it."""
        del self.errors[1:]
        self.log.expire()
        return JobSummary(
            self.job_id,
            self.plan,
            self.decided,
            self.reason,
            self.fingerprint,
            self.created,
            self.finished,
            self.log.end,
            self.error_count,
            self.errors[0] if self.errors else None,
            self.label,
            self.sets,
            self.done,
        )

    @classmethod
    def from_summary(cls, summary: JobSummary, limits: ResultLimits, backing: Backing | None = None) -> JobRecord:
        """Makes the record of a job of which only a summary was kept; ``backing``: where its log stands, if it does."""
        record = cls(summary.job_id, JobNumber(-1), summary.plan, limits, backing, summary.events)
        record.created, record.finished, record.fingerprint = summary.created, summary.finished, summary.fingerprint
        record.error_count, record.label = summary.error_count, summary.label
        record.sets, record.done, record.next_frame = summary.sets, summary.done, summary.sets or 0
        if summary.error is not None:
            record.errors.append(summary.error)
        record.follow(summary.status, summary.reason, summary.events)
        record.log.expire()
        return record

    def outcome(self) -> DfmError | None:
        """The error that waiting for this job raises, if it ended with one."""
        if self.unwritten is not None and self.status.ended:
            return self.unwritten
        if self.status is JobStatus.FAILED:
            return JobFailed(self.job_id, self.errors, self.error_count)
        if self.status is JobStatus.ABORTED:
            aborted = JobAborted(self.job_id, self.reason or "cancelled")
            aborted.__cause__ = self.cause
            return aborted
        if self.status is JobStatus.INTERRUPTED:
            return JobInterrupted(self.job_id, self.reason or "the application that ran it has ended")
        return self.hidden

    @property
    def hidden(self) -> DfmError | None:
        """Why it cannot be known what happens to the job, if it cannot."""
        return self.unwritten if self.status.ended else self._cut_off
