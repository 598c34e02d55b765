"""From statements to nets: one per location."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dfm_async.net import spec
from dfm_async.pipeline.expressions import (
    Advise,
    Attribute,
    Combination,
    Comparison,
    Constant,
    Entries,
    Expression,
    Items,
    Negation,
    Parameter,
    Ref,
)
from dfm_async.pipeline.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    Statement,
    YieldStatement,
)
from dfm_async.planner.ordering import followed_calls
from dfm_async.planner.placement import Placement
from dfm_async.planner.structure import Spot, Structure, outer_nodes

__all__ = ["LOOP_WINDOW", "build_nets"]

LOOP_WINDOW: Final = 256
"""How many elements of a loop are under way at the same time, unless ``concurrency`` says otherwise."""


@dataclass(slots=True)
class _Place:
    scope: int
    label: str
    source: str | None
    """The location that fills it; None for parameters, which come from the application to every reader."""
    gate: int | None
    readers: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Loop:
    index: int
    label: str
    scope: int
    control: str
    limit: int
    element: int
    enter: int
    gate: int | None
    collects: dict[str, list[int]] = field(default_factory=dict)


class _Inputs:
    """Collects the inputs of one transition while its formulas are translated."""

    __slots__ = ("builder", "data", "location", "order")

    def __init__(self, builder: _NetBuilder, location: str) -> None:
        self.builder = builder
        self.location = location
        self.order: dict[int, str] = {}
        self.data: dict[int, int] = {}

    def use(self, place: int, role: str = "data") -> int:
        """Adds an input, once per place; a stronger role replaces a weaker one."""
        if place not in self.order:
            self.data[place] = len(self.order)
            self.order[place] = role
            self.builder.places[place].readers[self.location] = None
        elif self.order[place] == "after" and role != "after":
            self.order[place] = role
        return self.data[place]


class _NetBuilder:
    def __init__(self, found: Structure, placed: Mapping[int, Placement], streams: Callable[[str], bool]) -> None:
        self.found = found
        self.placed = placed
        self.followed = followed_calls(found, streams)
        self.places: list[_Place] = []
        self.values: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.params: dict[str, int] = {}
        self.loops: dict[int, _Loop] = {}
        self.points: list[spec.YieldPoint] = []
        self.transitions: dict[str, list[spec.Transition]] = {}
        self.literals: dict[str, list[Any]] = {}
        self.scopes_at: dict[str, set[int]] = {}

    # places

    def _place(self, scope: int, label: str, source: str | None, gate: int | None) -> int:
        self.places.append(_Place(scope, label, source, gate))
        return len(self.places) - 1

    def _param(self, name: str) -> int:
        if name not in self.params:
            self.params[name] = self._place(0, f"param {name}", None, None)
        return self.params[name]

    def _reference(self, ref: Ref, spot: Spot, inside: bool) -> int:
        target = self.found.spots[ref.node].statement
        if isinstance(target, (ForEachStatement, RepeatStatement)):
            around = any(block[0] == ref.node for block in spot.path) or (inside and target is spot.statement)
            if around:
                return self.loops[ref.node].element
        return self.values[ref.node]

    # formulas

    def _formula(self, found: Expression, inputs: _Inputs, spot: Spot, inside: bool = False) -> spec.Formula:
        match found:
            case Constant():
                literals = self.literals.setdefault(inputs.location, [])
                literals.append(found.value)
                return spec.Const(len(literals) - 1)
            case Advise():
                raise AssertionError("a pipeline that asks for advice is not executed: prepare refuses it")
            case Ref() | Parameter():
                place = self._reference(found, spot, inside) if isinstance(found, Ref) else self._param(found.name)
                slot = spec.Slot(inputs.use(place))
                if not found.path:
                    return slot
                path = tuple((True, s.name) if isinstance(s, Attribute) else (False, s.key) for s in found.path)
                return spec.Field(slot, path)
            case Items():
                return spec.Build(found.type, tuple(self._formula(i, inputs, spot, inside) for i in found.items))
            case Entries():
                entries = (
                    (self._formula(k, inputs, spot, inside), self._formula(v, inputs, spot, inside))
                    for k, v in found.entries
                )
                return spec.MakeDict(tuple(entries))
            case Comparison():
                left = self._formula(found.left, inputs, spot, inside)
                return spec.Compare(found.op, left, self._formula(found.right, inputs, spot, inside))
            case Combination():
                return spec.Combine(found.op, tuple(self._formula(t, inputs, spot, inside) for t in found.terms))
            case Negation():
                return spec.Not(self._formula(found.term, inputs, spot, inside))

    # transitions

    def _add(self, label: str, scope: int, inputs: _Inputs, action: spec.Action, gate: int | None) -> None:
        if gate is not None and not any(
            self.places[place].gate == gate and role == "data" for place, role in inputs.order.items()
        ):
            # Not needed where an input stands behind the same gate: it is skipped along with it.
            inputs.use(gate, "gate")
        if scope and not any(self.places[place].scope == scope for place in inputs.order):
            # Nothing of this element triggers it: let its entry do so.
            inputs.use(self.loops[self.found.loops[scope - 1]].enter, "gate")
        given = tuple(spec.Input(place, role) for place, role in inputs.order.items())  # type: ignore[arg-type]
        transition = spec.Transition(label, scope, given, action)
        self.transitions.setdefault(inputs.location, []).append(transition)
        scopes = self.scopes_at.setdefault(inputs.location, set())
        while scope not in scopes:
            scopes.add(scope)
            scope = self.found.parents[scope]
            if scope < 0:
                break

    def statements(self, body: tuple[Statement, ...], gate: int | None) -> None:
        """Translates the statements of a block, all behind the same gate."""
        for statement in body:
            spot = self.found.spots[statement.id]
            location = self.placed[statement.id].location
            inputs = _Inputs(self, location)
            match statement:
                case CallStatement():
                    self._call(statement, spot, inputs, gate)
                case YieldStatement():
                    self._yield(statement, spot, inputs, gate)
                case ForEachStatement():
                    loop = self._loop(statement.id, spot, location, statement.concurrency or LOOP_WINDOW, gate)
                    seq = self._formula(statement.seq, inputs, spot)
                    self._add(spot.label, spot.scope, inputs, spec.Iterate(loop.index, seq), gate)
                    self.statements(statement.body, None)
                case RepeatStatement():
                    self._repeat(statement, spot, inputs, gate)
                case IfStatement():
                    then = self._place(spot.scope, f"{spot.label} then", location, gate)
                    otherwise = self._place(spot.scope, f"{spot.label} otherwise", location, gate)
                    cond = self._formula(statement.cond, inputs, spot)
                    self._add(spot.label, spot.scope, inputs, spec.Branch(cond, then, otherwise), gate)
                    self.statements(statement.body, then)
                    self.statements(statement.otherwise, otherwise)
                case CacheStatement():
                    self._cache(statement, spot, inputs, gate)
                case CollectStatement():
                    self._collect(statement, spot, inputs)

    def _after(self, nodes: tuple[int, ...], inputs: _Inputs, spot: Spot) -> None:
        for node in nodes:
            value = self._reference(Ref(node=node), spot, False)
            if value not in inputs.order:  # what needs the value, or the elements of a stream, waits for those
                inputs.use(self.ends.get(node, value), "after")

    def _call(self, statement: CallStatement, spot: Spot, inputs: _Inputs, gate: int | None) -> None:
        args = {
            name: self._formula(self._converted(statement.id, name, value), inputs, spot)
            for name, value in statement.args.items()
        }
        self._after(statement.after, inputs, spot)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, gate)
        ended = None
        if statement.id in self.followed:
            ended = self.ends[statement.id] = self._place(spot.scope, f"{spot.label} ended", inputs.location, gate)
        action = spec.Call(
            statement.operation,
            self.placed[statement.id].provider,
            args,
            output,
            retry=statement.retry,
            deadline=statement.deadline,
            ended=ended,
            runs_ahead=self.followed.get(statement.id, False),
        )
        self._add(spot.label, spot.scope, inputs, action, gate)

    def _converted(self, statement: int, name: str, given: Expression) -> Expression:
        """The argument of a call; a constant as the declared type has it, as it is with parameters."""
        converted = self.found.converted
        return Constant(value=converted[statement, name]) if (statement, name) in converted else given

    def _yield(self, statement: YieldStatement, spot: Spot, inputs: _Inputs, gate: int | None) -> None:
        value = self._formula(statement.value, inputs, spot)
        self._after(statement.after, inputs, spot)
        node = statement.value
        label = self.found.spots[node.node].label if isinstance(node, Ref) else spot.label
        self.points.append(spec.YieldPoint(statement.place, label))
        self._add(spot.label, spot.scope, inputs, spec.Emit(len(self.points) - 1, value), gate)

    def _loop(self, statement_id: int, spot: Spot, control: str, limit: int, gate: int | None) -> _Loop:
        scope = self.found.scope_of_loop(statement_id)
        element = self._place(scope, f"{spot.label} element", control, None)
        enter = self._place(scope, f"{spot.label} enter", control, None)
        loop = self.loops[statement_id] = _Loop(scope - 1, spot.label, scope, control, limit, element, enter, gate)
        return loop

    def _repeat(self, statement: RepeatStatement, spot: Spot, inputs: _Inputs, gate: int | None) -> None:
        loop = self._loop(statement.id, spot, inputs.location, 1, gate)
        carry = self._formula(statement.carry, inputs, spot)
        times = None if statement.times is None else self._formula(statement.times, inputs, spot)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, gate)
        self._add(spot.label, spot.scope, inputs, spec.Repeat(loop.index, carry, times, output), gate)
        self.statements(statement.body, None)
        step = _Inputs(self, inputs.location)
        assert statement.next is not None  # noqa: S101 - checked by the structure
        following = self._formula(statement.next, step, spot, inside=True)
        until = None if statement.until is None else self._formula(statement.until, step, spot, inside=True)
        self._add(spot.label, loop.scope, step, spec.Step(loop.index, following, until), None)

    def _cache(self, statement: CacheStatement, spot: Spot, inputs: _Inputs, gate: int | None) -> None:
        location = inputs.location
        found = self._place(spot.scope, f"{spot.label} found", location, gate)
        miss = self._place(spot.scope, f"{spot.label} miss", location, gate)
        key = self._formula(statement.key, inputs, spot)
        # It asks only when everything is there that the body needs from outside: whoever has the right to compute a
        # value then depends on nobody who waits for such a right. Streams it reads need only have begun.
        for node, read in outer_nodes(statement).items():
            if read:
                inputs.use(self._reference(Ref(node=node), spot, False), "after")
        self._after(tuple(node for node, read in outer_nodes(statement).items() if not read), inputs, spot)
        nested = any(isinstance(self.found.spots[outer].statement, CacheStatement) for outer, _ in spot.path)
        self._add(spot.label, spot.scope, inputs, spec.Lookup(key, found, miss, nested), gate)
        self.statements(statement.body, miss)
        join = _Inputs(self, location)
        join.use(found)
        assert statement.store is not None  # noqa: S101 - checked by the structure
        value = self._formula(statement.store, join, spot, inside=True)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, location, gate)
        # Not behind the gate: a lookup that was skipped tells so itself.
        self._add(spot.label, spot.scope, join, spec.Store(value, output), None)

    def _collect(self, statement: CollectStatement, spot: Spot, inputs: _Inputs) -> None:
        target = self.found.spots[statement.node]
        scope = target.scope
        if isinstance(target.statement, ForEachStatement):
            scope = self.found.scope_of_loop(statement.node)
        loop = self.loops[self.found.loops[scope - 1]]
        # Made when the loop ends, so it stands behind the loop's gate, not behind that of the collect.
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, loop.gate)
        collects = loop.collects.setdefault(inputs.location, [])
        collects.append(output)
        place = loop.element if isinstance(target.statement, ForEachStatement) else self.values[statement.node]
        value = spec.Slot(inputs.use(place))
        self._add(spot.label, scope, inputs, spec.Gather(loop.index, len(collects) - 1, value), None)


def build_nets(
    body: tuple[Statement, ...],
    found: Structure,
    placed: Mapping[int, Placement],
    streams: Callable[[str], bool],
) -> tuple[tuple[str, ...], tuple[spec.Net, ...], tuple[str, ...]]:
    """Makes the nets of a checked and placed pipeline: locations, nets, and the names of its parameters.

    ``streams`` tells whether an operation may return a stream.
    """
    builder = _NetBuilder(found, placed, streams)
    builder.statements(body, None)
    locations = tuple(builder.transitions)
    number = {location: index for index, location in enumerate(locations)}
    members = {
        loop.scope: tuple(number[place] for place in locations if loop.scope in builder.scopes_at[place])
        for loop in builder.loops.values()
    }
    nets = tuple(_net(builder, location, number, members) for location in locations)
    return locations, nets, tuple(builder.params)


def _net(
    builder: _NetBuilder, location: str, number: Mapping[str, int], members: Mapping[int, tuple[int, ...]]
) -> spec.Net:
    here = number[location]
    scopes = builder.scopes_at[location]
    parents = builder.found.parents
    places = []
    for index, place in enumerate(builder.places):
        routes: tuple[int, ...] = ()
        if place.source == location and len(place.readers) > (location in place.readers):
            routes = tuple(number[reader] for reader in place.readers if reader != location)
        if location in place.readers or routes:
            places.append(spec.Place(index, place.scope, place.label, routes))
    known = {place.index for place in places}
    loops = [
        spec.Loop(
            index=loop.index,
            label=loop.label,
            scope=loop.scope,
            control=number[loop.control],
            members=members[loop.scope],
            element=loop.element if loop.element in known else None,
            enter=loop.enter if loop.enter in known else None,
            limit=loop.limit,
            collects=tuple(loop.collects.get(location, ())),
        )
        for loop in builder.loops.values()
        if loop.control == location or here in members[loop.scope]
    ]
    return spec.Net(
        location=here,
        locations=tuple(number),
        scopes=tuple(
            spec.Scope(scope, None if scope == 0 else parents[scope], None if scope == 0 else scope - 1)
            for scope in sorted(scopes)
        ),
        places=tuple(places),
        loops=tuple(loops),
        transitions=tuple(builder.transitions[location]),
        params=tuple((name, place) for name, place in builder.params.items() if place in known),
        points=tuple(builder.points),
        literals=tuple(builder.literals.get(location, ())),
    )
