"""The threads that run something of a job: counted, so that the job's end can wait for them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dfm_async.runtime.fair_queue import JobCalls
from dfm_async.runtime.threads import ThreadCall

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob
    from dfm_async.runtime.threads import Done

__all__ = ["JobThreads", "in_background", "in_thread", "late"]


class JobThreads:
    """The synchronous calls of one job at one location. Most jobs have none, so this is made with the first.

    Args:
        priority: the job's priority.
    """

    __slots__ = ("_idle", "calls", "closes", "running")

    def __init__(self, priority: int) -> None:
        self.calls: JobCalls[ThreadCall] = JobCalls(priority)
        """Those that wait for a thread."""
        self.closes: JobCalls[ThreadCall] | None = None
        """Those among them that close objects: a cancelled job closes its objects too."""
        self.running: dict[ThreadCall, str] = {}
        """Those that wait or run, with what they call."""
        self._idle: asyncio.Future[None] | None = None

    def left(self, call: ThreadCall) -> None:
        """A call has returned, was withdrawn, or was abandoned."""
        self.running.pop(call, None)
        if not self.running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def stopped(self) -> None:
        """Waits until no thread runs anything of the job; those of abandoned calls do not count."""
        while self.running:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)  # several may wait, and one of them may be cancelled


def in_background(
    job: SiteJob, what: str, work: Callable[[], Any], context: contextvars.Context, done: Done, *, closes: bool = False
) -> ThreadCall:
    """Runs synchronous code, called ``what``, in a thread, and then ``done(result, error)`` on the loop.

    ``closes``: whether the code closes an object, and runs even if the job is cancelled.
    """
    threads = job.threads
    calls = threads.calls
    if closes:
        calls = threads.closes = threads.closes or JobCalls(calls.priority)

    def left(value: Any, error: BaseException | None) -> None:
        threads.left(call)
        done(value, error)

    call = job.runtime.threads.run(context, work, left, calls)
    threads.running[call] = what
    return call


async def in_thread(
    job: SiteJob, what: str, work: Callable[[], Any], deadline: float | None = None, *, closes: bool = False
) -> Any:
    """Runs synchronous code and waits for it; when cancelled, it is left alone but still counted.

    Args:
        job: the job.
        what: the name of the code.
        work: the code.
        deadline: how many seconds it may take, from the moment that it has its thread.
        closes: whether the code closes an object, and runs even if the job is cancelled.

    Raises:
        TimeoutError: it has taken longer, or than the grace period of the job's cancellation; its thread is abandoned.
        BaseException: what the code raised.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def done(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, error))

    call = in_background(job, what, work, contextvars.copy_context(), done, closes=closes)
    if deadline is None:
        value, error = await future
    else:
        timer = _Deadline(job, what, call, deadline)
        try:
            value, error = await future
        finally:
            timer.cancel()
    if error is not None:
        raise error
    return value


class _Deadline:
    """Abandons a call that takes too long. Nobody reports when a call gets its thread, so the timer may fire early."""

    __slots__ = ("_call", "_job", "_queued", "_seconds", "_timer", "_what")

    def __init__(self, job: SiteJob, what: str, call: ThreadCall, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._job = job
        self._what = what
        self._call = call
        self._seconds = seconds
        self._queued = loop.time()
        self._timer = loop.call_later(seconds, self._check)

    def cancel(self) -> None:
        """The call has returned, or its job was cancelled."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._call.ended:
            return  # it has returned, and its result is on its way
        loop, started = asyncio.get_running_loop(), self._call.started
        now = loop.time()
        due = (now if started is None else started) + self._seconds
        if now < due:  # it got its thread later, or has none
            self._timer = loop.call_at(due, self._check)
        else:
            error = late(self._what, self._seconds, (started or 0.0) - self._queued)
            self._job.runtime.abandon(self._job, self._call, self._seconds, error)


def late(what: str, deadline: float, waited: float) -> TimeoutError:
    """Describes a call that has exceeded its deadline."""
    text = f"the deadline of {deadline:g} s for {what!r} is over"
    if waited >= 0.1:
        text += f", not counting {waited:.1f} s that the call waited for its turn"
    return TimeoutError(text)
