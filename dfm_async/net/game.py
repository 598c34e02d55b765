"""The token game of one job at one location.

An :class:`Instance` is one execution of a scope: the pipeline for one parameter set, or a loop's body for one element.
It holds one slot per place and the number of things it still waits for; when nothing is left, it is done and freed, so
memory does not grow with the number of parameter sets or elements. Every transition of a scope is *resolved* exactly
once per instance: it fired, failed, or was skipped. That is what makes the end of a frame, a loop and a job a matter of
counting.

Streams are counted in the same way, each by a :class:`StreamRecord`: a location releases a stream as soon as none of
its readers there can read it any longer, whatever else their instances still do. A call that made a stream is resolved
when that stream is released, and only then are the streams released that the call itself reads. So releases follow the
flow of data backwards, and locations that read from each other cannot wait for each other.

Nothing here waits or does I/O: events come in by method calls, :meth:`Game.take` gives the effects.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import msgspec

from dfm_async.base.redaction import hide
from dfm_async.base.text import shortened
from dfm_async.errors import DfmError, NotEnoughReplies
from dfm_async.model.checks import FINITE, is_number
from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.model.info import FailureInfo
from dfm_async.model.replies import Replies, Reply
from dfm_async.net import effects as fx
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet, PlaceCode, ScopeCode, TransitionCode, fetch
from dfm_async.net.game_state import Control, Instance, LoopRecord, PendingActivity, StreamRecord
from dfm_async.net.tokens import ABSENT, OPEN, RELEASED, SKIPPED, CacheHit, CacheMiss, Failed, Foreign, StreamValue

_TRACEBACK_LINES: Final = 60


class _Repeating(msgspec.Struct, frozen=True):
    """The source of a repeat's control: the largest number of iterations."""

    times: int | None


