"""The token game by hand: events in, effects out, no loop, no clock."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import ForEach, If, Pipeline, PlaceParam, Repeat, TryFromCache, Yield, collect
from dfm_async.net import effects as fx
from dfm_async.net.tokens import SKIPPED, Failed
from tests.net.table import Heavy, any_order, at_a, at_b, game_of, games, instances, invoked, of, opened, played, settle
from tests.reference import interpret

# firing


def test_a_transition_fires_once_when_all_its_inputs_are_there() -> None:
    with Pipeline() as p:
        left, right = at_a(1), at_a(2)
        at_a(left, right)
    game, effects = opened(p)
    assert invoked(effects) == [("at_a#0", (0,), {"x": 1}), ("at_a#1", (0,), {"x": 2})]
    one, two = (e.activity for e in of(effects, fx.Invoke))
    game.complete(two, "r")
    assert game.take() == []
    game.complete(one, "l")
    effects = game.take()
    assert invoked(effects) == [("at_a#2", (0,), {"x": "l", "y": "r"})]
    game.complete(of(effects, fx.Invoke)[0].activity, None)
    assert game.take() == [fx.FrameDone(0)]


def test_independent_operations_fire_without_waiting_for_each_other() -> None:
    with Pipeline() as p:
        for i in range(5):
            at_a(at_a(i))
    game, effects = opened(p)
    assert len(invoked(effects)) == 5
    game.complete(of(effects, fx.Invoke)[3].activity, "three")
    assert invoked(game.take()) == [("at_a#7", (0,), {"x": "three"})]


def test_parameters_are_tokens_of_their_frame() -> None:
    with Pipeline() as p:
        Yield(at_a(PlaceParam("x"), PlaceParam("y")["k"]))
    game = game_of(p)
    game.open(1, ["one", {"k": 1}])
    game.open(0, ["zero", {"k": 0}])
    assert invoked(game.take()) == [("at_a#0", (1,), {"x": "one", "y": 1}), ("at_a#0", (0,), {"x": "zero", "y": 0})]
    assert game.live == 2


def test_a_value_is_sent_once_to_each_location_that_uses_it() -> None:
    with Pipeline() as p:
        value = at_a(1)
        at_b(value)
        at_b(value["k"], value)
        at_a(value)
    plan, all_games = games(p)
    game = all_games["a"]
    game.open(0, [])
    game.complete(of(game.take(), fx.Invoke)[0].activity, {"k": 5})
    effects = game.take()
    (send,) = of(effects, fx.SendToken)
    assert [plan.sites_at[there] for there in send.routes] == ["b"]
    assert (send.frame, send.value) == ((0,), {"k": 5})
    other = all_games["b"]
    other.token(send.place, send.frame, send.value)
    assert invoked(other.take()) == [("at_b#1", (0,), {"x": {"k": 5}}), ("at_b#2", (0,), {"x": 5, "y": {"k": 5}})], (
        "tokens may come before the parameter set"
    )
    other.token(send.place, send.frame, "again")
    assert other.take() == [], "a second token for the same frame changes nothing"


def test_order_without_data_waits_for_the_end_also_of_a_failure() -> None:
    with Pipeline() as p:
        before = at_a("bad")
        at_a(5, after=before)
    game, effects = opened(p)
    assert [label for label, _, _ in invoked(effects)] == ["at_a#0"]
    activity = of(effects, fx.Invoke)[0].activity
    game.fail(activity, game.error(activity, ValueError("no")))
    assert invoked(game.take()) == [("at_a#1", (0,), {"x": 5})]


# visibility


def test_outer_values_are_visible_in_every_element_whether_they_come_before_or_after_it() -> None:
    with Pipeline() as p:
        outer = at_a("outer")
        with ForEach(PlaceParam("seq")) as x, ForEach(PlaceParam("seq2")) as y:
            at_a((outer, x), y)
    game, effects = opened(p, iter(["p", "q"]), ["r"])  # the elements of an iterator come when they are fed
    (call,) = of(effects, fx.Invoke)
    (pull,) = of(effects, fx.Pull)
    game.feed(pull.control, ["p"])
    assert game.take() == [], "the element waits for the outer value"
    game.complete(call.activity, "o")
    assert invoked(game.take()) == [("at_a#3", (0, 0, 0), {"x": ("o", "p"), "y": "r"})]
    game.feed(pull.control, ["q"])
    assert invoked(game.take()) == [("at_a#3", (0, 1, 0), {"x": ("o", "q"), "y": "r"})]


@given(st.permutations(range(4)), st.data())
def test_each_frame_sees_the_values_of_its_own_prefix(order: list[int], data: st.DataObject) -> None:
    """Two parameter sets and their loops, interleaved: nothing leaks from one frame into another."""
    with Pipeline() as p:
        s = PlaceParam("s", multiuse=True)
        outer = at_b(s)
        with ForEach([0, 1]) as x:
            Yield(at_a((outer, s), x))

    def run(operation: str, args: dict[str, Any]) -> Any:
        return ("B", args["x"]) if operation == "at_b" else (args["x"], args["y"])

    table = played(p, *({"s": i} for i in order), run=run, choose=any_order(data))
    assert sorted(table.results) == sorted(
        ("yield", (i, j), ((("B", s), s), j)) for i, s in enumerate(order) for j in (0, 1)
    )


# skipping and failing


@pytest.mark.parametrize("holds", [True, False])
def test_only_the_branch_whose_condition_holds_runs(holds: bool) -> None:
    with Pipeline() as p:
        with If(PlaceParam("x", multiuse=True) == 1) as branch:
            Yield(at_a(at_a("then")), place="then")
        with branch.otherwise():
            Yield(at_b("otherwise"), place="otherwise")
            with If(PlaceParam("x", multiuse=True) == 1):
                Yield(at_a("never"), place="never")
    table = played(p, {"x": 1 if holds else 2})
    place = "then" if holds else "otherwise"
    assert table.results == [(place, (0,), place)]
    assert (table.lost, table.errors) == ([], [])
    assert len(table.calls) == (2 if holds else 1), "nothing of the other branch runs"


def test_what_needs_a_failed_value_does_not_run_and_its_yields_are_lost() -> None:
    with Pipeline() as p:
        bad = at_a("bad")
        Yield(at_b(at_a(bad), 1), place="needs")
        Yield(at_b("good"), place="other")
        with If(bad > 1) as branch:
            Yield(1, place="then")
        with branch.otherwise():
            Yield(2, place="otherwise")
        with ForEach(bad):
            Yield(3, place="loop")
        with Repeat(bad, times=2) as current:
            Yield(4, place="repeat")
            current.next(current)
        Yield(current, place="repeated")
    table = played(p)
    assert table.results == [("other", (0,), "good")]
    assert sorted(table.lost) == [
        (place, (0,)) for place in sorted(["needs", "then", "otherwise", "loop", "repeat", "repeated"])
    ]
    assert table.errors == [("at_a#0", (0,))], "one failure is one error"


def test_a_failure_in_one_element_leaves_the_others_alone_and_spoils_what_is_collected() -> None:
    with Pipeline() as p:
        with ForEach(["ok", "bad", "fine"]) as x:
            value = at_b(x)
            Yield(value, place="each")
        Yield(collect(value), place="all")
    table = played(p)
    assert sorted(table.results) == [("each", (0, 0), "ok"), ("each", (0, 2), "fine")]
    assert sorted(table.lost) == [("all", (0,)), ("each", (0, 1))]
    assert table.errors == [("at_b#1", (0, 1))]


def test_values_of_skipped_branches_are_left_out_of_what_is_collected() -> None:
    with Pipeline() as p:
        with ForEach([1, 2, 3, 4]) as x, If(x > 2):
            value = at_b(x)
        Yield(collect(value))
    table = played(p, choose=lambda count: count - 1)
    assert table.results == [("yield", (0,), [3, 4])]


@pytest.mark.parametrize(
    ("write", "type_name"),
    [
        (lambda x: Yield(x["missing"]), "KeyError"),
        (lambda x: Yield(x.missing), "AttributeError"),
        (lambda x: at_a(x > "text"), "TypeError"),
    ],
)
def test_an_expression_that_raises_is_an_error_of_its_statement(write: Any, type_name: str) -> None:
    with Pipeline() as p:
        write(PlaceParam("x"))
    _, effects = opened(p, {"n": 5})
    (report,) = of(effects, fx.ReportError)
    assert report.error.type_name == type_name
    assert report.error.frame == (0,)
    assert report.error.traceback == f"{type_name}: {report.error.message}"
    assert of(effects, fx.FrameDone) == [fx.FrameDone(0)]


def test_a_remote_failure_and_a_remote_skip_are_tokens() -> None:
    with Pipeline() as p:
        with If(at_a(1) > 1):
            value = at_a(2)
            Yield(at_b(value), place="skipped")
        Yield(at_b(at_a("bad")), place="failed")
    here = game_of(p, "b")
    error = here.describe(ValueError("x"), "op", "label", (0,))
    for place in here.program.net.places:
        if place.label.startswith("at_a"):
            here.token(place.index, (0,), SKIPPED if place.label == "at_a#2" else Failed(error))
    here.open(0, [])
    effects = here.take()
    assert not of(effects, fx.Invoke)
    assert [here.program.points[e.point].place for e in of(effects, fx.EmitFailed)] == ["failed"]
    assert of(effects, fx.FrameDone) == [fx.FrameDone(0)]


# caches


def test_a_cache_block_runs_its_body_only_on_a_miss() -> None:
    with Pipeline() as p:
        with TryFromCache(("k", PlaceParam("x", multiuse=True))) as found:
            found.store(at_a(PlaceParam("x", multiuse=True)))
        Yield(found)
    game, effects = opened(p, "v")
    (lookup,) = of(effects, fx.LookUp)
    assert lookup.key == ("k", "v")
    game.found(lookup.activity, "kept")
    effects = game.take()
    assert not of(effects, fx.Invoke)
    assert settle(game, effects) == [(0, "kept")]
    assert game.take() == [fx.FrameDone(0)]

    game.open(1, ["w"])
    (lookup,) = of(game.take(), fx.LookUp)
    game.missed(lookup.activity, "ticket")
    (call,) = of(game.take(), fx.Invoke)
    game.complete(call.activity, "made")
    effects = game.take()
    (keep,) = of(effects, fx.Keep)
    assert (keep.ticket, keep.value) == ("ticket", "made")
    assert settle(game, effects) == [(0, "made")]  # before it is kept
    assert game.take() == []
    game.complete(keep.activity)
    assert game.take() == [fx.FrameDone(1)]


def test_a_cache_body_that_fails_gives_its_ticket_back() -> None:
    with Pipeline() as p:
        with TryFromCache("k") as found:
            found.store(at_a(1)["field"])
        Yield(found)
    for how in ("operation", "expression"):
        game, effects = opened(p)
        (lookup,) = of(effects, fx.LookUp)
        game.missed(lookup.activity, "ticket")
        (call,) = of(game.take(), fx.Invoke)
        if how == "operation":
            game.fail(call.activity, game.error(call.activity, ValueError("x")))
        else:
            game.complete(call.activity, {})
        effects = game.take()
        assert of(effects, fx.Abandon) == [fx.Abandon("ticket")]
        assert not of(effects, fx.Keep)
        assert len(of(effects, fx.ReportError)) == 1
        assert len(of(effects, fx.EmitFailed)) == 1
        assert game.live == 0


def _repeat_and_cache() -> Pipeline:
    with Pipeline() as p:
        n = PlaceParam("n", multiuse=True)
        with ForEach(n) as x:
            with Repeat(x, times=3) as current:
                Yield([x, current], place="step")
                current.next([at_b(current)])
            Yield(current, place="final")
            with TryFromCache(("k", x)) as found:
                found.store(at_b(x))
            Yield(found, place="cached")
    return p


def _nested() -> Pipeline:
    with Pipeline() as p:
        n = PlaceParam("n", multiuse=True)
        with ForEach(n, concurrency=2) as x:
            with ForEach(at_b([[x, x], x])[0]) as y, If(at_a(y) > 1):
                value = at_b(y)
                Yield(value, place="big")
            some = collect(value)
            total = at_a(some)
        Yield(collect(total), place="all")
    return p


@pytest.mark.parametrize("make", [_nested, _repeat_and_cache], ids=["loops and branches", "repeats and caches"])
def test_whatever_the_order_of_messages_and_completions_the_result_is_the_same(make: Any) -> None:
    pipeline, functions = make(), dict.fromkeys(["at_a", "at_b"], lambda x: x)

    @given(st.lists(st.integers(0, 3), max_size=3), st.data())
    def check(ns: list[int], data: st.DataObject) -> None:
        table = played(pipeline, {"n": ns}, choose=any_order(data))
        expected = interpret(pipeline, functions, [{"n": ns}])
        assert sorted(table.results, key=repr) == sorted(expected.results, key=repr)
        assert (table.lost, table.errors) == ([], [])

    check()


# repeats


def test_iterations_of_a_repeat_follow_each_other() -> None:
    with Pipeline() as p:
        with Repeat(10, times=3) as current:
            Yield(current, place="step")
            current.next(at_a(current))
        Yield(current, place="final")
    game = game_of(p)
    game.open(0, [])
    seen = []
    for i in range(3):
        effects = game.take()
        (call,) = of(effects, fx.Invoke)
        assert call.activity.frame == (0, i)
        assert settle(game, effects) == [(0, 10 + i)]
        assert not of(game.take(), fx.Invoke), "the next waits for this one"
        game.complete(call.activity, call.args["x"] + 1)
        seen.append(call.args["x"])
    assert seen == [10, 11, 12]
    assert settle(game, game.take()) == [(1, 13)]
    assert game.take() == [fx.FrameDone(0)]


@pytest.mark.parametrize(("times", "limit", "steps"), [(0, 5, 0), (2, 5, 2), (9, 3, 3), (9, 0, 1)])
def test_a_repeat_ends_after_its_times_or_with_its_condition(times: int, limit: int, steps: int) -> None:
    with Pipeline() as p:
        with Repeat(0, times=PlaceParam("times")) as current:
            following = at_b(current)
            current.until(following >= PlaceParam("limit"))
            current.next(following)
        Yield(current)
    table = played(p, {"times": times, "limit": limit}, run=lambda _op, args: args["x"] + 1)
    assert table.results == [("yield", (0,), steps)]
    assert table.calls == [("at_b#1", (0, i)) for i in range(steps)]


@pytest.mark.parametrize("times", [-1, "two", 1.5, True])
def test_a_repeat_with_a_senseless_count_is_an_error(times: Any) -> None:
    with Pipeline() as p:
        with Repeat(0, times=PlaceParam("times")) as current:
            current.next(at_b(current))
        Yield(current)
    table = played(p, {"times": times})
    assert table.errors == [("Repeat#0", (0,))]
    assert table.lost == [("yield", (0,))]


def test_a_repeat_stops_at_the_iteration_that_fails() -> None:
    with Pipeline() as p:
        with Repeat("ok", times=5) as current:
            at_b(current)
            current.next(at_a("bad"))
        Yield(current)
    table = played(p)
    assert table.errors == [("at_a#2", (0, 0))]
    assert table.lost == [("yield", (0,))]


# memory


def test_a_frame_that_is_done_leaves_nothing_behind() -> None:
    with Pipeline() as p:
        with ForEach(PlaceParam("seq")) as x, If(at_a(x) == 0):
            value = at_a(x)
            with Repeat(value, times=2) as current:
                current.next(at_a(current))
        Yield(collect(value))
    heavy = [Heavy() for _ in range(5)]
    watched = [weakref.ref(value) for value in heavy]
    table = played(p, {"seq": heavy}, {"seq": heavy})
    del heavy
    table.results.clear()
    (game,) = table.games.values()
    assert instances(game) == 0
    assert [ref() for ref in watched] == [None] * 5


def test_an_element_that_is_done_is_freed_while_its_loop_goes_on() -> None:
    with Pipeline() as p, ForEach(PlaceParam("seq"), concurrency=1) as x:
        at_a(at_a(x))

    def source() -> Iterator[Any]:
        while True:
            yield Heavy()

    game = game_of(p)
    game.open(0, [source()])
    watched = []
    for _ in range(20):
        (pull,) = of(game.take(), fx.Pull)
        value = Heavy()
        watched.append(weakref.ref(value))
        game.feed(pull.control, [value])
        for _step in range(2):
            (call,) = of(game.take(), fx.Invoke)
            game.complete(call.activity, call.args["x"])
        del value, call, pull
    assert instances(game) <= 2, "the pipeline, and at most one element"
    alive = sum(ref() is not None for ref in watched)
    assert alive == 0
    assert game.live == 1


def test_parameter_sets_that_are_done_do_not_add_up() -> None:
    with Pipeline() as p:
        Yield(at_a(PlaceParam("x")))
    game = game_of(p)
    for i in range(100):
        game.open(i, [i])
        (call,) = of(game.take(), fx.Invoke)
        game.complete(call.activity, i)
        settle(game, game.take())
        assert game.take() == [fx.FrameDone(i)]
        assert game.live == 0
        del call
    assert instances(game) == 0
