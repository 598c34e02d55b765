"""The streams of one job at one location: produced here, read at other locations, produced at other locations."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dfm_async.base.signals import Signal
from dfm_async.errors import EncodingError
from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net import effects as fx
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.net.game import Game
from dfm_async.net.game_state import Control, PendingActivity
from dfm_async.net.tokens import Foreign, StreamValue
from dfm_async.runtime import context as _context
from dfm_async.runtime.observer import Observation
from dfm_async.runtime.operation_errors import cause_of, is_our_cancellation
from dfm_async.runtime.outbox import States
from dfm_async.runtime.recorded import RecordedSource, Recording
from dfm_async.runtime.scope import HomeScope
from dfm_async.runtime.sources import AsyncSource, Source, ThreadSource
from dfm_async.runtime.spread_source import RemoteGenerator, SpreadSource
from dfm_async.runtime.streams import LocalStream, StreamFailed, Subscription
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken, weight
from dfm_async.wire.memory import size_of

_log = logging.getLogger(__name__)

FAIR: Final = 64
"""The number of elements that a task handles without waiting before others get their turn."""
PULL: Final = 256
"""The number of elements that are requested at a time."""
_PULL_BYTES: Final = 64 * 1024 * 1024
"""The same in bytes; a single larger element still passes. Of elements that take long to send, two are in flight."""


class StreamingJob(HomeScope):
    """The job that streams belong to: a scope with a token game."""

    __slots__ = ("_streams", "game", "program")

    game: Game
    program: CompiledNet
    _streams: JobStreams | None

    @property
    def streams(self) -> JobStreams:
        """The job's streams. Most jobs have none, so this is created with the first."""
        if self._streams is None:
            self._streams = JobStreams(self)
        return self._streams

    def iterating(self) -> list[str]:
        """Return the operations of the generators that run in threads. Any thread may call this."""
        live = [] if self._streams is None else list(self._streams.live)
        busy = [found.label for found in live if isinstance(found.producer, ThreadSource) and found.producer.busy]
        return [label.rpartition("#")[0] for label in busy]

    def advance(self) -> None:
        """Carry out the effects of the game."""
        raise NotImplementedError

    def advance_soon(self) -> None:
        """Carry out the effects of the game in the next turn of the loop."""
        raise NotImplementedError


