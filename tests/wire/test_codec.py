"""Values arrive as what they were, or are refused with a reason."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import pickle
import subprocess
import sys
import threading
import time
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from dfm_async.errors import EncodingError
from dfm_async.wire.classes import KnownClasses
from dfm_async.wire.codec import Broken, Codec
from tests.wire import shapes
from tests.wire.shapes import (
    SAMPLES,
    Box,
    Frozen,
    FrozenSlotted,
    Inner,
    Item,
    Outer,
    Pair,
    Plain,
    Point,
    Rights,
    Slotted,
    atoms,
    same,
    values,
)

trusted = Codec(trusted=True)
untrusted = Codec(trusted=False)


def through(value: Any, codec: Codec = trusted) -> Any:
    return codec.loads(codec.encode(value))


# what arrives


@pytest.mark.parametrize("codec", [trusted, untrusted], ids=["trusted", "untrusted"])
def test_every_kind_of_value_arrives_as_what_it_was(codec: Codec) -> None:
    wrong = {}
    for value in SAMPLES:
        try:
            arrived = through(value, codec)
        except Exception as error:
            wrong[repr(value)] = error
        else:
            if not same(arrived, value):
                wrong[repr(value)] = arrived
    assert not wrong


@given(values)
def test_any_mixture_of_values_arrives_with_its_exact_types(value: Any) -> None:
    arrived = through(value, untrusted)
    assert same(arrived, value), f"{value!r} arrived as {arrived!r}"


@given(st.lists(values, max_size=5))
def test_a_batch_gives_each_of_its_values_back(batch: list[Any]) -> None:
    data = trusted.dumps([trusted.pack(value) for value in batch])
    assert same(trusted.loads_batch(data), batch)


@given(values)
def test_a_value_can_be_read_from_a_memoryview(value: Any) -> None:
    assert same(trusted.loads(memoryview(trusted.encode(value))), value)


def test_an_integer_of_many_thousand_digits_arrives() -> None:
    assert through(10**5000 + 7) == 10**5000 + 7


def test_the_second_of_two_equal_clock_readings_stays_the_second() -> None:
    assert through(dt.time(2, 30, fold=1)).fold == 1


def test_a_datetime_keeps_the_rules_of_its_time_zone() -> None:
    summer = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    arrived = through(summer)
    assert arrived == summer
    assert arrived.tzinfo == summer.tzinfo
    assert (arrived + dt.timedelta(days=180)).utcoffset() == dt.timedelta(hours=1)


def test_a_time_of_day_does_not_lose_its_time_zone() -> None:
    value = dt.time(12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    assert through(value).tzinfo == value.tzinfo


def test_a_pydantic_model_keeps_which_fields_were_set_and_its_private_attributes() -> None:
    value = Outer(inner=Inner(value={1: (2,)}))
    value._secret = 7
    arrived = through(value)
    assert arrived == value
    assert arrived.model_fields_set == {"inner"}
    assert arrived._secret == 7
    assert type(arrived.inner) is Inner


def test_a_model_without_validation_arrives_without_validation() -> None:
    odd_fields: dict[str, Any] = {"inner": "not an inner", "many": None}
    odd = Outer.model_construct(**odd_fields)
    arrived = through(odd)
    assert (arrived.inner, arrived.many) == ("not an inner", None)


def test_attributes_that_are_not_fields_travel_with_a_dataclass() -> None:
    value = Point(1)
    value.extra = (1, 2)  # type: ignore[attr-defined]
    assert through(value).extra == (1, 2)


@pytest.mark.parametrize(
    "value",
    [Plain([1]), OrderedDict(a=1), Counter("aab"), KeyError("k"), np.array([{1}, None], dtype=object), Path],
    ids=lambda value: type(value).__name__,
)
def test_a_trusted_codec_pickles_what_no_rule_knows(value: Any) -> None:
    arrived = through([value])[0]
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value) or arrived == value


ARRAYS: list[Any] = [
    np.array(3.5),
    np.array([], dtype="f4"),
    np.zeros((0, 4), dtype="i2"),
    np.zeros((3, 0), dtype="i2", order="F"),
    np.arange(24, dtype="u1").reshape(2, 3, 4),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.array([True, False]),
    np.array([1 + 2j], dtype="c8"),
    np.array(["a", "bcd"]),
    np.array([b"x", b"yz"]),
    np.array(["2024-01-01", "NaT"], dtype="M8[s]"),
    np.array([1, 2], dtype="m8[ms]"),
    np.array([np.nan, -0.0, np.inf]),
    np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (2,)), ("c", [("d", "U3")])]),
    np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.array(["", ""], dtype="U1"),
    np.arange(3, dtype=np.longdouble),
]


def test_a_numpy_array_keeps_dtype_shape_order_and_content() -> None:
    for array in ARRAYS:
        arrived = through(array, untrusted)
        assert same(arrived, array), array
        assert not arrived.flags.writeable


def test_a_strided_view_arrives_as_the_array_that_it_shows() -> None:
    view = np.arange(20).reshape(4, 5)[::2, ::-2]
    arrived = through(view)
    assert arrived.tolist() == view.tolist()
    assert arrived.dtype == view.dtype


@given(
    st.sampled_from(["i1", "<u2", ">i8", "f2", "<f8", "c16", "?", "S3", "U2", "M8[us]"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["C", "F"]),
    st.data(),
)
def test_any_numpy_array_arrives_with_its_bytes(dtype: str, shape: list[int], order: Any, data: st.DataObject) -> None:
    array = np.zeros(shape, dtype=dtype, order=order)
    array.view()[...] = data.draw(st.integers(0, 9)) if dtype[-2:] != "[us]"[-2:] else np.datetime64(7, "us")
    arrived = through(array, untrusted)
    assert same(arrived, array)


SCALARS: list[Any] = [
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.float16(0.5),
    np.float64("nan"),
    np.longdouble(1) / 3,
    np.complex64(1j),
    np.bool_(False),
    np.datetime64("2024-02-29T12:00", "m"),
    np.timedelta64(5, "h"),
    np.str_("äb"),
    np.bytes_(b"ab"),
    np.str_(""),
    np.bytes_(b""),
    np.zeros(1, dtype=[("a", "i4"), ("b", "U2")])[0],
]


def test_a_numpy_scalar_stays_a_numpy_scalar() -> None:
    wrong = {}
    for value in SCALARS:
        try:
            arrived = through(value, untrusted)
        except EncodingError as error:
            wrong[repr(value)] = str(error)
        else:
            if not same(arrived, value):
                wrong[repr(value)] = repr(arrived)
    assert wrong == {}


# what is refused


def a_generator() -> Any:
    yield 1


UNSENDABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: lambda x: x, "function"),
    (threading.Lock, "_thread.lock"),
    (a_generator, "generator"),
]

NESTINGS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda part: part, "value"),
    (lambda part: [1, part], "value[1]"),
    (lambda part: {"a": {"b": part}}, "value['a']['b']"),
    (lambda part: {7: [part]}, "value[7][0]"),
    (lambda part: (0, (part,)), "value[1][0]"),
    (lambda part: Point([0, part]), "value.x[1]"),
    (lambda part: Frozen({"k": part}), "value.x['k']"),
    (lambda part: FrozenSlotted(1, Slotted(part)), "value.inner.x"),
    (lambda part: [Inner(value={"deep": [part]})], "value[0].value['deep'][0]"),
    (lambda part: Pair(1, part), "value[1]"),
    (lambda part: {(1, 2): part}, "value[(1, 2)]"),
    (lambda part: [Item("n", [part])], "value[0].price[0]"),
    (lambda part: [*range(100), part], "value[100]"),
]


@pytest.mark.parametrize(("make", "type_name"), UNSENDABLE, ids=[u[1] for u in UNSENDABLE])
def test_what_cannot_travel_is_named_with_its_type_and_the_path_to_it(make: Callable[[], Any], type_name: str) -> None:
    told = {}
    for nest, path in NESTINGS:
        for codec in (trusted, untrusted):
            with pytest.raises(EncodingError) as caught:
                codec.pack(nest(make()))
            if (caught.value.path, caught.value.type_name) != (path, type_name):
                told[path] = (caught.value.path, caught.value.type_name)
            assert caught.value.path in str(caught.value)
            assert caught.value.type_name in str(caught.value)
    assert told == {}


def test_a_class_that_others_cannot_find_is_told_to_be_put_in_a_module() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(EncodingError, match=r"only this process knows its class.*put it in a module"):
        untrusted.pack(Local(1))
    with pytest.raises(EncodingError, match="no codec knows this type"):
        untrusted.pack(object())


def test_a_member_of_a_set_that_cannot_travel_is_named() -> None:
    part = lambda: None  # noqa: E731
    with pytest.raises(EncodingError) as caught:
        trusted.pack({"s": {part}})
    assert caught.value.type_name == "function"
    assert caught.value.path.startswith("value['s'].item(")


def test_a_key_that_cannot_travel_is_named() -> None:
    part = lambda: None  # noqa: E731
    with pytest.raises(EncodingError) as caught:
        trusted.pack({part: 1})
    assert caught.value.type_name == "function"
    assert caught.value.path.startswith("value.key(")


def _self_containing() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def _dict_in_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["me"] = [found]
    return found


def _point_in_itself() -> Point:
    found = Point(1)
    found.y = (found,)
    return found


def test_a_value_that_contains_itself_is_refused() -> None:
    for value in (_self_containing(), _dict_in_itself(), _point_in_itself()):
        with pytest.raises(EncodingError, match="contains itself"):
            trusted.pack(value)


def test_a_codec_works_on_after_a_refusal() -> None:
    codec = Codec(trusted=True)
    for bad in (_self_containing(), lambda: None, [threading.Lock()]):
        with pytest.raises(EncodingError):
            codec.pack(bad)
    assert through([(1, 2)], codec) == [(1, 2)]


def _value_of_a_local_class() -> Any:
    import dataclasses

    @dataclasses.dataclass
    class Local:
        x: int

    return Local(1)


def _value_of_a_local_enum() -> Any:
    import enum

    class Local(enum.Enum):
        A = 1

    return Local.A


def _generic_model_named_in_a_function() -> Any:
    return Box[dict[str, int]](content={"a": 1})


@pytest.mark.parametrize("make", [_value_of_a_local_class, _value_of_a_local_enum, _generic_model_named_in_a_function])
def test_what_pack_accepts_can_be_rebuilt_and_the_rest_is_the_senders_error(make: Callable[[], Any]) -> None:
    """A value whose class nobody can find is refused where it is made, not lost where it arrives."""
    for codec in (trusted, untrusted):
        value = make()
        try:
            data = codec.encode([value])
        except EncodingError:
            continue
        assert codec.loads(data) == [value]


# snapshots


CHANGES: list[tuple[Any, Callable[[Any], Any]]] = [
    ([1, 2], lambda v: v.append(3)),
    (["a"] * 20, lambda v: v.clear()),
    ([*range(20)], lambda v: v.append(3)),
    ([[1]], lambda v: v[0].append(2)),
    ({"a": [1]}, lambda v: v["a"].append(2)),
    ({"a": 1}, lambda v: v.update(b=1)),
    ({(1,): [1]}, lambda v: v[1,].append(2)),
    ({1, 2}, lambda v: v.add(3)),
    (([1],), lambda v: v[0].append(2)),
    (bytearray(b"ab"), lambda v: v.extend(b"c")),
    (np.zeros(3), lambda v: v.fill(1)),
    ([np.zeros((2, 2), order="F")], lambda v: v[0].fill(1)),
    (Point([1]), lambda v: v.x.append(2)),
    (Inner(value=[1]), lambda v: v.value.append(2)),
    (Item([1]), lambda v: v.name.append(2)),
    (Plain([1]), lambda v: v.value.append(2)),
    (OrderedDict(a=1), lambda v: v.update(b=2)),
]


def test_a_change_after_pack_does_not_reach_the_receiver() -> None:
    for value, change in CHANGES:
        before = pickle.loads(pickle.dumps(value))
        packed = trusted.pack(value)
        change(value)
        assert not same(value, before), "the change must change something"
        assert same(trusted.loads(trusted.dumps(packed)), before)


@given(values)
def test_pack_leaves_the_value_as_it_was(value: Any) -> None:
    before = pickle.loads(pickle.dumps(value))
    trusted.pack(value)
    assert same(value, before)


@given(values)
def test_what_arrives_shares_nothing_with_the_message(value: Any) -> None:
    data = bytearray(trusted.encode(value))
    arrived = trusted.loads(memoryview(data))
    data[:] = bytes(len(data))
    assert same(arrived, value)


# trust


@pytest.mark.parametrize("value", [Plain(1), KeyError("k"), np.array([None])], ids=["object", "error", "array"])
def test_an_untrusted_codec_does_not_pack_what_it_would_have_to_pickle(value: Any) -> None:
    with pytest.raises(EncodingError, match="pickle is not allowed") as caught:
        untrusted.pack({"a": [value]})
    assert caught.value.path == "value['a'][0]"


class Strings(OrderedDict[str, str]):
    """Not exactly one of the known types."""


class FixedZone(dt.tzinfo):
    def utcoffset(self, _: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=1)

    def dst(self, _: dt.datetime | None) -> None:
        return None

    def tzname(self, _: dt.datetime | None) -> str:
        return "fixed"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Strings(), "no codec knows this type"),
        (defaultdict(lambda: 1), "its default_factory <function"),
        (defaultdict(threading.Lock), "is none of Counter, OrderedDict, bool"),
        (dt.datetime(2024, 1, 1, tzinfo=FixedZone()), "its time zone .* is neither a fixed offset"),
        (dt.time(1, tzinfo=FixedZone()), "its time zone .* is neither a fixed offset"),
        (Fraction(1, 2**200_000), "more than 131,072 bits"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_the_rule_of_the_store(value: Any, reason: str) -> None:
    stored = Codec(trusted=False, stored=True)
    with pytest.raises(
        EncodingError, match=rf"value\[0\] of type .* cannot be written to a store: .*{reason}"
    ) as caught:
        stored.pack([value])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.stored) == (str(caught.value), True)
    with pytest.raises(EncodingError, match="cannot be sent to another site"):
        untrusted.pack([value])


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("Popen", ["true"]),
        ("deque", [[1, 2], 1]),
        ("deque", [[1], -1]),
        ("deque", ["ab", None]),
        ("deque", [[], 2**70]),
        ("defaultdict", ["eval", []]),
        ("defaultdict", ["__import__", []]),
        ("defaultdict", ["list", [["a", 1]]]),
        ("Counter", "aab"),
        ("OrderedDict", [[1, 2, 3]]),
        ("Fraction", [1, 0]),
        ("Fraction", ["1/3"]),
        ("Fraction", [2**200_000, 3]),
        ("IPv4Address", 5),
        ("IPv4Network", ["10.0.0.1", "/8"]),
        ("datetime", ["2024-01-01", 0, "../../etc/passwd"]),
        ("datetime", ["2024-01-01", 0, "/etc/localtime"]),
        ("datetime", ["2024-01-01", 2, "UTC"]),
        ("time", ["25:00", 0, "UTC"]),
        ("ZoneInfo", "Nowhere/Land"),
        ("ZoneInfo", "a/" * 2000 + "b"),
        ("ZoneInfo", None),
        ("timezone", [dt.timedelta(days=3)]),
        ("timezone", []),
        (["deque"], [[], None]),
    ],
)
def test_states_that_no_standard_value_has_are_refused(name: Any, state: Any) -> None:
    data = msgspec.msgpack.encode(Ext(29, untrusted.dumps([name, untrusted.pack(state)])))
    began = time.process_time()
    with pytest.raises(EncodingError):
        untrusted.loads(data)
    assert time.process_time() - began < 5


def test_zones_are_looked_up_below_the_folders_of_their_data_only() -> None:
    names = [
        "Europe/Zurich",
        "../../../etc/passwd",
        "/etc/passwd",
        "Europe/../../x",
        "tzdata.zi",
        "a\0b",
        "..",
        "Aa/Bb",
    ]
    script = f"""
