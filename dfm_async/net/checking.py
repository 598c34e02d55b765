"""Check a net that was received: whether a planner could have written it.

A site runs nets that it did not write. What this lets pass cannot confuse the game: every number names something that
exists, and everything is in a scope where it can be reached. Whatever else a net does affects only its own job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from dfm_async.net import spec
from dfm_async.net.compiled_net import check_step

_DEEPEST: Final = 200
"""The largest depth of nested formulas and loops; the planner allows less."""


def check_net(net: spec.Net) -> None:
    """Raise ValueError, with what is wrong, if the game cannot play a net."""
    _Check(net).run()


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"invalid net: {text}")


def _unique(numbers: Iterable[int], what: str) -> None:
    found = list(numbers)
    _require(len(set(found)) == len(found) and all(number >= 0 for number in found), f"{what} are not numbered")


class _Check:
    def __init__(self, net: spec.Net) -> None:
        self.net = net
        self.scopes = {scope.index: scope for scope in net.scopes}
        self.loops = {loop.index: loop for loop in net.loops}
        self.places = {place.index: place for place in net.places}
        actions = [transition.action for transition in net.transitions]
        self.driven = Counter(action.loop for action in actions if isinstance(action, (spec.Iterate, spec.Repeat)))
        self.stepped = Counter(action.loop for action in actions if isinstance(action, spec.Step))

    def run(self) -> None:
        net = self.net
        _unique((scope.index for scope in net.scopes), "its scopes")
        _unique((loop.index for loop in net.loops), "its loops")
        _unique((place.index for place in net.places), "its places")
        self._location(net.location, "its own location")
        self._check_scopes()
        for loop in net.loops:
            self._check_loop(loop)
        for place in net.places:
            self._check_routes(place.routes, f"place {place.index}")
            _require(net.location not in place.routes, f"place {place.index} is sent to itself")
        for transition in net.transitions:
            self._check_transition(transition)
        for contained in net.contains:
            self._check_contained(contained)
        for name, index in net.params:
            _require(index in self.places and self.places[index].scope == 0, f"parameter {name!r} has no place")

    def _location(self, index: int, what: str) -> None:
        _require(0 <= index < len(self.net.locations), f"{what} is not among its locations")

    def _check_routes(self, routes: Sequence[int], what: str) -> None:
        _require(len(set(routes)) == len(routes), f"{what} names a location twice")
        for route in routes:
            self._location(route, f"a location of {what}")

    def _check_scopes(self) -> None:
        depth: dict[int, int] = {}
        for scope in self.net.scopes:
            what = f"scope {scope.index}"
            if scope.parent is None:
                _require(scope.index == 0 and scope.loop is None, f"{what} has no parent")
                depth[scope.index] = 0
                continue
            _require(scope.index != 0 and scope.parent in depth, f"{what} is not after its parent")
            loop = None if scope.loop is None else self.loops.get(scope.loop)
            _require(loop is not None and loop.scope == scope.index, f"{what} is not that of its loop")
            depth[scope.index] = depth[scope.parent] + 1
            _require(depth[scope.index] <= _DEEPEST, "its loops are nested too deeply")
        _require(0 in depth, "it has no scope 0")

    def _check_loop(self, loop: spec.Loop) -> None:
        what = f"loop {loop.index}"
        self._location(loop.control, f"the control of {what}")
        self._check_routes(loop.members, what)
        _require(loop.limit > 0, f"the limit of {what} is not positive")
        if self.net.location in loop.members:
            _require(loop.scope in self.scopes and self.scopes[loop.scope].loop == loop.index, f"{what} has no scope")
        for index in (loop.element, loop.enter):
            if index is not None:
                _require(index in self.places and self.places[index].scope == loop.scope, f"{what} lacks a place")
        if loop.scope in self.scopes:
            for index in loop.collects:
                self._check_output(index, self.scopes[loop.scope].parent, what)
        else:
            _require(not loop.collects, f"{what} collects what it does not see")

    def _check_output(self, index: int, scope: int | None, what: str) -> None:
        place = self.places.get(index)  # one without readers here does not exist
        _require(place is None or place.scope == scope, f"{what} fills a place of another scope")

    def _above(self, scope: int) -> set[int]:
        """Return a scope, and all around it."""
        found = {scope}
        parent = self.scopes[scope].parent
        while parent is not None:
            found.add(parent)
            parent = self.scopes[parent].parent
        return found

    def _check_transition(self, found: spec.Transition) -> None:
        what = f"transition {found.label!r}"
        _require(found.scope in self.scopes, f"{what} is in no scope")
        above = self._above(found.scope)
        _unique((given.place for given in found.inputs), f"the inputs of {what}")
        for given in found.inputs:
            place = self.places.get(given.place)
            _require(place is not None and place.scope in above, f"{what} reads a place that it cannot see")
        _require(bool(found.inputs) or found.scope == 0, f"nothing triggers {what}")
        for index in spec.outputs_of(found.action):
            self._check_output(index, found.scope, what)
        self._check_action(found, what)
        for formula in spec.formulas_of(found.action).values():
            self._check_formula(formula, len(found.inputs), what)
        if isinstance(found.action, (spec.Call, spec.Await)) and found.action.fallback is not None:
            _require(isinstance(found.action.fallback, spec.NetLiteral), f"the fallback of {what} is not a constant")
            self._check_formula(found.action.fallback, 0, what)

    def _check_contained(self, found: spec.Contained) -> None:
        what = f"the description of location {found.location}"
        self._location(found.location, what)
        _require(found.location != self.net.location, f"{what} is that of its own location")
        for index in found.loops:
            loop = self.loops.get(index)
            ours = loop is not None and loop.control == self.net.location and found.location in loop.members
            _require(ours and loop is not None and loop.scope in self.scopes, f"{what} names a loop of others")
        made: dict[int, int] = {}
        for call in found.calls:
            _require(call.scope in self.scopes, f"{what} names a scope that does not exist")
            above = self._above(call.scope)
            for given in call.inputs:
                if given.place not in found.params:
                    place = self.places.get(given.place)
                    scope = made.get(given.place, None if place is None else place.scope)
                    _require(scope in above, f"{what} names an input that is not there")
            for output in (call.output, call.ended):
                if output is not None:
                    self._check_output(output, call.scope, what)
                    made[output] = call.scope
            if call.fallback is not None:
                _require(isinstance(call.fallback, spec.NetLiteral), f"{what} has a fallback that is not a constant")
                self._check_formula(call.fallback, 0, what)

    def _check_action(self, found: spec.Transition, what: str) -> None:
        action, scope = found.action, self.scopes[found.scope]
        match action:
            case spec.Emit():
                _require(0 <= action.point < len(self.net.points), f"{what} yields to no place")
            case spec.Iterate() | spec.Repeat():
                loop = self.loops.get(action.loop)
                _require(loop is not None and loop.control == self.net.location, f"{what} drives a loop of others")
                assert loop is not None  # noqa: S101 - just checked
                inner = self.scopes.get(loop.scope)
                _require(inner is None or inner.parent == found.scope, f"{what} is in another scope than its loop")
                _require(self.driven[loop.index] == 1, f"{what} is not the only one that drives its loop")
                steps = 1 if isinstance(action, spec.Repeat) else 0
                _require(self.stepped[loop.index] == steps, f"the loop of {what} has not {steps} steps")
            case spec.Step():
                _require(scope.loop == action.loop, f"{what} is outside its loop")
                _require(self.loops[action.loop].control == self.net.location, f"{what} steps in a loop of others")
            case spec.Gather():
                _require(scope.loop == action.loop, f"{what} is outside its loop")
                known = 0 <= action.collect < len(self.loops[action.loop].collects)
                _require(known, f"{what} gathers for a collect that does not exist")
            case spec.Quorum():
                _require(len(action.sites) <= len(found.inputs), f"{what} has more sites than inputs")
            case spec.Await():
                _require(action.event is not None or action.seconds is not None, f"{what} waits for nothing")
            case spec.Store():
                _require(bool(found.inputs), f"{what} has no lookup")

    def _check_formula(self, formula: spec.Formula, inputs: int, what: str) -> None:
        level: list[spec.Formula] = [formula]
        for _ in range(_DEEPEST):
            if not level:
                return
            level = [part for found in level for part in self._parts(found, inputs, what)]
        _require(not level, f"a formula of {what} is nested too deeply")

    def _parts(self, formula: spec.Formula, inputs: int, what: str) -> Iterable[spec.Formula]:
        match formula:
            case spec.NetLiteral(literal):
                _require(0 <= literal < len(self.net.literals), f"{what} uses a literal that is not there")
            case spec.Slot(index):
                _require(0 <= index < inputs, f"{what} uses an input that it has not")
            case spec.Field(base, path):
                for is_attribute, key in path:
                    check_step(is_attribute, key)
                return (base,)
            case spec.Build(_, items):
                return items
            case spec.MakeDict(entries):
                return [part for entry in entries for part in entry]
            case spec.Compare(_, left, right):
                return (left, right)
            case spec.Combine(_, terms):
                return terms
            case spec.Not(term):
                return (term,)
        return ()
