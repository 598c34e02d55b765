"""Classes and values that travel, and what it means that one arrived as it was."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Generic, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
from hypothesis import strategies as st
from pydantic import BaseModel, PrivateAttr

from dfm_async.wire.codec import Codec

T = TypeVar("T")
ZURICH = ZoneInfo("Europe/Zurich")

trusted = Codec.for_processes()
untrusted = Codec.for_untrusted()


def through(value: Any, codec: Codec = trusted) -> Any:
    """Encode and decode a value."""
    return codec.loads(codec.encode(value))


class Colour(enum.Enum):
    RED = "red"
    ROSE = "red"
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Bits(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any
    inner: Any = None


@dataclasses.dataclass
class Picky:
    """Its constructor does not take what it holds."""

    x: dataclasses.InitVar[int]
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self, x: int) -> None:
        self.doubled = x * 2


class Pair(NamedTuple):
    first: Any
    second: Any = None


OldPair = namedtuple("OldPair", ["a", "b"])


class Item(msgspec.Struct):
    name: Any
    price: Any = 0


class FrozenItem(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: Any


class Inner(BaseModel):
    value: Any = None


class Outer(BaseModel):
    inner: Inner
    many: list[Inner] = []
    pair: tuple[int, str] = (0, "")
    _secret: int = PrivateAttr(default=0)


class Box(BaseModel, Generic[T]):
    content: T


class Plain:
    """No rule knows it: it is pickled, or refused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def same(a: Any, b: Any) -> bool:
    """Whether one is what the other was: value and exact type, all the way down; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and all(map(same, a.ravel(), b.ravel()))
    if isinstance(a, BaseException):
        return same(list(a.args), list(b.args)) and str(a) == str(b) and same(vars(a), vars(b))
    if isinstance(a, np.ndarray):
        return bool(
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.flags.f_contiguous == b.flags.f_contiguous
            and a.flags.c_contiguous == b.flags.c_contiguous
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, decimal.Decimal):
        return repr(a) == repr(b)
    if isinstance(a, (dt.datetime, dt.time)):
        return repr(a) == repr(b) and a.fold == b.fold
    if isinstance(a, dt.tzinfo):
        return repr(a) == repr(b)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, OrderedDict) and vars(a) != vars(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items()))  # noqa: B905
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, msgspec.Struct):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, BaseModel):
        return same(a.__dict__, b.__dict__) and a.model_fields_set == b.model_fields_set
    return bool(a == b)


_offsets = st.sampled_from([dt.timezone.utc, dt.timezone(dt.timedelta(hours=-5, minutes=-30))])  # noqa: UP017

atoms: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=_offsets),
    st.timedeltas(),
    st.times().map(lambda t: t.replace(fold=0)),  # the fold has a test of its own
    st.sampled_from([*Colour, *Level, *Word, *Rights, Rights.READ | Rights.RUN, Rights(0), Bits.A | Bits.B, Bits(0)]),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.builds(PurePosixPath, st.sampled_from(["a", "/b/c", ".", "../ä"])),
)
"""All of them can be keys and members of sets."""

loose: st.SearchStrategy[Any] = st.one_of(
    atoms,
    st.binary(max_size=8).map(bytearray),
    st.decimals(),
    st.sampled_from([np.int8(3), np.float32("nan"), np.complex128(1j), np.bool_(True), np.datetime64("2024-02-29")]),
    st.sampled_from([np.arange(6).reshape(2, 3), np.zeros((0, 3)), np.array(1.5)]),
)

values: st.SearchStrategy[Any] = st.recursive(
    loose,
    lambda inner: st.one_of(
        st.lists(inner, max_size=10),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(atoms, max_size=4),
        st.frozensets(atoms | st.tuples(atoms, atoms), max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(atoms | st.tuples(atoms, atoms), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Slotted, inner),
        st.builds(FrozenSlotted, inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(OldPair, inner, inner),
        st.builds(Item, inner, inner),
        st.builds(FrozenItem, name=inner),
        st.builds(Inner, value=inner),
        st.builds(Outer, inner=st.builds(Inner, value=inner), many=st.lists(st.builds(Inner, value=inner), max_size=2)),
    ),
    max_leaves=12,
)


def _noted(error: Exception) -> Exception:
    error.add_note("seen")
    return error


def _versioned(state: Any) -> Any:
    state._metadata = OrderedDict({"": {"version": 1}})
    return state


UTC_NOON = dt.datetime(2024, 1, 2, 12, tzinfo=dt.UTC)
SAMPLES: list[Any] = [
    None,
    (),
    (1, (2, [3, (4,)])),
    set(),
    {1, "a", (2, 3)},
    frozenset({frozenset({1}), b"x"}),
    b"\x00\xff",
    bytearray(b"ab"),
    float("nan"),
    float("-inf"),
    -0.0,
    [float("nan")] * 9,
    dt.datetime(2024, 1, 2, 3, 4, 5, 678901),
    dt.datetime(2024, 10, 27, 2, 30, fold=1),
    UTC_NOON,
    UTC_NOON.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=45))),
    dt.date(1, 1, 1),
    dt.time(23, 59, 59, 999999),
    dt.time(1, tzinfo=dt.UTC),
    dt.time(2, 30, fold=1),
    dt.timedelta(days=-1, microseconds=1),
    Colour.RED,
    Colour.BLUE,
    Level.HIGH,
    Word.YES,
    Rights.READ | Rights.WRITE,
    {Rights.READ | Rights.WRITE: [Rights.READ | Rights.WRITE]},
    Rights(0),
    Bits.A | 8,
    Outer(inner=Inner(value=(1, {2})), many=[Inner()], pair=(1, "x")),
    Point([1], {"a": Frozen((1,))}),
    FrozenSlotted(1, Slotted({1})),
    Picky(4),
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**5000 + 7,
    [2**64] * 9,
    [2**64 - 1] * 9,
    {1: "a", -1: "b", 2**70: "c"},
    {(1, "a"): 1, (): 2},
    {None: 1, True: 2, 1.5: 3, b"k": 4},
    {Colour.RED: Level.LOW},
    decimal.Decimal("1.10"),
    decimal.Decimal("NaN"),
    decimal.Decimal("-Infinity"),
    uuid.UUID(int=5),
    Path("a/b"),
    PurePosixPath("/x"),
    PureWindowsPath("C:\\x"),
    range(5),
    range(10, -10, -3),
    Pair((1,), [2]),
    OldPair(1, Pair(2)),
    Item("n", 2.0),
    FrozenItem(name=(1,)),
    1 - 2j,
    [True, 1, 1.0],
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZURICH),
    dt.datetime(1850, 1, 1, tzinfo=ZURICH),
    dt.time(8, 30, tzinfo=ZURICH),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    dt.timezone(dt.timedelta(seconds=-1), "odd"),
    dt.UTC,
    ZURICH,
    Counter("aab"),
    Counter({(1, 2): -3, None: 0}),
    OrderedDict([("b", 1), ("a", (2,))]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: {2}}),
    defaultdict(Counter, {"a": Counter("x")}),
    deque([1, (2,), deque()]),
    deque([1, 2], maxlen=2),
    deque(maxlen=0),
    Fraction(-1, 3),
    Fraction(2**300, 7),
    IPv4Address("10.0.0.1"),
    IPv6Address("fe80::1%eth0"),
    IPv4Network("10.0.0.0/8"),
    IPv6Network("2001:db8::/32"),
    IPv4Interface("10.0.0.1/8"),
    IPv6Interface("fe80::1%1/64"),
    {Fraction(1, 2): [IPv4Address(0)], IPv4Address(1): OrderedDict()},
    np.array([[1, "a"], [None, (2,)]], dtype=object),
    np.array([[1], [2, 3], [4]], dtype=object),
    np.array([], dtype=object),
    KeyError("k", (1, 2)),
    OSError(2, "missing", "file"),
    ImportError("x", name="m", path="p"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ExceptionGroup("two", [ValueError(1), ExceptionGroup("in", [KeyError("k")])]),
    _noted(ValueError("n")),
    memoryview(b"bytes"),
    _versioned(OrderedDict(a=1)),
]
