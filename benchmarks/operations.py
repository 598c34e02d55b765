"""What the workers of every contender run. Imports nothing but the standard library, so that peers can import it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any


def echo(x: int) -> dict[str, int]:
    return {"x": x}


async def echo_async(x: int) -> dict[str, int]:
    return {"x": x}


def stage(v: int) -> int:
    return v + 1


async def stage_async(v: int) -> int:
    return v + 1


def process(_: int) -> int:
    return os.getpid()


async def hold(seconds: float) -> None:
    await asyncio.sleep(seconds)


def hold_sync(seconds: float) -> None:
    time.sleep(seconds)


def number(i: int) -> int:
    return i


def record(i: int) -> dict[str, Any]:
    return {"i": i, "d": {"a": 1, "b": "x"}}


async def number_async(i: int) -> int:
    return number(i)


async def record_async(i: int) -> dict[str, Any]:
    return record(i)


def ints(n: int) -> Iterator[int]:
    for i in range(n):
        yield number(i)


def dicts(n: int) -> Iterator[dict[str, Any]]:
    for i in range(n):
        yield record(i)


async def ints_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield number(i)


async def dicts_async(n: int) -> AsyncIterator[dict[str, Any]]:
    for i in range(n):
        yield record(i)


def arrays(n: int, size: int) -> Iterator[Any]:
    import numpy

    array = numpy.arange(size // 8, dtype="f8")
    for i in range(n):
        array[0] = i
        yield array


async def count(values: AsyncIterator[int]) -> int:
    found = 0
    async for value in values:
        if value != found:
            raise RuntimeError("a value came out of turn")
        found += 1
    return found


async def count_arrays(values: AsyncIterator[Any]) -> int:
    count = 0
    async for array in values:
        if array[0] != count:
            raise RuntimeError("an array came out of turn")
        count += 1
    return count


ELEMENTS = {"ints": number, "dicts": record}
"""How a peer without generators makes one element."""
GENERATORS = {"ints": ints, "dicts": dicts}
ASYNC = {echo: echo_async, stage: stage_async, number: number_async, record: record_async}
"""The asynchronous twin of each function, for a peer that takes only those."""
