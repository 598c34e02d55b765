"""Open streams: each reads for one client, one job or all of them, and can be told to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from dfm_async.errors import DfmError
from dfm_async.model.events import Event
from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.answers import Refusal
from dfm_async.web.limits import WebLimits

__all__ = ["JobReader", "Reader", "Seat", "Streams"]

_log = logging.getLogger(__name__)

_BATCH: Final = 256
"""How many events are written at once, if so many are there."""


class Reader:
    """What one client reads. Ends when everything was given, when it is told to, or when the client is gone.

    Attributes:
        ended: whether there is nothing more to come, and everything was given.
        draining: whether the service wants the stream to end.
        gone: whether the client has left, or takes nothing any more.
        stalled: whether it was the latter.
    """

    def __init__(self) -> None:
        self.ended = False
        self.draining = False
        self.gone = False
        self.stalled = False

    @property
    def going_on(self) -> bool:
        """Whether further events may be given."""
        return not (self.ended or self.draining or self.gone)

    def drain(self) -> None:
        """Has the stream end; the client may come back elsewhere or later."""
        self.draining = True
        self.wake()

    def leave(self) -> None:
        """Has the stream end: nobody reads it."""
        self.gone = True
        self.wake()

    def stall(self) -> None:
        """Has the stream end: its client takes nothing."""
        self.stalled = True
        self.leave()

    def wake(self) -> None:
        """Lets whoever waits for something to give look at the reasons to end."""
        raise NotImplementedError


class JobReader(Reader):
    """Reads a job's log for one client. Ends with the log, too.

    Attributes:
        position: the offset of the last event that was given; -1 before the first.
    """

    def __init__(self, job: Job, after: int) -> None:
        super().__init__()
        self.job = job
        self.position = after
        self._events = job.events(after if after >= 0 else None)
        self._reader = self._events.attach()
        self.log = self._reader.log
        self._waiting: asyncio.Timeout | None = None

    async def stored(self) -> Event | None:
        """Gives the next event, if it is there already."""
        here = self._reader.position < self._reader.log.readable
        return await self._reader.next() if here else None

    async def follow(self, patience: float) -> list[Event]:
        """Gives the next events as :meth:`batch` does; if they cannot be had, that is a reason to end."""
        try:
            return await self.batch(patience)
        except DfmError as error:  # the answer has begun: the client is told when it comes back
            _log.info("a stream cannot go on: %s", error, extra={"job": self.job.job_id, "offset": self.position})
            self.draining = True
            return []

    async def batch(self, patience: float, most: int = _BATCH) -> list[Event]:
        """Gives the next events; none if none came for so many seconds, or there is a reason to end.

        Raises:
            ResultsExpired: they are gone, as when the job is forgotten meanwhile.
            StoreError: they cannot be read.
        """
        if not self.going_on:
            return []
        # Readers of one log take the same events together, wherever they began, so that these are written down once.
        most = min(most, _BATCH - self._reader.position % _BATCH)
        if found := self._reader.take_nowait(most):
            return found
        try:
            async with asyncio.timeout(patience) as self._waiting:
                event = await self._reader.next()
        except TimeoutError:  # nothing is lost by it: an event counts as read only when it is given
            return []
        finally:
            self._waiting = None
        if event is None:
            # A log that is closed while its job goes on cannot be followed from here any more.
            self.ended = self.job.status.ended
            self.draining = not self.ended
            return []
        return [event, *self._reader.take_nowait(most - 1)] if most > 1 else [event]

    def wake(self) -> None:
        """Ends the wait for an event."""
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Detaches from the log."""
        await self._events.aclose()


class Seat:
    """The right to one stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    @asynccontextmanager
    async def reading(self, job: Job, after: int) -> AsyncIterator[JobReader]:
        """Reads a job behind an offset.

        Raises:
            ResultsExpired: what comes behind it is gone.
        """
        reader = JobReader(job, after)
        with self.taken(reader):
            try:
                yield reader
            finally:
                await reader.close()

    @contextmanager
    def taken(self, reader: Reader) -> Iterator[None]:
        """A reader has the seat, and is told when the service drains."""
        self._streams.enter(reader)
        try:
            yield
        finally:
            self._streams.leave(reader)


class Streams:
    """The streams that are open, and how many of them there may be."""

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._seats = 0
        self._readers: set[Reader] = set()
        self._counts: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.draining = False
        """Whether no further streams are opened, and the open ones end."""
        self.opened = 0
        """How many were ever opened."""
        self.stalled = 0
        """How many ended because their client took nothing for too long."""

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def seat(self, principal: Principal) -> Iterator[Seat]:
        """Gives the right to one stream, and counts it.

        Raises:
            Refusal: there are too many already, or the service drains.
        """
        self._check(principal)
        self._seats += 1
        self._counts[principal.id] = self._counts.get(principal.id, 0) + 1
        try:
            yield Seat(self)
        finally:
            self._seats -= 1
            self._counts[principal.id] -= 1
            if not self._counts[principal.id]:
                del self._counts[principal.id]

    def enter(self, reader: Reader) -> None:
        """A stream begins."""
        self._readers.add(reader)
        self.opened += 1
        if self.draining:
            reader.drain()
        self._change()

    def leave(self, reader: Reader) -> None:
        """A stream has ended."""
        self._readers.discard(reader)
        self.stalled += reader.stalled
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, number: int) -> None:
        """Returns when so many streams are open."""
        while len(self._readers) != number:
            await self._changed.wait()

    def _check(self, principal: Principal) -> None:
        if self.draining:
            raise Refusal(503, "draining", "the service is about to end", retry_after=self._limits.retry)
        if self._seats >= self._limits.streams:
            raise Refusal(429, "streams", "too many streams are open", retry_after=self._limits.retry)
        if self._counts.get(principal.id, 0) >= self._limits.streams_per_principal:
            raise Refusal(429, "streams", "you have too many streams open", retry_after=self._limits.retry)

    def drain(self) -> None:
        """Opens no further streams, and has the open ones end. No client can hold that up longer than one write."""
        self.draining = True
        for reader in self._readers:
            reader.drain()
