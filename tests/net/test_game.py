"""The token game by hand: events in, effects out, no loop, no clock."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Plan, Repeat, TryFromCache, Yield, collect
from dfm_async.net import effects as fx
from dfm_async.net.game import Game, Instance
from dfm_async.net.program import Program
from dfm_async.net.tokens import SKIPPED, Failed
from dfm_async.planner.plan import prepare

fed = Federation("game")
a = fed.site("a")
b = fed.site("b")


@a.operation
def at_a(x: Any = None, y: Any = None) -> Any:
    return x


@b.operation
def at_b(x: Any = None, y: Any = None) -> Any:
    return x


def games(pipeline: Pipeline, federation: Federation = fed) -> tuple[Plan, dict[str, Game]]:
    plan = prepare(pipeline, federation, next(iter(federation.sites)))
    return plan, {plan.locations[net.location]: Game(Program(net), f"{i}", f"{i}") for i, net in enumerate(plan.nets)}


def game_of(pipeline: Pipeline, site: str = "a") -> Game:
    return games(pipeline)[1][site]


def of(effects: list[fx.Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def invoked(effects: list[fx.Effect]) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    return [(e.activity.label, e.activity.frame, e.args) for e in of(effects, fx.Invoke)]


def settle(game: Game, effects: list[fx.Effect]) -> list[tuple[int, Any]]:
    """Sends what is to be emitted; tells point and value."""
    found = []
    for effect in of(effects, fx.EmitValue):
        found.append((effect.point, effect.value))
        game.complete(effect.activity)
    return found


class Table:
    """All games of a plan, with the messages between them; what happens next is the caller's choice."""

    def __init__(
        self, pipeline: Pipeline, run: Callable[[str, dict[str, Any]], Any], federation: Federation = fed
    ) -> None:
        self.plan, self.games = games(pipeline, federation)
        self.run = run
        self.pending: list[Callable[[], None]] = []
        self.results: list[tuple[str, tuple[int, ...], Any]] = []
        self.lost: list[tuple[str, tuple[int, ...]]] = []
        self.errors: list[tuple[str, tuple[int, ...]]] = []
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.done: list[tuple[str, int]] = []
        self.cache: dict[Any, Any] = {}
        self.running = self.most = 0

    def open(self, *sets: dict[str, Any]) -> None:
        for index, given_set in enumerate(sets):
            for site, game in self.games.items():
                params = [given_set[name] for name, _ in game.program.net.params]
                self.later(site, game.open, index, params)

    def play(self, choose: Callable[[int], int]) -> None:
        while self.pending:
            self.pending.pop(choose(len(self.pending)))()

    def take(self, site: str) -> None:
        for effect in self.games[site].take():
            self.carry_out(site, effect)

    def later(self, site: str, event: Callable[..., None], *args: Any) -> None:
        def happen() -> None:
            event(*args)
            self.take(site)

        self.pending.append(happen)

    def carry_out(self, site: str, effect: fx.Effect) -> None:
        game = self.games[site]
        locations = self.plan.locations
        match effect:
            case fx.Invoke(activity, action, args):
                self.calls.append((activity.label, activity.frame))
                self.running += 1
                self.most = max(self.most, self.running)
                self.pending.append(lambda: self.finish(site, activity, action.operation, args))
            case fx.EmitValue(activity, point, frame, value):
                self.results.append((game.program.points[point].place, frame, value))
                self.later(site, game.complete, activity)
            case fx.EmitFailed(point, frame, _):
                self.lost.append((game.program.points[point].place, frame))
            case fx.Report(error):
                self.errors.append((error.node, error.frame))
            case fx.Send(place, frame, value, routes):
                for there in routes:
                    self.later(locations[there], self.games[locations[there]].token, place, frame, value)
            case fx.SendLoopEnd(loop, frame, total, outcome, routes):
                for there in routes:
                    self.later(locations[there], self.games[locations[there]].loop_ended, loop, frame, total, outcome)
            case fx.SendElementDone(loop, frame, control):
                self.later(locations[control], self.games[locations[control]].element_done, loop, frame)
            case fx.FrameDone(index):
                self.done.append((site, index))
            case fx.LookUp(activity, key):
                if key in self.cache:
                    self.later(site, game.found, activity, self.cache[key])
                else:
                    self.later(site, game.missed, activity, key)
            case fx.Keep(activity, ticket, value):
                self.cache[ticket] = value
                self.later(site, game.complete, activity)
            case _:
                raise AssertionError(effect)

    def finish(self, site: str, activity: Any, operation: str, args: dict[str, Any]) -> None:
        self.running -= 1
        game = self.games[site]
        try:
            value = self.run(operation, args)
        except ValueError as error:
            game.fail(activity, game.error(activity, error))
        else:
            game.complete(activity, value)
        self.take(site)

    def check_done(self, sets: int) -> None:
        assert sorted(self.done) == sorted((site, i) for site in self.games for i in range(sets))
        assert all(game.live == 0 for game in self.games.values())


