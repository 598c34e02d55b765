"""A federation as users have it in a file."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Wait, Yield, current_context

fed = Federation("stations")
archive = fed.site("archive")
lab = fed.site("lab")

DAYS = {"mon": [14.0, 19.5, 16.0], "tue": [9.5, 12.0]}


@archive.operation
async def load(day: str) -> list[float]:
    return DAYS[day]


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


@lab.operation
async def wait(gate: str) -> str:
    """Says that it has begun, and is done if there is a file; else it never is."""
    print("begun", flush=True)
    if not os.path.exists(gate):  # noqa: ASYNC240 - a small local file
        await asyncio.Event().wait()
    return "done"


@lab.operation
async def number_of(gate: str, number: int) -> int:
    if not number:
        print("begun", flush=True)
    if not os.path.exists(gate):  # noqa: ASYNC240 - a small local file
        await asyncio.Event().wait()
    return number


@lab.operation
def hold() -> None:
    """Says that it has begun, and never ends."""
    print("begun", flush=True)
    threading.Event().wait()


@lab.operation
async def numbers(count: int) -> AsyncIterator[str]:
    print("begun", flush=True)
    for number in range(count):
        yield f"{number:>1000}"


@lab.operation
async def echo(value: Any) -> Any:
    return value


@lab.operation
async def square(x: int) -> int:
    return x * x


@lab.operation
async def values() -> dict[str, Any]:
    return {"array": np.arange(3), "bytes": b"\x00\xff", "text": "grün", "other": {"a": [1, 2]}}


@lab.operation
def process_of(x: int) -> int:
    time.sleep(0.02)
    return os.getpid()


_overlapping: list[int] = []


@lab.operation
async def overlap(x: int) -> int:
    """Return how many calls run at the same time."""
    _overlapping.append(x)
    await asyncio.sleep(0.01)
    count = len(_overlapping)
    _overlapping.remove(x)
    return count


@lab.operation
def unsteady() -> int:
    """Fail twice."""
    attempt = current_context().attempt
    if attempt < 3:
        raise ConnectionError(f"attempt {attempt}")
    return attempt


@lab.operation
def dying(mark: str) -> str:
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(3)
    return "alive"


with Pipeline("anomalies") as pipeline:
    temperatures = load(day=PlaceParam("day"))
    with ForEach(temperatures) as temperature:
        delta = anomaly(temperature)
        with If(delta > 0):
            Yield(delta, place="warm")
    Yield(temperatures, place="raw")

with Pipeline("waiting") as waiting:
    Yield(wait(PlaceParam("gate")))

with Pipeline("approvals") as approvals:
    Yield([Wait("approval", bool), Wait("note", str)])

with Pipeline("numbered") as numbered:
    Yield(number_of(PlaceParam("gate"), PlaceParam("number")))

with Pipeline("holding") as holding:
    Yield(hold())

with Pipeline("many") as many:
    Yield(numbers(PlaceParam("count")))

with Pipeline("echoes") as echoes:
    Yield(echo(PlaceParam("value")))

with Pipeline("squares") as squares:
    Yield(square(PlaceParam("x")))

with Pipeline("processes") as processes:
    Yield(process_of(PlaceParam("x")))

with Pipeline("overlaps") as overlaps:
    Yield(overlap(PlaceParam("x")))

with Pipeline("tried") as tried:
    Yield(unsteady())

with Pipeline("dies") as dies:
    Yield(dying(PlaceParam("mark")))

with Pipeline("files") as files:
    found: Any = values()
    Yield(found["array"], place="array")
    Yield(found["bytes"], place="../../bytes")
    Yield(found["text"], place="text", multiuse=True)
    Yield(found["other"], place="other")
    Yield(found["text"], place="text", multiuse=True)
