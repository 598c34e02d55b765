"""Values of sites as JSON: none makes the encoder raise, block, or write far more than it was given."""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import itertools
import json
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from dfm_async.wire.json_values import JsonValues

MIB = 1024 * 1024
VALUES = JsonValues(array_items=100, record_bytes=10_000, json_depth=16)


class Rude:
    """Raises whatever it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)

    def __repr__(self) -> str:
        raise ValueError("repr")


class Tensor:
    """As some libraries have them: the size is a method."""

    dtype = "float32"
    shape = (2, 3)

    def size(self) -> tuple[int, ...]:
        return self.shape

    def tolist(self) -> list[list[float]]:
        return [[1.0] * 3] * 2


class Endless(Mapping[int, int]):
    """A mapping without an end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, key: int) -> int:
        return key


@dataclasses.dataclass
class Holder:
    value: Any


def deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def contains_itself(times: int) -> Any:
    found: list[Any] = []
    found.extend([found] * times)
    return found


def viewed(data: bytes) -> memoryview:
    return memoryview(data)


def array_of_objects(*values: Any) -> Any:
    found = np.empty(len(values), object)
    found[:] = values
    return found


HOSTILE: dict[str, Any] = {
    "hollow": np.zeros((10**12, 0)),
    "hollow in the middle": np.zeros((10**6, 0, 10**6)),
    "hollow and deep": np.zeros((10, 10, 10, 10, 10, 10, 0)),
    "large number": 10**5000,
    "larger number": -(1 << 3_000_000),
    "large numbers": [10**5000, {"a": 10**5000}],
    "large key": {10**5000: 1, (10**5000,): 2},
    "large boolean array": np.zeros((1000, 1000), bool),
    "object array": array_of_objects(10**5000, "\ud800", {1: {2}}),
    "structured array": np.zeros(3, [("a", "i4"), ("b", "O")]),
    "raw array": np.zeros(3, "V8"),
    "long double": np.longdouble(1) / 3,
    "long doubles": np.ones(50, np.longdouble),
    "no times": np.array(["NaT", "2026-01-01"], "M8[ns]"),
    "complex": [1 + 2j, np.complex64(1)],
    "tensor": Tensor(),
    "range": range(10**30),
    "range of a key": {range(10**30): range(-(10**30), 10**30)},
    "memory": memoryview(bytes(1000)),
    "memory of numbers": np.zeros((10, 10)).data,
    "decimal": [decimal.Decimal("1e999999999"), decimal.Decimal("sNaN"), decimal.Decimal("-0")],
    "fraction": fractions.Fraction(10**5000, 3),
    "surrogates": {"\ud800": ["\udfff", "a\ud800b"]},
    "deep": deep(1, 100_000),
    "deep and odd": deep({(1,): "\ud800"}, 500),
    "itself": contains_itself(1),
    "itself, often": contains_itself(50),
    "rude": [Rude(), {Rude: Rude()}, Holder(Rude())],
    "endless": {"\ud800": Endless()},
    "type": [int, np.ndarray, Rude],
    "iterator": [iter([1]), map(str, [1]), (x for x in [1])],
    "not a number": [math.nan, math.inf, np.float32("nan"), np.float16("inf")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_value_has_a_bounded_cost(name: str) -> None:
    value = HOSTILE[name]
    tracemalloc.start()
    try:
        for shown in (value, {"inside": [value]}, {(1, 2): value}):
            data = VALUES.encode(shown)
            assert len(data) <= 10_000
            json.loads(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(10**12, 0), (0, 10**12), (200, 0), (0, 200), (3, 0), (0,), ()])
def test_an_array_is_lists_or_a_summary_by_its_shape(shape: tuple[int, ...]) -> None:
    found = json.loads(VALUES.encode(np.zeros(shape)))
    if shape in ((10**12, 0), (200, 0)):
        assert found == {"type": "numpy.ndarray", "shape": list(shape), "dtype": "float64"}
    else:
        assert found == np.zeros(shape).tolist()


WHOLE = JsonValues(array_items=10_000, record_bytes=MIB, json_depth=16)


@pytest.mark.parametrize(
    "value",
    [
        [np.zeros((9999, 0))] * 8000,
        [np.zeros((99, 0))] * 100_000,
        [np.zeros((100, 100), "u1")] * 1000,
        [np.zeros(100, [("a", "u1"), *((f"f{number}", "S0") for number in range(99))])] * 1000,
        [np.zeros(100, [("a", "u1"), ("b", "u1", (99, 0))])] * 1000,
        [range(10_000)] * 1000,
    ],
    ids=["hollow", "slightly hollow", "arrays", "fields", "fields with a shape", "ranges"],
)
def test_parts_that_are_larger_as_json_are_counted_together(value: Any) -> None:
    tracemalloc.start()
    try:
        found = json.loads(WHOLE.encode(value))
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()
    if isinstance(found, dict):
        assert found["omitted"]
    else:
        assert found[0] == {"type": "numpy.ndarray", "shape": [9999, 0], "dtype": "float64"}


def test_long_whole_numbers_are_counted_by_their_length() -> None:
    number = 10**4000
    few = [number] * 10
    assert json.loads(WHOLE.encode(few)) == few
    for value in ([number] * 20_000, {number + more: 1 for more in range(20_000)}, [Holder([number] * 20_000)]):
        assert len(WHOLE.encode(value)) < 1000
    assert json.loads(WHOLE.encode_whole([2**100] * 100_000)) == [2**100] * 100_000


def test_a_whole_number_is_written_as_long_as_it_can_be_read() -> None:
    assert json.loads(VALUES.encode(10**4000)) == 10**4000
    found = json.loads(VALUES.encode({"n": 10**5000}))
    assert found == {"n": {"type": "int", "bits": (10**5000).bit_length(), "omitted": True}}


LEAVES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(),
    st.text(st.characters(codec=None, exclude_categories=()), max_size=20),
    st.integers(0, 20_000).map(lambda bits: 1 << bits),
    st.decimals() | st.fractions() | st.datetimes() | st.timedeltas() | st.uuids() | st.complex_numbers(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.binary().map(viewed),
    stn.arrays(
        stn.scalar_dtypes() | stn.array_dtypes(max_size=3), stn.array_shapes(min_dims=0, min_side=0, max_side=6)
    ),
    st.integers(0, 10**15).map(lambda length: np.zeros((length, 0), "u1")),
    st.sampled_from([Tensor(), int, object()]),
)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers()) | st.none() | st.floats()
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.tuples(inner, inner)
        | st.builds(Holder, inner)
        | inner.map(array_of_objects)
        | st.builds(deep, inner, st.integers(0, 300))
    ),
    max_leaves=10,
)


@given(ANYTHING)
@settings(deadline=None, max_examples=150)
def test_no_value_makes_the_encoder_raise_or_write_without_bound(value: Any) -> None:
    assert len(VALUES.encode(value)) <= 10_000
    data = VALUES.encode_whole(value)
    json.loads(data)
    assert len(data) < MIB
