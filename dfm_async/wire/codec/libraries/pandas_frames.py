"""Data frames, series, indexes, arrays and scalars of pandas.

Columns of numpy types travel as arrays of numpy, so that no value changes on its way: NaN, None and NaT stay what they
were. Columns that are backed by Arrow travel as Arrow. Objects in columns travel one by one.
"""

from __future__ import annotations

import datetime as dt
import importlib
import zoneinfo
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy
import pandas

from dfm_async.wire.codec.kinds import ZONE_NAME
from dfm_async.wire.codec.libraries.array_checks import array
from dfm_async.wire.codec.registry import NamedCodec, Unsupported, load_library, register_ours

try:
    pytz: Any = importlib.import_module("pytz")
except ImportError:  # pandas 3 does not need it
    pytz = None

_FEW: Final = 512
"""The number of strings up to which a list of them is faster than an Arrow stream."""
_RANGE: Final = 512
"""The length up to which categories, levels and bounds can be a range: it becomes an array there."""
_EMPTY_COLUMNS: Final = 1 << 14
"""The number of columns without rows that may travel as one array: there, they take no bytes."""
_UNITS: Final = ("s", "ms", "us", "ns")


# Time zones and frequencies.


def _zone(zone: Any) -> Any:
    """Return a time zone in a form that can be sent: as it is, or the name of one of pytz."""
    if zone is None or type(zone) in (dt.timezone, zoneinfo.ZoneInfo):
        return zone
    name = getattr(zone, "zone", None)
    if type(zone).__module__.partition(".")[0] == "pytz" and isinstance(name, str):
        return name
    raise Unsupported(f"its time zone {zone!r} is neither a fixed offset nor one with a name")


def _checked_zone(zone: Any) -> Any:
    """Return a time zone that was decoded. pandas itself would open any file, for names of ``dateutil``."""
    if isinstance(zone, str):
        if not ZONE_NAME.fullmatch(zone):
            raise ValueError(f"{zone!r} is not the name of a time zone")
        return zoneinfo.ZoneInfo(zone) if pytz is None else pytz.timezone(zone)
    if not isinstance(zone, (dt.timezone, zoneinfo.ZoneInfo, type(None))):
        raise TypeError("this is not a time zone")
    return zone


def _moments(data: Any, zone: Any, freq: str | None) -> Any:
    """Return an index of moments from numbers of a unit, in UTC."""
    found = pandas.DatetimeIndex(_typed(data, "M"), freq=None if zone is not None else freq)
    if zone is not None:
        found = found.tz_localize("UTC").tz_convert(_checked_zone(zone))
        if freq is not None:
            found = pandas.DatetimeIndex(found, freq=freq)
    return found


def _typed(data: Any, kind: str) -> Any:
    if array(data).dtype.kind != kind or data.ndim != 1:
        raise TypeError(f"an array of one dimension and the kind {kind} was expected")
    return data


# Arrays: what a column or an index is made of.


def _content(values: Any) -> Any:
    """Return the values of a series or an index: an array of numpy where that holds them, else one of pandas."""
    dtype = values.dtype
    if not isinstance(dtype, numpy.dtype):
        return values.array
    return values.to_numpy()


def _encode_moments(value: Any) -> Any:
    return [value.asi8.view(f"{value.dtype.kind}8[{value.unit}]"), _zone(getattr(value, "tz", None))]


def _encode_masked(value: Any) -> Any:
    dtype = value.dtype.numpy_dtype
    return [value.to_numpy(dtype=dtype, na_value=dtype.type(0)), value.isna()]


def _encode_strings(value: Any) -> Any:
    dtype = value.dtype
    in_python = dtype.storage == "python" or len(value) <= _FEW
    content = value.to_numpy(dtype=object, na_value=None) if in_python else value.__arrow_array__()
    return [dtype.storage, dtype.na_value is pandas.NA, content]


def _decode_strings(state: Any) -> Any:
    storage, is_na, content = state
    dtype = pandas.StringDtype(storage, na_value=pandas.NA if is_na else numpy.nan)
    if isinstance(content, numpy.ndarray):
        return dtype.construct_array_type()._from_sequence(content, dtype=dtype)  # noqa: SLF001 - a hook of extensions
    if str(getattr(content, "type", None)) not in ("string", "large_string"):
        raise TypeError("an array of texts was expected")
    return dtype.__from_arrow__(content)


def _encode_categorical(value: Any) -> Any:
    return [value.codes, _dense(value.categories), value.ordered]


