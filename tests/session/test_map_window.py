"""Which inputs of a map are pulled, and in which order its values are passed on."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import DfmError
from dfm_async.model.events import Event, Failure, FrameCompleted, Result
from dfm_async.session.map_window import AHEAD, Finished, MapWindow


def result(*frame: int, value: Any = None) -> Result:
    return Result(0, "yield", frame if value is None else value, frame, "lab", "f#1")


def failure(*frame: int, place: str | None = "yield") -> Failure:
    return Failure(0, place, DfmError(str(frame)), frame, "lab", "f#1")


def passed_on(window: MapWindow) -> list[tuple[int, Any]]:
    found = [(index, value if error is None else str(error)) for index, value, error in window.ready]
    window.ready.clear()
    return found


def test_values_wait_for_those_before_them() -> None:
    window = MapWindow(8, ordered=True)
    window.open(2)
    window.open(1)
    window.take([result(1, 0), result(0, 1)])
    assert passed_on(window) == []
    window.take([result(0, 0)])
    assert passed_on(window) == [(0, (0, 0)), (1, (0, 1)), (2, (1, 0))]
    assert not window.unfinished


def test_values_come_as_they_complete() -> None:
    window = MapWindow(8, ordered=False)
    window.open(2)
    window.reject(DfmError("wrong"))
    window.take([result(0, 1), failure(0, 0, place=None), failure(0, 0)])
    assert passed_on(window) == [(2, "wrong"), (1, (0, 1)), (0, "(0, 0)")]


def test_a_stream_is_a_list_when_its_set_is_completed() -> None:
    window = MapWindow(8, ordered=True)
    window.open(3)
    window.take([result(0, 2, 1, value="d"), result(0, 2, 0, value="c"), result(0, 0, 0, value="a")])
    assert passed_on(window) == []
    window.take([FrameCompleted(0, (0,))])
    assert passed_on(window) == [(0, ["a"]), (1, []), (2, ["c", "d"])]


def test_the_failure_of_a_set_is_that_of_its_missing_inputs() -> None:
    window = MapWindow(8, ordered=True)
    window.open(2)
    window.take([result(0, 0), failure(0), failure(), FrameCompleted(0, (0,))])
    assert passed_on(window) == [(0, (0, 0)), (1, "(0,)")]


def test_room_counts_calls_in_flight_and_values_that_are_not_passed_on() -> None:
    window = MapWindow(2, ordered=True)
    assert window.room == 2
    window.open(2)
    assert window.room == 0
    window.take([result(0, 1)])
    for root in range(1, 2 * AHEAD - 1):
        assert window.room == 1
        window.open(1)
        window.take([result(root, 0)])
    assert window.room == 0  # the first input holds all others up
    window.take([result(0, 0)])
    assert window.room == 0
    window.ready.popleft()
    assert window.room == 1


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 10))
def test_every_input_has_one_value_in_whatever_order_events_come(
    random: random.Random, ordered: bool, concurrency: int
) -> None:
    window, pending, found, root = MapWindow(concurrency, ordered=ordered), list[Event](), list[Finished](), 0
    while window.pulled < 30 or pending:
        steps = ["open"] * (window.pulled < 30 and window.room > 0) + ["take"] * bool(pending)
        match random.choice([*steps, *["pass on"] * bool(window.ready)]):  # one of them is always possible
            case "open":
                count = random.randint(1, window.room)
                pending += [result(root, at, value=window.pulled + at) for at in range(count)]
                window.open(count)
                root += 1
            case "take":
                window.take([pending.pop(random.randrange(len(pending)))])
            case "pass on":
                found.append(window.ready.popleft())
    found += window.ready
    assert not window.unfinished
    assert [value for _, value, _ in found] == [index for index, _, _ in found]
    indices = [index for index, _, _ in found]
    assert (indices if ordered else sorted(indices)) == list(range(window.pulled))
