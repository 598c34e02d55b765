"""One job at one location: pass messages to the token game, and carry out its effects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from dfm_async.errors import EncodingError
from dfm_async.model.events import ErrorRecord, FailureHandled
from dfm_async.model.ids import Frame
from dfm_async.model.json_data import read_json
from dfm_async.net import effects as fx
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.net.containment import ContainingGame, RestoredGame, game_of
from dfm_async.net.game_state import PendingActivity
from dfm_async.net.tokens import OPEN, SKIPPED, Failed
from dfm_async.runtime import calls
from dfm_async.runtime.cache import Ticket
from dfm_async.runtime.job_streams import FAIR, PULL, StreamingJob
from dfm_async.runtime.operation_errors import cause_of, check_cancellation, is_our_cancellation
from dfm_async.runtime.outbox import States, error_data
from dfm_async.runtime.recorded import Recording
from dfm_async.runtime.scope import JobHost
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.sources import PLAIN, AsyncSource, is_iterator
from dfm_async.runtime.streams import LocalStream, StreamFailed
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken
from dfm_async.wire.memory import Payload

_ROUNDS: Final = 8
"""The number of times that a job carries out effects before other jobs get their turn."""


class SiteJob(StreamingJob):
    """The part of one job that one location runs."""

    __slots__ = (
        "_blocked",
        "_checkpoints",
        "_checkpoints_all",
        "_clocks",
        "_held",
        "_last",
        "_recorded",
        "_reruns",
        "_results",
        "_retry",
        "_tickets",
        "_unsendable",
        "_waiting",
    )

    def __init__(
        self,
        resources: SiteResources,
        host: JobHost,
        start: msg.StartJob,
        program: CompiledNet,
        operations: frozenset[str] | None,
    ) -> None:
        super().__init__(resources, host, start, operations)
        self.program = program
        self._streams = None
        self._reruns = start.spec.reruns
        self._retry = start.spec.retry
        self._recorded = start.recorded
        name, checkpoints = start.spec.checkpoints, resources.checkpoints
        self._checkpoints = checkpoints.of(name) if name and checkpoints is not None else None
        self._checkpoints_all = start.spec.checkpoint == "calls"
        restored = start.incarnation > 0
        prefix = f"{start.job}.{start.at}.{start.incarnation}" if restored else f"{start.job}.{start.at}"
        self.game = game_of(program, resources.site, prefix, restored=restored, reruns=start.spec.reruns)
        self._held: list[tuple[int, int, bytes | Payload, bool]] | None = [] if restored else None
        """Parameter sets that came before it was known where to begin with them."""
        self._clocks: set[asyncio.TimerHandle] | None = None
        if self.recorder is not None:
            self.arrived(start.origin, start.count, start.payload)
        self._blocked: deque[fx.EmitValue] | None = None
        self._tickets: set[Ticket] | None = None
        self._waiting: dict[tuple[str, Frame], fx.WaitForEvent] | None = None
        """The statements that wait for an event, or a time."""
        self._last = False
        self._results = resources.stored_codec if start.spec.stored else resources.codec
        self._unsendable: dict[int, dict[tuple[str, Frame], ErrorRecord]] | None = None

    # messages

    def open_frames(self, message: msg.OpenFrames) -> None:
        """Handle parameter sets."""
        self.arrived(message.origin, message.count, message.payload)
        self.open(message.first, message.count, message.payload, message.last)

    def open(self, first: int, count: int, payload: bytes | Payload, last: bool) -> None:
        """Open the frames of parameter sets; ``last``: no more will come."""
        if self._held is not None:
            self._held.append((first, count, payload, last))
            return
        rows: Sequence[Any] = ((),) * count if payload == b"" else self.resources.codec.loads_batch(payload)
        for index, row in enumerate(rows, first):
            if isinstance(row, Broken):
                label = self.program.params[0].label
                row = [self._broken_value(row, label, (index,))] * len(self.program.params)
            self.game.open(index, row)
        self._last = self._last or last
        self.advance()

    # locations that can be lost

    def is_current(self, message: msg.Tokens | msg.LoopEnded | msg.ElementDone | msg.RestoreJob) -> bool:
        """Return whether a message is not of, or for, a worker that was lost."""
        return message.incarnation == self.outbox.incarnation(message.source)

    def location_lost(self, message: msg.LocationLost) -> None:
        """Go on without another location, as far as that is possible."""
        assert isinstance(self.game, ContainingGame)  # noqa: S101 - the planner has decided so
        self.outbox.location_lost(message.location, message.incarnation)
        self.game.lost(message.location, message.error)
        self.advance()

    def location_back(self, message: msg.LocationBack) -> None:
        """Describe to the new worker of a location where to begin."""
        assert isinstance(self.game, ContainingGame)  # noqa: S101 - the planner has decided so
        self.outbox.location_back(message.location, message.address)
        self.game.back(message.location, message.frames)
        self.advance()

    def restore(self, message: msg.RestoreJob) -> None:
        """Begin where a worker that was lost has ended."""
        if self._held is None or not self.is_current(message):
            return
        assert isinstance(self.game, RestoredGame)  # noqa: S101 - else nothing would be held
        self.game.restore(message.done, message.instances)
        held, self._held = self._held, None
        for batch in held:
            self.open(*batch)
        self.advance()

    def _start_clock(self, effect: fx.StartClock) -> None:
        """Note how long a call waits for another worker of its location."""
        game = self.game
        assert isinstance(game, ContainingGame)  # noqa: S101 - only those have such effects
        lost = game.losses(effect.location)
        clocks = self._clocks = self._clocks or set()

        def late() -> None:
            clocks.discard(timer)
            game.late(effect.location, lost, effect.frame, effect.output)
            self._advance_later()

        timer = asyncio.get_running_loop().call_later(effect.seconds, late)
        clocks.add(timer)

    def _stop_clocks(self) -> None:
        for timer in self._clocks or ():
            timer.cancel()
        self._clocks = None

    def tokens(self, message: msg.Tokens) -> None:
        """Handle tokens from another location."""
        if not self.is_current(message):
            return
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
            offset=0,
            frame=error.frame,
            site=error.site,
            node=error.node,
            type_name=error.type_name,
            message=error.message,
            attempt=max(1, error.attempt),
        )
        self.outbox.add_event(found)

    def loop_ended(self, message: msg.LoopEnded) -> None:
        """Handle the end of a loop that another location drives."""
        if not self.is_current(message):
            return
        outcome: Any = None
        if message.state == States.SKIPPED:
            outcome = SKIPPED
        elif message.error is not None:
            outcome = Failed(message.error)
        self.game.loop_ended(message.loop, message.frame, message.total, outcome)
        self.advance()

    def elements_done(self, message: msg.ElementDone) -> None:
        """Note that another location is done with elements of a loop that is driven here."""
        if self.is_current(message):
            for frame in message.frames:
                self.game.element_done(message.loop, frame, message.source)
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
            self._stop_clocks()
            if self._streams is not None:
                self._streams.close_all()
            self.host.job_done(self)

    # results

    def _emit(self, effect: fx.EmitValue) -> None:
        plain = type(effect.value) in PLAIN
        if not plain and isinstance(effect.value, LocalStream):
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

    async def _emit_stream(self, effect: fx.EmitValue, stream: LocalStream) -> None:
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

    async def _emit_batches(self, effect: fx.EmitValue, stream: LocalStream) -> None:
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

    async def _emit_directly(self, effect: fx.EmitValue, stream: LocalStream, source: AsyncSource) -> None:
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

    def _send(self, effect: fx.SendToken) -> None:
        value = effect.value
        state, packed = States.VALUE, value
        if value is SKIPPED:
            state, packed = States.SKIPPED, None
        elif value is OPEN:
            state, packed = States.OPEN, None
        elif type(value) is Failed:
            state, packed = States.FAILED, error_data(value.error)
        elif isinstance(value, LocalStream):
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

    async def _write(self, activity: PendingActivity, ticket: Ticket, data: bytes) -> None:
        await self.resources.cache.write(ticket, data, activity.label)
        self.game.complete(activity)
        self.advance()

    def _give_back(self, ticket: Ticket) -> None:
        self._forget_ticket(ticket)
        self.resources.cache.abandon(ticket)

    def _forget_ticket(self, ticket: Ticket) -> None:
        if self._tickets is not None:
            self._tickets.discard(ticket)

    # events and times

    def _await(self, effect: fx.WaitForEvent) -> None:
        activity = effect.activity
        if self._waiting is None:
            self._waiting = {}
        self._waiting[activity.label, activity.frame] = effect
        self.outbox.wait(activity.label, activity.frame, effect.action.event or "", effect.seconds)

    def wait_answered(self, message: msg.WaitAnswer) -> None:
        """Go on with a statement whose event has come, or whose time is over."""
        effect = None if self._waiting is None else self._waiting.pop((message.node, message.frame), None)
        if effect is None:
            return
        activity, event = effect.activity, effect.action.event
        if message.value is not None:
            self.game.complete(activity, read_json(message.value))
        elif event is None:
            self.game.complete(activity)
        else:
            sent_to = f"was sent to parameter set {activity.frame[0]} within {effect.seconds or 0:g} s"
            error = TimeoutError(f"no event {event!r} {sent_to}")
            self.game.fail(activity, self.game.error(activity, error))
        self.advance()

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
        call = calls.OperationCall(callee, effect, self._reruns, self._retry)
        if self._checkpoints is not None and (self._checkpoints_all or callee.checkpoint):
            activity, codec = effect.activity, self.resources.stored_codec
            call.recording = Recording(self._checkpoints, codec, activity.label, activity.frame)
            if self._recorded:
                self.spawn(calls.recall(self, call))
                return
        calls.start(self, call)

    # cancellation

    def cancel(self) -> int:
        """Cancel all tasks, and drop the synchronous calls that wait for a thread. Return the number of the latter."""
        self._stop_clocks()
        return super().cancel()

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
    fx.ReportError: lambda job, effect: job.report(effect.error, effect.handled),
    fx.SendToken: SiteJob._send,  # noqa: SLF001
    fx.SendLoopEnd: lambda job, effect: job.outbox.loop_ended(effect),
    fx.SendElementDone: lambda job, effect: job.outbox.element_done(effect),
    fx.FrameDone: SiteJob._frame_done,  # noqa: SLF001
    fx.Pull: lambda job, effect: job.streams.pull(effect),
    fx.LookUp: lambda job, effect: job.spawn(job._query_cache(effect)),  # noqa: SLF001
    fx.Keep: SiteJob._keep,  # noqa: SLF001
    fx.WaitForEvent: SiteJob._await,  # noqa: SLF001
    fx.Abandon: lambda job, effect: job._give_back(effect.ticket),  # noqa: SLF001
    fx.CloseStream: lambda job, effect: job.streams.close(effect.stream, effect.read),
    fx.RunStream: lambda job, effect: job.streams.run(effect.stream, effect.unread),
    fx.StartClock: SiteJob._start_clock,  # noqa: SLF001
    fx.NotContained: lambda job, effect: job.outbox.report(msg.LossNotContained(job.number, job.at, effect.location)),
    fx.RestoreLocation: lambda job, effect: job.outbox.restore(effect),
    fx.ExpectReaders: lambda _job, effect: effect.stream.expect(effect.change),
}
