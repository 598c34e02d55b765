"""What clients may have at most: limits, and counts of the jobs and uploads of each principal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dfm_async.model.checks import Options
from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.responses import Refusal

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


class JobQuota:
    """Counts the jobs of each principal that were submitted here and have not ended.

    Jobs that have ended are discovered when the next one is submitted, so that no task has to wait for their ends.
    """

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._jobs: dict[str, dict[str, Job]] = {}
        self._entering: Counter[str] = Counter()
        self._entering_idle: Counter[str] = Counter()

    @contextmanager
    def reserve(self, principal: Principal, *, idle: bool = False, slots: int | None = None) -> Iterator[None]:
        """Reserve room for one job while it is submitted; refuse a principal that has too many.

        Args:
            principal: whose job it is.
            idle: whether it may wait for inputs without any work.
            slots: how many jobs can run at the same time, if that is limited; idle ones take half of them at most.
        """
        held = self._running(principal.id) + self._entering[principal.id]
        if held >= self._limits.jobs_per_principal:
            raise Refusal(429, "jobs", f"{held} of your jobs have not ended, as many as you may have")
        if idle:
            infos = [job.info() for job in self._jobs.get(principal.id, {}).values()]
            waiting = sum(info.accepts and (info.sets or 0) <= (info.done or 0) for info in infos)
            waiting += self._entering_idle[principal.id]
            most = self._limits.idle_jobs_per_principal
            if waiting >= (most if slots is None else min(most, max(1, slots // 2))):
                message = f"{waiting} of your jobs wait for inputs and have no work: send them some, or finish them"
                raise Refusal(429, "idle", message)
        with counted(principal.id, self._entering, *([self._entering_idle] if idle else [])):
            yield

    def add(self, principal: Principal, job: Job) -> None:
        """Count a job that was submitted."""
        self._jobs.setdefault(principal.id, {})[job.job_id] = job
        if len(self._jobs) > _PRINCIPALS:  # principals that came once must not be remembered for ever
            for who in list(self._jobs):
                self._running(who)

    def _running(self, who: str) -> int:
        jobs = {job_id: job for job_id, job in self._jobs.get(who, {}).items() if not job.status.ended}
        if jobs:
            self._jobs[who] = jobs
        else:
            self._jobs.pop(who, None)
        return len(jobs)


class Upload:
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
    def upload(self, principal: Principal) -> Iterator[Upload]:
        """Admit a request with a body; refuse a principal that has too many in flight."""
        held = self._requests[principal.id]
        if held >= self._limits.uploads_per_principal:
            raise Refusal(429, "uploads", f"{held} of your requests with a body are in flight, as many as you may have")
        self._requests[principal.id] += 1
        found = Upload(self, principal)
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