class Game:
    """The state of one job at one location. ``prefix`` makes the ids of its errors unique within the job."""

    __slots__ = (
        "_effects",
        "_errors",
        "_prefix",
        "_ready",
        "_roots",
        "_streams",
        "program",
        "site",
    )

    def __init__(self, program: CompiledNet, site: str, prefix: str) -> None:
        self.program = program
        self.site = site
        self._prefix = prefix
        self._errors = 0
        self._roots: dict[int, Instance] = {}
        self._streams: dict[StreamValue, StreamRecord] = {}
        self._ready: deque[tuple[Instance, TransitionCode]] = deque()
        self._effects: list[fx.Effect] = []

    @property
    def live(self) -> int:
        """The number of parameter sets in flight here."""
        return len(self._roots)

    @property
    def streams(self) -> int:
        """The number of streams that are not released yet."""
        return len(self._streams)

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ready or self._effects)

    @property
    def over(self) -> bool:
        """Whether no parameter set is in flight here, and nothing is left to take."""
        return not self._roots and not self._effects

    def take(self, limit: int = 1000) -> list[fx.Effect]:
        """Fire what is ready, up to a limit, and return the effects, in order."""
        ready = self._ready
        while ready and limit:
            limit -= 1
            instance, transition = ready.popleft()
            self._fire(instance, transition)
        effects, self._effects = self._effects, []
        return effects

    # events

    def open(self, index: int, params: Sequence[Any]) -> None:
        """Open a parameter set."""
        root = self._root(index)
        for place, value in zip(self.program.params, params, strict=True):
            self._put(root, place, value)
        for transition in root.scope.transitions:
            if not transition.inputs and root.missing[transition.index] == 1:
                self._ready.append((root, transition))
        self._resolve(root)

    def token(self, index: int, frame: Frame, value: Any) -> None:
        """Take a token from another location."""
        place = self.program.places[index]
        assert place.scope is not None  # noqa: S101 - only readers are sent tokens
        instance = self._instance(place.scope, frame)
        if not isinstance(value, StreamValue):
            self._put(instance, place, value)
        elif instance.slots[place.slot] is ABSENT:
            self._add_stream(instance, place, value, None)
        else:  # a second token for the same frame changes nothing
            self._effects.append(fx.CloseStream(value, False))

    def loop_ended(self, index: int, frame: Frame, total: int, outcome: Any) -> None:
        """Note that a loop that is driven elsewhere has had all its elements."""
        loop = self.program.loops[index]
        scope = self.program.scopes[loop.scope]
        assert scope.parent is not None  # noqa: S101 - a loop's scope has one
        self._end_here(self._record(self._instance(scope.parent, frame), loop), total, outcome)

    def element_done(self, index: int, frame: Frame, source: int = -1) -> None:
        """Note that another location, ``source``, is done with an element of a loop that is driven here."""
        loop = self.program.loops[index]
        owner = self._find(frame[:-1], loop)
        record = None if owner is None else owner.loops.get(index)
        if record is not None and record.control is not None and self._owes(record.control, frame[-1], source):
            self._element_done(record.control, frame[-1])

    def _owes(self, control: Control, index: int, source: int) -> bool:
        """Return whether a location was not done with an element before."""
        return True

    def complete(self, activity: PendingActivity, value: Any = None) -> None:
        """Note that an activity has succeeded."""
        instance, transition = activity.instance, activity.transition
        action = transition.action
        if type(action) is spec.Call:
            if isinstance(value, StreamValue):
                self._add_stream(instance, self.program.places.get(action.output), value, activity)
                return
            self._produce(instance, action.output, value)
            if action.ended is not None:
                self._produce(instance, action.ended, OPEN)
        elif type(action) is spec.Await:
            self._produce(instance, action.output, value)
        if activity.streams:
            self._release(activity.streams, True)
        self._resolve(instance)

    def fail(self, activity: PendingActivity, error: ErrorRecord) -> None:
        """Note that an activity has failed. One with a fallback has that value instead."""
        transition = activity.transition
        if transition.fallback is not None:
            self._effects.append(fx.ReportError(error, True))
            self.complete(activity, transition.fallback(()))
            return
        self._effects.append(fx.ReportError(error, transition.handled))
        if activity.streams:
            self._release(activity.streams, True)
        self._pass(activity.instance, transition, Failed(error))

    def feed(self, control: Control, values: Iterable[Any]) -> None:
        """Take elements of a loop's source."""
        for value in values:
            control.requested -= 1
            self._admit(control, value)
        if not control.loop.members:  # an empty body: no location will report that it is done with an element
            self.pump(control)

    def feed_end(self, control: Control, error: ErrorRecord | None) -> None:
        """Note that a loop's source has ended."""
        control.requested = 0
        if error is not None:
            self._effects.append(fx.ReportError(error, control.activity.transition.handled))
        self._exhaust(control, None if error is None else Failed(error))

    def pump(self, control: Control) -> None:
        """Request further elements, or admit them, as far as the limit allows."""
        if control.exhausted:
            return
        source = control.source
        members = control.loop.members
        room = control.loop.limit - len(control.in_flight) - control.requested
        if isinstance(source, Iterator):
            while room > 0 or not members:
                try:
                    value = next(source)
                except StopIteration:
                    self._exhaust(control, None)
                    return
                except Exception as error:  # noqa: BLE001 - whatever iterating over a user's value raises
                    found = self.error(control.activity, error)
                    self._effects.append(fx.ReportError(found, control.activity.transition.handled))
                    self._exhaust(control, Failed(found))
                    return
                self._admit(control, value)
                room -= 1
        elif room > 0:
            control.requested += room
            self._effects.append(fx.Pull(control, room))

    def found(self, activity: PendingActivity, value: Any) -> None:
        """Note that the cache had the key."""
        self._answer(activity, CacheHit(value), SKIPPED)

    def missed(self, activity: PendingActivity, ticket: Any) -> None:
        """Note that the cache did not have the key."""
        self._answer(activity, CacheMiss(ticket), OPEN)

    def stream_ended(self, stream: StreamValue, error: ErrorRecord | None) -> None:
        """Note that the generator of a stream that was made here has no more elements, or has raised."""
        record = self._streams.get(stream)
        if record is None or record.activity is None or record.ended:
            return
        record.ended = True
        record.error = error
        action = record.activity.transition.action
        assert isinstance(action, spec.Call)  # noqa: S101 - only calls make streams
        if action.ended is not None:
            self._produce(record.instance, action.ended, OPEN)
        if not record.left:
            self._settle([(stream, record)])

    def stream_released(self, stream: StreamValue, read: bool) -> None:
        """Note that another location is done with a stream that was sent to it; ``read``: a reader there had begun."""
        self._release((stream,), read)

    def error(
        self, activity: PendingActivity, error: BaseException, attempt: int = 1, cause: bytes = b""
    ) -> ErrorRecord:
        """Describe an exception of an activity."""
        action = activity.transition.action
        operation = action.operation if isinstance(action, spec.Call) else activity.label
        return self.describe(error, operation, activity.label, activity.frame, attempt, cause)

    def describe(
        self,
        error: BaseException,
        operation: str,
        label: str,
        frame: Frame,
        attempt: int = 1,
        cause: bytes = b"",
    ) -> ErrorRecord:
        """Describe an exception that happened here."""
        self._errors += 1
        return describe_error(
            error, f"{self._prefix}:{self._errors}", self.site, operation, label, frame, attempt, cause
        )

    # instances

    def _root(self, index: int) -> Instance:
        root = self._roots.get(index)
        if root is None:
            root = self._roots[index] = Instance(self.program.root, (index,), None)
        return root

    def _instance(self, scope: ScopeCode, frame: Frame) -> Instance:
        """Find or make the instance of a scope for a frame, and those around it."""
        instance = self._root(frame[0])
        for depth, loop in enumerate(scope.path, 1):
            record = self._record(instance, loop)
            child = record.children.get(frame[depth])
            if child is None:
                child = self._new_child(record, frame[: depth + 1])
            instance = child
        return instance

    def _find(self, frame: Frame, loop: spec.Loop) -> Instance | None:
        """Find the instance that a loop driven here is in, if it still exists."""
        instance = self._roots.get(frame[0])
        for depth, outer in enumerate(self.program.driven[loop.index].path, 1):
            if instance is None or outer.index not in instance.loops:
                return None
            instance = instance.loops[outer.index].children.get(frame[depth])
        return instance

    def _record(self, instance: Instance, loop: spec.Loop) -> LoopRecord:
        record = instance.loops.get(loop.index)
        if record is None:
            record = instance.loops[loop.index] = LoopRecord(loop, instance, [{} for _ in loop.collects])
        return record

    def _new_child(self, record: LoopRecord, frame: Frame) -> Instance:
        scope = self.program.scopes[record.loop.scope]
        child = Instance(scope, frame, record.owner)
        record.children[frame[-1]] = child
        for transition, up, slot in scope.outer:
            owner = child
            for _ in range(up):
                assert owner.parent is not None  # noqa: S101 - the planner counted the scopes
                owner = owner.parent
            if owner.slots[slot] is ABSENT:
                child.missing[transition.index] += 1
                if owner.waiters is None:
                    owner.waiters = {}
                owner.waiters.setdefault(slot, []).append((child, transition))
        return child

    def _put(self, instance: Instance, place: PlaceCode, value: Any) -> None:
        slot = place.slot
        if not place.local or instance.slots[slot] is not ABSENT:
            return
        instance.slots[slot] = value
        missing = instance.missing
        for transition in place.consumers:
            missing[transition.index] -= 1
            if not missing[transition.index]:
                self._ready.append((instance, transition))
        if instance.waiters:
            for child, transition in instance.waiters.pop(slot, ()):
                child.missing[transition.index] -= 1
                if not child.missing[transition.index]:
                    self._ready.append((child, transition))
        if place.awaited:
            self._resolve(instance)

    def _produce(self, instance: Instance, index: int, value: Any) -> None:
        place = self.program.places.get(index)
        if place is None:
            return  # it has no readers
        if place.routes:
            self._send(index, instance.frame, value, place.routes)
        if place.local:
            self._put(instance, place, value)

    def _send(self, index: int, frame: Frame, value: Any, routes: tuple[int, ...]) -> None:
        self._effects.append(fx.SendToken(index, frame, value, routes))

    # streams

    def _add_stream(
        self, instance: Instance, place: PlaceCode | None, stream: StreamValue, activity: PendingActivity | None
    ) -> None:
        """Put a stream into its place, and count its possible readers beforehand, so that it can be released."""
        left = 0
        if place is not None:
            left = place.holders + len(place.routes)
            if instance.early is not None:
                left -= instance.early.pop(place.slot, 0)
        record = self._streams[stream] = StreamRecord(instance, place, left, activity)
        if place is not None:
            self._produce(instance, place.index, stream)
        if activity is not None and activity.transition.action.runs_ahead:  # type: ignore[union-attr] # made by a call
            self._effects.append(fx.RunStream(stream))
        if not left:
            self._settle([(stream, record)])

    def _hold(self, activity: PendingActivity) -> None:
        """Count a further reader of streams, if it could not be counted when they came."""
        for stream in activity.streams:
            record = self._streams.get(stream)
            if record is not None and record.instance is not activity.instance:
                record.left += 1

    def _release(self, streams: Iterable[StreamValue], read: bool) -> None:
        """Count readers that are done with streams; ``read``: they had begun to read."""
        unused: list[tuple[StreamValue, StreamRecord]] = []
        self._count_down(streams, read, unused)
        self._settle(unused)

    def _count_down(
        self, streams: Iterable[StreamValue], read: bool, unused: list[tuple[StreamValue, StreamRecord]]
    ) -> None:
        for stream in streams:
            record = self._streams.get(stream)
            if record is not None:
                record.left -= 1
                record.read = record.read or read
                if not record.left:
                    unused.append((stream, record))

    def _settle(self, unused: list[tuple[StreamValue, StreamRecord]]) -> None:
        """Close streams without readers, and the streams that only they were read for."""
        while unused:  # not by recursion: chains of generators can be long
            self._count_down(self._close(*unused.pop()), True, unused)

    def _close(self, stream: StreamValue, record: StreamRecord) -> Sequence[StreamValue]:
        """Close a stream without readers, or run it to its end if it never had any; return what its generator read."""
        activity, instance, place = record.activity, record.instance, record.place
        if activity is not None and not record.read and not record.ended:
            self._effects.append(fx.RunStream(stream, unread=True))
            return ()
        del self._streams[stream]
        self._effects.append(fx.CloseStream(stream, record.read))
        if place is not None and place.local:
            instance.slots[place.slot] = RELEASED
        if activity is None:
            return ()
        action = activity.transition.action
        assert isinstance(action, spec.Call)  # noqa: S101 - only calls make streams
        if record.error is not None and not record.read:
            self._effects.append(fx.ReportError(record.error, activity.transition.handled))
        if action.ended is not None and not record.ended:
            self._produce(instance, action.ended, OPEN)
        self._resolve(instance)
        return activity.streams

    def _resolve(self, instance: Instance) -> None:
        instance.remaining -= 1
        if instance.remaining:
            return
        parent = instance.parent
        if parent is None:
            index = instance.frame[0]
            del self._roots[index]
            self._effects.append(fx.FrameDone(index))
            return
        loop = instance.scope.loop
        assert loop is not None  # noqa: S101 - only the root scope has none
        record = parent.loops[loop.index]
        del record.children[instance.frame[-1]]
        record.finished += 1
        last = record.total == record.finished  # before the control ends the loop: then it does this itself
        if loop.control == self.program.here:
            assert record.control is not None  # noqa: S101 - elements come from it
            self._element_done_here(record.control, instance.frame[-1])
        else:
            self._effects.append(fx.SendElementDone(loop.index, instance.frame, loop.control))
        if last:
            self._loop_done(record)

    # loops

    def _admit(self, control: Control, value: Any) -> None:
        loop = control.loop
        index = control.next_index
        control.next_index += 1
        frame = (*control.activity.frame, index)
        if loop.members:
            control.in_flight[index] = len(loop.members)
        for place_index, token in ((loop.element, value), (loop.enter, OPEN)):
            if place_index is None:
                continue
            place = self.program.places[place_index]
            if place.routes:
                if isinstance(token, StreamValue):
                    self._streams[token].left += len(place.routes)
                self._send(place_index, frame, token, place.routes)
            if place.local:
                assert place.scope is not None  # noqa: S101 - local readers have the scope
                self._put(self._instance(place.scope, frame), place, token)

    def _element_done_here(self, control: Control, index: int) -> None:
        self._element_done(control, index)

    def _element_done(self, control: Control, index: int) -> None:
        left = control.in_flight[index] - 1
        if left:
            control.in_flight[index] = left
            return
        del control.in_flight[index]
        if isinstance(control.source, _Repeating):
            self._advance(control)
        else:
            self.pump(control)

    def _exhaust(self, control: Control, outcome: Any) -> None:
        control.exhausted = True
        activity, source, control.source = control.activity, control.source, None
        if activity.streams:
            read = isinstance(source, StreamValue)
            if read or self.program.here not in control.loop.members:
                self._release_read(activity, read)
        self._end_loop(control.record, control.next_index, outcome)
        self._resolve(activity.instance)

    def _release_read(self, activity: PendingActivity, read: bool) -> None:
        """Release the streams of an activity; those of a loop are its source, or elements that are streams."""
        streams, activity.streams = activity.streams, ()
        self._release(streams, read)

    def _end_loop(self, record: LoopRecord, total: int, outcome: Any) -> None:
        loop = record.loop
        away = tuple(member for member in loop.members if member != self.program.here)
        if away:
            self._send_loop_end(loop, record.owner.frame, total, outcome, away)
        if len(away) < len(loop.members):
            self._end_here(record, total, outcome)

    def _send_loop_end(self, loop: spec.Loop, frame: Frame, total: int, outcome: Any, away: tuple[int, ...]) -> None:
        self._effects.append(fx.SendLoopEnd(loop.index, frame, total, outcome, away))

    def _end_here(self, record: LoopRecord, total: int, outcome: Any) -> None:
        record.total = total
        record.outcome = outcome
        if isinstance(outcome, Failed):
            scope = self.program.scopes[record.loop.scope]
            frame = record.owner.frame
            self._effects.extend(fx.EmitFailed(point, frame, outcome.error) for point in scope.emits)
        if record.finished == total:
            self._loop_done(record)

    def _loop_done(self, record: LoopRecord) -> None:
        owner = record.owner
        for place, gathered in zip(record.loop.collects, record.gathered, strict=True):
            if place in self.program.places:
                self._produce(owner, place, _collected(gathered, record.outcome))
        if record.control is None or record.control.exhausted:
            del owner.loops[record.loop.index]
        for slot in owner.scope.read_by[record.loop.index]:
            self._loop_released(owner, slot)
        if record.control is not None and record.control.activity.streams:
            self._release_read(record.control.activity, False)
        self._resolve(owner)

    def _loop_released(self, owner: Instance, slot: int) -> None:
        """Release a place around a loop, whose token may not have come."""
        value = owner.slots[slot]
        if isinstance(value, StreamValue):
            self._release((value,), False)
        elif value is ABSENT:
            if owner.early is None:
                owner.early = {}
            owner.early[slot] = owner.early.get(slot, 0) + 1

    def _advance(self, control: Control) -> None:
        """Continue after an iteration of a repeat that every location is done with."""
        assert control.last is not None  # noqa: S101 - the step is part of the iteration
        value, last = control.last
        control.last = None
        times = control.source.times
        if last or (times is not None and control.next_index >= times):
            self._end_repeat(control, value)
        else:
            self._admit(control, value)

    def _end_repeat(self, control: Control, value: Any) -> None:
        action = control.activity.transition.action
        assert isinstance(action, spec.Repeat)  # noqa: S101 - made by one
        self._produce(control.activity.instance, action.output, value)
        self._exhaust(control, None)

    # firing

    def _fire(self, instance: Instance, transition: TransitionCode) -> None:
        values = []
        for up, slot in transition.inputs:
            owner = instance
            while up:
                owner = owner.parent  # type: ignore[assignment] # the planner counted the scopes
                up -= 1
            values.append(owner.slots[slot])
        action = transition.action
        kind = type(action)
        activity = PendingActivity(instance, transition)
        stopped: Any = None
        for i in transition.strict:
            value = values[i]
            if value is SKIPPED:
                stopped = SKIPPED
            elif type(value) is Failed:
                stopped = stopped or value
            elif isinstance(value, StreamValue):
                activity.streams = (*activity.streams, value)
        if activity.streams and (stopped is not None or kind not in _READERS):
            self._turn_away(activity)
        if stopped is not None and kind not in _LENIENT:
            self._pass(instance, transition, stopped)
            return
        try:
            _HANDLERS[kind](self, activity, action, values)
        except Exception as error:  # noqa: BLE001 - whatever an expression over user values raises
            self._turn_away(activity)
            self.fail(activity, self.error(activity, error))

    def _turn_away(self, activity: PendingActivity) -> None:
        """Count a transition that does not read the streams among its inputs."""
        self._effects.extend(fx.ExpectReaders(stream, -1) for stream in activity.streams)
        self._hold(activity)
        self._release_read(activity, False)

    def _pass(self, instance: Instance, transition: TransitionCode, outcome: Any) -> None:
        """Resolve a transition that cannot fire: its readers get what kept it from firing."""
        action = transition.action
        ended = action.ended if isinstance(action, spec.Call) else None
        for index in transition.outputs:
            self._produce(instance, index, OPEN if index == ended else outcome)
        match action:
            case spec.Emit():
                if isinstance(outcome, Failed):
                    self._effects.append(fx.EmitFailed(action.point, instance.frame, outcome.error))
            case spec.Iterate() | spec.Repeat():
                self._end_loop(self._record(instance, self.program.loops[action.loop]), 0, outcome)
            case spec.Step():
                self._control_of(instance).last = (outcome, True)
            case spec.Gather():
                self._gather_value(instance, action, outcome)
        self._resolve(instance)

    def _call(self, activity: PendingActivity, action: spec.Call, values: list[Any]) -> None:
        args = activity.transition.arguments(values)
        if activity.streams:
            self._hold(activity)
        self._effects.append(fx.Invoke(activity, action, args, values))

    def _emit(self, activity: PendingActivity, action: spec.Emit, values: list[Any]) -> None:
        value = activity.transition.formulas["value"](values)
        if activity.streams:
            self._hold(activity)
        self._effects.append(fx.EmitValue(activity, action.point, activity.instance.frame, value))

    def _branch(self, activity: PendingActivity, action: spec.Branch, values: list[Any]) -> None:
        holds = bool(_whole(activity, "cond", values, "a condition"))
        instance = activity.instance
        self._produce(instance, action.then, OPEN if holds else SKIPPED)
        self._produce(instance, action.otherwise, SKIPPED if holds else OPEN)
        self._resolve(instance)

    def _iterate(self, activity: PendingActivity, action: spec.Iterate, values: list[Any]) -> None:
        source = activity.transition.formulas["seq"](values)
        if hasattr(source, "__anext__") or hasattr(source, "__next__"):
            source = Foreign(source)  # its elements may block: the runtime fetches them
        elif not isinstance(source, StreamValue):
            if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
                raise TypeError(f"ForEach needs a list or an iterator, not {type(source).__name__}")
            if activity.streams:
                self._expect_elements(action.loop, source, activity.streams)
            source = iter(source)
        self._hold(activity)
        self.pump(self._start(activity, action.loop, source))

    def _expect_elements(self, index: int, source: Iterable[Any], streams: Sequence[StreamValue]) -> None:
        """Have the readers in a loop's body read its elements, which are streams, rather than the loop itself."""
        elements = [value for value in source if isinstance(value, StreamValue)]
        if set(elements) != set(streams):
            raise TypeError("an element of a ForEach cannot have a generator inside: return a list instead")
        element = self.program.loops[index].element
        readers = 0 if element is None else self.program.places[element].readers
        for stream in streams:
            change = fx.MANY if readers is None else elements.count(stream) * readers
            self._effects.append(fx.ExpectReaders(stream, change - 1))

    def _start(self, activity: PendingActivity, index: int, source: Any) -> Control:
        loop = self.program.loops[index]
        record = self._record(activity.instance, loop)
        control = record.control = Control(activity, loop, record, source)
        return control

    def _repeat(self, activity: PendingActivity, action: spec.Repeat, values: list[Any]) -> None:
        carry = _whole(activity, "carry", values, "the value of a Repeat")
        times = None
        if action.times is not None:
            times = activity.transition.formulas["times"](values)
            if not isinstance(times, int) or isinstance(times, bool) or times < 0:
                raise TypeError(f"times of a Repeat must be a number of iterations, not {times!r}")
        control = self._start(activity, action.loop, _Repeating(times))
        if times == 0:
            self._end_repeat(control, carry)
        else:
            self._admit(control, carry)

    def _control_of(self, instance: Instance) -> Control:
        parent, loop = instance.parent, instance.scope.loop
        assert parent is not None and loop is not None  # noqa: S101, PT018 - a step is inside a loop
        control = parent.loops[loop.index].control
        assert control is not None  # noqa: S101 - a step is where its repeat is driven
        return control

    def _step(self, activity: PendingActivity, action: spec.Step, values: list[Any]) -> None:
        following = _whole(activity, "next", values, "the value of a Repeat")
        last = action.until is not None and bool(activity.transition.formulas["until"](values))
        self._control_of(activity.instance).last = (following, last)
        self._resolve(activity.instance)

    def _lookup(self, activity: PendingActivity, action: spec.Lookup, values: list[Any]) -> None:
        key = _whole(activity, "key", values, "a cache key")
        self._effects.append(fx.LookUp(activity, key, not action.nested))

    def _answer(self, activity: PendingActivity, answer: Any, gate: Any) -> None:
        action = activity.transition.action
        assert isinstance(action, spec.Lookup)  # noqa: S101 - only lookups are answered
        self._produce(activity.instance, action.found, answer)
        self._produce(activity.instance, action.miss, gate)
        self._resolve(activity.instance)

    def _store(self, activity: PendingActivity, action: spec.Store, values: list[Any]) -> None:
        instance, answer = activity.instance, values[0]
        if isinstance(answer, CacheHit):
            self._produce(instance, action.output, answer.value)
        elif isinstance(answer, CacheMiss):
            stopped = [v for v in values[1:] if v is SKIPPED or type(v) is Failed]
            try:
                value = stopped[0] if stopped else _whole(activity, "value", values, "what a cache stores")
            except Exception:
                self._effects.append(fx.Abandon(answer.ticket))
                raise
            self._produce(instance, action.output, value)
            if not stopped:
                self._effects.append(fx.Keep(activity, answer.ticket, value))
                return
            self._effects.append(fx.Abandon(answer.ticket))
        else:
            self._produce(instance, action.output, answer)  # skipped or failed
        self._resolve(instance)

    def _gather(self, activity: PendingActivity, action: spec.Gather, values: list[Any]) -> None:
        self._gather_value(activity.instance, action, _whole(activity, "value", values, "what collect gathers"))
        self._resolve(activity.instance)

    def _gather_value(self, instance: Instance, action: spec.Gather, value: Any) -> None:
        assert instance.parent is not None  # noqa: S101 - gathers are inside loops
        if type(value) is Failed and action.errors != "fail":
            value = failure_data(value.error) if action.errors == "keep" else SKIPPED
        instance.parent.loops[action.loop].gathered[action.collect][instance.frame[-1]] = value

    def _make(self, activity: PendingActivity, action: spec.Make, values: list[Any]) -> None:
        self._produce(activity.instance, action.output, _whole(activity, "value", values, "the value of an If"))
        self._resolve(activity.instance)

    def _choose(self, activity: PendingActivity, action: spec.Choose, values: list[Any]) -> None:
        taken = [value for value in values if value is not SKIPPED]
        self._produce(activity.instance, action.output, taken[0] if taken else SKIPPED)
        self._resolve(activity.instance)

    def _quorum(self, activity: PendingActivity, action: spec.Quorum, values: list[Any]) -> None:
        if any(value is SKIPPED for value in values):
            self._pass(activity.instance, activity.transition, SKIPPED)
            return
        found: Replies[Any] = Replies()
        for site, value in zip(action.sites, values, strict=False):  # a gate may follow
            if isinstance(value, StreamValue):
                raise TypeError("a call of a gather cannot return a generator: return a list instead")
            if type(value) is Failed:
                found.failures.append(failure_data(value.error))
            else:
                found.append(Reply(site, value))
        if len(found) < action.at_least:
            raise NotEnoughReplies(len(found), action.at_least, tuple(map(str, found.failures)))
        self._produce(activity.instance, action.output, found)
        self._resolve(activity.instance)

    def _await(self, activity: PendingActivity, action: spec.Await, values: list[Any]) -> None:
        seconds = None
        if action.seconds is not None:
            seconds = _whole(activity, "seconds", values, "a number of seconds")
            if not is_number(seconds, most=FINITE):
                what = "seconds of a Sleep" if action.event is None else "timeout of a Wait"
                raise TypeError(f"{what} must be a number that is not negative, not {shortened(seconds)}")
        self._effects.append(fx.WaitForEvent(activity, action, seconds))