import sys
from dfm_async.wire.standard import rebuild
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
for name in {names!r}:
    try:
        rebuild("ZoneInfo", name)
    except (LookupError, ValueError, OSError):
        pass
opened = [path for path in opened if not path.endswith((".py", ".pyc"))]
print([path for path in opened if "zoneinfo" not in path and "tzdata" not in path])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("codec", [trusted, untrusted, Codec(trusted=False, known=KnownClasses())])
def test_paths_of_every_version_of_python_are_read(module: str, codec: Codec) -> None:
    data = msgspec.msgpack.encode(Ext(18, codec.dumps([f"{module}:PosixPath", "a/b"])))
    assert codec.loads(data) == Path("a/b")
    assert b"pathlib:PosixPath" in codec.encode(Path("a/b"))


class Bomb:
    went_off: int = 0

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> str:
    Bomb.went_off += 1
    return "boom"


@pytest.mark.parametrize("nest", [lambda b: b, lambda b: [b], lambda b: {"a": (b,)}, lambda b: Point(b)])
def test_an_untrusted_codec_never_unpickles(nest: Callable[[Any], Any]) -> None:
    data = trusted.encode(nest(Bomb()))
    with pytest.raises(EncodingError, match="not accepted"):
        untrusted.loads(data)
    assert Bomb.went_off == 0
    trusted.loads(data)
    assert Bomb.went_off == 1, "the same bytes do unpickle where that is allowed"
    Bomb.went_off = 0


