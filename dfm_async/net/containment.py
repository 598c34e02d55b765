"""The token game with locations that can be lost: a :class:`ContainingGame` calls them, a :class:`RestoredGame` is one.

The caller of such a location has everything that the location gets, and gets everything that it makes. So when the
worker of the location is lost, the caller knows which of its calls may have begun. These have failed, unless they may
be called again. Until there is another worker, the caller keeps what the location needs. Elements and parameter sets
that it is done with itself need nothing of the location any longer. It describes to the new worker where to begin.

Nothing here waits or does I/O, as in :mod:`~dfm_async.net.game`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net import effects as fx
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet, PlaceCode, TransitionCode
from dfm_async.net.contained import ContainedCallCode, ContainedLocation, scope_of
from dfm_async.net.game import Game, describe_error
from dfm_async.net.game_state import Control, Instance, LoopRecord
from dfm_async.net.tokens import ABSENT, OPEN, RELEASED, SKIPPED, Failed, StreamValue

_NEVER: Final = 1 << 30
"""How many inputs a transition lacks that must not fire."""
_UNKNOWN: Final = object()
"""The value of an input that the caller does not have."""


def game_of(program: CompiledNet, site: str, prefix: str, *, restored: bool, reruns: int) -> Game:
    """Make the game of a location; ``restored``: it takes the place of one that was lost."""
    if restored:
        return RestoredGame(program, site, prefix)
    return ContainingGame(program, site, prefix, reruns) if program.net.contains else Game(program, site, prefix)


class ContainingGame(Game):
    """The game of a location that goes on if one of those that it calls is lost.

    ``reruns``: how often calls are made again that were lost, if they have no policy of their own.
    """

    def __init__(self, program: CompiledNet, site: str, prefix: str, reruns: int = 0) -> None:
        super().__init__(program, site, prefix)
        self._reruns = reruns
        self._contained = {found.location: ContainedLocation(found, program) for found in program.net.contains}
        self._absent: dict[int, ContainedLocation] = {}
        self._again: set[tuple[Instance, ContainedCallCode]] = set()
        """The calls that may have begun, and are made again; only while a loss is handled."""

    # events

    def lost(self, at: int, error: ErrorRecord) -> None:
        """Note that the worker of a location was lost."""
        found = self._absent[at] = self._contained[at]
        found.lost += 1
        found.clocks.clear()
        self._effects = [kept for effect in self._effects if (kept := _without(effect, at)) is not None]
        instances = list(self._instances(found))
        if any(self._shares_stream(found, instance) for instance in instances):
            self._effects.append(fx.NotContained(at))
            return
        for instance in instances:
            for call in found.calls.get(scope_of(instance), ()):
                unseen = call.local and call.spec.output not in self.program.places
                if unseen and not self._is_needed(found, instance, call):
                    self._decide(found, instance, call, Failed(self._described(found, instance, call, error)))
                else:
                    self._check(found, instance, call, error)
        self._again.clear()
        for control in list(self._controls(found)):
            for index in sorted(control.owed.get(at, set()) & control.done_here):
                control.owed[at].discard(index)
                self._element_done(control, index)

    def late(self, at: int, lost: int, frame: Frame, output: int) -> None:
        """Note that a call has waited for a worker for too long, since the location was lost for the n-th time."""
        found = self._absent.get(at)
        if found is None or found.lost != lost:
            return
        call = found.made[output]
        instance = self._existing(call, frame)
        if instance is not None and self._outcome(found, instance, call) is ABSENT:
            text = f"no result of {call.spec.operation!r} within {call.spec.within:g} s: its worker was lost"
            self._fail_call(found, instance, call, self._described(found, instance, call, TimeoutError(text)))

    def back(self, at: int, frames: Iterable[int]) -> None:
        """Note that a location has another worker, which begins with some parameter sets."""
        found = self._absent.pop(at)
        roots = {index: self._roots.get(index) for index in frames}
        done = [index for index, root in roots.items() if root is None or self._is_idle(found, root)]
        restore = fx.RestoreLocation(at, done, [])
        self._effects.append(restore)
        idle: list[tuple[Control, int]] = []
        for index, root in roots.items():
            if root is not None and index not in done:
                self._restore(found, root, restore, idle)
        for control, index in idle:
            self._element_done(control, index)

    def is_absent(self, at: int) -> bool:
        """Return whether a location was lost, and is not back."""
        return at in self._absent

    def losses(self, at: int) -> int:
        """Return how often a location was lost."""
        return self._contained[at].lost

    # what the location was doing

    def _instances(self, found: ContainedLocation) -> Iterator[Instance]:
        """Yield the instances that a location may have a part in, each before those inside."""
        for root in self._roots.values():
            yield from self._inside(found, root)

    def _inside(self, found: ContainedLocation, instance: Instance) -> Iterator[Instance]:
        yield instance
        for record in self._records(found, instance):
            for child in record.children.values():
                yield from self._inside(found, child)

    @staticmethod
    def _records(found: ContainedLocation, instance: Instance) -> Iterator[LoopRecord]:
        for index in found.loops.get(scope_of(instance), ()):
            if index in instance.loops:
                yield instance.loops[index]

    def _controls(self, found: ContainedLocation) -> Iterator[Control]:
        for instance in self._instances(found):
            for record in self._records(found, instance):
                if record.control is not None:
                    yield record.control

    def _existing(self, call: ContainedCallCode, frame: Frame) -> Instance | None:
        instance = self._roots.get(frame[0])
        for depth, loop in enumerate(self.program.scopes[call.spec.scope].path, 1):
            record = None if instance is None else instance.loops.get(loop.index)
            instance = None if record is None else record.children.get(frame[depth])
        return instance

    def _above(self, instance: Instance, depth: int) -> Instance:
        """Return the instance around another one, at a depth."""
        while len(instance.frame) > depth + 1:
            assert instance.parent is not None  # noqa: S101 - only a root has none
            instance = instance.parent
        return instance

    def _held(self, instance: Instance, place: PlaceCode) -> Any:
        """Return the token of a place of this location."""
        assert place.scope is not None  # noqa: S101 - what is held has a slot
        return self._above(instance, len(place.scope.path)).slots[place.slot]

    def _outcome(self, found: ContainedLocation, instance: Instance, call: ContainedCallCode) -> Any:
        """Return what has become of a call; ABSENT if that is not known."""
        settled = None if instance.settled is None else instance.settled.get(found.number)
        if settled is not None and call.spec.output in settled:
            return settled[call.spec.output]
        place = self.program.places.get(call.spec.output)
        if place is not None and place.local:
            return self._held(instance, place)
        ended = None if call.spec.ended is None else self.program.places.get(call.spec.ended)
        if ended is not None and ended.local and not call.local and self._held(instance, ended) is not ABSENT:
            return _UNKNOWN
        return ABSENT

    def _shares_stream(self, found: ContainedLocation, instance: Instance) -> bool:
        """Return whether a stream goes from here to a location, or from there: it cannot go on without its reader."""
        scope = scope_of(instance)
        places = [*found.inputs.get(scope, ()), *(call.spec.output for call in found.calls.get(scope, ()))]
        held = [self.program.places[index] for index in places if index in self.program.places]
        return any(place.local and isinstance(self._held(instance, place), StreamValue) for place in held)

    def _inputs(self, found: ContainedLocation, instance: Instance, call: ContainedCallCode) -> list[Any] | None:
        """Return the inputs of a call; None if it cannot have begun."""
        values: list[Any] = []
        for given in call.spec.inputs:
            made = found.made.get(given.place)
            if given.place in found.params:
                value = _UNKNOWN
            elif made is None:
                value = self._held(instance, self.program.places[given.place])
            else:
                owner = self._above(instance, made.depth)
                value = self._outcome(found, owner, made)
                if value is ABSENT and (owner, made) in self._again:
                    value = _UNKNOWN
            if value is ABSENT:
                return None
            values.append(_UNKNOWN if given.role == "after" else value)
        return values

    def _is_needed(self, found: ContainedLocation, instance: Instance, call: ContainedCallCode) -> bool:
        """Return whether a call of the location may still read the output of another one."""
        readers = found.readers.get(call.spec.output, ())
        return any(self._reads(found, instance, reader, call.depth) for reader in readers)

    def _reads(self, found: ContainedLocation, instance: Instance, reader: ContainedCallCode, depth: int) -> bool:
        if reader.depth == depth:
            return self._outcome(found, instance, reader) is ABSENT
        loop = self.program.scopes[reader.spec.scope].path[depth]
        return instance.over is None or loop.index not in instance.over

    # decisions

    def _check(
        self, found: ContainedLocation, instance: Instance, call: ContainedCallCode, error: ErrorRecord | None
    ) -> None:
        """Decide about a call of a location that is absent; ``error``: why it has just been lost."""
        if self._outcome(found, instance, call) is not ABSENT:
            return
        values = self._inputs(found, instance, call)
        if values is None:
            return
        if any(value is RELEASED for value in values):
            self._effects.append(fx.NotContained(found.number))
            return
        failed = next((value for value in values if type(value) is Failed), None)
        stopped = SKIPPED if any(value is SKIPPED for value in values) else failed
        limit = call.spec.within
        if stopped is not None:
            self._decide(found, instance, call, stopped)
        elif error is not None and found.lost > max(self._reruns, call.spec.reruns):
            self._fail_call(found, instance, call, self._described(found, instance, call, error))
        else:
            if error is not None:
                self._again.add((instance, call))
            key = (instance.frame, call.spec.output)
            if limit is not None and key not in found.clocks:
                found.clocks.add(key)
                self._effects.append(fx.StartClock(found.number, *key, limit))

    def _described(
        self, found: ContainedLocation, instance: Instance, call: ContainedCallCode, error: ErrorRecord | Exception
    ) -> ErrorRecord:
        self._errors += 1
        name, what = f"{self._prefix}:{self._errors}", call.spec
        if isinstance(error, ErrorRecord):
            return msgspec.structs.replace(
                error, id=name, operation=what.operation, node=what.label, frame=instance.frame
            )
        return describe_error(error, name, found.site, what.operation, what.label, instance.frame, 1, b"")

    def _fail_call(
        self, found: ContainedLocation, instance: Instance, call: ContainedCallCode, error: ErrorRecord
    ) -> None:
        self._effects.append(fx.ReportError(error, True))
        self._decide(found, instance, call, Failed(error) if call.fallback is None else call.fallback(()))

    def _decide(self, found: ContainedLocation, instance: Instance, call: ContainedCallCode, outcome: Any) -> None:
        """Resolve a call in the place of its location; those of its readers there that it decides about, too."""
        if instance.settled is None:
            instance.settled = {}
        instance.settled.setdefault(found.number, {})[call.spec.output] = outcome
        for index, value in ((call.spec.output, outcome), (call.spec.ended, OPEN)):
            place = None if index is None else self.program.places.get(index)
            if place is not None:
                self._put(instance, place, value)
        for index in (call.spec.output, call.spec.ended):
            if index is not None:
                self._arrived(found, instance, index, call.depth)

    def _arrived(self, found: ContainedLocation, instance: Instance, index: int, depth: int) -> None:
        """Decide about the calls of an absent location that read a place which has just got a token."""
        for reader in found.readers.get(index, ()):
            for each in self._of_reader(instance, reader, depth):
                self._check(found, each, reader, None)

    def _of_reader(self, instance: Instance, reader: ContainedCallCode, depth: int) -> list[Instance]:
        """Return the instances of a call inside an instance."""
        found = [instance]
        for loop in self.program.scopes[reader.spec.scope].path[depth:]:
            records = [each.loops[loop.index] for each in found if loop.index in each.loops]
            found = [child for record in records for child in record.children.values()]
        return found

    # what happens while a location is absent

    def _send(self, index: int, frame: Frame, value: Any, routes: tuple[int, ...]) -> None:
        there = tuple(at for at in routes if at not in self._absent) if self._absent else routes
        if len(there) < len(routes) and isinstance(value, StreamValue):
            self._effects.extend(fx.NotContained(at) for at in routes if at in self._absent)
        if there:
            super()._send(index, frame, value, there)

    def _send_loop_end(self, loop: spec.Loop, frame: Frame, total: int, outcome: Any, away: tuple[int, ...]) -> None:
        away = tuple(at for at in away if at not in self._absent)
        if away:
            super()._send_loop_end(loop, frame, total, outcome, away)

    def _produce(self, instance: Instance, index: int, value: Any) -> None:
        super()._produce(instance, index, value)
        for found in list(self._absent.values()):
            self._arrived(found, instance, index, len(instance.frame) - 1)

    def _admit(self, control: Control, value: Any) -> None:
        index = control.next_index
        for at in self._contained:
            if at in control.loop.members:
                control.owed.setdefault(at, set()).add(index)
        super()._admit(control, value)
        child = control.record.children.get(index)
        if child is not None:
            for found in list(self._absent.values()):
                for place in (control.loop.element, control.loop.enter):
                    if place is not None:
                        self._arrived(found, child, place, len(child.frame) - 1)

    def _owes(self, control: Control, index: int, source: int) -> bool:
        if source not in self._contained:
            return True
        owed = control.owed.get(source, set())
        if index not in owed:
            return False
        owed.discard(index)
        return True

    def _element_done_here(self, control: Control, index: int) -> None:
        if control.owed:
            control.done_here.add(index)
        super()._element_done_here(control, index)
        for at in list(self._absent):
            if self._owes(control, index, at):
                self._element_done(control, index)

    def _element_done(self, control: Control, index: int) -> None:
        if control.in_flight[index] == 1:
            control.done_here.discard(index)
        super()._element_done(control, index)

    def _loop_done(self, record: LoopRecord) -> None:
        owner = record.owner
        if owner.over is None:
            owner.over = set()
        owner.over.add(record.loop.index)
        super()._loop_done(record)

    # when it is back

    def _is_idle(self, found: ContainedLocation, instance: Instance) -> bool:
        """Return whether a location has nothing left to do in an instance."""
        scope = scope_of(instance)
        if not (instance.over or set()).issuperset(found.loops.get(scope, ())):
            return False
        return all(self._outcome(found, instance, call) is not ABSENT for call in found.calls.get(scope, ()))

    def _restore(
        self, found: ContainedLocation, instance: Instance, restore: fx.RestoreLocation, idle: list[tuple[Control, int]]
    ) -> None:
        scope, frame, to = scope_of(instance), instance.frame, (found.number,)
        depth, over = len(frame) - 1, instance.over or set()
        calls = found.calls.get(scope, ())
        resolved = [call for call in calls if self._outcome(found, instance, call) is not ABSENT]
        finished: list[tuple[int, int]] = []
        restore.instances.append((frame, scope, [call.spec.output for call in resolved], finished))
        for call in resolved:
            if call.local and self._is_needed(found, instance, call):
                self._effects.append(fx.SendToken(call.spec.output, frame, self._outcome(found, instance, call), to))
            if call.spec.ended in found.readers:
                self._effects.append(fx.SendToken(call.spec.ended, frame, OPEN, to))
        for index in found.inputs.get(scope, ()):
            value, readers = self._held(instance, self.program.places[index]), found.readers[index]
            if value is ABSENT:
                continue
            if any(self._reads(found, instance, reader, depth) for reader in readers):
                self._effects.append(fx.SendToken(index, frame, value, to))
            elif all(reader.depth > depth for reader in readers):  # the location waits for it all the same
                self._effects.append(fx.SendToken(index, frame, OPEN, to))
        for loop in found.loops.get(scope, ()):
            if loop in over:
                self._effects.append(fx.SendLoopEnd(loop, frame, 0, None, to))
        finished += [
            self._restore_loop(found, record, record.control, restore, idle)
            for record in self._records(found, instance)
            if record.control is not None and record.loop.index not in over
        ]

    def _restore_loop(
        self,
        found: ContainedLocation,
        record: LoopRecord,
        control: Control,
        restore: fx.RestoreLocation,
        idle: list[tuple[Control, int]],
    ) -> tuple[int, int]:
        owed, frame, loop = control.owed.get(found.number, set()), record.owner.frame, record.loop.index
        for index in sorted(owed & record.children.keys()):
            if self._is_idle(found, record.children[index]):
                owed.discard(index)
                idle.append((control, index))
        if control.exhausted:
            self._effects.append(fx.SendLoopEnd(loop, frame, control.next_index, record.outcome, (found.number,)))
        for index in sorted(owed & record.children.keys()):
            self._restore(found, record.children[index], restore, idle)
        return loop, control.next_index - len(owed)


def _without(effect: fx.Effect, at: int) -> fx.Effect | None:
    """Return an effect without what it sends to a location."""
    if isinstance(effect, (fx.SendToken, fx.SendLoopEnd)) and at in effect.routes:
        routes = tuple(route for route in effect.routes if route != at)
        return msgspec.structs.replace(effect, routes=routes) if routes else None
    return effect


class RestoredGame(Game):
    """The game of a location that takes the place of one that was lost."""

    def __init__(self, program: CompiledNet, site: str, prefix: str) -> None:
        super().__init__(program, site, prefix)
        self._done: set[int] = set()
        self._makes: dict[int, TransitionCode] = {
            output: transition
            for scope in program.scopes.values()
            for transition in scope.transitions
            for output in transition.outputs
        }

    def restore(
        self, done: Iterable[int], instances: Sequence[tuple[Frame, int, list[int], list[tuple[int, int]]]]
    ) -> None:
        """Begin where the lost one has ended: see :class:`~dfm_async.net.effects.RestoreLocation`."""
        for index in done:
            self._done.add(index)
            self._effects.append(fx.FrameDone(index))
        found = [(self._instance(self.program.scopes[scope], frame), out, n) for frame, scope, out, n in instances]
        for instance, _, finished in found:
            for loop, count in finished:
                self._record(instance, self.program.loops[loop]).finished = count
        for instance, outputs, _ in found:
            for output in outputs:
                instance.missing[self._makes[output].index] = _NEVER
                self._resolve(instance)

    def open(self, index: int, params: Sequence[Any]) -> None:
        """Open a parameter set, unless there is nothing to do for it."""
        if index not in self._done:
            super().open(index, params)
