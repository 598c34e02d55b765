"""Streams: values that are consumed element by element, with backpressure.

A stream with one consumer holds nothing: the consumer's pace is the producer's. With several consumers, the fastest
sets the pace, and elements are kept for the others up to a limit, beyond which the stream fails; so consumers that wait
for each other cannot hang.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from dfm_async.errors import StreamOverrun
from dfm_async.model.error_record import ErrorRecord
from dfm_async.net.tokens import StreamValue
from dfm_async.runtime.faults import cancel_task, is_our_cancellation
from dfm_async.runtime.threads import IteratorCancelled

__all__ = ["AsyncSource", "Source", "Stream", "StreamFailed", "Subscription"]

_KEPT: Final = 100_000
_BATCH: Final = 256


class Source(Protocol):
    """Where a stream's elements come from."""

    async def get(self, limit: int) -> list[Any]:
        """Waits for elements and gives at most ``limit`` of them; none at the end."""
        ...

    async def aclose(self) -> None:
        """Ends the source."""
        ...

    async def wait_ended(self) -> None:
        """Waits until no code of the source runs any more."""
        ...


class StreamFailed(Exception):
    """A stream ended with an error."""

    def __init__(self, error: ErrorRecord) -> None:
        super().__init__(f"{error.node} raised {error.type_name}: {error.message}")
        self.error = error


class AsyncSource:
    """The elements of an asynchronous iterator. ``enter`` sets the operation's context and gives the way back."""

    def __init__(self, iterator: AsyncIterator[Any], enter: Callable[[], Callable[[], None]]) -> None:
        self.iterator = iterator
        self._enter = enter
        self._ended = False
        self._reader: asyncio.Task[Any] | None = None
        self.transform: Callable[[Any], Any] | None = None

    async def get(self, limit: int) -> list[Any]:
        """Waits for the next element."""
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
        """Must be open while the iterator runs: in its reader's task, but with its own operation's context."""
        leave = self._enter()
        self._reader = asyncio.current_task()
        try:
            yield
        finally:
            self._reader = None
            leave()

    async def aclose(self) -> None:
        """Closes the iterator. Whoever still reads it is cancelled: nobody waits for that reader any more."""
        self._ended = True
        if self._reader is not None:
            cancel_task(self._reader)
            await asyncio.wait([self._reader])
        close = getattr(self.iterator, "aclose", None)
        if close is not None:
            await close()

    async def wait_ended(self) -> None:
        """Returns at once: what runs of an asynchronous iterator runs in its reader."""


class Stream(StreamValue):
    """A stream at the site that it is read at.

    Args:
        label: the node that produces it.
        source: where the elements come from.
        consumers: how many will read it; it is known before the first begins.
        describe: turns what the source raises into a record, once.
    """

    __slots__ = (
        "_base",
        "_begun",
        "_buffer",
        "_describe",
        "_ended",
        "_error",
        "_fetching",
        "closed",
        "consumers",
        "label",
        "on_end",
        "source",
        "subscriptions",
    )

    def __init__(
        self, label: str, source: Source, consumers: int, describe: Callable[[BaseException], ErrorRecord]
    ) -> None:
        self.label = label
        self.source = source
        self.consumers = consumers
        self.subscriptions: list[Subscription] = []
        self.closed = False
        self.on_end: Callable[[], None] | None = None
        """Is called once, when the source has no more elements, has raised, or is wanted no more."""
        self._describe = describe
        self._buffer: deque[Any] = deque()
        self._base = 0
        self._begun = False
        self._ended = False
        self._error: ErrorRecord | None = None
        self._fetching: asyncio.Future[None] | None = None

    def subscribe(self) -> Subscription:
        """Begins to read the stream from its first element."""
        subscription = Subscription(self)
        self.subscriptions.append(subscription)
        return subscription

    @property
    def error(self) -> ErrorRecord | None:
        """What the source has raised, if it has."""
        return self._error

    def expect(self, change: int) -> None:
        """More consumers will come than were expected, or fewer."""
        self.consumers += change
        self.drop()

    @property
    def single(self) -> bool:
        """Whether there is only one consumer, so that elements need not be kept."""
        return self.consumers <= 1

    def transform_early(self, transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Has the source transform its elements, if they have one consumer and none was produced yet.

        The producer may reuse an object for the next element, so elements are transformed as soon as possible.

        Returns:
            What the consumer has to apply to each element, for as long as it reads.
        """
        if self.single and not self._begun and hasattr(self.source, "transform"):
            self.source.transform = transform
            return _unchanged
        return transform

    async def fetch(self, limit: int) -> list[Any]:
        """Gets elements from the source, describing what it raises."""
        if self._error is not None:
            raise StreamFailed(self._error)
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
        """Nothing more comes from the source."""
        self._ended = True
        call, self.on_end = self.on_end, None
        if call is not None:
            call()

    def failed(self, error: BaseException) -> StreamFailed:
        """Describes what the source raised, for all readers. If it read a stream that failed, it is that failure."""
        self._error = error.error if isinstance(error, StreamFailed) else self._describe(error)
        self.end()
        return StreamFailed(self._error)

    async def read(self, subscription: Subscription, limit: int) -> list[Any]:
        """Gives the next elements for one of several readers."""
        while not subscription.closed:  # as it may be after each wait: then its elements are not kept any more
            start = subscription.position - self._base
            if start < len(self._buffer):
                found = [self._buffer[i] for i in range(start, min(len(self._buffer), start + limit))]
                subscription.position += len(found)
                self.drop()
                return found
            if self._fetching is not None:
                await asyncio.shield(self._fetching)
                continue
            if len(self._buffer) >= _KEPT:
                self._error = self._describe(StreamOverrun(self.label, _KEPT))
                self.end()
            self._fetching = asyncio.get_running_loop().create_future()
            try:
                more = await self.fetch(limit)
            finally:
                self._fetching.set_result(None)
                self._fetching = None
            if not more:
                break
            self._buffer.extend(more)
        return []

    def drop(self) -> None:
        """Forgets the elements that every consumer has had."""
        if len(self.subscriptions) < self.consumers:
            return  # one has not begun: it will want everything
        needed = min((s.position for s in self.subscriptions if not s.closed), default=None)
        while self._buffer and (needed is None or self._base < needed):
            self._buffer.popleft()
            self._base += 1

    async def aclose(self) -> None:
        """Ends the stream: nobody wants its elements any more."""
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

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.position = 0
        self.closed = False
        self._found: deque[Any] = deque()

    async def get(self, limit: int = _BATCH) -> list[Any]:
        """Waits for elements and gives at most ``limit``; none at the end.

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
        """Says that this reader wants no more."""
        self.closed = True
        self.stream.drop()

    async def rest(self) -> list[Any]:
        """Reads everything that is left."""
        found = list(self._found)
        while True:
            more = await self.get()
            if not more:
                return found
            found.extend(more)