@pytest.mark.parametrize("code", [12, 13, 14, 15, 16, 18])
def test_an_untrusted_codec_imports_no_module(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"dfm_never_imported_{code}"
    (tmp_path / f"{name}.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = untrusted.dumps(Ext(code, untrusted.dumps([f"{name}:Thing", {}])))
    with pytest.raises(EncodingError, match="not loaded"):
        untrusted.loads(data)
    assert name not in sys.modules
    with pytest.raises(EncodingError):  # it is no enum, no dataclass, ...
        trusted.loads(data)
    assert sys.modules.pop(name).Thing, "the module could have been imported"


@pytest.mark.parametrize(
    ("code", "ref"),
    [
        (13, "subprocess:Popen"),
        (14, "subprocess:Popen"),
        (15, "subprocess:Popen"),
        (16, "builtins:list"),
        (18, "builtins:str"),
        (12, "os:system"),
        (13, "os:environ"),
        (13, "os:nothing"),
        (13, "nonsense"),
        (13, ""),
    ],
)
def test_only_classes_of_the_right_kind_are_rebuilt(code: int, ref: str) -> None:
    data = untrusted.dumps(Ext(code, untrusted.dumps([ref, {"args": "true"}])))
    with pytest.raises(EncodingError, match="cannot be rebuilt"):
        untrusted.loads(data)


# garbage


def _readable(value: Any) -> None:
    """What came out of garbage is an ordinary value: it can be looked at."""
    repr(value)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 5000)
@example(b"\xc7\x00\x01")
@example(b"\x81\x90\x01")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\xff\xff\xff\xff")
def test_garbage_gives_a_value_or_an_encoding_error(data: bytes) -> None:
    codec = Codec(trusted=False)
    for load in (codec.loads, codec.loads_batch):
        with contextlib.suppress(EncodingError):
            _readable(load(data))


@given(st.integers(-128, 127), st.binary(max_size=60) | values.map(untrusted.encode))
def test_garbage_inside_an_extension_gives_a_value_or_an_encoding_error(code: int, data: bytes) -> None:
    with contextlib.suppress(EncodingError):
        _readable(Codec(trusted=False).loads(msgspec.msgpack.encode([Ext(code, data)])))


@given(values, st.data())
def test_a_cut_or_spoilt_message_gives_a_value_or_an_encoding_error(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(untrusted.encode([value]))
    where = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(EncodingError):
        Codec(trusted=False).loads(bytes(encoded[:where]))
    encoded[where] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(EncodingError):
        _readable(Codec(trusted=False).loads(bytes(encoded)))


def _pickled(value: Any) -> bytes:
    return trusted.encode(Plain(value))


def test_a_failed_load_does_not_spoil_the_next_one() -> None:
    codec = Codec(trusted=False)
    cut_off = b"\x92" + _pickled(1)  # a list of two, of which the first is refused and the second missing
    with pytest.raises(EncodingError):
        codec.loads(cut_off)
    assert codec.loads(codec.encode([1, (2,)])) == [1, (2,)]


def test_a_refused_batch_does_not_spoil_the_next_load() -> None:
    codec = Codec(trusted=False)
    with pytest.raises(EncodingError, match="batch"):
        codec.loads_batch(_pickled(1))
    assert codec.loads(codec.encode((2,))) == (2,)


# batches


BREAKABLE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda bad: bad,
    "list": lambda bad: [bad],
    "tuple": lambda bad: (1, (bad,)),
    "dict": lambda bad: {"a": {"b": bad}},
    "key": lambda bad: {(1, bad): 2},
    "set": lambda bad: {bad},
    "frozenset": lambda bad: frozenset({bad}),
    "named tuple": lambda bad: Pair(1, bad),
    "dataclass": lambda bad: Point(bad),
    "frozen dataclass": lambda bad: Frozen([bad]),
    "slotted dataclass": lambda bad: Slotted(bad),
    "frozen slotted dataclass": lambda bad: FrozenSlotted([bad]),
    "struct": lambda bad: Item(bad),
    "model": lambda bad: Inner(value=bad),
    "nested model": lambda bad: Outer(inner=Inner(value=[bad])),
}


def test_one_value_that_cannot_be_rebuilt_leaves_the_others_of_its_batch_alone() -> None:
    missed = []
    for name, nest in BREAKABLE.items():
        batch = [1, nest(Plain(2)), (3,), [Point(4)]]
        found = untrusted.loads_batch(trusted.dumps([trusted.pack(value) for value in batch]))
        assert [found[0], *found[2:]] == [1, (3,), [Point(4)]]
        if not isinstance(found[1], Broken):
            missed.append(name)
        else:
            assert "pickled" in str(found[1].error)
    assert missed == [], "these arrived with a hole in them"


@given(st.lists(st.booleans(), max_size=8))
def test_exactly_the_broken_values_of_a_batch_are_broken(bad: list[bool]) -> None:
    batch = [[Plain(i)] if broken else [i] for i, broken in enumerate(bad)]
    found = untrusted.loads_batch(trusted.dumps([trusted.pack(value) for value in batch]))
    assert [isinstance(value, Broken) for value in found] == bad
    assert all(value == [i] for i, value in enumerate(found) if not bad[i])


@pytest.mark.parametrize("value", [1, {"a": 1}, (1, 2), "text", None])
def test_what_is_not_a_list_is_no_batch(value: Any) -> None:
    with pytest.raises(EncodingError, match="batch"):
        untrusted.loads_batch(untrusted.encode(value))


# canonical bytes

canonical = Codec(trusted=False, canonical=True)
_plain_keys = st.text(max_size=3) | st.integers(-5, 300) | st.binary(max_size=2) | st.none()


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.dictionaries(st.text(), atoms)), st.randoms())
def test_equal_dicts_give_equal_canonical_bytes_in_whatever_order(value: dict[str, Any], random: Any) -> None:
    entries = list(value.items())
    random.shuffle(entries)
    assert canonical.encode([dict(entries), (dict(entries),)]) == canonical.encode([value, (value,)])


