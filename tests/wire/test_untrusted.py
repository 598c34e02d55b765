"""Untrusted data: nothing of it is unpickled or imported, and garbage harms nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import pickle
import subprocess
import sys
import threading
import time
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
from dfm_async.wire.codec import Broken, Codec, KnownClasses
from tests.wire.shapes import Plain, Point, trusted, untrusted, values


class OwnError(KeyError):
    """Not exactly one of the known exceptions."""


UNKNOWN = [Plain(1), OwnError("k"), np.array([Plain(1)]), np.zeros(1, [("a", "O")])]


@pytest.mark.parametrize("value", UNKNOWN, ids=["object", "error", "array", "structured array"])
def test_an_untrusted_codec_does_not_pack_what_it_would_have_to_pickle(value: Any) -> None:
    with pytest.raises(EncodingError, match="pickle is not allowed") as caught:
        untrusted.pack({"a": [value]})
    assert caught.value.path.startswith("value['a'][0]")


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
    stored = Codec.for_store()
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
        ("KeyError", ["k", {}]),
        ("KeyError", [["k"], {"with_traceback": 1}]),
        ("KeyError", [["k"], None]),
        ("UnicodeDecodeError", [["utf-8"], {}]),
        ("ExceptionGroup", [["g", ["not an error"]], {}]),
        ("SystemExit", [[1], {}]),
        ("OrderedDict", [{"a": 1}]),
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
from dfm_async.wire.codec.kinds import rebuild_standard as rebuild
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
@pytest.mark.parametrize("codec", [trusted, untrusted, Codec.for_untrusted(KnownClasses())])
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
    codec = Codec.for_untrusted()
    for load in (codec.loads, codec.loads_batch):
        with contextlib.suppress(EncodingError):
            _readable(load(data))


@given(st.integers(-128, 127), st.binary(max_size=60) | values.map(untrusted.encode))
def test_garbage_inside_an_extension_gives_a_value_or_an_encoding_error(code: int, data: bytes) -> None:
    with contextlib.suppress(EncodingError):
        _readable(Codec.for_untrusted().loads(msgspec.msgpack.encode([Ext(code, data)])))


@given(values, st.data())
def test_a_cut_or_spoilt_message_gives_a_value_or_an_encoding_error(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(untrusted.encode([value]))
    where = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(EncodingError):
        Codec.for_untrusted().loads(bytes(encoded[:where]))
    encoded[where] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(EncodingError):
        _readable(Codec.for_untrusted().loads(bytes(encoded)))


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (29, ["ValueError", [[Ext(99, b"x")], {}]]),
        (29, ["Replies", [[], [Ext(99, b"x")]]]),
        (29, ["deque", [[[Ext(99, b"x")]], None]]),
        (13, ["tests.wire.shapes:Point", {"x": Ext(99, b"x"), "y": 1}]),
    ],
)
def test_a_value_with_a_part_that_cannot_be_rebuilt_is_broken(code: int, state: Any) -> None:
    first, broken, last = untrusted.loads_batch(untrusted.dumps([1, Ext(code, untrusted.dumps(state)), 2]))
    assert (first, last) == (1, 2)
    assert type(broken) is Broken


def _pickled(value: Any) -> bytes:
    return trusted.encode(Plain(value))


def test_a_failed_load_does_not_spoil_the_next_one() -> None:
    codec = Codec.for_untrusted()
    cut_off = b"\x92" + _pickled(1)  # a list of two, of which the first is refused and the second missing
    for load, data in ((codec.loads, cut_off), (codec.loads_batch, _pickled(1))):
        with pytest.raises(EncodingError):
            load(data)
        assert codec.loads(codec.encode([1, (2,)])) == [1, (2,)]


# keys


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
