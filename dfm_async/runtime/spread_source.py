"""The elements of a generator that runs in a thread here, or in another worker of the site."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from dfm_async.base.signals import Signal
from dfm_async.errors import WorkerLost
from dfm_async.runtime.fair_queue import JobCalls
from dfm_async.runtime.sources import ThreadSource
from dfm_async.runtime.spread import RemoteFailure
from dfm_async.runtime.streams import StreamFailed
from dfm_async.runtime.threads import RemoteCall, Spread, ThreadCall, Threads
from dfm_async.wire.codec import Broken
from dfm_async.wire.memory import size_of

_PER_ELEMENT: Final = 10_000
"""To send one element takes about as long as to copy this number of bytes."""


class RemoteGenerator(RemoteCall, Protocol):
    """What is needed to run a generator in another worker of the site."""

    def elements(self, payload: Any) -> list[Any]:
        """Decode elements that came from a worker."""

    def taken(self, worker: str, number: int, count: int, size: int) -> None:
        """Have a worker produce as many elements as were read, of a size in bytes."""

    def close(self, worker: str, number: int) -> None:
        """Have a worker end the generator."""


class SpreadSource:
    """The elements of a generator that the dispatcher finds a place for when they are first read.

    Args:
        source: runs it here.
        remote: runs it in another worker.
        threads: those of the site.
        spread: decides.
        job: the calls of its job that wait.
        reruns: how often it may run again because its worker was lost. It skips the elements that were read then.
    """

    def __init__(
        self,
        source: ThreadSource,
        remote: RemoteGenerator,
        threads: Threads,
        spread: Spread,
        job: JobCalls[ThreadCall],
        reruns: int,
    ) -> None:
        self._source = source
        self._remote = remote
        self._threads = threads
        self._spread = spread
        self._job = job
        self._reruns = reruns
        self._call: ThreadCall | None = None
        self._here = False
        self._items: deque[tuple[Any, int]] = deque()
        self._read = 0
        self._skip = 0
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._changed = Signal()
        self.weight = 0
        """The number of bytes that were sent, with what each element costs."""

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """Applied to each element: in the thread here, or when it has arrived from another worker."""
        return self._source.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any]) -> None:
        self._source.transform = transform

    # reading

    async def get(self, limit: int) -> list[Any]:
        """Wait for elements, and return at most ``limit`` of them; none at the end.

        Raises:
            StreamFailed: the generator raised in another worker.
            WorkerLost: that worker was lost.
            BaseException: what the generator raised here.
        """
        if self._call is None:
            self._begin()
        while found := await self._next(limit):
            skipped = min(self._skip, len(found))
            self._skip -= skipped
            del found[:skipped]
            if found:
                self._read += len(found)
                return found
        return []

    async def _next(self, limit: int) -> list[Any]:
        await self._changed.wait_until(lambda: self._here or self._items or self._ended)
        if self._here:
            found = await self._source.get(limit)
            if found and not self._read and self._call is not None:
                cost = self._call.cost
                if not cost.known and self.transform is None:
                    cost.pinned = not self._remote.can_send(found[0])
            return found
        if not self._items:
            if isinstance(self._error, RemoteFailure):
                raise StreamFailed(self._error.record)
            if self._error is not None:
                raise self._error
            return []
        found, total = [], 0
        for _ in range(min(limit, len(self._items))):
            item, size = self._items.popleft()
            total += size
            if isinstance(item, Broken):
                raise item.error
            found.append(item if self.transform is None else self.transform(item))
        if self._call is not None and self._call.worker is not None and not self._ended:
            self._remote.taken(self._call.worker, self._call.number, len(found), total)
        return found

    # where it runs

    def _begin(self) -> None:
        call = self._call = ThreadCall(
            contextvars.Context(), _nothing, self._done, self._job, None, self._remote, self, self._remote.cost
        )
        self._restart()
        if not self._spread.take(call, self._remote):
            self.begin_here()

    def _restart(self) -> None:
        self._items.clear()
        self._skip = self._read

    def begin_here(self) -> None:
        """Run it in this process."""
        call, source, threads = self._call, self._source, self._threads
        assert call is not None  # noqa: S101 - it is what begins
        self._restart()  # it may have begun elsewhere
        self._here = True

        def left(error: BaseException | None) -> None:
            if not call.abandoned:
                self._spread.ended_here(call, None, error)
            call.forget()

        source.on_start, source.on_stop = lambda: threads.enter(call), lambda: threads.leave(call)
        source.on_end = left
        self._changed.notify()

    def arrived(self, payload: Any) -> None:
        """Take elements that another worker has sent."""
        if self._closed:
            return
        found, size = self._remote.elements(payload), size_of(payload)
        self.weight += size + _PER_ELEMENT * len(found)
        share = size // len(found) if found else 0
        self._items.extend((item, share) for item in found)
        self._changed.notify()

    def _done(self, _value: Any, error: BaseException | None) -> None:
        """Note that it has ended in another worker, or is not run."""
        if isinstance(error, WorkerLost) and self._reruns and not self._closed:
            self._reruns -= 1
            self._begin()
            return
        self._ended = True
        self._error = error
        self._changed.notify()

    # the end

    @property
    def running(self) -> bool:
        """Whether code of the generator may still run."""
        return self._source.running if self._here else self._call is not None and not self._ended

    async def aclose(self) -> None:
        """Drop what was not read, and let the generator end at its next element."""
        self._closed = True
        self._items.clear()
        call = self._call
        if self._here or call is None:
            self._ended = not self._here
            await self._source.aclose()
        elif call.worker is None:  # it still waits
            call.ended = self._ended = True
        elif not self._ended:
            self._remote.close(call.worker, call.number)
        self._changed.notify()

    async def wait_ended(self) -> None:
        """Wait until the generator has ended, or was abandoned."""
        if self._here:
            await self._source.wait_ended()
        elif self._call is not None:
            await self._changed.wait_until(lambda: self._ended)

    def abandon(self, job_id: str) -> None:
        """Stop waiting for the generator: its job was cancelled, and the grace period is over."""
        call = self._call
        if call is None or call.ended:
            return
        if self._here:
            call.abandoned = True
            self._source.abandon(job_id)
            self._spread.ended_here(call, None, None, abandoned=True)
        else:
            error = TimeoutError("the grace period of the cancellation is over, and the generator has not ended")
            self._spread.abandon(call, error, 0.0)


def _nothing() -> None:
    """Do nothing: the thread of the source runs the generator."""