_LENIENT: Final = frozenset({spec.Store, spec.Choose, spec.Quorum})
"""What fires although inputs were skipped, or have failed."""

_READERS: Final = frozenset({spec.Call, spec.Emit, spec.Iterate})
"""What can read a stream. All others take whole values, and refuse streams."""

_HANDLERS: Final[dict[type, Callable[[Game, PendingActivity, Any, list[Any]], None]]] = {
    spec.Call: Game._call,  # noqa: SLF001 - same module
    spec.Emit: Game._emit,  # noqa: SLF001
    spec.Branch: Game._branch,  # noqa: SLF001
    spec.Iterate: Game._iterate,  # noqa: SLF001
    spec.Repeat: Game._repeat,  # noqa: SLF001
    spec.Step: Game._step,  # noqa: SLF001
    spec.Lookup: Game._lookup,  # noqa: SLF001
    spec.Store: Game._store,  # noqa: SLF001
    spec.Gather: Game._gather,  # noqa: SLF001
    spec.Make: Game._make,
    spec.Choose: Game._choose,  # noqa: SLF001
    spec.Quorum: Game._quorum,  # noqa: SLF001
    spec.Await: Game._await,  # noqa: SLF001
}


def _whole(activity: PendingActivity, formula: str, values: list[Any], what: str) -> Any:
    value = activity.transition.formulas[formula](values)
    if isinstance(value, StreamValue):
        raise TypeError(f"{what} cannot be a generator: return a list instead")
    return value