@given(st.dictionaries(_plain_keys, st.integers()), st.randoms())
def test_dicts_with_keys_of_several_types_have_canonical_bytes(value: dict[Any, Any], random: Any) -> None:
    entries = list(value.items())
    random.shuffle(entries)
    assert canonical.encode(dict(entries)) == canonical.encode(value)
    assert canonical.loads(canonical.encode(value)) == value


@given(st.dictionaries(st.tuples(st.integers(), st.text(max_size=3)) | st.uuids(), st.integers()), st.randoms())
@example({(1, "a"): 1, (0, "b"): 2}, None)
def test_dicts_with_keys_that_are_tuples_have_canonical_bytes(value: dict[Any, Any], random: Any) -> None:
    entries = list(value.items())
    if random is None:
        entries.reverse()
    else:
        random.shuffle(entries)
    assert canonical.encode(dict(entries)) == canonical.encode(value)


@given(st.sets(atoms.filter(lambda v: v == v), max_size=8), st.randoms())
def test_equal_sets_give_equal_canonical_bytes_in_whatever_order(value: set[Any], random: Any) -> None:
    members = list(value)
    random.shuffle(members)
    other: set[Any] = set()
    for member in members:
        other.add(member)
    frozen = frozenset(members)
    assert canonical.encode(other) == canonical.encode(value)
    assert canonical.encode([frozen, Point(frozen)]) == canonical.encode([frozenset(value), Point(frozenset(value))])


