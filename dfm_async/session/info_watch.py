"""What is known of one job, whenever it has changed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from dfm_async.model.info import JobInfo
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import check_interval

__all__ = ["InfoWatch"]


class _Known(Protocol):
    def info(self) -> JobInfo: ...


class InfoWatch:
    """Looks at one job whenever something has happened to it. An iterator that needs no closing; ends with the job."""

    def __init__(self, job: _Known, record: JobRecord, interval: float) -> None:
        self._job = job
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
        while not record.log.closed and self._last == self._job.info():
            await record.log.wait()
        if not record.log.closed:
            with contextlib.suppress(TimeoutError):  # what happens meanwhile is joined; the end is told at once
                async with asyncio.timeout_at(self._next):
                    await record.completion_event.wait()
        self._next = asyncio.get_running_loop().time() + self._interval
        self._ended = record.log.closed
        self._last = self._job.info()
        if self._ended and not record.status.ended and record.hidden is not None:
            raise record.hidden
        return self._last