def identity(_operation: str, args: dict[str, Any]) -> Any:
    if args.get("x") == "bad":
        raise ValueError("bad")
    return args.get("x")


def first(_count: int) -> int:
    return 0


# firing


def test_a_transition_fires_once_when_all_its_inputs_are_there() -> None:
    with Pipeline() as p:
        left, right = at_a(1), at_a(2)
        at_a(left, right)
    game = game_of(p)
    game.open(0, [])
    effects = game.take()
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
    game = game_of(p)
    game.open(0, [])
    effects = game.take()
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
    (send,) = of(effects, fx.Send)
    assert [plan.locations[there] for there in send.routes] == ["b"]
    assert (send.frame, send.value) == ((0,), {"k": 5})
    other = all_games["b"]
    other.token(send.place, send.frame, send.value)
    assert invoked(other.take()) == [
        ("at_b#1", (0,), {"x": {"k": 5}}),
        ("at_b#2", (0,), {"x": 5, "y": {"k": 5}}),
    ], "tokens may come before the parameter set"
    other.token(send.place, send.frame, "again")
    assert other.take() == [], "a second token for the same frame changes nothing"


def test_order_without_data_waits_for_the_end_also_of_a_failure() -> None:
    with Pipeline() as p:
        before = at_a("bad")
        at_a(5, after=before)
    game = game_of(p)
    game.open(0, [])
    effects = game.take()
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
    game = game_of(p)
    game.open(0, [iter(["p", "q"]), ["r"]])  # the elements of an iterator come when they are fed
    effects = game.take()
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
    table = Table(p, lambda op, args: ("B", args["x"]) if op == "at_b" else (args["x"], args["y"]))
    table.open(*({"s": i} for i in order))
    table.play(lambda count: data.draw(st.integers(0, count - 1)))
    assert sorted(table.results) == sorted(
        ("yield", (i, j), ((("B", s), s), j)) for i, s in enumerate(order) for j in (0, 1)
    )
    table.check_done(4)


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
    table = Table(p, identity)
    table.open({"x": 1 if holds else 2})
    table.play(first)
    place = "then" if holds else "otherwise"
    assert table.results == [(place, (0,), place)]
    assert (table.lost, table.errors) == ([], [])
    assert len(table.calls) == (2 if holds else 1), "nothing of the other branch runs"
    table.check_done(1)


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
    table = Table(p, identity)
    table.open({})
    table.play(first)
    assert table.results == [("other", (0,), "good")]
    assert sorted(table.lost) == [
        (place, (0,)) for place in sorted(["needs", "then", "otherwise", "loop", "repeat", "repeated"])
    ]
    assert table.errors == [("at_a#0", (0,))], "one failure is one error"
    table.check_done(1)


def test_a_failure_in_one_element_leaves_the_others_alone_and_spoils_what_is_collected() -> None:
    with Pipeline() as p:
        with ForEach(["ok", "bad", "fine"]) as x:
            value = at_b(x)
            Yield(value, place="each")
        Yield(collect(value), place="all")
    table = Table(p, identity)
    table.open({})
    table.play(first)
    assert sorted(table.results) == [("each", (0, 0), "ok"), ("each", (0, 2), "fine")]
    assert sorted(table.lost) == [("all", (0,)), ("each", (0, 1))]
    assert table.errors == [("at_b#1", (0, 1))]
    table.check_done(1)


