"""Tables, series, datasets and images as JSON and in notebooks: shape, columns and first rows, within the limits."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
import xarray as xr
from PIL import Image

from dfm_async.display.markup import value_html
from dfm_async.wire.json_values import JsonValues
from tests.wire.frames import LIBRARIES
from tests.wire.shapes import through, untrusted

VALUES = JsonValues(array_items=20, record_bytes=10_000, json_depth=16)

SHOWN: list[tuple[Any, Any]] = [
    (
        pd.DataFrame({"a": [1, 2], "b": [np.nan, 0.5]}, index=["x", "y"]),
        {
            "type": "pandas.DataFrame",
            "shape": [2, 2],
            "columns": ["a", "b"],
            "dtypes": ["int64", "float64"],
            "index": ["x", "y"],
            "rows": [[1, None], [2, 0.5]],
        },
    ),
    (
        pd.DataFrame({("a", 1): [pd.NaT, pd.Timestamp("2024")]}),
        {
            "type": "pandas.DataFrame",
            "shape": [2, 1],
            "columns": [["a", 1]],
            "dtypes": [str(pd.Series([pd.NaT, pd.Timestamp("2024")]).dtype)],
            "index": [0, 1],
            "rows": [[None], ["2024-01-01T00:00:00"]],
        },
    ),
    (
        pd.Series([1, None], name="s", dtype="Int8"),
        {"type": "pandas.Series", "shape": [2], "name": "s", "dtype": "Int8", "index": [0, 1], "values": [1, None]},
    ),
    (pd.Index([3]), {"type": "pandas.Index", "shape": [1], "dtype": "int64", "values": [3]}),
    (pd.Timestamp("2024-01-02", tz="UTC"), "2024-01-02T00:00:00+00:00"),
    ([pd.NaT, pd.NA], [None, None]),
    (
        pa.table({"a": [1, None]}),
        {"type": "pyarrow.Table", "shape": [2, 1], "columns": ["a"], "dtypes": ["int64"], "rows": [[1], [None]]},
    ),
    (pa.array(["x"]), {"type": "pyarrow.Array", "shape": [1], "dtype": "string", "values": ["x"]}),
    (
        pl.DataFrame({"a": [1], "b": ["x"]}),
        {
            "type": "polars.DataFrame",
            "shape": [1, 2],
            "columns": ["a", "b"],
            "dtypes": ["Int64", "String"],
            "rows": [[1, "x"]],
        },
    ),
    (
        pl.Series("s", [1]),
        {"type": "polars.Series", "shape": [1], "name": "s", "dtype": "Int64", "values": [1]},
    ),
    (
        xr.Dataset({"t": ("x", [0.5])}, coords={"x": np.array(["2024"], "M8[ns]")}, attrs={"unit": "K"}),
        {
            "type": "xarray.Dataset",
            "dims": {"x": 1},
            "coords": {
                "x": {
                    "dims": ["x"],
                    "shape": [1],
                    "dtype": "datetime64[ns]",
                    "attrs": {},
                    "values": ["2024-01-01T00:00:00"],
                }
            },
            "variables": {"t": {"dims": ["x"], "shape": [1], "dtype": "float64", "attrs": {}, "values": [0.5]}},
            "attrs": {"unit": "K"},
        },
    ),
    (
        sp.csr_matrix([[1.0, 0.0]]),
        {"type": "scipy.sparse.csr_matrix", "shape": [1, 2], "dtype": "float64", "stored": 1},
    ),
    (Image.new("L", (3, 2)), {"type": "PIL.Image.Image", "mode": "L", "size": [3, 2]}),
    (np.ma.array([1, 2], mask=[False, True]), [1, None]),
]


@pytest.mark.parametrize(("value", "expected"), SHOWN, ids=[type(value).__name__ for value, _ in SHOWN])
def test_a_value_has_a_documented_form_in_json(value: Any, expected: Any) -> None:
    assert json.loads(VALUES.encode(value)) == expected
    assert json.loads(VALUES.encode({"inside": [value]})) == {"inside": [expected]}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_value_of_a_library_can_be_shown(library: str) -> None:
    for value in LIBRARIES[library]:
        shown = json.loads(VALUES.encode(value))
        assert not isinstance(shown, dict) or "repr" not in shown, shown
        json.loads(JsonValues(array_items=20, record_bytes=50, json_depth=16).encode(value))
        assert len(value_html(value)) < 200_000


def test_only_the_first_rows_of_a_large_table_are_written() -> None:
    columns = {name: range(100_000) for name in "abc"}
    for value in (pd.DataFrame(columns), pa.table(columns), pl.DataFrame(columns)):
        found = json.loads(VALUES.encode(value))
        assert found["shape"] == [100_000, 3]
        assert found["rows"][0] == [0, 0, 0]
        assert len(found["rows"]) * 3 <= 20
    hollow = json.loads(VALUES.encode(pd.DataFrame(index=pd.RangeIndex(2**60))))
    assert hollow["shape"] == [2**60, 0]


def test_only_the_first_columns_of_a_wide_table_are_written() -> None:
    columns: dict[str, list[int]] = {str(number): [] for number in range(1000)}
    for value in (pd.DataFrame(columns), pd.DataFrame(np.zeros((1, 1000))), pa.table(columns), pl.DataFrame(columns)):
        found = json.loads(VALUES.encode(value))
        assert found["shape"][1] == 1000
        assert len(found["columns"]) == len(found["dtypes"]) == VALUES.array_items


LONG = "x" * 200_000
SHARED: list[Any] = [
    pd.Categorical.from_codes([0] * 5000, [LONG]),
    pd.Series(range(5000), index=pd.MultiIndex([[LONG], range(5000)], [[0] * 5000, range(5000)])),
    pa.DictionaryArray.from_arrays([0] * 5000, pa.array([LONG])),
    pa.ListViewArray.from_arrays([0] * 50, [1 << 14] * 50, pa.nulls(1 << 14)),
    pa.table({"a": pa.ListArray.from_arrays([0, 1 << 20], pa.nulls(1 << 20))}),
    pd.Series(pd.arrays.ArrowExtensionArray(pa.ListArray.from_arrays([0, 1 << 20], pa.nulls(1 << 20)))),
    pa.RunEndEncodedArray.from_arrays([1000], pa.ListArray.from_arrays([0, 1 << 20], pa.nulls(1 << 20))),
    pl.Series([LONG]).gather([0] * 5000),
]


@pytest.mark.parametrize("value", SHARED, ids=lambda value: type(value).__name__)
def test_large_parts_that_rows_share_are_not_repeated(value: Any) -> None:
    values = JsonValues(array_items=10_000, record_bytes=1 << 22, json_depth=16)
    began = time.process_time()
    for shown in (value, {(1,): value}):
        assert len(values.encode(shown)) <= values.record_bytes
    assert time.process_time() - began < 2


def test_a_table_that_does_not_show_itself_is_a_table_in_notebooks() -> None:
    shown = value_html(pa.table({"<a>": range(1000), "b": ["x"] * 1000}))
    assert "1,000 rows x 2 columns" in shown
    assert "&lt;a&gt;" in shown
    assert shown.count("<tr>") == 6


def test_a_table_whose_preview_panics_is_a_summary() -> None:
    frame = pl.DataFrame({"d": [2**31 - 1]}).with_columns(pl.col("d").cast(pl.Int32).cast(pl.Date))
    for value in (frame, frame["d"]):
        arrived = through(value, untrusted)
        for shown in (VALUES.encode(arrived), VALUES.encode_whole(arrived), VALUES.encode({1: [arrived, {(1,): 2}]})):
            json.loads(shown)
        assert value_html(arrived)
