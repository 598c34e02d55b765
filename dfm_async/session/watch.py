"""The state of jobs and workers, and iterators over its changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from dfm_async.base.signals import check_interval
from dfm_async.engine.job_table import JobControl, JobTable
from dfm_async.engine.target import Target
from dfm_async.federation.federation import Federation
from dfm_async.model.info import JobInfo
from dfm_async.model.stats import SiteStats
from dfm_async.model.status import JobStatus
from dfm_async.model.waiting import JobWait, explain_waiting
from dfm_async.planning.prepare import calls_of
from dfm_async.results.record import JobRecord, JobSummary
from dfm_async.results.watching import ChangeReader
from dfm_async.session.stream import ClosableIterator


class InfoWatch:
    """Yield the state of one job whenever it has changed. An iterator that needs no closing; ends with the job."""

    def __init__(self, info: Callable[[], JobInfo], record: JobRecord, interval: float) -> None:
        self._info = info
        self._record = record
        self._interval = check_interval(interval)
        self._last: JobInfo | None = None
        self._next = 0.0
        self._ended = False

    def __aiter__(self) -> InfoWatch:
        return self

    async def __anext__(self) -> JobInfo:
        if self._ended:
            raise StopAsyncIteration
        record = self._record
        while not record.log.closed and self._last == self._info():
            await record.log.changed.wait()
        if not record.log.closed:
            with contextlib.suppress(TimeoutError):  # changes meanwhile are coalesced; the end is reported at once
                async with asyncio.timeout_at(self._next):
                    await record.completion_event.wait()
        self._next = asyncio.get_running_loop().time() + self._interval
        self._ended = record.log.closed
        self._last = self._info()
        if self._ended and not record.status.ended and record.hidden is not None:
            raise record.hidden
        return self._last


class JobWatch(ClosableIterator):
    """Yield the states of jobs that have changed. A closable iterator; see :meth:`~dfm_async.Session.changes`."""

    def __init__(self, jobs: JobTable[Any], reader: ChangeReader, known: Iterable[JobInfo]) -> None:
        self._jobs = jobs
        self._reader = reader
        self._known = deque(known)
        self._changed: deque[str] = deque()

    async def __anext__(self) -> JobInfo:
        if self._known:
            return self._known.popleft()
        while True:
            while self._changed:
                job_id = self._changed.popleft()
                found = self._jobs.find(job_id)
                if found is not None:  # else it was dropped in the meantime
                    return job_info(found, self._jobs.coordinator(job_id))
            self._changed.extend(await self._reader.next())
            if not self._changed:
                raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop watching. A task that waits for the next item gets the end."""
        self._known.clear()
        self._changed.clear()
        self._reader.close()


class SiteWatch(ClosableIterator):
    """Yield the state of all workers when it has changed. A closable iterator; see :meth:`dfm_async.Session.health`."""

    def __init__(self, target: Target, interval: float) -> None:
        self._target = target
        self._signal = target.worker_changes.subscribe(interval)
        self._seen: dict[str, SiteStats] | None = None

    async def __anext__(self) -> dict[str, SiteStats]:
        while True:
            await self._signal.wait()
            if self._signal.closed:
                raise StopAsyncIteration
            sites = self._target.stats().sites
            if sites != self._seen:
                self._seen = sites
                return sites

    async def aclose(self) -> None:
        """Stop watching. A task that waits for the next item gets the end."""
        self._target.worker_changes.unsubscribe(self._signal)
        self._signal.close()


class Waits:
    """Explains what jobs wait for. The state of the sites is looked up once, so it is for one listing of jobs."""

    def __init__(self, target: Target, federation: Federation) -> None:
        self._target = target
        self._federation = federation
        self._sites: dict[str, SiteStats] | None = None

    def explain(self, coordinator: JobControl, found: JobWait) -> str | None:
        """Return what a job waits for; None if nothing is known. ``found`` is what the engine knows about it."""
        why = explain_waiting(found)
        if why is not None:
            return why
        if self._sites is None:
            self._sites = {name: site for name, site in self._target.stats().sites.items() if _holds_up(site)}
        if not self._sites:
            return None
        calls = calls_of(coordinator.plan, self._federation)
        needed = [
            (site, call.operation, None if adapter is None else adapter.limits) for site, _, call, adapter in calls
        ]
        return explain_waiting(found, needed, self._sites)


def _holds_up(site: SiteStats) -> bool:
    return not site.ready or any(limit.waiting for limit in site.limits)


def job_info(
    found: JobRecord | JobSummary,
    coordinator: JobControl | None = None,
    waits: Waits | None = None,
    *,
    stored: bool = False,
) -> JobInfo:
    """Return the state of a job.

    Args:
        found: the job, or what is left of one that ended long ago.
        coordinator: runs it, if it runs here.
        waits: explains what it waits for at its sites.
        stored: whether logs of jobs of which only a summary is left are in a store.
    """
    sets, done = found.sets, found.done
    if isinstance(found, JobSummary):
        first, events = 0 if stored else found.events, found.events
    else:
        first, events = found.log.first if found.log.backing is None else 0, found.log.readable
        if sets is None and found.unwritten is None:
            sets = found.next_frame or None
            done = sets if found.status is JobStatus.FINISHED else None
            if found.runs_here and sets is not None:
                done = sets - len(found.open_frames)
    accepts = isinstance(found, JobRecord) and found.open_elsewhere
    if coordinator is not None:
        accepts = coordinator.accepts
        sets, done = coordinator.frames.added, coordinator.frames.opened - len(coordinator.frames.open)
    waiting, why = None if coordinator is None else coordinator.waiting(), None
    if coordinator is not None and waiting is not None:
        why = explain_waiting(waiting) if waits is None else waits.explain(coordinator, waiting)
    return JobInfo(
        job_id=found.job_id,
        status=found.status,
        reason=found.reason,
        pipeline=found.plan.pipeline,
        places=found.plan.places,
        label=found.spec.label,
        created=found.created,
        finished=found.finished,
        first=first,
        events=events,
        errors=found.error_count,
        sets=sets,
        done=done,
        accepts=accepts,
        retry_of=found.spec.retry_of,
        start_at=found.spec.start_at,
        fork_of=found.spec.fork_of,
        stored=found.spec.stored,
        waits_for=why,
        waits=() if waiting is None else waiting.waits,
        events_awaited=found.plan.events,
    )
