"""A net made ready to run: formulas become closures, places become slots. Shared by all jobs of a plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from dfm_async.model.constants import copier
from dfm_async.net import spec
from dfm_async.net.steps import check_step, fetch
from dfm_async.net.tokens import StreamValue

__all__ = ["Evaluate", "PlaceCode", "Program", "ScopeCode", "TransitionCode", "compile_formula"]

Evaluate = Callable[[Sequence[Any]], Any]

_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TYPES: Final[dict[str, Callable[[Any], Any]]] = {"list": list, "tuple": tuple, "set": set}


def compile_formula(formula: spec.Formula, literals: Sequence[Any]) -> Evaluate:
    """Makes a function of a transition's input values."""
    match formula:
        case spec.Const(literal):
            constant = literals[literal]
            copied = copier(constant)  # an operation may change what it gets: the next call must not see that
            return (lambda values: constant) if copied is None else (lambda values: copied())
        case spec.Slot(index):
            return operator.itemgetter(index)
        case spec.Field(base, path):
            start = compile_formula(base, literals)
            for is_attribute, key in path:
                check_step(is_attribute, key)

            def field(values: Sequence[Any]) -> Any:
                found = start(values)
                if isinstance(found, StreamValue):
                    raise TypeError("a stream has no fields: return a list or a dict instead of a generator")
                for is_attribute, key in path:
                    found = fetch(found, is_attribute, key)
                return found

            return field
        case spec.Build(kind, items):
            make = _TYPES[kind]
            parts = [compile_formula(item, literals) for item in items]
            return lambda values: make([part(values) for part in parts])
        case spec.MakeDict(entries):
            pairs = [(compile_formula(k, literals), compile_formula(v, literals)) for k, v in entries]
            return lambda values: {key(values): value(values) for key, value in pairs}
        case spec.Compare(op, left, right):
            compare = _COMPARE[op]
            a, b = compile_formula(left, literals), compile_formula(right, literals)

            def test(values: Sequence[Any]) -> Any:
                first, second = a(values), b(values)
                if isinstance(first, StreamValue) or isinstance(second, StreamValue):
                    raise TypeError("a stream cannot be compared: return a list instead of a generator")
                return compare(first, second)

            return test
        case spec.Combine(op, terms):
            tests = [compile_formula(term, literals) for term in terms]
            if op == "and":
                return lambda values: all(test(values) for test in tests)
            return lambda values: any(test(values) for test in tests)
        case spec.Not(term):
            inner = compile_formula(term, literals)
            return lambda values: not inner(values)


class TransitionCode:
    """A transition with its inputs resolved to slots. ``inputs``: how many scopes up, which slot."""

    __slots__ = ("action", "formulas", "index", "inputs", "label", "scope", "strict")

    def __init__(self, index: int, found: spec.Transition, scope: ScopeCode) -> None:
        self.index = index
        self.label = found.label
        self.action = found.action
        self.scope = scope
        self.inputs: tuple[tuple[int, int], ...] = ()
        # The inputs whose failure or absence passes through. Order alone ("after") never does.
        self.strict = tuple(i for i, given in enumerate(found.inputs) if given.role != "after")
        self.formulas: dict[str, Evaluate] = {}


class PlaceCode:
    """A place as this location sees it: its slot, and who reads it here and elsewhere."""

    __slots__ = (
        "awaited",
        "consumers",
        "holders",
        "index",
        "label",
        "local",
        "repeated",
        "routes",
        "scope",
        "slot",
        "uses",
    )

    def __init__(self, found: spec.Place, scope: ScopeCode | None) -> None:
        self.index = found.index
        self.label = found.label
        self.routes = found.routes
        self.scope = scope
        self.slot = -1
        self.consumers: list[TransitionCode] = []
        self.local = False
        self.repeated = False
        """Whether a loop reads it, once per element."""
        self.uses = 0
        """How many transitions here read its value, rather than only wait for it."""
        self.holders = 0
        """How many transitions of its own scope read its value here, and how many loops in that scope do."""
        self.awaited = False
        """Whether its instance must wait for its token: it comes from elsewhere, and only loops read it."""

    @property
    def readers(self) -> int | None:
        """How many read a token of this place; None if that is not known beforehand."""
        return None if self.repeated else self.uses + len(self.routes)


