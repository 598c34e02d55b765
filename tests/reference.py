"""The meaning of a pipeline as plain recursive Python: what the engine is compared with."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dfm_async import FailureInfo, Reply
from dfm_async.events import Replies
from dfm_async.language import expressions as ex
from dfm_async.language import statements
from dfm_async.language.pipeline import Pipeline
from dfm_async.planning.handling import Handling
from dfm_async.planning.structure import analyse

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

    def __init__(self, source: Iterator[Any], label: str, frame: Frame, handled: bool = False) -> None:
        self.origin = (label, frame)
        self.handled = handled
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
    handled: list[tuple[str, Frame]] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    """The events that are taken: the parameter set and the name."""


_COMPARE = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Reference:
    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        params: Mapping[str, Any],
        handling: Handling,
    ) -> None:
        self.handling = handling
        """Which failures are handled follows from the pipeline: tests/planning/test_handling.py tests that."""
        self.functions = functions
        self.params = params
        self.cache: dict[Any, Any] = {}
        self.outcome = Outcome()
        self.sequences: list[Sequence] = []

    # expressions

    def value(self, found: ex.Expression, env: dict[int, Any]) -> Any:
        match found:
            case ex.Constant():
                return copy.deepcopy(found.value)  # a function that changes it changes only its own
            case ex.Ref() | ex.Parameter():
                value = env[found.node] if isinstance(found, ex.Ref) else self.params[found.name]
                for step in found.path:
                    value = getattr(value, step.name) if isinstance(step, ex.Attribute) else value[step.key]
                return value
            case ex.Items():
                return {"list": list, "tuple": tuple, "set": set}[found.type](self.value(i, env) for i in found.items)
            case ex.Entries():
                return {self.value(k, env): self.value(v, env) for k, v in found.entries}
            case ex.Comparison():
                return _COMPARE[found.op](self.value(found.left, env), self.value(found.right, env))
            case ex.Combination():
                test = all if found.op == "and" else any
                return test(self.value(term, env) for term in found.terms)
            case ex.Negation():
                return not self.value(found.term, env)

    def evaluate(
        self, found: ex.Expression, env: dict[int, Any], label: str, frame: Frame, handled: bool = False
    ) -> Any:
        for ref in ex.references(found):
            if isinstance(ref, ex.Ref) and isinstance(env[ref.node], Fail):
                return env[ref.node]
        try:
            return self.value(found, env)
        except Exception:
            self.fail((label, frame), handled)
            return Fail()

    def fail(self, origin: tuple[str, Frame], handled: bool) -> None:
        (self.outcome.handled if handled else self.outcome.errors).append(origin)

    # statements

    def run(self, body: tuple[statements.Statement, ...], env: dict[int, Any], frame: Frame) -> None:
        for statement in body:
            label = statement.label
            match statement:
                case statements.CallStatement():
                    env[statement.id] = self.call(statement, env, label, frame)
                case statements.YieldStatement():
                    self.emit(statement, env, label, frame)
                case statements.ForEachStatement():
                    self.loop(statement, env, label, frame)
                case statements.RepeatStatement():
                    env[statement.id] = self.repeat(statement, env, label, frame)
                case statements.IfStatement():
                    cond = self.evaluate(statement.cond, env, label, frame, self.handling.block(statement.id))
                    env[("branch", statement.id)] = cond  # type: ignore[index]
                    if isinstance(cond, Fail):
                        self.lose(statement.body, frame)
                        self.lose(statement.otherwise, frame)
                        self.spoil((*statement.body, *statement.otherwise), env, cond)
                    else:
                        self.run(statement.body if cond else statement.otherwise, env, frame)
                case statements.CacheStatement():
                    env[statement.id] = self.cached(statement, env, label, frame)
                case statements.CollectStatement():
                    env[statement.id] = self.collect(statement, env, label, frame)
                case statements.GatherStatement():
                    env[statement.id] = self.gather(statement, env, label, frame)
                case statements.WaitStatement():
                    env[statement.id] = self.wait(statement, env, label, frame)
                case statements.SleepStatement():
                    seconds = self.evaluate(statement.seconds, env, label, frame, self.handling.value(statement.id))
                    env[statement.id] = seconds if isinstance(seconds, Fail) else None
                case statements.ChoiceStatement():
                    env[statement.id] = cond = env[("branch", statement.branch)]  # type: ignore[index]
                    if not isinstance(cond, Fail):
                        part = statement.value if cond else statement.otherwise
                        handled = self.handling.value(statement.id)
                        env[statement.id] = self.evaluate(part, env, label, frame, handled)

    def collect(self, statement: statements.CollectStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        loop_frames = env[("elements", statement.node)]  # type: ignore[index]
        if isinstance(loop_frames, Fail):
            return loop_frames
        handled = statement.errors != "fail" or self.handling.value(statement.id)
        part = ex.Ref(node=statement.node, path=statement.path)
        values = [
            self.evaluate(part, e, label, (*frame, index), handled)
            for index, e in enumerate(loop_frames)
            if statement.node in e
        ]
        failed = [v for v in values if isinstance(v, Fail)]
        if failed and statement.errors == "fail":
            return failed[0]
        if statement.errors == "skip":
            return [v for v in values if not isinstance(v, Fail)]
        return [FailureInfo("", "", "", (), "", "") if isinstance(v, Fail) else v for v in values]

    def gather(self, statement: statements.GatherStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        values = [env[node] for node in statement.calls]
        good = [Reply("", value) for value in values if not isinstance(value, Fail)]
        if len(good) < statement.at_least:
            self.fail((label, frame), self.handling.value(statement.id))
            return Fail()
        return Replies(good, [FailureInfo("", "", "", (), "", "")] * (len(values) - len(good)))

    def wait(self, statement: statements.WaitStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        """Nobody sends an event whose name begins with "never"; the value of others follows from the name."""
        handled = statement.fallback is not None or self.handling.value(statement.id)
        if statement.timeout is not None:
            seconds = self.evaluate(statement.timeout, env, label, frame, handled)
            if isinstance(seconds, Fail):
                return seconds
        if not statement.event.startswith("never"):
            self.outcome.events.append((frame[0], statement.event))
            return value_of(statement.event)
        self.fail((label, frame), handled)
        return Fail() if statement.fallback is None else self.value(statement.fallback, env)

    def spoil(self, body: tuple[statements.Statement, ...], env: dict[int, Any], fail: Fail) -> None:
        """Nothing of a branch runs, because of an error: so it is with the values of its loop's elements."""
        for statement in _of_this_loop(body):
            env[statement.id] = fail

    def call(self, statement: statements.CallStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        handled = statement.fallback is not None or self.handling.value(statement.id)
        instead = Fail() if statement.fallback is None else self.value(statement.fallback, env)
        args = {}
        for expression in statement.args.values():
            for ref in ex.references(expression):
                if isinstance(ref, ex.Ref) and isinstance(env[ref.node], Fail):
                    return env[ref.node]
        for name, expression in statement.args.items():
            args[name] = self.evaluate(expression, env, label, frame, handled)
            if isinstance(args[name], Fail):
                return instead
        readers = {name: value.read() if isinstance(value, Sequence) else value for name, value in args.items()}
        try:
            found = self.functions[statement.operation](**readers)
        except StreamFails as failure:
            self.report(failure, handled)
            return instead
        except Exception:
            self.fail((label, frame), handled)
            return instead
        if isinstance(found, Iterator):
            found = Sequence(found, label, frame, self.handling.value(statement.id))
            self.sequences.append(found)
        return found

    def report(self, failure: StreamFails, handled: bool) -> None:
        if handled:
            self.outcome.handled.append(failure.sequence.origin)
        elif failure.sequence.origin not in self.outcome.errors:
            self.outcome.errors.append(failure.sequence.origin)

    def emit(self, statement: statements.YieldStatement, env: dict[int, Any], label: str, frame: Frame) -> None:
        value = self.evaluate(statement.value, env, label, frame)
        if isinstance(value, Fail):
            self.outcome.lost.append((statement.place, frame))
        elif isinstance(value, Sequence):
            try:
                for index, item in enumerate(value.read()):
                    self.outcome.results.append((statement.place, (*frame, index), item))
            except StreamFails as failure:
                self.report(failure, False)
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
                    self.report(failure, sequence.handled)

    def lose(self, body: tuple[statements.Statement, ...], frame: Frame) -> None:
        """Nothing of a block runs, because of an error: its yields are lost."""
        for statement in statements.walk_statements(body):
            if isinstance(statement, statements.YieldStatement):
                self.outcome.lost.append((statement.place, frame))

    def mark(self, body: tuple[statements.Statement, ...], loop: int, env: dict[int, Any], elements: Any) -> None:
        env[("elements", loop)] = elements  # type: ignore[index]
        for statement in _of_this_loop(body):
            env[("elements", statement.id)] = elements  # type: ignore[index]

    def loop(self, statement: statements.ForEachStatement, env: dict[int, Any], label: str, frame: Frame) -> None:
        seq = self.evaluate(statement.seq, env, label, frame, self.handling.block(statement.id))
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
            self.report(failure, self.handling.block(statement.id))
            self.lose(statement.body, frame)
            self.mark(statement.body, statement.id, env, Fail())
        else:
            self.mark(statement.body, statement.id, env, elements)

    def repeat(self, statement: statements.RepeatStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        block, result = self.handling.block(statement.id), self.handling.value(statement.id)
        current = self.evaluate(statement.carry, env, label, frame, block)
        times = None if statement.times is None else self.evaluate(statement.times, env, label, frame, block)
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
            following = self.evaluate(statement.next, inner, label, here, result)
            stop = None if statement.until is None else self.evaluate(statement.until, inner, label, here, result)
            if isinstance(following, Fail) or isinstance(stop, Fail):
                current = Fail()
                break
            current = following
            index += 1
            if stop:
                break
        self.mark(statement.body, statement.id, env, elements)
        return current

    def cached(self, statement: statements.CacheStatement, env: dict[int, Any], label: str, frame: Frame) -> Any:
        key = self.evaluate(statement.key, env, label, frame, self.handling.block(statement.id))
        if isinstance(key, Fail):
            self.lose(statement.body, frame)
            self.spoil(statement.body, env, key)
            return key
        if key in self.cache:
            return self.cache[key]
        inner = dict(env)
        self.run(statement.body, inner, frame)
        assert statement.store is not None
        value = self.evaluate(statement.store, inner, label, frame, self.handling.value(statement.id))
        if not isinstance(value, Fail):
            self.cache[key] = value
        return value


def _of_this_loop(body: tuple[statements.Statement, ...]) -> Iterator[statements.Statement]:
    for statement in body:
        yield statement
        if isinstance(statement, statements.IfStatement):
            yield from _of_this_loop(statement.body)
            yield from _of_this_loop(statement.otherwise)
        elif isinstance(statement, statements.CacheStatement):
            yield from _of_this_loop(statement.body)


def value_of(event: str) -> int:
    """Return the value that every event of a name has."""
    return len(event) + sum(map(ord, event)) % 5


def interpret(pipeline: Pipeline, functions: Mapping[str, Callable[..., Any]], sets: list[dict[str, Any]]) -> Outcome:
    """Runs a pipeline for all parameter sets."""
    whole = Outcome()
    cache: dict[Any, Any] = {}
    defaults = {
        part.name: part.default.value
        for statement in statements.walk_statements(pipeline.body)
        for _, expression, _ in statement.expressions()
        for part in ex.references(expression)
        if isinstance(part, ex.Parameter) and part.default is not None
    }
    for index, params in enumerate(sets):
        reference = Reference(functions, copy.deepcopy(defaults) | params, Handling(analyse(pipeline)))
        reference.cache = cache
        reference.run(pipeline.body, {}, (index,))
        reference.run_the_unread()
        whole.results += reference.outcome.results
        whole.lost += reference.outcome.lost
        whole.errors += reference.outcome.errors
        whole.handled += reference.outcome.handled
        whole.events += reference.outcome.events
    return whole
