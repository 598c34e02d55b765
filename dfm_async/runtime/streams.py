"""Streams: values that are consumed element by element, with backpressure.

A stream with one consumer buffers nothing: the consumer sets the pace of the producer. With several consumers, the
fastest sets the pace, and elements are kept for the others up to a limit, beyond which the stream fails: consumers that
wait for each other cannot deadlock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from dfm_async.base.signals import Signal
from dfm_async.errors import StreamOverrun
from dfm_async.model.events import ErrorRecord
from dfm_async.net.tokens import StreamValue
from dfm_async.runtime.operation_errors import is_our_cancellation
from dfm_async.runtime.recorded import RecordedSource
from dfm_async.runtime.sources import AsyncSource, IteratorCancelled, Source

_KEPT: Final = 100_000
_BATCH: Final = 256


class StreamFailed(Exception):
    """A stream ended with an error."""

    def __init__(self, error: ErrorRecord) -> None:
        super().__init__(f"{error.node} raised {error.type_name}: {error.message}")
        self.error = error


class LocalStream(StreamValue):
    """A stream at the site that it is read at. The number of its consumers is known before the first begins.

    ``describe`` turns what the source raises into a record, once.
    """

    def __init__(
        self, label: str, source: Source, consumers: int, describe: Callable[[BaseException], ErrorRecord]
    ) -> None:
        self.label = label
        self.source = source
        self.consumers = consumers
        self.subscriptions: list[Subscription] = []
        self.closed = False
        self.on_end: Callable[[], None] | None = None
        """Is called once, when the source has no more elements, has raised, or is not needed any longer."""
        self._describe = describe
        self._buffer: deque[Any] = deque()
        self._base = 0
        self._begun = False
        self._ended = False
        self.error: ErrorRecord | None = None
        """The error that the source has raised, if any."""
        self._fetching = False
        self._fetched = Signal()

    def subscribe(self) -> Subscription:
        """Return a reader that begins with the first element."""
        subscription = Subscription(self)
        self.subscriptions.append(subscription)
        return subscription

    def expect(self, change: int) -> None:
        """Change the number of expected consumers."""
        self.consumers += change
        self.drop()

    @property
    def producer(self) -> Source | None:
        """The source that runs code: that of recorded elements, or its own."""
        return self.source.producer if isinstance(self.source, RecordedSource) else self.source

    @property
    def single(self) -> bool:
        """Whether there is only one consumer, so that elements need not be kept."""
        return self.consumers <= 1

    def transform_early(self, transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let the source transform its elements, if they have one consumer and none was produced yet.

        The producer may reuse an object for the next element, so elements are transformed as soon as possible.

        Returns:
            The function that the consumer has to apply to each element.
        """
        if self.single and not self._begun and hasattr(self.source, "transform"):
            self.source.transform = transform
            return _unchanged
        return transform

    async def fetch(self, limit: int) -> list[Any]:
        """Get elements from the source, and describe what it raises."""
        if self.error is not None:
            raise StreamFailed(self.error)
        if self._ended:
            return []
        self._begun = True
        try:
            found = await self.source.get(limit)
        except IteratorCancelled as error:
            raise self.failed(error.__cause__ or error) from error
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            if isinstance(error, asyncio.CancelledError) and not isinstance(self.source, AsyncSource):
                raise  # its reader's own; a generator that it passes through has ended, other sources have not
            raise self.failed(error) from error
        if not found:
            self.end()
        return found

    def end(self) -> None:
        """Note that the source has ended."""
        self._ended = True
        call, self.on_end = self.on_end, None
        if call is not None:
            call()

    def failed(self, error: BaseException) -> StreamFailed:
        """Describe what the source raised, for all readers. If it read a stream that failed, it is that failure."""
        self.error = error.error if isinstance(error, StreamFailed) else self._describe(error)
        self.end()
        return StreamFailed(self.error)

    async def read(self, subscription: Subscription, limit: int) -> list[Any]:
        """Return the next elements for one of several readers."""
        while not subscription.closed:  # as it may be after each wait: then its elements are not kept any longer
            start = subscription.position - self._base
            if start < len(self._buffer):
                found = [self._buffer[i] for i in range(start, min(len(self._buffer), start + limit))]
                subscription.position += len(found)
                self.drop()
                return found
            if self._fetching:
                await self._fetched.wait()
                continue
            if len(self._buffer) >= _KEPT:
                self.error = self._describe(StreamOverrun(self.label, _KEPT))
                self.end()
            self._fetching = True
            try:
                more = await self.fetch(limit)
            finally:
                self._fetching = False
                self._fetched.notify()
            if not more:
                break
            self._buffer.extend(more)
        return []

    def drop(self) -> None:
        """Drop the elements that every consumer has received."""
        if len(self.subscriptions) < self.consumers:
            return  # one has not begun: it needs all elements
        needed = min((s.position for s in self.subscriptions if not s.closed), default=None)
        while self._buffer and (needed is None or self._base < needed):
            self._buffer.popleft()
            self._base += 1

    async def aclose(self) -> None:
        """End the stream: its elements are not needed any longer."""
        if self.closed:
            return
        self.closed = self._ended = True
        self._buffer.clear()
        try:
            await self.source.aclose()
        finally:
            self.end()


def _unchanged(value: Any) -> Any:
    return value


class Subscription:
    """One reader of a stream. It is an asynchronous iterator."""

    __slots__ = ("_found", "closed", "position", "stream")

    def __init__(self, stream: LocalStream) -> None:
        self.stream = stream
        self.position = 0
        self.closed = False
        self._found: deque[Any] = deque()

    async def get(self, limit: int = _BATCH) -> list[Any]:
        """Wait for elements, and return at most ``limit``; none at the end.

        Raises:
            StreamFailed: the producer raised.
        """
        if self.closed:
            return []
        if self.stream.single and not self.position:
            return await self.stream.fetch(limit)
        return await self.stream.read(self, limit)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Any:
        if not self._found:
            try:
                self._found.extend(await self.get())
            except StreamFailed as failed:
                if isinstance(failed.__cause__, asyncio.CancelledError):
                    raise failed.__cause__ from None  # perhaps the reader's own, such as that of asyncio.timeout
                raise
            if not self._found:
                raise StopAsyncIteration
        return self._found.popleft()

    def close(self) -> None:
        """Drop what was not read: this reader wants no more."""
        self.closed = True
        self._found.clear()  # it is in a cycle with its stream, so elements would live until the next collection
        self.stream.drop()

    async def rest(self) -> list[Any]:
        """Read everything that is left."""
        found = list(self._found)
        while more := await self.get():
            found.extend(more)
        return found
