"""Requests with a body that are under way: how many there may be, and how much they may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dfm_async.web.access import Principal
from dfm_async.web.answers import Refusal
from dfm_async.web.limits import WebLimits

__all__ = ["Upload", "Uploads"]


class Upload:
    """One request with a body, from its first byte until the library has taken what it brings."""

    def __init__(self, uploads: Uploads, principal: Principal) -> None:
        self._uploads = uploads
        self._who = principal.id
        self._bytes = 0
        self._open = True
        uploads.enter(self._who)

    def hold(self, size: int) -> None:
        """Counts bytes of the body.

        Raises:
            Refusal: the bodies of the principal, or those of all together, hold too much.
        """
        self._uploads.hold(self._who, size)
        self._bytes += size

    def release(self) -> None:
        """Says that nothing of the body is held any more. Safe to call more than once."""
        if self._open:
            self._open = False
            self._uploads.leave(self._who, self._bytes)


class Uploads:
    """Counts the requests with a body that are under way, and the bytes that they hold."""

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._requests: Counter[str] = Counter()
        self._inputs: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        # One principal cannot keep others from sending; a single body always passes.
        self._share = max(limits.upload_bytes // 4, limits.body_bytes)
        self.held = 0
        """How many bytes of bodies are held."""

    @contextmanager
    def upload(self, principal: Principal) -> Iterator[Upload]:
        """Admits a request with a body.

        Raises:
            Refusal: the principal has too many under way.
        """
        found = Upload(self, principal)
        try:
            yield found
        finally:
            found.release()

    @contextmanager
    def inputs(self, job_id: str) -> Iterator[None]:
        """Admits a request that brings parameter sets for a job, and may have to wait until there is room for them.

        Raises:
            Refusal: too many of them wait.
        """
        self.wait_for_job(job_id)
        try:
            yield
        finally:
            _less(self._inputs, job_id)

    def waiting(self, job_id: str) -> int:
        """How many requests bring parameter sets for a job."""
        return self._inputs[job_id]

    def wait_for_job(self, job_id: str) -> None:
        """A request comes to a job."""
        if self._inputs[job_id] >= self._limits.inputs_per_job:
            message = f"{self._inputs[job_id]} requests wait already until the job has room for their parameter sets"
            raise Refusal(429, "inputs", message, retry_after=self._limits.retry)
        self._inputs[job_id] += 1

    def enter(self, who: str) -> None:
        """A request begins."""
        if self._requests[who] >= self._limits.uploads_per_principal:
            message = f"you have {self._requests[who]} requests with a body under way, as many as you may"
            raise Refusal(429, "uploads", message, retry_after=self._limits.retry)
        self._requests[who] += 1

    def hold(self, who: str, size: int) -> None:
        """Count bytes that have come."""
        if self._held[who] + size > self._share:
            message = f"your requests hold more than {self._share} bytes at the same time"
            raise Refusal(429, "uploads", message, retry_after=self._limits.retry)
        if self.held + size > self._limits.upload_bytes:
            raise Refusal(503, "uploads", "too much is sent at the same time", retry_after=self._limits.retry)
        self._held[who] += size
        self.held += size

    def leave(self, who: str, size: int) -> None:
        """Count a request that has ended, or whose body is not needed any more."""
        self.held -= size
        _less(self._held, who, size)
        _less(self._requests, who)


def _less(counter: Counter[str], key: str, by: int = 1) -> None:
    counter[key] -= by
    if not counter[key]:
        del counter[key]
