"""Open streams: each reads for one client, one job or all of them, and can be told to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from dfm_async.errors import DfmError
from dfm_async.model.events import Event
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.web.access import Principal
from dfm_async.web.answers import Refusal
from dfm_async.web.course import Course, Phase
from dfm_async.web.limits import WebLimits

__all__ = ["JobReader", "Seat", "Streams"]

_log = logging.getLogger(__name__)

_BATCH: Final = 256
"""How many events are written at once, if so many are there."""


class JobReader:
    """Reads a job's log for one client. Ends with the log, when the service drains, or when the client is gone.

    An interrupted job is not at its end: it can be resumed, here or by another process, and its reader waits for that.

    Args:
        session: the session that knows the job.
        job: the job.
        after: the offset of the last event that the client has; -1 if it has none.

    Attributes:
        course: the phase of the stream.
        position: the offset of the last event that was given; -1 before the first.
        interrupted: whether everything was given of a job that is interrupted.
    """

    def __init__(self, session: Session, job: Job, after: int) -> None:
        self.course = Course(self._wake)
        self.job = job
        self.position = after
        self.interrupted = False
        self._session = session
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
                event = await self._next()
        except TimeoutError:  # nothing is lost by it: an event counts as read only when it is given
            return []
        finally:
            self._waiting = None
        if event is None:
            if not self.interrupted:
                # A log that is closed while its job goes on cannot be followed from here any more.
                self.course.reach(Phase.ENDED if self.job.status.terminal else Phase.DRAINING)
            return []
        return [event, *self._reader.take_nowait(most - 1)] if most > 1 else [event]

    async def _next(self) -> Event | None:
        """Waits for the next event; None at the end of the log, and once when the job turns out to be interrupted."""
        while (event := await self._reader.next()) is None and self.job.status is JobStatus.INTERRUPTED:
            known = await self._session.reattach(self.job.job_id)  # another process may have resumed the job
            if not known.was_found or known.info().created != self.job.info().created:
                break  # it was forgotten
            if self.log.closed:
                if not self.interrupted:
                    self.interrupted = True
                    return None
                await self.log.wait()
        self.interrupted = False
        return event

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
    async def reading(self, session: Session, job: Job, after: int) -> AsyncIterator[JobReader]:
        """Reads a job behind an offset.

        Raises:
            ResultsExpired: what comes behind it is gone.
        """
        reader = JobReader(session, job, after)
        with self.taken(reader.course):
            try:
                yield reader
            finally:
                await reader.close()

    async def linger(self, *ends: Awaitable[object]) -> None:
        """Keeps the seat of a client that reads nothing until one of these returns, or the service drains.

        The server still buffers what the client has not read. A client that could get another seat for that
        connection's would make the server buffer without bound.
        """
        await self._streams.linger(*ends)

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
        self._drained = asyncio.Event()
        self.draining = False
        """Whether no further streams are opened, and the open ones end."""
        self.opened = 0
        """How many were ever opened."""
        self.stalled = 0
        """How many ended because their client took nothing for too long."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def seats(self) -> int:
        """The number of connections that count: open streams, and those of clients that read nothing any more."""
        return self._seats

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
        limits, own = self._limits, self._counts.get(principal.id, 0)
        if self._seats >= limits.streams:
            raise Refusal(429, "streams", "too many streams are open", retry_after=limits.retry)
        # The last tenth is for principals that have few: one or two with many must not keep everybody else out.
        rest = limits.streams // 10
        if own >= limits.streams_per_principal or (self._seats >= limits.streams - rest and own >= max(1, rest // 10)):
            raise Refusal(429, "streams", f"you have {own} streams open, as many as you may", retry_after=limits.retry)

    async def linger(self, *ends: Awaitable[object]) -> None:
        """Waits until one of these returns, or the service drains."""
        tasks = [asyncio.ensure_future(end) for end in (*ends, self._drained.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def open(self) -> None:
        """Opens streams again, after a drain."""
        self.draining = False
        self._drained = asyncio.Event()

    def drain(self) -> None:
        """Opens no further streams, and has the open ones end. No client can hold that up longer than one write."""
        self.draining = True
        self._drained.set()
        for course in self._open:
            course.reach(Phase.DRAINING)
