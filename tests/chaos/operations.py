"""Random pipelines over three sites whose operations take some time, and some of whose values are large."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

from dfm_async import Federation, Pipeline, Yield
from tests.chaos.values import MEBIBYTE
from tests.property import random_pipelines as plain

fed = Federation("chaos")
a, b, c = fed.site("archive"), fed.site("lab", workers=2), fed.site("desk")

for _site, _operations in {
    a: (plain.inc, plain.fussy, plain.items),
    b: (plain.double, plain.add),
    c: (plain.add, plain.pair),
}.items():
    for _operation in (
        *_operations,
        *plain.SOURCES,
        *plain.MAPPERS,
        plain.merged,
        plain.consume,
        plain.tally,
        plain.polled,
        plain.endless,
        *plain.READERS,
    ):
        _site.operation(_operation)
a.operation(plain.heavy, in_process=True)


@a.operation(limit=4)
async def linger(x: int) -> int:
    await asyncio.sleep(0.02)
    return x + 3


@b.operation(limit=3, cpus=1)
def nap(x: int) -> int:
    time.sleep(0.02)
    return x + 2


@c.operation
async def grow(x: int) -> np.ndarray[Any, Any]:
    return np.full(MEBIBYTE, x % 100, dtype=np.uint8)


@a.operation
def weigh(block: np.ndarray[Any, Any]) -> int:
    return int(block[0]) + len(block) % 97


@b.operation
def blocks(x: int) -> Iterator[np.ndarray[Any, Any]]:
    for n in range(x % 3 + 1):
        time.sleep(0.01)
        yield np.full(MEBIBYTE, n, dtype=np.uint8)


@c.operation
async def drip(x: int) -> AsyncIterator[int]:
    for n in range(x % 20 + 5):
        await asyncio.sleep(0.005)
        yield n


@a.operation
def pour(x: int) -> Iterator[int]:
    yield from range(x % 50 + 150)


def quit_here() -> int:
    os._exit(3)


quits: dict[str, Pipeline] = {}
"""For each site, a pipeline that ends the worker it runs on."""
for _site in (a, b, c):
    with Pipeline(f"quits at {_site.name}") as _pipeline:
        Yield(_site.operation(quit_here, name=f"quit_{_site.name}")())
    quits[_site.name] = _pipeline

functions: dict[str, Callable[..., Any]] = {
    **plain.functions,
    "linger": lambda x: x + 3,
    "nap": lambda x: x + 2,
    "grow": lambda x: np.full(MEBIBYTE, x % 100, dtype=np.uint8),
    "weigh": lambda block: int(block[0]) + len(block) % 97,
    "blocks": lambda x: iter([np.full(MEBIBYTE, n, dtype=np.uint8) for n in range(x % 3 + 1)]),
    "drip": lambda x: iter(range(x % 20 + 5)),
    "pour": lambda x: iter(range(x % 50 + 150)),
}


class SlowMaker(plain.Maker):
    """Writes pipelines as the maker of the property tests does, with operations that take time, and large values."""

    def __init__(self, rng: random.Random, *, reliable: bool) -> None:
        super().__init__(lambda _strategy: None)
        self.rng = rng
        self.reliable = reliable
        """Whether no operation of the pipeline raises."""
        self.left = rng.randint(3, 10)

    def one(self, choices: list[Any]) -> Any:
        if self.reliable:
            raising = {id(operation) for operation in (plain.fussy, plain.leaky, plain.fragile)}
            choices = [choice for choice in choices if id(choice) not in raising]
        return self.rng.choice(choices)

    def count(self, least: int, most: int) -> int:
        return self.rng.randint(least, most)

    def statement(self, kind: str, ints: list[Any], streams: list[Any], depth: int) -> list[Any]:
        dice = self.rng.random()
        if kind == "op" and dice < 0.6:
            return [self.one([linger, nap])(self.number(ints))]
        if kind == "fields" and dice < 0.4:
            return [weigh(grow(self.number(ints)))]
        if kind == "yield" and dice < 0.5 and depth < 2:
            Yield(self.one([drip, pour, blocks, grow])(self.number(ints)), place=self.place())
            return []
        if kind == "total" and dice < 0.5:
            return [plain.total(self.one([drip, pour])(self.number(ints)))]
        return super().statement(kind, ints, streams, depth)


def random_pipeline(rng: random.Random, *, reliable: bool) -> Pipeline:
    """A random pipeline with parameters x and y."""
    return plain.write(SlowMaker(rng, reliable=reliable))
