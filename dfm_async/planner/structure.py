"""What stands where in a pipeline, and whether its references hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dfm_async.errors import Problem
from dfm_async.pipeline.expressions import (
    DEEPEST,
    Advise,
    Attribute,
    Combination,
    Comparison,
    Constant,
    Entries,
    Expression,
    Item,
    Items,
    Negation,
    Parameter,
    Ref,
    is_deep,
    references,
    walk,
)
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.pipeline.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    Statement,
    YieldStatement,
    blocks,
    walk_statements,
)
from dfm_async.pipeline.text import statement_label

__all__ = ["Block", "Spot", "Structure", "analyse", "expressions_of", "outer_nodes"]

Block: TypeAlias = tuple[int, int]
"""A body of a statement: the statement's id, and which of its bodies."""

_MAX_DEPTH = 100
_LARGEST = 2**63  # a whole number beyond it cannot travel


@dataclass(slots=True)
class Spot:
    """Where a statement stands."""

    statement: Statement
    label: str
    position: int
    path: tuple[Block, ...]
    """The blocks around it, from the outside in."""
    scope: int
    """The loop scope it belongs to; 0 is the pipeline itself."""
    expressions: tuple[tuple[str, Expression, bool], ...]
    """What :func:`expressions_of` gives for it."""
    references: tuple[tuple[str, Ref | Parameter, bool], ...]
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
    params: dict[str, list[str]] = field(default_factory=dict)
    """The labels of the statements that use each parameter."""
    problems: list[Problem] = field(default_factory=list)
    converted: dict[tuple[int, str], Any] = field(default_factory=dict)
    """Constants as the declared types have them, by the statement and the name of the argument."""

    def scope_of_loop(self, statement_id: int) -> int:
        """The scope of a loop's body."""
        return self._scopes[statement_id]

    _scopes: dict[int, int] = field(default_factory=dict)

    def report(self, spot: Spot, message: str) -> None:
        """Adds a problem."""
        self.problems.append(Problem(spot.label, message))


def expressions_of(statement: Statement) -> Iterator[tuple[str, Expression, bool]]:
    """The expressions of a statement: name, expression, and whether it is read inside the statement's own block."""
    match statement:
        case CallStatement():
            for name, value in statement.args.items():
                yield name, value, False
        case YieldStatement():
            yield "value", statement.value, False
        case ForEachStatement():
            yield "seq", statement.seq, False
        case RepeatStatement():
            yield "carry", statement.carry, False
            if statement.times is not None:
                yield "times", statement.times, False
            if statement.next is not None:
                yield "next", statement.next, True
            if statement.until is not None:
                yield "until", statement.until, True
        case IfStatement():
            yield "cond", statement.cond, False
        case CacheStatement():
            yield "key", statement.key, False
            if statement.store is not None:
                yield "store", statement.store, True
        case _:
            return


def outer_nodes(statement: CacheStatement) -> dict[int, bool]:
    """The nodes outside a cache block that its body uses, and whether it reads them, rather than only wait for them."""
    inside = {inner.id for inner in walk_statements(statement.body)} | {statement.id}
    nodes: dict[int, bool] = {}
    for inner in walk_statements(statement.body):
        for _, expression, _ in expressions_of(inner):
            nodes.update((ref.node, True) for ref in references(expression) if isinstance(ref, Ref))
        for node in getattr(inner, "after", ()):
            nodes.setdefault(node, False)
    if statement.store is not None:
        nodes.update((ref.node, True) for ref in references(statement.store) if isinstance(ref, Ref))
    return {node: read for node, read in nodes.items() if node not in inside}


def analyse(pipeline: Pipeline) -> Structure:
    """Takes a pipeline apart and finds everything that is wrong with its references and names."""
    found = Structure()
    if not pipeline.body:
        found.problems.append(Problem("", "has no statements"))
    _locate(pipeline.body, (), 0, found)
    for spot in found.spots.values():
        _check(spot, found)
        _check_steps(spot, found)
        _check_advice(spot, pipeline.mode == "discovery", found)
    _check_names(found)
    _check_cycles(found)
    return found


