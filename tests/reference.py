"""The meaning of a pipeline as plain recursive Python: what the engine is compared with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dfm_async.pipeline.expressions import (
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
    references,
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
    walk_statements,
)
from dfm_async.pipeline.text import statement_label
from dfm_async.planner.structure import expressions_of

Frame = tuple[int, ...]


class Fail:
    """A value that will not come."""


class Sequence:
    """What a generator yields, and whether it raises in the end."""

    def __init__(self, items: list[Any], fails: bool) -> None:
        self.items = items
        self.fails = fails
        self.reported = False


@dataclass
class Outcome:
    results: list[tuple[str, Frame, Any]] = field(default_factory=list)
    lost: list[tuple[str, Frame]] = field(default_factory=list)
    errors: list[tuple[str, Frame]] = field(default_factory=list)


_COMPARE = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Reference:
    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        params: Mapping[str, Any],
        read: set[int] | None = None,
    ) -> None:
        self.functions = functions
        self.read = read or set()
        self.params = params
        self.cache: dict[Any, Any] = {}
        self.outcome = Outcome()

    # expressions

    def value(self, found: Expression, env: dict[int, Any]) -> Any:
        match found:
            case Constant():
                return found.value
            case Ref() | Parameter():
                value = env[found.node] if isinstance(found, Ref) else self.params[found.name]
                for step in found.path:
                    value = getattr(value, step.name) if isinstance(step, Attribute) else value[step.key]
                return value
            case Items():
                return {"list": list, "tuple": tuple, "set": set}[found.type](self.value(i, env) for i in found.items)
            case Entries():
                return {self.value(k, env): self.value(v, env) for k, v in found.entries}
            case Comparison():
                return _COMPARE[found.op](self.value(found.left, env), self.value(found.right, env))
            case Combination():
                test = all if found.op == "and" else any
                return test(self.value(term, env) for term in found.terms)
            case Negation():
                return not self.value(found.term, env)

    def evaluate(self, found: Expression, env: dict[int, Any], label: str, frame: Frame) -> Any:
        for ref in references(found):
            if isinstance(ref, Ref) and isinstance(env[ref.node], Fail):
                return env[ref.node]
        try:
            return self.value(found, env)
        except Exception:
            self.outcome.errors.append((label, frame))
            return Fail()

    # statements

    def run(self, body: tuple[Statement, ...], env: dict[int, Any], frame: Frame) -> None:
        for statement in body:
            label = statement_label(statement)
            match statement:
                case CallStatement():
                    env[statement.id] = self.call(statement, env, label, frame)
                case YieldStatement():
                    self.emit(statement, env, label, frame)
                case ForEachStatement():
                    self.loop(statement, env, label, frame)
                case RepeatStatement():
                    env[statement.id] = self.repeat(statement, env, label, frame)
                case IfStatement():
                    cond = self.evaluate(statement.cond, env, label, frame)
                    if isinstance(cond, Fail):
                        self.lose(statement.body, frame)
                        self.lose(statement.otherwise, frame)
                    else:
                        self.run(statement.body if cond else statement.otherwise, env, frame)
                case CacheStatement():
                    env[statement.id] = self.cached(statement, env, label, frame)
                case CollectStatement():
                    loop_frames = env[("elements", statement.node)]  # type: ignore[index]
                    if isinstance(loop_frames, Fail):
                        env[statement.id] = loop_frames
                    else:
                        values = [e[statement.node] for e in loop_frames if statement.node in e]
                        failed = [v for v in values if isinstance(v, Fail)]
                        env[statement.id] = failed[0] if failed else values

    def call(self, statement: CallStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        args = {}
        for name, expression in statement.args.items():
            args[name] = self.evaluate(expression, env, label, frame)
        for value in args.values():
            if isinstance(value, Fail):
                return value
        for name, value in args.items():
            if isinstance(value, Sequence):
                if value.fails:
                    self.report(value, frame)
                    return Fail()
                args[name] = value.items
        try:
            found = self.functions[statement.operation](**args)
        except Exception:
            self.outcome.errors.append((label, frame))
            return Fail()
        if isinstance(found, Iterator):
            items: list[Any] = []
            fails = False
            try:
                items.extend(found)
            except Exception:
                fails = True
            found = Sequence(items, fails)
            found.origin = (label, frame)  # type: ignore[attr-defined]
            if fails and statement.id not in self.read:  # nobody reads it: it is run to its end all the same
                self.report(found, frame)
        return found

    def report(self, sequence: Sequence, frame: Frame) -> None:
        if not sequence.reported:
            sequence.reported = True
            self.outcome.errors.append(sequence.origin)  # type: ignore[attr-defined]

    def emit(self, statement: YieldStatement, env: dict[int, Any], label: str, frame: Frame) -> None:
        value = self.evaluate(statement.value, env, label, frame)
        if isinstance(value, Fail):
            self.outcome.lost.append((statement.place, frame))
        elif isinstance(value, Sequence):
            self.outcome.results += [(statement.place, (*frame, i), item) for i, item in enumerate(value.items)]
            if value.fails:
                self.report(value, frame)
                self.outcome.lost.append((statement.place, frame))
        else:
            self.outcome.results.append((statement.place, frame, value))

    def lose(self, body: tuple[Statement, ...], frame: Frame) -> None:
        """Nothing of a block runs, because of an error: its yields are lost."""
        for statement in walk_statements(body):
            if isinstance(statement, YieldStatement):
                self.outcome.lost.append((statement.place, frame))

    def mark(self, body: tuple[Statement, ...], loop: int, env: dict[int, Any], elements: Any) -> None:
        env[("elements", loop)] = elements  # type: ignore[index]
        for statement in _of_this_loop(body):
            env[("elements", statement.id)] = elements  # type: ignore[index]

    def loop(self, statement: ForEachStatement, env: dict[int, Any], label: str, frame: Frame) -> None:
        seq = self.evaluate(statement.seq, env, label, frame)
        if isinstance(seq, Fail):
            self.lose(statement.body, frame)
            self.mark(statement.body, statement.id, env, seq)
            return
        items = seq.items if isinstance(seq, Sequence) else list(seq)
        elements = []
        for index, item in enumerate(items):
            inner = {**env, statement.id: item}
            self.run(statement.body, inner, (*frame, index))
            elements.append(inner)
        if isinstance(seq, Sequence) and seq.fails:
            self.report(seq, frame)
            self.lose(statement.body, frame)
            self.mark(statement.body, statement.id, env, Fail())
        else:
            self.mark(statement.body, statement.id, env, elements)

    def repeat(self, statement: RepeatStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        current = self.evaluate(statement.carry, env, label, frame)
        times = None if statement.times is None else self.evaluate(statement.times, env, label, frame)
        for value in (current, times):
            if isinstance(value, Fail):
                self.lose(statement.body, frame)
                self.mark(statement.body, statement.id, env, value)
                return value
        elements: list[dict[int, Any]] = []
        index = 0
        while times is None or index < times:
            inner = {**env, statement.id: current}
            here = (*frame, index)
            self.run(statement.body, inner, here)
            elements.append(inner)
            assert statement.next is not None
            following = self.evaluate(statement.next, inner, label, here)
            stop = None if statement.until is None else self.evaluate(statement.until, inner, label, here)
            if isinstance(following, Fail) or isinstance(stop, Fail):
                current = Fail()
                break
            current = following
            index += 1
            if stop:
                break
        self.mark(statement.body, statement.id, env, elements)
        return current

    def cached(self, statement: CacheStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        key = self.evaluate(statement.key, env, label, frame)
        if isinstance(key, Fail):
            self.lose(statement.body, frame)
            return key
        if key in self.cache:
            return self.cache[key]
        inner = dict(env)
        self.run(statement.body, inner, frame)
        assert statement.store is not None
        value = self.evaluate(statement.store, inner, label, frame)
        if not isinstance(value, Fail):
            self.cache[key] = value
        return value


def _of_this_loop(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in body:
        yield statement
        if isinstance(statement, IfStatement):
            yield from _of_this_loop(statement.body)
            yield from _of_this_loop(statement.otherwise)
        elif isinstance(statement, CacheStatement):
            yield from _of_this_loop(statement.body)


def interpret(pipeline: Pipeline, functions: Mapping[str, Callable[..., Any]], sets: list[dict[str, Any]]) -> Outcome:
    """Runs a pipeline for all parameter sets."""
    whole = Outcome()
    cache: dict[Any, Any] = {}
    read = {
        ref.node
        for statement in walk_statements(pipeline.body)
        for _, expression, _ in expressions_of(statement)
        for ref in references(expression)
        if isinstance(ref, Ref)
    }
    for index, params in enumerate(sets):
        reference = Reference(functions, params, read)
        reference.cache = cache
        reference.run(pipeline.body, {}, (index,))
        whole.results += reference.outcome.results
        whole.lost += reference.outcome.lost
        whole.errors += reference.outcome.errors
    return whole
