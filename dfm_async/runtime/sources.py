"""The sources of streams: iterators of operations, asynchronous ones and those that need a thread."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from dfm_async.base.signals import Signal
from dfm_async.runtime.operation_errors import cancel_task
from dfm_async.runtime.threads import Threads
from dfm_async.wire.codec import Packed

_WINDOW: Final = 256
_WINDOW_BYTES: Final = 16 * 1024 * 1024
_LIGHT: Final = frozenset({type(None), bool, int, float, dict, list, tuple, set})
"""Types whose objects have no size that could be known at once."""


PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple, set})
"""Types of results that need no further look: neither awaited nor consumed element by element."""


def is_iterator(value: Any) -> bool:
    """Return whether a result is to be consumed element by element."""
    if isinstance(value, (list, dict, str, bytes, int, float, tuple, type(None))):
        return False
    return (inspect.isgenerator(value) or inspect.isasyncgen(value)) or (
        hasattr(value, "__next__") or hasattr(value, "__anext__")
    )


class Source(Protocol):
    """Produces the elements of a stream."""

    async def get(self, limit: int) -> list[Any]:
        """Wait for elements, and return at most ``limit`` of them; none at the end."""

    async def aclose(self) -> None:
        """End the source."""

    async def wait_ended(self) -> None:
        """Wait until no code of the source runs any longer."""


class AsyncSource:
    """The elements of an asynchronous iterator.

    ``enter`` sets the context of its operation, and returns a function that resets it.
    """

    def __init__(self, iterator: AsyncIterator[Any], enter: Callable[[], Callable[[], None]]) -> None:
        self.iterator = iterator
        self._enter = enter
        self._ended = False
        self._reader: asyncio.Task[Any] | None = None
        self.transform: Callable[[Any], Any] | None = None

    async def get(self, limit: int) -> list[Any]:
        """Wait for the next element."""
        if self._ended:
            return []
        try:
            with self.reading():
                item = await self.iterator.__anext__()
        except StopAsyncIteration:
            self._ended = True
            return []
        return [item if self.transform is None else self.transform(item)]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Enter this while the iterator runs: in its reader's task, but with its own operation's context."""
        leave = self._enter()
        self._reader = asyncio.current_task()
        try:
            yield
        finally:
            self._reader = None
            leave()

    async def aclose(self) -> None:
        """Close the iterator. A task that still reads it is cancelled: nobody waits for that task any longer."""
        self._ended = True
        if self._reader is not None:
            cancel_task(self._reader)
            await asyncio.wait([self._reader])
        close = getattr(self.iterator, "aclose", None)
        if close is not None:
            await close()

    async def wait_ended(self) -> None:
        """Return at once: an asynchronous iterator runs in the task of its reader."""


class IteratorCancelled(Exception):
    """A synchronous iterator has raised ``CancelledError``, which is its cause."""


