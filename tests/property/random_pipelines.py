"""Random pipelines over a federation of three sites, and the operations that they use."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from dfm_async import (
    FailureInfo,
    Federation,
    ForEach,
    If,
    Pipeline,
    PlaceParam,
    Repeat,
    Reply,
    Sleep,
    TryFromCache,
    Wait,
    Yield,
    collect,
    gather,
)

fed = Federation("random")
a = fed.site("archive")
b = fed.site("lab", workers=2)
c = fed.site("desk")

SITES = ["archive", "lab", "desk"]


def everywhere(code: Any) -> Any:
    """Offers an operation at every site, so that streams go in all directions."""
    return c.operation(b.operation(a.operation(code)))


@a.operation
async def inc(x: int) -> int:
    return x + 1


@b.operation(limit=2, cpus=1)
def double(x: int) -> int:
    return (x * 2) % 1000


@c.operation(limit=1, rate="5000/s", key="y")
async def add(x: int, y: int) -> int:
    return (x + y) % 1000


b.operation(add)


@a.operation
def fussy(x: int) -> int:
    if x % 3 == 0:
        raise ValueError(f"{x} is a multiple of three")
    return x


@c.operation(memory="1MiB")
async def pair(x: int, y: int) -> dict[str, Any]:
    return {"l": x, "r": [y, x]}


@a.operation
async def items(n: int) -> list[int]:
    return list(range(n % 4))


@everywhere
def stream(n: int) -> Iterator[int]:
    yield from range(n % 4)


@everywhere
async def flow(n: int) -> AsyncIterator[int]:
    for i in range(n % 4):
        yield i


@everywhere
def lazy(n: int) -> Any:
    """A plain function whose result happens to be an iterator."""
    return iter(range(n % 3))


@everywhere
async def leaky(n: int) -> AsyncIterator[int]:
    for i in range(n % 3):
        yield i
    if n % 2:
        raise OSError("it leaks")


@everywhere
def tripled(values: Iterator[int]) -> Iterator[int]:
    for value in values:
        yield value * 3


@everywhere
async def shifted(values: AsyncIterator[int]) -> AsyncIterator[int]:
    async for value in values:
        yield value + 1


@everywhere
def merged(first: Iterator[int], second: Iterator[int]) -> Iterator[int]:
    yield from first
    yield from second


@everywhere
def begun(values: Iterator[int]) -> Iterator[int]:
    yield from itertools.islice(values, 2)


@everywhere
def fragile(values: Iterator[int]) -> Iterator[int]:
    for value in values:
        if value == 2:
            raise ValueError("two is too many")
        yield value


@everywhere
def counted(values: Iterator[int]) -> int:
    return sum(1 for _ in values)


@everywhere
async def summed(values: AsyncIterator[int]) -> int:
    found = 0
    async for value in values:
        found += value
    return found % 1000


@everywhere
def first(values: Iterator[int]) -> int:
    return next(values, -1)


@everywhere
async def early(values: AsyncIterator[int]) -> int:
    async for value in values:
        return value
    return -2


@everywhere
async def unread(values: Any) -> int:
    return 4


@everywhere
def total(values: list[int]) -> int:
    return sum(values) % 1000


@everywhere
def tally(values: list[Any]) -> int:
    return sum(100 if isinstance(value, FailureInfo) else value for value in values) % 1000


@everywhere
def polled(replies: list[Reply[int]]) -> int:
    return sum(reply.value for reply in replies) % 1000


@everywhere
async def endless(x: int) -> int:
    await asyncio.get_running_loop().create_future()
    return x


@everywhere
def consume(pool: dict[str, list[int]], x: int) -> int:
    pool["numbers"].append(x)
    taken = sum(pool.pop("numbers"))
    pool["taken"] = [taken]
    return taken % 1000


@a.operation(in_process=True, limit=1)
def heavy(x: int) -> int:
    return x - 1


def _leaky(n: int) -> Iterator[int]:
    yield from range(n % 3)
    if n % 2:
        raise OSError("it leaks")


SOURCES = [stream, flow, lazy, leaky]
MAPPERS = [tripled, shifted, begun, fragile]
READERS = [total, counted, summed, first, early, unread]


def _endless(x: int) -> int:
    raise TimeoutError  # the pipelines limit it


def _shifted(values: Iterator[int]) -> Iterator[int]:
    return (value + 1 for value in values)


functions: dict[str, Callable[..., Any]] = {
    "inc": lambda x: x + 1,
    "double": lambda x: (x * 2) % 1000,
    "add": lambda x, y: (x + y) % 1000,
    "fussy": fussy.code,
    "pair": lambda x, y: {"l": x, "r": [y, x]},
    "items": lambda n: list(range(n % 4)),
    "stream": lambda n: iter(range(n % 4)),
    "flow": lambda n: iter(range(n % 4)),
    "leaky": _leaky,
    "lazy": lambda n: iter(range(n % 3)),
    "tripled": tripled.code,
    "shifted": _shifted,
    "merged": merged.code,
    "begun": begun.code,
    "fragile": fragile.code,
    "counted": counted,
    "summed": lambda values: sum(values) % 1000,
    "first": first.code,
    "early": lambda values: next(values, -2),
    "unread": lambda values: 4,
    "total": lambda values: sum(values) % 1000,
    "heavy": lambda x: x - 1,
    "tally": tally.code,
    "polled": polled.code,
    "consume": consume.code,
    "endless": _endless,
}

_unique = itertools.count()


class Maker:
    """Writes one random pipeline with the builder, as a user would."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.left = 14
        self.places = 0
        self.salt = next(_unique)

    def one(self, choices: list[Any]) -> Any:
        return self.draw(st.sampled_from(choices))

    def count(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))  # type: ignore[no-any-return]

    def number(self, ints: list[Any]) -> Any:
        return self.one([*ints, 0, 1, 5])

    def condition(self, ints: list[Any]) -> Any:
        first = self.one(ints) > self.one([0, 2, 5])
        kind = self.one(["plain", "and", "or", "not"])
        if kind == "plain":
            return first
        if kind == "not":
            return ~first
        second = self.one(ints) == self.number(ints)
        return (first & second) if kind == "and" else (first | second)

    def place(self) -> str:
        self.places += 1
        return f"p{self.places}"

    def body(self, ints: list[Any], streams: list[Any], depth: int) -> tuple[list[Any], list[Any]]:
        """Writes statements; gives the numbers that the block's own scope ends up with, and those made in it."""
        ints, streams = list(ints), list(streams)
        made: list[Any] = []
        for _ in range(self.count(1, 4)):
            if self.left <= 0:
                break
            self.left -= 1
            kinds = [
                "op",
                "op",
                "op",
                "yield",
                "fields",
                "yield",
                "source",
                "map",
                "read",
                "read",
                "consume",
                "cross",
                "gather",
                "wait",
            ]
            if depth < 3:
                kinds += ["foreach", "foreach", "if", "repeat", "cache", "total"]
            new = self.statement(self.one(kinds), ints, streams, depth)
            ints += new
            made += new
        return ints, made

    def anywhere(self) -> dict[str, Any]:
        return {"site": self.one(SITES)}

    def fallback(self) -> dict[str, Any]:
        return {"fallback": self.one([0, 7])} if self.one([False, False, True]) else {}

    def source(self, ints: list[Any]) -> Any:
        return self.one(SOURCES)(self.number(ints), **self.anywhere())

    def some(self, streams: list[Any], ints: list[Any]) -> Any:
        """A stream: one that others read, too, or a new one."""
        if streams and self.one([True, True, False]):
            return self.one(streams)
        streams.append(self.source(ints))
        return streams[-1]

    def mapped(self, values: Any) -> Any:
        return self.one(MAPPERS)(values, **self.anywhere()) if self.one([True, False]) else values

    def gathered(self, ints: list[Any], streams: list[Any]) -> Any:
        """A call for a gather: of one number, of two, or of a stream."""
        kind = self.one(["op", "op", "add", "read"])
        if kind == "op":
            return self.one([inc, double, fussy, heavy])(self.number(ints), **self.fallback())
        if kind == "add":
            return add(self.number(ints), self.number(ints), site=self.one(["lab", "desk"]))
        return self.one(READERS)(self.some(streams, ints), **self.anywhere())

    def statement(self, kind: str, ints: list[Any], streams: list[Any], depth: int) -> list[Any]:
        if kind == "source":
            streams.append(self.source(ints))
            return []
        if kind == "map":
            if self.one([True, True, False]):
                streams.append(self.one(MAPPERS)(self.some(streams, ints), **self.anywhere()))
            else:
                streams.append(merged(self.some(streams, ints), self.some(streams, ints), **self.anywhere()))
            return []
        if kind == "read":
            after = {"after": self.one(streams)} if streams and self.one([False, False, True]) else {}
            if self.one([True, True, False]):
                return [self.one(READERS)(self.some(streams, ints), **self.anywhere(), **after, **self.fallback())]
            Yield(self.some(streams, ints), place=self.place(), **after)
            return []
        if kind == "cross":  # each reader waits for the end of a stream that another one reads
            crossed = [self.source(ints) for _ in range(self.count(2, 3))]
            streams += crossed
            return [
                self.one(READERS)(self.mapped(values), **self.anywhere(), after=crossed[number - 1])
                for number, values in enumerate(crossed)
            ]
        if kind == "op":
            operation = self.one([inc, double, fussy, heavy])
            after = {"after": self.one([*ints, *streams])} if self.one([False, False, True]) and _is_node(ints) else {}
            if self.one([True, False]):
                return [operation(self.number(ints), **_nodes_only(after), **self.fallback())]
            site = self.one([{}, {"site": "lab"}, {"site": "desk"}])
            return [add(self.number(ints), self.number(ints), **site, **self.fallback())]
        if kind == "wait":
            nodes = [value for value in [*ints, *streams] if _nodes_only({"after": value})]
            after = {"after": self.one(nodes)} if nodes and self.one([True, False]) else {}
            wanted = self.one(["event", "event", "none", "time"])
            if wanted == "time":
                slept = Sleep(self.one([0, 0.002]), **after)
                return [inc(self.number(ints), after=slept)]
            if wanted == "none":
                return [Wait(f"never {self.place()}", int, self.one([0, 0.002]), **after, **self.fallback())]
            return [Wait(self.place(), int, self.one([None, 300]), **after)]
        if kind == "fields":
            both = pair(self.number(ints), self.number(ints))
            return [both["l"], both["r"][self.one([0, 1])]]
        if kind == "consume":  # an operation that changes what it gets
            numbers = self.one([[1, 2], [3, self.number(ints)]])
            return [consume({"numbers": numbers}, self.number(ints), **self.anywhere())]
        if kind == "gather":
            calls = [self.gathered(ints, streams) for _ in range(self.count(1, 3))]
            at_least, within = self.count(0, len(calls)), self.one([None, 300])
            if self.one([False, False, False, True]):  # it is late, and fails
                calls, at_least, within = [endless(self.number(ints), **self.anywhere(), **self.fallback())], 0, 0.02
            replies = gather(calls, at_least=at_least, within=within)
            failed = [tally(replies.failures, **self.anywhere())] if self.one([True, False]) else []
            first = [replies[0].value] if at_least and self.one([True, False]) else []
            return [polled(replies, **self.anywhere()), *failed, *first]
        if kind == "yield":
            Yield(self.one([*ints, 7, stream(self.number(ints), **self.anywhere())]), place=self.place())
            return []
        if kind == "total":
            return [total(self.one([self.source(ints), items(self.number(ints))]), **self.anywhere())]
        if kind == "if":
            first, second = ints, ints
            with If(self.condition(ints)) as branch:
                first, _ = self.body(ints, streams, depth + 1)
            if self.one([True, False]):
                with branch.otherwise():
                    second, _ = self.body(ints, streams, depth + 1)
            if self.one([True, False]):
                return []
            return [branch.value(self.number(first), self.number(second))]
        if kind == "cache":
            value = self.number(ints)
            if depth == 0 and self.one([True, False]):  # readers with the same key read the same elements
                values = self.some(streams, ints)
                key = ("salt", self.salt, self.left, *map(PlaceParam, ("x", "y")))
                with TryFromCache(key=key) as found:
                    found.store(self.one([total, counted, summed])(values, **self.anywhere()))
                return [found]
            with TryFromCache(key=("salt", self.salt, self.left, value)) as found:
                found.store(self.one([inc, double, fussy])(value))
            return [found]
        if kind == "repeat":
            with Repeat(self.number(ints), times=self.count(0, 3)) as current:
                inner, _ = self.body([*ints, current], streams, depth + 1)
                if self.one([True, False]):
                    current.until(self.condition(inner))
                current.next(self.one(inner))
            return [current]
        kind = self.one(["items", "stream", "literal"])
        sequence = items(self.number(ints)) if kind == "items" else [1, 2]
        if kind == "stream":
            sequence = self.some(streams, ints)
        with ForEach(sequence, concurrency=self.one([None, 1, 2])) as element:
            inner, made = self.body([*ints, element], streams, depth + 1)
        gathered = [value for value in [element, *made] if type(value).__name__ != "str"]
        if self.one([True, False]):
            try:
                errors = self.one(["fail", "skip", "keep"])
                return [(tally if errors == "keep" else total)(collect(self.one(gathered), errors=errors))]
            except Exception:
                return []
        return []


def _is_node(ints: list[Any]) -> bool:
    return bool(ints)


def _nodes_only(options: dict[str, Any]) -> dict[str, Any]:
    after = options.get("after")
    if after is None or "PlaceParam" in repr(after) or "[" in repr(after):
        return {}
    return options


@st.composite
def pipelines(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Pipeline:
    """A random pipeline with parameters x and y."""
    return write(Maker(draw))


def write(maker: Maker) -> Pipeline:
    """Has a maker write a pipeline."""
    with Pipeline("random") as pipeline:
        x, y = PlaceParam("x"), PlaceParam("y", default=maker.one([3, 8]))
        ints, _ = maker.body([inc(x), y], [], 0)
        Yield(maker.one(ints), place="last")
        Yield(y, place="second")
    return pipeline
