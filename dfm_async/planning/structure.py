"""The structure of a pipeline: where each statement is, and whether its references are valid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dfm_async.errors import Problem
from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.language.event_types import type_text
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.checks import FINITE, is_number

Block: TypeAlias = tuple[int, int]
"""A body of a statement: the statement's id, and which of its bodies."""

_MAX_DEPTH = 100
_LARGEST = 2**63  # a whole number beyond it cannot be encoded


@dataclass(slots=True, kw_only=True)
class Spot:
    """The position of a statement."""

    statement: st.Statement
    label: str
    position: int
    path: tuple[Block, ...]
    """The blocks around it, from the outside in."""
    scope: int
    """The loop scope it belongs to; 0 is the pipeline itself."""
    expressions: tuple[tuple[str, ex.Expression, bool], ...]
    """Its expressions: name, expression, and whether it is read inside the statement's own block."""
    references: tuple[tuple[str, ex.Ref | ex.Parameter, bool], ...]
    """What its expressions refer to: the expression's name, the reference, and whether it is read inside."""


@dataclass(slots=True)
class Structure:
    """A pipeline, taken apart."""

    spots: dict[int, Spot] = field(default_factory=dict)
    """By statement id, in the order of the text."""
    loops: list[int] = field(default_factory=list)
    """The statement ids of the loops; loop ``i`` has scope ``i + 1``."""
    parents: list[int] = field(default_factory=lambda: [-1])
    """The parent of each scope."""
    problems: list[Problem] = field(default_factory=list)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The events that are waited for, and the JSON schemas of their values."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """The values of parameters that a parameter set need not have."""
    gathered: dict[int, float | None] = field(default_factory=dict)
    """The calls of a ``gather``, and the number of seconds that each may take."""
    types: dict[str, Any] = field(default_factory=dict)
    """The types that the function of the pipeline declares for its parameters."""
    converted: dict[tuple[int, str], Any] = field(default_factory=dict)
    """Constants as the declared types have them, by the statement and the name of the argument."""

    def scope_of_loop(self, statement_id: int) -> int:
        """Return the scope of a loop's body."""
        return self._scopes[statement_id]

    def scope_of_value(self, statement_id: int) -> int:
        """Return the scope that the values of a statement belong to: those of a ``ForEach`` are its elements."""
        spot = self.spots[statement_id]
        return self._scopes[statement_id] if isinstance(spot.statement, st.ForEachStatement) else spot.scope

    def reads_iteration(self, spot: Spot, node: int, inside: bool) -> bool:
        """Return whether a statement that refers to a loop means the value of the iteration that it is a part of."""
        target = self.spots[node].statement
        around = any(block == node for block, _ in spot.path) or (inside and target is spot.statement)
        return target.is_loop and around

    _scopes: dict[int, int] = field(default_factory=dict)

    def report(self, spot: Spot, message: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(spot.label, message))


def outer_nodes(statement: st.CacheStatement) -> dict[int, bool]:
    """Return the nodes outside a cache block that its body uses, and whether it reads them or only waits for them."""
    inside = {inner.id for inner in st.walk_statements(statement.body)} | {statement.id}
    nodes: dict[int, bool] = {}
    for inner in st.walk_statements(statement.body):
        for _, expression, _ in inner.expressions():
            nodes.update((ref.node, True) for ref in ex.references(expression) if isinstance(ref, ex.Ref))
        for node in inner.after:
            nodes.setdefault(node, False)
    if statement.store is not None:
        nodes.update((ref.node, True) for ref in ex.references(statement.store) if isinstance(ref, ex.Ref))
    return {node: read for node, read in nodes.items() if node not in inside}


def analyse(pipeline: Pipeline) -> Structure:
    """Analyse a pipeline: report everything that is wrong with its references and names."""
    found = Structure(types=pipeline.types)
    if not pipeline.body:
        found.problems.append(Problem("", "has no statements"))
    _locate(pipeline.body, (), 0, found)
    for spot in found.spots.values():
        _check(spot, found)
        _check_steps(spot, found)
        _check_advice(spot, pipeline.mode == "discovery", found)
    _find_defaults(found)
    _check_cycles(found)
    return found


