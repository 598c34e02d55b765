"""The log of one job. Everything that a reader sees comes from it, by offset."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dfm_async.errors import ResultsExpired
from dfm_async.model.events import Event, FrameCompleted, Metrics, Progress, StatusChanged, WorkerNotice
from dfm_async.model.limits import ResultLimits

__all__ = ["Backing", "LogReader", "ResultLog"]

_COMPACT = 4096
_EVENT = 256
"""About how many bytes an event takes besides its value."""
_BARE = frozenset({FrameCompleted, Metrics, Progress, StatusChanged, WorkerNotice})
"""Events that carry no results: with nobody reading, they make room also unseen."""
_GONE = FrameCompleted(-1, ())
"""Stands where an event was dropped, until the list is made shorter: the event itself must not be kept till then."""


class Backing(Protocol):
    """Where events stand that are no longer in memory."""

    async def read(self, start: int) -> Sequence[Event]:
        """Gives some events from an offset on, at least one if there is one."""
        ...

    async def frames_done(self, before: int) -> set[int]:
        """The parameter sets whose completion stands before an offset."""
        ...


class ResultLog:
    """Events with offsets 0, 1, 2, ..., any number of readers, and a bound on what is kept.

    When it holds more than its limits, the oldest events that every attached reader has seen are dropped. When there
    are none, :attr:`full` is true, and ``on_room`` is called when that changes.

    With a backing, events are seen by readers when they are safe there (:meth:`publish`), and what was dropped is read
    from there. With ``overflow="spill"`` everything that is safe may be dropped, seen or not. When nothing more can be
    made safe, :meth:`cut` ends the log behind the last event that is.
    """

    def __init__(self, job_id: str, limits: ResultLimits, backing: Backing | None = None, start: int = 0) -> None:
        self.job_id = job_id
        self.limits = limits
        self.backing = backing
        self.closed = False
        self.on_room: Callable[[], None] | None = None
        self.on_full: Callable[[], None] | None = None
        self._events: list[Event] = []
        self._sizes: list[int] = []
        self._start = 0
        self._base = start
        self._published = start
        self._bytes = 0
        self._full = False
        self._expired = False
        self._cut = False
        self._seen = 0
        self._kept_from = 0
        self._readers: set[LogReader] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def first(self) -> int:
        """The offset of the oldest event that is kept."""
        return self._base + self._start

    @property
    def end(self) -> int:
        """The offset that the next event will get."""
        return self._base + len(self._events)

    @property
    def held(self) -> int:
        """How many events are kept."""
        return len(self._events) - self._start

    @property
    def size(self) -> int:
        """How many bytes of encoded values are kept."""
        return self._bytes

    @property
    def weight(self) -> int:
        """About how many bytes of memory the log takes."""
        return self._bytes + _EVENT * self.held

    @property
    def full(self) -> bool:
        """Whether the log holds more than its limits and can drop nothing."""
        return self._full

    @property
    def readers(self) -> int:
        """How many readers are attached."""
        return len(self._readers)

    @property
    def seen(self) -> int:
        """The offset behind the last event that a reader has read."""
        return self._seen

    @property
    def readable(self) -> int:
        """The offset behind the last event that readers see."""
        return self.end if self.backing is None else self._published

    def publish(self, end: int) -> None:
        """With a backing: the events before this offset are safe, and readers may see them."""
        if end > self.end:  # written by somebody else: all of it stands in the backing
            self.expire()
            self._base = end
        self._published = end
        if self._full or (self.limits.overflow == "spill" and self._over()):
            self._trim()
        self.wake()

    def cut(self) -> list[Event]:
        """With a backing: drop the events that are not safe, and take no further ones. Gives what was dropped."""
        position = max(self._published - self._base, self._start)
        dropped = self._events[position:]
        self._bytes -= sum(self._sizes[position:])
        del self._events[position:], self._sizes[position:]
        self._cut = True
        return dropped

    def reopen(self) -> None:
        """Take further events, after the end or a cut."""
        self.closed = self._cut = False

    def _over(self) -> bool:
        return len(self._events) - self._start > self.limits.max_items or self._bytes > self.limits.max_bytes

    def append(self, event: Event, size: int = 0) -> None:
        """Adds an event, whose offset must be :attr:`end`. Readers see it after :meth:`wake`."""
        if self._cut:
            return
        self._events.append(event)
        self._sizes.append(size)
        self._bytes += size
        if self._over():
            self._trim()

    def extend(self, events: Sequence[Event], size: int) -> None:
        """Adds several events of about the same size."""
        if self._cut:
            return
        self._events.extend(events)
        self._sizes.extend([size] * len(events))
        self._bytes += size * len(events)
        if self._over():
            self._trim()

    def begin_at(self, offset: int) -> bool:
        """Begins at a later offset, as long as there was no event; tells whether it does."""
        if self._events or self._start or offset < self._base:
            return False
        self._base = self._published = offset
        return True

    def wake(self) -> None:
        """Tells waiting readers that there is something new."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def close(self) -> None:
        """Says that no further event will come."""
        self.closed = True
        self.wake()

    def expire(self) -> None:
        """Drops all events, when the last reader has left."""
        self._expired = True
        if not self._readers or self.backing is not None:
            self._base = self._kept_from = self.end
            self._start = self._bytes = 0
            self._events.clear()
            self._sizes.clear()

    def reader(self, after: int | None, *, data_only: bool = False) -> LogReader:
        """Attaches a reader that begins behind an offset, or at the log's beginning.

        Args:
            after: the offset.
            data_only: the reader wants only results and failures; other events may be missing.

        Raises:
            ResultsExpired: events that the reader wants are gone.
        """
        start = 0 if after is None else after + 1
        if start < self.first and self.backing is None:
            if not data_only or start < self._kept_from:
                raise ResultsExpired(self.job_id, start, self.first)
            start = self.first
        reader = LogReader(self, start)
        self._readers.add(reader)
        if self._full:
            self._trim()  # it may want nothing of what fills the log
        return reader

    def detach(self, reader: LogReader) -> None:
        """Detaches a reader: it no longer keeps events from being dropped."""
        self._readers.discard(reader)
        if self._expired:
            self.expire()
        elif self._full:
            self._trim()
            if self._full and not self._readers and self.on_full is not None:
                self.on_full()

    def get(self, offset: int) -> Event:
        """Gives one event.

        Raises:
            ResultsExpired: it was dropped.
        """
        index = offset - self._base
        if index < self._start:
            raise ResultsExpired(self.job_id, offset, self.first)
        return self._events[index]

    def read(self, reader: LogReader) -> Event | None:
        """Gives a reader its next event, or None if there is none yet, or it must be fetched.

        Raises:
            ResultsExpired: it was dropped.
        """
        position = reader.position
        index = position - self._base
        if index >= len(self._events) or (self.backing is not None and position >= self._published):
            return None
        if index < self._start:
            if self.backing is not None:
                return None
            raise ResultsExpired(self.job_id, position, self.first)
        event = self._events[index]
        position += 1
        reader.position = position
        self.passed(position)
        return event

    def take(self, reader: LogReader, most: int) -> list[Event]:
        """Gives a reader its next events, as far as they are in memory: at most so many, none if there is none yet.

        Raises:
            ResultsExpired: they were dropped.
        """
        index = reader.position - self._base
        end = self.readable - self._base
        if index >= end:
            return []
        if index < self._start:
            if self.backing is not None:
                return []
            raise ResultsExpired(self.job_id, reader.position, self.first)
        found = self._events[index : min(end, index + most)]
        reader.position += len(found)
        self.passed(reader.position)
        return found

    def passed(self, position: int) -> None:
        """A reader has come to a position: what lies before it may make room."""
        if position > self._seen:
            self._seen = position
        if self._full:
            self._trim()

    async def frames_ahead(self, offset: int, unfinished: Iterable[int], opened: int, runs_here: bool) -> Iterable[int]:
        """The parameter sets that are not completed before an offset, in order.

        Args:
            offset: the offset.
            unfinished: those that are under way.
            opened: how many were ever opened.
            runs_here: whether it is known here what is under way.
        """
        if self.backing is None or (runs_here and offset >= self.first):
            ahead = self._events[max(self._start, offset - self._base) :]
            found = {event.frame[0] for event in ahead if type(event) is FrameCompleted}
            return sorted(found.union(unfinished))
        done = await self.backing.frames_done(offset)
        return (index for index in range(opened) if index not in done)  # a damaged file may claim billions

    async def wait(self) -> None:
        """Waits until :meth:`wake` is called."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._waiting = [other for other in self._waiting if other is not future]

    def shed(self) -> None:
        """Drops everything that every attached reader has seen, also if there is room."""
        self._drop(0, 0)

    def _trim(self) -> None:
        """Drops what may be dropped while the log is over its limits, and tells whether it is full."""
        limits = self.limits
        self._drop(limits.max_items, limits.max_bytes)
        was = self._full
        self._full = self.held > limits.max_items or self._bytes > limits.max_bytes
        if was and not self._full and self.on_room is not None:
            self.on_room()
        elif self._full and not was and self.on_full is not None:
            self.on_full()

    def _drop(self, max_items: int, max_bytes: int) -> None:
        seen = min((reader.position for reader in self._readers), default=self._seen) - self._base
        start, count = self._start, len(self._events)
        events, free = self._events, not self._readers
        safe = count if self.backing is None else self._published - self._base
        if self.limits.overflow == "spill":
            seen = safe
        while start < safe and (count - start > max_items or self._bytes > max_bytes):
            bare = type(events[start]) in _BARE
            if start >= seen and not (bare and free):
                break
            if not bare:
                self._kept_from = self._base + start + 1
            self._bytes -= self._sizes[start]
            events[start] = _GONE
            start += 1
        self._start = start
        if start > _COMPACT and start * 2 > count:
            del self._events[:start], self._sizes[:start]
            self._base += start
            self._start = 0


class LogReader:
    """Reads a log from a position on. Keeps what it has not seen from being dropped while it is attached."""

    __slots__ = ("_fetched", "log", "position")

    def __init__(self, log: ResultLog, position: int) -> None:
        self.log = log
        self.position = position
        self._fetched: deque[Event] | None = None

    def next_nowait(self) -> Event | None:
        """Gives the next event, or None if there is none yet.

        Raises:
            ResultsExpired: it was dropped.
        """
        if self._fetched:
            self.position += 1
            self.log.passed(self.position)
            return self._fetched.popleft()
        return self.log.read(self)

    def take_nowait(self, most: int) -> list[Event]:
        """Gives the next events that are there, at most so many.

        Raises:
            ResultsExpired: they were dropped.
        """
        fetched = self._fetched
        if not fetched:
            return self.log.take(self, most)
        found = [fetched.popleft() for _ in range(min(most, len(fetched)))]
        self.position += len(found)
        self.log.passed(self.position)
        return found

    async def next(self) -> Event | None:
        """Waits for the next event; None when the log has ended."""
        log = self.log
        while True:
            event = self.next_nowait()
            if event is not None:
                return event
            if log.backing is not None and self.position < min(log.first, log.readable):
                found = await log.backing.read(self.position)
                if not found:
                    raise ResultsExpired(log.job_id, self.position, log.end)
                self._fetched = deque(found)
            elif log.closed and self.position >= log.readable:
                return None
            else:
                await log.wait()

    def close(self) -> None:
        """Detaches from the log."""
        self.log.detach(self)
