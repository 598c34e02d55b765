"""The streams of one job at one location: those made here, those read elsewhere, those that come from elsewhere."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dfm_async.errors import EncodingError
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net import effects as fx
from dfm_async.net import spec
from dfm_async.net.game import Activity, Control
from dfm_async.net.tokens import Foreign, StreamValue
from dfm_async.runtime import context as _context
from dfm_async.runtime.calls import context_of
from dfm_async.runtime.faults import cause_of, is_our_cancellation
from dfm_async.runtime.observer import Observation
from dfm_async.runtime.outbox import States
from dfm_async.runtime.streams import AsyncSource, Source, Stream, StreamFailed, Subscription
from dfm_async.runtime.threads import ThreadSource
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken, weight
from dfm_async.wire.memory import size_of

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob

__all__ = ["FAIR", "PULL", "JobStreams"]

_log = logging.getLogger(__name__)

FAIR: Final = 64
"""After how many elements that came without waiting others get their turn."""
PULL: Final = 256
"""How many elements are asked for at a time."""
_PULL_BYTES: Final = 64 * 1024 * 1024
"""The same in bytes; a single larger element still passes. Of elements that take long to send, two are under way."""


class JobStreams:
    """Makes, feeds, sends and closes the streams of one job."""

    __slots__ = ("_job", "_next_id", "_pullers", "_running", "closing", "exports", "imports", "live")

    def __init__(self, job: SiteJob) -> None:
        self._job = job
        self._next_id = 0
        self._pullers: dict[Control, _Puller] = {}
        self._running: set[Stream] = set()
        self.live: set[Stream] = set()
        self.closing: set[Stream] = set()
        self.exports: dict[int, _Export] = {}
        self.imports: dict[tuple[int, int], _RemoteSource] = {}

    # made here

    def of_iterator(
        self, iterator: Any, activity: Activity, readers: int | None, seen: Observation | None = None
    ) -> Stream:
        """Makes a stream of an iterator that a user's code returned."""
        job = self._job
        action = activity.transition.action
        operation = action.operation if isinstance(action, spec.Call) else activity.label
        found = context_of(job, activity, operation, 1, seen)
        if hasattr(iterator, "__anext__"):
            source: Source = AsyncSource(iterator, _context.resumable(found))
        else:
            context = contextvars.Context()
            context.run(_context.enter, found)
            source = ThreadSource(job.runtime.threads, iterator, context, activity.label)
        return self._add(activity.label, source, readers, activity)

    def _add(
        self, label: str, source: Source, readers: int | None, activity: Activity | None, frame: Frame = ()
    ) -> Stream:
        game = self._job.game

        def describe(error: BaseException) -> ErrorRecord:
            if activity is not None:
                return game.error(activity, error, 1, cause_of(error))
            return game.describe(error, label, label, frame, 1, cause_of(error))

        stream = Stream(label, source, fx.MANY if readers is None else readers, describe)
        self.live.add(stream)
        return stream

    def returned(
        self, activity: Activity, iterator: Any, seen: Observation | None, release: Callable[[], None]
    ) -> None:
        """An operation has returned an iterator: its readers get a stream, and the call ends with it.

        ``release`` closes what the call itself reads.
        """
        job = self._job
        action = activity.transition.action
        assert isinstance(action, spec.Call)  # noqa: S101 - only calls return
        place = job.program.places.get(action.output)
        readers = 0 if place is None else place.readers
        if readers is not None and action.runs_ahead:
            readers += 1
        stream = self.of_iterator(iterator, activity, readers, seen)
        stream.on_end = functools.partial(self._ended, stream, seen, release)
        job.game.complete(activity, stream)

    def _ended(self, stream: Stream, seen: Observation | None, release: Callable[[], None]) -> None:
        release()
        job = self._job
        if seen is not None and job.observer is not None:
            job.observer.ended(seen, stream.error)
        if not job.stopping:
            job.game.stream_ended(stream, stream.error)
            job.advance_soon()

    def run(self, stream: StreamValue, unread: bool) -> None:
        """Runs a generator to its end; ``unread``: it has no readers that its elements would have to be kept for."""
        assert isinstance(stream, Stream)  # noqa: S101 - the runtime has made it
        if unread:
            stream.expect(-stream.consumers)
        if stream not in self._running:
            self._running.add(stream)
            self._job.spawn(self._run(stream))

    async def _run(self, stream: Stream) -> None:
        subscription = stream.subscribe()
        try:
            count = 0
            while await subscription.get():
                count += 1
                if not count % FAIR:
                    await asyncio.sleep(0)
        except StreamFailed:
            pass  # the game knows, from the end of the stream
        finally:
            subscription.close()
            self._running.discard(stream)

    # closing

    def close(self, stream: StreamValue, read: bool = True) -> None:
        """Nobody here reads a stream any more; ``read``: somebody did."""
        if isinstance(stream, Stream) and stream in self.live:
            if isinstance(stream.source, _RemoteSource):
                stream.source.release(read)  # at once: the producer keeps nothing for readers that have left
            self.live.discard(stream)
            self.closing.add(stream)
            self._job.spawn(self._finish(stream))

    async def _finish(self, stream: Stream) -> None:
        await _close(stream)
        await stream.source.wait_ended()
        self.closing.discard(stream)

    def end_all(self) -> None:
        """The job is about to be done here: the calls of generators that nobody reads to their ends have ended."""
        for stream in [*self.live, *self.closing]:
            stream.end()

    def close_all(self) -> None:
        """The job is done here: whatever is left is closed."""
        for stream in list(self.live):
            self.close(stream)

    async def aclose(self) -> None:
        """The job was cancelled: ends all streams. The task that was closing one may not have begun."""
        for stream in [*self.live, *self.closing]:
            await _close(stream)

    def abandon(self) -> None:
        """After :meth:`aclose`, when the grace is over: does not wait any more for threads inside generators."""
        for stream in [*self.live, *self.closing]:
            if isinstance(stream.source, ThreadSource):
                self._job.runtime.abandon_source(self._job, stream.source)

    async def stopped(self) -> None:
        """After :meth:`aclose`: waits until no thread is inside a generator of the job."""
        for stream in [*self.live, *self.closing]:
            await stream.source.wait_ended()

    # loops

    def pull(self, effect: fx.Pull) -> None:
        """A loop wants elements of its source."""
        control = effect.control
        if control.exhausted:  # its source has ended in the same turn of the loop
            return
        puller = self._pullers.get(control)
        if puller is None:
            source = control.source
            own = isinstance(source, Foreign)
            stream = self.of_iterator(source.iterator, control.activity, 1) if own else source
            puller = self._pullers[control] = _Puller(stream.subscribe(), own)
            self._job.spawn(self._feed(control, puller))
        puller.want(effect.count)

    async def _feed(self, control: Control, puller: _Puller) -> None:
        """Fetches the elements of a loop as the game asks for them."""
        job = self._job
        error: ErrorRecord | None = None
        turns = 0
        try:
            while True:
                wanted = await puller.wanted()
                found = await puller.subscription.get(wanted)
                if not found:
                    break
                puller.got(len(found))
                job.game.feed(control, found)
                turns += 1
                if not turns % FAIR:
                    await asyncio.sleep(0)
                job.advance()
        except StreamFailed as failed:
            error = failed.error
        puller.subscription.close()
        if puller.own:
            self.close(puller.subscription.stream)
        del self._pullers[control]
        job.game.feed_end(control, error)
        job.advance()

    # read elsewhere

    def export(self, effect: fx.Send, stream: Stream) -> None:
        """Lets other locations read a stream."""
        for route in effect.routes:
            stream_id = self._next_id
            self._next_id += 1
            self.exports[stream_id] = _Export(stream, stream.subscribe(), route, effect.frame)
            head = [self._job.at, stream_id]
            self._job.outbox.add_token(route, effect.place, effect.frame, States.STREAM, head)

    def wanted_elsewhere(self, message: msg.StreamPull) -> None:
        """Another location wants elements of a stream from here."""
        export = self.exports.get(message.stream)
        if export is not None:
            export.wanted += message.count
            export.wanted_bytes += message.bytes
            if not export.active:
                export.active = True
                self._job.spawn(self._serve(message.stream, export))

    async def _serve(self, stream_id: int, export: _Export) -> None:
        """Sends elements of a stream to another location, as many as it asked for."""
        job = self._job
        codec = job.runtime.codec
        if export.pack is None:  # once: the number of consumers may change while the stream is read
            export.pack = export.stream.transform_early(codec.pack)
        pack = export.pack
        while export.open and not export.subscription.closed:
            packed: list[Any] = []
            error: ErrorRecord | None = None
            try:
                if not export.fetched:
                    export.fetched.extend(await export.subscription.get(export.wanted))
                size = 0
                most = min(export.wanted_bytes, msg.BATCH_BYTES)
                while export.fetched and len(packed) < export.wanted and size < most:
                    packed.append(pack(export.fetched.popleft()))
                    size += weight(packed[-1])
            except StreamFailed as failed:
                error = failed.error
            except EncodingError as problem:
                label = export.stream.label
                packed, error = [], job.game.describe(problem, label, label, export.frame)
            if stream_id not in self.exports:
                break  # the reader has left meanwhile
            payload = codec.payload(packed)
            export.wanted -= len(packed)
            export.wanted_bytes -= size_of(payload)
            ended = not packed
            job.outbox.sending(len(packed), payload)
            items = msg.StreamItems(
                job.number, export.route, stream_id, job.at, payload, ended, error, job.outbox.origin()
            )
            job.outbox.send(export.route, items)
            if ended:
                break
        export.active = False

    def closed_elsewhere(self, message: msg.StreamClose) -> None:
        """Another location is done with a stream from here."""
        export = self.exports.pop(message.stream, None)
        if export is not None:
            export.subscription.close()
            self._job.game.stream_released(export.stream, message.read)
            self._job.advance()

    # from elsewhere

    def arrive(self, label: str, readers: int | None, frame: Frame, source: int, stream_id: int) -> Stream:
        """A stream has come from another location."""
        remote = self.imports[source, stream_id] = _RemoteSource(self._job, source, stream_id)
        return self._add(label, remote, readers, None, frame)

    def items(self, message: msg.StreamItems) -> None:
        """Elements of a stream from elsewhere have come."""
        remote = self.imports.get((message.source, message.stream))
        if remote is not None:
            items = self._job.runtime.codec.loads_batch(message.payload)
            self._job.arrived(message.origin, len(items), message.payload)
            remote.arrived(items, size_of(message.payload), message.ended, message.error)


