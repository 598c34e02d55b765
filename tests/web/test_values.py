"""Values as JSON, also those that JSON cannot hold."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import decimal
import enum
import gc
import json
import math
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dfm_async import Failure, OperationFailed, Result, ResultLimits
from dfm_async.results.log import ResultLog
from dfm_async.web import WebLimits
from dfm_async.web.records import Records

LIMITS = WebLimits(array_items=10, record_bytes=10_000)


def written(value: Any) -> Any:
    return json.loads(Records(LIMITS).values.encode(value))


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: float
    y: Any = None


class Model(BaseModel):
    name: str
    when: dt.date


class Record(msgspec.Struct):
    a: int


Pair = collections.namedtuple("Pair", ["left", "right"])


class Odd:
    def __repr__(self) -> str:
        return "odd"


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


PLAIN = [
    (None, None),
    (True, True),
    (2**53, 2**53),
    ("é", "é"),
    (1.5, 1.5),
    (math.nan, None),
    (math.inf, None),
    (2**70, 2**70),
    (Pair(1, Colour.RED), [1, "red"]),
    ("\ud800", "?"),
    (dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), "2026-01-02T03:04:05Z"),
    (dt.date(2026, 1, 2), "2026-01-02"),
    (dt.time(3, 4), "03:04:00"),
    (dt.timedelta(seconds=90), "PT90S"),
    (b"\x00\xff", base64.b64encode(b"\x00\xff").decode()),
    (bytearray(b"ab"), base64.b64encode(b"ab").decode()),
    (decimal.Decimal("1.10"), "1.10"),
    (uuid.UUID(int=5), str(uuid.UUID(int=5))),
    (Colour.RED, "red"),
    ({1, 2}, [1, 2]),
    ((1, [2]), [1, [2]]),
    (range(3), [0, 1, 2]),
    (Point(1.0, Point(2.0)), {"x": 1.0, "y": {"x": 2.0, "y": None}}),
    (Model(name="a", when=dt.date(2026, 1, 2)), {"name": "a", "when": "2026-01-02"}),
    (Record(1), {"a": 1}),
    ({(1, 2): "x"}, {"(1, 2)": "x"}),
    ({1: "x"}, {"1": "x"}),
    (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
    (np.float32(0.5), 0.5),
    (np.array([math.nan, 1.0]), [None, 1.0]),
    (np.zeros((100, 3), "f4"), {"type": "numpy.ndarray", "shape": [100, 3], "dtype": "float32"}),
    (Odd(), {"type": f"{__name__}.Odd", "repr": "odd"}),
    (Rude(), {"type": f"{__name__}.Rude", "repr": "repr raised RuntimeError"}),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN, ids=lambda found: type(found).__name__)
def test_each_value_has_a_form_in_json(value: Any, expected: Any) -> None:
    assert written(value) == expected
    assert written({"inside": [value]}) == {"inside": [expected]}
    assert written({"inside": [value, {(1,): 2}]})["inside"][0] == expected  # also where the quick way fails


def test_large_value_is_summarised() -> None:
    assert written(["x" * 20_000]) == {"type": "list", "json_bytes": 20_004, "omitted": True}


def test_a_value_that_contains_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert written(value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.decimals(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=8,
)


@given(ANYTHING)
def test_every_value_can_be_written(value: Any) -> None:
    written(value)


def test_a_record_keeps_its_name_whatever_its_value_is() -> None:
    records = Records(LIMITS).of(ResultLog("job", ResultLimits()))
    just_fits = Result(0, "yield", "x" * 9_990, (0,), "lab", "node")
    assert json.loads(records.json(just_fits))["event"] == "result"
    too_large = json.loads(records.json(Result(1, "yield", "x" * 20_000, (0,), "lab", "node")))
    assert (too_large["event"], too_large["offset"], too_large["value"]["omitted"]) == ("result", 1, True)
    odd = Failure(2, None, OperationFailed("lab", "op", "op#0", (0,), 1, "E", "\ud800", ""), (0,), "lab", "op#0")
    assert json.loads(records.json(odd))["error"]["message"] == "?"


def test_cached_records_are_bounded_and_end_with_their_log() -> None:
    records = Records(WebLimits())
    log = ResultLog("job", ResultLimits())
    of_log = records.of(log)
    for offset in range(3_000):
        of_log.json(Result(offset, "yield", "x" * 10_000, (0,), "lab", "node"))
    assert sum(map(len, of_log._kept.values())) <= 8 * 1024 * 1024
    assert records.of(log) is of_log
    del log
    gc.collect()
    assert not records._logs
