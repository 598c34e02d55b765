"""A connection as both ends use it: signs of life, answers that are waited for, large parts in both directions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

from dfm_async.errors import PeerGone, TransferFailed
from dfm_async.exchange.liveness import Liveness
from dfm_async.exchange.messages import Beat, Chunk, Message, Report, Withdrawn
from dfm_async.exchange.pipes.base import Pipe
from dfm_async.exchange.progress import ProgressTracker, TransferState
from dfm_async.exchange.tasks import OwnedTasks
from dfm_async.exchange.transfers import MemorySink, Pull, Sink, Source

__all__ = ["Link", "LinkOptions"]

T = TypeVar("T")

_BEATS: Final = 3
"""How many signs of life are given in the time that the other side accepts silence: one or two may be late."""
_FLUSH: Final = 2.0
"""How long a peer that does not read may keep what was said last, in seconds."""


class LinkOptions(Protocol):
    """The options that both ends have."""

    @property
    def heartbeat_interval(self) -> float:
        """How long this side may say nothing."""
        ...

    @property
    def heartbeat_timeout(self) -> float:
        """How long the other side may say nothing."""
        ...

    @property
    def resend_interval(self) -> float:
        """How long a message may be unanswered before it is sent again."""
        ...

    @property
    def max_resends(self) -> int | None:
        """How often it is sent again."""
        ...

    @property
    def streaming_idle_timeout(self) -> float:
        """How long a transfer may stand still."""
        ...


class Link:
    """One end of a connection that is up.

    Args:
        pipe: the transport.
        options: how long to wait for what.
        on_message: is called for every message that is not the link's own business.
        on_gone: is called once, when the other side is gone, with the reason.
    """

    def __init__(
        self,
        pipe: Pipe,
        options: LinkOptions,
        on_message: Callable[[Message], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.pipe = pipe
        self.tasks = OwnedTasks()
        self._options = options
        self._on_message = on_message
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._gone: str | None = None
        self.silent = False
        """Whether the other side is gone because it gave no sign of life: its process may still be there."""
        self._closing = False
        self._sources: dict[str, Source] = {}
        self._pulls: dict[tuple[str, int, str], Pull] = {}
        self._moved: dict[str, float] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        interval = options.heartbeat_interval
        if pipe.silence:  # the other side is less patient than we would be
            interval = min(interval, pipe.silence / _BEATS)
        self._liveness = Liveness(interval, options.heartbeat_timeout, self._loop.time())
        self._payload = _Payload(self._liveness, self._loop.time)
        self._timer = self._loop.call_later(interval, self._look)

    def open(self) -> None:
        """Begins to take what comes."""
        self.pipe.open(self)

    @property
    def gone(self) -> str | None:
        """Why the other side is gone; None if it is there."""
        return self._gone

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queues a message."""
        if not self._closing:
            self._liveness.said(self._loop.time())
            self.pipe.send(message, data)

    async def drain(self) -> None:
        """Waits until there is room for more."""
        await self.pipe.drain()

    async def confirm(
        self, message: Message, answer: asyncio.Future[T], limit: float | None, what: str, *, tx: str = ""
    ) -> T:
        """Sends a message until it is answered.

        Args:
            message: what to send; it is encoded again for every try, which is cheap: large parts are not in it.
            answer: is set when the answer comes.
            limit: how long to wait for it, in seconds; longer while the transfer ``tx`` makes progress.
            what: what is waited for, in words.
            tx: names the transfer.

        Raises:
            TimeoutError: there was no answer in time.
            PeerGone: the other side is gone.
        """
        resends = self._options.max_resends if self.pipe.can_resend else 0
        waiting = _Waiting(self, message, answer, limit, what, tx, -1 if resends is None else resends)
        self._waiting.add(answer)
        if self._gone is not None:
            _fail(answer, self._gone)
        try:
            self.send(message)
            waiting.arm()
            if limit is None:
                return await answer
            with self.payload():  # the other side may be busy with decoding it; the limit says for how long
                return await answer
        finally:
            waiting.close()
            self._waiting.discard(answer)

    def moved(self, tx: str) -> float:
        """When the transfer made progress last; 0 if it did not."""
        return self._moved.get(tx, 0.0)

    @property
    def resend_interval(self) -> float:
        """How long a message may be unanswered before it is sent again, in seconds."""
        return self._options.resend_interval

    def fail(self, error: Exception) -> None:
        """Ends everything that is waited for here: there is no hope for it."""
        for pull in list(self._pulls.values()):
            pull.fail(str(error))
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(error)

    # large parts

    def payload(self) -> AbstractContextManager[None]:
        """While a payload moves or is decoded: silence of the other side means nothing."""
        return self._payload

    def offer(
        self, tx: str, parts: Mapping[int, memoryview], receivers: Sequence[str], on_change: Callable[[], None]
    ) -> Source:
        """Makes large parts ready to be pulled. Whoever offers them withdraws them."""
        tracker = ProgressTracker(idle_timeout=self._options.streaming_idle_timeout, clock=self._loop.time)
        source = Source(tx, parts, receivers, out=self, tasks=self.tasks, tracker=tracker, on_change=on_change)
        self._sources[tx] = source
        return source

    def withdraw(self, tx: str) -> None:
        """Frees what was offered. Whoever still wants it is told, and need not wait for what will never come."""
        source = self._sources.pop(tx, None)
        if source is not None and source.free():
            self.send(Withdrawn(tx))
        self._moved.pop(tx, None)

    def pulls(
        self,
        tx: str,
        parts: Sequence[tuple[int, int]],
        receiver: str,
        sink: Callable[[int, int], Sink] = lambda _number, size: MemorySink(size),
    ) -> list[Pull]:
        """Makes ready to pull all large parts of a task or result.

        Args:
            tx: its id.
            parts: the numbers and sizes of its parts.
            receiver: for whom.
            sink: makes the place for a part, from its number and size.

        Raises:
            TransferFailed: there is no room for a part.
        """
        resends = self._options.max_resends
        found: list[Pull] = []
        if len({number for number, _ in parts}) < len(parts):
            self.send(Report(tx, parts[0][0], receiver, 0, 0, "failed"))
            raise TransferFailed("all", receiver, "two parts have the same number")
        for number, size in parts:
            try:
                place = sink(number, size)
            except (OSError, MemoryError, OverflowError, ValueError) as error:
                for pull in found:
                    pull.fail("there is no room for another part", "aborted")
                self.send(Report(tx, number, receiver, 0, 0, "failed"))
                raise TransferFailed(str(number), receiver, f"no room for {size:,} bytes: {error}") from error
            retries = 3 if resends is None else resends
            found.append(Pull(tx, number, receiver, size, place, send=self.send, retries=retries))
        return found

    async def pull(self, pulls: Sequence[Pull]) -> dict[int, memoryview]:
        """Pulls. If it is cancelled, it can be called again with the same, and goes on where it was.

        Raises:
            TransferFailed: a part did not come.
        """
        with self.payload():
            try:
                for pull in pulls:
                    if self._gone is not None:
                        pull.fail(self._gone)
                    self._pulls[pull.key] = pull
                    pull.begin()
                idle = self._options.streaming_idle_timeout
                again = self.resend_interval if self.pipe.can_resend else math.inf
                return {pull.transfer: await pull.wait(idle, again) for pull in pulls}
            except TransferFailed:
                for pull in pulls:
                    pull.fail("another part of the same value failed", "aborted")
                raise
            finally:
                for pull in pulls:
                    if self._pulls.get(pull.key) is pull:
                        del self._pulls[pull.key]

    # Receiver

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """Where the bytes of a chunk shall go."""
        pull = self._pulls.get((chunk.tx, chunk.transfer, chunk.receiver))
        return pull.room(chunk, size) if pull is not None else None

    def received(self, message: Message, size: int) -> None:
        """A message has come."""
        now = self._loop.time()
        self._liveness.heard(now)
        kind = type(message)
        if kind is Chunk:
            chunk: Any = message
            pull = self._pulls.get((chunk.tx, chunk.transfer, chunk.receiver))
            if pull is not None:
                pull.arrived(chunk, size)
        elif kind is Report:
            report: Any = message
            source = self._sources.get(report.tx)
            if source is not None:
                self._moved[report.tx] = now
                source.report(report)
            elif TransferState.of(report.state) is TransferState.ACTIVE:
                self.send(Withdrawn(report.tx))
        elif kind is Withdrawn:
            withdrawn: Any = message
            for pull in list(self._pulls.values()):
                if pull.tx == withdrawn.tx:
                    pull.fail(withdrawn.reason or "it is not offered any more", "aborted")
        elif kind is not Beat:
            self._on_message(message)

    def lost(self, reason: str) -> None:
        """The connection has ended."""
        self._set_gone(reason)

    # signs of life

    def _look(self) -> None:
        now = self._loop.time()
        found = self._liveness.check(now)
        if found.gone:
            self.silent = True
            self._set_gone(f"it gave no sign of life for {self._liveness.silence(now):.1f} s")
            self.pipe.abort()
            return
        if found.beat:
            self.send(Beat())
        self._timer = self._loop.call_at(found.wake, self._look)

    def _set_gone(self, reason: str) -> None:
        if self._gone is None:
            self._gone = reason
            self._timer.cancel()
            for pull in list(self._pulls.values()):
                pull.fail(reason)
            for answer in self._waiting:
                _fail(answer, reason)
            if not self._closing:
                self._on_gone(reason)

    def close(self) -> None:
        """Sends what is queued, and ends the connection."""
        if not self._closing:
            self._closing = True
            self._timer.cancel()
            self.pipe.close()

    async def aclose(self, flush: float | None = None) -> None:
        """Ends the connection, and everything that was started for it; the last word may take so long, in seconds."""
        self.close()
        await self.tasks.close()
        for tx in list(self._sources):
            self.withdraw(tx)
        for pull in list(self._pulls.values()):
            pull.fail("the connection was closed here", "aborted")
        try:
            async with asyncio.timeout(_FLUSH if flush is None else flush):
                await self.pipe.wait_closed()
        except TimeoutError:
            self.pipe.abort()
            await self.pipe.wait_closed()


