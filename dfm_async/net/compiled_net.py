"""A net made ready to run: formulas become closures, places become slots. Shared by all jobs of a plan."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import msgspec

from dfm_async.model.constants import copier
from dfm_async.net import spec
from dfm_async.net.tokens import StreamValue

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


# Fields of values, as pipelines may read them: ``node.name`` and ``node["key"]``. A net may come from an untrusted
# sender, who may read what operations return, but must not reach the interpreter. So names with a leading underscore
# are not fields, and no step begins or ends at a module, a class, a function or the like: from there, everything that a
# process holds could be reached.

_CLOSED: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.CellType,
    functools.partial,
    functools.partialmethod,
    property,
    staticmethod,
    classmethod,
    super,
)
"""Classes whose values are not data."""
_OUR_OWN: Final = ("dfm_async.net.", "dfm_async.runtime.", "dfm_async.wire.", "dfm_async.workers.")
"""Where the classes are that only the engine uses."""
_INDEXED: Final = (Mapping, Sequence, Set, bytearray, memoryview)
_KEYS: Final = frozenset({int, str, bool, float, type(None)})
"""What can be between brackets."""


def check_step(is_attribute: bool, key: Any) -> None:
    """Raise ValueError if no pipeline may take this step."""
    if is_attribute:
        if type(key) is not str or not key.isidentifier():
            raise ValueError(f"{key!r} is not the name of a field")
        if key.startswith("_"):
            raise ValueError(f"{key!r} is not a field: names that begin with an underscore are private")
    elif type(key) not in _KEYS:
        raise ValueError(f"a field is chosen by a string or a number, not by {key!r}")


@functools.lru_cache(maxsize=1024)
def _is_closed(kind: Any) -> bool:
    """Return whether values of such a class are not data."""
    return issubclass(kind, _CLOSED) or kind.__module__.startswith(_OUR_OWN)


@functools.lru_cache(maxsize=1024)
def _has_items(kind: Any) -> bool:
    """Return whether brackets choose a part of such a value. Classes of the standard library must be containers."""
    if issubclass(kind, _INDEXED):
        return True
    return not _is_closed(kind) and kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def fetch(value: Any, is_attribute: bool, key: Any) -> Any:
    """Take one step, which was checked before.

    Raises:
        TypeError: the value has no fields, or this one is not data; and whatever the value itself raises.
    """
    kind: Any = type(value)
    if is_attribute:
        if _is_closed(kind):
            raise TypeError(f"a value of type {kind.__name__} has no fields that a pipeline can read")
        found = getattr(value, key)
    else:
        if not _has_items(kind):
            raise TypeError(f"{kind.__name__!r} object is not subscriptable in a pipeline")
        found = value[key]
    reached: Any = type(found)
    if _is_closed(reached):
        raise TypeError(f"{key!r} of a {kind.__name__} is a {reached.__name__}, which is not data")
    return found


# Nets


def compile_formula(formula: spec.Formula, literals: Sequence[Any]) -> Evaluate:
    """Make a function of a transition's input values."""
    match formula:
        case spec.NetLiteral(literal):
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


class TransitionCode(msgspec.Struct, eq=False, kw_only=True):
    """A transition with its inputs resolved to slots. ``inputs``: the number of scopes up, and the slot."""

    index: int
    label: str
    action: spec.Action
    formulas: dict[str, Evaluate]
    outputs: tuple[int, ...]
    strict: tuple[int, ...]
    """The inputs whose failure or absence passes through. Order alone ("after") never does."""
    handled: bool = False
    fallback: Evaluate | None = None
    inputs: tuple[tuple[int, int], ...] = ()

    def arguments(self, values: Sequence[Any]) -> dict[str, Any]:
        """Make the arguments of a call from its inputs, with constants of its own."""
        return {name: formula(values) for name, formula in self.formulas.items()}


class PlaceCode(msgspec.Struct, eq=False, kw_only=True):
    """A place as this location sees it: its slot, and its readers here and elsewhere."""

    index: int
    label: str
    routes: tuple[int, ...]
    scope: ScopeCode | None
    handled: bool = False
    slot: int = -1
    consumers: list[TransitionCode] = []
    local: bool = False
    repeated: bool = False
    """Whether a loop reads it, once per element."""
    uses: int = 0
    """The number of transitions here that read its value, rather than only wait for it."""
    holders: int = 0
    """The number of transitions of its own scope that read its value here, and of loops in that scope that do."""
    awaited: bool = False
    """Whether its instance must wait for its token: it comes from elsewhere, and only loops read it."""

    @property
    def readers(self) -> int | None:
        """The number of readers of a token of this place; None if that is not known beforehand."""
        return None if self.repeated else self.uses + len(self.routes)


