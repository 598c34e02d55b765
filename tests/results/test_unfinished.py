"""Parameter sets are kept until they succeed, within a limit."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import DfmError
from dfm_async.results.unfinished import UnfinishedSets

EARLY, LATE = DfmError("early"), DfmError("late")


def kept(count: int, **options: Any) -> UnfinishedSets:
    sets = UnfinishedSets(**options)
    sets.add(0, [{"n": n} for n in range(count)])
    return sets


def test_a_set_is_dropped_when_it_succeeds_and_kept_when_it_fails() -> None:
    sets = kept(3)
    sets.failed((1, 7), EARLY)
    sets.failed((1,), LATE)
    for index in range(2):
        sets.completed(index)
    assert sets.numbers == [1, 2]
    assert (sets.rows[1], sets.error(1), sets.error(2)) == ({"n": 1}, EARLY, None)


def test_an_error_of_the_job_is_one_of_every_set_that_has_not_succeeded() -> None:
    sets = kept(3)
    sets.completed(0)
    sets.failed((), EARLY)
    sets.completed(1)
    assert [(index, sets.error(index)) for index in sets.numbers] == [(1, EARLY), (2, EARLY)]


def test_sets_beyond_the_limit_are_known_by_their_numbers() -> None:
    sets = kept(3, limit=1500)
    assert [row is None for row in sets.rows.values()] == [False, False, True]
    sets.completed(0)
    sets.add(3, [{"n": 3}])
    assert sets.numbers == [1, 2, 3]
    assert sets.rows[3] == {"n": 3}


def test_sets_that_were_never_added_are_known_when_they_fail() -> None:
    sets = kept(1)
    sets.failed((4,), EARLY)
    assert sets.numbers == [0, 4]
    assert sets.rows.get(4) is None


@given(st.lists(st.tuples(st.sampled_from(["add", "fail", "complete"]), st.integers(0, 5))))
def test_only_sets_without_an_error_are_ever_dropped(steps: list[tuple[str, int]]) -> None:
    sets = UnfinishedSets(limit=4 * 512)
    added, failed, done = 0, set[int](), set[int]()
    for step, index in steps:
        if step == "add":
            sets.add(added, [{"n": added}])
            added += 1
        elif index < added and index not in done:
            if step == "fail":
                sets.failed((index,), EARLY)
                failed.add(index)
            else:
                sets.completed(index)
                done.add(index)
    assert sets.numbers == sorted(set(range(added)) - (done - failed))
    assert sets.size == 512 * sum(row is not None for row in sets.rows.values()) <= 4 * 512
