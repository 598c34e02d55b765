"""A script whose operations take and return objects of its own classes: prints what arrives on each target.

Run as the main script: what it defines can be imported by no other process.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield

fed = Federation("script")
maker, reader = fed.site("maker"), fed.site("reader")
T = TypeVar("T")


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


class OneSlot:
    __slots__ = "x"

    def __init__(self) -> None:
        self.x = 1


class Inherited(Slots):
    __slots__ = ("y",)

    def __init__(self) -> None:
        super().__init__(1)
        self.y = 2


class DocumentedSlots(Slots):
    __slots__ = {"note": "What is written beside it."}

    def __init__(self) -> None:
        super().__init__(1)
        self.note = "beside"


class SlotsAndDict(Slots):
    def __init__(self) -> None:
        super().__init__(1)
        self.z = 2


class Unset:
    __slots__ = ("missing", "x")

    def __init__(self) -> None:
        self.x = 1


class Private:
    __slots__ = ("__weakref__", "__x")

    def __init__(self) -> None:
        self.__x = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int


@dataclasses.dataclass(slots=True)
class Data(Slots):
    y: int = 3

    def __post_init__(self) -> None:
        self.x = 4  # type: ignore[misc] # a slot of the base class


class State:
    def __init__(self) -> None:
        self.x = 1

    def __getstate__(self) -> dict[str, int]:
        return {"y": self.x}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.x = state["y"]


class SlotsState:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 1

    def __getstate__(self) -> tuple[int]:
        return (self.x,)

    def __setstate__(self, state: tuple[int]) -> None:
        (self.x,) = state


class Color(enum.Enum):
    RED = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Named(NamedTuple):
    x: int


class Box(Generic[T]):
    def __init__(self, x: T) -> None:
        self.x = x


class Count(int):
    pass


def double(x: int) -> int:
    return 2 * x


MADE: dict[str, Callable[[], Any]] = {
    "slots": lambda: Slots(5),
    "documented slots": DocumentedSlots,
    "one slot": OneSlot,
    "inherited": Inherited,
    "slots and dict": SlotsAndDict,
    "unset": Unset,
    "private": Private,
    "frozen": lambda: Frozen(3),
    "data": Data,
    "state": State,
    "slots state": SlotsState,
    "enum": lambda: Color.RED,
    "flags": lambda: Rights.READ | Rights.WRITE,
    "named tuple": lambda: Named(3),
    "generic": lambda: Box(3),
    "number": lambda: Count(4),
    "inside others": lambda: collections.deque([Slots(1), Named(2)]),
    "partial": lambda: functools.partial(double, 4),
    "function": lambda: double,
    "class": lambda: Slots,
    "class of data": lambda: Frozen,
    "class of enums": lambda: Color,
    "alias": lambda: Box[int],
    "classes": lambda: [Slots, {"box": Box}],
}


def shown(value: Any) -> str:
    """What an object is, whatever process made it."""
    if isinstance(value, type):
        return f"class {value.__name__}"
    if isinstance(value, list | collections.deque):
        return f"{[shown(item) for item in value]}"
    if isinstance(value, dict):
        return f"{ {key: shown(item) for key, item in value.items()} }"
    if callable(value) and not hasattr(value, "__origin__"):
        return f"{type(value).__name__} that gives {value(5) if type(value).__name__ == 'function' else value()}"
    if isinstance(value, (tuple, enum.Enum, int)) or hasattr(value, "__origin__"):
        return repr(value)
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__}{slot}" if slot == "__x" else slot
            if slot != "__weakref__" and hasattr(value, name):
                found[name] = getattr(value, name)
    return f"{type(value).__name__} {sorted(found.items())}{' with a dict' * hasattr(value, '__dict__')}"


@maker.operation
def make(kind: str) -> Any:
    return MADE[kind]()


@reader.operation
def look(value: Any) -> list[Any]:
    return [shown(value), value]


with Pipeline("values") as pipeline:
    Yield(look(make(PlaceParam("kind", multiuse=True))), place="made")
    Yield(look(PlaceParam("value", multiuse=True)), place="given")


async def main() -> None:
    for target in ("inline", "local"):
        async with Session(fed, target=target) as session:
            sets = [{"kind": kind, "value": make()} for kind, make in MADE.items()]
            job = await session.execute(pipeline, sets)
            found: dict[tuple[int, str], Any] = {}
            async for result in job.results():
                found[result.frame[0], result.place] = result.value
        for index, (kind, make) in enumerate(MADE.items()):
            for place in ("made", "given"):
                seen, value = found[index, place]
                same = type(value) is type(make()) and (not isinstance(value, type) or value is make())
                right = seen == shown(value) == shown(make()) and same
                print(
                    target, place, kind, "right" if right else f"wrong: {seen}, {shown(value)}, {type(value)}", sep="|"
                )


asyncio.run(main())
