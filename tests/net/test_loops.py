"""Loops in the token game: limits, sources, and members at other locations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import ForEach, Pipeline, PlaceParam, Yield, collect
from dfm_async.net import effects as fx
from dfm_async.net.game import Game
from dfm_async.net.tokens import SKIPPED, Failed
from tests.net.table import (
    Table,
    any_order,
    at_a,
    at_b,
    game_of,
    identity,
    instances,
    invoked,
    of,
    opened,
    played,
    settle,
)


def looped(concurrency: int | None) -> Pipeline:
    with Pipeline() as p:
        with ForEach(PlaceParam("seq"), concurrency=concurrency) as x:
            value = at_b(at_a(x))
        Yield(collect(value))
    return p


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_never_more_elements_are_in_flight_than_the_limit_allows(limit: int, count: int, data: st.DataObject) -> None:
    table = Table(looped(limit), identity)
    open_elements: set[int] = set()
    most = 0
    carry_out = table.carry_out

    def watch(site: str, effect: fx.Effect) -> None:
        nonlocal most
        if isinstance(effect, fx.Invoke) and effect.action.operation == "at_a":
            open_elements.add(effect.activity.frame[-1])
            most = max(most, len(open_elements))
        elif isinstance(effect, fx.SendElementDone):
            # The last that this element asks for; the control may go on only after it.
            open_elements.discard(effect.frame[-1])
        carry_out(site, effect)

    table.carry_out = watch  # type: ignore[method-assign]
    table.open({"seq": list(range(count))})
    table.play(any_order(data))
    assert most <= limit
    assert most == min(limit, count), "and the limit is used"
    assert table.results == [("yield", (0,), list(range(count)))]
    assert len(table.calls) == 2 * count
    table.check_done(1)


@given(st.integers(1, 3), st.integers(0, 10), st.data())
def test_a_source_is_asked_for_no_more_elements_than_there_is_room_for(
    limit: int, count: int, data: st.DataObject
) -> None:
    with Pipeline() as p, ForEach(PlaceParam("seq"), concurrency=limit) as x:
        at_a(x)
    game = game_of(p)
    game.open(0, [iter(range(count))])  # an iterator of the user: its elements may block, so the runtime fetches them
    running: list[Any] = []
    asked = fed_in = 0
    calls = []
    control: Any = None
    ended = False
    while True:
        for effect in game.take():
            if isinstance(effect, fx.Pull):
                control = effect.control
                asked += effect.count
            elif isinstance(effect, fx.Invoke):
                running.append(effect.activity)
                calls.append(effect.args["x"])
            elif isinstance(effect, fx.FrameDone):
                assert ended
                assert calls == list(range(count))
                assert game.live == 0
                return
        assert len(running) + (asked - fed_in) <= limit
        choices = []
        if running:
            choices.append("complete")
        if not ended and (asked > fed_in or fed_in == count):
            choices.append("feed")
        assert choices, "the game waits for nothing"
        if data.draw(st.sampled_from(choices)) == "complete":
            game.complete(running.pop(data.draw(st.integers(0, len(running) - 1))), None)
        elif fed_in < count:
            game.feed(control, [fed_in])
            fed_in += 1
        else:
            ended = True
            game.feed_end(control, None)


def test_a_source_that_fails_ends_its_loop_after_the_elements_that_it_gave() -> None:
    with Pipeline() as p:
        with ForEach(PlaceParam("seq")) as x:
            Yield(x, place="each")
        Yield(collect(x), place="all")
    game, effects = opened(p, iter([1]))
    (pull,) = of(effects, fx.Pull)
    game.feed(pull.control, ["one"])
    effects = game.take()
    game.feed_end(pull.control, game.error(pull.control.activity, OSError("gone")))
    effects += game.take()
    assert settle(game, effects) == [(0, "one")]
    effects += game.take()
    assert [(e.error.type_name, e.error.node) for e in of(effects, fx.ReportError)] == [("OSError", "ForEach#0")]
    assert sorted(e.point for e in of(effects, fx.EmitFailed)) == [0, 1]
    assert game.live == 0


@pytest.mark.parametrize("sequence", [[], (), range(0), {}, set()])
def test_a_loop_over_nothing_ends_at_once_with_an_empty_list(sequence: Any) -> None:
    table = played(looped(None), {"seq": sequence})
    assert table.results == [("yield", (0,), [])]


@pytest.mark.parametrize("value", [5, None, "text", b"bytes"])
def test_what_has_no_elements_is_an_error_of_the_loop(value: Any) -> None:
    table = played(looped(None), {"seq": value})
    assert table.errors == [("ForEach#0", (0,))]
    assert table.lost == [("yield", (0,))]


def remote() -> tuple[Game, int, int, int]:
    """The game of b in a loop that a drives: the places of the element and of an outer value, and the loop."""
    with Pipeline() as p:
        outer = at_a("outer")
        with ForEach(at_a("seq")) as x:
            value = at_b(x, outer)
        Yield(collect(value))
    game = game_of(p, "b")
    places = {place.label: place.index for place in game.program.net.places}
    return game, places["ForEach#2 element"], places["at_a#0"], game.program.net.loops[0].index


@given(st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n + 3)))), st.data())
def test_a_remote_member_gives_the_same_result_in_whatever_order_tokens_and_the_end_of_the_loop_come(
    setup: tuple[int, list[int]], data: st.DataObject
) -> None:
    count, order = setup
    game, element, outer, loop = remote()
    events: list[Callable[[], None]] = [
        *(functools.partial(game.token, element, (0, i), f"e{i}") for i in range(count)),
        lambda: game.loop_ended(loop, (0,), count, None),
        lambda: game.token(outer, (0,), "o"),
        lambda: game.open(0, []),
    ]
    effects: list[fx.Effect] = []
    running: list[Any] = []
    going_on = functools.partial(data.draw, st.booleans())

    def take() -> None:
        for effect in game.take():
            effects.append(effect)
            if isinstance(effect, fx.Invoke):
                running.append(effect)

    for number in order:
        events[number]()
        take()
        while running and going_on():
            call = running.pop(data.draw(st.integers(0, len(running) - 1)))
            game.complete(call.activity, call.args["x"] + call.args["y"])
            take()
    while running:
        call = running.pop()
        game.complete(call.activity, call.args["x"] + call.args["y"])
        take()
    (emit,) = of(effects, fx.EmitValue)
    assert emit.value == [f"e{i}o" for i in range(count)]
    assert emit.frame == (0,)
    assert sorted(e.frame for e in of(effects, fx.SendElementDone)) == [(0, i) for i in range(count)]
    assert sorted(frame for _, frame, _ in invoked(effects)) == [(0, i) for i in range(count)]
    assert not of(effects, fx.FrameDone)
    game.complete(emit.activity)
    assert game.take() == [fx.FrameDone(0)]
    assert game.live == 0


@given(st.permutations(range(3)), st.sampled_from(["skipped", "failed"]))
def test_a_remote_member_of_a_loop_that_never_ran_is_done_with_it(order: list[int], how: str) -> None:
    game, _, outer, loop = remote()
    error = game.describe(ValueError("x"), "op", "label", (0,))
    outcome = SKIPPED if how == "skipped" else Failed(error)
    events: list[Callable[[], None]] = [
        lambda: game.loop_ended(loop, (0,), 0, outcome),
        lambda: game.token(outer, (0,), "o"),
        lambda: game.open(0, []),
    ]
    effects: list[fx.Effect] = []
    for number in order:
        events[number]()
        effects += game.take()
    assert len(of(effects, fx.EmitFailed)) == (how == "failed")
    assert effects[-1] == fx.FrameDone(0) or of(effects, fx.FrameDone) == [fx.FrameDone(0)]
    assert not of(effects, fx.Invoke)
    assert game.live == 0


def test_a_remote_member_frees_its_elements_too() -> None:
    game, element, outer, loop = remote()
    game.open(0, [])
    game.token(outer, (0,), "o")
    for i in range(50):
        game.token(element, (0, i), f"e{i}")
        (call,) = of(game.take(), fx.Invoke)
        game.complete(call.activity, i)
        game.take()
        del call
    assert instances(game) == 1
    game.loop_ended(loop, (0,), 50, None)
    (emit,) = of(game.take(), fx.EmitValue)
    assert emit.value == list(range(50))
    game.complete(emit.activity)
    game.take()
    del emit
    assert instances(game) == 0
