"""The log of one job. Everything that a reader gets comes from it, by offset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, get_args

from dfm_async.base.signals import Signal
from dfm_async.errors import ResultsExpired
from dfm_async.model.events import Event, Failure, FrameCompleted, Result
from dfm_async.model.options import ResultLimits
from dfm_async.results.unfinished import UnfinishedSets

_COMPACT = 4096
_EVENT = 256
"""The approximate number of bytes that an event takes besides its value."""
_BARE = frozenset(get_args(Event)) - {Result, Failure}
"""Events without results: while there is no reader, they may be dropped unread."""
_GONE = FrameCompleted(-1, ())
"""Replaces an event that was dropped until the list is compacted: the event itself must not be kept till then."""


class Backing(Protocol):
    """Reads the events that are no longer in memory."""

    async def read(self, start: int) -> Sequence[Event]:
        """Return some events from an offset on, at least one if there is one."""

    async def frames_done(self, before: int) -> set[int]:
        """Return the parameter sets that were completed before an offset."""


class LogOwner(Protocol):
    """Who writes a log."""

    def log_is_full(self) -> None:
        """Note that the log holds more than its limits and can drop nothing; or that it is so and lost a reader."""

    def log_has_room(self) -> None:
        """Note that the log is not full any longer."""


class ResultLog:
    """Events with offsets 0, 1, 2, ..., any number of readers, and a bound on what is kept.

    When it holds more than its limits, the oldest events that every attached reader has read are dropped. When there
    are none, :attr:`full` is true. ``owner`` is notified when that changes.

    With a backing, readers get events when they are safe there (:meth:`publish`), and dropped events are read from
    there. With ``overflow="spill"`` everything that is safe may be dropped, read or not. When nothing more can be made
    safe, :meth:`cut` ends the log after the last event that is.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_cut",
        "_events",
        "_expired",
        "_kept_from",
        "_published",
        "_readers",
        "_sizes",
        "_start",
        "backing",
        "changed",
        "closed",
        "end",
        "full",
        "job_id",
        "limits",
        "owner",
        "seen",
        "size",
        "unfinished",
    )

    def __init__(self, job_id: str, limits: ResultLimits, backing: Backing | None = None, start: int = 0) -> None:
        self.job_id = job_id
        self.limits = limits
        self.backing = backing
        self.closed = False
        self.owner: LogOwner | None = None
        self._events: list[Event] = []
        self._sizes: list[int] = []
        self._start = 0
        self._base = start
        self.end = start
        """The offset that the next event will get."""
        self._published = start
        self.size = 0
        """The number of bytes of encoded values that are kept."""
        self.full = False
        """Whether the log holds more than its limits and can drop nothing."""
        self.unfinished: UnfinishedSets | None = None
        """The parameter sets of the job that have not succeeded, if they are kept here."""
        self._expired = False
        self._cut = False
        self.seen = 0
        """The offset after the last event that a reader has read."""
        self._kept_from = 0
        self._readers: tuple[LogReader, ...] = ()
        self.changed = Signal()
        """Notifies waiting readers of events, and of the end."""

    @property
    def first(self) -> int:
        """The offset of the oldest event that is kept."""
        return self._base + self._start

    @property
    def held(self) -> int:
        """The number of events that are kept."""
        return len(self._events) - self._start

    @property
    def weight(self) -> int:
        """The approximate number of bytes of memory that the log takes."""
        kept = 0 if self.unfinished is None else self.unfinished.size
        return self.size + _EVENT * self.held + kept

    @property
    def readers(self) -> int:
        """The number of attached readers."""
        return len(self._readers)

    @property
    def readable(self) -> int:
        """The offset after the last event that readers can get."""
        return self.end if self.backing is None else self._published

    def publish(self, end: int) -> None:
        """With a backing: let readers get the events before this offset, which are safe."""
        if end > self.end:  # written by another process: all of it is in the backing
            self.expire()
            self._base = self.end = end
        self._published = end
        if self.full or (self.limits.overflow == "spill" and self._over()):
            self._trim()
        self.changed.notify()

    def cut(self) -> list[Event]:
        """With a backing: drop the events that are not safe, and accept no further ones. Return the dropped ones."""
        position = max(self._published - self._base, self._start)
        dropped = self._events[position:]
        self.size -= sum(self._sizes[position:])
        del self._events[position:], self._sizes[position:]
        self.end -= len(dropped)
        self._cut = True
        return dropped

    def reopen(self) -> None:
        """Accept further events, after the end or a cut."""
        self.closed = self._cut = False

    @property
    def limit_reached(self) -> str:
        """The limit that the log has exceeded, and by how much sites may exceed it."""
        limits = self.limits
        if self.held > limits.max_items:
            return f"max_items={limits.max_items}, which each site may exceed by window={limits.window}"
        return f"max_bytes={limits.max_bytes}, which each site may exceed by window_bytes={limits.window_bytes}"

    def _over(self) -> bool:
        return len(self._events) - self._start > self.limits.max_items or self.size > self.limits.max_bytes

    def append(self, event: Event, size: int = 0) -> None:
        """Add an event, whose offset must be :attr:`end`. Readers get it when :attr:`changed` is notified."""
        if self._cut:
            return
        self._events.append(event)
        self._sizes.append(size)
        self.end += 1
        self.size += size
        limits = self.limits
        if len(self._events) - self._start > limits.max_items or self.size > limits.max_bytes:
            self._trim()

    def extend(self, events: Sequence[Event], size: int) -> None:
        """Add several events of about the same size."""
        if self._cut:
            return
        self._events.extend(events)
        self._sizes.extend([size] * len(events))
        self.end += len(events)
        self.size += size * len(events)
        limits = self.limits
        if len(self._events) - self._start > limits.max_items or self.size > limits.max_bytes:
            self._trim()

    def begin_at(self, offset: int) -> bool:
        """Begin at a later offset, if there was no event yet. Return whether it does."""
        if self._events or self._start or offset < self._base:
            return False
        self._base = self._published = self.end = offset
        return True

    def close(self) -> None:
        """End the log: no further event will come."""
        self.closed = True
        self.changed.notify()

    def expire(self) -> None:
        """Drop all events, as soon as there is no reader."""
        self._expired = True
        if not self._readers or self.backing is not None:
            self._base = self._kept_from = self.end
            self._start = self.size = 0
            self._events.clear()
            self._sizes.clear()
            self.unfinished = None

    def reader(self, after: int | None, *, data_only: bool = False) -> LogReader:
        """Attach a reader that begins after an offset, or at the log's beginning.

        With ``data_only``, it needs only results and failures; other events may be missing.

        Raises:
            ResultsExpired: events that the reader needs were dropped.
        """
        start = 0 if after is None else after + 1
        if start < self.first and self.backing is None:
            if not data_only or start < self._kept_from:
                raise ResultsExpired(self.job_id, start, self.first)
            start = self.first
        reader = LogReader(self, start)
        self._readers += (reader,)
        if self.full:
            self._trim()  # it may need none of the events that fill the log
        return reader

    def detach(self, reader: LogReader) -> None:
        """Detach a reader: it no longer keeps events from being dropped."""
        self._readers = tuple([other for other in self._readers if other is not reader])
        if self._expired:
            self.expire()
        elif self.full:
            self._trim()
            if self.full and not self._readers and self.owner is not None:
                self.owner.log_is_full()

    def get(self, offset: int) -> Event:
        """Return one event.

        Raises:
            ResultsExpired: it was dropped.
        """
        index = offset - self._base
        if index < self._start:
            raise ResultsExpired(self.job_id, offset, self.first)
        return self._events[index]

    def read(self, reader: LogReader) -> Event | None:
        """Return the next event of a reader; None if there is none yet, or it must be fetched.

        Raises:
            ResultsExpired: it was dropped.
        """
        begin, base, events = reader.position, self._base, self._events
        end = len(events) if self.backing is None else self._published - base
        index = begin - base
        if index >= end:
            return None
        if index < self._start:
            if self.backing is not None:
                return None
            raise ResultsExpired(self.job_id, begin, self.first)
        event: Event | None = events[index]
        index += 1
        if reader.skips:
            while type(event) in _BARE:
                if index >= end:
                    event = None
                    break
                event = events[index]
                index += 1
        reader.position = position = base + index
        if position > self.seen:
            self.seen = position
        if self.full:
            self._trim()
        return event

    def take(self, reader: LogReader, most: int) -> list[Event]:
        """Return the next events of a reader, as far as they are in memory: at most ``most``, possibly none.

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
        """Note the position of a reader: events before it may be dropped."""
        if position > self.seen:
            self.seen = position
        if self.full:
            self._trim()

    async def frames_ahead(self, offset: int, unfinished: Iterable[int], opened: int, runs_here: bool) -> Iterable[int]:
        """Return the parameter sets that are not completed before an offset, in order.

        ``unfinished`` are those in flight, if ``runs_here``; ``opened`` is the number of those that were ever opened.
        """
        if self.backing is None or (runs_here and offset >= self.first):
            ahead = self._events[max(self._start, offset - self._base) :]
            found = {event.frame[0] for event in ahead if type(event) is FrameCompleted}
            return sorted(found.union(unfinished))
        done = await self.backing.frames_done(offset)
        return (index for index in range(opened) if index not in done)  # a damaged file may claim billions

    def shed(self) -> None:
        """Drop everything that every attached reader has read, also within the limits."""
        self._drop(0, 0)

    def _trim(self) -> None:
        """Drop what may be dropped while the log is over its limits, and update whether it is full."""
        limits = self.limits
        self._drop(limits.max_items, limits.max_bytes)
        was = self.full
        self.full = self._over()
        if self.owner is not None and was is not self.full:
            if self.full:
                self.owner.log_is_full()
            else:
                self.owner.log_has_room()

    def _drop(self, max_items: int, max_bytes: int) -> None:
        seen = min((reader.position for reader in self._readers), default=self.seen) - self._base
        start, count = self._start, len(self._events)
        events, free = self._events, not self._readers
        safe = count if self.backing is None else self._published - self._base
        if self.limits.overflow == "spill":
            seen = safe
        while start < safe and (count - start > max_items or self.size > max_bytes):
            bare = type(events[start]) in _BARE
            if start >= seen and not (bare and free):
                break
            if not bare:
                self._kept_from = self._base + start + 1
            self.size -= self._sizes[start]
            events[start] = _GONE
            start += 1
        self._start = start
        if start > _COMPACT and start * 2 > count:
            del self._events[:start], self._sizes[:start]
            self._base += start
            self._start = 0


class LogReader:
    """Reads a log from a position on. While it is attached, events that it has not read are not dropped."""

    __slots__ = ("_fetched", "log", "position", "skips")

    def __init__(self, log: ResultLog, position: int) -> None:
        self.log = log
        self.position = position
        self.skips = False
        """Whether it skips events other than results and failures that are in memory."""
        self._fetched: deque[Event] | None = None

    def next_nowait(self) -> Event | None:
        """Return the next event, or None if there is none yet.

        Raises:
            ResultsExpired: it was dropped.
        """
        if self._fetched:
            self.position += 1
            self.log.passed(self.position)
            return self._fetched.popleft()
        return self.log.read(self)

    def take_nowait(self, most: int) -> list[Event]:
        """Return the next events that are available, at most ``most``.

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
        """Wait for the next event; None when the log has ended."""
        while True:
            event = self.next_nowait()
            if event is not None:
                return event
            if not await self.more():
                return None

    async def more(self) -> bool:
        """Wait until there may be a further event; return False if the log has ended."""
        log = self.log
        if log.backing is not None and self.position < min(log.first, log.readable):
            position = self.position
            found = await log.backing.read(position)
            if self._fetched or self.position != position:
                return True  # another task has read on meanwhile
            if not found:
                raise ResultsExpired(log.job_id, position, log.end)
            self._fetched = deque(found)
        elif log.closed and self.position >= log.readable:
            return False
        else:
            await log.changed.wait()
        return True

    async def take(self, most: int) -> list[Event] | None:
        """Wait for further events, at most ``most``; an empty list if readers were only notified, None at the end."""
        found = self.take_nowait(most)
        if found:
            return found
        return self.take_nowait(most) if await self.more() else None

    def close(self) -> None:
        """Detach from the log."""
        self.log.detach(self)
