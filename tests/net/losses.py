"""Plays the games of several locations whose workers can be lost: in any order that channels allow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dfm_async import Federation, Pipeline
from dfm_async.errors import WorkerLost
from dfm_async.net import effects as fx
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.net.containment import ContainingGame, RestoredGame, game_of
from dfm_async.net.game import Game, describe_error
from dfm_async.planning.prepare import prepare

APP = -1
"""The application, among the locations."""


class Losses:
    """All games of a plan. ``run`` is an operation: it gets its name and arguments, and may raise ValueError.

    Messages between two locations arrive in order, and so do those of the application. Everything else happens when
    ``choose`` wants it to.
    """

    def __init__(
        self, pipeline: Pipeline, federation: Federation, run: Callable[[str, dict[str, Any]], Any], reruns: int = 0
    ) -> None:
        self.plan = prepare(pipeline, federation, next(iter(federation.sites)))
        self.programs = [CompiledNet(net) for net in self.plan.nets]
        self.games: list[Game] = [
            game_of(program, f"{at}", f"{at}", restored=False, reruns=reruns)
            for at, program in enumerate(self.programs)
        ]
        self.run = run
        self.reruns = reruns
        self.channels: dict[tuple[int, int], deque[tuple[int, Callable[[], None]]]] = {}
        self.local: list[tuple[int, int, Callable[[], None]]] = []
        """What happens at a location: its number, its incarnation, and the event."""
        self.incarnations = Counter[int]()
        """How often the worker of each location was replaced."""
        self.known = Counter[int]()
        """The same, as far as its caller knows."""
        self.gone: set[int] = set()
        """Locations without a worker."""
        self.held: dict[int, list[tuple[int, list[Any]]]] = {}
        """Parameter sets of restored locations that wait for their state."""
        self.restarting: dict[int, list[int]] = {}
        """Locations that have another worker, which their callers do not know, and its parameter sets."""
        self.sets: list[dict[str, Any]] = []
        self.done: list[set[int]] = [set() for _ in self.games]
        self.results: list[tuple[str, tuple[int, ...], Any]] = []
        self.errors: list[Any] = []
        self.handled: list[Any] = []
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.uncontained = False

    # the application

    def open(self, *sets: dict[str, Any]) -> None:
        for given in sets:
            index = len(self.sets)
            self.sets.append(given)
            for frames in self.restarting.values():
                frames.append(index)
            for at in range(len(self.games)):
                if at not in self.gone:
                    self.send_open(at, index)

    def send_open(self, at: int, index: int) -> None:
        params = [self.sets[index][name] for name, _ in self.programs[at].net.params]
        self.send(APP, at, lambda: self.take_open(at, index, params))

    def take_open(self, at: int, index: int, params: list[Any]) -> None:
        if at in self.held:
            self.held[at].append((index, params))
        else:
            self.games[at].open(index, params)

    def unfinished(self, at: int) -> list[int]:
        return [index for index in range(len(self.sets)) if index not in self.done[at]]

    def lose(self, at: int) -> None:
        """Kill the worker of a location. What it has sent to others may still arrive there."""
        caller = self.plan.contained[at]
        assert at not in self.gone
        self.gone.add(at)
        self.held.pop(at, None)
        waited = self.restarting.pop(at, None) is not None
        self.channels.pop((at, APP), None)
        self.channels.pop((APP, at), None)
        if waited:
            return  # its caller does not know that there was another worker
        self.incarnations[at] += 1
        error = describe_error(WorkerLost("x", -9, ""), "", str(self.plan.locations[at]), "", "", (), 1, b"")
        # What it has done may not have arrived at its caller; what that is done with needs nothing of it.
        self.done[at] = set(self.done[caller])
        game = self.games[caller]
        assert isinstance(game, ContainingGame)

        def lost() -> None:
            self.known[at] += 1  # from now on the caller ignores what the lost one has sent
            game.lost(at, error)

        self.send(APP, caller, lost)

    def revive(self, at: int) -> None:
        """Give a location another worker, which has to be :meth:`restored`."""
        self.gone.discard(at)
        prefix = f"{at}.{self.incarnations[at]}"
        self.games[at] = game_of(self.programs[at], f"{at}", prefix, restored=True, reruns=0)
        self.held[at] = []
        self.restarting[at] = self.unfinished(at)
        for index in self.restarting[at]:
            self.send_open(at, index)

    def restored(self, at: int) -> None:
        """Have the caller of a location describe where to begin."""
        caller, frames = self.plan.contained[at], self.restarting.pop(at)
        game = self.games[caller]
        assert isinstance(game, ContainingGame)
        self.send(APP, caller, lambda: game.back(at, frames))

    # playing

    def send(self, source: int, to: int, event: Callable[[], None]) -> None:
        incarnation = self.incarnations[source] if source in self.plan.contained else self.known[to]
        self.channels.setdefault((source, to), deque()).append((incarnation, event))

    def later(self, at: int, event: Callable[[], None]) -> None:
        self.local.append((at, self.incarnations[at], event))

    def step(self, choose: Callable[[int], int]) -> bool:
        """Let one thing happen; return whether there was any."""
        now = self.incarnations
        self.local = [found for found in self.local if found[0] not in self.gone and found[1] == now[found[0]]]
        ready = [key for key, waiting in self.channels.items() if waiting]
        if not ready and not self.local:
            return False
        number = choose(len(ready) + len(self.local))
        if number >= len(ready):
            at, _, event = self.local.pop(number - len(ready))
            event()
        else:
            source, at = ready[number]
            incarnation, event = self.channels[source, at].popleft()
            if at in self.gone:
                return True
            if min(source, at) > APP:  # between locations: one may be of an earlier incarnation than the other thinks
                expected = self.known[source] if source in self.plan.contained else now[at]
                if incarnation != expected:
                    return True
            event()
        if at >= 0:
            for effect in self.games[at].take():
                self.carry_out(at, effect)
        return True

    def play(self, choose: Callable[[int], int]) -> None:
        while self.step(choose):
            pass

    def carry_out(self, at: int, effect: fx.Effect) -> None:
        game = self.games[at]
        match effect:
            case fx.Invoke(activity, action, args):
                self.calls[activity.label, activity.frame] += 1
                self.later(at, lambda: self.finish(at, activity, action.operation, args))
            case fx.EmitValue(activity, point, frame, value):
                self.results.append((game.program.points[point].place, frame, value))
                self.later(at, lambda: game.complete(activity))
            case fx.EmitFailed():
                pass
            case fx.ReportError(error, handled):
                (self.handled if handled else self.errors).append((error.node, error.frame, error.type_name))
            case fx.SendToken(place, frame, value, routes):
                for there in routes:
                    self.send(at, there, partial(self.to, there, "token", place, frame, value))
            case fx.SendLoopEnd(loop, frame, total, outcome, routes):
                for there in routes:
                    self.send(at, there, partial(self.to, there, "loop_ended", loop, frame, total, outcome))
            case fx.SendElementDone(loop, frame, control):
                self.send(at, control, lambda: self.games[control].element_done(loop, frame, at))
            case fx.FrameDone(index):
                self.send(at, APP, lambda: self.frame_done(at, index))
            case fx.StartClock(location, frame, output, _):
                assert isinstance(game, ContainingGame)
                lost = game.losses(location)
                self.later(at, lambda: game.late(location, lost, frame, output))
            case fx.NotContained():
                self.uncontained = True
            case fx.RestoreLocation(location, done, instances):
                self.send(at, location, lambda: self.restore(location, done, instances))
            case _:
                raise AssertionError(effect)

    def to(self, at: int, event: str, *args: Any) -> None:
        getattr(self.games[at], event)(*args)

    def frame_done(self, at: int, index: int) -> None:
        assert index not in self.done[at] or at in self.plan.contained
        self.done[at].add(index)
        for other, caller in self.plan.contained.items():
            if caller == at and (other in self.gone or other in self.restarting):
                self.done[other].add(index)

    def restore(self, at: int, done: list[int], instances: Any) -> None:
        game = self.games[at]
        assert isinstance(game, RestoredGame)
        game.restore(done, instances)
        for index, params in self.held.pop(at):
            game.open(index, params)

    def finish(self, at: int, activity: Any, operation: str, args: dict[str, Any]) -> None:
        game = self.games[at]
        try:
            value = self.run(operation, args)
        except ValueError as error:
            game.fail(activity, game.error(activity, error))
        else:
            game.complete(activity, value)

    def check_done(self) -> None:
        for at, done in enumerate(self.done):
            assert done == set(range(len(self.sets))), f"location {self.plan.locations[at]} is not done"
        assert all(game.live == 0 for at, game in enumerate(self.games) if at not in self.gone)
