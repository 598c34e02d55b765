"""Data frames, tables, datasets, matrices and images arrive as they were, over every border, and nothing is pickled."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.ipc
import pytest
import scipy.sparse as sp
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from msgspec.msgpack import Ext
from PIL import Image

from dfm_async.errors import EncodingError
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import Arena, Payload
from tests.wire.frames import LIBRARIES, animated, arrived
from tests.wire.shapes import Plain, through, trusted, untrusted

CODECS = {
    "processes": trusted,
    "untrusted": untrusted,
    "store": Codec.for_store(),
    "programs": Codec.for_programs(),
}
keys = untrusted.for_keys()


# what arrives


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("border", CODECS)
def test_values_of_a_library_arrive_as_they_were(library: str, border: str) -> None:
    for value in LIBRARIES[library]:
        found = through([value], CODECS[border])[0]
        assert arrived(found, value), f"{value!r} arrived as {found!r}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_of_a_library_is_pickled_between_processes(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickled")

    monkeypatch.setattr("dfm_async.wire.codec.pickling._dump", refuse)
    for value in LIBRARIES[library]:
        trusted.pack(value)


@given(
    stn.arrays(
        st.sampled_from(["i1", "u8", "f4", "f8", "?", "M8[s]", "m8[ms]"]),
        stn.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=4),
    ).map(pd.DataFrame)
)
@settings(deadline=None, max_examples=50)
def test_any_data_frame_of_one_type_arrives(frame: Any) -> None:
    assert arrived(through(frame, untrusted), frame)


def test_columns_of_an_object_that_no_codec_knows_are_named() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": pd.Series([1, Plain(2)], dtype=object)})
    with pytest.raises(EncodingError, match=r"value\['values'\]\[1\]\[1\] of type tests.wire.shapes.Plain"):
        untrusted.pack(frame)
    assert through(frame)["b"][1] == Plain(2), "the processes of one application pickle it"


def hollow(length: int) -> Any:
    """Return nulls that take no bytes."""
    return pa.Array.from_buffers(pa.null(), length, [None])


UNSUPPORTED: list[tuple[Any, str]] = [
    (pd.DataFrame({"a": pd.arrays.SparseArray([0, 1])}), "SparseArray"),
    (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16))), "extension type"),
    (pa.table({"a": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16)))}), "'a'"),
    (pa.table([[1]], schema=pa.schema([pa.field("a", pa.int8(), metadata={"ARROW:extension:name": "x"})])), "metadata"),
    (hollow(1 << 25), "take no bytes"),
    (sp.lil_array((300_000, 1)), "300,000 rows for 0 elements"),
    (pl.DataFrame({"a": pl.Series([1], dtype=pl.Int128)}), "Arrow does not have one of its types"),
    (pl.LazyFrame({"a": [1]}), r"Send the DataFrame that its collect\(\) returns"),
]


@pytest.mark.parametrize(("value", "reason"), UNSUPPORTED, ids=[reason for _, reason in UNSUPPORTED])
def test_what_has_no_safe_format_is_pickled_between_processes_only(value: Any, reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        untrusted.pack(value)
    assert type(through(value)) is type(value)


def test_arrays_of_polars_without_elements_are_refused() -> None:
    frame = pl.DataFrame({"a": pl.Series([[[]]], dtype=pl.List(pl.Array(pl.Int8, 0)))})
    with pytest.raises(EncodingError, match="the column 'a' has arrays without elements"):
        untrusted.pack(frame)


def test_an_image_with_more_than_one_frame_is_refused() -> None:
    for codec in CODECS.values():
        with pytest.raises(EncodingError, match="more than one frame"):
            codec.pack(animated())
    frames = []
    for number in range(2):
        image = animated()
        image.seek(number)
        frames.append(image.copy())
    assert [found.tobytes() for found in through(frames, untrusted)] == [found.tobytes() for found in frames]


# shared memory


TEXTS = pd.array(["text"] * 50_000, dtype=pd.StringDtype("pyarrow"))
LARGE: dict[str, Any] = {
    "one type": pd.DataFrame(np.arange(200_000.0).reshape(50_000, 4)),
    "many types": pd.DataFrame({"a": np.arange(50_000), "b": np.arange(50_000.0), "s": TEXTS}),
    "series": pd.Series(np.arange(50_000)),
    "pyarrow": pa.table({"a": np.arange(50_000), "s": ["text"] * 50_000}),
    "polars": pl.DataFrame({"a": np.arange(50_000), "s": ["text"] * 50_000}),
    "xarray": xr.Dataset({"t": ("x", np.arange(50_000.0))}),
    "scipy": sp.diags_array(np.arange(50_000.0)).tocsr(),
    "PIL": Image.new("RGB", (400, 400), "red"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_buffers_travel_in_shared_memory(name: str) -> None:
    value = LARGE[name]
    codec = Codec.for_processes(Arena())
    payload = codec.payload(codec.pack(value))
    assert isinstance(payload, Payload)
    assert len(payload.data) < 4000
    assert arrived(trusted.loads(payload), value)


def test_columns_arrive_read_only_and_in_place() -> None:
    codec = Codec.for_processes(Arena())
    for name in ("one type", "series"):
        payload = codec.payload(codec.pack(LARGE[name]))
        assert isinstance(payload, Payload)
        (block,) = payload.blocks
        found = trusted.loads(payload).to_numpy()
        assert not found.flags.writeable
        assert np.shares_memory(found, np.frombuffer(block.view(), np.uint8))
    table = trusted.loads(codec.payload(codec.pack(LARGE["pyarrow"])))
    assert not table.column("a").chunk(0).buffers()[1].is_mutable


def test_small_columns_are_read_only_except_in_programs() -> None:
    frame = pd.DataFrame({"a": [1], "o": pd.Series([None], dtype=object)})
    for border, codec in CODECS.items():
        found = through(frame, codec)
        for name in frame:
            assert found[name].array.to_numpy().flags.writeable == (border == "programs"), border


# keys


def test_equal_values_are_equal_keys_whatever_their_layout() -> None:
    square = np.arange(12.0).reshape(3, 4)
    frame = pd.DataFrame(square, columns=list("abcd"))
    parts = pd.DataFrame({name: frame[name].copy() for name in frame})
    assert keys.encode(frame) == keys.encode(parts) == keys.encode(pd.DataFrame(square, None, list("abcd"), copy=False))
    table = pa.table({"a": pa.chunked_array([[1], [2, 3]])})
    assert keys.encode(table) == keys.encode(pa.table({"a": [0, 1, 2, 3]}).slice(1))
    chunks = pl.concat([pl.DataFrame({"a": [1]}), pl.DataFrame({"a": [2]})], rechunk=False)
    assert keys.encode(chunks) == keys.encode(pl.DataFrame({"a": [1, 2]}))
    unsorted = sp.csr_matrix(([1, 2], [1, 0], [0, 2]), shape=(1, 2))
    assert keys.encode(unsorted) == keys.encode(sp.csr_matrix([[2, 1]]))


def test_different_values_are_different_keys() -> None:
    found = [keys.encode(value) for values in LIBRARIES.values() for value in values[:12]]
    frame = pd.DataFrame({"a": [1]})
    found += [keys.encode(frame.rename(columns=str.upper)), keys.encode(frame), keys.encode(frame.astype("i4"))]
    assert len(set(found)) == len(found)


# untrusted data


def state_of(name: str, state: Any) -> bytes:
    """Return the bytes of a value with any state."""
    return untrusted.dumps(Ext(30, untrusted.dumps([name, untrusted.pack(state)])))


def stream(table: Any, **options: Any) -> memoryview:
    sink = pa.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write(table)
    return memoryview(sink.getvalue()).cast("B")


INTEGERS = np.arange(3)
NO_ATTRIBUTES = {"attrs": {}, "unique": False}
BAD_STATES: list[tuple[str, Any]] = [
    ("pyarrow.Table", None),
    ("pyarrow.Table", memoryview(b"")),
    ("pyarrow.Table", memoryview(bytes(64))),
    ("pyarrow.Table", stream(pa.table({"a": [1, 2]}), compression="zstd")),
    ("pyarrow.Table", stream(pa.table({"a": pa.array(["x"]).dictionary_encode()}), compression="lz4")),
    ("pyarrow.Table", stream(pa.table({"a": [1]}), metadata_version=pyarrow.ipc.MetadataVersion.V4)),
    ("pyarrow.Table", stream(pa.table({"a": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1"]))}))),
    ("pyarrow.Table", stream(pa.table({"a": hollow(1 << 30)}))),
    ("pyarrow.Array", stream(pa.table({"a": [1], "b": [2]}))),
    ("pyarrow.RecordBatch", stream(pa.table({"a": pa.chunked_array([[1], [2]])}))),
    ("polars.DataFrame", stream(pa.table([[1]], pa.schema([pa.field("a", pa.int8(), metadata={b"k": b"\xff"})])))),
    ("polars.Series", ["a", stream(pa.table({}))]),
    (
        "pandas.DataFrame",
        {"index": pd.RangeIndex(3), "columns": pd.Index(["a"]), "values": [[1, 2, 3]], **NO_ATTRIBUTES},
    ),
    (
        "pandas.DataFrame",
        {"index": pd.RangeIndex(2), "columns": pd.Index(["a"]), "values": [INTEGERS], **NO_ATTRIBUTES},
    ),
    ("pandas.DataFrame", {"index": pd.RangeIndex(3), "columns": pd.Index([]), "values": [INTEGERS], **NO_ATTRIBUTES}),
    ("pandas.DataFrame", {"index": pd.RangeIndex(3), "columns": [0], "values": [INTEGERS], **NO_ATTRIBUTES}),
    ("pandas.DataFrame", {"index": pd.RangeIndex(3), "columns": pd.Index(["a"]), "block": INTEGERS, **NO_ATTRIBUTES}),
    ("pandas.DataFrame", {}),
    ("pandas.Series", {"values": INTEGERS, "index": pd.RangeIndex(2**60), "name": None, **NO_ATTRIBUTES}),
    ("pandas.Series", {"values": INTEGERS, "index": pd.RangeIndex(3), "name": [], **NO_ATTRIBUTES}),
    ("pandas.Categorical", [np.array([5], "i1"), pd.Index(["a"]), False]),
    ("pandas.MultiIndex", [[pd.Index(["a"])], [np.array([7], "i1")], [None]]),
    ("pandas.DatetimeIndex", [INTEGERS.view("M8[s]"), None, "not a frequency"]),
    ("pandas.DatetimeIndex", [INTEGERS, None, None]),
    ("pandas.PeriodArray", [INTEGERS, "not a frequency"]),
    ("pandas.IntegerArray", [INTEGERS, INTEGERS]),
    ("pandas.Timestamp", [2**70, "ns", None]),
    ("pandas.Timestamp", [1, "years", None]),
    ("pandas.Timestamp", [1, "s", "../../etc/passwd"]),
    ("pandas.RangeIndex", [0, 1, 0, None]),
    ("scipy.sparse.csr_matrix", [[3, 3], "csr", [np.ones(1), np.array([99]), np.array([0, 1, 1, 1])]]),
    ("scipy.sparse.csr_matrix", [[3, 3], "csr", [np.ones(1), np.array([0]), np.array([0, 9, 9, 9])]]),
    ("scipy.sparse.coo_matrix", [[3, 3], "coo", [np.ones(1), (np.array([99]), np.array([0]))]]),
    ("scipy.sparse.csr_matrix", [[3, 3], "coo", [np.ones(1), (np.array([0]), np.array([0]))]]),
    ("PIL.Image.Image", {"mode": "RGB", "size": [60_000, 60_000], "pixels": memoryview(b"12")}),
    ("PIL.Image.Image", {"mode": "RGB", "size": [-1, -1], "pixels": memoryview(b"123")}),
    ("PIL.Image.Image", {"mode": "nothing", "size": [1, 1], "pixels": memoryview(b"1")}),
    ("xarray.Dataset", {"variables": [["a", [["x"], INTEGERS, {}]]], "coords": {}, "attrs": {}}),
    ("xarray.Dataset", {"variables": [["a", [["x", "y"], INTEGERS, {}]]]}),
    ("numpy.ma.MaskedArray", {"data": INTEGERS, "mask": np.zeros(9, bool), "fill_value": 0, "hard": False}),
    ("pandas.Nothing", None),
    ("nothing", None),
]


@pytest.mark.parametrize(("name", "state"), BAD_STATES, ids=[name for name, _ in BAD_STATES])
def test_states_that_no_value_has_are_refused(name: str, state: Any) -> None:
    data = state_of(name, state)
    with pytest.raises(EncodingError):
        untrusted.loads(data)


N = 10**8
EMPTY = np.zeros(0, "i4")
FIELDS = np.zeros(1, [("a", "u1"), ("b", [("c", "S0")], N)])
"""An element of one byte, with very many fields that take none."""
NO_COORDINATES: dict[str, Any] = {"variables": [], "indexed": [], "indexes": [], "order": []}
BOMBS: list[tuple[str, Any]] = [
    ("scipy.sparse.csr_array", [[N, 1], "csr", [np.zeros(0), (EMPTY, EMPTY)]]),
    ("scipy.sparse.csr_matrix", [[N, 1], "csr", [N, 1]]),
    ("scipy.sparse.csc_matrix", [[1, N], "csc", [np.zeros(0), range(0), range(N)]]),
    ("scipy.sparse.coo_matrix", [[N, 1], "coo", [range(N), (EMPTY, EMPTY)]]),
    ("scipy.sparse.coo_array", [[N], "coo", [EMPTY, range(N)]]),
    ("scipy.sparse.dia_array", [[N, 1], "dia", [np.zeros((0, 0)), range(N)]]),
    ("scipy.sparse.lil_array", [[N, 1], "coo", [np.zeros(0), (EMPTY, EMPTY)]]),
    ("scipy.sparse.coo_array", [[1], "coo", [FIELDS, (EMPTY,)]]),
    ("pandas.IntervalArray", [pd.RangeIndex(N), pd.RangeIndex(1, N + 1), "right"]),
    ("pandas.IntervalArray", [range(N), range(1, N + 1), "right"]),
    ("pandas.Categorical", [np.zeros(1, "i1"), pd.RangeIndex(N), False]),
    ("pandas.Categorical", [np.zeros(1, "i1"), range(N), False]),
    ("pandas.MultiIndex", [[pd.RangeIndex(N)], [np.zeros(1, "i1")], [None]]),
    ("pandas.MultiIndex", [[range(N)], [np.zeros(1, "i1")], [None]]),
    ("pandas.Index", [FIELDS, None, None]),
    ("pandas.Series", {"values": FIELDS, "index": pd.RangeIndex(1), "name": None, **NO_ATTRIBUTES}),
    (
        "pandas.DataFrame",
        {"index": pd.RangeIndex(0), "columns": pd.RangeIndex(N), "block": np.zeros((0, N)), **NO_ATTRIBUTES},
    ),
    ("pyarrow.Table", stream(pa.table({name: hollow(1 << 20) for name in "ab"}))),
    (
        "pyarrow.Array",
        stream(pa.table({"": pa.ListViewArray.from_arrays([0] * 300, [1 << 12] * 300, hollow(1 << 12))})),
    ),
    ("numpy.ma.MaskedArray", {"data": range(N), "mask": None, "fill_value": np.array(0), "hard": False}),
    ("numpy.ma.MaskedArray", {"data": np.zeros(1), "mask": range(N), "fill_value": np.array(0), "hard": False}),
    ("numpy.ma.MaskedArray", {"data": np.zeros(1), "mask": None, "fill_value": range(N), "hard": False}),
    ("numpy.ma.MaskedArray", {"data": FIELDS, "mask": None, "fill_value": np.array(0), "hard": False}),
    ("xarray.Dataset", {"variables": [["a", [["x"], range(N), {}]]], "coords": NO_COORDINATES, "attrs": {}}),
    ("xarray.DataArray", {"name": None, "data": [["x"], range(N), {}], "coords": NO_COORDINATES}),
]
"""States of a few bytes, of which very large values could be built."""


@pytest.mark.parametrize(("name", "state"), BOMBS, ids=[name for name, _ in BOMBS])
def test_few_bytes_do_not_become_a_large_value(name: str, state: Any) -> None:
    data = state_of(name, state)
    assert len(data) < 4000
    began = time.process_time()
    with pytest.raises(EncodingError):
        untrusted.loads(data)
    assert time.process_time() - began < 1


def test_ranges_as_categories_levels_and_labels_arrive() -> None:
    categories = pd.CategoricalIndex(pd.Categorical.from_codes([0, 999], pd.RangeIndex(1000)))
    levels = pd.MultiIndex.from_product([pd.RangeIndex(1000, name="x"), ["a"]])
    for index in (categories, levels):
        found = through(index, untrusted)
        assert found.equals(index)
        assert found.names == index.names
    frame = pd.DataFrame(np.zeros((0, 20_000), "f4"))
    assert arrived(through(frame, untrusted), frame)


@pytest.mark.parametrize(
    "zone", ["dateutil//etc/passwd", "dateutil/Nowhere", "tzlocal()", "../../etc/passwd", "Nowhere"]
)
def test_zones_of_pandas_and_arrow_are_names_of_the_time_zone_data_only(zone: str) -> None:
    moments = np.zeros(1, "M8[s]")
    for name, state in (("pandas.DatetimeArray", [moments, zone]), ("pandas.Timestamp", [0, "s", zone])):
        with pytest.raises(EncodingError):
            untrusted.loads(state_of(name, state))


def test_zones_of_arrow_are_names_or_offsets() -> None:
    for zone in ("Europe/Rome", "UTC", "+01:00"):
        through(pa.array([1], pa.timestamp("s", zone)), untrusted)
    for zone in ("dateutil//etc/passwd", "tzlocal()", "../../etc/passwd"):
        with pytest.raises(EncodingError, match="is not the name of a time zone"):
            through(pa.array([], pa.list_(pa.timestamp("s", zone))), untrusted)


@pytest.mark.parametrize(
    "kind",
    [
        pa.decimal256(40, 2),
        pa.month_day_nano_interval(),
        pa.list_(pa.int8(), 0),
        pa.list_view(pa.int8()),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.struct([("a", pa.int8()), ("a", pa.int8())]),
    ],
    ids=str,
)
def test_types_that_polars_does_not_have_are_refused_without_a_panic(kind: Any, capfd: Any) -> None:
    for found in (kind, pa.list_(kind), pa.struct([("x", kind)])):
        with pytest.raises(EncodingError, match="polars does not have the type"):
            untrusted.loads(state_of("polars.DataFrame", stream(pa.Table.from_batches([], pa.schema([("a", found)])))))
    assert "panicked" not in capfd.readouterr().err


def viewed(kind: Any, size: int, number: int, at: int) -> Any:
    """Return a text and a null, which has a view of its own."""
    views = struct.pack("<i12si4xii", 3, b"abc", size, number, at)
    return pa.Array.from_buffers(kind, 2, [pa.py_buffer(b"\x01"), pa.py_buffer(views), pa.py_buffer(b"x" * 40)])


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
@pytest.mark.parametrize(
    ("size", "number", "at"), [(-100_000, 0, 0), (20, 1, 0), (20, -1, 0), (20, 0, 21), (20, 0, -1), (2**31 - 1, 0, 40)]
)
def test_views_of_nulls_outside_of_their_buffers_are_refused(kind: Any, size: int, number: int, at: int) -> None:
    array = viewed(kind, size, number, at)
    nested = [
        array,
        pa.DictionaryArray.from_arrays(pa.array([0]), array),
        pa.ListArray.from_arrays([0, 2], array),
        pa.StructArray.from_arrays([array], ["a"]),
        pa.MapArray.from_arrays([0, 2], [1, 2], array),
    ]
    for found in nested:
        with pytest.raises(EncodingError, match="outside of the buffers"):
            untrusted.loads(state_of("pyarrow.Array", stream(pa.table({"": found}))))
    assert through(viewed(kind, 20, 0, 20), untrusted).null_count == 1


def test_strings_of_pandas_are_made_of_arrays_of_texts_only() -> None:
    for content in (pa.array([b"x"]), pa.array(["x"], pa.string_view()), pa.array([1]), range(3)):
        with pytest.raises(EncodingError, match="an array of texts was expected"):
            untrusted.loads(state_of("pandas.ArrowStringArray", ["pyarrow", False, content]))


def test_an_extension_type_in_a_stream_is_not_built() -> None:
    class Bomb(pa.ExtensionType):  # type: ignore[misc] # pyarrow is not type-checked
        def __init__(self) -> None:
            super().__init__(pa.int64(), "tests.bomb")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, _storage: Any, _data: bytes) -> Any:
            raise AssertionError("built")

    bomb = Bomb()
    data = stream(pa.table({"a": pa.ExtensionArray.from_storage(bomb, pa.array([1]))}))
    pa.register_extension_type(bomb)
    try:
        with pytest.raises(EncodingError, match="extension types of Arrow are not accepted"):
            untrusted.loads(state_of("pyarrow.Table", data))
    finally:
        pa.unregister_extension_type("tests.bomb")


ENCODED = [untrusted.encode(value) for values in LIBRARIES.values() for value in (values[0], *values[-3:])]


@given(st.sampled_from(ENCODED), st.integers(0, 2**16), st.binary(min_size=1, max_size=8))
@settings(deadline=None, max_examples=300)
def test_damaged_values_are_rebuilt_or_refused(data: bytes, at: int, damage: bytes) -> None:
    at %= len(data)
    damaged = data[:at] + damage + data[at + len(damage) :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of columns that pandas does not like
        with contextlib.suppress(EncodingError):
            untrusted.loads(damaged)


# what is loaded


def test_plain_values_load_no_library() -> None:
    code = """
