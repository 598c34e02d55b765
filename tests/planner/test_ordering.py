"""Which calls report their end to what is ordered after them, and which streams run ahead of their readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Repeat, TryFromCache, Yield, collect
from dfm_async.net import spec
from dfm_async.planner.plan import prepare

fed = Federation("ordering")
a, b = fed.site("a"), fed.site("b")


@a.operation
def source(n: int) -> Any:
    yield from range(n)


@b.operation
def note(text: Any = None) -> str:
    return str(text)


@a.operation
def mapped(values: Any) -> Any:
    yield from values


@a.operation
def total(values: Any, other: Any = None) -> int:
    return sum(values)


def calls_of(pipeline: Pipeline) -> list[spec.Call]:
    return [
        transition.action
        for net in prepare(pipeline, fed, "a").nets
        for transition in net.transitions
        if isinstance(transition.action, spec.Call) and transition.action.operation == "source"
    ]


def the_call(pipeline: Pipeline) -> spec.Call:
    (found,) = calls_of(pipeline)
    return found


def unordered(values: Any) -> None:
    total(values)


def alone(values: Any) -> None:
    note(after=values)


def beside_readers(values: Any) -> None:
    note(after=values)
    Yield(total(mapped(values)))


def joined_behind_a_plain_reader(values: Any) -> None:
    """The reader returns a number, so it goes on by itself."""
    total([total(values)], note(after=values))


def in_each_element_of_a_loop(values: Any) -> None:
    with ForEach([1, 2]):
        note(after=values)
    Yield(total(values))


def itself(values: Any) -> None:
    total(values, after=values)


@pytest.mark.parametrize(
    "write", [alone, beside_readers, joined_behind_a_plain_reader, in_each_element_of_a_loop], ids=lambda f: f.__name__
)
def test_a_stream_waits_for_its_readers_if_they_need_nothing_that_comes_after_it(write: Callable[[Any], None]) -> None:
    with Pipeline() as pipeline:
        write(source(3))
    call = the_call(pipeline)
    assert call.ended is not None
    assert not call.runs_ahead


@pytest.mark.parametrize("write", [unordered, itself], ids=lambda f: f.__name__)
def test_a_call_that_nothing_waits_for_reports_no_end(write: Callable[[Any], None]) -> None:
    with Pipeline() as pipeline:
        write(source(3))
    assert the_call(pipeline).ended is None


def by_value(values: Any) -> None:
    total(values, note(after=values))


def by_order(values: Any) -> None:
    total(values, after=note(after=values))


def by_a_chain(values: Any) -> None:
    total(mapped(mapped(values)), note(note(note(after=values))))


def by_a_branch(values: Any) -> None:
    with If(note(after=values) == "x"):
        Yield(values)


def by_the_body_of_its_loop(values: Any) -> None:
    behind = note(after=values)
    with ForEach(values):
        note(behind)


def by_a_collected_value(values: Any) -> None:
    with ForEach([1]):
        behind = note(after=values)
    total(values, collect(behind))


def by_a_repeat(values: Any) -> None:
    with Repeat("x", times=2) as current:
        current.next(note(current, after=values))
    total(values, current)


def by_a_cache(values: Any) -> None:
    with TryFromCache(key=1) as found:
        note(after=values)
        found.store(total(values))


@pytest.mark.parametrize(
    "write",
    [
        by_value,
        by_order,
        by_a_chain,
        by_a_branch,
        by_the_body_of_its_loop,
        by_a_collected_value,
        by_a_repeat,
        by_a_cache,
    ],
    ids=lambda f: f.__name__,
)
def test_a_stream_runs_ahead_if_a_reader_needs_what_comes_after_it(write: Callable[[Any], None]) -> None:
    with Pipeline() as pipeline:
        write(source(3))
    assert the_call(pipeline).runs_ahead


def crossed() -> None:
    first, second = source(3), source(3)
    total(first, after=second)
    total(second, after=first)


def crossed_by_values() -> None:
    first, second = source(3), source(3)
    total(first, note(after=second))
    total(second, note(after=first))


def crossed_behind_mappers() -> None:
    first, second = source(3), source(3)
    total(mapped(mapped(first)), after=second)
    total(mapped(mapped(second)), after=first)


def crossed_yields() -> None:
    first, second = source(3), source(3)
    Yield(first, place="first", after=second)
    Yield(second, place="second", after=first)


def crossed_loops() -> None:
    first, second = source(3), source(3)
    with ForEach(first):
        note(after=second)
    with ForEach(second):
        note(after=first)


def crossed_in_a_ring() -> None:
    first, second, third = source(3), source(3), source(3)
    total(first, after=second)
    total(second, after=third)
    total(third, after=first)


@pytest.mark.parametrize(
    "write",
    [crossed, crossed_by_values, crossed_behind_mappers, crossed_yields, crossed_loops, crossed_in_a_ring],
    ids=lambda f: f.__name__,
)
def test_streams_run_ahead_if_their_readers_wait_for_each_other(write: Callable[[], None]) -> None:
    with Pipeline() as pipeline:
        write()
    assert all(call.runs_ahead for call in calls_of(pipeline))


def test_streams_wait_for_their_readers_if_they_are_read_one_after_the_other() -> None:
    with Pipeline() as pipeline:
        first, second, third = source(3), source(3), source(3)
        total(mapped(first))
        total(mapped(second), after=first)
        total(third, after=second)
    assert not any(call.runs_ahead for call in calls_of(pipeline))


def test_streams_of_different_elements_do_not_need_each_other() -> None:
    with Pipeline() as pipeline, ForEach([1, 2], concurrency=1) as n:
        values = source(n)
        note(after=values)
        total(values)
    assert not the_call(pipeline).runs_ahead


def test_only_the_end_of_a_call_is_sent_to_what_is_ordered_after_it() -> None:
    with Pipeline() as pipeline:
        note("x", after=total([1], PlaceParam("x")))
    here, there = prepare(pipeline, fed, "a").nets
    assert [place.label for place in here.places if place.routes] == ["total#0 ended"]
    assert [place.label for place in there.places] == ["total#0 ended"]