class _Payload(AbstractContextManager[None]):
    """Counts what moves; one for all, because every task enters it several times."""

    __slots__ = ("_clock", "_liveness")

    def __init__(self, liveness: Liveness, clock: Callable[[], float]) -> None:
        self._liveness = liveness
        self._clock = clock

    def __enter__(self) -> None:
        self._liveness.payload_begins()

    def __exit__(self, *_: object) -> None:
        self._liveness.payload_ends(self._clock())


class _Waiting:
    """The times that matter while a message is not answered: when to send it again, and when to give up."""

    __slots__ = (
        "_again",
        "_answer",
        "_begun",
        "_left",
        "_limit",
        "_link",
        "_loop",
        "_message",
        "_timer",
        "_tx",
        "_what",
    )

    def __init__(
        self,
        link: Link,
        message: Message,
        answer: asyncio.Future[Any],
        limit: float | None,
        what: str,
        tx: str,
        left: int,
    ) -> None:
        self._link = link
        self._message = message
        self._answer = answer
        self._limit = limit
        self._what = what
        self._tx = tx
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._again = self._begun + link.resend_interval
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Sets the timer for what comes next."""
        times = []
        if self._limit is not None:
            times.append(max(self._begun, self._link.moved(self._tx)) + self._limit)
        if self._left:
            times.append(self._again)
        if times:
            self._timer = self._loop.call_at(min(times), self._due)

    def _due(self) -> None:
        if self._answer.done():
            return
        now = self._loop.time()
        limit = self._limit
        if limit is not None and now >= max(self._begun, self._link.moved(self._tx)) + limit:
            self._answer.set_exception(TimeoutError(f"{self._what} took longer than {limit:g} s"))
            return
        if self._left and now >= self._again:
            self._link.send(self._message)
            self._left -= 1
            self._again = now + self._link.resend_interval
        self.arm()

    def close(self) -> None:
        """Forgets the timer."""
        if self._timer is not None:
            self._timer.cancel()


def _fail(answer: asyncio.Future[Any], reason: str) -> None:
    if not answer.done():
        answer.set_exception(PeerGone(reason))