def test_canonical_bytes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from dfm_async.wire.codec import Codec\n"
        "value = [{'b', 'a', 'c', ('d', 1)}, frozenset('xyz'), {'k': {'m', 'n', 'o'}}]\n"
        "print(Codec(trusted=False, canonical=True).encode(value).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1


@given(values, values)
def test_different_values_have_different_bytes(a: Any, b: Any) -> None:
    if not same(a, b):
        assert untrusted.encode(a) != untrusted.encode(b)


def test_flags_without_a_name_of_their_own_arrive() -> None:
    both = Rights.READ | Rights.WRITE
    assert through({both: [both]}) == {both: [both]}
    assert shapes.Rights.READ in through(both)


COLLIDING = [number * (2**61 - 1) + 7 for number in range(3000)]


@pytest.mark.parametrize(
    "value",
    [
        set(COLLIDING[:1500]),
        frozenset(COLLIDING[:1500]),
        dict.fromkeys(COLLIDING[:1500]),
        {(number, "x") for number in COLLIDING[:1500]},
        Counter(COLLIDING[:1500]),
        OrderedDict.fromkeys(COLLIDING[:1500]),
    ],
    ids=["set", "frozenset", "dict", "tuples", "Counter", "OrderedDict"],
)
def test_untrusted_keys_with_one_hash_are_refused(value: Any) -> None:
    data = trusted.dumps(trusted.pack(value))
    assert trusted.loads(data) == value
    with pytest.raises(EncodingError, match="have the same hash"):
        untrusted.loads(data)


