"""Which values fit advice."""

from __future__ import annotations

import datetime as dt
from enum import Enum
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from dfm_async.discovery import (
    AdvisedDateRange,
    AdvisedDict,
    AdvisedError,
    AdvisedLiteral,
    AdvisedOneOf,
    AdvisedSubsetOf,
    AdvisedValue,
    Okay,
)


class Colour(Enum):
    RED = "red"


class Point(BaseModel):
    x: int


NESTED = AdvisedDict({"a": AdvisedOneOf([1, AdvisedDateRange("2026-01-01", "2026-01-31")]), "b": [1, {"c": None}]})


@pytest.mark.parametrize(
    ("advice", "value"),
    [
        (AdvisedLiteral(1), 1.0),
        (AdvisedLiteral((1, 2)), [1, 2]),
        (AdvisedLiteral("red"), Colour.RED),
        (AdvisedLiteral({"x": 1}), Point(x=1)),
        (AdvisedLiteral([1, 2]), np.array([1, 2])),
        (AdvisedLiteral(None), None),
        (AdvisedOneOf([0, "", None]), ""),
        (AdvisedOneOf([AdvisedError("no"), AdvisedSubsetOf(["a"])]), ["a"]),
        (AdvisedSubsetOf(["ab", "c"]), "ab"),
        (AdvisedSubsetOf(["ab", "c"]), ["c", "ab"]),
        (AdvisedSubsetOf(["ab", "c"]), {"c"}),
        (AdvisedSubsetOf([]), []),
        (AdvisedSubsetOf([AdvisedDateRange("2026", "2027"), 3]), ["2026-05", 3]),
        (NESTED, {"a": "2026-01-31T23:59:59", "b": [1, {"c": None}]}),
        (AdvisedDict({"a": 1}, allow_extras=True), {"a": 1, "b": 2}),
        (AdvisedDateRange("2026-01-01", "2026-01-31"), dt.date(2026, 1, 31)),
        (AdvisedDateRange("2026-01-01", "2026-01-31"), dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)),
        (AdvisedDateRange("2026-01-01", "2026-01-31"), {"startdate": "2026-01-02", "enddate": "2026-01-03"}),
        (AdvisedDateRange("2026-W01", "2026-W09"), "2026-W05"),
        (Okay(), object()),
    ],
)
def test_it_fits(advice: AdvisedValue, value: Any) -> None:
    assert advice.validate(value) is None


@pytest.mark.parametrize(
    ("advice", "value"),
    [
        (AdvisedLiteral(1), True),
        (AdvisedLiteral(0), False),
        (AdvisedLiteral([1]), [True]),
        (AdvisedLiteral("1"), 1),
        (AdvisedOneOf([1, 2]), [1]),
        (AdvisedOneOf([]), None),
        (AdvisedSubsetOf(["a", "b"]), "ab"),
        (AdvisedSubsetOf(["a", "b"]), ["a", "c"]),
        (AdvisedSubsetOf([AdvisedLiteral(["a"])]), ["a"]),
        (NESTED, {"a": 2, "b": [1, {"c": None}]}),
        (NESTED, {"a": 1, "b": [1, {"c": 0}]}),
        (NESTED, {"a": 1}),
        (NESTED, [("a", 1)]),
        (AdvisedDict({"a": 1}), {"a": 1, "b": 2}),
        (AdvisedDateRange("2026-01-01", "2026-01-31"), "2026-02-01"),
        (AdvisedDateRange("2026-01-01", "2026-01-31"), 20260115),
        (AdvisedDateRange("2026-01-01", "2026-01-31"), {"startdate": "2026-01-02", "enddate": "2026-03-03"}),
        (AdvisedDateRange("2026-01-01T00:00:00+00:00", "2026-01-01T12:00:00+00:00"), "2026-01-01T13:00:00"),
        (AdvisedError("no"), 1),
    ],
)
def test_it_does_not_fit_and_the_message_gives_a_reason(advice: AdvisedValue, value: Any) -> None:
    assert advice.validate(value)


def test_a_message_names_the_key_and_what_was_expected() -> None:
    assert AdvisedDict({"a": AdvisedOneOf([1, 2])}).validate({"a": 3}) == "['a']: expected one of [1, 2], not 3"


@pytest.mark.parametrize("kind", [AdvisedOneOf, AdvisedSubsetOf])
@pytest.mark.parametrize("values", ["abc", 3, None])
def test_options_are_a_list(kind: type[AdvisedValue], values: Any) -> None:
    with pytest.raises(TypeError, match="a list of values"):
        kind(values)  # type: ignore[call-arg]


def test_advice_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="plain data"):
        AdvisedLiteral(object()).as_pydantic_value()


def test_advice_becomes_plain_data() -> None:
    assert NESTED.as_pydantic_value() == {
        "a": [1, {"startdate": "2026-01-01", "enddate": "2026-01-31"}],
        "b": [1, {"c": None}],
    }
    assert AdvisedSubsetOf({2.5}).as_pydantic_value() == [2.5]  # type: ignore[arg-type]
    assert AdvisedLiteral({"t": (np.float64(1.5), dt.date(2026, 1, 1), Colour.RED)}).as_pydantic_value() == {
        "t": [1.5, "2026-01-01", "red"]
    }
