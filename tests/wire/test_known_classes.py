"""Values of others are only of classes that signatures name."""

from __future__ import annotations

import enum
import functools
import http
import pathlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, Protocol, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from msgspec.msgpack import Ext

from dfm_async import FailureInfo, Reply
from dfm_async.errors import EncodingError
from dfm_async.events import Replies
from dfm_async.federation.operation import Adapter
from dfm_async.model.flare import SiteSettings
from dfm_async.model.resources import ClassPath, SiteConfig
from dfm_async.site.loading import Loader
from dfm_async.wire.codec import Codec, KnownClasses
from dfm_async.workers.worker import known_classes

T = TypeVar("T")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: float
    colour: Colour | None = None

    @functools.cached_property
    def double(self) -> float:
        return self.x * 2


@dataclass
class Special(Point):
    name: str = "special"


class Pair(NamedTuple):
    left: Point
    right: Any


class Struct(msgspec.Struct):
    points: dict[str, list[Point]]


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    struct: Struct
    _hidden: int = 3


class Loose(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    x: int


class Options(TypedDict):
    pair: Pair


@dataclass
class Recursive(Generic[T]):
    value: T
    inner: list[Recursive[T]] = field(default_factory=list)


@dataclass
class Unnamed:
    password: str


class Shape:
    """No data itself."""


@dataclass
class Circle(Shape):
    radius: float


class Round(Protocol):
    """What can be rolled; not for ``isinstance``."""

    radius: float


def through(value: Any, *hints: Any) -> Any:
    codec = Codec.for_untrusted(KnownClasses(hints))
    return codec.loads(Codec.for_untrusted().encode(value))


NAMED: list[tuple[Any, Any]] = [
    (Point(1.0, Colour.RED), Point),
    (Colour.RED, Point),
    (Pair(Point(1.0), 2), Pair),
    (Point(1.0), Pair),
    (Struct({"a": [Point(1.0)]}), Model),
    (Model(struct=Struct({})), Model),
    (Point(1.0), Model | None),
    (Pair(Point(1.0), 2), Options),
    (Point(1.0), dict[str, list[tuple[Point, ...]]]),
    (Point(1.0), AsyncIterator[Annotated[Point, "metres"]]),
    (Point(1.0), Callable[[Point], None]),
    (Recursive(1, [Recursive(2)]), Recursive[int]),
    (Special(1.0), Point),
    (Circle(1.0), Shape | None),
    (http.HTTPStatus.OK, http.HTTPStatus),
    (pathlib.PurePosixPath("/a"), int),
    ({"a": (1, {2}, 3 + 4j, b"x")}, int),
]


@pytest.mark.parametrize(("value", "hint"), NAMED)
def test_what_signatures_name_is_rebuilt(value: Any, hint: Any) -> None:
    assert through(value, hint) == value


@pytest.mark.parametrize(
    "value",
    [
        Unnamed("x"),
        SiteSettings(site="lab"),
        http.HTTPStatus.OK,
        [1, {"a": Unnamed("x")}],
        Point(Unnamed("x")),  # type: ignore[arg-type]
        Loose(x=1),
    ],
)
@pytest.mark.parametrize(
    "hint", [Any, object, Point, enum.Enum, pydantic.BaseModel, msgspec.Struct, tuple, Literal["a"], "nothing", None, T]
)
def test_what_no_signature_names_is_not(value: Any, hint: Any) -> None:
    with pytest.raises(EncodingError, match="no signature of an operation here names it"):
        through(value, hint)


def forged(code: int, kind: type, state: Any) -> bytes:
    return msgspec.msgpack.encode(Ext(code, msgspec.msgpack.encode([f"{kind.__module__}:{kind.__qualname__}", state])))


def test_only_declared_fields_of_dataclasses_are_taken() -> None:
    codec = Codec.for_untrusted(KnownClasses([Point]))
    value = codec.loads(forged(13, Point, {"x": 1.0, "colour": None, "double": 77.0, "evil": 1}))
    assert vars(value) == {"x": 1.0, "colour": None}
    assert value.double == 2.0
    with pytest.raises(EncodingError, match="lacks colour"):
        codec.loads(forged(13, Point, {"x": 1.0}))


def test_only_declared_fields_of_models_are_taken() -> None:
    state = {
        "__dict__": {"struct": 1, "evil": 2},
        "__pydantic_extra__": None,
        "__pydantic_private__": {"_hidden": 4, "_evil": 5},
    }
    known = Codec.for_untrusted(KnownClasses([Model, Loose]))
    free = Codec.for_untrusted()
    fields_set = free.pack({"struct", "evil"})
    value = known.loads(forged(14, Model, {**state, "__pydantic_fields_set__": fields_set}))
    assert vars(value) == {"struct": 1}
    assert value.__pydantic_private__ == {"_hidden": 4}
    assert value.model_fields_set == {"struct"}
    assert through(Loose(x=1, y=2), Loose) == Loose(x=1, y=2)


def test_what_was_encoded_here_is_rebuilt_whatever_it_is() -> None:
    codec = Codec.for_untrusted(KnownClasses())
    assert codec.own.loads(codec.encode(Unnamed("x"))) == Unnamed("x")
    assert codec.own.loads(codec.own.encode(Unnamed("x"))) == Unnamed("x")


class Measure:
    """An adapter that a federation file names."""

    def body(self, point: Point, other: Any) -> Struct:
        return Struct({"a": [point]})


def test_signatures_of_classes_that_a_file_names_count() -> None:
    def plain(circle: Circle) -> None: ...

    adapters = [
        Adapter(operation="measure", code=ClassPath(path=f"{__name__}.Measure")),
        Adapter(operation="gone", code=ClassPath(path="nowhere.at_all.Class")),
        Adapter(operation="plain", code=plain),
    ]
    known = known_classes(adapters, Loader("lab", SiteConfig()))
    assert all(known.allows(kind) for kind in (Point, Colour, Struct))
    assert not known.allows(Unnamed)


def test_a_protocol_names_no_class_and_hides_none() -> None:
    assert through(Special(1.0), Round, Point) == Special(1.0)
    with pytest.raises(EncodingError, match="is not accepted from others"):
        through(Circle(2.0), Round)


def test_replies_and_failures_of_pipelines_need_no_signature() -> None:
    failure = FailureInfo("lab", "train", "train#1", (0, 1), "ValueError", "no")
    sent = Replies([Reply("lab", (1, {2}))], [failure])
    data = Codec.for_untrusted().encode([sent, failure])
    replies, found = Codec.for_untrusted(KnownClasses()).loads(data)
    assert (type(replies), replies, replies.failures, found) == (Replies, sent, [failure], failure)
    with pytest.raises(EncodingError):
        Codec.for_untrusted(KnownClasses()).loads(Codec.for_untrusted().encode(Replies([Reply("lab", Point(1))])))