def test_untrusted_keys_with_different_hashes_arrive() -> None:
    value = {*range(50_000), *COLLIDING[:30], *map(str, range(1000))}
    assert untrusted.loads(untrusted.dumps(untrusted.pack(value))) == value


def map_of(*keys: bytes) -> bytes:
    """A MessagePack map as our encoder never writes one."""
    return b"\xdf" + len(keys).to_bytes(4, "big") + b"".join(key + b"\xc0" for key in keys)


SCALAR_KEYS = list(
    map(msgspec.msgpack.encode, [*range(300), "x" * 40, "y" * 300, b"z" * 300, 1.5, None, True, -(2**40)])
)
OTHER_KEYS = {
    "array": msgspec.msgpack.encode([1, 2]),
    "long array": msgspec.msgpack.encode(list(range(20))),
    "big int": msgspec.msgpack.encode(msgspec.msgpack.Ext(4, bytes(9))),
    "fixed extension": msgspec.msgpack.encode(msgspec.msgpack.Ext(4, bytes(8))),
    "long extension": msgspec.msgpack.encode(msgspec.msgpack.Ext(4, bytes(300))),
}
AROUND: dict[str, Callable[[bytes], bytes]] = {
    "alone": lambda data: data,
    "in lists": lambda data: b"\x93\x01\x91" + data + b"\xa1x",
    "in a long list": lambda data: b"\xdc\x01\x00" + b"\xcb@\xdf\0\0\0\0\0\0" * 255 + data,
    "in a map": lambda data: b"\x82\xa1a\xc4\x28" + b"\xdf" * 40 + b"\xa1b" + data,
    "in a large map": lambda data: map_of(*SCALAR_KEYS)[:-1] + data,
    "in a tuple": lambda data: msgspec.msgpack.encode([msgspec.msgpack.Ext(1, b"\x91" + data)]),
    "behind a broken extension": lambda data: (
        b"\x92" + msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\xdb\xff")) + data
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("key", OTHER_KEYS)
def test_untrusted_large_maps_have_only_scalar_keys(around: str, key: str) -> None:
    place = SCALAR_KEYS.index(msgspec.msgpack.encode(None))
    data = AROUND[around](map_of(*SCALAR_KEYS[:place], OTHER_KEYS[key], *SCALAR_KEYS[place:]))
    with pytest.raises(EncodingError, match="a key of a large map"):
        untrusted.loads(data)
    found = untrusted.loads_batch(b"\x91" + data) if around == "in a tuple" else None
    assert found is None or type(found[0]) is Broken


@pytest.mark.parametrize("around", [name for name in AROUND if "broken" not in name])
def test_untrusted_large_maps_with_scalar_keys_arrive(around: str) -> None:
    data = AROUND[around](map_of(*SCALAR_KEYS))
    assert untrusted.loads(data) == trusted.loads(data)


@given(
    st.recursive(st.integers() | st.text(max_size=300) | st.binary(max_size=300) | st.floats(allow_nan=False), st.lists)
)
@settings(deadline=None, max_examples=100)
def test_values_beside_a_large_map_arrive(value: Any) -> None:
    whole = [value, dict.fromkeys(range(300), value), value]
    assert untrusted.loads(untrusted.encode(whole)) == whole
