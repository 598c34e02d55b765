"""What the workers of every contender run. Imports nothing but the standard library, so that peers can import it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
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


STEPS = "DFM_BENCH_STEPS"
"""The environment variable with the number of steps that a core takes in a second, for all processes of a run."""


def compute(steps: int) -> int:
    """Keep a core busy: a fixed amount of pure Python, which takes longer if calls share a core."""
    value = 0
    for _ in range(steps):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value


def scale(array: Any, steps: int) -> Any:
    """Keep a core busy; take an array, and return another one."""
    compute(steps)
    return array * 2


def summarize(path: str) -> dict[str, Any]:
    """Parse a file of JSON lines with measurements; return the mean and the span of time of each sensor."""
    values: dict[str, list[float]] = {}
    times: dict[str, list[datetime]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            values.setdefault(row["sensor"], []).append(float(row["value"]))
            times.setdefault(row["sensor"], []).append(datetime.fromisoformat(row["time"]))
    return {
        "path": path,
        "rows": sum(map(len, values.values())),
        "means": {sensor: statistics.fmean(found) for sensor, found in sorted(values.items())},
        "seconds": {sensor: (max(found) - min(found)).total_seconds() for sensor, found in sorted(times.items())},
    }


def steps_in(seconds: float) -> int:
    """Return the number of steps that take this long on a free core. Measured once in a run."""
    if STEPS not in os.environ:
        times = []
        for _ in range(10):
            start = time.thread_time()
            compute(100_000)
            times.append(time.thread_time() - start)
        os.environ[STEPS] = str(100_000 / min(times))
    return round(seconds * float(os.environ[STEPS]))


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


COLUMNS = 8


@functools.cache
def frame(size: int) -> Any:
    """A data frame of this number of bytes, in columns of three types."""
    import numpy
    import pandas

    rows = size // COLUMNS // 8
    columns: dict[str, Any] = {f"x{number}": numpy.random.default_rng(number).random(rows) for number in range(6)}
    columns["n"] = numpy.arange(rows)
    columns["when"] = numpy.arange(rows).astype("M8[s]")
    return pandas.DataFrame(columns, copy=False)


def large_frames(n: int, size: int) -> Iterator[Any]:
    """The same data frame, several times."""
    for _ in range(n):
        yield frame(size)


def small_frames(n: int) -> Iterator[Any]:
    """The same data frame of ten rows, many times."""
    import pandas

    found = pandas.DataFrame({"n": range(10), "x": [0.5] * 10, "name": ["text"] * 10})
    for _ in range(n):
        yield found


def rows(found: Any) -> int:
    """The number of rows of a large data frame, as the last elements of two columns know it."""
    if found["n"].iloc[-1] != len(found) - 1 or found.shape[1] != COLUMNS:
        raise RuntimeError("a data frame has changed")
    return len(found)


async def count_rows(frames: AsyncIterator[Any]) -> int:
    """The number of rows of several data frames."""
    count = 0
    async for found in frames:
        count += rows(found)
    return count
