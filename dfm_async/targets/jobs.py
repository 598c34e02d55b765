"""The jobs that a target knows: those under way, those that have ended, and for how long these are remembered."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final

from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.results.record import JobRecord
from dfm_async.targets.coordinator import Coordinator

__all__ = ["JobTable"]

_EARLIEST: Final = 1.0
"""Logs that are too old are dropped at most once in that many seconds."""


class JobTable:
    """Records by id. Ended jobs lose first their log, then everything; how late is what the options say."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._records: OrderedDict[str, JobRecord] = OrderedDict()
        self._running: dict[str, Coordinator] = {}
        self._with_log: deque[JobRecord] = deque()
        self._ended: deque[JobRecord] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.totals: dict[JobStatus, int] = {}
        """How many jobs have ended, by their status."""

    def add(self, coordinator: Coordinator) -> None:
        """Makes a job known, from its submission on."""
        record = coordinator.record
        self._records[record.job_id] = record
        self._running[record.job_id] = coordinator
        coordinator.on_end(self._job_ended)

    def remember(self, record: JobRecord) -> None:
        """Makes a job known that does not run here."""
        self._records[record.job_id] = record

    def forget(self, job_id: str) -> None:
        """Drops a job that never came to be, or is not wanted any more."""
        self._records.pop(job_id, None)
        self._running.pop(job_id, None)

    def find(self, job_id: str) -> JobRecord | None:
        """Finds a job that runs, or ended not too long ago."""
        return self._records.get(job_id)

    def coordinator(self, job_id: str) -> Coordinator | None:
        """Finds a job that has not ended."""
        return self._running.get(job_id)

    @property
    def records(self) -> list[JobRecord]:
        """All jobs that are known, in the order of their submission."""
        return list(self._records.values())

    @property
    def coordinators(self) -> list[Coordinator]:
        """The jobs that have not ended."""
        return list(self._running.values())

    def __len__(self) -> int:
        return len(self._records)

    def _job_ended(self, coordinator: Coordinator) -> None:
        record = coordinator.record
        self._running.pop(record.job_id, None)
        if self._records.get(record.job_id) is not record:
            return
        self.totals[record.decided] = self.totals.get(record.decided, 0) + 1
        self._with_log.append(record)
        self._ended.append(record)
        while len(self._with_log) > self._options.keep_finished:
            self._with_log.popleft().expire()
        while len(self._ended) > self._options.keep_summaries:
            oldest = self._ended.popleft()
            if self._records.get(oldest.job_id) is oldest:
                del self._records[oldest.job_id]
        if self._timer is None and self._with_log:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._with_log[0].ended_at + self._options.keep_finished_for, self._drop_old)

    def _drop_old(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        limit = loop.time() - self._options.keep_finished_for
        while self._with_log and self._with_log[0].ended_at <= limit:
            self._with_log.popleft().expire()
        if self._with_log:
            at = max(self._with_log[0].ended_at + self._options.keep_finished_for, loop.time() + _EARLIEST)
            self._timer = loop.call_at(at, self._drop_old)

    def close(self) -> None:
        """Stops looking for old logs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
