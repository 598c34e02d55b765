"""Values arrive as what they were, or are refused with a reason."""

from __future__ import annotations

import dataclasses
import datetime as dt
import pickle
import threading
import zoneinfo
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dfm_async.errors import EncodingError
from dfm_async.wire.codec import Broken, Codec
from tests.support.processes import printed_with_hash_seeds
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
    Slotted,
    atoms,
    same,
    through,
    trusted,
    untrusted,
    values,
)

# what arrives


@pytest.mark.parametrize("codec", [trusted, untrusted], ids=["trusted", "untrusted"])
def test_every_kind_of_value_arrives_as_what_it_was(codec: Codec) -> None:
    for value in SAMPLES:
        arrived = through(value, codec)
        assert same(arrived, value), f"{value!r} arrived as {arrived!r}"


@given(values)
def test_any_mixture_of_values_arrives_with_its_exact_types(value: Any) -> None:
    arrived = through(value, untrusted)
    assert same(arrived, value), f"{value!r} arrived as {arrived!r}"


@given(st.lists(values, max_size=5))
def test_a_batch_gives_each_of_its_values_back(batch: list[Any]) -> None:
    data = trusted.dumps([trusted.pack(value) for value in batch])
    assert same(trusted.loads_batch(data), batch)


def test_a_datetime_keeps_the_rules_of_its_time_zone() -> None:
    summer = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    arrived = through(summer)
    assert arrived == summer
    assert arrived.tzinfo == summer.tzinfo
    assert (arrived + dt.timedelta(days=180)).utcoffset() == dt.timedelta(hours=1)


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
    for value in SCALARS:
        arrived = through(value, untrusted)
        assert same(arrived, value), f"{value!r} arrived as {arrived!r}"


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
    for nest, path in NESTINGS:
        for codec in (trusted, untrusted):
            with pytest.raises(EncodingError) as caught:
                codec.pack(nest(make()))
            assert (caught.value.path, caught.value.type_name) == (path, type_name)
            assert path in str(caught.value)
            assert type_name in str(caught.value)


def test_the_error_of_a_local_class_advises_a_module() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(EncodingError, match=r"only this process knows its class.*put it in a module"):
        untrusted.pack(Local(1))
    with pytest.raises(EncodingError, match="no codec knows this type"):
        untrusted.pack(object())


def test_the_error_of_a_local_function_advises_the_top_level_of_a_module() -> None:
    for value in (lambda: None, {"key": [lambda: None]}):
        with pytest.raises(EncodingError, match=r"\. Define it at the top level of its module$"):
            trusted.pack(value)
    with pytest.raises(EncodingError, match="no codec knows this type"):
        untrusted.pack(lambda: None)


@pytest.mark.parametrize(
    ("nest", "path"),
    [(lambda part: {"s": {part}}, "value['s'].item("), (lambda part: {part: 1}, "value.key(")],
    ids=["member of a set", "key"],
)
def test_a_member_or_key_that_cannot_travel_is_named(nest: Callable[[Any], Any], path: str) -> None:
    with pytest.raises(EncodingError) as caught:
        trusted.pack(nest(lambda: None))
    assert caught.value.type_name == "function"
    assert caught.value.path.startswith(path)


def _in_itself(kind: str) -> Any:
    inner: list[Any] = [1]
    value = {"list": inner, "dict": {"me": inner}, "dataclass": Point(1, (inner,))}[kind]
    inner.append(value)
    return value


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass"])
def test_a_value_that_contains_itself_is_refused(kind: str) -> None:
    with pytest.raises(EncodingError, match="contains itself"):
        trusted.pack(_in_itself(kind))


def test_a_codec_works_on_after_a_refusal() -> None:
    codec = Codec.for_processes()
    for bad in (_in_itself("list"), lambda: None, [threading.Lock()]):
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
    for name, nest in BREAKABLE.items():
        batch = [1, nest(Plain(2)), (3,), [Point(4)]]
        found = untrusted.loads_batch(trusted.dumps([trusted.pack(value) for value in batch]))
        assert [found[0], *found[2:]] == [1, (3,), [Point(4)]]
        assert isinstance(found[1], Broken), f"a value of kind {name} arrived with a hole in it"
        assert "pickled" in str(found[1].error)


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

canonical = Codec.for_untrusted().for_keys()
_plain_keys = st.text(max_size=3) | st.integers(-5, 300) | st.binary(max_size=2) | st.none()
_other_keys = st.tuples(st.integers(), st.text(max_size=3)) | st.uuids()
_texts = st.text(max_size=4)


def shuffled(value: Any, random: Any) -> list[Any]:
    found = list(value)
    random.shuffle(found)
    return found


@given(
    st.dictionaries(_texts, st.integers() | st.dictionaries(st.text(), atoms))
    | st.dictionaries(_plain_keys, st.integers())
    | st.dictionaries(_other_keys, st.integers()),
    st.randoms(),
)
@example({(1, "a"): 1, (0, "b"): 2}, Random(1))
def test_equal_dicts_give_equal_canonical_bytes_in_whatever_order(value: dict[Any, Any], random: Any) -> None:
    again = dict(shuffled(value.items(), random))
    assert canonical.encode([again, (again,)]) == canonical.encode([value, (value,)])
    assert canonical.loads(canonical.encode(value)).keys() == value.keys()


@given(st.sets(atoms.filter(lambda v: v == v), max_size=8), st.randoms())
def test_equal_sets_give_equal_canonical_bytes_in_whatever_order(value: set[Any], random: Any) -> None:
    members = shuffled(value, random)
    frozen = frozenset(members)
    assert canonical.encode(set(members)) == canonical.encode(value)
    assert canonical.encode([frozen, Point(frozen)]) == canonical.encode([frozenset(value), Point(frozenset(value))])


def test_canonical_bytes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from dfm_async.wire.codec import Codec\n"
        "value = [{'b', 'a', 'c', ('d', 1)}, frozenset('xyz'), {'k': {'m', 'n', 'o'}}]\n"
        "print(Codec.for_untrusted().for_keys().encode(value).hex())"
    )
    assert len(printed_with_hash_seeds(code)) == 1


@given(values, values)
def test_different_values_have_different_bytes(a: Any, b: Any) -> None:
    if not same(a, b):
        assert untrusted.encode(a) != untrusted.encode(b)