class ThreadSource:
    """The elements of a synchronous iterator, which runs in a thread of its own.

    The thread may be ahead of the reader by a window. The window begins with one element, so that the first arrives at
    once, and doubles as the reader keeps up. It is also bounded in bytes.
    """

    def __init__(self, threads: Threads, iterator: Iterator[Any], context: contextvars.Context, name: str) -> None:
        self._threads = threads
        self._iterator = iterator
        self._context = context
        self.name = name
        self._items: deque[Any] = deque()
        self._window = 1
        self._started = False
        self.ended = False
        """Whether the thread has left the iterator."""
        self._abandoned = False
        self._error: BaseException | None = None
        self._closed = False
        self._signalled = False
        # How many elements the thread may have produced, raised only by the loop; it is held up only at the bound.
        self._allowed = 1
        self._held_up = False
        self._gate = threading.Semaphore(0)
        # The numbers and sizes of the large elements; their sums are each written on one side only.
        self._large: deque[tuple[int, int]] = deque()
        self._taken = 0
        self._bytes_produced = 0
        self._bytes_taken = 0
        self.transform: Callable[[Any], Any] | None = None
        """Applied to each element in the thread, before the iterator goes on and perhaps changes it."""
        self.on_start: Callable[[], object] = _nothing
        """Is called in the thread, before the iterator begins."""
        self.on_stop: Callable[[], object] = _nothing
        """Is called in the thread, when it has left the iterator."""
        self.on_end: Callable[[BaseException | None], None] = _nothing
        """Is called on the loop after that, with what the iterator raised."""
        self._changed = Signal()

    async def get(self, limit: int) -> list[Any]:
        """Wait for elements, and return at most ``limit`` of them; none at the end.

        Raises:
            BaseException: what the iterator raised.
        """
        if not self._started:
            self._threads.start(self._run, self.name)
            self._started = True  # not if the system cannot start a thread
        while not self._items:
            if self.ended:
                if isinstance(self._error, asyncio.CancelledError):  # raised here, it would be its reader's
                    raise IteratorCancelled from self._error
                if self._error is not None:
                    raise self._error
                return []
            await self._changed.wait()
        count = min(limit, len(self._items))
        found = [self._items.popleft() for _ in range(count)]
        self._taken += count
        while self._large and self._large[0][0] < self._taken:
            self._bytes_taken += self._large.popleft()[1]
        grow = min(self._window, _WINDOW - self._window)
        self._window += grow
        self._allow(count + grow)
        return found

    def _allow(self, count: int) -> None:
        self._allowed += count
        if self._held_up:
            self._held_up = False
            self._gate.release()

    def _has_room(self, produced: int) -> bool:
        lead = self._bytes_produced - self._bytes_taken
        return self._closed or (produced < self._allowed and lead < _WINDOW_BYTES)

    def _wait_for_room(self, produced: int) -> None:
        """Wait, in the thread, until the reader has caught up. A superfluous release only causes another check."""
        while not self._has_room(produced):
            self._held_up = True
            if self._has_room(produced):
                self._held_up = False
                return
            self._gate.acquire()

    def _run(self) -> None:
        error: BaseException | None = None
        self.on_start()
        try:
            self._context.run(self._produce)
        except BaseException as caught:  # noqa: BLE001 - also SystemExit: the iterator has failed
            error = caught
        self.on_stop()
        self._threads.post(lambda: self._finish(error))

    def _produce(self) -> None:
        iterator, transform, items = self._iterator, self.transform, self._items
        produced = 0
        try:
            for item in iterator:
                found = item if transform is None else transform(item)
                size = found.size if type(found) is Packed else _size(found)
                if produced >= self._allowed or (size and self._bytes_produced != self._bytes_taken):
                    self._wait_for_room(produced)
                if self._closed:
                    break
                if size:
                    self._large.append((produced, size))
                    self._bytes_produced += size
                produced += 1
                items.append(found)
                if not self._signalled:
                    self._signalled = True
                    self._threads.post(self._arrived)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _arrived(self) -> None:
        self._signalled = False
        self._changed.notify()

    def _finish(self, error: BaseException | None) -> None:
        self.ended = True
        self._error = error
        if self._closed:
            self._items.clear()  # they are not needed, and may hold memory that others wait for
        self._changed.notify()
        self.on_end(error)
        if self._abandoned:
            self._threads.returned_late()

    async def wait_ended(self) -> None:
        """Wait until the thread has left the iterator, or was abandoned."""
        await self._changed.wait_until(lambda: not self.running)

    @property
    def busy(self) -> bool:
        """Whether the thread is in the iterator, and does not wait for its reader."""
        return self.running and not self._held_up

    @property
    def running(self) -> bool:
        """Whether the thread is still in the iterator, and was not abandoned."""
        return self._started and not self.ended and not self._abandoned

    def abandon(self, job_id: str) -> None:
        """Stop waiting for the thread: its job was cancelled, and the grace period is over."""
        if self.running:
            self._abandoned = True
            self._threads.count_abandoned()
            self._changed.notify()
            self._threads.watch_abandoned(lambda: self.ended, job_id, self.name, 0.0)

    async def aclose(self) -> None:
        """Drop what was not read, and let the iterator end at its next element."""
        self.close()

    def close(self) -> None:
        """Do the same without waiting: nothing has to be awaited."""
        self._closed = True
        self._items.clear()
        if not self._started:
            self.ended = True
            return
        self._allow(1)


def _nothing(*_: Any) -> None:
    """Do nothing."""


def _size(value: Any) -> int:
    """Return the number of bytes of an element, if it has a size; 0 for all others."""
    kind = type(value)
    if kind in _LIGHT:
        return 0
    size = len(value) if kind in (str, bytes, bytearray) else getattr(value, "nbytes", 0)
    return size if type(size) is int else 0
