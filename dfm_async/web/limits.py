"""What clients may have at most: limits, and counts of the jobs and uploads of each principal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from dfm_async.model.checks import Options
from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.responses import Refusal

_Jobs: TypeAlias = dict[str, dict[str, Job]]
"""The jobs of each principal, by their ids."""

_PRINCIPALS: Final = 1000
"""The number of principals above which those without running jobs are forgotten."""


class WebLimits(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a service. All defaults are good ones."""

    body_bytes: int = 1024 * 1024
    """The most bytes that the body of a request may have."""
    body_seconds: float = 30.0
    """The most seconds that the body of a request may take to arrive."""
    upload_bytes: int = 64 * 1024 * 1024
    """The most bytes of bodies that are held at the same time, of all clients together."""
    uploads_per_principal: int = 200
    """The most requests with a body that one principal may have in flight."""
    inputs_per_job: int = 20
    """The most requests that may wait until a job has room for their parameter sets."""
    json_depth: int = 64
    """How deeply lists and objects may be nested in a request."""
    jobs_per_principal: int = 100
    """The most jobs of one principal that have not ended."""
    idle_jobs_per_principal: int = 20
    """The most jobs of one principal that wait for inputs without any work."""
    streams_per_principal: int = 500
    """The most streams that one principal may have open."""
    streams: int = 1000
    """The most streams that may be open in all."""
    page_size: int = 1000
    """The most jobs or records that one page may have."""
    stall: float = 30.0
    """The number of seconds after which the stream of a client that reads nothing ends."""
    heartbeat: float = 15.0
    """The number of seconds without an event after which a stream sends a heartbeat."""
    retry: float = 2.0
    """The number of seconds after which a client is asked to reconnect or retry."""
    record_bytes: int = 4 * 1024 * 1024
    """The most bytes of JSON that one record may have; of larger values only a summary is sent."""
    array_items: int = 10_000
    """The most elements of an array that are sent as lists; of larger ones only a summary is sent."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a positive number, not {value!r}")


@contextmanager
def counted(key: str, *counters: Counter[str]) -> Iterator[None]:
    """Count a key in some counters while the context is open."""
    for counter in counters:
        counter[key] += 1
    try:
        yield
    finally:
        for counter in counters:
            _subtract(counter, key)


def _subtract(counter: Counter[str], key: str, number: int = 1) -> None:
    counter[key] -= number
    if not counter[key]:
        del counter[key]


def has_share(own: int, total: int, most: int) -> bool:
    """Return whether a principal may have one more of what all principals together may have ``most`` of.

    The last tenth is for principals that have few: one or two with many must not keep everybody else out.
    """
    rest = most // 10
    return total < most and (total < most - rest or own < max(1, rest // 10))


class JobQuota:
    """Counts the jobs of each principal that were submitted here and have not ended.

    Jobs that have ended are discovered when the next one is submitted, so that no task has to wait for their ends.
    """

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._jobs: _Jobs = {}
        self._may_wait: _Jobs = {}
        """Those that can hold a slot without any work."""
        self._entering: Counter[str] = Counter()
        self._entering_idle: Counter[str] = Counter()
        self._entering_waits: Counter[str] = Counter()

    @contextmanager
    def reserve(self, principal: Principal, slots: int, *, idle: bool = False, waits: bool = False) -> Iterator[None]:
        """Reserve room for one job while it is submitted; refuse a principal that has too many.

        Jobs that can hold a slot without any work get half of the slots at most. They count from their submission to
        their end, whether they wait at the moment or not: all of them may wait later.

        Args:
            principal: whose job it is.
            slots: how many jobs can run at the same time.
            idle: whether it may wait for inputs without any work.
            waits: whether its pipeline waits for events or times.
        """
        who = principal.id
        held = _running(self._jobs, who) + self._entering[who]
        if held >= self._limits.jobs_per_principal:
            raise Refusal(429, "jobs", f"{held} of your jobs have not ended, as many as you may have")
        entering = [self._entering]
        if idle:
            self._check_idle(who)
            entering.append(self._entering_idle)
        if idle or waits:
            self._check_waits(who, slots)
            entering.append(self._entering_waits)
        with counted(who, *entering):
            yield

    def _check_idle(self, who: str) -> None:
        infos = [job.info() for job in self._jobs.get(who, {}).values()]
        waiting = sum(info.accepts and (info.sets or 0) <= (info.done or 0) for info in infos)
        waiting += self._entering_idle[who]
        if waiting >= self._limits.idle_jobs_per_principal:
            message = f"{waiting} of your jobs wait for inputs and have no work: send them some, or finish them"
            raise Refusal(429, "idle", message)

    def _check_waits(self, who: str, slots: int) -> None:
        own = _running(self._may_wait, who) + self._entering_waits[who]
        total = sum(_running(self._may_wait, other) for other in list(self._may_wait)) + self._entering_waits.total()
        if not has_share(own, total, max(1, slots // 2)):
            message = f"{total} jobs that are open, or wait for events or times, have not ended"
            raise Refusal(429, "idle", f"{message}: they may take half of the {slots:,} slots for jobs")

    def add(self, principal: Principal, job: Job) -> None:
        """Count a job that was submitted."""
        self._jobs.setdefault(principal.id, {})[job.job_id] = job
        if job.plan.waits or job.info().accepts:
            self._may_wait.setdefault(principal.id, {})[job.job_id] = job
        if len(self._jobs) > _PRINCIPALS:  # principals that came once must not be remembered for ever
            for jobs in (self._jobs, self._may_wait):
                for who in list(jobs):
                    _running(jobs, who)


def _running(jobs: _Jobs, who: str) -> int:
    """Return how many jobs of a principal have not ended, and forget the others."""
    found = {job_id: job for job_id, job in jobs.get(who, {}).items() if not job.status.ended}
    if found:
        jobs[who] = found
    else:
        jobs.pop(who, None)
    return len(found)


class BodyUpload:
    """One request with a body, from its first byte until the session has taken its content."""

    def __init__(self, uploads: Uploads, principal: Principal) -> None:
        self._uploads = uploads
        self._who = principal.id
        self._bytes = 0
        self._open = True

    def hold(self, size: int) -> None:
        """Count bytes of the body; refuse them if the principal, or all together, hold too much."""
        self._uploads.hold(self._who, size)
        self._bytes += size

    def release(self) -> None:
        """Count nothing of the body any longer. Safe to call more than once."""
        if self._open:
            self._open = False
            self._uploads.release(self._who, self._bytes)


class Uploads:
    """Counts the requests with a body that are in flight, and the bytes that they hold."""

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._requests: Counter[str] = Counter()
        self._inputs: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        # One principal cannot keep others from sending; a single body always passes.
        self._share = max(limits.upload_bytes // 4, limits.body_bytes)
        self.held = 0
        """The number of bytes of bodies that are held."""

    @contextmanager
    def upload(self, principal: Principal) -> Iterator[BodyUpload]:
        """Admit a request with a body; refuse a principal that has too many in flight."""
        held = self._requests[principal.id]
        if held >= self._limits.uploads_per_principal:
            raise Refusal(429, "uploads", f"{held} of your requests with a body are in flight, as many as you may have")
        self._requests[principal.id] += 1
        found = BodyUpload(self, principal)
        try:
            yield found
        finally:
            found.release()

    @contextmanager
    def inputs(self, job_id: str) -> Iterator[None]:
        """Admit parameter sets for a job, which may have to wait for room; refuse them if too many requests wait."""
        waiting = self._inputs[job_id]
        if waiting >= self._limits.inputs_per_job:
            raise Refusal(429, "inputs", f"{waiting} requests already wait until the job has room for their inputs")
        with counted(job_id, self._inputs):
            yield

    def waiting(self, job_id: str) -> int:
        """Return the number of requests with parameter sets for a job."""
        return self._inputs[job_id]

    def hold(self, who: str, size: int) -> None:
        """Count bytes that have arrived."""
        if self._held[who] + size > self._share:
            raise Refusal(429, "uploads", f"your requests hold more than {self._share} bytes at the same time")
        if self.held + size > self._limits.upload_bytes:
            raise Refusal(503, "uploads", "too many bytes are sent at the same time")
        self._held[who] += size
        self.held += size

    def release(self, who: str, size: int) -> None:
        """Count a request that has ended, or whose body is not needed any longer."""
        self.held -= size
        _subtract(self._held, who, size)
        _subtract(self._requests, who)