def _collected(gathered: dict[int, Any], outcome: Any) -> Any:
    if outcome is not None:
        return outcome
    values = [gathered[index] for index in sorted(gathered)]
    for value in values:
        if type(value) is Failed:
            return value
    return [value for value in values if value is not SKIPPED]


def failure_data(error: ErrorRecord) -> FailureInfo:
    """Return an error as data that a pipeline can pass on."""
    return FailureInfo(error.site, error.operation, error.node, tuple(error.frame), error.type_name, error.message)


def _clean(text: str) -> str:
    """Return text that can be sent: without secrets, and with escapes for what UTF-8 cannot hold."""
    return hide(text if text.isascii() else text.encode("utf-8", "backslashreplace").decode())


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error itself
        return f"<{type(error).__name__} without text>"


def _traceback(error: BaseException) -> str:
    try:
        found = _of_the_user(error)
        chain = found is not None or not isinstance(error, TimeoutError) or _has_user_frames(error)
        lines = traceback.format_exception(type(error), error, found, chain=chain)
    except Exception:  # noqa: BLE001 - nor a broken traceback
        return ""
    text = "".join(lines).splitlines()
    if len(text) > _TRACEBACK_LINES:
        half = _TRACEBACK_LINES // 2
        text = [*text[:half], f"  ... {len(text) - 2 * half} lines left out ...", *text[-half:]]
    return "\n".join(text)


