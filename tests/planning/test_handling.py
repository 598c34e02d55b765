"""Which failures a pipeline handles: they are not errors of its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dfm_async import Federation, ForEach, If, Pipeline, Repeat, TryFromCache, Yield, collect, gather
from dfm_async.planning.handling import Handling
from dfm_async.planning.structure import analyse

fed = Federation("handling")
site = fed.site("site")


@site.operation
def f(*values: Any) -> Any:
    return values


def handled(write: Callable[[], object]) -> set[str]:
    """The statements whose failure is handled: ``f#1`` as a value, ``[If#2]`` as a block."""
    with Pipeline() as pipeline:
        write()
    found = analyse(pipeline)
    assert not found.problems
    handling = Handling(found)
    values = {spot.label for key, spot in found.spots.items() if handling.value(key)}
    return values | {f"[{spot.label}]" for key, spot in found.spots.items() if handling.block(key)}


def skips_a_chain() -> None:
    with ForEach([1]) as x:
        y = f(f(x))
    collect(y, errors="skip")


def fails() -> None:
    with ForEach([1]) as x:
        y = f(x)
    collect(y)


def has_another_use() -> None:
    with ForEach([1]) as x:
        y = f(x)
        f(y)
    collect(y, errors="keep")


def is_yielded() -> None:
    with ForEach([1]) as x:
        y = f(x)
        Yield(y)
    collect(y, errors="keep")


def fails_with_its_sequence() -> None:
    with ForEach(f()) as x:
        y = f(x)
    Yield(collect(y, errors="skip"))


def is_a_loop_in_a_loop() -> None:
    with ForEach([1]) as x:
        with ForEach(f(x)) as y:
            z = f(y)
        zs = f(collect(z))
    Yield(collect(zs, errors="skip"))


def is_a_condition() -> None:
    with ForEach([1]) as x:
        with If(f(x) == 1) as branch:
            y = f(x)
        with branch.otherwise():
            z = f(x)
    collect(y, errors="skip")
    collect(z, errors="skip")


def is_a_condition_of_something_else() -> None:
    with ForEach([1]) as x, If(f(x) == 1):
        y = f(x)
        f(x)
    collect(y, errors="skip")


def is_a_condition_of_a_value() -> None:
    with ForEach([1]) as x:
        with If(f(x) == 1) as branch:
            y = f(x)
        z = branch.value(y, 1)
    collect(z, errors="skip")


def is_gathered() -> None:
    Yield(f(gather([f(f(1)), f(2)])))


def is_gathered_and_used() -> None:
    x = f(1)
    Yield(gather([x]))
    Yield(x, place="x")


def is_repeated() -> None:
    with ForEach([1]) as x, Repeat(f(x), times=f(x)) as current:
        current.next(f(current))
    collect(current, errors="skip")


def is_cached() -> None:
    with ForEach([1]) as x, TryFromCache(f(x)) as cached:
        cached.store(f(x))
    collect(cached, errors="skip")


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (skips_a_chain, {"f#1", "f#2"}),
        (fails, set()),
        (has_another_use, set()),
        (is_yielded, set()),
        (fails_with_its_sequence, {"f#2"}),
        (is_a_loop_in_a_loop, {"f#1", "[ForEach#2]", "f#3", "collect#4", "f#5"}),
        (is_a_condition, {"f#1", "[If#2]", "f#3", "f#4"}),
        (is_a_condition_of_something_else, {"f#3"}),
        (is_a_condition_of_a_value, {"f#1", "[If#2]", "f#3", "If.value#4", "If#2"}),
        (is_gathered, {"f#0", "f#1", "f#2"}),
        (is_gathered_and_used, set()),
        (is_repeated, {"f#1", "f#2", "[Repeat#3]", "f#4", "Repeat#3"}),
        (is_cached, {"f#1", "[TryFromCache#2]", "f#3", "TryFromCache#2"}),
    ],
)
def test_failures_are_handled_if_all_uses_handle_them(write: Callable[[], object], expected: set[str]) -> None:
    assert handled(write) == expected


def test_long_chains_do_not_recurse() -> None:
    with Pipeline() as pipeline:
        with ForEach([1]) as x:
            y = x
            for _ in range(3000):
                y = f(y)
        collect(y, errors="skip")
    found = analyse(pipeline)
    handling = Handling(found)
    assert all(handling.value(key) for key in range(1, 3000))