def _locate(body: tuple[Statement, ...], path: tuple[Block, ...], scope: int, found: Structure) -> None:
    if len(path) > _MAX_DEPTH:
        found.problems.append(Problem("", f"blocks are nested more than {_MAX_DEPTH} deep"))
        return
    for statement in body:
        expressions = tuple(expressions_of(statement))
        refs = tuple((name, ref, inside) for name, part, inside in expressions for ref in references(part))
        spot = Spot(statement, statement_label(statement), len(found.spots), path, scope, expressions, refs)
        if statement.id in found.spots:
            found.report(spot, f"the id {statement.id} is used twice")
            continue
        found.spots[statement.id] = spot
        inner = scope
        if isinstance(statement, (ForEachStatement, RepeatStatement)):
            found.loops.append(statement.id)
            found.parents.append(scope)
            inner = found._scopes[statement.id] = len(found.parents) - 1  # noqa: SLF001 - same module
        for index, block in enumerate(blocks(statement)):
            _locate(block, (*path, (statement.id, index)), inner, found)


def _check(spot: Spot, found: Structure) -> None:
    statement = spot.statement
    for name, ref, inside in spot.references:
        if isinstance(ref, Parameter):
            found.params.setdefault(ref.name, []).append(spot.label)
        else:
            _check_ref(ref, name, spot, inside, found)
    if isinstance(statement, (CallStatement, YieldStatement)):
        for node in statement.after:
            _check_ref(Ref(node=node), "after", spot, False, found)
    elif isinstance(statement, RepeatStatement):
        if statement.next is None:
            found.report(spot, "the block never says what it passes on: call next(value) in it")
        if statement.times is None and statement.until is None:
            found.report(spot, "has neither times nor until: it would never end")
    elif isinstance(statement, CacheStatement):
        if statement.store is None:
            found.report(spot, "the block stores nothing: call store(value) in it")
    elif isinstance(statement, CollectStatement):
        _check_collect(statement, spot, found)


def _check_steps(spot: Spot, found: Structure) -> None:
    """Fields lead to data, not into the inside of Python's objects; and what is too large cannot travel."""
    for name, expression, _ in spot.expressions:
        if isinstance(expression, (Items, Entries, Comparison, Combination, Negation)) and is_deep(expression):
            found.report(spot, f"{name} is nested more than {DEEPEST} deep")
    for name, ref, _ in spot.references:
        for step in ref.path:
            if isinstance(step, Attribute) and step.name.startswith("__"):
                found.report(spot, f"{name} uses the attribute {step.name!r}, which belongs to Python itself")
            elif isinstance(step, Attribute) and step.name.startswith("_"):
                found.report(spot, f"{name} uses the attribute {step.name!r}, which is private")
            elif isinstance(step, Item) and isinstance(step.key, int) and abs(step.key) >= _LARGEST:
                found.report(spot, f"{name} uses an index that no sequence has")
    limit = spot.statement.concurrency if isinstance(spot.statement, ForEachStatement) else None
    if limit is not None and limit >= _LARGEST:
        found.report(spot, f"concurrency must be less than {_LARGEST:,}")


def _check_advice(spot: Spot, asking: bool, found: Structure) -> None:
    for name, expression, _ in spot.expressions:
        if isinstance(expression, (Constant, Ref, Parameter)):
            continue
        if not any(isinstance(part, Advise) for part in walk(expression)):
            continue
        if not asking:
            found.report(spot, f"{name} asks for advice: use mode='discovery' and session.discover(pipeline)")
        elif not isinstance(spot.statement, CallStatement):
            found.report(spot, f"{name} asks for advice: only parameters of operations can")
        elif not isinstance(expression, Advise):
            found.report(spot, f"{name} has Advise() inside another value: it must be the whole value of a parameter")