class ScopeCode(msgspec.Struct, eq=False, kw_only=True):
    """A scope as this location sees it."""

    parent: ScopeCode | None
    loop: spec.Loop | None
    path: tuple[spec.Loop, ...]
    """The loops around it, the outermost first."""
    transitions: list[TransitionCode] = []
    members: list[spec.Loop] = []
    slots: int = 0
    awaited: int = 0
    missing: list[int] = []
    outer: list[tuple[TransitionCode, int, int]] = []
    emits: list[int] = []
    read_by: dict[int, dict[int, None]] = {}
    """For each loop inside, the slots of this scope whose values are read in its body."""


class CompiledNet:
    """A compiled net."""

    def __init__(self, net: spec.Net) -> None:
        self.net = net
        self.here = net.location
        self.points = net.points
        self.loops = {loop.index: loop for loop in net.loops}
        self.scopes: dict[int, ScopeCode] = {}
        for scope in net.scopes:  # parents come before children
            parent = None if scope.parent is None else self.scopes[scope.parent]
            loop = None if scope.loop is None else self.loops[scope.loop]
            path = () if parent is None or loop is None else (*parent.path, loop)
            self.scopes[scope.index] = ScopeCode(parent=parent, loop=loop, path=path)
            if parent is not None and loop is not None:
                parent.members.append(loop)
                parent.read_by[loop.index] = {}
        self.root = self.scopes[0]
        self.places: dict[int, PlaceCode] = {}
        for place in net.places:
            home = self.scopes.get(place.scope)
            self.places[place.index] = PlaceCode(
                index=place.index, label=place.label, routes=place.routes, scope=home, handled=place.handled
            )
        self.driven: dict[int, ScopeCode] = {}
        """For each loop that is driven here, the scope it is in."""
        for transition in net.transitions:
            self._add(transition)
        self.params = [self.places[index] for _, index in net.params]
        for contained in net.contains:
            for call in contained.calls:
                self._hold_inputs(contained, call)
        self._await_places()

    def _hold_inputs(self, contained: spec.Contained, call: spec.ContainedCall) -> None:
        """Keep the inputs of a call at another location: they are sent again if its worker is lost."""
        for given in call.inputs:
            place = self.places.get(given.place)
            if place is not None and not place.local and place.index not in contained.params:
                self._add_slot(place)

    def _add(self, found: spec.Transition) -> None:
        scope = self.scopes[found.scope]
        formulas = {
            name: compile_formula(formula, self.net.literals)
            for name, formula in spec.formulas_of(found.action).items()
        }
        outputs = tuple(spec.outputs_of(found.action))
        strict = tuple(i for i, given in enumerate(found.inputs) if given.role != "after")
        code = TransitionCode(
            index=len(scope.transitions),
            label=found.label,
            action=found.action,
            formulas=formulas,
            outputs=outputs,
            strict=strict,
            handled=found.handled,
        )
        if isinstance(found.action, (spec.Call, spec.Await)) and found.action.fallback is not None:
            code.fallback = compile_formula(found.action.fallback, self.net.literals)
        scope.transitions.append(code)
        missing = 0
        inputs = []
        for given in found.inputs:
            place = self.places[given.place]
            home = place.scope
            assert home is not None  # noqa: S101 - the planner gives every reader the scope
            if not place.local:
                self._add_slot(place)
            up = len(scope.path) - len(home.path)
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
                inside = home.read_by[scope.path[len(home.path)].index]
                if read and place.slot not in inside:
                    inside[place.slot] = None
                    place.holders += 1
        if scope.parent is None and not inputs:
            missing = 1  # the opening of the frame
        scope.missing.append(missing)
        code.inputs = tuple(inputs)
        if isinstance(found.action, (spec.Iterate, spec.Repeat)):
            self.driven[found.action.loop] = scope
        elif isinstance(found.action, spec.Emit):
            above: ScopeCode | None = scope
            while above is not None:
                above.emits.append(found.action.point)
                above = above.parent

    @staticmethod
    def _add_slot(place: PlaceCode) -> None:
        assert place.scope is not None  # noqa: S101 - the planner gives every reader the scope
        place.local = True
        place.slot = place.scope.slots
        place.scope.slots += 1

    def _await_places(self) -> None:
        """Find the places whose token an instance must wait for although no transition of its own scope does."""
        made = {index for _, index in self.net.params}
        for transition in self.net.transitions:
            made.update(spec.outputs_of(transition.action))
        for loop in self.net.loops:
            made.update(loop.collects)
            if loop.control == self.here:
                made.update(index for index in (loop.element, loop.enter) if index is not None)
        for place in self.places.values():
            if place.local and not place.consumers and place.index not in made and place.scope is not None:
                place.awaited = True
                place.scope.awaited += 1
