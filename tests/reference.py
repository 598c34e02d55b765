"""The meaning of a pipeline as plain recursive Python: what the engine is compared with."""

from __future__ import annotations

import copy
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

Frame = tuple[int, ...]


class Fail:
    """A value that will not come."""


class StreamFails(Exception):
    """Raised where a stream is read whose generator raises, or reads one that does."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.sequence = sequence


class Sequence:
    """What a generator yields, as far as somebody reads it."""

    def __init__(self, source: Iterator[Any], label: str, frame: Frame) -> None:
        self.origin = (label, frame)
        self.source = source
        self.items: list[Any] = []
        self.begun = False
        """Whether a reader had it."""
        self.ended = False
        self.failure: StreamFails | None = None

    def read(self) -> Iterator[Any]:
        """Begins to read it; any number of readers see every element."""
        self.begun = True
        return self.elements()

    def elements(self) -> Iterator[Any]:
        position = 0
        while self.has(position):
            yield self.items[position]
            position += 1
        if self.failure is not None:
            raise self.failure

    def has(self, position: int) -> bool:
        if position == len(self.items) and not self.ended:
            try:
                self.items.append(next(self.source))
            except StopIteration:
                self.ended = True
            except StreamFails as failure:
                self.ended, self.failure = True, failure
            except Exception:
                self.ended, self.failure = True, StreamFails(self)
        return position < len(self.items)


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
    ) -> None:
        self.functions = functions
        self.params = params
        self.cache: dict[Any, Any] = {}
        self.outcome = Outcome()
        self.sequences: list[Sequence] = []

    # expressions

    def value(self, found: Expression, env: dict[int, Any]) -> Any:
        match found:
            case Constant():
                return copy.deepcopy(found.value)  # a function that changes it changes only its own
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
        readers = {name: value.read() if isinstance(value, Sequence) else value for name, value in args.items()}
        try:
            found = self.functions[statement.operation](**readers)
        except StreamFails as failure:
            self.report(failure)
            return Fail()
        except Exception:
            self.outcome.errors.append((label, frame))
            return Fail()
        if isinstance(found, Iterator):
            found = Sequence(found, label, frame)
            self.sequences.append(found)
        return found

    def report(self, failure: StreamFails) -> None:
        if failure.sequence.origin not in self.outcome.errors:
            self.outcome.errors.append(failure.sequence.origin)

    def emit(self, statement: YieldStatement, env: dict[int, Any], label: str, frame: Frame) -> None:
        value = self.evaluate(statement.value, env, label, frame)
        if isinstance(value, Fail):
            self.outcome.lost.append((statement.place, frame))
        elif isinstance(value, Sequence):
            try:
                for index, item in enumerate(value.read()):
                    self.outcome.results.append((statement.place, (*frame, index), item))
            except StreamFails as failure:
                self.report(failure)
                self.outcome.lost.append((statement.place, frame))
        else:
            self.outcome.results.append((statement.place, frame, value))

    def run_the_unread(self) -> None:
        """A generator that had no reader runs to its end, as any other operation."""
        for sequence in self.sequences:
            if not sequence.begun:
                try:
                    for _ in sequence.read():
                        pass
                except StreamFails as failure:
                    self.report(failure)

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
        elements: list[dict[int, Any]] = []
        try:
            for index, item in enumerate(seq.read() if isinstance(seq, Sequence) else seq):
                inner = {**env, statement.id: item}
                self.run(statement.body, inner, (*frame, index))
                elements.append(inner)
        except StreamFails as failure:
            self.report(failure)
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
    for index, params in enumerate(sets):
        reference = Reference(functions, params)
        reference.cache = cache
        reference.run(pipeline.body, {}, (index,))
        reference.run_the_unread()
        whole.results += reference.outcome.results
        whole.lost += reference.outcome.lost
        whole.errors += reference.outcome.errors
    return whole
