"""Direct calls cost no more than the jobs that they are, and maps no more than a pool's.

``session.call`` is timed one call after the other, beside a job with the same operation on a prepared plan, and beside
the same call submitted to a pool. ``session.map`` calls a function with each of many numbers and reads all values in
order, beside ``ProcessPoolExecutor.map`` with its default chunk size and as many processes, and beside a job with one
``ForEach`` over the same numbers. Warm; the calls of 1 ms are pure Python, the empty ones only return their argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks import operations
from benchmarks.backends import PoolBackend
from benchmarks.common import Block, Figure, Options, Target, interleave, main, scaled
from benchmarks.workloads import latency, now, round_trip
from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield
from dfm_async.base.cores import usable_cores
from dfm_async.planning import Plan

fed = Federation("direct calls")
lab = fed.site("lab")
echo: Any = lab.operation(operations.echo)
compute: Any = lab.operation(operations.compute)
number: Any = lab.operation(operations.number)

with Pipeline("one") as one:
    Yield(echo(PlaceParam("x")))


def each(operation: Any) -> Pipeline:
    """Return the pipeline that calls an operation with each element of a list."""
    with Pipeline("each") as pipeline, ForEach(PlaceParam("values")) as value:
        Yield(operation(value))
    return pipeline


async def job_round_trip(session: Session, plan: Plan, x: int) -> None:
    """Run a job with one call, and read its result."""
    job = await session.execute(plan, {"x": x})
    found = [result.value async for result in job]
    await job
    _check(len(found), 1)


async def map_rate(session: Session, operation: Any, values: list[int]) -> float:
    """Return the calls per second of a map."""
    start = now()
    found = [value async for value in session.map(operation, values)]
    took = now() - start
    _check(len(found), len(values))
    return len(values) / took


async def each_rate(session: Session, plan: Plan, values: list[int]) -> float:
    """Return the calls per second of a job with one ForEach."""
    start = now()
    job = await session.execute(plan, {"values": values})
    found = [result.value async for result in job]
    await job
    took = now() - start
    _check(len(found), len(values))
    return len(values) / took


async def pool_rate(pool: PoolBackend, function: Callable[[int], Any], values: list[int]) -> float:
    """Return the calls per second of the map of a pool, which blocks, so it is read in a thread."""
    start = now()
    found = await asyncio.to_thread(lambda: list(pool.pools[0].map(function, values)))
    took = now() - start
    _check(len(found), len(values))
    return len(values) / took


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"{found} of {expected} values came")


async def calls(session: Session, pool: PoolBackend, options: Options) -> Figure:
    n, plan = options.size(400), await session.prepare(one)
    found = await interleave(
        {
            "call": lambda: latency(lambda x: session.call(echo, x), n),
            "job": lambda: latency(lambda x: job_round_trip(session, plan, x), n),
            "pool": lambda: round_trip(pool, n),
        },
        options.repeats,
    )
    found = scaled(found, 1e3)
    return Figure("one call", "ms", found["call"], {"job": found["job"], "pool": found["pool"]}, Target(1.1, "job"))


async def rates(
    session: Session, pool: PoolBackend, operation: Any, function: Any, values: list[int], repeats: int
) -> dict[str, float]:
    plan = await session.prepare(each(operation))
    blocks: dict[str, Block] = {
        "map": lambda: map_rate(session, operation, values),
        "pool.map": lambda: pool_rate(pool, function, values),
        "ForEach": lambda: each_rate(session, plan, values),
    }
    return await interleave(blocks, repeats)


async def run(options: Options) -> list[Figure]:
    busy = [operations.steps_in(0.001)] * options.size(1000)
    numbers = list(range(options.size(10_000)))
    async with Session(fed) as session, PoolBackend(1, usable_cores()) as pool:
        call = await calls(session, pool, options)
        long = await rates(session, pool, compute, operations.compute, busy, options.repeats)
        empty = await rates(session, pool, number, operations.number, numbers, options.repeats)
    times = {name: 1e6 / rate for name, rate in empty.items()}
    return [
        call,
        _map_figure("map, calls of 1 ms", "calls/s", long, Target(1.0, "pool.map", at_least=True)),
        _map_figure("map, empty calls", "calls/s", empty, Target(3.0, "pool.map", at_least=True)),
        _map_figure("map, empty calls, each", "us", times, Target(1.0, "ForEach")),
    ]


def _map_figure(metric: str, unit: str, found: dict[str, float], target: Target) -> Figure:
    return Figure(metric, unit, found["map"], {name: found[name] for name in ("pool.map", "ForEach")}, target)


if __name__ == "__main__":
    main("direct_calls", __doc__, run)
