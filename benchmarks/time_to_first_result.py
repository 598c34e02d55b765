"""The first result does not wait for the others.

The time from the submission of a job whose generator yields 10,000 integers until the first of them is read. Claimed:
at most twice the round trip of a job with one small operation, measured in the same run.
"""

from __future__ import annotations

import statistics

from benchmarks import external, workloads
from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.ours import Contender
from benchmarks.raw import QueueStream
from dfm_async.planning import Plan

SIZE = 10_000


async def _first(ours: Contender, plan: Plan) -> float:
    start = workloads.now()
    job = await ours.session.execute(plan, {"n": SIZE})
    first = None
    async for _ in job:
        first = first or workloads.now() - start
    await job
    return first or 0.0


async def _firsts(ours: Contender, plan: Plan, n: int) -> float:
    return statistics.median([await _first(ours, plan) for _ in range(n)])


async def _queue(queue: QueueStream) -> float:
    start = workloads.now()
    first = None
    async for _ in queue.stream("ints", SIZE):
        first = first or workloads.now() - start
    return first or 0.0


async def _measure(kind: str, options: Options, ours: Contender, queue: QueueStream, pool: PoolBackend) -> Figure:
    one, stream = await ours.one(kind == "async"), await ours.stream("ints", kind == "async")
    n = options.size(200)
    found = await interleave(
        {
            "ours": lambda: _firsts(ours, stream, 5),
            "round trip": lambda: workloads.latency(lambda i: ours.run(one, {"x": i}), n),
            "mp.Queue": lambda: _queue(queue),
            "pool": lambda: workloads.first_result(pool, SIZE),
        },
        3 if options.quick else 5,
    )
    found = scaled(found, 1e3)
    return Figure(f"first of {SIZE:,}, {kind} generator", "ms", found.pop("ours"), found, Target(2, "round trip"))


async def run(options: Options) -> list[Figure]:
    async with Contender() as ours, QueueStream() as queue, PoolBackend() as pool:
        figures = [await _measure(kind, options, ours, queue, pool) for kind in ("sync", "async")]
    others = scaled(external.measure("first_result", options.quick).get("first", {}), 1e3)
    return [
        Figure(figure.metric, figure.unit, figure.ours, {**figure.peers, **others}, figure.target) for figure in figures
    ]


if __name__ == "__main__":
    main("time_to_first_result", __doc__, run)
