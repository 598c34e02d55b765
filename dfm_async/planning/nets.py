"""From statements to nets: one per location."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.model.ids import Location
from dfm_async.net import spec
from dfm_async.planning.handling import Handling
from dfm_async.planning.ordering import followed_calls
from dfm_async.planning.placement import Placement
from dfm_async.planning.structure import Spot, Structure, outer_nodes

LOOP_WINDOW: Final = 256
"""How many elements of a loop are in flight at the same time, unless ``concurrency`` is set."""


@dataclass(slots=True)
class _Place:
    scope: int
    label: str
    source: int | None
    """The location that fills it; None for parameters, which come from the application to every reader."""
    gate: int | None
    handled: bool = False
    readers: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Loop:
    index: int
    label: str
    scope: int
    control: int
    limit: int
    element: int
    enter: int
    gate: int | None
    collects: dict[int, list[int]] = field(default_factory=dict)


class _Inputs:
    """Collects the inputs of one transition while its formulas are translated."""

    __slots__ = ("builder", "location", "order", "slots")

    def __init__(self, builder: _NetBuilder, location: int) -> None:
        self.builder = builder
        self.location = location
        self.order: dict[int, str] = {}
        self.slots: dict[int, int] = {}

    def use(self, place: int, role: str = "data") -> int:
        """Add an input, once per place; a stronger role replaces a weaker one."""
        if place not in self.order:
            self.slots[place] = len(self.order)
            self.order[place] = role
            self.builder.places[place].readers[self.location] = None
        elif self.order[place] == "after" and role != "after":
            self.order[place] = role
        return self.slots[place]


class _At(NamedTuple):
    """Where a statement is translated: its spot, the inputs of its transition, and the gate of its block."""

    spot: Spot
    inputs: _Inputs
    gate: int | None


class _NetBuilder(st.StatementVisitor[_At, None]):
    """Translates statements. Locations are numbered in the order of their first statements."""

    def __init__(self, found: Structure, placed: Mapping[int, Placement], streams: Callable[[str], bool]) -> None:
        self.found = found
        self.placed = placed
        self.followed = followed_calls(found, streams)
        self.handling = Handling(found)
        self.places: list[_Place] = []
        self.values: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.branches: dict[int, tuple[int, int]] = {}
        """The two gates of each ``If``."""
        self.params: dict[str, int] = {}
        self.loops: dict[int, _Loop] = {}
        self.points: list[spec.YieldPoint] = []
        self.locations: dict[Location, int] = {}
        self.transitions: list[list[spec.Transition]] = []
        self.literals: list[list[Any]] = []
        self.scopes_at: list[set[int]] = []

    # places

    def _place(self, scope: int, label: str, source: int | None, gate: int | None) -> int:
        self.places.append(_Place(scope, label, source, gate))
        return len(self.places) - 1

    def _param(self, name: str) -> int:
        if name not in self.params:
            self.params[name] = self._place(0, f"param {name}", None, None)
        return self.params[name]

    def _reference(self, ref: ex.Ref, spot: Spot, inside: bool) -> int:
        inner = self.found.reads_iteration(spot, ref.node, inside)
        return self.loops[ref.node].element if inner else self.values[ref.node]

    # formulas

    def _formula(self, found: ex.Expression, inputs: _Inputs, spot: Spot, inside: bool = False) -> spec.Formula:
        match found:
            case ex.Constant():
                literals = self.literals[inputs.location]
                literals.append(found.value)
                return spec.NetLiteral(len(literals) - 1)
            case ex.Advise():
                raise AssertionError("a pipeline that asks for advice is not executed: prepare refuses it")
            case ex.Ref() | ex.Parameter():
                place = self._reference(found, spot, inside) if isinstance(found, ex.Ref) else self._param(found.name)
                return _field(spec.Slot(inputs.use(place)), found.path)
            case ex.Items():
                return spec.Build(found.type, tuple(self._formula(i, inputs, spot, inside) for i in found.items))
            case ex.Entries():
                entries = (
                    (self._formula(k, inputs, spot, inside), self._formula(v, inputs, spot, inside))
                    for k, v in found.entries
                )
                return spec.MakeDict(tuple(entries))
            case ex.Comparison():
                left = self._formula(found.left, inputs, spot, inside)
                return spec.Compare(found.op, left, self._formula(found.right, inputs, spot, inside))
            case ex.Combination():
                return spec.Combine(found.op, tuple(self._formula(t, inputs, spot, inside) for t in found.terms))
            case ex.Negation():
                return spec.Not(self._formula(found.term, inputs, spot, inside))

    # transitions

    def _add(
        self, label: str, scope: int, inputs: _Inputs, action: spec.Action, gate: int | None, handled: bool = False
    ) -> None:
        if gate is not None and not any(
            self.places[place].gate == gate and role == "data" for place, role in inputs.order.items()
        ):
            # Not needed if an input has the same gate: the transition is skipped along with it.
            inputs.use(gate, "gate")
        if scope and not any(self.places[place].scope == scope for place in inputs.order):
            # Nothing of this element triggers it: let its entry do so.
            inputs.use(self.loops[self.found.loops[scope - 1]].enter, "gate")
        given = tuple(spec.Input(place, role) for place, role in inputs.order.items())  # type: ignore[arg-type]
        transition = spec.Transition(label, scope, given, action, handled)
        for place in spec.outputs_of(action):
            self.places[place].handled = handled
        self.transitions[inputs.location].append(transition)
        scopes = self.scopes_at[inputs.location]
        while scope not in scopes:
            scopes.add(scope)
            scope = self.found.parents[scope]
            if scope < 0:
                break

    def statements(self, body: tuple[st.Statement, ...], gate: int | None) -> None:
        """Translate the statements of a block, all with the same gate."""
        for statement in body:
            location = self.placed[statement.id].location
            number = self.locations.get(location)
            if number is None:
                number = self.locations[location] = len(self.locations)
                self.transitions.append([])
                self.literals.append([])
                self.scopes_at.append(set())
            self.visit(statement, _At(self.found.spots[statement.id], _Inputs(self, number), gate))

    def _after(self, nodes: tuple[int, ...], inputs: _Inputs, spot: Spot) -> None:
        for node in nodes:
            value = self._reference(ex.Ref(node=node), spot, False)
            if value not in inputs.order:  # what needs the value, or the elements of a stream, waits for those
                inputs.use(self.ends.get(node, value), "after")

    def visit_call(self, statement: st.CallStatement, context: _At) -> None:
        spot, inputs, gate = context
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
            operation=statement.operation,
            provider=self.placed[statement.id].provider,
            args=args,
            output=output,
            retry=statement.retry,
            deadline=statement.deadline,
            ended=ended,
            runs_ahead=self.followed.get(statement.id, False),
            fallback=self._fallback(statement, inputs, spot),
            within=self.found.gathered.get(statement.id),
        )
        self._add(spot.label, spot.scope, inputs, action, gate, self.handling.value(statement.id))

    def _fallback(
        self, statement: st.CallStatement | st.WaitStatement, inputs: _Inputs, spot: Spot
    ) -> spec.Formula | None:
        if statement.fallback is None:
            return None
        return self._formula(self._converted(statement.id, "fallback", statement.fallback), inputs, spot)

    def _converted(self, statement: int, name: str, given: ex.Expression) -> ex.Expression:
        """Return the argument of a call; a constant as the declared type has it, as it is with parameters."""
        converted = self.found.converted
        return ex.Constant(value=converted[statement, name]) if (statement, name) in converted else given

    def visit_yield(self, statement: st.YieldStatement, context: _At) -> None:
        spot, inputs, gate = context
        value = self._formula(statement.value, inputs, spot)
        self._after(statement.after, inputs, spot)
        node = statement.value
        label = self.found.spots[node.node].label if isinstance(node, ex.Ref) else spot.label
        self.points.append(spec.YieldPoint(statement.place, label))
        self._add(spot.label, spot.scope, inputs, spec.Emit(len(self.points) - 1, value), gate)

    def _loop(self, statement_id: int, spot: Spot, control: int, limit: int, gate: int | None) -> _Loop:
        scope = self.found.scope_of_loop(statement_id)
        element = self._place(scope, f"{spot.label} element", control, None)
        enter = self._place(scope, f"{spot.label} enter", control, None)
        loop = self.loops[statement_id] = _Loop(
            index=scope - 1,
            label=spot.label,
            scope=scope,
            control=control,
            limit=limit,
            element=element,
            enter=enter,
            gate=gate,
        )
        return loop

    def visit_for_each(self, statement: st.ForEachStatement, context: _At) -> None:
        spot, inputs, gate = context
        loop = self._loop(statement.id, spot, inputs.location, statement.concurrency or LOOP_WINDOW, gate)
        seq = self._formula(statement.seq, inputs, spot)
        self._add(
            spot.label, spot.scope, inputs, spec.Iterate(loop.index, seq), gate, self.handling.block(statement.id)
        )
        self.statements(statement.body, None)

    def visit_repeat(self, statement: st.RepeatStatement, context: _At) -> None:
        spot, inputs, gate = context
        loop = self._loop(statement.id, spot, inputs.location, 1, gate)
        carry = self._formula(statement.carry, inputs, spot)
        times = None if statement.times is None else self._formula(statement.times, inputs, spot)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, gate)
        action = spec.Repeat(loop.index, carry, times, output)
        self._add(spot.label, spot.scope, inputs, action, gate, self.handling.block(statement.id))
        self.statements(statement.body, None)
        step = _Inputs(self, inputs.location)
        assert statement.next is not None  # noqa: S101 - checked by the structure
        following = self._formula(statement.next, step, spot, inside=True)
        until = None if statement.until is None else self._formula(statement.until, step, spot, inside=True)
        handled = self.handling.value(statement.id)
        self._add(spot.label, loop.scope, step, spec.Step(loop.index, following, until), None, handled)

    def visit_if(self, statement: st.IfStatement, context: _At) -> None:
        spot, inputs, gate = context
        then = self._place(spot.scope, f"{spot.label} then", inputs.location, gate)
        otherwise = self._place(spot.scope, f"{spot.label} otherwise", inputs.location, gate)
        cond = self._formula(statement.cond, inputs, spot)
        self.branches[statement.id] = (then, otherwise)
        action = spec.Branch(cond, then, otherwise)
        self._add(spot.label, spot.scope, inputs, action, gate, self.handling.block(statement.id))
        self.statements(statement.body, then)
        self.statements(statement.otherwise, otherwise)

    def visit_try_from_cache(self, statement: st.CacheStatement, context: _At) -> None:
        spot, inputs, gate = context
        location = inputs.location
        found = self._place(spot.scope, f"{spot.label} found", location, gate)
        miss = self._place(spot.scope, f"{spot.label} miss", location, gate)
        key = self._formula(statement.key, inputs, spot)
        # It asks only when everything has arrived that the body needs from outside: then the block that may compute a
        # value depends on no block that waits for that value. Streams that it reads need only have begun.
        for node, read in outer_nodes(statement).items():
            if read:
                inputs.use(self._reference(ex.Ref(node=node), spot, False), "after")
        self._after(tuple(node for node, read in outer_nodes(statement).items() if not read), inputs, spot)
        nested = any(isinstance(self.found.spots[outer].statement, st.CacheStatement) for outer, _ in spot.path)
        handled = self.handling.block(statement.id)
        self._add(spot.label, spot.scope, inputs, spec.Lookup(key, found, miss, nested), gate, handled)
        self.statements(statement.body, miss)
        join = _Inputs(self, location)
        join.use(found)
        assert statement.store is not None  # noqa: S101 - checked by the structure
        value = self._formula(statement.store, join, spot, inside=True)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, location, gate)
        # Without the gate: a lookup that was skipped skips this, too.
        handled = self.handling.value(statement.id)
        self._add(spot.label, spot.scope, join, spec.Store(value, output), None, handled)

    def visit_collect(self, statement: st.CollectStatement, context: _At) -> None:
        spot, inputs, _ = context
        scope = self.found.scope_of_value(statement.node)
        loop = self.loops[self.found.loops[scope - 1]]
        # Made when the loop ends, so it has the loop's gate, not that of the collect.
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, loop.gate)
        collects = loop.collects.setdefault(inputs.location, [])
        collects.append(output)
        element = isinstance(self.found.spots[statement.node].statement, st.ForEachStatement)
        place = loop.element if element else self.values[statement.node]
        value = _field(spec.Slot(inputs.use(place)), statement.path)
        action = spec.Gather(loop.index, len(collects) - 1, value, statement.errors)
        handled = statement.errors != "fail" or self.handling.value(statement.id)
        self._add(spot.label, scope, inputs, action, None, handled)

    def visit_choice(self, statement: st.ChoiceStatement, context: _At) -> None:
        spot, inputs, gate = context
        handled = self.handling.value(statement.id)
        for branch, part in zip(self.branches[statement.branch], (statement.value, statement.otherwise), strict=True):
            made = _Inputs(self, inputs.location)
            value = self._formula(part, made, spot)
            output = self._place(spot.scope, spot.label, inputs.location, branch)
            self._add(spot.label, spot.scope, made, spec.Make(value, output), branch, handled)
            inputs.use(output)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, gate)
        # Without the gate: one that is skipped skips both branches.
        self._add(spot.label, spot.scope, inputs, spec.Choose(output), None, handled)

    def visit_gather(self, statement: st.GatherStatement, context: _At) -> None:
        spot, inputs, gate = context
        for node in statement.calls:
            inputs.use(self.values[node])
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, gate)
        sites = tuple(self.placed[node].location.site for node in statement.calls)
        action = spec.Quorum(sites, statement.at_least, output)
        self._add(spot.label, spot.scope, inputs, action, gate, self.handling.value(statement.id))

    def visit_wait(self, statement: st.WaitStatement, context: _At) -> None:
        fallback = self._fallback(statement, context.inputs, context.spot)
        self._wait(statement, statement.event, statement.timeout, fallback, context)

    def visit_sleep(self, statement: st.SleepStatement, context: _At) -> None:
        self._wait(statement, None, statement.seconds, None, context)

    def _wait(
        self,
        statement: st.WaitStatement | st.SleepStatement,
        event: str | None,
        limit: ex.Expression | None,
        fallback: spec.Formula | None,
        context: _At,
    ) -> None:
        spot, inputs, gate = context
        seconds = None if limit is None else self._formula(limit, inputs, spot)
        self._after(statement.after, inputs, spot)
        output = self.values[statement.id] = self._place(spot.scope, spot.label, inputs.location, gate)
        action = spec.Await(event=event, output=output, seconds=seconds, fallback=fallback)
        self._add(spot.label, spot.scope, inputs, action, gate, self.handling.value(statement.id))


def _field(value: spec.Formula, path: tuple[ex.Step, ...]) -> spec.Formula:
    steps = tuple((True, s.name) if isinstance(s, ex.Attribute) else (False, s.key) for s in path)
    return spec.Field(value, steps) if steps else value


def build_nets(
    body: tuple[st.Statement, ...],
    found: Structure,
    placed: Mapping[int, Placement],
    streams: Callable[[str], bool],
) -> tuple[tuple[Location, ...], tuple[spec.Net, ...], tuple[str, ...]]:
    """Make the nets of a checked and placed pipeline: locations, nets, and the names of its parameters.

    ``streams`` returns whether an operation may return a stream.
    """
    builder = _NetBuilder(found, placed, streams)
    builder.statements(body, None)
    locations = tuple(builder.locations)
    members = {
        loop.scope: tuple(at for at, scopes in enumerate(builder.scopes_at) if loop.scope in scopes)
        for loop in builder.loops.values()
    }
    nets = tuple(_net(builder, locations, here, members) for here in range(len(locations)))
    return locations, nets, tuple(builder.params)


def _net(
    builder: _NetBuilder, locations: tuple[Location, ...], here: int, members: Mapping[int, tuple[int, ...]]
) -> spec.Net:
    parents = builder.found.parents
    places = []
    for index, place in enumerate(builder.places):
        routes: tuple[int, ...] = ()
        if place.source == here and len(place.readers) > (here in place.readers):
            routes = tuple(reader for reader in place.readers if reader != here)
        if routes or here in place.readers:
            places.append(spec.Place(index, place.scope, place.label, routes, place.handled))
    known = {place.index for place in places}
    loops = [
        spec.Loop(
            index=loop.index,
            label=loop.label,
            scope=loop.scope,
            control=loop.control,
            members=members[loop.scope],
            element=loop.element if loop.element in known else None,
            enter=loop.enter if loop.enter in known else None,
            limit=loop.limit,
            collects=tuple(loop.collects.get(here, ())),
        )
        for loop in builder.loops.values()
        if loop.control == here or here in members[loop.scope]
    ]
    return spec.Net(
        location=here,
        locations=locations,
        scopes=tuple(
            spec.Scope(scope, None if scope == 0 else parents[scope], None if scope == 0 else scope - 1)
            for scope in sorted(builder.scopes_at[here])
        ),
        places=tuple(places),
        loops=tuple(loops),
        transitions=tuple(builder.transitions[here]),
        params=tuple((name, place) for name, place in builder.params.items() if place in known),
        points=tuple(builder.points),
        literals=tuple(builder.literals[here]),
    )
