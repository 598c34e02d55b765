"""One job at one location: hands messages to the game, and carries out what the game asks for."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dfm_async.errors import EncodingError
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.model.resources import CacheConfig
from dfm_async.net import effects as fx
from dfm_async.net.game import Activity, Game
from dfm_async.net.program import Program
from dfm_async.net.tokens import OPEN, SKIPPED, Failed
from dfm_async.runtime import calls
from dfm_async.runtime.cache import Ticket
from dfm_async.runtime.faults import broken_record, cancel_task, cause_of, check_cancellation, is_our_cancellation
from dfm_async.runtime.iterators import is_iterator
from dfm_async.runtime.job_streams import FAIR, PULL, JobStreams
from dfm_async.runtime.job_threads import JobThreads
from dfm_async.runtime.objects import JobObjects
from dfm_async.runtime.observer import CallObserver
from dfm_async.runtime.operations import Callee
from dfm_async.runtime.outbox import Outbox, States, error_data
from dfm_async.runtime.speech import Speech
from dfm_async.runtime.streams import AsyncSource, Stream, StreamFailed
from dfm_async.site.cache_storage import cache_storage
from dfm_async.telemetry.recorder import Recorder
from dfm_async.telemetry.spans import Origin, encode_made
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken
from dfm_async.wire.memory import Payload, size_of

if TYPE_CHECKING:
    from upath import UPath

    from dfm_async.runtime.site import SiteRuntime

__all__ = ["SiteJob"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ROUNDS: Final = 8


class SiteJob:
    """The part of one job that one location runs."""

    __slots__ = (
        "_blocked",
        "_last",
        "_priority",
        "_requested",
        "_requests",
        "_results",
        "_speech",
        "_streams",
        "_table",
        "_tasks",
        "_threads",
        "_tickets",
        "_unsendable",
        "at",
        "game",
        "job_id",
        "number",
        "objects",
        "observer",
        "operations",
        "outbox",
        "program",
        "recorder",
        "runtime",
        "stopping",
    )

    def __init__(self, runtime: SiteRuntime, start: msg.StartJob, program: Program) -> None:
        self.runtime = runtime
        self.number = start.job
        self.at = start.at
        self.job_id = start.job_id
        self.program = program
        self.operations: frozenset[str] | None = None
        """The operations that it may call here; None means all."""
        self.game = Game(program, runtime.site, f"{start.job}.{start.at}")
        self.recorder: Recorder | None = None
        """Gathers spans, if the job is traced."""
        if start.trace is not None:
            self.recorder = Recorder(runtime.site, *start.trace, self._spans_wait)
            self.arrived(start.origin, start.count, start.payload)
        self.outbox: Outbox = Outbox(runtime, start, self.recorder)
        self.stopping = False
        self._threads: JobThreads | None = None
        self._priority = start.priority
        self.objects: JobObjects | None = None
        """The objects of classes. Most jobs have none, so this is made with the first."""
        self.observer = None
        if start.watch or self.recorder is not None:
            self.observer = CallObserver(self, start.watch, self.recorder, measured=start.measure)
        """Watches the calls, if somebody wants to know."""
        self._table = runtime.table  # a job keeps the code that it began with
        self._streams: JobStreams | None = None
        self._blocked: deque[fx.EmitValue] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets: set[Ticket] = set()
        self._last = False
        self._results = runtime.stored_codec if start.stored else runtime.codec
        self._unsendable: dict[int, dict[tuple[str, Frame], ErrorRecord]] | None = None
        self._speech: Speech | None = None
        self._requested = 0
        self._requests: dict[int, asyncio.Future[str]] = {}

    def find(self, operation: str, provider: str | None) -> Callee:
        """Finds an operation of the site.

        Raises:
            LookupError: the site does not offer it.
            PermissionError: the job may not use it.
        """
        if self.operations is not None and operation not in self.operations:
            raise PermissionError(f"job {self.job_id} was not allowed to use operation {operation!r} here")
        return self._table.find(operation, provider)

    @property
    def streams(self) -> JobStreams:
        """The job's streams. Most jobs have none, so this is made when it is first asked for."""
        if self._streams is None:
            self._streams = JobStreams(self)
        return self._streams

    @property
    def threads(self) -> JobThreads:
        """The synchronous calls of the job. Many jobs have none, so this is made when it is first asked for."""
        if self._threads is None:
            self._threads = JobThreads(self._priority)
        return self._threads

    # messages

    def open_frames(self, message: msg.OpenFrames) -> None:
        """Parameter sets have come."""
        self.arrived(message.origin, message.count, message.payload)
        self.open(message.first, message.count, message.payload, message.last)

    def open(self, first: int, count: int, payload: bytes | Payload, last: bool) -> None:
        """Opens the frames of parameter sets; ``last`` says that no more will come."""
        rows: Sequence[Any] = ((),) * count if payload == b"" else self.runtime.codec.loads_batch(payload)
        for index, row in enumerate(rows, first):
            if isinstance(row, Broken):
                label = self.program.params[0].label
                row = [self._broken_value(row, label, (index,))] * len(self.program.params)
            self.game.open(index, row)
        self._last = self._last or last
        self.advance()

    def tokens(self, message: msg.Tokens) -> None:
        """Tokens have come from another location."""
        values = self.runtime.codec.loads_batch(message.payload)
        self.arrived(message.origin, len(values), message.payload)
        for (place, frame, state), value in zip(message.heads, values, strict=True):
            self.game.token(place, frame, self._token_value(place, frame, state, value))
        self.advance()

    def _token_value(self, index: int, frame: Frame, state: int, value: Any) -> Any:
        if state == States.SKIPPED:
            return SKIPPED
        if state == States.OPEN:
            return OPEN
        if state == States.FAILED:
            return Failed(ErrorRecord(*value))
        place = self.program.places[index]
        if state == States.STREAM:
            return self.streams.arrive(place.label, place.readers, frame, *value)
        return self._broken_value(value, place.label, frame) if isinstance(value, Broken) else value

    def _broken_value(self, value: Broken, label: str, frame: Frame) -> Failed:
        error = self.game.describe(value.error, label, label, frame)
        self.outbox.report_error(error)
        return Failed(error)

    def loop_ended(self, message: msg.LoopEnded) -> None:
        """A loop that is driven elsewhere has had all its elements."""
        outcome: Any = None
        if message.state == States.SKIPPED:
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
        self.outbox.grant(message.items, message.bytes)
        self._unblock()
        self.advance()

    def _unblock(self) -> None:
        outbox = self.outbox
        while self._blocked and outbox.open:
            self._emit_now(self._blocked.popleft())
        if outbox.open:
            outbox.wake()

    def stream_pull(self, message: msg.StreamPull) -> None:
        """Another location wants elements of a stream from here."""
        self.streams.wanted_elsewhere(message)

    def stream_items(self, message: msg.StreamItems) -> None:
        """Elements of a stream from elsewhere have come."""
        self.streams.items(message)

    def stream_close(self, message: msg.StreamClose) -> None:
        """Another location is done with a stream from here."""
        self.streams.closed_elsewhere(message)

    # spans

    def arrived(self, origin: Origin | None, tokens: int, payload: bytes | Payload) -> None:
        """Values have come from another location, or from the application."""
        if origin is not None and self.recorder is not None:
            self.recorder.arrived(origin, tokens, size_of(payload))

    def spans_taken(self, message: msg.SpansTaken) -> None:
        """The application has taken spans."""
        if self.recorder is not None:
            self.recorder.taken(message.count)

    def _spans_wait(self) -> None:
        """A batch of spans waits to be sent. May be called from any thread."""
        runtime = self.runtime
        if runtime.on_loop():
            runtime.touch(self)
        else:
            runtime.threads.post(functools.partial(runtime.touch, self))

    def _send_spans(self, recorder: Recorder, *, end: bool) -> None:
        made = recorder.end("the job was stopped" if self.stopping else None) if end else recorder.take()
        if end:
            self.recorder = None
        if made:
            self.runtime.report(msg.SpansMade(self.number, self.at, len(made), encode_made(made), end))

    # the game

    def advance(self) -> None:
        """Carries out what the game asks for; a lot of it in several turns, so that others get theirs."""
        if self.stopping:
            return
        if self.outbox.stalled:
            self.runtime.touch(self)  # what was told is what earns new credit
            return
        for _ in range(_ROUNDS):
            for effect in self.game.take():
                _HANDLERS[type(effect)](self, effect)
            if not self.game.ready:
                break
        else:
            asyncio.get_running_loop().call_soon(self._advance_later)
        if self._last and self.game.over:
            self.runtime.flush_now(self)  # this was all: nothing of this turn can join it
        else:
            self.runtime.touch(self)

    def advance_soon(self) -> None:
        """Carries out what the game asks for in the next turn of the loop: for events that come in the midst of one."""
        if self.game.ready:
            asyncio.get_running_loop().call_soon(self._advance_later)

    def _advance_later(self) -> None:
        try:
            self._unblock()
            self.advance()
        except BaseException as error:  # noqa: BLE001 - a fault of ours, told as such
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Something went wrong that is no operation's fault: the job cannot go on, but others can."""
        if not self.stopping:
            _log.error("job %s is broken at site %s", self.job_id, self.runtime.site, exc_info=error)
            self.runtime.report(msg.JobBroken(self.number, self.at, broken_record(self.runtime.site, error)))

    def flush(self) -> None:
        """Sends what has gathered in this turn of the loop, and ends the job if that was all."""
        if self.stopping:
            return
        done = self._last and self.game.over
        if self._speech is not None and (done or self.outbox.has_frames_done):
            self._speech.flush()
        if self.observer is not None and done:
            if self._streams is not None:
                self._streams.end_all()
            self.observer.flush()
        held_up = not self.outbox.open
        holding = self.objects is not None and self.objects.held
        if self.recorder is not None and (done or self.outbox.has_frames_done or self.recorder.full):
            self._send_spans(self.recorder, end=done and not holding)  # before the end of the job, or of its sets
        self.outbox.flush()
        if held_up and self.outbox.open:  # what was sent is less than it seemed
            asyncio.get_running_loop().call_soon(self._advance_later)
        if done:
            if self._streams is not None:
                self._streams.close_all()
            if self.objects is not None and holding:
                self.runtime.end(self, self.objects)
            else:
                self.runtime.forget(self)

    def spawn(self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> asyncio.Task[None]:
        """Starts a task of this job."""
        task = self.runtime.spawn(self._guard(work), context, f"a task of job {self.job_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled early has not begun it
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except GeneratorExit:  # the task was dropped with its loop
            raise
        except BaseException as error:  # operations' errors are dealt with inside: this is a fault of ours
            if is_our_cancellation(error):
                raise
            self.broken(error)

    # results

    def _emit(self, effect: fx.EmitValue) -> None:
        if isinstance(effect.value, Stream):
            self.spawn(self._emit_stream(effect, effect.value))
        elif is_iterator(effect.value):
            self.spawn(self._emit_stream(effect, self.streams.of_iterator(effect.value, effect.activity, 1)))
        elif self._blocked or not self.outbox.open:
            self._blocked.append(effect)
        else:
            self._emit_now(effect)

    def _emit_now(self, effect: fx.EmitValue) -> None:
        try:
            packed = self._results.pack(effect.value)
        except EncodingError as error:
            node = self.program.points[effect.point].node
            self.game.fail(effect.activity, self._encoding_error(node, effect.frame, error))
            return
        self.outbox.add_result(effect.point, effect.frame, packed)
        self.game.complete(effect.activity)

    async def _emit_stream(self, effect: fx.EmitValue, stream: Stream) -> None:
        try:
            if stream.single and isinstance(stream.source, AsyncSource):
                await self._emit_directly(effect, stream, stream.source)
            else:
                await self._emit_batches(effect, stream)
        except StreamFailed as failed:
            self.game.fail(effect.activity, failed.error)
        except EncodingError as error:
            node = self.program.points[effect.point].node
            self.game.fail(effect.activity, self._encoding_error(node, effect.frame, error))
        else:
            self.game.complete(effect.activity)
        if stream is not effect.value:
            self.streams.close(stream)
        self.advance()

    async def _emit_batches(self, effect: fx.EmitValue, stream: Stream) -> None:
        subscription = stream.subscribe()
        pack = stream.transform_early(self._results.pack)
        outbox, index = self.outbox, 0
        try:
            while found := await subscription.get(PULL):
                for value in found:
                    while not outbox.open:
                        await self._wait_for_credit()
                    outbox.add_element(effect.point, effect.frame, index, pack(value))
                    index += 1
                self.runtime.touch(self)
                if index == 1:  # the first is sent at once
                    await asyncio.sleep(0)
        finally:
            subscription.close()

    async def _emit_directly(self, effect: fx.EmitValue, stream: Stream, source: AsyncSource) -> None:
        """The same for an asynchronous generator with no other reader: element by element, without detours."""
        pack, outbox, index = self._results.pack, self.outbox, 0
        iterator = source.iterator
        with source.reading():
            while True:
                try:
                    value = await anext(iterator)
                    check_cancellation()
                except StopAsyncIteration:
                    stream.end()
                    return
                except BaseException as error:
                    if is_our_cancellation(error):
                        raise
                    raise stream.failed(error) from error
                while not outbox.open:
                    await self._wait_for_credit()
                outbox.add_element(effect.point, effect.frame, index, pack(value))
                self.runtime.touch(self)  # the next one may take its time
                if index % FAIR == 0:  # also after the first, which is sent at once
                    await asyncio.sleep(0)
                index += 1

    async def _wait_for_credit(self) -> None:
        self.runtime.touch(self)  # what was sent so far is what earns new credit
        await self.outbox.wait_open()

    def _encoding_error(self, node: str, frame: Frame, error: EncodingError) -> ErrorRecord:
        """Describes that a value cannot be sent: once, however many uses it has."""
        if self._unsendable is None:
            self._unsendable = {}
        known = self._unsendable.setdefault(frame[0] if frame else -1, {})
        if (node, frame) not in known:
            described = self.game.describe(error, node.partition("#")[0], node, frame, 1, cause_of(error))
            known[node, frame] = described
        return known[node, frame]

    def _frame_done(self, effect: fx.FrameDone) -> None:
        if self._unsendable:
            self._unsendable.pop(effect.index, None)
        self.outbox.frame_done(effect.index)

    # tokens

    def _send(self, effect: fx.Send) -> None:
        value = effect.value
        state, packed = States.VALUE, value
        if value is SKIPPED:
            state, packed = States.SKIPPED, None
        elif value is OPEN:
            state, packed = States.OPEN, None
        elif type(value) is Failed:
            state, packed = States.FAILED, error_data(value.error)
        elif isinstance(value, Stream):
            self.streams.export(effect, value)
            return
        else:
            try:
                packed = self.runtime.codec.pack(value)
            except EncodingError as problem:
                label = self.program.places[effect.place].label
                error = self._encoding_error(label, effect.frame, problem)
                self.outbox.report_error(error)
                state, packed = States.FAILED, error_data(error)
        for route in effect.routes:
            self.outbox.add_token(route, effect.place, effect.frame, state, packed)

    def _send_loop_end(self, effect: fx.SendLoopEnd) -> None:
        self.outbox.loop_ended(effect.routes, effect.loop, effect.frame, effect.total, effect.outcome)

    # the cache

    def _look_up(self, effect: fx.LookUp) -> None:
        self.spawn(self._ask_cache(effect.activity, effect.key, effect.wait))

    async def _ask_cache(self, activity: Activity, key: Any, wait: bool) -> None:
        try:
            hit, found = await self.runtime.cache.look_up(key, wait=wait)
        except EncodingError as error:
            self.game.fail(activity, self.game.error(activity, error, 1, cause_of(error)))
        else:
            if hit:
                self.game.found(activity, found)
            else:
                self._tickets.add(found)
                self.game.missed(activity, found)
        self.advance()

    def _keep(self, effect: fx.Keep) -> None:
        self._tickets.discard(effect.ticket)
        activity, data = effect.activity, None
        try:
            data = self.runtime.cache.keep(effect.ticket, effect.value, activity.label)
        except EncodingError as error:
            # The block has its value all the same; that it could not be kept is an error of the job.
            self.outbox.report_error(self.game.error(activity, error, 1, cause_of(error)))
        if data is None:
            self.game.complete(activity)
        else:
            self.spawn(self._write(activity, effect.ticket, data))

    async def _write(self, activity: Activity, ticket: Ticket, data: bytes) -> None:
        await self.runtime.cache.write(ticket, data, activity.label)
        self.game.complete(activity)
        self.advance()

    def _give_back(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self.runtime.cache.abandon(ticket)

    # what operations say

    def progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Tells the application how far a call is. May be called from any thread."""
        runtime = self.runtime
        if not runtime.on_loop():
            runtime.threads.post(functools.partial(self.progress, node, frame, done, total, note))
        elif not self.stopping:
            self._speak().progress(node, frame, done, total, note)

    def metrics(self, node: str, frame: Frame, values: dict[str, Scalar], step: int | None) -> None:
        """Sends metrics of a call to the application. May be called from any thread."""
        runtime = self.runtime
        if not runtime.on_loop():
            runtime.threads.post(functools.partial(self.metrics, node, frame, values, step))
        else:
            self._speak().metrics(node, frame, values, step)

    def _speak(self) -> Speech:
        if self._speech is None:
            self._speech = Speech(self)
        return self._speech

    async def send_to_place(self, target: str, place: str, key: str, value: Any) -> None:
        """Sends a value to a parameter of another job, and waits until it was taken."""
        payload = self.runtime.codec.plain.encode(value)
        self._requested += 1
        request = self._requested
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests[request] = future
        try:
            message = msg.SendToPlace(self.number, self.at, request, target, place, key, payload)
            self.runtime.report(message)
            error = await future
        finally:
            del self._requests[request]
        if error:
            raise RuntimeError(error)

    def place_taken(self, message: msg.PlaceTaken) -> None:
        """The application tells what became of a value for another job."""
        future = self._requests.get(message.request)
        if future is not None and not future.done():
            future.set_result(message.error)

    async def secret(self, key: str) -> Any:
        """Asks the site's vault."""
        return await self.runtime.secrets.get(key)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something on the loop, and waits for it in a thread."""
        if self.runtime.on_loop():
            work.close()
            raise RuntimeError("context.wait is for synchronous operations, which run in threads; await instead")
        return calls.wait(self, work)

    def cache_storage(self, subpath: str | None) -> UPath:
        """Gives a directory for files that outlive the job."""
        config = self.runtime.config
        cache, site = config.cache or CacheConfig(), self.runtime.site
        return cache_storage(cache, config.federation, site, subpath, compat=config.compat)

    # cancellation

    def cancel(self) -> int:
        """Stops everything that can be stopped; :meth:`stopped` waits for the rest.

        Returns:
            How many synchronous calls were waiting for a thread. They will not run.
        """
        self.stopping = True
        if self._speech is not None:
            self._speech.flush()
        for task in self._tasks:
            cancel_task(task)
        if self._threads is None:
            return 0
        return self.runtime.threads.withdraw(self._threads.calls, RuntimeError("the job was cancelled"))

    def abandon(self) -> None:
        """After :meth:`cancel`, when the grace is over: does not wait any more for threads, to be free or to return."""
        if self._threads is not None:
            if self._threads.closes is not None:
                error = TimeoutError("no thread was free before the grace period of the cancellation was over")
                self.runtime.threads.withdraw(self._threads.closes, error)
            for call in list(self._threads.running):
                error = TimeoutError("the grace period of the cancellation is over, and the call has not returned")
                self.runtime.abandon(self, call, 0.0, error)
        if self._streams is not None:
            self._streams.abandon()

    async def close(self) -> None:
        """After :meth:`cancel`: waits for the tasks, and frees what the job holds."""
        await self._wait_for_tasks()
        await self.release()

    async def _wait_for_tasks(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def release(self) -> None:
        """After :meth:`cancel`: ends the generators of the job, and gives back its rights."""
        if self._streams is not None:
            await self._streams.aclose()
        for ticket in list(self._tickets):
            self._give_back(ticket)

    def let_go(self) -> None:
        """After :meth:`stopped`: drops what the job holds, and does not wait for the garbage collector to find it."""
        if self._speech is not None:
            self._speech.flush()
        if self.observer is not None:
            self.observer.flush()
        if self.recorder is not None:
            self._send_spans(self.recorder, end=True)
        self._blocked.clear()
        self._streams = None
        self.outbox.clear()

    async def stopped(self) -> None:
        """After :meth:`close`: waits until no thread runs anything of the job."""
        if self._streams is not None:
            await self._streams.stopped()
        if self._threads is not None:
            await self._threads.stopped()

    async def finished(self) -> None:
        """After the last parameter set: waits for what is left, such as generators that nobody reads to their ends."""
        await self._wait_for_tasks()
        if self._threads is not None:
            await self._threads.stopped()


_HANDLERS: Final[dict[type, Callable[[SiteJob, Any], None]]] = {
    fx.Invoke: calls.invoke,
    fx.EmitValue: SiteJob._emit,  # noqa: SLF001 - same module
    fx.EmitFailed: lambda job, effect: job.outbox.yield_failed(effect.point, effect.frame, effect.error),
    fx.Report: lambda job, effect: job.outbox.report_error(effect.error),
    fx.Send: SiteJob._send,  # noqa: SLF001
    fx.SendLoopEnd: SiteJob._send_loop_end,  # noqa: SLF001
    fx.SendElementDone: lambda job, effect: job.outbox.element_done(effect.control, effect.loop, effect.frame),
    fx.FrameDone: SiteJob._frame_done,  # noqa: SLF001
    fx.Pull: lambda job, effect: job.streams.pull(effect),
    fx.LookUp: SiteJob._look_up,  # noqa: SLF001
    fx.Keep: SiteJob._keep,  # noqa: SLF001
    fx.Abandon: lambda job, effect: job._give_back(effect.ticket),  # noqa: SLF001
    fx.CloseStream: lambda job, effect: job.streams.close(effect.stream, effect.read),
    fx.RunStream: lambda job, effect: job.streams.run(effect.stream, effect.unread),
    fx.ExpectReaders: lambda _job, effect: effect.stream.expect(effect.change),
}
