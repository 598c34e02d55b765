"""Which parameter sets are opened, and when: new ones, those that were lost, and those of an interrupted job."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.engine.frames import FrameLedger


def ledger(window: int, *, keep_rows: bool = True, locations: int = 1) -> FrameLedger:
    return FrameLedger({}, locations, window, keep_rows, lambda row: row.get("bytes", 0))


def opened(frames: FrameLedger) -> list[int]:
    """Opens what can be opened, and tells which sets that were."""
    return [
        index
        for batch in frames.take(allow_new=True)
        for index in range(batch.first, batch.first + len(batch.rows))
        if batch.rows[index - batch.first]["n"] == index
    ]


def rows(*numbers: int, **more: Any) -> dict[int, dict[str, Any]]:
    return {n: {"n": n, **more} for n in numbers}


def test_what_an_interrupted_job_left_over_is_opened_as_far_as_the_window_allows() -> None:
    frames = ledger(2)
    frames.resume(rows(1, 3, 4, 7), 8)
    frames.add([{"n": 8}])
    frames.stopped = True
    assert opened(frames) == [1, 3]
    assert not frames.finished
    assert frames.done(3)
    assert opened(frames) == [4]
    assert frames.done(1)
    assert frames.done(4)
    assert opened(frames) == [7, 8]
    assert frames.done(7)
    assert frames.done(8)
    assert frames.finished


def test_only_the_last_batch_is_called_the_last() -> None:
    frames = ledger(1)
    frames.resume(rows(0, 1), 2)
    frames.stopped = True
    assert [batch.last for batch in frames.take(allow_new=True)] == [False]
    frames.done(0)
    assert [batch.last for batch in frames.take(allow_new=True)] == [True]


def test_an_interrupted_job_that_loses_a_worker_before_it_begins_keeps_its_sets() -> None:
    frames = ledger(10)
    frames.resume(rows(1, 3), 4)
    assert frames.requeue() == 1
    assert opened(frames) == [1, 3]


def test_heavy_sets_of_an_interrupted_job_are_opened_one_after_the_other() -> None:
    frames = ledger(10)
    frames.resume(rows(0, 1, 2, bytes=50 << 20), 3)
    assert opened(frames) == [0]
    frames.done(0)
    assert opened(frames) == [1]


@given(
    window=st.integers(1, 4),
    left=st.sets(st.integers(0, 9)),
    steps=st.lists(st.sampled_from(["add", "open", "done", "lost"]), max_size=60),
)
def test_every_set_is_opened_and_the_window_is_kept(window: int, left: set[int], steps: list[str]) -> None:
    frames = ledger(window)
    frames.resume(rows(*left), 10)
    under_way: list[int] = []
    finished: list[int] = []
    for step in [*steps, *["open", "done"] * 100]:
        match step:
            case "add":
                frames.add([{"n": frames.added}])
            case "open":
                under_way += opened(frames)
                assert len(set(under_way)) == len(under_way) <= window
            case "done" if under_way:
                finished.append(under_way.pop(0))
                assert frames.done(finished[-1])
            case "lost":
                under_way.clear()
                frames.requeue()
    assert sorted(finished) == [*sorted(left), *range(10, frames.added)]
    frames.stopped = True
    assert frames.finished
