"""Metrics made plain."""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.model.scalars import plain_step, plain_values

PLAIN = {bool, int, float, str}
whole = st.integers(-(2**63), 2**64 - 1)
texts = st.text(st.characters(exclude_categories=()))
scalars = (
    st.booleans()
    | whole
    | st.floats()
    | texts
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**31), 2**31 - 1).map(np.int64)
    | st.booleans().map(np.bool_)
    | st.floats().map(np.array)
)


class Level(enum.IntEnum):
    HIGH = 3


@given(st.dictionaries(texts, scalars))
def test_whatever_is_taken_is_plain_and_can_be_sent(values: dict[str, Any]) -> None:
    found = plain_values(values)
    assert {type(value) for value in found.values()} <= PLAIN
    assert found is not values
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=dict[str, bool | int | float | str])
    assert [(name, type(value)) for name, value in sent.items()] == [(n, type(v)) for n, v in found.items()]
    assert repr(sent) == repr(found)


@given(st.dictionaries(st.text(), st.booleans() | whole | st.floats(allow_nan=False) | st.text()))
def test_what_is_plain_stays_as_it_is(values: dict[str, Any]) -> None:
    assert plain_values(values) == values


def test_subclasses_become_what_they_are() -> None:
    found = plain_values({"level": Level.HIGH, "share": np.float64(0.5)})
    assert found == {"level": 3, "share": 0.5}
    assert {type(value) for value in found.values()} == {int, float}


@pytest.mark.parametrize(
    "value", [None, [1], {"a": 1}, 1j, b"1", Fraction(1, 2), object(), np.array([1.0]), np.array(1j)]
)
def test_what_is_no_scalar_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match="metric 'loss' must be"):
        plain_values({"good": 1, "loss": value})


def test_names_are_strings_and_metrics_a_mapping() -> None:
    with pytest.raises(TypeError, match="name of a metric must be a string, not 1"):
        plain_values({1: 1.0})  # type: ignore[dict-item] # the fault
    with pytest.raises(TypeError, match="must be a mapping"):
        plain_values([("loss", 1.0)])  # type: ignore[arg-type] # the fault


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_number_that_cannot_be_sent_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="metric 'n' does not fit"):
        plain_values({"n": value})
    with pytest.raises(ValueError, match="step does not fit"):
        plain_step(value)


def test_a_step_is_a_whole_number_or_none() -> None:
    assert plain_step(None) is None
    assert plain_step(np.int64(4)) == 4
    wrongs: list[Any] = [1.0, "1", [1]]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="step must be a whole number"):
            plain_step(wrong)
