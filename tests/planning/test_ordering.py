"""Which calls report their end to what is ordered after them, and which streams run ahead of their readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Repeat, TryFromCache, Yield, collect
from dfm_async.net import spec
from dfm_async.planning.prepare import prepare

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


Write = Callable[..., object]


def calls_of(write: Write, streams: int = 1) -> list[spec.Call]:
    """Return the calls of ``source`` in a pipeline that reads some streams."""
    with Pipeline() as pipeline:
        write(*(source(3) for _ in range(streams)))
    return [
        transition.action
        for net in prepare(pipeline, fed, "a").nets
        for transition in net.transitions
        if isinstance(transition.action, spec.Call) and transition.action.operation == "source"
    ]


def the_call(write: Write) -> spec.Call:
    (found,) = calls_of(write)
    return found


def beside_readers(values: Any) -> None:
    note(after=values)
    Yield(total(mapped(values)))


def in_each_element_of_a_loop(values: Any) -> None:
    with ForEach([1, 2]):
        note(after=values)
    Yield(total(values))


WAITING: dict[str, Write] = {
    "alone": lambda values: note(after=values),
    "beside readers": beside_readers,
    # the reader returns a number, so it goes on by itself
    "joined behind a plain reader": lambda values: total([total(values)], note(after=values)),
    "in each element of a loop": in_each_element_of_a_loop,
}


@pytest.mark.parametrize("order", WAITING)
def test_a_stream_waits_for_its_readers_if_they_need_nothing_that_comes_after_it(order: str) -> None:
    call = the_call(WAITING[order])
    assert call.ended is not None
    assert not call.runs_ahead


@pytest.mark.parametrize("write", [total, lambda values: total(values, after=values)], ids=["unordered", "itself"])
def test_a_call_that_nothing_waits_for_reports_no_end(write: Write) -> None:
    assert the_call(write).ended is None


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


AHEAD: dict[str, Write] = {
    "by value": lambda values: total(values, note(after=values)),
    "by order": lambda values: total(values, after=note(after=values)),
    "by a chain": lambda values: total(mapped(mapped(values)), note(note(note(after=values)))),
    "by a branch": by_a_branch,
    "by the body of its loop": by_the_body_of_its_loop,
    "by a collected value": by_a_collected_value,
    "by a repeat": by_a_repeat,
    "by a cache": by_a_cache,
}


@pytest.mark.parametrize("order", AHEAD)
def test_a_stream_runs_ahead_if_a_reader_needs_what_comes_after_it(order: str) -> None:
    assert the_call(AHEAD[order]).runs_ahead


def crossed_yields(first: Any, second: Any) -> None:
    Yield(first, place="first", after=second)
    Yield(second, place="second", after=first)


def crossed_loops(first: Any, second: Any) -> None:
    with ForEach(first):
        note(after=second)
    with ForEach(second):
        note(after=first)


CROSSED: dict[str, Write] = {
    "readers": lambda first, second: [total(first, after=second), total(second, after=first)],
    "values": lambda first, second: [total(first, note(after=second)), total(second, note(after=first))],
    "mappers": lambda first, second: [
        total(mapped(mapped(values)), after=other) for values, other in ((first, second), (second, first))
    ],
    "yields": crossed_yields,
    "loops": crossed_loops,
}


@pytest.mark.parametrize("readers", CROSSED)
def test_streams_run_ahead_if_their_readers_wait_for_each_other(readers: str) -> None:
    assert [call.runs_ahead for call in calls_of(CROSSED[readers], 2)] == [True, True]


def test_streams_run_ahead_if_their_readers_wait_in_a_ring() -> None:
    def ring(*streams: Any) -> None:
        for number, values in enumerate(streams):
            total(values, after=streams[number - 1])

    assert [call.runs_ahead for call in calls_of(ring, 3)] == [True] * 3


def test_streams_wait_for_their_readers_if_they_are_read_one_after_the_other() -> None:
    def in_turn(first: Any, second: Any, third: Any) -> None:
        total(mapped(first))
        total(mapped(second), after=first)
        total(third, after=second)

    assert [call.runs_ahead for call in calls_of(in_turn, 3)] == [False] * 3


def test_streams_of_different_elements_do_not_need_each_other() -> None:
    def in_a_loop() -> None:
        with ForEach([1, 2], concurrency=1) as n:
            values = source(n)
            note(after=values)
            total(values)

    assert [call.runs_ahead for call in calls_of(in_a_loop, 0)] == [False]


def test_only_the_end_of_a_call_is_sent_to_what_is_ordered_after_it() -> None:
    with Pipeline() as pipeline:
        note("x", after=total([1], PlaceParam("x")))
    here, there = prepare(pipeline, fed, "a").nets
    assert [place.label for place in here.places if place.routes] == ["total#0 ended"]
    assert [place.label for place in there.places] == ["total#0 ended"]