def _locate(body: tuple[st.Statement, ...], path: tuple[Block, ...], scope: int, found: Structure) -> None:
    if len(path) > _MAX_DEPTH:
        found.problems.append(Problem("", f"blocks are nested more than {_MAX_DEPTH} deep"))
        return
    for statement in body:
        expressions = tuple(statement.expressions())
        refs = tuple((name, ref, inside) for name, part, inside in expressions for ref in ex.references(part))
        spot = Spot(
            statement=statement,
            label=statement.label,
            position=len(found.spots),
            path=path,
            scope=scope,
            expressions=expressions,
            references=refs,
        )
        if statement.id in found.spots:
            found.report(spot, f"the id {statement.id} is used twice")
            continue
        found.spots[statement.id] = spot
        inner = scope
        if statement.is_loop:
            found.loops.append(statement.id)
            found.parents.append(scope)
            inner = found._scopes[statement.id] = len(found.parents) - 1  # noqa: SLF001 - same module
        for index, block in enumerate(statement.blocks):
            _locate(block, (*path, (statement.id, index)), inner, found)


def _check(spot: Spot, found: Structure) -> None:
    statement = spot.statement
    for name, ref, inside in spot.references:
        if isinstance(ref, ex.Ref):
            _check_ref(ref, name, spot, inside, found)
    for node in statement.after:
        _check_ref(ex.Ref(node=node), "after", spot, False, found)
    if isinstance(statement, st.RepeatStatement):
        if statement.next is None:
            found.report(spot, "the block passes nothing on: call next(value) in it")
        if statement.times is None and statement.until is None:
            found.report(spot, "has neither times nor until: it would never end")
    elif isinstance(statement, st.CacheStatement):
        if statement.store is None:
            found.report(spot, "the block stores nothing: call store(value) in it")
    elif isinstance(statement, st.CollectStatement):
        _check_collect(statement, spot, found)
    elif isinstance(statement, st.GatherStatement):
        _check_gather(statement, spot, found)
    elif isinstance(statement, st.WaitStatement):
        _check_wait(statement, spot, found)
    elif isinstance(statement, st.SleepStatement):
        _check_seconds(statement.seconds, "seconds", spot, found)
    elif isinstance(statement, st.ChoiceStatement):
        branch = found.spots.get(statement.branch)
        known = branch is not None and isinstance(branch.statement, st.IfStatement)
        if branch is None or not known or branch.path != spot.path or branch.position > spot.position:
            found.report(spot, "must be after an If, in the same block")


def _check_steps(spot: Spot, found: Structure) -> None:
    """Check that fields lead to data, not to internals of Python's objects, and that numbers are not too large."""
    for name, expression, _ in spot.expressions:
        if isinstance(expression, (ex.Items, ex.Entries, ex.Comparison, ex.Combination, ex.Negation)) and ex.is_deep(
            expression
        ):
            found.report(spot, f"{name} is nested more than {ex.DEEPEST} deep")
    collected = spot.statement.path if isinstance(spot.statement, st.CollectStatement) else ()
    paths = [(name, ref.path) for name, ref, _ in spot.references] + [("value", collected)]
    for name, path in paths:
        for step in path:
            if isinstance(step, ex.Attribute) and step.name.startswith("_"):
                what = "belongs to Python itself" if step.name.startswith("__") else "is private"
                found.report(spot, f"{name} uses the attribute {step.name!r}, which {what}")
            elif isinstance(step, ex.Item) and isinstance(step.key, int) and abs(step.key) >= _LARGEST:
                found.report(spot, f"{name} uses an index that no sequence has")
    limit = spot.statement.concurrency if isinstance(spot.statement, st.ForEachStatement) else None
    if limit is not None and limit >= _LARGEST:
        found.report(spot, f"concurrency must be less than {_LARGEST:,}")


def _check_advice(spot: Spot, asking: bool, found: Structure) -> None:
    for name, expression, _ in spot.expressions:
        if isinstance(expression, (ex.Constant, ex.Ref, ex.Parameter)):
            continue
        if not any(isinstance(part, ex.Advise) for part in ex.walk(expression)):
            continue
        if not asking:
            found.report(spot, f"{name} asks for advice: use mode='discovery' and session.discover(pipeline)")
        elif not isinstance(spot.statement, st.CallStatement):
            found.report(spot, f"{name} asks for advice: only parameters of operations can")
        elif not isinstance(expression, ex.Advise):
            found.report(spot, f"{name} has Advise() inside another value: it must be the whole value of a parameter")