class JobStreams:
    """Create, feed, send and close the streams of one job."""

    def __init__(self, job: StreamingJob) -> None:
        self._job = job
        self._next_id = job.outbox.incarnation(job.at) << 32  # those of a worker that was lost do not come again
        self._pullers: dict[Control, _Puller] = {}
        self._running: set[LocalStream] = set()
        self.live: set[LocalStream] = set()
        self.closing: set[LocalStream] = set()
        self.exports: dict[int, _Export] = {}
        self.imports: dict[tuple[int, int], _RemoteSource] = {}

    # produced here

    def of_iterator(
        self,
        iterator: Any,
        activity: PendingActivity,
        readers: int | None,
        seen: Observation | None = None,
        remote: RemoteGenerator | None = None,
        reruns: int = 0,
        recording: Recording | None = None,
    ) -> LocalStream:
        """Return a stream of the elements of an iterator that a user's code returned.

        With ``remote``, a generator may run in another worker, and again if that is lost. With ``recording``, its
        elements are recorded.
        """
        job = self._job
        action = activity.transition.action
        operation = action.operation if isinstance(action, spec.Call) else activity.label
        found = job.context(operation, activity.label, activity.frame, 1, seen)
        if hasattr(iterator, "__anext__"):
            source: Source = AsyncSource(iterator, _context.resumable(found))
        else:
            context = contextvars.Context()
            context.run(_context.enter, found)
            source = thread = ThreadSource(job.resources.threads, iterator, context, activity.label)
            if remote is not None and job.resources.spread is not None:
                source = SpreadSource(
                    thread, remote, job.resources.threads, job.resources.spread, job.threads.calls, reruns
                )
        if recording is not None:
            source = RecordedSource(recording, source)
        return self._add(activity.label, source, readers, activity)

    def _add(
        self, label: str, source: Source, readers: int | None, activity: PendingActivity | None, frame: Frame = ()
    ) -> LocalStream:
        game = self._job.game

        def describe(error: BaseException) -> ErrorRecord:
            if activity is not None:
                return game.error(activity, error, 1, cause_of(error))
            return game.describe(error, label, label, frame, 1, cause_of(error))

        stream = LocalStream(label, source, fx.MANY if readers is None else readers, describe)
        self.live.add(stream)
        return stream

    def returned(
        self,
        activity: PendingActivity,
        iterator: Any,
        seen: Observation | None,
        release: Callable[[], None],
        remote: RemoteGenerator | None,
        reruns: int,
        left: Callable[[], None] | None,
        recording: Recording | None = None,
    ) -> None:
        """Handle an iterator that an operation has returned: its readers get a stream, and the call ends with it.

        ``release`` closes what the call itself reads. ``left`` is called when its code does not run any longer. The
        rest as in :meth:`of_iterator`.
        """
        stream = self.of_iterator(iterator, activity, self._readers(activity), seen, remote, reruns, recording)
        stream.on_end = functools.partial(self._ended, stream, seen, release, left)
        self._job.game.complete(activity, stream)

    def recalled(self, activity: PendingActivity, recording: Recording) -> None:
        """Complete a call whose elements are all recorded: its readers get a stream of them."""
        stream = self._add(activity.label, RecordedSource(recording, None), self._readers(activity), activity)
        stream.on_end = functools.partial(self._ended, stream, None, _nothing, None)
        self._job.game.complete(activity, stream)

    def _readers(self, activity: PendingActivity) -> int | None:
        """Return how many readers the elements of a call have; None if that is not known."""
        action = activity.transition.action
        assert isinstance(action, spec.Call)  # noqa: S101 - only calls return
        place = self._job.program.places.get(action.output)
        readers = 0 if place is None else place.readers
        return readers + 1 if readers is not None and action.runs_ahead else readers

    def _ended(
        self,
        stream: LocalStream,
        seen: Observation | None,
        release: Callable[[], None],
        left: Callable[[], None] | None,
    ) -> None:
        release()
        if left is not None:
            producer = stream.producer
            if isinstance(producer, (ThreadSource, SpreadSource)) and producer.running:
                name = f"the end of {stream.label} of job {self._job.job_id}"
                self._job.resources.spawn(_when_ended(producer, left), None, name)
            else:
                left()
        job = self._job
        if seen is not None and job.observer is not None:
            job.observer.ended(seen, stream.error)
        if not job.stopping:
            job.game.stream_ended(stream, stream.error)
            job.advance_soon()

    def run(self, stream: StreamValue, unread: bool) -> None:
        """Run a generator to its end; ``unread``: it has no readers, and its elements need not be kept."""
        assert isinstance(stream, LocalStream)  # noqa: S101 - created above
        if unread:
            stream.expect(-stream.consumers)
        if stream not in self._running:
            self._running.add(stream)
            self._job.spawn(self._run(stream))

    async def _run(self, stream: LocalStream) -> None:
        subscription = stream.subscribe()
        try:
            count = 0
            while await subscription.get():
                count += 1
                if not count % FAIR:
                    await asyncio.sleep(0)
        except StreamFailed:
            pass  # the game is notified by the end of the stream
        finally:
            subscription.close()
            self._running.discard(stream)

    # closing

    def close(self, stream: StreamValue, read: bool = True) -> None:
        """Close a stream that has no more readers here; ``read``: it had one."""
        if isinstance(stream, LocalStream) and stream in self.live:
            if isinstance(stream.source, _RemoteSource):
                stream.source.release(read)  # at once: the producer keeps nothing for readers that are gone
            self.live.discard(stream)
            self.closing.add(stream)
            self._job.spawn(self._finish(stream))

    async def _finish(self, stream: LocalStream) -> None:
        await _close(stream)
        await stream.source.wait_ended()
        self.closing.discard(stream)

    def end_all(self) -> None:
        """End the calls of generators that nobody reads to their ends: the job is about to be done here."""
        for stream in [*self.live, *self.closing]:
            stream.end()

    def close_all(self) -> None:
        """Close all streams: the job is done here."""
        for stream in list(self.live):
            self.close(stream)

    async def aclose(self) -> None:
        """End all streams, since the job was cancelled. The task that was closing one may not have begun."""
        for stream in [*self.live, *self.closing]:
            await _close(stream)

    def abandon(self) -> None:
        """After :meth:`aclose`, when the grace period is over: stop waiting for threads inside generators."""
        for stream in [*self.live, *self.closing]:
            if isinstance(stream.producer, (ThreadSource, SpreadSource)):
                stream.producer.abandon(self._job.job_id)

    async def stopped(self) -> None:
        """After :meth:`aclose`: wait until no thread is inside a generator of the job."""
        for stream in [*self.live, *self.closing]:
            await stream.source.wait_ended()

    # loops

    def pull(self, effect: fx.Pull) -> None:
        """Fetch elements of its source for a loop."""
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
        puller.wanted += effect.count
        puller.changed.notify()

    async def _feed(self, control: Control, puller: _Puller) -> None:
        """Fetch the elements of a loop as the game requests them."""
        job = self._job
        error: ErrorRecord | None = None
        turns = 0
        try:
            while True:
                await puller.changed.wait_until(lambda: puller.wanted)
                found = await puller.subscription.get(puller.wanted)
                if not found:
                    break
                puller.wanted -= len(found)
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

    # read at other locations

    def export(self, effect: fx.SendToken, stream: LocalStream) -> None:
        """Let other locations read a stream."""
        for route in effect.routes:
            stream_id = self._next_id
            self._next_id += 1
            self.exports[stream_id] = _Export(stream, stream.subscribe(), route, effect.frame)
            head = [self._job.at, stream_id]
            self._job.outbox.add_token(route, effect.place, effect.frame, States.STREAM, head)

    def wanted_elsewhere(self, message: msg.StreamPull) -> None:
        """Send elements of a stream to another location, which has requested them."""
        export = self.exports.get(message.stream)
        if export is not None:
            export.wanted += message.count
            export.wanted_bytes += message.bytes
            if not export.active:
                export.active = True
                self._job.spawn(self._serve(message.stream, export))

    async def _serve(self, stream_id: int, export: _Export) -> None:
        """Send elements of a stream to another location, as many as it has requested."""
        job = self._job
        codec = job.resources.codec
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
                break  # the reader is gone
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
        """Close a stream that another location has stopped reading."""
        export = self.exports.pop(message.stream, None)
        if export is not None:
            export.subscription.close()
            self._job.game.stream_released(export.stream, message.read)
            self._job.advance()

    # produced at other locations

    def arrive(self, label: str, readers: int | None, frame: Frame, source: int, stream_id: int) -> LocalStream:
        """Return the stream for one that another location produces."""
        remote = self.imports[source, stream_id] = _RemoteSource(self._job, self.imports, source, stream_id)
        return self._add(label, remote, readers, None, frame)

    def items(self, message: msg.StreamItems) -> None:
        """Handle elements of a stream that another location produces."""
        remote = self.imports.get((message.source, message.stream))
        if remote is not None:
            items = self._job.resources.codec.loads_batch(message.payload)
            self._job.arrived(message.origin, len(items), message.payload)
            remote.arrived(items, size_of(message.payload), message.ended, message.error)


