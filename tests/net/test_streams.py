"""Streams in the token game: all games of a plan, with messages that arrive in any order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfm_async import ForEach, Pipeline, PipelineError, Yield
from dfm_async.language.expressions import Ref, references
from dfm_async.language.statements import CallStatement, Statement, YieldStatement, walk_statements
from dfm_async.model.events import ErrorRecord
from dfm_async.net import effects as fx
from dfm_async.net.game_state import Control, PendingActivity
from dfm_async.net.tokens import StreamValue
from tests.net.table import Table
from tests.property import random_pipelines as r
from tests.reference import Frame, Sequence, StreamFails, interpret

either_order = pytest.mark.parametrize(
    "choose", [lambda _: 0, lambda count: count - 1], ids=["oldest first", "newest first"]
)


class Strand(StreamValue):
    """A stream at one location; ``origin`` is where it comes from, if that is another location."""

    def __init__(self, sequence: Sequence, origin: tuple[str, Strand] | None = None) -> None:
        self.sequence = sequence
        self.origin = origin


class StreamTable(Table):
    """Reads streams at once, but delivers everything that is said about them in any order."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline, self.call, r.fed)
        self.unreleased: set[Strand] = set()
        self.made: dict[Sequence, tuple[str, PendingActivity, Strand]] = {}
        self.told: set[Sequence] = set()
        self.records: dict[Sequence, ErrorRecord] = {}
        self.feeding: dict[Control, Iterator[Any]] = {}
        self.held: set[str] = set()
        """Operations that do not return."""
        self.waiting: list[tuple[str, Any, str, dict[str, Any]]] = []
        self.after = {
            statement.label: set(statement.after) - _read_by(statement)
            for statement in walk_statements(pipeline.body)
            if isinstance(statement, (CallStatement, YieldStatement))
        }
        self.labels = {statement.id: statement.label for statement in walk_statements(pipeline.body)}

    def call(self, operation: str, args: dict[str, Any]) -> Any:
        return r.functions[operation](**args)

    def play(self, choose: Any) -> None:
        while self.waiting and not self.held:
            self.finish(*self.waiting.pop())
        while self.pending:
            super().play(choose)
            self.tell_ends()

    def take(self, site: str) -> None:
        super().take(site)
        self.tell_ends()

    def tell_ends(self) -> None:
        for sequence, (site, _, strand) in self.made.items():
            if sequence.ended and sequence not in self.told:
                self.told.add(sequence)
                error = None if sequence.failure is None else self.record(sequence.failure)
                self.later(site, self.games[site].stream_ended, strand, error)

    def record(self, failure: StreamFails) -> ErrorRecord:
        sequence = failure.sequence
        if sequence not in self.records:
            site, activity, _ = self.made[sequence]
            self.records[sequence] = self.games[site].error(activity, failure)
        return self.records[sequence]

    def read(self, strand: Strand) -> Iterator[Any]:
        for item in strand.sequence.read():
            assert strand in self.unreleased, "it was closed under its reader"
            yield item

    def check_order(self, label: str, frame: Frame) -> None:
        """What is ordered after a stream runs when the stream has ended, or nobody reads it any more."""
        for node in self.after[label]:
            for sequence, (_, _, strand) in self.made.items():
                where = sequence.origin[1]
                if sequence.origin[0] == self.labels[node] and where == frame[: len(where)]:
                    assert sequence.ended or strand not in self.unreleased

    def carry_out(self, site: str, effect: fx.Effect) -> None:
        game = self.games[site]
        match effect:
            case fx.EmitValue(activity, point, frame, Strand() as strand):
                self.check_order(activity.label, frame)
                self.pending.append(lambda: self.emit(site, activity, game.program.points[point].place, frame, strand))
            case fx.SendToken(place, frame, Strand() as strand, routes):
                for there in routes:
                    other = str(self.plan.locations[there])
                    copy = Strand(strand.sequence, (site, strand))
                    self.unreleased.add(copy)
                    self.later(other, self.games[other].token, place, frame, copy)
            case fx.Pull(control, count):
                self.pending.append(lambda: self.feed(site, control, count))
            case fx.RunStream(Strand() as strand):
                self.pending.append(lambda: self.run_to_end(site, strand))
            case fx.CloseStream(Strand() as strand, read):
                assert strand in self.unreleased, "it is released once"
                self.unreleased.discard(strand)
                if strand.origin is not None:
                    producer, original = strand.origin
                    self.later(producer, self.games[producer].stream_released, original, read)
            case fx.ExpectReaders() | fx.Abandon():
                pass
            case _:
                if isinstance(effect, (fx.Invoke, fx.EmitValue)):
                    self.check_order(effect.activity.label, effect.activity.frame)
                super().carry_out(site, effect)

    def emit(self, site: str, activity: PendingActivity, place: str, frame: Frame, strand: Strand) -> None:
        game = self.games[site]
        try:
            for index, item in enumerate(self.read(strand)):
                self.results.append((place, (*frame, index), item))
        except StreamFails as failure:
            game.fail(activity, self.record(failure))
        else:
            game.complete(activity)
        self.take(site)

    def feed(self, site: str, control: Control, count: int) -> None:
        if control.exhausted:  # an earlier request came to the end
            return
        game = self.games[site]
        elements = self.feeding.setdefault(control, self.read(control.source))
        found: list[Any] = []
        try:
            while len(found) < count:
                found.append(next(elements))
        except StopIteration:
            game.feed(control, found)
            game.feed_end(control, None)
        except StreamFails as failure:
            game.feed(control, found)
            game.feed_end(control, self.record(failure))
        else:
            game.feed(control, found)
        self.take(site)

    def run_to_end(self, site: str, strand: Strand) -> None:
        while strand.sequence.has(len(strand.sequence.items)):
            pass
        self.take(site)

    def finish(self, site: str, activity: Any, operation: str, args: dict[str, Any]) -> None:
        if operation in self.held:
            self.waiting.append((site, activity, operation, args))
            return
        game = self.games[site]
        given = {name: self.read(value) if isinstance(value, Strand) else value for name, value in args.items()}
        try:
            value = self.run(operation, given)
        except StreamFails as failure:
            game.fail(activity, self.record(failure))
        except (ValueError, TypeError, TimeoutError) as error:
            game.fail(activity, game.error(activity, error))
        else:
            if isinstance(value, Iterator):
                sequence = Sequence(value, activity.label, activity.frame)
                value = Strand(sequence)
                self.unreleased.add(value)
                self.made[sequence] = (site, activity, value)
            game.complete(activity, value)
        self.take(site)

    def check_done(self, sets: int) -> None:
        super().check_done(sets)
        assert not self.unreleased, "every stream is released, at every location"
        assert all(game.streams == 0 for game in self.games.values())


