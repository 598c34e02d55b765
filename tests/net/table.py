"""Plays games of several locations by hand: in any order, with operations that tests decide about."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from dfm_async import Federation, Pipeline
from dfm_async.net import effects as fx
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.net.game import Game
from dfm_async.net.game_state import Instance
from dfm_async.planning import Plan
from dfm_async.planning.prepare import prepare
from tests.reference import value_of

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
    return plan, {str(plan.locations[i]): Game(CompiledNet(net), f"{i}", f"{i}") for i, net in enumerate(plan.nets)}


def game_of(pipeline: Pipeline, site: str = "a") -> Game:
    return games(pipeline)[1][site]


def opened(pipeline: Pipeline, *params: Any) -> tuple[Game, list[fx.Effect]]:
    """Open the first parameter set in the game of site a; return the game and what it asks for."""
    game = game_of(pipeline)
    game.open(0, list(params))
    return game, game.take()


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
        self.handled: list[tuple[str, tuple[int, ...]]] = []
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
        locations = [str(location) for location in self.plan.locations]
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
            case fx.ReportError(error, handled):
                (self.handled if handled else self.errors).append((error.node, error.frame))
            case fx.SendToken(place, frame, value, routes):
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
            case fx.WaitForEvent(activity, spec.Await(event=event)):
                if event is not None and event.startswith("never"):
                    self.later(site, game.fail, activity, game.error(activity, TimeoutError()))
                else:
                    self.later(site, game.complete, activity, None if event is None else value_of(event))
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


def any_order(data: st.DataObject) -> Callable[[int], int]:
    """Choose what happens next at random."""
    return lambda count: data.draw(st.integers(0, count - 1))


def played(
    pipeline: Pipeline,
    *sets: dict[str, Any],
    run: Callable[[str, dict[str, Any]], Any] = identity,
    choose: Callable[[int], int] = first,
) -> Table:
    """Play all games of a pipeline to their ends, without parameters or with some sets of them."""
    table = Table(pipeline, run)
    sets = sets or ({},)
    table.open(*sets)
    table.play(choose)
    table.check_done(len(sets))
    return table


class Heavy:
    """A value whose end can be watched."""


def instances(game: Game) -> int:
    gc.collect()
    scopes = set(map(id, game.program.scopes.values()))
    return sum(type(found) is Instance and id(found.scope) in scopes for found in gc.get_objects())