def _of_the_user(error: BaseException) -> TracebackType | None:
    """Return the traceback from where the user's code begins.

    An error of the library from its own code has none, nor has one of an expression: its message is sufficient.
    """
    package, found, module = __name__.partition(".")[0], error.__traceback__, ""
    while found is not None:
        module = str(found.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] != package:
            break
        found = found.tb_next
    ours = isinstance(error, (DfmError, TimeoutError)) or module == fetch.__module__  # such as an exceeded deadline
    return error.__traceback__ if found is None and not ours else found


def _has_user_frames(error: BaseException) -> bool:
    """Return whether the user's code is in the traceback of a deadline that is exceeded: where it was cancelled."""
    ours, cause = (__name__.partition(".")[0], "asyncio"), error.__cause__
    while cause is not None:
        modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(cause.__traceback__))
        if any(module.partition(".")[0] not in ours for module in modules):
            return True
        cause = cause.__cause__
    return False


def describe_error(
    error: BaseException,
    error_id: str,
    site: str,
    operation: str,
    node: str,
    frame: Frame,
    attempt: int,
    cause: bytes,
) -> ErrorRecord:
    """Describe an exception of an operation, as it travels."""
    kind = type(error)
    return ErrorRecord(
        id=error_id,
        site=site,
        operation=operation,
        node=node,
        frame=frame,
        attempt=attempt,
        type_name=hide(
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        ),
        message=_clean(_text(error)),
        traceback=_clean(_traceback(error)),
        cause=cause,
    )
