"""One job at one location: carries out what the game asks for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import logging
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import cloudpickle

from dfm_async.errors import EncodingError
from dfm_async.federation.operation import CodeKind
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.model.policies import RetryPolicy
from dfm_async.net import effects as fx
from dfm_async.net import spec
from dfm_async.net.game import Activity, Control, Game
from dfm_async.net.program import Program
from dfm_async.net.tokens import OPEN, SKIPPED, Failed, Foreign, StreamValue
from dfm_async.runtime import context as _context
from dfm_async.runtime.cache import Ticket
from dfm_async.runtime.context import OperationContext
from dfm_async.runtime.operations import Callee, is_iterator
from dfm_async.runtime.streams import (
    AsyncSource,
    Source,
    Stream,
    StreamFailed,
    Subscription,
)
from dfm_async.runtime.threads import ThreadSource
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken

if TYPE_CHECKING:
    from dfm_async.runtime.site import SiteRuntime

__all__ = ["SiteJob", "broken_record"]

_log = logging.getLogger(__name__)

_VALUE, _SKIPPED, _FAILED, _OPEN, _STREAM = range(5)
_FAIR: Final = 64
_ROUNDS: Final = 8
_PULL: Final = 256
_LARGEST_CAUSE: Final = 64 * 1024
_MANY: Final = 1 << 30


class SiteJob:
    """The part of one job that one location runs."""

    def __init__(self, runtime: SiteRuntime, start: msg.StartJob, program: Program) -> None:
        self.runtime = runtime
        self.number = start.job
        self.at = start.at
        self.job_id = start.job_id
        self.routes = start.routes
        self.program = program
        self.game = Game(program, runtime.site, f"{start.at}")
        self._credits = start.window
        self._byte_credits = start.window_bytes
        self._blocked: deque[fx.EmitValue] = deque()
        self._credit_waiters: list[asyncio.Future[None]] = []
        self._runs: list[tuple[int, Frame, int, int]] = []
        self._values: list[Any] = []
        self._frames_done: list[int] = []
        self._tokens: dict[int, tuple[list[tuple[int, Frame, int]], list[Any]]] = {}
        self._elements_done: dict[tuple[int, int], list[Frame]] = {}
        self._reported: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy_threads = 0
        self._threads_idle: asyncio.Future[None] | None = None
        self._instances: dict[int, Any] = {}
        self._streams: set[Stream] = set()
        self._closing: set[Stream] = set()
        self._subscriptions: dict[Activity, list[Subscription]] = {}
        self._exports: dict[int, _Export] = {}
        self._imports: dict[tuple[int, int], _RemoteSource] = {}
        self._next_stream = 0
        self._pullers: dict[Control, _Puller] = {}
        self._tickets: set[Ticket] = set()
        self._last = False
        self._stopping = False

    # messages

    def open_frames(self, message: msg.OpenFrames) -> None:
        """Parameter sets have come."""
        self.open(message.first, message.count, message.payload, message.last)

    def open(self, first: int, count: int, payload: bytes, last: bool) -> None:
        """Opens the frames of parameter sets; ``last`` says that no more will come."""
        rows: Sequence[Any] = self.runtime.codec.loads_batch(payload) if payload else ((),) * count
        for index, row in enumerate(rows, first):
            if isinstance(row, Broken):
                place = self.program.params[0]
                error = self.game.describe(row.error, place.label, place.label, (index,))
                self._report_error(error)
                row = [Failed(error)] * len(self.program.params)
            self.game.open(index, row)
        self._last = self._last or last
        self.advance()

    def tokens(self, message: msg.Tokens) -> None:
        """Tokens have come from another location."""
        values = self.runtime.codec.loads_batch(message.payload)
        for (place, frame, state), value in zip(message.heads, values, strict=True):
            self.game.token(place, frame, self._token_value(place, frame, state, value))
        self.advance()

    def _token_value(self, place: int, frame: Frame, state: int, value: Any) -> Any:
        if state == _SKIPPED:
            return SKIPPED
        if state == _OPEN:
            return OPEN
        if state == _FAILED:
            return Failed(ErrorRecord(*value))
        label = self.program.places[place].label
        if state == _STREAM:
            source, stream_id = value
            remote = _RemoteSource(self, source, stream_id)
            self._imports[source, stream_id] = remote
            stream = self._stream(label, remote, self.program.places[place].readers, None)
            if not stream.consumers:  # it is only waited for
                self._close_stream(stream)
            return stream
        if isinstance(value, Broken):
            error = self.game.describe(value.error, label, label, frame)
            self._report_error(error)
            return Failed(error)
        return value

    def loop_ended(self, message: msg.LoopEnded) -> None:
        """A loop that is driven elsewhere has had all its elements."""
        outcome: Any = None
        if message.state == _SKIPPED:
            outcome = SKIPPED
        elif message.error is not None:
            outcome = Failed(message.error)
        self.game.loop_ended(message.loop, message.frame, message.total, outcome)
        self.advance()

    def elements_done(self, message: msg.ElementDone) -> None:
        """Another location is done with elements of a loop that is driven here."""
        for frame in message.frames:
            self.game.element_done(message.loop, frame)
        self.advance()

    def credit(self, message: msg.Credit) -> None:
        """The application takes further results."""
        self._credits += message.items
        self._byte_credits += message.bytes
        while self._blocked and self._may_send():
            self._emit_now(self._blocked.popleft())
        if self._may_send():
            self._wake_emitters()
        self.advance()

    def stream_pull(self, message: msg.StreamPull) -> None:
        """Another location wants elements of a stream from here."""
        export = self._exports.get(message.stream)
        if export is not None:
            export.wanted += message.count
            if not export.active:
                export.active = True
                self._spawn(self._serve(message.stream, export))

    def stream_items(self, message: msg.StreamItems) -> None:
        """Elements of a stream from elsewhere have come."""
        remote = self._imports.get((message.source, message.stream))
        if remote is not None:
            remote.arrived(self.runtime.codec.loads_batch(message.payload), message.ended, message.error)

    def drop_import(self, source: int, stream_id: int) -> None:
        """Forgets a stream from elsewhere."""
        self._imports.pop((source, stream_id), None)

    def stream_close(self, message: msg.StreamClose) -> None:
        """Another location is done with a stream from here."""
        export = self._exports.pop(message.stream, None)
        if export is not None:
            export.subscription.close()
            self.game.release(export.instance)
            self.advance()

    # the game

    def advance(self) -> None:
        """Carries out what the game asks for; a lot of it in several turns, so that others get theirs."""
        if self._stopping:
            return
        for _ in range(_ROUNDS):
            for effect in self.game.take():
                _HANDLERS[type(effect)](self, effect)
            if not self.game.ready:
                break
        else:
            asyncio.get_running_loop().call_soon(self._advance_later)
        if self._last and not self.game.live:
            self.runtime.flush_now(self)  # this was all: nothing of this turn can join it
        else:
            self.runtime.touch(self)

    def _advance_later(self) -> None:
        try:
            self.advance()
        except Exception as error:  # noqa: BLE001 - a fault of ours, told as such
            self.broken(error)

    def broken(self, error: Exception) -> None:
        """Something went wrong that is no operation's fault: the job cannot go on, but others can."""
        if not self._stopping:
            _log.error("job %s is broken at site %s", self.job_id, self.runtime.site, exc_info=error)
            self.runtime.report(msg.JobBroken(self.number, self.at, broken_record(self.runtime.site, error)))

    def flush(self) -> None:
        """Sends what has gathered in this turn of the loop."""
        if self._stopping:
            return
        codec, number = self.runtime.codec, self.number
        for route, (heads, values) in self._tokens.items():
            self._to_peer(route, msg.Tokens(number, route, heads, codec.dumps(values)))
        self._tokens.clear()
        for (route, loop), frames in self._elements_done.items():
            self._to_peer(route, msg.ElementDone(number, route, loop, frames))
        self._elements_done.clear()
        done, self._frames_done = self._frames_done, []
        if self._values:
            self._flush_results(done)
        elif done:
            self.runtime.report(msg.FramesDone(number, self.at, done))
        if self._last and not self.game.live:
            self._end()

    def _flush_results(self, frames: list[int]) -> None:
        payload = self.runtime.codec.dumps(self._values)
        self._byte_credits -= len(payload)
        self.runtime.report(msg.Results(self.number, self.at, self._runs, payload, frames))
        self._runs, self._values = [], []

    def _to_peer(self, route: int, message: msg.Message) -> None:
        self.runtime.send(self.routes[route], message)

    def _report(self, message: msg.Message) -> None:
        if self._values:  # the application sees everything in the order in which it happened
            self._flush_results([])
        self.runtime.report(message)

    def _report_error(self, error: ErrorRecord) -> None:
        if error.id not in self._reported:
            self._reported.add(error.id)
            self._report(msg.OperationError(self.number, self.at, error))

    def _spawn(self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> asyncio.Task[None]:
        task = self.runtime.spawn(self._guard(work), context, f"a task of job {self.job_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled early has not begun it
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - operations' errors are dealt with inside: this is a fault of ours
            self.broken(error)

    # calls

    def _invoke(self, effect: fx.Invoke) -> None:
        activity, action = effect.activity, effect.action
        try:
            callee = self.runtime.table.find(action.operation, action.provider)
        except LookupError as error:
            self.game.fail(activity, self.game.error(activity, error))
            return
        retry = action.retry or callee.retry
        deadline = action.deadline or callee.deadline
        args, streams = effect.args, effect.streams
        context = self._new_context(activity, action.operation, 1)
        if callee.kind is not CodeKind.ASYNC and not callee.adapter.per_job and not (streams and callee.whole):
            work = self._work(callee, activity, action.operation, args, 1, streams)
            if callee.kind is not CodeKind.SYNC:
                self._start_generator(activity, context, work)
                return
            if retry is None and deadline is None:
                self._run_in_thread(context, work, activity)
                return
        if callee.kind is CodeKind.ASYNC and retry is None and deadline is None and not streams:
            try:
                work = self._work(callee, activity, action.operation, args, 1, streams)
            except Exception as error:  # noqa: BLE001 - the constructor of a class is the user's code
                self._raised(activity, error, 1)
            else:
                self._spawn(self._await(activity, work), context)
            return
        self._spawn(self._call(activity, action.operation, callee, args, retry, deadline, streams), context)

    def _start_generator(self, activity: Activity, context: contextvars.Context, work: Callable[[], Any]) -> None:
        """Calls a generator function, which runs nothing of its body yet."""
        try:
            value = context.run(work)
        except Exception as error:  # noqa: BLE001 - arguments that do not fit, a wrapper that raises
            self._raised(activity, error, 1)
        else:
            self._returned(activity, value)

    def _new_context(self, activity: Activity, operation: str, attempt: int) -> contextvars.Context:
        """A fresh context: an operation sees nothing of the code that happens to drive it."""
        context = contextvars.Context()
        found = OperationContext(self.job_id, self.runtime.site, operation, activity.label, activity.frame, attempt)
        context.run(_context.enter, found)
        return context

    def _work(
        self,
        callee: Callee,
        activity: Activity,
        operation: str,
        args: dict[str, Any],
        attempt: int,
        streams: bool,
    ) -> Callable[[], Any]:
        function = callee.bound(self._instance(callee))
        if streams:
            args = self._readers(activity, callee, args)
        if callee.wants_context:
            found = OperationContext(self.job_id, self.runtime.site, operation, activity.label, activity.frame, attempt)
            args = {**args, "context": found}
        if callee.plain:
            return lambda: function(**args)
        positional, named = callee.arguments(args)
        return lambda: function(*positional, **named)

    def _readers(self, activity: Activity, callee: Callee, args: dict[str, Any]) -> dict[str, Any]:
        """Puts readers where the streams are among the arguments; they are closed when the call has ended."""
        opened = self._subscriptions.setdefault(activity, [])
        seen: set[Stream] = set()

        def read(stream: Any) -> Any:
            if stream in seen:
                stream.consumers += 1  # twice in one call: two readers, where one was expected
            seen.add(stream)
            subscription = stream.subscribe()
            opened.append(subscription)
            if callee.kind in (CodeKind.SYNC, CodeKind.GENERATOR):
                return self._blocking(subscription, asyncio.get_running_loop())
            return subscription

        return {name: _replace_streams(value, read) for name, value in args.items()}

    def _blocking(self, subscription: Subscription, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
        """Reads a stream from a thread, for synchronous operations."""
        while True:
            future: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
            loop.call_soon_threadsafe(self._read_for, subscription, future)
            found = future.result()
            if not found:
                return
            yield from found

    def _read_for(self, subscription: Subscription, future: concurrent.futures.Future[list[Any]]) -> None:
        def ended(_task: object = None) -> None:
            if not future.done():
                future.set_exception(RuntimeError("the job was cancelled, or the stream was closed"))

        if self._stopping:
            ended()
        else:
            self._spawn(self._read_into(subscription, future)).add_done_callback(ended)

    async def _read_into(self, subscription: Subscription, future: concurrent.futures.Future[list[Any]]) -> None:
        try:
            future.set_result(await subscription.get())
        except StreamFailed as failed:
            future.set_exception(failed)

    def _call_ended(self, activity: Activity) -> None:
        for subscription in self._subscriptions.pop(activity, ()):
            subscription.close()

    def _instance(self, callee: Callee) -> Any:
        if not callee.adapter.per_job:
            return None
        key = id(callee)
        if key not in self._instances:
            self._instances[key] = callee.build()
        return self._instances[key]

    def _run_in_thread(self, context: contextvars.Context, work: Callable[[], Any], activity: Activity) -> None:
        def done(value: Any, error: BaseException | None) -> None:
            self._thread_left()
            if self._stopping:
                return
            if error is None:
                self._returned(activity, value)
            else:
                self._raised(activity, error, 1)
            self.advance()

        self._busy_threads += 1
        self.runtime.threads.run(context, work, done)

    def _thread_left(self) -> None:
        self._busy_threads -= 1
        if not self._busy_threads and self._threads_idle is not None and not self._threads_idle.done():
            self._threads_idle.set_result(None)

    async def _in_thread(self, context: contextvars.Context, work: Callable[[], Any]) -> Any:
        """Runs synchronous code and waits for it; when cancelled, it is left alone but still counted."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(value: Any, error: BaseException | None) -> None:
            self._thread_left()
            if not future.done():
                future.set_result((value, error))

        self._busy_threads += 1
        self.runtime.threads.run(context, work, done)
        value, error = await future
        if error is not None:
            raise error
        return value

    async def _call(
        self,
        activity: Activity,
        operation: str,
        callee: Callee,
        args: dict[str, Any],
        retry: RetryPolicy | None,
        deadline: float | None,
        streams: bool,
    ) -> None:
        attempt = 1
        while True:
            try:
                value = await self._attempt(activity, operation, callee, args, deadline, streams, attempt)
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                if retry is not None and not streams and retry.allows(error, attempt):
                    await asyncio.sleep(retry.pause(attempt))
                    attempt += 1
                    continue
                self._raised(activity, error, attempt)
            else:
                self._returned(activity, value)
            self.advance()
            return

    async def _attempt(
        self,
        activity: Activity,
        operation: str,
        callee: Callee,
        args: dict[str, Any],
        deadline: float | None,
        streams: bool,
        attempt: int,
    ) -> Any:
        if streams and callee.whole:
            args = await self._whole(callee, args)
        work = self._work(callee, activity, operation, args, attempt, streams)
        if callee.kind in (CodeKind.GENERATOR, CodeKind.ASYNC_GENERATOR):
            return work()
        if attempt > 1:
            context = OperationContext(
                self.job_id, self.runtime.site, operation, activity.label, activity.frame, attempt
            )
            _context.enter(context)
        scope = asyncio.timeout(deadline)
        try:
            async with scope:
                if callee.kind is CodeKind.ASYNC:
                    return await work()
                found = await self._in_thread(contextvars.copy_context(), work)
                return await found if inspect.iscoroutine(found) else found
        except TimeoutError as error:
            if scope.expired():
                raise TimeoutError(f"the deadline of {deadline:g} s for {operation!r} is over") from error
            raise

    async def _whole(self, callee: Callee, args: dict[str, Any]) -> dict[str, Any]:
        """Reads streams to their end for parameters that are declared as lists."""
        names = [name for name in args if name in callee.whole and isinstance(args[name], Stream)]
        for name in names:
            args[name].consumers += sum(args[other] is args[name] for other in names[: names.index(name)])
        opened = {name: args[name].subscribe() for name in names}  # all of them, before the first is read
        read = {name: await subscription.rest() for name, subscription in opened.items()}
        for subscription in opened.values():
            subscription.close()
        return {**args, **read}

    def _returned(self, activity: Activity, value: Any) -> None:
        if inspect.iscoroutine(value):  # a plain function that returns a coroutine
            self._spawn(self._await(activity, lambda: value))
            return
        if not is_iterator(value):
            self._call_ended(activity)
        else:
            action = activity.transition.action
            place = self.program.places.get(action.output)  # type: ignore[union-attr] # only calls return
            stream = self._stream(
                activity.label, self._source(value, activity), place.readers if place else 0, activity
            )
            if place is None:
                self._spawn(self._drain(activity, stream))
                return
            value = stream
        self.game.complete(activity, value)

    async def _await(self, activity: Activity, work: Callable[[], Any]) -> None:
        try:
            value = await work()
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            self._raised(activity, error, 1)
        else:
            self._returned(activity, value)
        self.advance()

    def _raised(self, activity: Activity, error: BaseException, attempt: int) -> None:
        self._call_ended(activity)
        if isinstance(error, StreamFailed):  # it read a stream that failed: the failure is the producer's
            self.game.fail(activity, error.error)
        else:
            self.game.fail(activity, self.game.error(activity, error, attempt, _cause(error)))

    # streams

    def _source(self, iterator: Any, activity: Activity) -> Source:
        action = activity.transition.action
        operation = action.operation if isinstance(action, spec.Call) else activity.label
        found = OperationContext(self.job_id, self.runtime.site, operation, activity.label, activity.frame, 1)
        if hasattr(iterator, "__anext__"):
            return AsyncSource(iterator, functools.partial(_context.enter, found))
        context = contextvars.Context()
        context.run(_context.enter, found)
        return ThreadSource(self.runtime.threads, iterator, context, activity.label)

    def _stream(self, label: str, source: Source, readers: int | None, activity: Activity | None) -> Stream:
        def describe(error: BaseException) -> ErrorRecord:
            if isinstance(error, StreamFailed):
                return error.error
            if activity is not None:
                return self.game.error(activity, error, 1, _cause(error))
            return self.game.describe(error, label, label, (), 1, _cause(error))

        stream = Stream(label, source, _MANY if readers is None else readers, describe)
        self._streams.add(stream)
        return stream

    def _close_stream(self, stream: StreamValue) -> None:
        if isinstance(stream, Stream) and stream in self._streams:
            self._streams.discard(stream)
            self._closing.add(stream)
            self._spawn(self._finish_stream(stream))

    async def _finish_stream(self, stream: Stream) -> None:
        try:
            await stream.aclose()
        except Exception:  # noqa: BLE001 - its readers have what they wanted; there is nobody left to tell
            _log.warning("the generator of %s raised when it was closed", stream.label, exc_info=True)
        await stream.source.wait_ended()
        self._closing.discard(stream)

    async def _drain(self, activity: Activity, stream: Stream) -> None:
        """Runs a generator whose elements nobody reads to its end."""
        subscription = stream.subscribe()
        try:
            count = 0
            while await subscription.get():
                count += 1
                if not count % _FAIR:
                    await asyncio.sleep(0)
        except StreamFailed as failed:
            self.game.fail(activity, failed.error)
        else:
            self.game.complete(activity)
        self._close_stream(stream)
        self.advance()

    async def _serve(self, stream_id: int, export: _Export) -> None:
        """Sends elements of a stream to another location, as many as it asked for."""
        codec = self.runtime.codec
        while export.wanted > 0 and not export.subscription.closed:
            error: ErrorRecord | None = None
            try:
                found = await export.subscription.get(export.wanted)
                payload = codec.dumps([codec.pack(value) for value in found])
            except StreamFailed as failed:
                found, error, payload = [], failed.error, codec.dumps([])
            except EncodingError as problem:
                error = self.game.describe(problem, export.stream.label, export.stream.label, export.instance.frame)
                found, payload = [], codec.dumps([])
            export.wanted -= len(found)
            ended = not found
            items = msg.StreamItems(self.number, export.route, stream_id, self.at, payload, ended, error)
            self._to_peer(export.route, items)
            if ended:
                break
        export.active = False

    def _pull(self, effect: fx.Pull) -> None:
        control = effect.control
        puller = self._pullers.get(control)
        if puller is None:
            source = control.source
            if isinstance(source, Foreign):
                source = self._stream(
                    control.loop.label, self._source(source.iterator, control.activity), 1, control.activity
                )
            puller = self._pullers[control] = _Puller(source.subscribe(), own=isinstance(control.source, Foreign))
            self._spawn(self._feed(control, puller))
        puller.wanted += effect.count
        puller.wake()

    async def _feed(self, control: Control, puller: _Puller) -> None:
        """Fetches the elements of a loop as the game asks for them."""
        error: ErrorRecord | None = None
        turns = 0
        try:
            while True:
                while not puller.wanted:
                    await puller.wait()
                found = await puller.subscription.get(puller.wanted)
                if not found:
                    break
                puller.wanted -= len(found)
                self.game.feed(control, found)
                turns += 1
                if not turns % _FAIR:
                    await asyncio.sleep(0)
                self.advance()
        except StreamFailed as failed:
            error = failed.error
        puller.subscription.close()
        if puller.own:
            self._close_stream(puller.subscription.stream)
        del self._pullers[control]
        self.game.feed_end(control, error)
        self.advance()

    # results

    def _may_send(self) -> bool:
        return self._credits > 0 and self._byte_credits > 0

    def _emit(self, effect: fx.EmitValue) -> None:
        if isinstance(effect.value, Stream):
            self._spawn(self._emit_stream(effect, effect.value))
        elif is_iterator(effect.value):
            source = self._source(effect.value, effect.activity)
            self._spawn(self._emit_stream(effect, self._stream(effect.activity.label, source, 1, effect.activity)))
        elif self._blocked or not self._may_send():
            self._blocked.append(effect)
        else:
            self._emit_now(effect)

    def _emit_now(self, effect: fx.EmitValue) -> None:
        try:
            packed = self.runtime.codec.pack(effect.value)
        except EncodingError as error:
            self.game.fail(effect.activity, self._encoding_error(effect, error))
            return
        self._credits -= 1
        self._runs.append((effect.point, effect.frame, -1, 1))
        self._values.append(packed)
        self.game.complete(effect.activity)

    def _encoding_error(self, effect: fx.EmitValue, error: EncodingError) -> ErrorRecord:
        node = self.program.points[effect.point].node
        return self.game.describe(error, node.partition("#")[0], node, effect.frame, 1, _cause(error))

    async def _emit_stream(self, effect: fx.EmitValue, stream: Stream) -> None:
        subscription = stream.subscribe()
        pack: Callable[[Any], Any] = self.runtime.codec.pack
        if stream.single and hasattr(stream.source, "transform"):
            # Packed as soon as it is produced: the producer may reuse the object for the next element.
            stream.source.transform = pack
            pack = _as_it_is
        index = 0
        try:
            while found := await subscription.get(_PULL):
                for value in found:
                    while not self._may_send():
                        await self._wait_for_credit()
                    self._values.append(pack(value))
                    self._add_run(effect.point, effect.frame, index)
                    self._credits -= 1
                    index += 1
                self.runtime.touch(self)
                if index == 1 or not index % _FAIR:  # the first is sent at once
                    await asyncio.sleep(0)
        except StreamFailed as failed:
            self.game.fail(effect.activity, failed.error)
        except EncodingError as error:
            self.game.fail(effect.activity, self._encoding_error(effect, error))
        else:
            self.game.complete(effect.activity)
        subscription.close()
        if stream is not effect.value:
            self._close_stream(stream)
        self.advance()

    def _add_run(self, point: int, frame: Frame, index: int) -> None:
        runs = self._runs
        if runs:
            last_point, last_frame, start, count = runs[-1]
            if last_point == point and start >= 0 and start + count == index and last_frame == frame:
                runs[-1] = (point, frame, start, count + 1)
                return
        runs.append((point, frame, index, 1))

    async def _wait_for_credit(self) -> None:
        self.runtime.touch(self)  # what was sent so far is what earns new credit
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credit_waiters.append(future)
        await future

    def _wake_emitters(self) -> None:
        waiters, self._credit_waiters = self._credit_waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _emit_failed(self, effect: fx.EmitFailed) -> None:
        self._report_error(effect.error)
        self._report(msg.YieldFailed(self.number, self.at, effect.point, effect.frame, effect.error.id))

    # tokens

    def _send(self, effect: fx.Send) -> None:
        value = effect.value
        if isinstance(value, Stream):
            self._export(effect, value)
            return
        state, packed = _VALUE, value
        if value is SKIPPED:
            state, packed = _SKIPPED, None
        elif value is OPEN:
            state, packed = _OPEN, None
        elif type(value) is Failed:
            state, packed = _FAILED, _error_data(value.error)
        else:
            try:
                packed = self.runtime.codec.pack(value)
            except EncodingError as problem:
                label = self.program.places[effect.place].label
                error = self.game.describe(problem, label.partition("#")[0], label, effect.frame, 1, _cause(problem))
                self._report_error(error)
                state, packed = _FAILED, _error_data(error)
        for route in effect.routes:
            self._queue(route, effect.place, effect.frame, state, packed)

    def _queue(self, route: int, place: int, frame: Frame, state: int, packed: Any) -> None:
        found = self._tokens.get(route)
        if found is None:
            found = self._tokens[route] = ([], [])
        found[0].append((place, frame, state))
        found[1].append(packed)

    def _export(self, effect: fx.Send, stream: Stream) -> None:
        for route in effect.routes:
            stream_id = self._next_stream
            self._next_stream += 1
            assert effect.instance is not None  # noqa: S101 - only results of calls are streams
            self._exports[stream_id] = _Export(stream, stream.subscribe(), route, effect.instance)
            self._queue(route, effect.place, effect.frame, _STREAM, [self.at, stream_id])

    def _send_loop_end(self, effect: fx.SendLoopEnd) -> None:
        outcome = effect.outcome
        state = _VALUE if outcome is None else _SKIPPED if outcome is SKIPPED else _FAILED
        error = outcome.error if isinstance(outcome, Failed) else None
        for route in effect.routes:
            ended = msg.LoopEnded(self.number, route, effect.loop, effect.frame, effect.total, state, error)
            self._to_peer(route, ended)

    def _send_element_done(self, effect: fx.SendElementDone) -> None:
        self._elements_done.setdefault((effect.control, effect.loop), []).append(effect.frame)

    # the cache

    def _look_up(self, effect: fx.LookUp) -> None:
        self._spawn(self._ask_cache(effect.activity, effect.key, effect.wait))

    async def _ask_cache(self, activity: Activity, key: Any, wait: bool) -> None:
        try:
            hit, found = await self.runtime.cache.look_up(key, wait=wait)
        except EncodingError as error:
            self.game.fail(activity, self.game.error(activity, error, 1, _cause(error)))
        else:
            if hit:
                self.game.found(activity, found)
            else:
                self._tickets.add(found)
                self.game.missed(activity, found)
        self.advance()

    def _keep(self, effect: fx.Keep) -> None:
        self._tickets.discard(effect.ticket)
        try:
            self.runtime.cache.keep(effect.ticket, effect.value)
        except EncodingError as error:
            # The block has its value all the same; that it could not be kept is an error of the job.
            self._report_error(self.game.describe(error, "TryFromCache", "TryFromCache", (), 1, _cause(error)))

    def _give_back(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self.runtime.cache.abandon(ticket)

    # the end

    def _end(self) -> None:
        for stream in list(self._streams):
            self._close_stream(stream)
        self.runtime.forget(self)

    def cancel(self) -> None:
        """Stops everything that can be stopped; :meth:`stopped` waits for the rest."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """After :meth:`cancel`: waits for the tasks, and frees what the job holds."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.close_streams()

    async def close_streams(self) -> None:
        """After :meth:`cancel`: ends the generators of the job, and gives back its rights."""
        for stream in [*self._streams, *self._closing]:  # the task that was closing one may not have begun
            try:
                await stream.aclose()
            except Exception:  # noqa: BLE001 - the job has ended: there is nobody left to tell
                _log.warning("the generator of %s raised when it was closed", stream.label, exc_info=True)
        for ticket in list(self._tickets):
            self._give_back(ticket)

    async def stopped(self) -> None:
        """After :meth:`close`: waits until no thread runs anything of the job."""
        for stream in [*self._streams, *self._closing]:
            await stream.source.wait_ended()
        if self._busy_threads:
            self._threads_idle = asyncio.get_running_loop().create_future()
            await self._threads_idle


_HANDLERS: Final[dict[type, Callable[[SiteJob, Any], None]]] = {
    fx.Invoke: SiteJob._invoke,  # noqa: SLF001 - same module
    fx.EmitValue: SiteJob._emit,  # noqa: SLF001
    fx.EmitFailed: SiteJob._emit_failed,  # noqa: SLF001
    fx.Report: lambda job, effect: job._report_error(effect.error),  # noqa: SLF001
    fx.Send: SiteJob._send,  # noqa: SLF001
    fx.SendLoopEnd: SiteJob._send_loop_end,  # noqa: SLF001
    fx.SendElementDone: SiteJob._send_element_done,  # noqa: SLF001
    fx.FrameDone: lambda job, effect: job._frames_done.append(effect.index),  # noqa: SLF001
    fx.Pull: SiteJob._pull,  # noqa: SLF001
    fx.LookUp: SiteJob._look_up,  # noqa: SLF001
    fx.Keep: SiteJob._keep,  # noqa: SLF001
    fx.Abandon: lambda job, effect: job._give_back(effect.ticket),  # noqa: SLF001
    fx.CloseStream: lambda job, effect: job._close_stream(effect.stream),  # noqa: SLF001
    fx.SkipStream: lambda _job, effect: effect.stream.skip(),
}


class _Export:
    """A stream that another location reads."""

    __slots__ = ("active", "instance", "route", "stream", "subscription", "wanted")

    def __init__(self, stream: Stream, subscription: Subscription, route: int, instance: Any) -> None:
        self.stream = stream
        self.subscription = subscription
        self.route = route
        self.instance = instance
        self.wanted = 0
        self.active = False


class _Puller:
    """What a loop still wants of its source."""

    __slots__ = ("_waiter", "own", "subscription", "wanted")

    def __init__(self, subscription: Subscription, own: bool) -> None:
        self.subscription = subscription
        self.own = own
        self.wanted = 0
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class _RemoteSource:
    """The elements of a stream that another location produces."""

    def __init__(self, job: SiteJob, source: int, stream_id: int) -> None:
        self._job = job
        self._source = source
        self._id = stream_id
        self._items: deque[Any] = deque()
        self._asked = 0
        self._ended = False
        self._error: ErrorRecord | None = None
        self._waiter: asyncio.Future[None] | None = None

    def arrived(self, items: list[Any], ended: bool, error: ErrorRecord | None) -> None:
        """Elements have come."""
        self._items.extend(items)
        self._asked -= len(items)
        self._ended = self._ended or ended
        self._error = error
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
        found = [self._items.popleft() for _ in range(min(limit, len(self._items)))]
        for value in found:
            if isinstance(value, Broken):
                raise value.error
        self._ask()
        return found

    def _ask(self) -> None:
        if not self._ended and self._asked + len(self._items) <= _PULL // 2:
            count = _PULL - self._asked - len(self._items)
            self._asked += count
            job = self._job
            job.runtime.send(
                job.routes[self._source], msg.StreamPull(job.number, self._source, self._id, job.at, count)
            )

    def forget(self) -> None:
        """Lets whoever still waits for an element go."""
        self._ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def aclose(self) -> None:
        """Tells the producer that no more is wanted."""
        job = self._job
        self.forget()
        job.drop_import(self._source, self._id)
        job.runtime.send(job.routes[self._source], msg.StreamClose(job.number, self._source, self._id))

    async def wait_ended(self) -> None:
        """Returns at once: nothing of the source runs here."""


def _as_it_is(value: Any) -> Any:
    return value


def _error_data(error: ErrorRecord) -> list[Any]:
    data = [getattr(error, name) for name in ErrorRecord.__struct_fields__]
    data[4] = list(data[4])
    return data


def _cause(error: BaseException) -> bytes:
    """The exception itself, for the application; empty if it cannot travel."""
    try:
        dumps = cloudpickle.dumps if type(error).__module__ == "__main__" else pickle.dumps
        data = dumps(error, protocol=5)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - exceptions can hold anything
        return b""
    return data if len(data) <= _LARGEST_CAUSE else b""


def broken_record(site: str, error: Exception) -> ErrorRecord:
    """Describes a fault that is no operation's."""
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
    message = str(error).encode("utf-8", "backslashreplace").decode()
    return ErrorRecord(f"broken:{id(error)}", site, "job", "job", (), 1, type(error).__qualname__, message, text)


def _replace_streams(value: Any, read: Callable[[Any], Any]) -> Any:
    """Puts readers in the place of streams, also inside containers that were put together in the pipeline."""
    if isinstance(value, StreamValue):
        return read(value)
    if type(value) is dict:
        return {key: _replace_streams(item, read) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_replace_streams(item, read) for item in value)
    return value
