"""The threads that run something of a job: counted, so that the job's end can wait for them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob
    from dfm_async.runtime.threads import Done

__all__ = ["in_background", "in_thread", "stopped"]


def in_background(job: SiteJob, work: Callable[[], Any], context: contextvars.Context, done: Done) -> None:
    """Runs synchronous code in a thread, and then ``done(result, error)`` on the loop."""

    def left(value: Any, error: BaseException | None) -> None:
        job.busy_threads -= 1
        if not job.busy_threads and job.threads_idle is not None and not job.threads_idle.done():
            job.threads_idle.set_result(None)
        done(value, error)

    job.busy_threads += 1
    job.runtime.threads.run(context, work, left)


async def in_thread(job: SiteJob, work: Callable[[], Any]) -> Any:
    """Runs synchronous code and waits for it; when cancelled, it is left alone but still counted."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, error))

    in_background(job, work, contextvars.copy_context(), done)
    value, error = await future
    if error is not None:
        raise error
    return value


async def stopped(job: SiteJob) -> None:
    """Waits until no thread runs anything of the job."""
    while job.busy_threads:
        if job.threads_idle is None or job.threads_idle.done():
            job.threads_idle = asyncio.get_running_loop().create_future()
        await asyncio.shield(job.threads_idle)  # several may wait, and one of them give up
