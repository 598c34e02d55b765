"""Errors of jobs, sessions and stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dfm_async.errors.federations import WorkerLost
from dfm_async.errors.pipelines import ParameterError
from dfm_async.errors.root import DfmError, declared, public

__all__ = [
    "EventsFull",
    "JobAborted",
    "JobExists",
    "JobFailed",
    "JobInterrupted",
    "JobNotFound",
    "JobOwned",
    "NotEnoughReplies",
    "QueueFull",
    "ResultsExpired",
    "ResultsUnread",
    "ServiceError",
    "SessionClosed",
    "StoreError",
]


_NAMED: Final = 3
"""How many operations of a lost worker are named."""


@public
class EventsFull(ParameterError):
    """A job takes no further event for now: too many were not taken, or its log is full. Nothing was stored."""


@public
class JobExists(ParameterError):
    """A job with this id already exists, with another pipeline, other parameters, or other options."""

    def __init__(self, job_id: str) -> None:
        super().__init__([f"a job {job_id!r} already exists with different content; choose another id"])
        self.args = (job_id,)
        self.job_id = job_id


def _summary(message: str) -> str:
    """Return the first line of a message; with the first item of the list that it announces."""
    line, *rest = message.split("\n", 2)
    return f"{line} {rest[0].strip().removeprefix('- ')}" if rest and line.endswith(":") else line


@declared()
class JobFailed(DfmError):
    """A job ended with errors. ``errors`` contains the first of them, ``count`` is the number of all errors."""

    job_id: str
    errors: Sequence[DfmError]
    count: int

    def __str__(self) -> str:
        first = _summary(str(self.errors[0])) if self.errors else "no details"
        return f"job {self.job_id} failed with {self.count} error{'s' * (self.count != 1)}; the first: {first}"

    def __post_init__(self) -> None:
        if len(self.errors) == 1:
            self.__cause__ = self.errors[0]
        elif self.errors:
            self.__cause__ = ExceptionGroup(f"{self.count} errors in job {self.job_id}", list(self.errors))


@declared()
class NotEnoughReplies(DfmError):
    """Fewer calls of a ``gather`` or of ``session.each`` succeeded than needed. ``failures`` are the others."""

    replies: int
    at_least: int
    failures: Sequence[str]

    def __str__(self) -> str:
        failed = "".join(f"\n  - {failure}" for failure in self.failures)
        return f"{self.replies} of {self.replies + len(self.failures)} calls succeeded, {self.at_least} needed:{failed}"


@declared("job {job_id} was aborted: {reason}{_advice}")
class JobAborted(DfmError):
    """A job was cancelled, exceeded its deadline, or lost its workers."""

    job_id: str
    reason: str

    @property
    def _advice(self) -> str:
        lost = self.__cause__
        if not isinstance(lost, WorkerLost) or not lost.operations:
            return ""
        names = ", ".join(map(repr, lost.operations[:_NAMED])) + ", ..." * (len(lost.operations) > _NAMED)
        return f"\nThe worker ran {names}. retry=RetryPolicy(on_worker_lost=...) runs lost calls again"


@declared("job {job_id} was interrupted: {reason}{_advice}")
class JobInterrupted(DfmError):
    """The application that ran a durable job ended before the job; not ``resumable`` if the job runs elsewhere."""

    job_id: str
    reason: str
    resumable: bool = True

    @property
    def _advice(self) -> str:
        return ". session.resume(job_id) continues it, job.cancel() aborts it" if self.resumable else ""


@declared("no job {job_id!r} is known to {where}")
class JobNotFound(DfmError):
    """No job with this id is known to the session, or to the service of a client."""

    job_id: str
    where: str = "this session"


@declared(
    "the limit of {waiting:,} waiting jobs{_kind} is reached. Try again later, raise LocalOptions(queue_limit=...)"
    "{_advice}"
)
class QueueFull(DfmError):
    """The queue is full, and ``LocalOptions(queue_overflow="fail")`` was chosen.

    With ``later``, as many jobs as the queue may have wait for their ``start_at``.
    """

    waiting: int
    later: bool = False

    @property
    def _kind(self) -> str:
        return " with start_at" if self.later else ""

    @property
    def _advice(self) -> str:
        return "" if self.later else ', or let execute wait with queue_overflow="block"'


@declared(
    "job {job_id} belongs to process {pid} on {host}, which is alive. Steer it from here, or end that process first"
)
class JobOwned(DfmError):
    """A stored job belongs to another process, which is running."""

    job_id: str
    pid: int
    host: str


@declared(
    "job {job_id}: event {wanted} is no longer available; the log begins at {first}. "
    "Read from there with after={_before}. "
    "ResultLimits and LocalOptions(keep_finished=..., keep_finished_for=..., keep_finished_bytes=...) set how much is "
    "kept; a store keeps everything"
)
class ResultsExpired(DfmError):
    """A reader requested events that are no longer in the job's log."""

    job_id: str
    wanted: int
    first: int

    @property
    def _before(self) -> int:
        return self.first - 1


@declared(
    "job {job_id} is blocked: its log holds {held:,} unread events and has no reader{_limit}. "
    "Read the results (async for result in job), or raise ResultLimits"
)
class ResultsUnread(DfmError):
    """A job whose end is awaited cannot continue, because its log is full and has no reader.

    ``held`` is the number of events in the log; ``limit`` is the limit that it has reached, as in ``ResultLimits``.
    """

    job_id: str
    held: int
    limit: str = ""

    @property
    def _limit(self) -> str:
        return f"; its limit is {self.limit}" if self.limit else ""


@declared("{detail}")
class SessionClosed(DfmError):
    """The session is not connected, or was closed."""

    detail: str


@declared("store {path}: {problem}. {advice}")
class StoreError(DfmError):
    """A store of jobs cannot be opened, read or written; ``advice`` says what to do about it."""

    path: str
    problem: str
    advice: str


@declared("service {url}: {problem}{_answer}")
class ServiceError(DfmError):
    """A web service cannot be reached (``status`` is None), rejects a request, or returns an invalid response.

    ``code`` is the error code of the service.
    """

    url: str
    problem: str
    status: int | None = None
    code: str = ""

    @property
    def _answer(self) -> str:
        return f" ({self.status} {self.code})" if self.code else ""
