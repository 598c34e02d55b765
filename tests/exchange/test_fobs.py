"""Messages against those of real NVFLAREs, against themselves, and against damage."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import pathlib
import struct
import tracemalloc
import uuid
from collections import OrderedDict, defaultdict
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dfm_async.errors import FobsError
from dfm_async.exchange.filepipe import fobs
from dfm_async.exchange.filepipe.fobs import dialect_of, dump_buffers, dumps, loads
from dfm_async.exchange.filepipe.fobs_format import Dialect, array_buffers, load_array, split_sections
from dfm_async.exchange.filepipe.models import (
    AnalyticsDataType,
    DataKind,
    Dxo,
    FlContext,
    LogWriterName,
    ParamsType,
    Shareable,
)
from tests.exchange.fobs_values import LARGE, PLAIN

# what real NVFLAREs write


def identical(left: Any, right: Any) -> bool:
    """Equality that also compares types, arrays, and numbers that are not equal to themselves."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        # Compared as bytes: those of numbers that are none are equal, too.
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict):
        # Keys by their representation: 1, 1.0 and True would be equal, numbers that are none would not.
        ours, theirs = ({repr(key): value for key, value in found.items()} for found in (left, right))
        return ours.keys() == theirs.keys() and all(identical(ours[key], theirs[key]) for key in ours)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    if dataclasses.is_dataclass(left):
        return all(identical(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return bool(left == right) or (left != left and right != right)


def _task(kind: str) -> Shareable:
    headers = {
        "__content_type__": "DXO",
        "__task_id__": "0f7a",
        "__task_name__": "train",
        "current_round": 1,
        "num_rounds": 3,
    }
    data = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    return Shareable(__headers__=headers, DXO={"kind": kind, "data": data, "meta": {}})


def _result(kind: str) -> Shareable:
    meta = {"initial_metrics": {"loss": 0.5}, "NUM_STEPS_CURRENT_ROUND": 7}
    headers = {"__content_type__": "DXO", "start_round": 0, "__rc__": "OK"}
    return Shareable(__headers__=headers, DXO={"kind": kind, "data": {"w": np.zeros(2)}, "meta": meta})


def _expected(old: bool) -> dict[str, Any]:
    """The values of fobs_samples.py. Before NVFLARE 2.7 the kinds of data are plain texts."""

    def kind(value: DataKind) -> str:
        return value.value if old else value

    return {
        **PLAIN,
        **LARGE,
        "enum key": {kind(DataKind.METRICS): 1},
        "data kinds": [kind(value) for value in DataKind if value is not DataKind.APP_DEFINED],
        "params types": list(ParamsType),
        "analytics data types": list(AnalyticsDataType),
        "log writers": list(LogWriterName),
        "shareable": Shareable(),
        "shareable with late headers": Shareable(a=1),
        "task": _task(kind(DataKind.WEIGHTS)),
        "result": _result(kind(DataKind.WEIGHTS)),
        "dxo": Dxo("OTHER", {"x": [1]}, {"m": (1, 2)}),
        "metric": Dxo(
            kind(DataKind.ANALYTIC),
            {"track_key": "loss", "track_value": 0.25, "global_step": 3, "analytics_kwargs": {"global_step": 3}},
            {"analytics_data_type": AnalyticsDataType.SCALAR, "tracker_key": LogWriterName.TORCH_TB},
        ),
        "mlflow metrics": Dxo(
            kind(DataKind.ANALYTIC),
            {"track_key": "m", "track_value": {"a": 1.0}},
            {"analytics_data_type": AnalyticsDataType.METRICS, "tracker_key": LogWriterName.MLFLOW},
        ),
        "context": {"ctx": FlContext(None, {"__identity_name__": {"value": "server", "mask": 1}})},
        "large values": Shareable(a=np.arange(200), b="t" * 2000, c=("u" * 2000, [b"v" * 2000])),
        "large metric": Dxo(kind(DataKind.ANALYTIC), {"d": "w" * 1500}, {"m": b"z" * 1500}),
    }


def _samples(version: str) -> dict[str, bytes]:
    path = pathlib.Path(__file__).parent / "data" / f"fobs_{version}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["samples"]
    return {name: base64.b64decode(text) for name, text in found.items()}


SAMPLES = {version: _samples(version) for version in ("2_5_2", "2_6_2", "2_7_2", "2_8_3")}
EXPECTED = {version: _expected(version < "2_7") for version in SAMPLES}
DIALECTS = {"2_5_2": Dialect.V2_5, "2_6_2": Dialect.V2_6, "2_7_2": Dialect.V2_7, "2_8_3": Dialect.V2_7}
CASES = [(version, name) for version, samples in SAMPLES.items() for name in samples]


def test_there_is_a_value_for_every_sample() -> None:
    for version, samples in SAMPLES.items():
        assert samples.keys() == EXPECTED[version].keys()


@pytest.mark.parametrize(("version", "name"), CASES)
def test_what_nvflare_has_written_is_read(version: str, name: str) -> None:
    message = SAMPLES[version][name]
    assert dialect_of(message) is (Dialect.V2_6 if version < "2_7" else Dialect.V2_7)
    assert identical(loads(message), EXPECTED[version][name])


def _is_written_the_same(version: str, name: str) -> bool:
    """Old versions get large values in another way (see below), and only 2.8 moves headers to the front."""
    has_datums = bool(split_sections(memoryview(SAMPLES[version][name]))[2])
    return version == "2_8_3" or ("late" not in name and not (version < "2_7" and has_datums))


@pytest.mark.parametrize(("version", "name"), [case for case in CASES if _is_written_the_same(*case)])
def test_the_same_bytes_are_written(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the names of large values, which are random; those are taken from what NVFLARE has written."""
    theirs = SAMPLES[version][name]
    ids = iter(split_sections(memoryview(theirs))[2])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(ids).id)
    assert dumps(EXPECTED[version][name], threshold=1024, dialect=DIALECTS[version]) == theirs


@pytest.mark.parametrize("version", ["2_5_2", "2_6_2"])
def test_old_versions_get_large_values_in_the_body(version: str) -> None:
    for value in EXPECTED[version].values():
        message = dumps(value, threshold=1024, dialect=DIALECTS[version])
        dialect, _, datums = split_sections(memoryview(message))
        assert dialect is Dialect.V2_6
        assert not datums
        assert identical(loads(message), value)


# round trips

_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
)
_ARRAYS = hnp.arrays(_DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)).flatmap(
    lambda array: st.sampled_from([array, array.T, np.asfortranarray(array), array[..., ::2] if array.ndim else array])
)
_ENUMS = st.sampled_from([*DataKind, *ParamsType, *AnalyticsDataType, *LogWriterName])
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(),
    st.text(min_size=1024, max_size=1030),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    _ENUMS,
    st.floats(width=64).map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
)
_LEAVES = st.one_of(_SCALARS, st.binary(), st.binary(min_size=1024, max_size=1030), _ARRAYS)
_KEYS = st.one_of(st.text(max_size=5), st.integers(0, 9), st.binary(max_size=3), st.tuples(st.text(max_size=2)), _ENUMS)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(_KEYS, inner, max_size=4)
    named = st.dictionaries(st.text(max_size=3), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        dicts,
        dicts.map(OrderedDict),
        named.map(Shareable),
        st.builds(Dxo, st.text(max_size=3) | st.sampled_from(DataKind), inner, named),
        st.builds(FlContext, st.none(), named),
        st.sets(st.integers(0, 99) | st.text(max_size=2), max_size=4),
    )


VALUES = st.recursive(_LEAVES, _containers, max_leaves=12)


@hypothesis.given(VALUES)
def test_what_is_written_is_read_again_and_not_changed(value: Any) -> None:
    before = repr(value)
    message = dumps(value, threshold=1024)
    assert repr(value) == before
    assert identical(loads(message), value)
    assert identical(loads(memoryview(bytearray(message))), value)


def test_buffers_are_read_as_bytes() -> None:
    grid = memoryview(np.arange(6, dtype=np.int16).reshape(2, 3))  # type: ignore[arg-type] # arrays are buffers
    value = [bytearray(b"ab"), memoryview(b"abcd")[::2], memoryview(np.arange(2, dtype=np.int16)), grid]  # type: ignore[arg-type]
    assert loads(dumps(value)) == [b"ab", b"ac", b"\0\0\1\0", grid.tobytes()]
    assert loads(dumps(memoryview(b"x" * 1024), threshold=1024)) == b"x" * 1024


def test_a_large_array_is_not_copied() -> None:
    array = np.arange(2**18, dtype=np.float64)
    last = dump_buffers({"w": array}, threshold=1024)[-1]
    assert isinstance(last, memoryview)
    assert np.shares_memory(np.frombuffer(last, np.uint8), array)


def test_an_array_can_be_changed_and_does_not_keep_the_message() -> None:
    message = bytearray(dumps(np.zeros(300), threshold=1024))
    array = loads(message)
    array += 1
    message.clear()  # not possible while somebody looks at it
    assert array.sum() == 300


# what is refused


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (Fraction(1, 2), "fractions.Fraction"),
        ([{"a": (object(),)}], "builtins.object"),
        (defaultdict(int), "collections.defaultdict"),
        (np.float16(1), "numpy.float16"),
        (np.zeros(2).view(np.recarray), f"{np.recarray.__module__}.recarray"),
        (frozenset(), "builtins.frozenset"),
        (np.array([object()]), "numpy.ndarray"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy.ndarray"),
        (2**64, "int"),
        (-(2**63) - 1, "int"),
        ({"__fobs_type__": "tuple"}, "dict"),
        (Shareable({"__fobs_type__": "tuple"}), "dict"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(value: Any, type_name: str) -> None:
    with pytest.raises(FobsError) as caught:
        dumps(value)
    assert caught.value.type_name == type_name
    assert type_name in str(caught.value)


def test_half_a_character_and_a_value_that_contains_itself_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value, problem in (("\ud800", None), ("\ud800" * 1024, None), (endless, "deeply"), ((endless,), "deeply")):
        with pytest.raises(FobsError, match=problem):
            dumps(value, threshold=1024)


def test_a_threshold_that_the_peer_would_refuse() -> None:
    with pytest.raises(ValueError, match="1023"):
        dumps("", threshold=1023)


def _message(body: bytes, *sections: bytes) -> bytes:
    return struct.pack(">BBQ", 100, 0, len(body)) + body + b"".join(sections)


def _object(name: Any, data: Any) -> bytes:
    made: bytes = msgpack.packb({"__fobs_type__": name, "__fobs_data__": data, "__fobs_dc__": "x"})
    return _message(made)


@pytest.mark.parametrize(
    "name", ["os.system", "nvflare.apis.workspace.Workspace", "builtins.eval", "argparse.Namespace", "", 7, None, [1]]
)
def test_a_type_that_is_not_known_is_refused_by_name(name: Any) -> None:
    with pytest.raises(FobsError) as caught:
        loads(_object(name, "x"))
    assert caught.value.type_name == str(name)


@pytest.mark.parametrize("name", sorted(fobs._MAKERS))
@pytest.mark.parametrize("data", [None, 1.5, "x", b"x", [1], [[]], [{}, 1], {}, {"data": 1}, {"type": "native"}, True])
def test_content_that_does_not_fit_its_type_is_refused(name: str, data: Any) -> None:
    fits: dict[str, list[Any]] = {
        "tuple": [[1], [[]], [{}, 1]],
        "set": [[1]],
        "nvflare.apis.shareable.Shareable": [{}, {"data": 1}, {"type": "native"}],
        "numpy.float64": [1.5],
        "numpy.float32": [1.5],
    }
    if data is not True and data in fits.get(name, []):
        loads(_object(name, data))
    else:
        with pytest.raises(FobsError):
            loads(_object(name, data))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("numpy.int32", 2**31),
        ("numpy.int64", 2**63),
        ("nvflare.apis.dxo.DataKind", "WEIGHT"),
        ("nvflare.apis.dxo.DataKind", "__class__"),
        ("datetime.datetime", "2024-02-30"),
        ("numpy.ndarray", {"type": "ref", "data": "T0"}),
        ("collections.OrderedDict", [{"__fobs_type__": "tuple", "__fobs_data__": [[], 1]}]),
        ("collections.OrderedDict", [{"__fobs_type__": "tuple", "__fobs_data__": [1]}]),
        ("nvflare.fuel.utils.fobs.datum.DatumRef", {"data": {"datum_id": str(uuid.UUID(int=0)), "unwrap": True}}),
    ],
)
def test_values_that_do_not_exist_are_refused(name: str, data: Any) -> None:
    with pytest.raises(FobsError):
        loads(_object(name, data))


def test_a_float_beyond_its_range_is_infinite() -> None:
    assert loads(_object("numpy.float32", 1e300)) == np.float32("inf")


def _datum(marker: int, content: bytes, kind: int = 0) -> bytes:
    return struct.pack(">BBQ", marker, kind, 16 + len(content)) + uuid.UUID(int=7).bytes + content


_REF = {
    "__fobs_type__": "nvflare.fuel.utils.fobs.datum.DatumRef",
    "__fobs_data__": {"data": {"datum_id": str(uuid.UUID(int=7)), "unwrap": True}},
}


def test_sections_that_only_nvflare_can_read_are_refused() -> None:
    body = msgpack.packb(_REF)
    assert loads(_message(body, _datum(102, b"x"))) == b"x"
    with pytest.raises(FobsError, match="file"):
        loads(_message(body, _datum(103, b"/etc/passwd")))
    with pytest.raises(FobsError, match="network"):
        loads(_message(body, _datum(101, b"{}", kind=3)))
    with pytest.raises(FobsError):
        loads(_message(body, _datum(101, b"\xff")))


def test_a_large_value_is_used_once() -> None:
    """Else a small message could ask for the same large array any number of times."""
    with pytest.raises(FobsError, match="twice"):
        loads(_message(msgpack.packb([_REF, _REF]), _datum(102, b"x")))


def test_extensions_are_refused_but_for_times() -> None:
    with pytest.raises(FobsError, match="extension 5"):
        loads(_message(msgpack.packb(msgpack.ExtType(5, b"x"))))
    assert loads(_message(msgpack.packb(msgpack.Timestamp(0)))) == datetime(1970, 1, 1, tzinfo=UTC)
    with pytest.raises(FobsError):
        loads(_message(msgpack.packb(msgpack.Timestamp(2**62))))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\x00\x40\x00\x00" * 500,
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x91" * 5000 + b"\x00",
        b"\x81\x91\x00\x00",
        b"\xa1\xff",
        b"\x00\x00",
        b"\xc1",
        b"",
    ],
)
def test_bodies_that_lie_are_refused_without_reserving_memory(body: bytes) -> None:
    message = _message(body)
    tracemalloc.start()
    try:
        with pytest.raises(FobsError):
            loads(message)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_every_cut_of_a_message_is_refused() -> None:
    message = dumps(Shareable(a=np.arange(200), b="t" * 2000), threshold=1024)
    for size in range(len(message)):
        with pytest.raises(FobsError):
            loads(message[:size])
    with pytest.raises(FobsError):
        loads(message + b"\0")


MESSAGES = [message for samples in SAMPLES.values() for message in samples.values()]


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_damage_is_either_read_or_refused(data: st.DataObject) -> None:
    message = bytearray(data.draw(st.sampled_from(MESSAGES)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(message) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                message[place] = data.draw(st.integers(0, 255))
            case 1:
                message[place:place] = data.draw(st.binary(max_size=3))
            case _:
                del message[place : place + data.draw(st.integers(0, 3))]
                message = message or bytearray(b"d")
    with contextlib.suppress(FobsError):
        loads(message)


@hypothesis.given(st.binary())
def test_noise_is_either_read_or_refused(body: bytes) -> None:
    for message in (body, _message(body)):
        with contextlib.suppress(FobsError):
            loads(message)


# arrays


def _npy(header: str | bytes, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1") if isinstance(header, str) else header
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little") + text + content


def _header(descr: str, shape: str, order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


@hypothesis.given(_ARRAYS)
def test_arrays_are_written_as_numpy_writes_them(array: Any) -> None:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    ours = b"".join(array_buffers(array))
    assert ours == stream.getvalue()
    loaded = load_array(ours)
    assert identical(loaded, array)
    assert loaded.flags.writeable
    assert loaded.flags.owndata


def test_every_version_of_the_header_is_read() -> None:
    for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        assert load_array(_npy(_header("'<u2'", "(1,)"), b"\1\0", version)).tolist() == [1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x04\x00\x00\x00\x00\x00",
        b"PK\x03\x04" + b"\0" * 30,
        b"\x80\x04N.",
        _npy(_header("'|O'", "(1,)"), b"\x80\x04N."),
        _npy(_header("'|O8'", "(1,)"), b"\0" * 8),
        _npy(_header("[('a', '<i4')]", "(1,)"), b"\0" * 4),
        _npy(_header("'<f8'", "(1000000000000,)"), b"\0" * 8),
        _npy(_header("'<f8'", "(9223372036854775807, 9223372036854775807, 0)")),
        _npy(_header("'<f8'", "(" + "0, " * 200 + ")")),
        _npy(_header("'<f8'", "(-1,)"), b""),
        _npy(_header("'|S0'", "(1000000000000,)")),
        _npy(_header("'|V0'", "(1000000000000,)")),
        _npy(_header("'<f3'", "(1,)"), b"\0" * 3),
        _npy(_header("'<U999999999'", "(1,)")),
        _npy(_header("'<M8[xy]'", "(1,)"), b"\0" * 8),
        _npy(_header("'<f8'", "(1,)"), b"\0" * 7),
        _npy(_header("'<f8'", "(1,)"), b"\0" * 9),
        _npy(_header("'<f8'", "(1,)", "print()"), b"\0" * 8),
        _npy(_header("'<f8'", "(1,)", "1"), b"\0" * 8),
        _npy("(" * 9000),
        _npy(b"\xff" * 60000),
        _npy("x" * 20000, version=b"\x02\x00"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    ],
)
def test_arrays_that_lie_are_refused(data: bytes) -> None:
    with pytest.raises(FobsError) as caught:
        load_array(data)
    assert caught.value.type_name == "numpy.ndarray"


@hypothesis.given(
    st.from_regex(r"'[<>|][biufcSUVMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?'", fullmatch=True),
    st.from_regex(r"\(([0-9]{1,19}, ){0,70}([0-9]{1,19},?)?\)", fullmatch=True),
    st.binary(max_size=64),
)
@hypothesis.settings(max_examples=150)
def test_headers_of_the_right_form_are_either_read_or_refused(descr: str, shape: str, content: bytes) -> None:
    with contextlib.suppress(FobsError):
        load_array(_npy(_header(descr, shape), content))
