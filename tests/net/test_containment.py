"""Locations whose loss is contained: their calls fail, or are made again, and the job goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Repeat, RetryPolicy, Yield, collect, gather
from tests.net.losses import Losses

fed = Federation("losses")
hub, a, b = fed.site("hub"), fed.site("a"), fed.site("b")


@hub.operation
def at_hub(x: Any, y: Any = None) -> Any:
    return x


@a.operation
@b.operation
def work(x: Any, y: Any = None) -> Any:
    return x


@a.operation
def load(x: Any = 0) -> Any:
    return x


@a.operation(retry=RetryPolicy(attempts=1, on_worker_lost=100))
def reload(x: Any = 0) -> Any:
    return x


def run(operation: str, args: dict[str, Any]) -> Any:
    if args.get("x") == 13:
        raise ValueError("unlucky")
    return args.get("x") if operation != "at_hub" else args["x"]


def rounds() -> None:
    with Repeat(at_hub(PlaceParam("n")), times=3) as n:
        replies = gather([work(n, site="a"), work(n, site="b")], at_least=0)
        again = gather([work(at_hub(replies), site="a"), work(n, site="b")], at_least=0, within=5)
        Yield(at_hub([replies, again, n]), place="round")
        n.next(at_hub(n, again))
    final = gather([work(n, site=s) for s in ("a", "b")], at_least=0, within=9)
    Yield(at_hub([final, n]), place="final")


def elements() -> None:
    with ForEach(at_hub([1, 2, 13, 4]), concurrency=2) as n:
        value = work(n, PlaceParam("n"), site="a")
        with If(at_hub(n) > 1):
            other = work(work(n, site="b"), site="b")
    Yield(at_hub([collect(value, errors="skip"), collect(other, errors="keep")]), place="all")


def fallbacks() -> None:
    with ForEach(at_hub([1, 13, 3])) as n:
        Yield(at_hub(work(n, fallback=0, site="a")), place="each")
    Yield(at_hub(work(PlaceParam("n"), fallback=-1, site="b")), place="one")


def kept_at_the_site() -> None:
    data, again = load(), reload(PlaceParam("n"))
    with Repeat(at_hub(PlaceParam("n")), times=3) as n:
        replies = gather([work(n, data, site="a"), work(n, again, site="a"), work(n, site="b")], at_least=0)
        Yield(at_hub(replies), place="round")
        n.next(at_hub(n, replies))


def nested() -> None:
    with ForEach(at_hub([[1, 2], [], [3]])) as row:
        base = work(row, site="a")
        with ForEach(row) as n:
            one = gather([work(n, base, site="a"), work(n, site="b")], at_least=0)
            kept = at_hub(one)
        Yield(at_hub(collect(kept)), place="row")
    with If(at_hub(PlaceParam("n")) > 5) as large:
        maybe = gather([work(7, site="b")], at_least=0)
    Yield(at_hub(large.value(maybe, 0)), place="maybe")


PIPELINES = [rounds, elements, fallbacks, kept_at_the_site, nested]


def written(write: Callable[[], None]) -> Pipeline:
    with Pipeline(write.__name__) as pipeline:
        write()
    return pipeline


@pytest.mark.parametrize("write", PIPELINES)
def test_both_sites_can_be_lost(write: Callable[[], None]) -> None:
    found = Losses(written(write), fed, run)
    contained = {
        str(found.plan.locations[at]): str(found.plan.locations[caller]) for at, caller in found.plan.contained.items()
    }
    assert contained == {"a": "hub", "b": "hub"}


def places(found: Losses) -> Counter[Any]:
    return Counter((place, frame) for place, frame, _ in found.results)


def play_with_losses(found: Losses, sets: list[dict[str, Any]], random: Random) -> int:
    """Play to the end; return how many workers were lost."""
    found.open(*sets[:1])
    lost, late = 0, random.randrange(100)
    for number in range(random.randrange(400)):
        if number == late:
            found.open(*sets[1:])
        dice, at = random.random(), random.choice(sorted(found.plan.contained))
        if dice < 0.06 and at not in found.gone:
            found.lose(at)
            lost += 1
        elif dice < 0.15 and at in found.gone:
            found.revive(at)
        elif dice < 0.4 and at in found.restarting:
            found.restored(at)
        found.step(random.randrange)
    if len(found.sets) < len(sets):
        found.open(*sets[1:])
    while True:
        found.play(random.randrange)
        if not any(found.unfinished(at) for at in range(len(found.games))):
            return lost
        waiting = sorted(found.gone | found.restarting.keys())
        assert waiting, "it hangs"
        for at in waiting:
            if at in found.gone:
                found.revive(at)
            found.restored(at)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(PIPELINES), st.sampled_from([0, 0, 1, 100]))
def test_jobs_end_in_any_order_of_events(seed: int, write: Callable[[], None], reruns: int) -> None:
    pipeline, random = written(write), Random(seed)
    sets = [{"n": random.choice([3, 8])} for _ in range(random.randint(1, 3))]
    calm = Losses(pipeline, fed, run)
    calm.open(*sets)
    calm.play(lambda _count: 0)
    calm.check_done()
    found = Losses(pipeline, fed, run, reruns)
    lost = play_with_losses(found, sets, random)
    found.check_done()
    assert not found.errors
    assert not found.uncontained
    assert places(found) == places(calm), "each yield comes once"
    of_workers = [each for each in found.handled if each[2].endswith("WorkerLost")]
    assert len(of_workers) == len(set(of_workers)), "a call is lost once"
    if reruns == 0:
        once = [count for (label, _), count in found.calls.items() if not label.startswith("reload")]
        assert set(once) <= {1}, "nothing is called again that may not be"
    if reruns == 100 or not lost:
        assert not of_workers
    if not lost:
        assert Counter(map(repr, found.results)) == Counter(map(repr, calm.results))
