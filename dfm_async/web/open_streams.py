"""Open streams: each reads one job, or all of them, for one client, and ends when the service drains."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import IntEnum
from typing import Any, Final

from starlette.types import Receive

from dfm_async.base.signals import Signal
from dfm_async.errors import DfmError
from dfm_async.model.events import Event
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.web.access import Principal
from dfm_async.web.limits import WebLimits, counted, has_share
from dfm_async.web.responses import Refusal

_log = logging.getLogger(__name__)

_BATCH: Final = 256
"""The most events that are written at once."""


async def disconnected(receive: Receive, kind: str = "http.disconnect") -> None:
    """Return when the client has disconnected. Its messages are ignored."""
    while (await receive())["type"] != kind:
        pass


class StreamPhase(IntEnum):
    """The phase of a stream. A later one has precedence: a client that is gone is not notified of the end."""

    OPEN = 0
    DRAINING = 1
    """The service drains, or the stream cannot go on here; the client may reconnect."""
    ENDED = 2
    """Everything was sent, and nothing more will come."""
    GONE = 3
    """The client has disconnected."""
    STALLED = 4
    """The client read nothing for too long, and was abandoned."""


class StreamState:
    """The phase of one stream, which only moves forward. A change wakes the task that waits for something to send."""

    __slots__ = ("_wake", "phase")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.phase = StreamPhase.OPEN

    def reach(self, phase: StreamPhase) -> None:
        """Enter a phase, unless the stream is past it."""
        if phase > self.phase:
            self.phase = phase
            self._wake()

    @property
    def open(self) -> bool:
        """Whether further events may be sent."""
        return self.phase is StreamPhase.OPEN

    @property
    def gone(self) -> bool:
        """Whether there is no client to write to any longer."""
        return self.phase >= StreamPhase.GONE


class JobReader:
    """Reads a job's log for one client. Ends with the log, when the service drains, or when the client is gone.

    An interrupted job is not at its end: it can be resumed, here or by another process, and its reader waits for that.

    Attributes:
        state: the phase of the stream.
        position: the offset of the last event that was sent; -1 before the first.
        interrupted: whether everything was sent of a job that is interrupted.
    """

    def __init__(self, session: Session, job: Job, after: int) -> None:
        self.state = StreamState(self._wake)
        self.job = job
        self.position = after
        self.interrupted = False
        self._session = session
        self._events = job.events(after if after >= 0 else None)
        self._reader = self._events.attach()
        self.log = self._reader.log
        self._waiting: asyncio.Timeout | None = None

    def where(self) -> dict[str, Any]:
        """Return the fields of a log record about the stream."""
        return {"job": self.job.job_id, "offset": self.position}

    def notice(self, name: str) -> dict[str, Any]:
        """Return an event about the stream itself, with the offset at which to go on."""
        return {"event": name, "offset": self.position, "status": self.job.status.value}

    def last_notice(self) -> dict[str, Any]:
        """Return the last event of the stream."""
        return self.notice("end" if self.state.phase is StreamPhase.ENDED else "drain")

    async def stored(self) -> Event | None:
        """Return the next event, if it is available already."""
        available = self._reader.position < self._reader.log.readable
        return await self._reader.next() if available else None

    async def follow(self, timeout: float) -> list[Event]:  # noqa: ASYNC109 - it ends the wait, not the call
        """Return the next events as :meth:`batch` does; the stream drains if they cannot be read."""
        try:
            return await self.batch(timeout)
        except DfmError as error:  # the response has begun: the client gets the error when it reconnects
            _log.info("a stream cannot go on: %s", error, extra=self.where())
            self.state.reach(StreamPhase.DRAINING)
            return []

    async def batch(self, timeout: float, most: int = _BATCH) -> list[Event]:  # noqa: ASYNC109 - as above
        """Return the next events; none if none came within the timeout, or the stream ends.

        Raises:
            ResultsExpired: they have expired, as when the job is forgotten meanwhile.
            StoreError: they cannot be read.
        """
        if not self.state.open:
            return []
        # Readers of one log take the same events together, wherever they began, so that these are encoded once.
        most = min(most, _BATCH - self._reader.position % _BATCH)
        if found := self._reader.take_nowait(most):
            return found
        try:
            async with asyncio.timeout(timeout) as self._waiting:
                event = await self._next()
        except TimeoutError:  # nothing is lost by it: an event counts as read only when it is returned
            return []
        finally:
            self._waiting = None
        if event is None:
            if not self.interrupted:
                # A log that is closed while its job goes on cannot be followed from here any longer.
                self.state.reach(StreamPhase.ENDED if self.job.status.terminal else StreamPhase.DRAINING)
            return []
        return [event, *self._reader.take_nowait(most - 1)] if most > 1 else [event]

    async def _next(self) -> Event | None:
        """Wait for the next event; None at the end of the log, and once when the job turns out to be interrupted."""
        while (event := await self._reader.next()) is None and self.job.status is JobStatus.INTERRUPTED:
            known = await self._session.reattach(self.job.job_id)  # another process may have resumed the job
            if not known.was_found or known.info().created != self.job.info().created:
                break  # it was forgotten
            if self.log.closed:
                if not self.interrupted:
                    self.interrupted = True
                    return None
                await self.log.changed.wait()
        self.interrupted = False
        return event

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Detach from the log."""
        await self._events.aclose()


