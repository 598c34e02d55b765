"""Callbacks for results, and where they run."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeAlias

from dfm_async.model.ids import Frame

__all__ = ["Callback", "CallbackDispatcher", "LoopDispatcher", "ManualDispatcher", "OtherLoopDispatcher"]

Callback: TypeAlias = Callable[[str, str, Frame, str, Any], Awaitable[None] | None]
"""``(from_site, node, frame, place, data)``; may be synchronous or asynchronous."""

_PENDING: Final = 1024


class CallbackDispatcher(Protocol):
    """Decides where callbacks run."""

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Runs one callback, or sees to it that it will be run; what it raises is raised here."""
        ...

    async def drain(self) -> None:
        """Waits until all callbacks that were handed over have run; raises what one of them raised."""
        ...


class LoopDispatcher:
    """Runs callbacks on the session's loop, in order, and awaits them. The default."""

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Runs a callback."""
        found = callback(*args)
        if inspect.isawaitable(found):
            await found

    async def drain(self) -> None:
        """Returns at once: every callback was awaited."""


class OtherLoopDispatcher:
    """Runs callbacks on another event loop, which runs in another thread; in order, and awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Runs a callback on the other loop and waits for it."""

        async def run() -> BaseException | None:
            try:
                found = callback(*args)
                if inspect.isawaitable(found):
                    await found
            except BaseException as error:  # noqa: BLE001 - raised again where the job can report it
                return error
            return None

        error = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))
        if error is not None:
            raise error

    async def drain(self) -> None:
        """Returns at once: every callback was awaited."""


class ManualDispatcher:
    """Keeps callbacks until :meth:`process_pending` is called, from the thread of the user's choice.

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
        """Puts a callback into the queue; waits while it is full."""
        if self._changed is None:
            self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        while len(self._pending) >= _PENDING:
            await self._wait()
        self._pending.append((callback, args))
        self._raise()

    async def drain(self) -> None:
        """Waits until the queue is empty and all callbacks have returned."""
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
        """Runs the callbacks that wait, in the calling thread, and tells how many there were."""
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
