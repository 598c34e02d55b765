"""What happens to all jobs and workers of a session, as iterators."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from dfm_async.model.info import JobInfo
from dfm_async.model.stats import SiteStats
from dfm_async.results.watching import ChangeReader
from dfm_async.session.job import record_info
from dfm_async.targets.base import Target
from dfm_async.targets.jobs import JobTable

__all__ = ["JobWatch", "SiteWatch"]


class JobWatch:
    """Looks at the jobs that have changed. A closable iterator; made by :meth:`~dfm_async.Session.changes`."""

    def __init__(self, jobs: JobTable[Any], reader: ChangeReader, known: Iterable[JobInfo]) -> None:
        self._jobs = jobs
        self._reader = reader
        self._known = deque(known)
        self._changed: deque[str] = deque()

    def __aiter__(self) -> JobWatch:
        return self

    async def __anext__(self) -> JobInfo:
        if self._known:
            return self._known.popleft()
        while True:
            while self._changed:
                job_id = self._changed.popleft()
                found = self._jobs.find(job_id)
                if found is not None:  # else it was forgotten in the meantime
                    return record_info(found, self._jobs.coordinator(job_id))
            self._changed.extend(await self._reader.next())
            if not self._changed:
                raise StopAsyncIteration

    async def __aenter__(self) -> JobWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Looks no more. Whoever waits for the next item gets the end."""
        self._known.clear()
        self._changed.clear()
        self._reader.close()


class SiteWatch:
    """Looks at the workers of all sites when they have changed. A closable iterator; made by :meth:`Session.health`."""

    def __init__(self, target: Target, interval: float) -> None:
        self._target = target
        self._bell = target.worker_bells.hang(interval)
        self._seen: dict[str, SiteStats] | None = None

    def __aiter__(self) -> SiteWatch:
        return self

    async def __anext__(self) -> dict[str, SiteStats]:
        while True:
            await self._bell.wait()
            if self._bell.closed:
                raise StopAsyncIteration
            sites = self._target.stats().sites
            if sites != self._seen:
                self._seen = sites
                return sites

    async def __aenter__(self) -> SiteWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Looks no more. Whoever waits for the next item gets the end."""
        self._target.worker_bells.take_down(self._bell)
        self._bell.close()