async def _close(stream: LocalStream) -> None:
    try:
        await stream.aclose()
    except BaseException as error:
        if is_our_cancellation(error):
            raise
        # Its readers have what they needed: nobody is left to receive the error.
        _log.warning("the generator of %s raised when it was closed", stream.label, exc_info=True)


class _Export(msgspec.Struct, eq=False):
    """A stream that another location reads."""

    stream: LocalStream
    subscription: Subscription
    route: int
    frame: Frame
    pack: Callable[[Any], Any] | None = None
    """Packs the elements that are read; set when the first is requested."""
    wanted: int = 0
    wanted_bytes: int = 0
    fetched: deque[Any] = msgspec.field(default_factory=deque)
    active: bool = False

    @property
    def open(self) -> bool:
        """Whether the other location accepts a further element."""
        return self.wanted > 0 and self.wanted_bytes > 0


class _Puller(msgspec.Struct, eq=False):
    """The number of elements that a loop wants of its source; ``own``: the source is closed with the loop."""

    subscription: Subscription
    own: bool
    wanted: int = 0
    changed: Signal = msgspec.field(default_factory=Signal)


class _RemoteSource:
    """The elements of a stream that another location produces."""

    def __init__(
        self, job: StreamingJob, imports: dict[tuple[int, int], _RemoteSource], source: int, stream_id: int
    ) -> None:
        self._job = job
        self._imports = imports
        self._source = source
        self._id = stream_id
        self._items: deque[tuple[Any, int]] = deque()
        self._requested = 0
        self._requested_bytes = 0
        self._held_bytes = 0
        self._ended = False
        self._error: ErrorRecord | None = None
        self._changed = Signal()

    def arrived(self, items: list[Any], size: int, ended: bool, error: ErrorRecord | None) -> None:
        """Add elements that came in a message of ``size`` bytes."""
        share = size // len(items) if items else 0
        self._items.extend((item, share) for item in items)
        self._requested -= len(items)
        self._requested_bytes -= size
        self._held_bytes += share * len(items)
        self._ended = self._ended or ended
        self._error = error
        self._changed.notify()

    async def get(self, limit: int) -> list[Any]:
        """Wait for elements; request more before none are left."""
        self._request()
        while not self._items:
            if self._ended:
                if self._error is not None:
                    raise StreamFailed(self._error)
                return []
            await self._changed.wait()
        found = []
        for _ in range(min(limit, len(self._items))):
            value, size = self._items.popleft()
            self._held_bytes -= size
            if isinstance(value, Broken):
                raise value.error
            found.append(value)
        self._request()
        return found

    def _request(self) -> None:
        count = PULL - self._requested - len(self._items)
        size = _PULL_BYTES - self._requested_bytes - self._held_bytes
        if not self._ended and (count * 2 >= PULL or size * 2 >= _PULL_BYTES):
            self._requested += count
            self._requested_bytes += size
            job = self._job
            job.outbox.send(self._source, msg.StreamPull(job.number, self._source, self._id, job.at, count, size))

    def release(self, read: bool) -> None:
        """Drop what was not read, let waiting readers go, and notify the producer, once, that no more is wanted."""
        self._ended = True
        self._items.clear()
        self._changed.notify()
        job = self._job
        if self._imports.pop((self._source, self._id), None) is not None:
            job.outbox.send(self._source, msg.StreamClose(job.number, self._source, self._id, read))

    async def aclose(self) -> None:
        """Release it, if the job was cancelled before its readers had ended."""
        self.release(True)

    async def wait_ended(self) -> None:
        """Return at once: nothing of the source runs here."""


def _nothing() -> None:
    """Do nothing: there is nothing to release."""


async def _when_ended(source: Source, left: Callable[[], None]) -> None:
    await source.wait_ended()
    left()