def _decode_categorical(state: Any) -> Any:
    codes, categories, ordered = state
    return pandas.Categorical.from_codes(_typed(codes, "i"), categories=_values(categories), ordered=bool(ordered))


def _decode_arrow(state: Any) -> Any:
    return pandas.arrays.ArrowExtensionArray(state)


def _period_dtype(freq: Any) -> Any:
    if not isinstance(freq, str):
        raise TypeError("the frequency of periods was expected")
    return pandas.PeriodDtype(freq)


def _array(value: Any) -> Any:
    """Return an array that was decoded; of numpy, or of pandas."""
    found = value if isinstance(value, pandas.api.extensions.ExtensionArray) else array(value)
    if found.ndim != 1 or found.dtype.kind == "V":
        raise TypeError("an array of one dimension was expected, without fields")
    return found


_ARRAYS: Final[dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "Categorical": (_encode_categorical, _decode_categorical),
    "DatetimeArray": (_encode_moments, lambda state: _moments(state[0], state[1], None).array),
    "TimedeltaArray": (_encode_moments, lambda state: pandas.TimedeltaIndex(_typed(state[0], "m")).array),
    "PeriodArray": (
        lambda value: [value.asi8, value.freqstr],
        lambda state: pandas.arrays.PeriodArray(_typed(state[0], "i"), dtype=_period_dtype(state[1])),
    ),
    "IntervalArray": (
        lambda value: [_dense(value.left), _dense(value.right), value.closed],
        lambda state: pandas.arrays.IntervalArray.from_arrays(_values(state[0]), _values(state[1]), closed=state[2]),
    ),
    "IntegerArray": (_encode_masked, lambda state: pandas.arrays.IntegerArray(*map(_array, state))),
    "FloatingArray": (_encode_masked, lambda state: pandas.arrays.FloatingArray(*map(_array, state))),
    "BooleanArray": (_encode_masked, lambda state: pandas.arrays.BooleanArray(*map(_array, state))),
    "NumpyExtensionArray": (
        lambda value: value.to_numpy(),
        lambda state: pandas.arrays.NumpyExtensionArray(_array(state)),
    ),
    "StringArray": (_encode_strings, _decode_strings),
    "ArrowStringArray": (_encode_strings, _decode_strings),
    "ArrowExtensionArray": (lambda value: value.__arrow_array__(), _decode_arrow),
}
"""By name in ``pandas.arrays``, or in ``pandas``: what makes the state of an array, and what rebuilds it."""


# Indexes.


def _encode_index(value: Any) -> Any:
    kind = type(value)
    freq = getattr(value, "freqstr", None) if kind in (pandas.DatetimeIndex, pandas.TimedeltaIndex) else None
    return [_content(value), value.name, freq]


def _decode_index(kind: Any) -> Callable[[Any], Any]:
    def decode(state: Any) -> Any:
        content, name, freq = state
        _array(content)
        if freq is not None:
            if not isinstance(freq, str) or kind not in (pandas.DatetimeIndex, pandas.TimedeltaIndex):
                raise TypeError("only indexes of times have a frequency")
            found = kind(content, freq=freq)
        else:
            found = pandas.Index(content, dtype=content.dtype, copy=False)
        if type(found) is not kind:
            raise TypeError(f"this is the state of a {type(found).__name__}")
        found.name = name
        return found

    return decode


def _encode_multi(value: Any) -> Any:
    return [list(map(_dense, value.levels)), list(value.codes), list(value.names)]


def _decode_multi(state: Any) -> Any:
    levels, codes, names = state
    if type(levels) is not list or type(names) is not list:
        raise TypeError("a list of levels was expected")
    return pandas.MultiIndex(
        levels=list(map(_values, levels)), codes=[_typed(found, "i") for found in codes], names=names
    )


def _decode_range(state: Any) -> Any:
    start, stop, step, name = state
    if not type(start) is type(stop) is type(step) is int:
        raise TypeError("a range has whole numbers")
    return pandas.RangeIndex(start, stop, step, name=name)


def _index(value: Any) -> Any:
    if not isinstance(value, pandas.Index):
        raise TypeError("an index was expected")
    return value


def _dense(index: Any) -> Any:
    """Return an index in a form that :func:`_values` accepts."""
    if isinstance(index, pandas.RangeIndex) and len(index) > _RANGE:
        return pandas.Index(index.to_numpy(), name=index.name)
    return index


