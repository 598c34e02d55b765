"""Values of well-known libraries, and what it means that one arrived as it was."""

from __future__ import annotations

import datetime as dt
import io
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import scipy.sparse as sp
import xarray as xr
from PIL import Image

ROME = ZoneInfo("Europe/Rome")
_ROWS = 4

COLUMNS: dict[str, Any] = {
    "integers": np.arange(_ROWS, dtype="i2"),
    "floats": [1.5, np.nan, -0.0, np.inf],
    "complex": [1j, 2, 3, 4],
    "booleans": [True, False, True, True],
    "strings": ["a", None, "ä", ""],
    "objects": pd.Series([1, "x", None, (1, [2])], dtype=object),
    "strings as objects": pd.Series(["a", None, "b", np.nan], dtype=object),
    "equal lists": pd.Series([[1], [2], [3], [4]], dtype=object),
    "moments": pd.date_range("2024", periods=_ROWS, unit="s"),
    "nanoseconds": pd.Series(np.array(["2024-01-01T00:00:00.000000001", "NaT"] * 2, "M8[ns]")),
    "moments in a zone": pd.date_range("2024-10-26 22:00", periods=_ROWS, freq="h", tz=ROME),
    "moments at an offset": pd.date_range("2024", periods=_ROWS, tz=dt.timezone(dt.timedelta(hours=2))),
    "durations": pd.to_timedelta([1, None, 2, 3], unit="s"),
    "categories": pd.Categorical(["x", "y", None, "x"], categories=["y", "x", "z"], ordered=True),
    "categories of times": pd.Categorical(pd.date_range("2024", periods=_ROWS)),
    "Int16": pd.array([1, None, 3, 4], dtype="Int16"),
    "Float32": pd.array([1, None, 3, 4], dtype="Float32"),
    "boolean": pd.array([True, None, False, True], dtype="boolean"),
    "periods": pd.period_range("2024-01", periods=_ROWS, freq="M"),
    "intervals": pd.interval_range(0, _ROWS, closed="left"),
    "python strings": pd.array(["a", None, "c", "d"], dtype=pd.StringDtype("python")),
    "arrow strings": pd.array(["a", None, "c", "d"], dtype=pd.StringDtype("pyarrow")),
    "arrow integers": pd.array([1, None, 3, 4], dtype=pd.ArrowDtype(pa.int8())),
    "arrow lists": pd.array([[1], None, [2, 3], []], dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
    "arrow moments": pd.array([dt.datetime(2024, 1, 1)] * _ROWS, dtype=pd.ArrowDtype(pa.timestamp("us", "UTC"))),
}

INDEXES: list[Any] = [
    pd.RangeIndex(2, 14, 3, name="r"),
    pd.Index([3, 1, 2, 1], name=("a", 1)),
    pd.Index([1.5, np.nan, 2, 3]),
    pd.Index(["a", "b", None, "d"]),
    pd.Index(["a", 1, None, (2,)], dtype=object),
    pd.Index([True, False, True, True]),
    pd.Index([1, None, 3, 4], dtype="Int64"),
    pd.date_range("2024", periods=_ROWS, freq="D"),
    pd.date_range("2024", periods=_ROWS, freq="h", tz=ROME),
    pd.DatetimeIndex(["2024-01-01", "NaT", "2023-01-01", "2024-01-01"]),
    pd.timedelta_range("1h", periods=_ROWS, freq="h"),
    pd.period_range("2024", periods=_ROWS, freq="Q"),
    pd.CategoricalIndex(["a", "b", None, "a"], name="c"),
    pd.interval_range(0, _ROWS),
    pd.IntervalIndex.from_breaks(pd.date_range("2024", periods=_ROWS + 1)),
    pd.MultiIndex.from_product([[1, 2], ["a", "b"]], names=["x", None]),
    pd.MultiIndex.from_arrays([[1.5, np.nan, 2, 2], pd.date_range("2024", periods=_ROWS, tz=ROME)]),
]


def _frames() -> list[Any]:
    whole = pd.DataFrame(COLUMNS)
    whole.attrs = {"unit": "K", "since": pd.Timestamp("2024", tz=ROME), "nested": {"a": (1, np.int8(2))}}
    unique = pd.DataFrame({"a": [1]}).set_flags(allows_duplicate_labels=False)
    return [
        whole,
        *(whole[[name]] for name in whole),
        *(whole[name] for name in whole),
        *(pd.DataFrame({"a": range(_ROWS), "b": "x"}, index=index) for index in INDEXES),
        *(pd.DataFrame([range(_ROWS)], columns=index) for index in INDEXES if index.is_unique),
        *INDEXES,
        pd.DataFrame(np.arange(12.0).reshape(3, 4)),
        pd.DataFrame(np.arange(12.0).reshape(3, 4), copy=False),
        pd.DataFrame([[1, 2.5, "x"]], columns=["a", "a", "b"]),
        pd.DataFrame(index=pd.RangeIndex(3)),
        pd.DataFrame(columns=["a", "b"]),
        pd.DataFrame(),
        pd.Series([], dtype="f4", name=None),
        unique,
    ]


SCALARS: list[Any] = [
    pd.Timestamp("2024-01-01 12:00:00.123456789", tz=ROME),
    pd.Timestamp("2024-10-27 02:30").tz_localize(ROME, ambiguous=False),
    pd.Timestamp(5, unit="s"),
    pd.Timedelta("1D 3ns"),
    pd.Period("2024-05", "M"),
    pd.Interval(0, 1.5, "both"),
    pd.NaT,
    pd.NA,
]

_TABLE = pa.table(
    {
        "a": pa.chunked_array([[1], [2, None]]),
        "s": ["x", None, "y"],
        "view": pa.array(["long enough to be elsewhere", None, "y"], pa.string_view()),
        "d": pa.array(["a", "b", "a"]).dictionary_encode(),
        "l": [[1], [], None],
        "st": [{"x": 1}, None, {"x": 2}],
        "m": pa.array([[("k", 1)], [], None], type=pa.map_(pa.string(), pa.int8())),
        "dec": pa.array([Decimal("1.10"), None, Decimal("-3.25")]),
        "t": pa.array([dt.datetime(2024, 1, 1)] * 3, pa.timestamp("ns", "Europe/Rome")),
        "n": pa.nulls(3),
    }
).replace_schema_metadata({"k": "v"})

ARROW: list[Any] = [
    _TABLE,
    _TABLE.slice(1),
    _TABLE.slice(0, 0),
    pa.table({}),
    *_TABLE.to_batches(),
    *(_TABLE.column(name) for name in _TABLE.column_names),
    pa.chunked_array([], type=pa.int8()),
    pa.array([]),
    pa.array([1, 2, None])[1:],
    pa.array([True, None, False] * 5)[3:],
    pa.array(["a", None, "bc"]),
]

_POLARS = pl.DataFrame(
    {
        "a": [1, None, 3],
        "s": ["x", None, "long enough to be elsewhere"],
        "c": pl.Series(["a", "b", None], dtype=pl.Categorical),
        "e": pl.Series(["a", "ö;b", None], dtype=pl.Enum(["a", "ö;b"])),
        "t": pl.Series([dt.datetime(2024, 1, 1)] * 3, dtype=pl.Datetime("us", "Europe/Rome")),
        "d": [dt.timedelta(1)] * 3,
        "dec": pl.Series([Decimal("1.10")] * 3, dtype=pl.Decimal(38, 2)),
        "l": [[1], [], None],
        "le": pl.Series([["a"], [], None], dtype=pl.List(pl.Enum(["a"]))),
        "st": [{"x": 1}, {"x": 2}, None],
        "n": [None] * 3,
        "arr": pl.Series([[1, 2], [3, 4], None], dtype=pl.Array(pl.Int8, 2)),
        "u": pl.Series([1, 2, 3], dtype=pl.UInt8),
        "b": [b"x", None, b"y"],
    }
)
POLARS: list[Any] = [
    _POLARS,
    pl.concat([_POLARS, _POLARS], rechunk=False),
    _POLARS.clear(),
    pl.DataFrame(),
    *_POLARS.get_columns(),
]

_DATASET = xr.Dataset(
    {"t": (("time", "x"), np.arange(6.0).reshape(2, 3), {"units": "K"}), "flag": ((), 1)},
    coords={
        "time": pd.date_range("2024", periods=2),
        "x": [1, 2, 3],
        "name": ("x", ["a", "b", "c"], {"k": 1}),
        "lon": 5.0,
    },
    attrs={"title": "x", "n": np.float32(3)},
)
_PANDAS_COORDINATES: dict[str, Any] = {
    "zone": pd.date_range("2024", periods=2, freq="D", tz=ROME),
    "category": pd.CategoricalIndex(["a", "b"]),
    "period": pd.period_range("2024", periods=2, freq="M"),
    "interval": pd.interval_range(0, 2),
    "range": pd.RangeIndex(0, 6, 2),
    "daily": pd.date_range("2024", periods=3, freq="D"),
    "floats": np.array([1, 2], "f4"),
    "texts": ["a", "bc"],
    "objects": pd.Index(["a", 1], dtype=object),
    "Int64": pd.array([1, None], dtype="Int64"),
}
XARRAY: list[Any] = [
    pd.DataFrame({"c": pd.Categorical(["a", "b"]), "n": pd.array([2**60 + 1, None], dtype="Int64")}).to_xarray(),
    pd.Series(pd.Categorical(["a", "b"])).to_xarray(),
    *(xr.Dataset(coords={name: (name, index, {"k": 1})}) for name, index in _PANDAS_COORDINATES.items()),
    xr.Dataset(coords={"q": ("x", [1, 2])}).set_xindex("q"),
    xr.Dataset(coords={"c": pd.CategoricalIndex(["a", "b"])}).drop_indexes("c"),
    _DATASET,
    _DATASET.t,
    _DATASET.stack(z=("time", "x")),
    _DATASET.stack(z=("time", "x")).t,
    _DATASET.drop_indexes("x"),
    _DATASET.drop_vars("time"),
    _DATASET.x,
    _DATASET.name,
    _DATASET.isel(x=0),
    xr.Dataset(),
    xr.DataArray(3),
    xr.DataArray([1, 2], dims="q", name=("a", 1)),
    xr.DataArray(pd.Series(["a", "b"])),
]

_MATRIX = sp.random(5, 4, 0.5, format="csr", rng=1)
SPARSE: list[Any] = [
    *(_MATRIX.asformat(form) for form in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")),
    *(sp.csr_array(_MATRIX).asformat(form) for form in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")),
    sp.csr_matrix((3, 0)),
    sp.coo_array(([1, 2], ([0, 3],)), shape=(4,)),
]


def _opened() -> Any:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "png")
    return Image.open(file)


def animated() -> Any:
    """Return an image that was opened from a file with two frames."""
    file = io.BytesIO()
    Image.new("L", (3, 2)).save(file, "gif", save_all=True, append_images=[Image.new("L", (3, 2), 255)])
    return Image.open(file)


def _with_palette() -> Any:
    image = Image.new("P", (7, 3))
    image.putpalette([*range(256)] * 3)
    image.putpixel((1, 1), 5)
    image.info["transparency"] = 5
    return image


_MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16")
IMAGES: list[Any] = [*(Image.new(mode, (9, 2), 1) for mode in _MODES), _with_palette(), Image.new("RGB", (0, 3))]

MASKED: list[Any] = [
    np.ma.array([1, 2, 3], mask=[False, True, False], fill_value=9),
    np.ma.array([1.0, 2]),
    np.ma.array([[1, 2], [3, 4]], mask=True, hard_mask=True),
    np.ma.array(np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), mask=np.array([(1, 0), (0, 1)], "?,?")),
]

LIBRARIES: dict[str, list[Any]] = {
    "pandas": [*_frames(), *SCALARS, *(pd.Series(values).array for values in COLUMNS.values())],
    "pyarrow": ARROW,
    "polars": POLARS,
    "xarray": XARRAY,
    "scipy": SPARSE,
    "PIL": [*IMAGES, _opened()],
    "numpy": MASKED,
}
"""By library: values of all of its types."""


def arrived(found: Any, value: Any) -> bool:
    """Return whether one is what the other was, with types, labels, attributes and layout."""
    return bool(_same(found, value))


def _same(found: Any, value: Any) -> Any:
    if isinstance(value, Image.Image):  # opened files arrive as images
        pixels = found.mode == value.mode and found.size == value.size and found.tobytes() == value.tobytes()
        palette = found.getpalette() == value.getpalette() and found.info == value.info
        return type(found) is Image.Image and pixels and palette
    if type(found) is not type(value):
        return False
    if isinstance(value, pd.DataFrame):
        pd.testing.assert_frame_equal(found, value, check_freq=True, check_flags=True, check_column_type=True)
        return found.attrs == value.attrs and list(found.dtypes) == list(value.dtypes)
    if isinstance(value, pd.Series):
        pd.testing.assert_series_equal(found, value, check_freq=True, check_flags=True)
        return found.attrs == value.attrs and found.dtype == value.dtype
    if isinstance(value, pd.Index):
        pd.testing.assert_index_equal(found, value, exact=True)
        return found.names == value.names and getattr(found, "freq", 0) == getattr(value, "freq", 0)
    if isinstance(value, pd.api.extensions.ExtensionArray):
        return found.dtype == value.dtype and found.equals(value)
    if isinstance(value, (pa.Table, pa.RecordBatch)):
        return found.equals(value, check_metadata=True)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return found.equals(value) and getattr(found, "num_chunks", 1) == getattr(value, "num_chunks", 1)
    if isinstance(value, pl.DataFrame):
        return found.schema == value.schema and found.equals(value)
    if isinstance(value, pl.Series):
        return found.equals(value, check_dtypes=True, check_names=True)
    if isinstance(value, (xr.Dataset, xr.DataArray)):
        xr.testing.assert_identical(found, value)
        parts = [found.variable, value.variable] if isinstance(value, xr.DataArray) else [found, value]
        dtypes = [part.dtypes if isinstance(part, xr.Dataset) else part.dtype for part in parts]
        types = [{name: part.dtype for name, part in each.coords.items()} for each in (found, value)]
        whole = dtypes[0] == dtypes[1] and types[0] == types[1] and list(found.coords) == list(value.coords)
        indexes = [{name: index.to_pandas_index() for name, index in each.xindexes.items()} for each in (found, value)]
        return (
            whole
            and set(indexes[0]) == set(indexes[1])
            and all(_same(each, indexes[1][name]) for name, each in indexes[0].items())
        )
    if sp.issparse(value):
        return found.dtype == value.dtype and found.shape == value.shape and (found != value).nnz == 0
    if isinstance(value, np.ma.MaskedArray):
        same = found.dtype == value.dtype and found.fill_value == value.fill_value and found.hardmask == value.hardmask
        return same and np.array_equal(found.mask, value.mask) and found.data.tobytes() == value.data.tobytes()
    return repr(found) == repr(value) and getattr(found, "unit", None) == getattr(value, "unit", None)
