"""How many jobs of one principal are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.answers import Refusal
from dfm_async.web.limits import WebLimits

__all__ = ["JobQuota"]

_PRINCIPALS: Final = 1000
"""From how many principals on those are forgotten that have no job under way."""


class JobQuota:
    """Counts the jobs of each principal that were submitted here and have not ended.

    Those that have ended are found out when the next one is wanted, so that nobody has to wait for their end.
    """

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._jobs: dict[str, dict[str, Job]] = {}
        self._entering: Counter[str] = Counter()
        self._entering_idle: Counter[str] = Counter()

    @contextmanager
    def room(self, principal: Principal, *, idle: bool = False, slots: int | None = None) -> Iterator[None]:
        """Keeps room for one job while it is submitted.

        Args:
            principal: whose job it is.
            idle: whether it may wait for inputs without any work.
            slots: how many jobs can run at the same time, if that is few; idle ones take half of them at most.

        Raises:
            Refusal: there is none.
        """
        held = self._running(principal.id) + self._entering[principal.id]
        if held >= self._limits.jobs_per_principal:
            message = f"{held} of your jobs have not ended, as many as you may have"
            raise Refusal(429, "jobs", message, retry_after=self._limits.retry)
        if idle:
            infos = [job.info() for job in self._jobs.get(principal.id, {}).values()]
            waiting = sum(info.accepts and (info.sets or 0) <= (info.done or 0) for info in infos)
            waiting += self._entering_idle[principal.id]
            most = self._limits.idle_jobs_per_principal
            if waiting >= (most if slots is None else min(most, max(1, slots // 2))):
                message = f"{waiting} of your jobs wait for inputs and have no work: send them some, or finish them"
                raise Refusal(429, "idle", message, retry_after=self._limits.retry)
        counters = (self._entering, self._entering_idle) if idle else (self._entering,)
        for counter in counters:
            counter[principal.id] += 1
        try:
            yield
        finally:
            for counter in counters:
                counter[principal.id] -= 1
                if not counter[principal.id]:
                    del counter[principal.id]

    def add(self, principal: Principal, job: Job) -> None:
        """Counts a job that was submitted."""
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