def _check_ref(ref: ex.Ref, name: str, spot: Spot, inside: bool, found: Structure) -> None:
    target = found.spots.get(ref.node)
    if target is None:
        found.report(spot, f"{name} refers to n{ref.node}, which does not exist")
        return
    path = (*spot.path, (spot.statement.id, 0)) if inside else spot.path
    if isinstance(spot.statement, st.ChoiceStatement):
        path = (*path, (spot.statement.branch, 0 if name == "value" else 1))
    statement = target.statement
    if not statement.has_value:
        found.report(spot, f"{name} refers to {target.label}, which has no value")
    elif statement.is_loop and (statement.id, 0) in path:
        return  # the element, or the value of this iteration
    elif isinstance(statement, st.ForEachStatement):
        if name == "after" and path[: len(target.path)] == target.path and target.position < spot.position:
            found.report(spot, f"after refers to the element of {target.label}; use collect(...) of one of its values")
        else:
            found.report(spot, f"{name} refers to the element of {target.label} outside that loop; use collect(...)")
    elif (statement.id, 0) in path or (statement.id, 1) in path:
        found.report(spot, f"{name} refers to {target.label}, which it is a part of")
    elif path[: len(target.path)] != target.path:
        outer = found.spots[target.path[-1][0]]
        if outer.statement.is_loop:
            hint = "collect it after the loop with collect(...)"
        elif isinstance(outer.statement, st.CacheStatement):
            hint = "store it with store(...) and use the block's value"
        else:
            hint = "use it in that branch, or after it as branch.value(a, b), with a value for either branch"
        found.report(spot, f"{name} refers to {target.label}, which is inside {outer.label}: {hint}")
    elif target.position >= spot.position and not (inside and target.path == path):
        what = "itself" if target is spot else f"{target.label}, which is defined later"
        found.report(spot, f"{name} refers to {what}; use only what is defined before")


def _check_collect(statement: st.CollectStatement, spot: Spot, found: Structure) -> None:
    target = found.spots.get(statement.node)
    if target is None:
        found.report(spot, f"refers to n{statement.node}, which does not exist")
        return
    if not target.statement.has_value:
        found.report(spot, f"refers to {target.label}, which has no value")
        return
    scope = found.scope_of_value(statement.node)
    if scope == 0 or found.parents[scope] != spot.scope:
        depth = "is not inside a loop that ended before" if scope == spot.scope else "is not one loop deeper than this"
        found.report(spot, f"{target.label} {depth}; collect goes level by level, right after the loop")
        return
    loop = found.spots[found.loops[scope - 1]]
    if spot.path[: len(loop.path)] != loop.path or loop.position > spot.position:
        found.report(spot, f"must be after {loop.label}, in the same block or deeper")


def _check_gather(statement: st.GatherStatement, spot: Spot, found: Structure) -> None:
    for node in statement.calls:
        limits = [limit for limit in (found.gathered.get(node), statement.within) if limit is not None]
        found.gathered[node] = min(limits, default=None)
    targets = [found.spots[node] for node in statement.calls if node in found.spots]
    for target in targets:
        if not isinstance(target.statement, st.CallStatement):
            found.report(spot, f"takes calls of operations, not {target.label}")
    if len(set(statement.calls)) < len(statement.calls):
        found.report(spot, "has the same call twice")
    if statement.at_least > len(statement.calls):
        found.report(spot, f"at_least is {statement.at_least}, but it has {len(statement.calls)} calls")


def _check_wait(statement: st.WaitStatement, spot: Spot, found: Structure) -> None:
    if not statement.event:
        found.report(spot, "the name of an event must not be empty")
    known = found.events.setdefault(statement.event, statement.schema)
    if known != statement.schema:
        hint = "waits for the same event as another Wait, which declares another type"
        found.report(spot, f"{hint}: {type_text(known)} and {type_text(statement.schema)}")
    _check_seconds(statement.timeout, "timeout", spot, found)


def _check_seconds(given: ex.Expression | None, what: str, spot: Spot, found: Structure) -> None:
    if isinstance(given, ex.Constant) and not is_number(given.value, most=FINITE):
        found.report(spot, f"{what} must be a number of seconds, not {given.value!r}")


def _find_defaults(found: Structure) -> None:
    for spot in found.spots.values():
        for _, ref, _ in spot.references:
            if isinstance(ref, ex.Parameter) and ref.default is not None:
                found.defaults.setdefault(ref.name, ref.default.value)


def _check_cycles(found: Structure) -> None:
    """Report the cycles that ``after`` makes; each of them also has a reference to something later."""
    edges = {key: spot.statement.after for key, spot in found.spots.items() if spot.statement.after}
    done: set[int] = set()
    for start in edges:
        trail: dict[int, None] = {}
        node: int | None = start
        while node is not None and node not in done:
            if node in trail:
                cycle = [*list(trail)[list(trail).index(node) :], node]
                names = " -> ".join(found.spots[n].label for n in cycle if n in found.spots)
                found.problems.append(Problem("after", f"makes a cycle: {names}"))
                break
            trail[node] = None
            node = next((n for n in edges.get(node, ()) if n in edges), None)
        done.update(trail)
