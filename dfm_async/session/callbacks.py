"""Callbacks for results, and the dispatchers that run them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from dfm_async.errors import JobAborted, JobFailed, JobInterrupted, StoreError
from dfm_async.model.events import Result
from dfm_async.model.ids import Frame
from dfm_async.runtime.operation_errors import drop_cancellation, is_our_cancellation
from dfm_async.session.stream import ResultStream

_log = logging.getLogger(__name__)

Callback: TypeAlias = Callable[[str, str, Frame, str, Any], Awaitable[None] | None]
"""``(from_site, node, frame, place, data)``; may be synchronous or asynchronous."""

_PENDING: Final = 1024


class CallbackDispatcher(Protocol):
    """Decides where callbacks run."""

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Run one callback, or queue it; what it raises is raised here."""

    async def drain(self) -> None:
        """Wait until all callbacks that were queued have run; raise what one of them raised."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks of one handle of a job.

    Attributes:
        dispatcher: runs them.
        default: is called for every result that no place callback takes.
        places: are called for the results of their place.
    """

    dispatcher: CallbackDispatcher
    default: Callback | None
    places: Mapping[str, Callback]

    def __bool__(self) -> bool:
        return self.default is not None or bool(self.places)

    async def run(self, stream: ResultStream, job_id: str, errors: list[BaseException]) -> None:
        """Call them for every result, in order, to the end of the job. What they raise is added to ``errors``."""
        async with stream:
            try:
                async for result in stream:
                    callback = self.places.get(result.place, self.default)
                    if callback is not None:
                        args = (result.site, result.node, result.frame, result.place, result.value)
                        await _run(self.dispatcher.dispatch(callback, *args), result, job_id, errors)
            except (JobFailed, JobAborted, JobInterrupted, StoreError):
                _log.debug("job %s failed; its waiters get the error", job_id)
            await _run(self.dispatcher.drain(), None, job_id, errors)


async def _run(work: Awaitable[None], event: Result | None, job_id: str, errors: list[BaseException]) -> None:
    try:
        await work
    except BaseException as error:
        if is_our_cancellation(error):
            raise
        errors.append(error)
        _log.exception("a callback of job %s raised", job_id, extra={"job": job_id, "result": event})
    await drop_cancellation()


class LoopDispatcher:
    """Run callbacks on the session's loop, in order, and await them. The default."""

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Run a callback."""
        found = callback(*args)
        if inspect.isawaitable(found):
            await found

    async def drain(self) -> None:
        """Return at once: every callback was awaited."""


class OtherLoopDispatcher(LoopDispatcher):
    """Run callbacks on another event loop, which runs in another thread; in order, and awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Run a callback on the other loop, and wait for it."""

        async def run() -> BaseException | None:
            try:
                await LoopDispatcher.dispatch(self, callback, *args)
            except BaseException as error:  # noqa: BLE001 - raised again where the job can report it
                return error
            return None

        error = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))
        if error is not None:
            raise error


class ManualDispatcher:
    """Keep callbacks until :meth:`process_pending` is called, from the thread of the user's choice.

    At most 1,024 callbacks wait; then the job's results wait too. An asynchronous callback is started by
    ``process_pending`` and runs on the session's loop.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._errors: deque[BaseException] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None
        self._running = 0
        self._lock = threading.Lock()

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Put a callback into the queue; wait while it is full."""
        if self._changed is None:
            self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        while len(self._pending) >= _PENDING:
            await self._wait()
        self._pending.append((callback, args))
        self._raise()

    async def drain(self) -> None:
        """Wait until the queue is empty and all callbacks have returned."""
        while self._pending or self._running:
            await self._wait()
        self._raise()

    async def _wait(self) -> None:
        assert self._changed is not None  # noqa: S101 - set by the first dispatch
        self._changed.clear()
        if self._pending or self._running:
            await self._changed.wait()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def process_pending(self) -> int:
        """Run the callbacks that wait, in the calling thread, and return their number."""
        count = 0
        while True:
            with self._lock:
                if not self._pending:
                    break
                callback, args = self._pending.popleft()
                self._running += 1
            count += 1
            try:
                found = callback(*args)
                if inspect.isawaitable(found):
                    assert self._loop is not None  # noqa: S101 - set by the first dispatch
                    asyncio.run_coroutine_threadsafe(self._await(found), self._loop)
                    continue
            except BaseException as error:  # noqa: BLE001 - raised again where the job can report it
                self._errors.append(error)
            self._finished()
        return count

    async def _await(self, found: Awaitable[None]) -> None:
        try:
            await found
        except BaseException as error:  # noqa: BLE001 - raised again where the job can report it
            self._errors.append(error)
        finally:
            self._finished()

    def _finished(self) -> None:
        with self._lock:
            self._running -= 1
        if self._loop is not None and self._changed is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)
