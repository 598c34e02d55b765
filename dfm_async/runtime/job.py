"""One job at one location: pass messages to the token game, and carry out its effects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from dfm_async.errors import EncodingError
from dfm_async.model.events import ErrorRecord, FailureHandled
from dfm_async.model.ids import Frame
from dfm_async.net import effects as fx
from dfm_async.net.game import Activity, Game
from dfm_async.net.program import Program
from dfm_async.net.tokens import OPEN, SKIPPED, Failed
from dfm_async.runtime import calls
from dfm_async.runtime.cache import Ticket
from dfm_async.runtime.faults import cause_of, check_cancellation, is_our_cancellation
from dfm_async.runtime.job_streams import FAIR, PULL, StreamingJob
from dfm_async.runtime.outbox import States, error_data
from dfm_async.runtime.resources import SiteResources
from dfm_async.runtime.scope import JobHost
from dfm_async.runtime.sources import PLAIN, AsyncSource, is_iterator
from dfm_async.runtime.streams import Stream, StreamFailed
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken
from dfm_async.wire.memory import Payload

_ROUNDS: Final = 8
"""The number of times that a job carries out effects before other jobs get their turn."""


class SiteJob(StreamingJob):
    """The part of one job that one location runs."""

    def __init__(
        self,
        resources: SiteResources,
        host: JobHost,
        start: msg.StartJob,
        program: Program,
        operations: frozenset[str] | None,
    ) -> None:
        super().__init__(resources, host, start, operations)
        self.program = program
        self._reruns = start.spec.reruns
        self._retry = start.spec.retry
        self.game = Game(program, resources.site, f"{start.job}.{start.at}")
        if self.recorder is not None:
            self.arrived(start.origin, start.count, start.payload)
        self._blocked: deque[fx.EmitValue] | None = None
        self._tickets: set[Ticket] | None = None
        self._last = False
        self._results = resources.stored_codec if start.spec.stored else resources.codec
        self._unsendable: dict[int, dict[tuple[str, Frame], ErrorRecord]] = {}

    # messages

    def open_frames(self, message: msg.OpenFrames) -> None:
        """Handle parameter sets."""
        self.arrived(message.origin, message.count, message.payload)
        self.open(message.first, message.count, message.payload, message.last)

    def open(self, first: int, count: int, payload: bytes | Payload, last: bool) -> None:
        """Open the frames of parameter sets; ``last``: no more will come."""
        rows: Sequence[Any] = ((),) * count if payload == b"" else self.resources.codec.loads_batch(payload)
        for index, row in enumerate(rows, first):
            if isinstance(row, Broken):
                label = self.program.params[0].label
                row = [self._broken_value(row, label, (index,))] * len(self.program.params)
            self.game.open(index, row)
        self._last = self._last or last
        self.advance()

    def tokens(self, message: msg.Tokens) -> None:
        """Handle tokens from another location."""
        values = self.resources.codec.loads_batch(message.payload)
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
        return self._broken_value(value, place.label, frame, place.handled) if isinstance(value, Broken) else value

    def _broken_value(self, value: Broken, label: str, frame: Frame, handled: bool = False) -> Failed:
        error = self.game.describe(value.error, label, label, frame)
        self.report(error, handled)
        return Failed(error)

    def report(self, error: ErrorRecord, handled: bool) -> None:
        """Report an error of the job to the application, or a failure that the pipeline handles."""
        if not handled:
            self.outbox.report_error(error)
            return
        found = FailureHandled(
            0, error.frame, error.site, error.node, error.type_name, error.message, max(1, error.attempt)
        )
        self.outbox.add_event(found)

    def loop_ended(self, message: msg.LoopEnded) -> None:
        """Handle the end of a loop that another location drives."""
        outcome: Any = None
        if message.state == States.SKIPPED:
            outcome = SKIPPED
        elif message.error is not None:
            outcome = Failed(message.error)
        self.game.loop_ended(message.loop, message.frame, message.total, outcome)
        self.advance()

    def elements_done(self, message: msg.ElementDone) -> None:
        """Note that another location is done with elements of a loop that is driven here."""
        for frame in message.frames:
            self.game.element_done(message.loop, frame)
        self.advance()

    def credit(self, message: msg.Credit) -> None:
        """Note that the application accepts further results."""
        self.outbox.grant(message.items, message.bytes)
        self._unblock()
        self.advance()

    def _unblock(self) -> None:
        outbox = self.outbox
        while self._blocked and outbox.open:
            self._emit_now(self._blocked.popleft())
        if outbox.open:
            outbox.wake()

    # the game

    def advance(self) -> None:
        """Carry out the effects of the game; many of them in several turns of the loop, so that other jobs go on."""
        if self.stopping:
            return
        if self.outbox.stalled:
            self.host.touch(self)  # what was sent is what earns new credit
            return
        for _ in range(_ROUNDS):
            for effect in self.game.take():
                _HANDLERS[type(effect)](self, effect)
            if not self.game.ready:
                break
        else:
            asyncio.get_running_loop().call_soon(self._advance_later)
        if self._last and self.game.over:
            self.host.flush_now(self)  # this was all: nothing else of this turn can be sent with it
        elif self.outbox.pending:
            self.host.touch(self)

    def advance_soon(self) -> None:
        """Carry out the effects of the game in the next turn of the loop: for events that come in the midst of one."""
        if self.game.ready:
            asyncio.get_running_loop().call_soon(self._advance_later)

    def _advance_later(self) -> None:
        try:
            self._unblock()
            self.advance()
        except BaseException as error:  # noqa: BLE001 - a bug of this library, reported as such
            self.broken(error)

    def flush(self) -> None:
        """Send what was collected in this turn of the loop, and end the job if that was all."""
        if self.stopping:
            return
        done = self._last and self.game.over
        outbox = self.outbox
        if outbox.reporting and (done or outbox.has_frames_done):
            outbox.send_reports()
        if self.observer is not None and done:
            if self._streams is not None:
                self._streams.end_all()
            self.observer.flush()
        held_up = not outbox.open
        holding = self.objects is not None and self.objects.held
        if self.recorder is not None and (done or outbox.has_frames_done or self.recorder.full):
            self.send_spans(end=done and not holding)  # before the end of the job, or of its sets
        outbox.flush()
        if held_up and outbox.open:  # what was sent is less than it seemed
            asyncio.get_running_loop().call_soon(self._advance_later)
        if done:
            if self._streams is not None:
                self._streams.close_all()
            self.host.job_done(self)

    # results

    def _emit(self, effect: fx.EmitValue) -> None:
        plain = type(effect.value) in PLAIN
        if not plain and isinstance(effect.value, Stream):
            self.spawn(self._emit_stream(effect, effect.value))
        elif not plain and is_iterator(effect.value):
            self.spawn(self._emit_stream(effect, self.streams.of_iterator(effect.value, effect.activity, 1)))
        elif self._blocked or not self.outbox.open:
            if self._blocked is None:
                self._blocked = deque()
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
        outbox, index, problem = self.outbox, 0, None
        try:
            while problem is None and (found := await subscription.get(PULL)):
                packed: list[Any] = []
                try:
                    packed.extend(map(pack, found))
                except EncodingError as error:  # raised again after the elements before it
                    problem = error
                while packed:
                    while not outbox.open:
                        await self._wait_for_credit()
                    added = outbox.add_elements(effect.point, effect.frame, index, packed)
                    index += added
                    packed = packed[added:]
                self.host.touch(self)
                if index == 1:  # the first is sent at once
                    await asyncio.sleep(0)
        finally:
            subscription.close()
        if problem is not None:
            raise problem

    async def _emit_directly(self, effect: fx.EmitValue, stream: Stream, source: AsyncSource) -> None:
        """Do the same for an asynchronous generator with no other reader: element by element, unbuffered."""
        pack, outbox, index = self._results.pack, self.outbox, 0
        iterator, task = source.iterator, asyncio.current_task()
        with source.reading():
            while True:
                try:
                    value = await anext(iterator)
                    check_cancellation(task)
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
                self.host.touch(self)  # the next one may take its time
                if index % FAIR == 0:  # also after the first, which is sent at once
                    await asyncio.sleep(0)
                index += 1

    async def _wait_for_credit(self) -> None:
        self.host.touch(self)  # what was sent so far is what earns new credit
        await self.outbox.wait_open()

    def _encoding_error(self, node: str, frame: Frame, error: EncodingError) -> ErrorRecord:
        """Describe that a value cannot be sent: once, however many uses it has."""
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
                packed = self.resources.codec.pack(value)
            except EncodingError as problem:
                place = self.program.places[effect.place]
                error = self._encoding_error(place.label, effect.frame, problem)
                self.report(error, place.handled)
                state, packed = States.FAILED, error_data(error)
        for route in effect.routes:
            self.outbox.add_token(route, effect.place, effect.frame, state, packed)

    # the cache

    async def _query_cache(self, effect: fx.LookUp) -> None:
        activity = effect.activity
        try:
            hit, found = await self.resources.cache.look_up(effect.key, wait=effect.wait)
        except EncodingError as error:
            self.game.fail(activity, self.game.error(activity, error, 1, cause_of(error)))
        else:
            if hit:
                self.game.found(activity, found)
            else:
                if self._tickets is None:
                    self._tickets = set()
                self._tickets.add(found)
                self.game.missed(activity, found)
        self.advance()

    def _keep(self, effect: fx.Keep) -> None:
        self._forget_ticket(effect.ticket)
        activity, data = effect.activity, None
        try:
            data = self.resources.cache.keep(effect.ticket, effect.value, activity.label)
        except EncodingError as error:
            # The block has its value all the same; that it could not be kept is an error of the job.
            self.outbox.report_error(self.game.error(activity, error, 1, cause_of(error)))
        if data is None:
            self.game.complete(activity)
        else:
            self.spawn(self._write(activity, effect.ticket, data))

    async def _write(self, activity: Activity, ticket: Ticket, data: bytes) -> None:
        await self.resources.cache.write(ticket, data, activity.label)
        self.game.complete(activity)
        self.advance()

    def _give_back(self, ticket: Ticket) -> None:
        self._forget_ticket(ticket)
        self.resources.cache.abandon(ticket)

    def _forget_ticket(self, ticket: Ticket) -> None:
        if self._tickets is not None:
            self._tickets.discard(ticket)

    # calls

    def call_reports(self, message: msg.CallReports) -> None:
        """Handle what a call has reported in another worker."""
        for report in message.progress:
            self.outbox.add_progress(*report)
        for event in message.events:
            self.outbox.add_event(event)

    def relay_to_place(self, message: msg.RelayToPlace) -> None:
        """Send a value of a call in another worker to another job, and answer the worker."""

        async def deliver() -> None:
            error = await self.deliver(message.target, message.place, message.key, message.payload)
            answer = msg.PlaceTaken(self.number, self.at, message.request, error)
            self.resources.send(message.reply_to, answer)

        self.spawn(deliver())

    def _invoke(self, effect: fx.Invoke) -> None:
        action = effect.action
        try:
            callee = self.find(action.operation, action.provider)
        except (LookupError, PermissionError) as error:
            self.game.fail(effect.activity, self.game.error(effect.activity, error))
            return
        calls.start(self, calls.Call(callee, effect, self._reruns, self._retry))

    # cancellation

    def abandon(self) -> None:
        """After :meth:`cancel`, when the grace period is over: stop waiting for threads, to be free or to return."""
        super().abandon()
        if self._streams is not None:
            self._streams.abandon()

    async def close(self) -> None:
        """After :meth:`cancel`: wait for the tasks, and free what the job holds."""
        await self.tasks_ended()
        await self.release()

    async def release(self) -> None:
        """After :meth:`cancel`: end the generators of the job, and give back its tickets."""
        if self._streams is not None:
            await self._streams.aclose()
        for ticket in list(self._tickets or ()):
            self._give_back(ticket)

    async def stopped(self) -> None:
        """After :meth:`close`: wait until no thread runs anything of the job."""
        if self._streams is not None:
            await self._streams.stopped()
        await self.threads_ended()

    def let_go(self) -> None:
        """After :meth:`stopped`: drop what the job holds, rather than wait for the garbage collector to find it."""
        self.outbox.send_reports()
        if self.observer is not None:
            self.observer.flush()
        self.send_spans(end=True)
        self._blocked = None
        self._streams = None
        self.outbox.clear()

    async def finished(self) -> None:
        """After the last parameter set: wait for what is left, such as generators that nobody reads to their ends."""
        await self.tasks_ended()
        await self.threads_ended()


_HANDLERS: Final[dict[type, Callable[[SiteJob, Any], object]]] = {
    fx.Invoke: SiteJob._invoke,  # noqa: SLF001 - same module
    fx.EmitValue: SiteJob._emit,  # noqa: SLF001 - same module
    fx.EmitFailed: lambda job, effect: job.outbox.yield_failed(effect.point, effect.frame, effect.error),
    fx.Report: lambda job, effect: job.report(effect.error, effect.handled),
    fx.Send: SiteJob._send,  # noqa: SLF001
    fx.SendLoopEnd: lambda job, effect: job.outbox.loop_ended(effect),
    fx.SendElementDone: lambda job, effect: job.outbox.element_done(effect),
    fx.FrameDone: SiteJob._frame_done,  # noqa: SLF001
    fx.Pull: lambda job, effect: job.streams.pull(effect),
    fx.LookUp: lambda job, effect: job.spawn(job._query_cache(effect)),  # noqa: SLF001
    fx.Keep: SiteJob._keep,  # noqa: SLF001
    fx.Abandon: lambda job, effect: job._give_back(effect.ticket),  # noqa: SLF001
    fx.CloseStream: lambda job, effect: job.streams.close(effect.stream, effect.read),
    fx.RunStream: lambda job, effect: job.streams.run(effect.stream, effect.unread),
    fx.ExpectReaders: lambda _job, effect: effect.stream.expect(effect.change),
}