def test_values_of_skipped_branches_are_left_out_of_what_is_collected() -> None:
    with Pipeline() as p:
        with ForEach([1, 2, 3, 4]) as x, If(x > 2):
            value = at_b(x)
        Yield(collect(value))
    table = Table(p, identity)
    table.open({})
    table.play(lambda count: count - 1)
    assert table.results == [("yield", (0,), [3, 4])]
    table.check_done(1)


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
    game = game_of(p)
    game.open(0, [{"n": 5}])
    effects = game.take()
    (report,) = of(effects, fx.Report)
    assert report.error.type_name == type_name
    assert report.error.frame == (0,)
    assert "Traceback" in report.error.traceback
    assert of(effects, fx.FrameDone) == [fx.FrameDone(0)]


def test_a_remote_failure_and_a_remote_skip_travel_as_tokens() -> None:
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
    game = game_of(p)
    game.open(0, ["v"])
    (lookup,) = of(game.take(), fx.LookUp)
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
        game = game_of(p)
        game.open(0, [])
        (lookup,) = of(game.take(), fx.LookUp)
        game.missed(lookup.activity, "ticket")
        (call,) = of(game.take(), fx.Invoke)
        if how == "operation":
            game.fail(call.activity, game.error(call.activity, ValueError("x")))
        else:
            game.complete(call.activity, {})
        effects = game.take()
        assert of(effects, fx.Abandon) == [fx.Abandon("ticket")]
        assert not of(effects, fx.Keep)
        assert len(of(effects, fx.Report)) == 1
        assert len(of(effects, fx.EmitFailed)) == 1
        assert game.live == 0


# loops


def looped(concurrency: int | None) -> Pipeline:
    with Pipeline() as p:
        with ForEach(PlaceParam("seq"), concurrency=concurrency) as x:
            value = at_b(at_a(x))
        Yield(collect(value))
    return p


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_never_more_elements_are_under_way_than_the_limit_allows(limit: int, count: int, data: st.DataObject) -> None:
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
    table.play(lambda n: data.draw(st.integers(0, n - 1)))
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
    game = game_of(p)
    game.open(0, [iter([1])])
    (pull,) = of(game.take(), fx.Pull)
    game.feed(pull.control, ["one"])
    effects = game.take()
    game.feed_end(pull.control, game.error(pull.control.activity, OSError("gone")))
    effects += game.take()
    assert settle(game, effects) == [(0, "one")]
    effects += game.take()
    assert [(e.error.type_name, e.error.node) for e in of(effects, fx.Report)] == [("OSError", "ForEach#0")]
    assert sorted(e.point for e in of(effects, fx.EmitFailed)) == [0, 1]
    assert game.live == 0


@pytest.mark.parametrize("sequence", [[], (), range(0), {}, set()])
def test_a_loop_over_nothing_ends_at_once_with_an_empty_list(sequence: Any) -> None:
    table = Table(looped(None), identity)
    table.open({"seq": sequence})
    table.play(first)
    assert table.results == [("yield", (0,), [])]
    table.check_done(1)


@pytest.mark.parametrize("value", [5, None, "text", b"bytes"])
def test_what_has_no_elements_is_an_error_of_the_loop(value: Any) -> None:
    table = Table(looped(None), identity)
    table.open({"seq": value})
    table.play(first)
    assert table.errors == [("ForEach#0", (0,))]
    assert table.lost == [("yield", (0,))]
    table.check_done(1)


