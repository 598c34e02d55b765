"""The workloads, written once over :class:`benchmarks.backends.Backend`. Each call is one short block."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import operations
from benchmarks.backends import Backend

now = time.perf_counter


async def latency(one: Callable[[int], Awaitable[Any]], n: int) -> float:
    """The median seconds of n calls, one after the other."""
    times = []
    for i in range(n):
        start = now()
        await one(i)
        times.append(now() - start)
    return statistics.median(times)


async def rate(one: Callable[[int], Awaitable[Any]], n: int, concurrency: int) -> float:
    """Calls per second of n calls, this many at a time."""
    numbers = iter(range(n))

    async def caller() -> None:
        for i in numbers:
            await one(i)

    start = now()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return n / (now() - start)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that compute, all at once."""

    count: int
    seconds: float
    """How long each takes on a free core."""
    size: int = 0
    """The number of bytes of the array that each takes and returns; none if 0."""

    @property
    def steps(self) -> int:
        """The amount of work of a call."""
        return operations.steps_in(self.seconds)

    def arrays(self, count: int) -> list[Any]:
        """The arguments of this many calls."""
        import numpy

        return [numpy.full(self.size // 8, float(i)) for i in range(count)]


CALLS = {
    "20 ms": Calls(100, 0.02),
    "1 ms": Calls(1000, 0.001),
    "50 us": Calls(10_000, 0.00005),
    "1 MiB": Calls(200, 0.005, 1 << 20),
}
"""What one job computes in parallel."""


async def elapsed(work: Awaitable[Any]) -> float:
    """The seconds that something takes."""
    start = now()
    await work
    return now() - start


async def round_trip(backend: Backend, n: int) -> float:
    """Seconds of one call."""
    return await latency(lambda i: backend.call(0, operations.echo, i), backend.loops(n))


async def jobs_per_second(backend: Backend, n: int, concurrency: int) -> float:
    """Calls per second; never shortened, because the number of calls changes the rate."""
    return await rate(lambda i: backend.call(0, operations.echo, i), n, concurrency)


async def results_per_second(backend: Backend, kind: str, n: int) -> float:
    """Values per second of one stream."""
    start = now()
    count = 0
    async for _ in backend.stream(kind, n):
        count += 1
    if count != n:
        raise RuntimeError(f"{count} of {n} values came")
    return n / (now() - start)


async def first_result(backend: Backend, n: int) -> float:
    """Seconds until the first value of a stream; the rest is read, too."""
    start = now()
    first = None
    async for _ in backend.stream("ints", n):
        first = first or now() - start
    return first or 0.0


async def stages(backend: Backend, n: int, count: int) -> float:
    """Seconds of one value through this many sites."""
    return await latency(lambda i: backend.through(i, range(count)), backend.loops(n))


async def many_through(backend: Backend, n: int) -> float:
    """Seconds of n values through three sites, all at once."""
    return await elapsed(asyncio.gather(*(backend.through(i, range(3)) for i in range(n))))


async def fan(backend: Backend, n: int) -> float:
    """Seconds of n independent calls, all at once."""
    return await elapsed(asyncio.gather(*(backend.call(0, operations.echo, i) for i in range(n))))


async def chain(backend: Backend, n: int) -> float:
    """Seconds of n calls, each with the result of the one before."""
    return await elapsed(backend.through(0, [0] * n))


async def parallel_calls(backend: Backend, calls: Calls, count: int) -> float:
    """Calls per second of this many calls that compute."""
    function: Callable[[Any], Any] = operations.compute
    arguments: list[Any] = [calls.steps] * count
    if calls.size:
        function, arguments = partial(operations.scale, steps=calls.steps), calls.arrays(count)
    start = now()
    found = await backend.each(function, arguments)
    took = now() - start
    if calls.size and any(array[0] != 2 * i for i, array in enumerate(found)):
        raise RuntimeError("an array came out of turn")
    return count / took


async def frames(backend: Backend, n: int, size: int) -> float:
    """GB per second of a large data frame that goes n times from one site to another, all at once."""
    start = now()
    rows = await asyncio.gather(*(backend.pass_on(operations.frame, operations.rows, size) for _ in range(n)))
    took = now() - start
    if sum(rows) != n * (size // operations.COLUMNS // 8):
        raise RuntimeError(f"{sum(rows)} rows came")
    return n * size / 1e9 / took