def _check_ref(ref: Ref, name: str, spot: Spot, inside: bool, found: Structure) -> None:
    target = found.spots.get(ref.node)
    if target is None:
        found.report(spot, f"{name} refers to n{ref.node}, which does not exist")
        return
    path = (*spot.path, (spot.statement.id, 0)) if inside else spot.path
    statement = target.statement
    if isinstance(statement, (IfStatement, YieldStatement)):
        found.report(spot, f"{name} refers to {target.label}, which has no value")
    elif isinstance(statement, (ForEachStatement, RepeatStatement)) and (statement.id, 0) in path:
        return  # the element, or the value of this iteration
    elif isinstance(statement, ForEachStatement):
        if name == "after" and path[: len(target.path)] == target.path and target.position < spot.position:
            found.report(spot, f"after refers to the element of {target.label}; use collect(...) of one of its values")
        else:
            found.report(spot, f"{name} refers to the element of {target.label} outside that loop; use collect(...)")
    elif (statement.id, 0) in path or (statement.id, 1) in path:
        found.report(spot, f"{name} refers to {target.label}, which it is a part of")
    elif path[: len(target.path)] != target.path:
        outer = found.spots[target.path[-1][0]]
        if isinstance(outer.statement, (ForEachStatement, RepeatStatement)):
            hint = "collect it after the loop with collect(...)"
        elif isinstance(outer.statement, CacheStatement):
            hint = "store it with store(...) and use the block's value"
        else:
            hint = "a value of a branch can be used only in that branch"
        found.report(spot, f"{name} refers to {target.label}, which is inside {outer.label}: {hint}")
    elif target.position >= spot.position and not (inside and target.path == path):
        what = "itself" if target is spot else f"{target.label}, which stands later"
        found.report(spot, f"{name} refers to {what}; use only what is defined before")


def _check_collect(statement: CollectStatement, spot: Spot, found: Structure) -> None:
    target = found.spots.get(statement.node)
    if target is None:
        found.report(spot, f"refers to n{statement.node}, which does not exist")
        return
    if isinstance(target.statement, (IfStatement, YieldStatement)):
        found.report(spot, f"refers to {target.label}, which has no value")
        return
    scope = target.scope
    if isinstance(target.statement, ForEachStatement):  # the element itself
        scope = found.scope_of_loop(statement.node)
    if scope == 0 or found.parents[scope] != spot.scope:
        depth = "is not inside a loop that ended before" if scope == spot.scope else "is not one loop deeper than this"
        found.report(spot, f"{target.label} {depth}; collect goes level by level, right after the loop")
        return
    loop = found.spots[found.loops[scope - 1]]
    if spot.path[: len(loop.path)] != loop.path or loop.position > spot.position:
        found.report(spot, f"must stand after {loop.label}, in the same block or deeper")


def _check_names(found: Structure) -> None:
    uses: dict[str, list[Parameter]] = {}
    places: dict[str, list[YieldStatement]] = {}
    for spot in found.spots.values():
        for _, ref, _ in spot.references:
            if isinstance(ref, Parameter):
                uses.setdefault(ref.name, []).append(ref)
        if isinstance(spot.statement, YieldStatement):
            places.setdefault(spot.statement.place, []).append(spot.statement)
    for name, refs in uses.items():
        if len(refs) > 1 and not all(ref.multiuse for ref in refs):
            found.problems.append(
                Problem(f"PlaceParam({name!r})", f"is used {len(refs)} times; pass multiuse=True on all of them")
            )
        if name in places:
            found.problems.append(
                Problem(f"PlaceParam({name!r})", "has the same name as a place of Yield; rename one of them")
            )
    for place, statements in places.items():
        if len(statements) > 1 and not all(statement.multiuse for statement in statements):
            found.problems.append(
                Problem(
                    f"Yield(place={place!r})",
                    f"is used {len(statements)} times; pass multiuse=True on all of them",
                )
            )


def _check_cycles(found: Structure) -> None:
    """Names the cycles that ``after`` makes; each of them also has a reference to something later."""
    edges = {
        key: spot.statement.after
        for key, spot in found.spots.items()
        if isinstance(spot.statement, (CallStatement, YieldStatement)) and spot.statement.after
    }
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
