"""Inputs of maps and streams of parameter sets: iterables of the application, which may block."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from dfm_async.base.signals import Signal
from dfm_async.base.tasks import on_loop
from dfm_async.runtime.operation_errors import ordinary
from dfm_async.session.submission import Params as AsyncParams
from dfm_async.sync.iterators import Stream

T = TypeVar("T")

Params: TypeAlias = Mapping[str, Any] | Iterable[Mapping[str, Any]] | None
"""One parameter set, a list of them, an iterator over them, or none yet."""

_AHEAD: Final = 16
"""The largest number of elements that an iterator is read ahead."""


_END: Final[Any] = object()


class PulledIterator(Generic[T]):
    """Pulls the elements of an iterable in a thread of its own, a few of them ahead.

    So an iterable that waits for something, or uses the session itself, does not block the loop of the session. The
    thread runs in the context of the caller.
    """

    def __init__(self, iterable: Iterable[T]) -> None:
        self._pulling = _Pulling(iterable)
        self._taken = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        pulling = self._pulling
        if pulling.loop is None and not pulling.stopped:
            pulling.start()
            weakref.finalize(self, pulling.stop).atexit = False  # the thread does not hold this iterator
        while not pulling.found:
            if pulling.ended or pulling.stopped:
                if pulling.found:  # by the thread, before it ended, but after they were checked
                    break
                error, pulling.error = pulling.error, None
                raise StopAsyncIteration if error is None else error
            await pulling.changed.wait()
        self._taken += 1
        if self._taken == _AHEAD // 2:  # waking the thread for each element would take longer than pulling it
            pulling.slots.release(self._taken)
            self._taken = 0
        return pulling.found.popleft()  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Close the iterable. If the thread waits for an element of it, it is closed when that has come."""
        pulling = self._pulling
        if pulling.stop() and pulling.loop is not None:
            await pulling.changed.wait_until(lambda: pulling.ended)
        pulling.found.clear()


class _Pulling:
    """The thread of an iterable, and what it shares with the loop."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.slots = threading.Semaphore(_AHEAD)
        self.found: deque[Any] = deque()
        self.changed = Signal()
        self.error: Exception | None = None
        self.stopped = self.ended = False
        self._iterable = iterable
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._waiting = self._notified = False

    def start(self) -> None:
        """Start the thread."""
        self.loop = asyncio.get_running_loop()
        threading.Thread(target=self._context.run, args=(self._run,), name="dfm-inputs", daemon=True).start()

    def stop(self) -> bool:
        """Have the thread close the iterable, and end. Return False if it waits for an element, maybe for ever."""
        with self._lock:
            self.stopped = True
            self.slots.release()
            return not self._waiting

    def _run(self) -> None:
        iterator: Iterator[Any] | None = None
        try:
            while self._may_wait():
                if iterator is None:
                    iterator = iter(self._iterable)
                found = next(iterator, _END)
                self._waiting = False
                if found is _END:
                    break
                self.found.append(found)
                self._notify()
        except BaseException as error:  # noqa: BLE001 - raised again where the inputs are read
            self.error = ordinary(error, "the inputs")
        try:
            if isinstance(iterator, Generator | Stream):
                iterator.close()
        except BaseException as error:  # noqa: BLE001 - raised again where the inputs are read
            self.error = self.error or ordinary(error, "the inputs")
        self.ended = True
        self._notify()

    def _may_wait(self) -> bool:
        self.slots.acquire()
        with self._lock:
            self._waiting = not self.stopped
            return self._waiting

    def _notify(self) -> None:
        if not self._notified and self.loop is not None:
            self._notified = True
            on_loop(self.loop, self._changed, None)

    def _changed(self, _: None) -> None:
        self._notified = False
        self.changed.notify()


def pulled(inputs: Any) -> Any:
    """Return inputs of a map as the loop of a session can read them: collections as they are, others in a thread."""
    if isinstance(inputs, AsyncIterable | Collection) or not isinstance(inputs, Iterable):
        return inputs
    return PulledIterator(inputs)


def streamed(params: Params) -> AsyncParams:
    """Return parameter sets as the loop of a session can read them: an iterator becomes a stream."""
    if params is None or isinstance(params, AsyncIterable | Mapping | Sequence) or not isinstance(params, Iterable):
        return params
    return PulledIterator(params)