def _values(value: Any) -> Any:
    """Return an index that was decoded, if its values were sent: a range would become large as an array."""
    if isinstance(_index(value), pandas.RangeIndex) and len(value) > _RANGE:
        raise ValueError(f"{len(value):,} values were expected, not a range")
    return value


# Series and data frames.


def _attributes(value: Any) -> dict[str, Any]:
    return {"attrs": dict(value.attrs), "unique": not value.flags.allows_duplicate_labels}


def _with_attributes(value: Any, state: Any) -> Any:
    attrs = state["attrs"]
    if type(attrs) is not dict:
        raise TypeError("a dict of attributes was expected")
    if attrs:
        value.attrs = attrs
    if state["unique"]:
        value.flags.allows_duplicate_labels = False
    return value


def _series(content: Any, index: Any, name: Hashable = None) -> Any:
    return pandas.Series(_array(content), index=index, name=name, dtype=content.dtype, copy=False)


def _encode_series(value: Any) -> Any:
    return {"values": _content(value), "index": value.index, "name": value.name, **_attributes(value)}


def _decode_series(state: Any) -> Any:
    return _with_attributes(_series(state["values"], _index(state["index"]), state["name"]), state)


def _encode_frame(value: Any) -> Any:
    columns = [_content(series) for _, series in value.items()]
    if len(columns) > 1 and value.size and _one_block(columns):
        return {"index": value.index, "columns": value.columns, "block": value.to_numpy(), **_attributes(value)}
    return {"index": value.index, "columns": value.columns, "values": columns, **_attributes(value)}


def _encode_columns(value: Any) -> Any:
    """Encode a data frame column by column, whatever its layout in memory."""
    columns = [_content(series) for _, series in value.items()]
    return {"index": value.index, "columns": value.columns, "values": columns, **_attributes(value)}


def _one_block(columns: list[Any]) -> bool:
    """Return whether all columns are parts of one array, which can be sent as it is."""
    first = columns[0]
    return (
        isinstance(first, numpy.ndarray)
        and first.dtype != object
        and first.base is not None
        and all(
            isinstance(column, numpy.ndarray) and column.dtype == first.dtype and column.base is first.base
            for column in columns
        )
    )


def _decode_frame(state: Any) -> Any:
    index, labels = _index(state["index"]), _index(state["columns"])
    if "block" in state:
        block = array(state["block"])
        if block.ndim != 2 or block.dtype.kind == "V" or (block.shape[1] > _EMPTY_COLUMNS and not block.size):
            raise TypeError("an array of two dimensions was expected, with values")
        return _with_attributes(pandas.DataFrame(block, index=index, columns=labels, copy=False), state)
    columns = {}
    for number, content in enumerate(state["values"]):
        if len(_array(content)) != len(index):
            raise ValueError(f"column {number} has {len(content):,} values for {len(index):,} rows")
        # Without its type, an array of objects could become one of strings.
        columns[number] = _series(content, index) if content.dtype == object else content
    if len(columns) != len(labels):
        raise ValueError(f"{len(columns)} columns have {len(labels)} labels")
    frame = pandas.DataFrame(columns, index=index, copy=False)
    frame.columns = labels
    return _with_attributes(frame, state)


# Scalars.


def _decode_timestamp(state: Any) -> Any:
    number, unit, zone = state
    moment = _moments(numpy.array([number], f"M8[{_unit(unit)}]"), None, None)[0]
    return moment if zone is None else moment.tz_localize("UTC").tz_convert(_checked_zone(zone))


def _unit(unit: Any) -> str:
    if unit not in _UNITS:
        raise ValueError(f"{unit!r} is not a unit of time")
    return str(unit)


def _decode_timedelta(state: Any) -> Any:
    number, unit = state
    return pandas.TimedeltaIndex(numpy.array([number], f"m8[{_unit(unit)}]"))[0]


def _number(value: Any) -> int:
    return int(value.asm8.view("i8"))


def _decode_period(state: Any) -> Any:
    number, freq = state
    if type(number) is not int:
        raise TypeError("a number was expected")
    return pandas.Period(ordinal=number, freq=_period_dtype(freq).freq)


# Previews.


def _shown(values: Any) -> list[Any]:
    if isinstance(values, pandas.MultiIndex):
        levels = map(_chosen, values.levels, values.codes)
        return list(zip(*levels, strict=True))
    content = getattr(values, "array", values)
    if isinstance(content, pandas.Categorical):
        return _chosen(content.categories, content.codes)
    if isinstance(content, pandas.arrays.ArrowExtensionArray):
        from dfm_async.wire.codec.libraries.arrow_tables import first_rows  # here: the others need no pyarrow

        return [row[0] for row in first_rows([content.__arrow_array__()], len(content))]
    return [None if value is pandas.NaT or value is pandas.NA else value for value in values.tolist()]


