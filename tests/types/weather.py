"""Operations and pipelines of every kind, as applications define them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from dfm_async import Federation, ForEach, If, OperationContext, Yield, collect

fed = Federation("typed")
lab = fed.site("lab")
archive = fed.site("archive")


@dataclass
class Station:
    name: str
    height: float


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


@lab.operation
@archive.operation
def untyped(value: Any, other: Any = None) -> Any:
    return value


@lab.operation(deadline=2.0)
def double(x: int) -> int:
    return 2 * x


@archive.operation
async def load(day: str) -> list[float]:
    return [float(len(day))]


@archive.operation(name="stations")
async def station(code: str) -> Station:
    return Station(code, 0.0)


@lab.operation
def count(n: int) -> Iterator[int]:
    yield from range(n)


@lab.operation
async def ticks(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


@lab.operation
def total(values: list[int]) -> int:
    return sum(values)


@lab.operation
def squares(values: Iterator[int]) -> Iterator[int]:
    return (value * value for value in values)


@lab.operation
async def last(values: AsyncIterator[int]) -> int:
    return [value async for value in values][-1]


@lab.operation
def ping() -> str:
    return "pong"


@lab.operation
def named(*, x: int) -> int:
    return x


@lab.operation
def several(*x: int) -> int:
    return len(x)


@lab.operation
def many(a: int, b: str, c: bytes, d: float) -> int:
    return a


@lab.operation
def anything(x: Any, y: int = 0) -> str:
    return f"{x}{y}"


@lab.operation
async def download(context: OperationContext, parts: int, name: str = "") -> str:
    context.progress(parts)
    return name


@lab.operation
def upload(parts: int, context: OperationContext) -> str:
    return f"{parts} of {context.job_id}"


@lab.operation
async def pages(count: int, name: str, *, context: OperationContext) -> AsyncIterator[str]:
    yield f"{count}{name}{context.site}"


class Query:
    def __init__(self, url: str) -> None:
        self.url = url

    async def body(self, value: float, unit: str = "C") -> str:
        return f"{self.url}{value}{unit}"


class Scale:
    def body(self, context: OperationContext, value: float) -> float:
        return value


query = lab.operation(Query, args={"url": "https://example.org"})
scale = lab.operation(Scale(), name="scale")


@archive.operation
@lab.operation
def train(model: list[float], rounds: int = 1) -> list[float]:
    return model[:rounds]


@fed.pipeline
def anomalies(day: str, base: float = 15.0) -> list[float]:
    with ForEach(load(day)) as temperature:
        delta = anomaly(temperature, base)
        with If(delta > 0):
            Yield(delta, place="warm")
    return collect(delta)


@fed.pipeline(name="quiet")
def silent(day: str) -> None:
    load(day)
