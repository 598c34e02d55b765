"""Iterators over a job's log."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Generic, Literal, NoReturn, Self, TypeVar

from dfm_async.model.events import Event, Failure, FrameCompleted, Result
from dfm_async.model.status import JobStatus
from dfm_async.results.log import LogReader
from dfm_async.results.record import JobRecord

__all__ = ["EventStream", "ResultStream"]

T = TypeVar("T")


class _Stream(Generic[T]):
    """A closable iterator. It attaches to the log when the first item is asked for."""

    _data_only = False

    def __init__(self, record: JobRecord, after: int | None) -> None:
        self._record = record
        self._after = after
        self._reader: LogReader | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Detaches from the log. Safe to call more than once."""
        self._detach()

    def attach(self) -> LogReader:
        """Begins to read; what is not read yet is kept from now on."""
        if self._reader is None:
            self._reader = self._record.log.reader(self._after, data_only=self._data_only)
            self._loop = asyncio.get_running_loop()
        return self._reader

    def _detach(self) -> None:
        self._closed = True
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __del__(self) -> None:
        # An iterator that was left in the middle must not keep the producers waiting.
        reader, loop = self._reader, self._loop
        if reader is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(reader.close)


class EventStream(_Stream[Event]):
    """All events of a job, in order. Ends when the job's log has ended."""

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        event = await self.attach().next()
        if event is None:
            self._detach()
            if self._record.hidden is not None:
                raise self._record.hidden
            raise StopAsyncIteration
        return event


class ResultStream(_Stream[Result]):
    """The results of a job, of one place or of all.

    With ``errors="raise"`` it gives all good results and then raises, if the job failed; with ``errors="yield"`` it
    gives failures as items. An aborted job raises in both cases.
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
        self._order: _Order | None = None

    def _wanted(self, event: Event) -> bool:
        kind = type(event)
        if kind is Result or (kind is Failure and self._failures):
            return self._place is None or event.place == self._place  # type: ignore[union-attr]
        return False

    async def __anext__(self) -> Result:
        if self._closed:
            raise StopAsyncIteration
        reader = self._reader
        if reader is None:
            reader = self.attach()
            if self._ordered:
                self._order = await self._make_order(reader.position)
        if self._order is not None:
            return await self._next_in_order(reader, self._order)
        place, failures = self._place, self._failures
        while True:
            event = reader.next_nowait()
            if event is None:
                event = await reader.next()
                if event is None:
                    await self._end()
            kind = type(event)
            if (kind is Result or (failures and kind is Failure)) and (
                place is None or event.place == place  # type: ignore[union-attr]
            ):
                return event  # type: ignore[return-value] # a Failure only if asked for
            if kind is Failure:
                self._check(event)  # type: ignore[arg-type] # it is one

    async def _make_order(self, position: int) -> _Order:
        # A reader that begins in the middle waits only for the frames that were not done at that point.
        record = self._record
        opened = record.next_frame
        ahead = await record.log.frames_ahead(position, record.open_frames.keys(), opened, record.runs_here)
        return _Order(self._place is not None and self._place in record.plan.ordered_places, ahead, opened)

    async def _next_in_order(self, reader: LogReader, order: _Order) -> Result:
        while True:
            if order.ready:
                return order.ready.popleft()  # type: ignore[return-value] # a Failure only if asked for
            event = await reader.next()
            if event is not None:
                if type(event) is Failure and not self._failures:
                    self._check(event)
                order.take(event, self._wanted(event))
            elif not order.flush():
                await self._end()

    def _check(self, failure: Failure) -> None:
        """A job that has not failed has no failures, unless a value of it cannot be rebuilt by this reader."""
        if self._record.status is JobStatus.FINISHED and (self._place is None or failure.place == self._place):
            self._detach()
            raise failure.error

    async def _end(self) -> NoReturn:
        self._detach()
        await self._record.load()
        self._raise_outcome()
        raise StopAsyncIteration

    def _raise_outcome(self) -> None:
        error = self._record.outcome()
        if error is not None and not (self._failures and self._record.status is JobStatus.FAILED):
            raise error


class _Order:
    """Puts results into the order of their frames. Holds back those of a parameter set until all before it are done."""

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