def _chosen(labels: Any, codes: Any) -> list[Any]:
    """Return the labels that codes refer to. pandas would copy a large one each time that it occurs."""
    codes = numpy.asarray(codes)
    used = numpy.unique(codes[codes >= 0])
    found = dict(zip(used.tolist(), _shown(labels.take(used)), strict=False))
    return [found.get(code) for code in codes.tolist()]


def _table(value: Any) -> Any:
    load_library("pyarrow")  # explains if it is not installed
    from pyarrow import Table  # here: the others need no pyarrow

    return Table.from_pandas(value)


def _frame_preview(value: Any, items: int) -> dict[str, Any]:
    width = min(value.shape[1], items)
    head = value.iloc[: items // (1 + width), :width]
    columns = [_shown(head.iloc[:, number]) for number in range(width)]
    return {
        "type": "pandas.DataFrame",
        "shape": list(value.shape),
        "columns": [_label(label) for label in _shown(head.columns)],
        "dtypes": [str(dtype) for dtype in head.dtypes],
        "index": _shown(head.index),
        "rows": [list(row) for row in zip(*columns, strict=False)],  # as far as all columns show their values
    }


def _label(label: Any) -> Any:
    return [_label(part) for part in label] if isinstance(label, tuple) else label


def _series_preview(value: Any, items: int) -> dict[str, Any]:
    head = value.iloc[: items // 2]
    return {
        "type": "pandas.Series",
        "shape": [len(value)],
        "name": _label(value.name),
        "dtype": str(value.dtype),
        "index": _shown(head.index),
        "values": _shown(head),
    }


def _values_preview(value: Any, items: int) -> dict[str, Any]:
    dtype = getattr(value, "dtype", None)
    kind = type(value).__name__
    return {"type": f"pandas.{kind}", "shape": [len(value)], "dtype": str(dtype), "values": _shown(value[:items])}


def _ours(kind: Any, encode: Any, decode: Any, **options: Any) -> NamedCodec:
    return NamedCodec(type=kind, name=f"pandas.{kind.__name__}", encode=encode, decode=decode, ours=True, **options)


_INDEXES: Final = (
    pandas.Index,
    pandas.DatetimeIndex,
    pandas.TimedeltaIndex,
    pandas.PeriodIndex,
    pandas.CategoricalIndex,
    pandas.IntervalIndex,
)

register_ours(
    _ours(
        pandas.DataFrame,
        _encode_frame,
        _decode_frame,
        canonical=_encode_columns,
        preview=_frame_preview,
        arrow=_table,
    ),
    _ours(pandas.Series, _encode_series, _decode_series, preview=_series_preview),
    *(_ours(kind, _encode_index, _decode_index(kind), preview=_values_preview) for kind in _INDEXES),
    _ours(pandas.MultiIndex, _encode_multi, _decode_multi, preview=_values_preview),
    _ours(
        pandas.RangeIndex,
        lambda value: [value.start, value.stop, value.step, value.name],
        _decode_range,
        preview=_values_preview,
    ),
    *(
        _ours(getattr(pandas.arrays, name, None) or getattr(pandas, name), encode, decode, preview=_values_preview)
        for name, (encode, decode) in _ARRAYS.items()
    ),
    _ours(
        pandas.Timestamp,
        lambda value: [_number(value), value.unit, _zone(value.tz)],
        _decode_timestamp,
        preview=lambda value, _items: value.isoformat(),
    ),
    _ours(
        pandas.Timedelta,
        lambda value: [_number(value), value.unit],
        _decode_timedelta,
        preview=lambda value, _items: value.isoformat(),
    ),
    _ours(
        pandas.Period,
        lambda value: [value.ordinal, value.freqstr],
        _decode_period,
        preview=lambda value, _items: str(value),
    ),
    _ours(
        pandas.Interval,
        lambda value: [value.left, value.right, value.closed],
        lambda state: pandas.Interval(*state),
        preview=lambda value, _items: str(value),
    ),
    _ours(type(pandas.NaT), lambda _value: None, lambda _state: pandas.NaT, preview=lambda _value, _items: None),
    _ours(type(pandas.NA), lambda _value: None, lambda _state: pandas.NA, preview=lambda _value, _items: None),
)
