"""Which locations can be lost without the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Repeat, RetryPolicy, Yield, collect, gather
from dfm_async.planning.prepare import prepare

fed = Federation("contained")
hub, other, leaf = fed.site("hub"), fed.site("other"), fed.site("leaf")


@hub.operation
@other.operation
def near(*values: Any) -> Any:
    return values


@leaf.operation
def far(*values: Any) -> Any:
    return values


@leaf.operation(in_process=True, retry=RetryPolicy(on_worker_lost=4))
def apart(*values: Any) -> Any:
    return values


def is_gathered() -> None:
    with Repeat(near(1, site=hub), times=2) as x:
        x.next(near(gather([far(x), far(far(x), fallback=2)]), site=hub))


def is_gathered_at_the_homesite() -> None:
    Yield(gather([far(PlaceParam("x"))]))


def has_a_fallback() -> None:
    Yield([far(near(1, site=hub), fallback=0)])


def is_collected() -> None:
    with ForEach(near(1, site=hub)) as x:
        y = far(x)
    Yield(collect(y, errors="skip"))


def has_a_process_of_its_own() -> None:
    Yield(gather([apart(near(1, site=hub))]))


def is_used_otherwise() -> None:
    x = far(near(1, site=hub))
    Yield([gather([x]), x])


def has_two_callers() -> None:
    Yield(near(gather([far(near(1, site=hub))]), site=other))


def runs_the_loop() -> None:
    with ForEach([1, 2]) as x:
        y = far(x)
    Yield(collect(y, errors="skip"))


def decides() -> None:
    x = gather([far(1)])
    with If(near(x, site=hub) == 1):
        near(2, site=hub)
    with If(far(2) == 1):
        near(3, site=hub)


def is_not_awaited() -> None:
    far(near(1, site=hub), fallback=0)
    near(2, site=hub)


CONTAINED: dict[Callable[[], None], dict[str, str]] = {
    is_gathered: {"leaf": "hub"},
    is_gathered_at_the_homesite: {"leaf": "home"},
    has_a_fallback: {"leaf": "hub"},
    is_collected: {"leaf": "hub"},
    has_a_process_of_its_own: {"leaf:apart": "hub"},
    is_used_otherwise: {},
    has_two_callers: {"hub": "leaf"},  # but its own input is handled, too
    runs_the_loop: {},
    decides: {},
    is_not_awaited: {},
}


@pytest.mark.parametrize("write", CONTAINED, ids=lambda found: found.__name__)
def test_a_location_is_contained_if_one_other_decides_about_all_its_calls(write: Callable[[], None]) -> None:
    with Pipeline(write.__name__) as pipeline:
        write()
    plan = prepare(pipeline, fed, "home")
    found = {str(plan.locations[at]): str(plan.locations[caller]) for at, caller in plan.contained.items()}
    assert found == CONTAINED[write]


def test_the_caller_knows_the_policies_and_limits_of_the_calls() -> None:
    with Pipeline() as pipeline:
        calls = [apart(near(1, site=hub)), far(near(2, site=hub), fallback=[5])]
        Yield(gather(calls, within=7))
    plan = prepare(pipeline, fed, "home")
    net = plan.nets[[str(location) for location in plan.locations].index("hub")]
    (first,), (second,) = (contained.calls for contained in net.contains)
    assert (first.reruns, first.within, first.fallback) == (4, 7, None)
    assert (second.reruns, second.within) == (0, 7)
    assert second.fallback is not None
    assert net.literals[second.fallback.literal] == [5]  # type: ignore[union-attr]