class ScopeCode:
    """A scope as this location sees it."""

    __slots__ = (
        "awaited",
        "depth",
        "emits",
        "index",
        "loop",
        "members",
        "missing",
        "outer",
        "parent",
        "path",
        "read_by",
        "slots",
        "transitions",
    )

    def __init__(self, index: int, parent: ScopeCode | None, loop: spec.Loop | None) -> None:
        self.index = index
        self.parent = parent
        self.loop = loop
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.path: tuple[spec.Loop, ...] = () if parent is None or loop is None else (*parent.path, loop)
        self.transitions: list[TransitionCode] = []
        self.members: list[spec.Loop] = []
        self.slots = 0
        self.awaited = 0
        self.missing: list[int] = []
        self.outer: list[tuple[TransitionCode, int, int]] = []
        self.emits: list[int] = []
        self.read_by: dict[int, dict[int, None]] = {}
        """For each loop inside, the slots of this scope whose values are read in its body."""


class Program:
    """A compiled net."""

    def __init__(self, net: spec.Net) -> None:
        self.net = net
        self.here = net.location
        self.points = net.points
        self.loops = {loop.index: loop for loop in net.loops}
        self.scopes: dict[int, ScopeCode] = {}
        for scope in net.scopes:  # parents stand before children
            parent = None if scope.parent is None else self.scopes[scope.parent]
            loop = None if scope.loop is None else self.loops[scope.loop]
            self.scopes[scope.index] = ScopeCode(scope.index, parent, loop)
            if parent is not None and loop is not None:
                parent.members.append(loop)
                parent.read_by[loop.index] = {}
        self.root = self.scopes[0]
        self.places: dict[int, PlaceCode] = {}
        for place in net.places:
            home = self.scopes.get(place.scope)
            self.places[place.index] = PlaceCode(place, home)
        self.driven: dict[int, ScopeCode] = {}
        """For each loop that is driven here, the scope it stands in."""
        for transition in net.transitions:
            self._add(transition)
        self.params = [self.places[index] for _, index in net.params]
        self._await_places()

    def _add(self, found: spec.Transition) -> None:
        scope = self.scopes[found.scope]
        code = TransitionCode(len(scope.transitions), found, scope)
        scope.transitions.append(code)
        missing = 0
        inputs = []
        for given in found.inputs:
            place = self.places[given.place]
            home = place.scope
            assert home is not None  # noqa: S101 - the planner gives every reader the scope
            if not place.local:
                place.local = True
                place.slot = home.slots
                home.slots += 1
            up = scope.depth - home.depth
            inputs.append((up, place.slot))
            read = given.role != "after"
            place.uses += read
            if up == 0:
                missing += 1
                place.consumers.append(code)
                place.holders += read
            else:
                scope.outer.append((code, up, place.slot))
                place.repeated = place.repeated or read
                inside = home.read_by[scope.path[home.depth].index]
                if read and place.slot not in inside:
                    inside[place.slot] = None
                    place.holders += 1
        if scope.parent is None and not inputs:
            missing = 1  # the opening of the frame
        scope.missing.append(missing)
        code.inputs = tuple(inputs)
        self._formulas(code, found.action)
        if isinstance(found.action, (spec.Iterate, spec.Repeat)):
            self.driven[found.action.loop] = scope
        elif isinstance(found.action, spec.Emit):
            above: ScopeCode | None = scope
            while above is not None:
                above.emits.append(found.action.point)
                above = above.parent

    def _await_places(self) -> None:
        """Finds the places whose token an instance must wait for although no transition of its own scope does."""
        made = {index for _, index in self.net.params}
        for transition in self.net.transitions:
            for name in ("output", "ended", "then", "otherwise", "found", "miss"):
                made.add(getattr(transition.action, name, -1))
        for loop in self.net.loops:
            made.update(loop.collects)
            if loop.control == self.here:
                made.update(index for index in (loop.element, loop.enter) if index is not None)
        for place in self.places.values():
            if place.local and not place.consumers and place.index not in made and place.scope is not None:
                place.awaited = True
                place.scope.awaited += 1

    def _formulas(self, code: TransitionCode, action: spec.Action) -> None:
        literals = self.net.literals
        if isinstance(action, spec.Call):
            code.formulas = {name: compile_formula(formula, literals) for name, formula in action.args.items()}
            return
        for name in ("value", "cond", "seq", "carry", "times", "next", "until", "key"):
            formula = getattr(action, name, None)
            if formula is not None:
                code.formulas[name] = compile_formula(formula, literals)
