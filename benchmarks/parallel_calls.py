"""The calls of one job use all cores of a site.

A job makes many calls of pure Python, each with a fixed amount of work: in one ``ForEach``, as parameter sets, or as
independent nodes; the last ones take an array from the application and return another one. The peers make the same
calls with as many processes. Calls per second, warm. Meanwhile, another job at the same site stays responsive: each
request of the application to its ``async def`` operation is timed, while the workers compute and while they are idle.
The speed-up compares 100 calls of 20 ms with a plain loop in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import external, operations
from benchmarks.backends import PoolBackend
from benchmarks.common import Block, Figure, Options, Target, interleave, main, scaled
from benchmarks.workloads import CALLS, Calls, now, parallel_calls
from dfm_async import Federation, ForEach, LocalOptions, Pipeline, PlaceParam, Session, Yield
from dfm_async.base.cores import usable_cores

fed = Federation("parallel calls")
lab = fed.site("lab")
compute: Any = lab.operation(operations.compute)
scale: Any = lab.operation(operations.scale)
echo: Any = lab.operation(operations.echo_async)
Work = tuple[Pipeline, Any]
"""A pipeline, and its parameters."""


@lab.operation
def numbers(n: int) -> list[int]:
    return list(range(n))


with Pipeline("ask") as ask:
    Yield(echo(PlaceParam("x")))


def each(calls: Calls, count: int) -> Work:
    with Pipeline("each") as pipeline, ForEach(numbers(count)):
        Yield(compute(calls.steps))
    return pipeline, {}


def sets(calls: Calls, count: int) -> Work:
    with Pipeline("sets") as pipeline:
        Yield(compute(PlaceParam("steps")))
    return pipeline, [{"steps": calls.steps}] * count


def nodes(calls: Calls, count: int) -> Work:
    with Pipeline("nodes") as pipeline:
        for _ in range(count):
            Yield(compute(calls.steps))
    return pipeline, {}


def arrays(calls: Calls, count: int) -> Work:
    with Pipeline("arrays") as pipeline:
        Yield(scale(PlaceParam("array"), calls.steps))
    return pipeline, [{"array": array} for array in calls.arrays(count)]


CASES: list[tuple[str, str, Callable[[Calls, int], Work], float]] = [
    ("calls of 20 ms, one ForEach", "20 ms", each, 0.95),
    ("calls of 20 ms, parameter sets", "20 ms", sets, 0.95),
    ("calls of 20 ms, independent nodes", "20 ms", nodes, 0.95),
    ("calls of 1 ms, one ForEach", "1 ms", each, 0.9),
    ("calls of 50 us, one ForEach", "50 us", each, 1.0),
    ("calls of 5 ms, 1 MiB in and out", "1 MiB", arrays, 1.2),
]
"""What is measured, which calls, how a job makes them, and what part of the pool's rate is claimed."""
SPEED_UP = (1, 2, 4)
LATENCY = {"median": 2.0, "p99": 10.0}


async def rate(session: Session, work: Work, count: int) -> float:
    """Calls per second of one job."""
    start = now()
    job = await session.execute(*work)
    found = [result.value async for result in job]
    await job
    if len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} results came")
    return count / (now() - start)


async def plain_loop(calls: Calls, count: int) -> float:
    """Calls per second of a loop in this process."""
    start = now()
    for _ in range(count):
        operations.compute(calls.steps)
    return count / (now() - start)


def contenders(session: Session, pool: PoolBackend, name: str, shape: Any, options: Options) -> dict[str, Block]:
    calls = CALLS[name]
    count = options.size(calls.count)
    work = shape(calls, count)
    return {"ours": lambda: rate(session, work, count), "pool": lambda: parallel_calls(pool, calls, count)}


async def throughput(options: Options, workers: int) -> list[Figure]:
    others = external.measure("parallel_calls", options.quick, peers=("ray", "dask"), workers=workers)
    figures = []
    async with Session(fed) as session, PoolBackend(1, workers) as pool:
        for metric, name, shape, limit in CASES:
            found = await interleave(contenders(session, pool, name, shape, options), options.repeats)
            peers = {"pool": found["pool"], **others.get(name, {})}
            figures.append(Figure(metric, "calls/s", found["ours"], peers, Target(limit, "pool", at_least=True)))
    return figures


async def speed_up(options: Options, workers: int) -> Figure:
    async with Session(fed, options=LocalOptions(max_workers=workers)) as session, PoolBackend(1, workers) as pool:
        blocks = contenders(session, pool, "20 ms", each, options)
        blocks["loop"] = lambda: plain_loop(CALLS["20 ms"], options.size(CALLS["20 ms"].count))
        found = await interleave(blocks, options.repeats)
    found = scaled(found, 1 / found["loop"])
    metric, target = f"speed-up over a plain loop, workers: {workers}", Target(0.95, "pool", at_least=True)
    return Figure(metric, "x", found["ours"], {"pool": found["pool"]}, target)


async def request_times(session: Session, count: int) -> dict[str, float]:
    """The milliseconds from a request until its answer, one after the other."""
    job = await session.execute(ask, None)
    answers, times = aiter(job), []
    for x in range(count):
        start = now()
        await job.send_input_params({"x": x})
        await anext(answers)
        times.append((now() - start) * 1e3)
    await job.send_stop_frame()
    await job
    return {"median": statistics.median(times), "p99": statistics.quantiles(times, n=100)[-1]}


async def latency(options: Options, workers: int) -> list[Figure]:
    async with Session(fed) as session:
        await rate(session, each(CALLS["20 ms"], 100), 100)
        idle = await request_times(session, options.size(2000))
        batch = await session.execute(*each(CALLS["20 ms"], 1000 * workers))
        await batch.first()
        busy = await request_times(session, options.size(2000))
        if batch.status.ended:
            raise RuntimeError("the workers had nothing left to compute")
        await batch.cancel()
    return [
        Figure(f"async operation while workers compute, {name}", "ms", busy[name], {"idle": idle[name]}, Target(limit))
        for name, limit in LATENCY.items()
    ]


async def run(options: Options) -> list[Figure]:
    cores = usable_cores()
    figures = [*await throughput(options, cores), *await latency(options, cores)]
    return figures + [await speed_up(options, workers) for workers in SPEED_UP if workers <= cores]


if __name__ == "__main__":
    main("parallel_calls", __doc__, run)
