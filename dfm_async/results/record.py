"""What is known of one job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from dfm_async.errors import DfmError, JobAborted, JobFailed, ResultsUnread
from dfm_async.model.events import Event, StatusChanged
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.limits import ResultLimits
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.log import ResultLog
from dfm_async.wire import messages as msg

__all__ = ["JobRecord"]

_ERRORS_KEPT = 100


class JobRecord:
    """Status, errors, times and the log of one job. Outlives the execution."""

    def __init__(self, job_id: JobId, number: JobNumber, plan: Plan, limits: ResultLimits) -> None:
        self.job_id = job_id
        self.number = number
        self.plan = plan
        self.log = ResultLog(job_id, limits)
        self.status = JobStatus.SUBMITTED
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
        self.open_frames: dict[int, int] = {}
        """The parameter sets that are under way, and how many locations are not done with each."""
        self.next_frame = 0
        """The number that the next parameter set will get."""
        self._waiters: set[asyncio.Future[None]] = set()
        self.blocked: Callable[[], bool] | None = None
        """Tells whether the job cannot go on before somebody reads its log."""

    def add(self, event: Event, size: int = 0) -> None:
        """Adds an event to the log, whose offset must be the log's end."""
        self.log.append(event, size)

    def add_results(self, events: Sequence[Event], message: msg.Results, whole: bool) -> None:
        """Adds results as they came in a message; ``whole``: all that it held."""
        self.log.extend(events, len(message.payload) // max(1, len(events)))

    def change(self, status: JobStatus, reason: str | None = None) -> None:
        """Enters another state. A terminal one ends the log and never changes."""
        if self.status.terminal:
            return
        self.status = status
        self.reason = reason
        self.add(StatusChanged(self.log.end, status, reason))
        if status.terminal:
            self.finished = time.time()
            self.ended_at = asyncio.get_running_loop().time()
            self.log.close()
            self.completion_event.set()
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
        else:
            self.log.wake()

    async def wait(self) -> None:
        """Waits for the end.

        Raises:
            ResultsUnread: the job cannot go on, because its log is full and nobody reads it.
        """
        if self.status.terminal:
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
        self.error_count += 1
        if len(self.errors) < _ERRORS_KEPT:
            self.errors.append(error)

    def expire(self) -> None:
        """Keeps only a summary: the log goes, unless somebody reads it."""
        del self.errors[1:]
        self.log.expire()

    def outcome(self) -> DfmError | None:
        """The error that waiting for this job raises, if it ended with one."""
        if self.status is JobStatus.FAILED:
            return JobFailed(self.job_id, self.errors, self.error_count)
        if self.status is JobStatus.ABORTED:
            aborted = JobAborted(self.job_id, self.reason or "cancelled")
            aborted.__cause__ = self.cause
            return aborted
        return None
