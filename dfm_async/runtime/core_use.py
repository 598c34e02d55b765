"""Notice operations whose calls compute on one core of a worker, although further cores could run them.

Calls themselves are not measured: the thread that sends heartbeats checks about once per second the processor time of
the process, and the calls that are in flight.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from dfm_async.base.cores import usable_cores
from dfm_async.federation.operation import CodeKind
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.job_streams import StreamingJob
from dfm_async.runtime.threads import ThreadCall

_BUSY: Final = 0.5
"""The part of a core from which on a process, or its event loop, counts as computing."""
_LITTLE: Final = 0.02
"""The same for tests, which share the cores with others."""
_SEVERAL: Final = 1.5
"""The number of cores from which on a process does use several, such as in threads of a library."""
_SAMPLES: Final = 3
"""How often an operation has to be seen before it is reported."""
_PART: Final = 0.25
"""In which part of the samples it has to be seen."""

Found: TypeAlias = tuple[StreamingJob, str, str]
"""A job, an operation, and why its calls compute on one core."""


def stay_reason(callee: Callee) -> str:
    """Return why the calls of an operation run in one process, and what to do; empty if they run in all workers."""
    if callee.spreads:
        return ""
    if callee.external:
        return "it is an external program, which has its own processes"
    if callee.kind is CodeKind.ASYNC:
        return "it is an async def, whose calls share one event loop. If it computes, write it as a plain def"
    if callee.kind is CodeKind.ASYNC_GENERATOR:
        return "it is an asynchronous generator, which shares one event loop. If it computes, write it as a plain def"
    if callee.adapter.spread is False:
        return "spread=False keeps its calls in one process"
    if callee.needs_site:
        return "it needs objects of its site, which are in one process. Compute in a plain def"
    return "it is a class, whose object is in one process. With spread=True, each worker has an object of its own"


_UNSENDABLE: Final = "its arguments or results cannot be pickled. Pass and return values that can be"
_READS: Final = "it reads a stream, which comes to one process. Compute in a plain def that gets the elements"
_ALONE: Final = "the calls of a job run in one process at this site"


class CoreUse:
    """Samples what computes in a worker. All methods except the constructor are for one thread beside the loop.

    Args:
        jobs: returns the jobs whose nets run here.
    """

    def __init__(self, jobs: Callable[[], Iterable[StreamingJob]]) -> None:
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        clock = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = None if clock is None else clock(threading.get_ident())
        self._before: tuple[float, float, float] | None = None
        self._busy = _LITTLE if os.environ.get("DFM_SPREAD") == "always" else _BUSY
        self._samples = 0
        self._seen: Counter[tuple[str, str]] = Counter()
        self._reported: set[tuple[str, str]] = set()

    def idle(self) -> None:
        """Note that there are no jobs."""
        self._before = None
        self._samples = 0
        self._seen.clear()
        self._reported.clear()

    def sample(self) -> tuple[str, str] | None:
        """Return a job, and why it computes on one core; once for each of its operations."""
        if self._clock is None or usable_cores() < 2:
            return None
        before = self._before
        now, used, on_loop = self._before = (time.monotonic(), time.process_time(), time.clock_gettime(self._clock))
        if before is None or now <= before[0]:
            return None
        self._samples += 1
        cores = (used - before[1]) / (now - before[0])
        if not self._busy <= cores <= _SEVERAL:
            return None
        loop_computes = on_loop - before[2] >= self._busy * (now - before[0])
        found = self._on_loop() if loop_computes else self._in_threads()
        if found is None:
            return None
        job, operation, why = found
        key = (job.job_id, operation)
        self._seen[key] += 1
        if key in self._reported or self._seen[key] < max(_SAMPLES, _PART * self._samples):
            return None
        self._reported.add(key)
        return job.job_id, f"{operation!r} uses one of {usable_cores()} cores, because {why}"

    def _on_loop(self) -> Found | None:
        """Return the operation that the event loop runs now, if other tasks of its job wait for it."""
        task = asyncio.current_task(self._loop)
        for job in self._jobs():
            work = None if task is None else job.work_of(task)
            frame = getattr(work, "cr_frame", None)
            call = None if frame is None else frame.f_locals.get("call")
            if call is not None and job.task_count > 1:
                return job, call.operation, stay_reason(call.callee)
        return None

    def _in_threads(self) -> Found | None:
        """Return the operation with the most calls in threads that cannot run in other workers."""
        found: Counter[tuple[str, str]] = Counter()
        jobs = {job.job_id: job for job in self._jobs()}
        for job_id, job in jobs.items():
            for call, operation in job.calls_in_threads():
                callee = job.callee_named(operation)
                if callee is not None and call.worker is None and not call.ended:
                    found[job_id, operation] += _is_bound(call)
            for operation in job.iterating():
                found[job_id, operation] += 1
        for (job_id, operation), count in found.most_common(1):
            if count > 1:
                return jobs[job_id], operation, self._why(jobs[job_id], operation)
        return None

    @staticmethod
    def _why(job: StreamingJob, operation: str) -> str:
        callee = job.callee_named(operation)
        if callee is None:
            return _ALONE
        if not callee.spreads:
            return stay_reason(callee)
        if job.resources.spread is None:
            return _ALONE
        here = [call for call, name in job.calls_in_threads() if name == operation]
        return _UNSENDABLE if any(call.remote is not None for call in here) else _READS


def _is_bound(call: ThreadCall) -> bool:
    return call.remote is None or call.pinned or call.cost.pinned