def remote() -> tuple[Game, int, int, int]:
    """The game of b in a loop that a drives: the places of the element and of an outer value, and the loop."""
    with Pipeline() as p:
        outer = at_a("outer")
        with ForEach(PlaceParam("seq")) as x:
            value = at_b(x, outer)
        Yield(collect(value))
    game = game_of(p, "b")
    places = {place.label: place.index for place in game.program.net.places}
    return game, places["ForEach#1 element"], places["at_a#0"], game.program.net.loops[0].index


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


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            _nested,
            lambda ns: [
                *(("big", (0, i, j), n) for i, n in enumerate(ns) for j in range(2) if n > 1),
                ("all", (0,), [[n, n] if n > 1 else [] for n in ns]),
            ],
        ),
        (
            _repeat_and_cache,
            lambda ns: [
                *(
                    ("step", (0, i, k), [n, [[n], [[n]]][k - 1] if k else n])
                    for i, n in enumerate(ns)
                    for k in range(3)
                ),
                *(("final", (0, i), [[[n]]]) for i, n in enumerate(ns)),
                *(("cached", (0, i), n) for i, n in enumerate(ns)),
            ],
        ),
    ],
    ids=["loops and branches", "repeats and caches"],
)
def test_whatever_the_order_of_messages_and_completions_the_result_is_the_same(make: Any, expected: Any) -> None:
    @given(st.lists(st.integers(0, 3), max_size=3), st.data())
    def check(ns: list[int], data: st.DataObject) -> None:
        table = Table(make(), identity)
        table.open({"n": ns})
        table.play(lambda count: data.draw(st.integers(0, count - 1)))
        assert sorted(table.results, key=repr) == sorted(expected(ns), key=repr)
        assert (table.lost, table.errors) == ([], [])
        table.check_done(1)

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
    table = Table(p, lambda _op, args: args["x"] + 1)
    table.open({"times": times, "limit": limit})
    table.play(first)
    assert table.results == [("yield", (0,), steps)]
    assert table.calls == [("at_b#1", (0, i)) for i in range(steps)]
    table.check_done(1)


@pytest.mark.parametrize("times", [-1, "two", 1.5, True])
def test_a_repeat_with_a_senseless_count_is_an_error(times: Any) -> None:
    with Pipeline() as p:
        with Repeat(0, times=PlaceParam("times")) as current:
            current.next(at_b(current))
        Yield(current)
    table = Table(p, identity)
    table.open({"times": times})
    table.play(first)
    assert table.errors == [("Repeat#0", (0,))]
    assert table.lost == [("yield", (0,))]
    table.check_done(1)


def test_a_repeat_stops_at_the_iteration_that_fails() -> None:
    with Pipeline() as p:
        with Repeat("ok", times=5) as current:
            at_b(current)
            current.next(at_a("bad"))
        Yield(current)
    table = Table(p, identity)
    table.open({})
    table.play(first)
    assert table.errors == [("at_a#2", (0, 0))]
    assert table.lost == [("yield", (0,))]
    table.check_done(1)


# memory


class Heavy:
    """A value whose end can be watched."""


def _instances(game: Game) -> int:
    gc.collect()
    scopes = set(map(id, game.program.scopes.values()))
    return sum(type(found) is Instance and id(found.scope) in scopes for found in gc.get_objects())


def test_a_frame_that_is_done_leaves_nothing_behind() -> None:
    with Pipeline() as p:
        with ForEach(PlaceParam("seq")) as x, If(at_a(x) == 0):
            value = at_a(x)
            with Repeat(value, times=2) as current:
                current.next(at_a(current))
        Yield(collect(value))
    table = Table(p, identity)
    heavy = [Heavy() for _ in range(5)]
    watched = [weakref.ref(value) for value in heavy]
    table.open({"seq": heavy}, {"seq": heavy})
    del heavy
    table.play(first)
    table.results.clear()
    table.check_done(2)
    (game,) = table.games.values()
    assert _instances(game) == 0
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
    assert _instances(game) <= 2, "the pipeline, and at most one element"
    alive = sum(ref() is not None for ref in watched)
    assert alive == 0
    assert game.live == 1


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
    assert _instances(game) == 1
    game.loop_ended(loop, (0,), 50, None)
    (emit,) = of(game.take(), fx.EmitValue)
    assert emit.value == list(range(50))
    game.complete(emit.activity)
    game.take()
    del emit
    assert _instances(game) == 0


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
    assert _instances(game) == 0