import asyncio, sys
from dfm_async import Federation, Session

fed = Federation("plain", api_version="1")

@fed.site("lab").operation
def loaded(value: dict) -> list:
    return sorted({name.partition(".")[0] for name in sys.modules})

async def main():
    async with Session(fed) as session:
        print(*await session.call(loaded, {"a": [1, "x", (2.0, {3})]}))
    print(*loaded({}))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    for line in done.stdout.splitlines():
        assert "dfm_async" in line.split()
        assert not {"numpy", "pandas", "pyarrow", "polars", "xarray", "scipy", "PIL", "torch"} & set(line.split())
    assert len(done.stdout.splitlines()) == 2


def test_a_library_is_imported_where_its_first_value_arrives() -> None:
    frame, other = untrusted.encode(pd.DataFrame({"a": [1]})), untrusted.encode(sp.csr_matrix([[1]]))
    code = f"""
import sys
from dfm_async.wire.codec import Codec
found = Codec.for_untrusted().loads({frame!r})
print(type(found).__name__, *(name in sys.modules for name in ("pandas", "scipy", "polars", "xarray")))
sys.modules["scipy"] = sys.modules["scipy.sparse"] = None  # as where it is not installed
Codec.for_untrusted().loads({other!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["DataFrame", "True", "False", "False", "False"]
    reason = "values of scipy need the package 'scipy', which is not installed in this environment"
    assert done.stderr.splitlines()[-1].endswith(reason)


def test_data_frames_need_no_arrow_unless_their_columns_do() -> None:
    code = """
import sys
sys.modules["pyarrow"] = None  # as where it is not installed
import pandas, polars
from dfm_async.wire.codec import Codec
codec = Codec.for_untrusted()
frame = pandas.DataFrame({"a": [1, 2], "s": ["x", None]}, index=pandas.Index(["i", "j"]))
found = codec.loads(codec.encode(frame))
pandas.testing.assert_frame_equal(found, frame)
codec.encode(polars.DataFrame({"a": [1]}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    reason = "values of polars need the package 'pyarrow', which is not installed here"
    assert done.stderr.splitlines()[-1].endswith(reason), done.stderr