async def _close(stream: Stream) -> None:
    try:
        await stream.aclose()
    except BaseException as error:
        if is_our_cancellation(error):
            raise
        # Its readers have what they wanted: there is nobody left to report it to.
        _log.warning("the generator of %s raised when it was closed", stream.label, exc_info=True)


class _Export:
    """A stream that another location reads."""

    __slots__ = ("active", "fetched", "frame", "pack", "route", "stream", "subscription", "wanted", "wanted_bytes")

    def __init__(self, stream: Stream, subscription: Subscription, route: int, frame: Frame) -> None:
        self.stream = stream
        self.subscription = subscription
        self.route = route
        self.frame = frame
        self.pack: Callable[[Any], Any] | None = None
        """Packs the elements that are read; known when the first is requested."""
        self.wanted = 0
        self.wanted_bytes = 0
        self.fetched: deque[Any] = deque()
        self.active = False

    @property
    def open(self) -> bool:
        """Whether the other location takes a further element."""
        return self.wanted > 0 and self.wanted_bytes > 0


class _Puller:
    """What a loop still wants of its source; ``own``: the source is closed with the loop."""

    __slots__ = ("_count", "_waiter", "own", "subscription")

    def __init__(self, subscription: Subscription, own: bool) -> None:
        self.subscription = subscription
        self.own = own
        self._count = 0
        self._waiter: asyncio.Future[None] | None = None

    def want(self, count: int) -> None:
        """The loop wants further elements."""
        self._count += count
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def got(self, count: int) -> None:
        """The loop has got elements."""
        self._count -= count

    async def wanted(self) -> int:
        """Waits until the loop wants something, and tells how much."""
        while not self._count:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._count


