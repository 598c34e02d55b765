"""Iterators over a job's log."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, Self

from dfm_async.errors import DecodingError
from dfm_async.model.events import Event, Failure, FrameCompleted, Result
from dfm_async.model.status import JobStatus
from dfm_async.results.log import LogReader
from dfm_async.results.record import JobRecord

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Item_co = TypeVar("Item_co", covariant=True, default=Result)
else:
    from typing import TypeVar

    Item_co = TypeVar("Item_co", covariant=True)


_LOOP: Final = "'async for item in ...', or '[item async for item in ...]' for a list"


def _article(found: object) -> str:
    name = type(found).__name__
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


class ClosableIterator:
    """An iterator with ``aclose()``, which ``async with`` calls."""

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release what the iterator holds. Safe to call more than once."""

    if not TYPE_CHECKING:  # type checkers refuse them themselves

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{_article(self)} is asynchronous: write {_LOOP}, or use a session of dfm_async.sync")

        def __await__(self) -> NoReturn:
            raise TypeError(f"{_article(self)} is an iterator and cannot be awaited: write {_LOOP}")


class _LogStream(ClosableIterator):
    """Attaches to the log with the first item."""

    _data_only = _skips = False

    def __init__(self, record: JobRecord, after: int | None) -> None:
        self._record = record
        self._after = after
        self._reader: LogReader | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def aclose(self) -> None:
        """Detach from the log. Safe to call more than once."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def attach(self) -> LogReader:
        """Begin to read; what is not read yet is kept from now on."""
        if self._reader is None:
            self._reader = self._record.log.reader(self._after, data_only=self._data_only)
            self._reader.skips = self._skips
            self._loop = asyncio.get_running_loop()
        return self._reader

    def __del__(self) -> None:
        # An iterator that was left in the middle must not keep the producers waiting.
        reader, loop = self._reader, self._loop
        if reader is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(reader.close)


class EventStream(_LogStream):
    """All events of a job, in order. Ends when the job's log has ended."""

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        event = await self.attach().next()
        if event is None:
            await self.aclose()
            if self._record.hidden is not None:
                raise self._record.hidden
            raise StopAsyncIteration
        return event


class ResultStream(_LogStream, Generic[Item_co]):
    """The results of a job, of one place or of all.

    With ``errors="raise"`` it yields all good results and then raises, if the job failed; with ``errors="yield"`` it
    yields failures as items: one for each call that failed, or with a place, one for each result of it that does not
    come. An aborted job raises in both cases.
    """

    _data_only = True

    def __init__(
        self,
        record: JobRecord,
        place: str | None,
        after: int | None,
        ordered: bool,
        errors: Literal["raise", "yield"],
    ) -> None:
        super().__init__(record, after)
        self._place = place
        self._failures = errors == "yield"
        self._ordered = ordered
        self._skips = not ordered
        self._order: _FrameOrder | None = None

    def _wanted(self, event: Event) -> bool:
        kind = type(event)
        if kind is Result:
            return self._place is None or event.place == self._place  # type: ignore[union-attr]
        return kind is Failure and self._failures and self._reports(event)  # type: ignore[arg-type] # it is one

    def _reports(self, failure: Failure) -> bool:
        """Return whether a failure is an item. Without a place, those that follow from others are not."""
        if self._place is not None:
            return failure.place == self._place
        return failure.place is None or type(failure.error) is DecodingError  # of the result itself

    async def __anext__(self) -> Item_co:
        if self._closed:
            raise StopAsyncIteration
        reader = self._reader
        if reader is None:
            reader = self.attach()
        if self._ordered and self._order is None:
            order = await self._make_order(reader.position)
            self._order = self._order or order  # unless another task was faster
        if self._order is not None:
            return await self._next_in_order(reader, self._order)  # type: ignore[no-any-return]
        place, failures = self._place, self._failures
        while True:
            event = reader.next_nowait()
            if event is None:
                if not await reader.more():
                    await self._end()
                continue
            kind = type(event)
            if kind is Result and (place is None or event.place == place):  # type: ignore[union-attr]
                return event  # type: ignore[return-value]
            if kind is Failure:
                if not failures:
                    await self._check(event)  # type: ignore[arg-type] # it is one
                elif self._reports(event):  # type: ignore[arg-type]
                    return event  # type: ignore[return-value]

    async def _make_order(self, position: int) -> _FrameOrder:
        # A reader that begins in the middle waits only for the frames that were not done at that point.
        record = self._record
        opened = record.next_frame
        ahead = await record.log.frames_ahead(position, record.open_frames.keys(), opened, record.runs_here)
        return _FrameOrder(self._place is not None and self._place in record.plan.ordered_places, ahead, opened)

    async def _next_in_order(self, reader: LogReader, order: _FrameOrder) -> Any:
        while True:
            if order.ready:
                return order.ready.popleft()
            event = await reader.next()
            if event is not None:
                if type(event) is Failure and not self._failures:
                    await self._check(event)
                order.take(event, self._wanted(event))
            elif not order.flush():
                await self._end()

    async def _check(self, failure: Failure) -> None:
        """Raise a failure of a job that has not failed: a value that this reader cannot decode."""
        if self._record.status is JobStatus.FINISHED and (self._place is None or failure.place == self._place):
            await self.aclose()
            raise failure.error

    async def _end(self) -> NoReturn:
        await self.aclose()
        if self._record.loader is not None:
            await self._record.load()
        error = self._record.outcome()
        if error is not None and not (self._failures and self._record.status is JobStatus.FAILED):
            raise error
        raise StopAsyncIteration


class _FrameOrder:
    """Put results into the order of their frames: those of a parameter set wait until all before it are done."""

    def __init__(self, direct: bool, ahead: Iterable[int], opened: int) -> None:
        self.ready: deque[Event] = deque()
        self._direct = direct
        self._held: dict[int, list[Result | Failure]] = {}
        self._done: set[int] = set()
        self._order = itertools.chain(ahead, itertools.count(opened))
        self._next = next(self._order)

    def take(self, event: Event, wanted: bool) -> None:
        if type(event) is FrameCompleted:
            self._done.add(event.frame[0])
            while self._next in self._done:
                self._release(self._next)
                self._done.discard(self._next)
                self._next = next(self._order)
                if self._direct:
                    self.ready.extend(self._held.pop(self._next, ()))
        elif wanted and isinstance(event, (Result, Failure)):
            root = event.frame[0] if event.frame else self._next
            if self._direct and root == self._next:
                self.ready.append(event)  # one yield outside all loops: its elements come in order by themselves
            else:
                self._held.setdefault(root, []).append(event)

    def _release(self, root: int) -> None:
        self.ready.extend(sorted(self._held.pop(root, ()), key=lambda event: (event.frame, event.offset)))

    def flush(self) -> bool:
        for root in sorted(self._held):
            self._release(root)
        return bool(self.ready)
