"""A federation that the conformance tests share: small operations of every kind at three sites."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from dfm_async import Federation, OperationContext, RetryPolicy, current_context

fed = Federation("weather", api_version="1.0.0")
archive = fed.site("archive")
lab = fed.site("lab", workers=2)
desk = fed.site("desk")
home = fed.site("home")

MONTHS = {"jan": ["mon", "tue", "wed"], "feb": []}
TEMPERATURES = {"mon": [14.0, 36.5, 16.0], "tue": [9.5, 12.0], "wed": [40.0]}


@archive.operation
async def list_days(month: str) -> list[str]:
    return MONTHS[month]


@archive.operation
def load(day: str) -> list[float]:
    return TEMPERATURES[day]


lab.operation(load)


@desk.implements(load)
def load_elsewhere(day: str) -> list[float]:
    return [0.0]


@lab.operation
def highest(values: list[float]) -> dict[str, float]:
    return {"celsius": max(values), "kelvin": max(values) + 273.15}


desk.operation(highest)


@desk.operation
async def alert(day: str, peak: float) -> str:
    return f"{day}: {peak}"


@desk.operation
def summary(peaks: list[dict[str, float]], scale: float) -> list[float]:
    return [peak["celsius"] * scale for peak in peaks]


@archive.operation
def audit(days: list[str]) -> int:
    return len(days)


@archive.operation
async def echo(value: Any) -> Any:
    return value


lab.operation(echo)
desk.operation(echo)


@home.operation
def at_home(value: Any) -> tuple[str, int]:
    return str(value), os.getpid()


@lab.operation(in_process=True)
def own_process(value: int) -> int:
    return os.getpid()


@lab.operation
def lab_process(value: int) -> int:
    return os.getpid()


@archive.operation
def count_up(n: int) -> Iterator[int]:
    yield from range(n)


def everywhere(code: Any) -> Any:
    """Offers an operation at all three sites."""
    return desk.operation(lab.operation(archive.operation(code)))


@everywhere
def numbers(n: int) -> Iterator[int]:
    yield from range(n)


@everywhere
def tripled(values: Iterator[int]) -> Iterator[int]:
    for value in values:
        yield 3 * value


@everywhere
def total_at(values: list[int]) -> int:
    return sum(values)


@lab.operation
async def count_slowly(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


@lab.operation
async def then_nothing(n: int) -> AsyncIterator[int]:
    """Yields some elements, and then waits for ever."""
    for i in range(n):
        yield i
    await asyncio.get_running_loop().create_future()


@lab.operation
def forever() -> Iterator[int]:
    i = 0
    while True:
        yield i
        i += 1


@archive.operation
async def broken_stream(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i
    raise OSError("the tape is torn")


@lab.operation
def total(values: list[int]) -> int:
    return sum(values)


@desk.operation
async def total_of_stream(values: AsyncIterator[int]) -> int:
    return sum([value async for value in values])


@desk.operation
def total_of_iterator(values: Iterator[int]) -> int:
    return sum(values)


@desk.operation
def first_of(values: Iterator[int]) -> int:
    return next(iter(values))


@lab.operation
def append_to(items: list[int], item: int) -> list[int]:
    """Changes what it gets."""
    items.append(item)
    return items


@lab.operation
def fail(message: str) -> None:
    raise ValueError(message)


@lab.operation
async def fail_for(day: str, bad: str) -> str:
    if day == bad:
        raise LookupError(f"no data for {day}")
    return day


@lab.operation
async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@lab.operation
def block(seconds: float) -> str:
    time.sleep(seconds)  # a synchronous operation that takes its time
    return "done"


@lab.operation
def hang(context: OperationContext) -> None:
    context.progress(1)
    time.sleep(60)


@lab.operation
def stamp_late() -> float:
    """The time, the same clock in all processes, when it has worked for a while."""
    time.sleep(0.05)
    return time.monotonic()


@archive.operation
async def stamp() -> float:
    return time.monotonic()


@lab.operation(deadline=0.05)
async def late() -> None:
    await asyncio.get_running_loop().create_future()


@lab.operation(retry=RetryPolicy(attempts=3, backoff=0.0, on=(ConnectionError,)))
def flaky(good_attempt: int, context: OperationContext | None = None) -> int:
    assert context is not None
    if context.attempt < good_attempt:
        raise ConnectionResetError("try again")
    return context.attempt


@lab.operation
def who(context: OperationContext | None = None) -> tuple[str, str, tuple[int, ...], str]:
    found = current_context()
    assert context is not None
    assert (found.job_id, found.frame) == (context.job_id, context.frame)
    return context.site, context.operation, context.frame, context.job_id


@lab.operation
class Scaler:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor
        self.calls = 0

    async def body(self, value: int) -> tuple[int, int]:
        self.calls += 1
        return value * self.factor, self.calls


class Adder:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def body(self, value: int) -> int:
        return value + self.offset


add_ten = lab.operation(Adder, name="add_ten", args={"offset": 10})
add_one = lab.operation(Adder(1), name="add_one")
measured = desk.operation(lambda value: value * 3, name="measured", provider="sensors")


@desk.operation
def spread(*values: int, **named: int) -> dict[str, int]:
    return {"sum": sum(values), **named}


@archive.operation
async def compute_count(key: str) -> int:
    """How often it was called for a key, in the process that it runs in."""
    _calls[key] = _calls.get(key, 0) + 1
    await asyncio.sleep(0)
    return _calls[key]


_calls: dict[str, int] = {}


@archive.operation
async def next_model(model: float) -> float:
    return model / 2


@lab.operation
def improve(model: float) -> dict[str, float]:
    return {"value": model + 1.0, "loss": 1.0 / (1.0 + model)}
