"""Iterators over what a session yields, and contexts that it opens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Generic, Self, TypeVar

from dfm_async.base.loop_thread import LoopThread
from dfm_async.base.signals import Signal
from dfm_async.errors import SessionClosed
from dfm_async.runtime.operation_errors import cancel_task, is_our_cancellation, ordinary
from dfm_async.session.mapping import MapStream as AsyncMapStream
from dfm_async.session.stream import EventStream, ResultStream
from dfm_async.sync.blocking import wait

T = TypeVar("T")

_READ: Final = 64
"""The largest number of items that are read at once."""
_END: Final = object()


class _IteratorReader(Generic[T]):
    """Reads an iterator in a task of its own, on request: one item, and what is available without waiting."""

    def __init__(self, source: AsyncIterator[T] | Iterator[T]) -> None:
        self.closed = False
        self._source = source
        self._limit = _READ if isinstance(source, AsyncMapStream | ResultStream | EventStream) else 1
        self._found: list[T] = []
        self._requested = self._ended = False
        self._changed = Signal()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    async def read(self) -> list[T]:
        """Wait for the next items; there are none at the end."""
        if self._task is None and not self._ended:
            self._task = asyncio.create_task(self._run(), name="dfm_async stream")
        self._requested = True
        self._changed.notify()
        await self._changed.wait_until(lambda: self._found or self._ended)
        self._requested = False
        found, self._found = self._found, []
        if not found:
            self.closed = True
            error, self._error = self._error, None
            if error is not None:
                raise error
        return found

    async def _run(self) -> None:
        try:
            while True:
                await self._changed.wait_until(lambda: self._requested and len(self._found) < self._limit)
                found = await self._next()
                self._found.append(found)
                self._changed.notify()
        except StopAsyncIteration:
            pass
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            self._error = ordinary(error, "the iterator")  # raised where the items are read
        finally:
            self._ended = True
            self._changed.notify()

    async def _next(self) -> T:
        if isinstance(self._source, AsyncIterator):
            return await anext(self._source)
        found = next(self._source, _END)
        if found is _END:
            raise StopAsyncIteration
        return found  # type: ignore[return-value]

    async def close(self) -> None:
        """Close the iterator. A thread that waits for the next item gets the end."""
        self.closed = self._ended = True
        self._found.clear()
        if self._task is not None:
            cancel_task(self._task)
            await asyncio.wait([self._task])
        self._changed.notify()  # the task may not have begun
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


class Stream(Iterator[T]):
    """An iterator over the items of a session or a job. Several threads may share it: each item goes to one of them.

    Closing it, leaving a loop over it, or dropping it ends what it stands for: results and events are no longer read,
    and calls of ``session.map`` and ``session.each`` that are in flight are cancelled. ``with`` closes it, and
    waits until nothing of it runs.
    """

    def __init__(self, loop: LoopThread, source: AsyncIterator[T] | Iterator[T]) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._reader = _IteratorReader(source)
        self._items: deque[T] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        with self._lock:
            if not self._items and not self._reader.closed:
                self._items.extend(wait(self._loop, self._reader.read()))
            try:
                return self._items.popleft()
            except IndexError:
                raise StopIteration from None

    def close(self) -> None:
        """Close the iterator, and return when nothing of it runs any longer. Safe to call more than once."""
        self._items.clear()
        with contextlib.suppress(SessionClosed):
            wait(self._loop, self._reader.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._reader.closed and self._loop.running:
            self._loop.spawn(self._reader.close())


class Managed(Generic[T]):
    """A context manager that is entered and left on the loop of a session."""

    def __init__(self, loop: LoopThread, manager: contextlib.AbstractAsyncContextManager[T]) -> None:
        self._loop = loop
        self._manager = manager

    def __enter__(self) -> T:
        return wait(self._loop, self._manager.__aenter__())

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(SessionClosed):
            wait(self._loop, self._manager.__aexit__(*exception))