def _read_by(statement: Statement) -> set[int]:
    """The nodes that a statement reads: it cannot wait for their ends."""
    found = (ref for _, expression, _ in statement.expressions() for ref in references(expression))
    return {ref.node for ref in found if isinstance(ref, Ref)}


def play(pipeline: Pipeline, params: list[dict[str, Any]], choose: Any) -> StreamTable:
    table = StreamTable(pipeline)
    table.open(*params)
    table.play(choose)
    table.check_done(len(params))
    return table


@either_order
def test_a_stream_is_released_and_forgotten_while_its_frame_goes_on(choose: Any) -> None:
    with Pipeline() as pipeline:
        values = r.stream(3, site="archive")
        r.total(r.tripled(values, site="lab"), site="archive")
        r.inc(1)
        r.double(1)
    table = StreamTable(pipeline)
    table.held = {"inc", "double"}
    table.open({})
    table.play(choose)
    assert table.done == []
    assert not table.unreleased
    strands = [weakref.ref(strand) for _, _, strand in table.made.values()]
    table.made.clear()
    gc.collect()
    assert [strand() for strand in strands] == [None, None]
    table.held.clear()
    table.play(choose)
    table.check_done(1)


def test_a_long_chain_of_generators_is_released_at_once() -> None:
    with Pipeline() as pipeline:
        values = r.stream(1, site="archive")
        for _ in range(1500):
            values = r.tripled(values, site="archive")
        Yield(r.unread(values, site="archive"))
    table = play(pipeline, [{}], lambda _: 0)
    assert [value for _, _, value in table.results] == [4]


def test_a_second_stream_for_the_same_frame_is_closed() -> None:
    with Pipeline() as pipeline:
        Yield(r.total(r.stream(1, site="archive"), site="lab"))
    game = StreamTable(pipeline).games["lab"]
    (place,) = (place.index for place in game.program.places.values() if place.label == "stream#0")
    one, other = (Strand(Sequence(iter(()), "stream#0", (0,))) for _ in range(2))
    game.open(0, [])
    game.token(place, (0,), one)
    (call,) = (effect for effect in game.take() if isinstance(effect, fx.Invoke))
    game.token(place, (0,), other)
    assert game.take() == [fx.CloseStream(other, False)]
    game.complete(call.activity, 0)
    assert fx.CloseStream(one, True) in game.take()


@either_order
def test_a_loop_may_end_before_the_stream_comes_that_its_body_reads(choose: Any) -> None:
    with Pipeline() as pipeline:
        values = r.leaky(1, site="archive")
        with ForEach([]):
            r.total(values, site="lab")
        with ForEach([1, 2]):
            Yield(r.unread(r.tripled(values, site="desk"), site="lab"))
    table = play(pipeline, [{}], choose)
    assert [value for _, _, value in table.results] == [4, 4]
    assert table.errors == []


@either_order
@pytest.mark.parametrize("read", ["call", "generator", "yield", "loop"])
def test_each_element_of_a_loop_may_read_a_stream_from_outside(choose: Any, read: str) -> None:
    with Pipeline() as pipeline:
        values = r.stream(3, site="archive")
        with ForEach([1, 2, 3], concurrency=1):
            if read == "call":
                Yield(r.total(values, site="lab"))
            elif read == "generator":
                Yield(r.total(r.tripled(values, site="lab"), site="desk"))
            elif read == "yield":
                Yield(values)
            else:
                with ForEach(values) as value:
                    Yield(r.inc(value))
    table = play(pipeline, [{}], choose)
    expected = interpret(pipeline, r.functions, [{}])
    assert sorted(table.results) == sorted(expected.results)
    assert table.errors == []


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(
    pipeline=r.pipelines(),
    params=st.lists(st.fixed_dictionaries({"x": st.integers(0, 9), "y": st.integers(0, 9)}), max_size=2),
    random=st.randoms(use_true_random=False),
)
def test_streams_end_and_are_released_once_in_whatever_order_messages_come(
    pipeline: Pipeline, params: list[dict[str, Any]], random: Any
) -> None:
    try:
        table = play(pipeline, params, random.randrange)
    except PipelineError:  # the maker collects whatever it finds
        return
    expected = interpret(pipeline, r.functions, params)
    assert sorted(table.results) == sorted(expected.results)
    assert sorted(table.lost) == sorted(expected.lost)
    assert sorted(set(table.errors)) == sorted(expected.errors)
    assert sorted(table.handled) == sorted(expected.handled)