class _RemoteSource:
    """The elements of a stream that another location produces."""

    def __init__(self, job: SiteJob, source: int, stream_id: int) -> None:
        self._job = job
        self._source = source
        self._id = stream_id
        self._items: deque[tuple[Any, int]] = deque()
        self._asked = 0
        self._asked_bytes = 0
        self._held_bytes = 0
        self._ended = False
        self._error: ErrorRecord | None = None
        self._waiter: asyncio.Future[None] | None = None

    def arrived(self, items: list[Any], size: int, ended: bool, error: ErrorRecord | None) -> None:
        """Elements have come, in a message with so many bytes."""
        share = size // len(items) if items else 0
        self._items.extend((item, share) for item in items)
        self._asked -= len(items)
        self._asked_bytes -= size
        self._held_bytes += share * len(items)
        self._ended = self._ended or ended
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self, limit: int) -> list[Any]:
        """Waits for elements; asks for more before it runs dry."""
        self._ask()
        while not self._items:
            if self._ended:
                if self._error is not None:
                    raise StreamFailed(self._error)
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found = []
        for _ in range(min(limit, len(self._items))):
            value, size = self._items.popleft()
            self._held_bytes -= size
            if isinstance(value, Broken):
                raise value.error
            found.append(value)
        self._ask()
        return found

    def _ask(self) -> None:
        count = PULL - self._asked - len(self._items)
        size = _PULL_BYTES - self._asked_bytes - self._held_bytes
        if not self._ended and (count * 2 >= PULL or size * 2 >= _PULL_BYTES):
            self._asked += count
            self._asked_bytes += size
            job = self._job
            job.outbox.send(self._source, msg.StreamPull(job.number, self._source, self._id, job.at, count, size))

    def release(self, read: bool) -> None:
        """Notifies the producer, once, that no more is wanted, and lets readers that still wait go."""
        self._ended = True
        self._notify()
        job = self._job
        if job.streams.imports.pop((self._source, self._id), None) is not None:
            job.outbox.send(self._source, msg.StreamClose(job.number, self._source, self._id, read))

    async def aclose(self) -> None:
        """Releases it, if the job was cancelled before its readers had ended."""
        self.release(True)

    async def wait_ended(self) -> None:
        """Returns at once: nothing of the source runs here."""
