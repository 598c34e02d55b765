"""Results of a parameter set that runs again are counted once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.results.seen import Seen

runs = st.tuples(st.integers(0, 1), st.sampled_from([(0,), (1,), (0, 3)]), st.integers(0, 30), st.integers(1, 12))


@given(st.lists(runs, max_size=30))
def test_every_element_is_new_once(given_runs: list[tuple[int, tuple[int, ...], int, int]]) -> None:
    seen, known = Seen(), set[tuple[int, tuple[int, ...], int]]()
    for point, frame, start, count in given_runs:
        fresh = [start + i for part in seen.add(point, frame, start, count) for i in part]
        expected = [i for i in range(start, start + count) if (point, frame, i) not in known]
        assert fresh == expected
        known.update((point, frame, i) for i in range(start, start + count))


@given(st.permutations(range(12)))
def test_plain_values_in_any_order_of_a_loop(order: list[int]) -> None:
    seen = Seen()
    for index in order:
        assert seen.add(0, (5, index), -1, 1) == [range(1)]
    for index in order:
        assert seen.add(0, (5, index), -1, 1) == []


def test_a_plain_value_and_an_iterator_of_one_yield_do_not_meet() -> None:
    seen = Seen()
    assert seen.add(0, (5,), -1, 1) == [range(1)]
    assert seen.add(0, (5,), 5, 1) == [range(1)]


def test_a_million_elements_in_order_take_one_range() -> None:
    seen = Seen()
    for start in range(0, 1_000_000, 1000):
        assert seen.add(0, (0,), start, 1000) == [range(1000)]
    (ranges,) = seen._by_root[0].values()
    assert ranges._starts == [0]
    assert ranges._stops == [1_000_000]


def test_what_is_done_is_forgotten() -> None:
    seen = Seen()
    seen.add(0, (3,), -1, 1)
    seen.forget(3)
    assert not seen._by_root
    assert seen.add(0, (3,), -1, 1) == [range(1)]
