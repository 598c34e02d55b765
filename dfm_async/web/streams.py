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
from dfm_async.web.course import Course, Phase
from dfm_async.web.limits import WebLimits

__all__ = ["JobReader", "Seat", "Streams"]

_log = logging.getLogger(__name__)

_BATCH: Final = 256
"""How many events are written at once, if so many are there."""


class JobReader:
    """Reads a job's log for one client. Ends with the log, when it is told to, or when the client is gone.

    Attributes:
        course: how it goes on.
        position: the offset of the last event that was given; -1 before the first.
    """

    def __init__(self, job: Job, after: int) -> None:
        self.course = Course(self._wake)
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
            self.course.reach(Phase.DRAINING)
            return []

    async def batch(self, patience: float, most: int = _BATCH) -> list[Event]:
        """Gives the next events; none if none came for so many seconds, or there is a reason to end.

        Raises:
            ResultsExpired: they are gone, as when the job is forgotten meanwhile.
            StoreError: they cannot be read.
        """
        if not self.course.going_on:
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
            self.course.reach(Phase.ENDED if self.job.status.ended else Phase.DRAINING)
            return []
        return [event, *self._reader.take_nowait(most - 1)] if most > 1 else [event]

    def _wake(self) -> None:
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
        with self.taken(reader.course):
            try:
                yield reader
            finally:
                await reader.close()

    @contextmanager
    def taken(self, course: Course) -> Iterator[None]:
        """A stream has the seat, and is told when the service drains."""
        self._streams.enter(course)
        try:
            yield
        finally:
            self._streams.leave(course)


class Streams:
    """The streams that are open, and how many of them there may be."""

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._seats = 0
        self._open: set[Course] = set()
        self._counts: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.draining = False
        """Whether no further streams are opened, and the open ones end."""
        self.opened = 0
        """How many were ever opened."""
        self.stalled = 0
        """How many ended because their client took nothing for too long."""

    def __len__(self) -> int:
        return len(self._open)

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

    def enter(self, course: Course) -> None:
        """A stream begins."""
        self._open.add(course)
        self.opened += 1
        if self.draining:
            course.reach(Phase.DRAINING)
        self._change()

    def leave(self, course: Course) -> None:
        """A stream has ended."""
        self._open.discard(course)
        self.stalled += course.phase is Phase.STALLED
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, number: int) -> None:
        """Returns when so many streams are open."""
        while len(self._open) != number:
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
        for course in self._open:
            course.reach(Phase.DRAINING)