class StreamSlot:
    """The right to one stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    @asynccontextmanager
    async def reading(self, session: Session, job: Job, after: int) -> AsyncIterator[JobReader]:
        """Read a job behind an offset."""
        reader = JobReader(session, job, after)
        with self.used(reader.state):
            try:
                yield reader
            finally:
                await reader.close()

    @contextmanager
    def used(self, state: StreamState) -> Iterator[None]:
        """Use the slot for a stream, which is notified when the service drains."""
        self._streams.enter(state)
        try:
            yield
        finally:
            self._streams.leave(state)

    async def keep_until(self, *ends: Awaitable[object]) -> None:
        """Keep the slot of a client that reads nothing until one of these returns, or the service drains.

        The server still buffers what the client has not read. A client that could get another slot for that
        connection's would make the server buffer without bound.
        """
        tasks = [asyncio.ensure_future(end) for end in (*ends, self._streams.drained.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Streams:
    """The open streams, and how many of them there may be."""

    def __init__(self, limits: WebLimits) -> None:
        self._limits = limits
        self._open: set[StreamState] = set()
        self._counts: Counter[str] = Counter()
        self._changed = Signal()
        self.drained = asyncio.Event()
        """Is set when the service drains."""
        self.opened = 0
        """The number of streams that were ever opened."""
        self.stalled = 0
        """The number of streams that ended because their client read nothing for too long."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def slots(self) -> int:
        """The number of connections that count: open streams, and those of clients that read nothing any longer."""
        return self._counts.total()

    @property
    def draining(self) -> bool:
        """Whether no further streams are opened, and the open ones end."""
        return self.drained.is_set()

    def check_draining(self) -> None:
        """Refuse to begin anything new while the service drains."""
        if self.draining:
            raise Refusal(503, "draining", "the service is about to end")

    @contextmanager
    def slot(self, principal: Principal) -> Iterator[StreamSlot]:
        """Give a principal the right to one stream, and count it; refuse it if too many are open, or while draining."""
        self.check_draining()
        limits, own, slots = self._limits, self._counts[principal.id], self.slots
        if slots >= limits.streams:
            raise Refusal(429, "streams", "too many streams are open")
        if own >= limits.streams_per_principal or not has_share(own, slots, limits.streams):
            raise Refusal(429, "streams", f"you have {own} streams open, as many as you may have")
        with counted(principal.id, self._counts):
            yield StreamSlot(self)

    def enter(self, state: StreamState) -> None:
        """Add a stream."""
        self._open.add(state)
        self.opened += 1
        if self.draining:
            state.reach(StreamPhase.DRAINING)
        self._changed.notify()

    def leave(self, state: StreamState) -> None:
        """Remove a stream that has ended."""
        self._open.discard(state)
        self.stalled += state.phase is StreamPhase.STALLED
        self._changed.notify()

    async def until(self, number: int) -> None:
        """Return when this many streams are open."""
        await self._changed.wait_until(lambda: len(self._open) == number)

    def open(self) -> None:
        """Open streams again, after a drain."""
        self.drained = asyncio.Event()

    def drain(self) -> None:
        """Open no further streams, and end the open ones. A client can delay that by one write at most."""
        self.drained.set()
        for state in self._open:
            state.reach(StreamPhase.DRAINING)
