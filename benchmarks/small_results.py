"""A generator's elements arrive as results at a high rate.

One job yields 10,000 and 100,000 small values from a synchronous and an asynchronous generator; the time runs from
submission until all are read and the job has finished. Claimed: at least 150,000 integers or 80,000 small dicts per
second. The peers are a ``multiprocessing.Queue`` that a thread reads into the event loop, and a pool with one call per
value (2,000 of them).
"""

from __future__ import annotations

from benchmarks import external, workloads
from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, interleave, main
from benchmarks.ours import Contender
from benchmarks.raw import QueueStream

TARGETS = {"ints": 150_000, "dicts": 80_000}
SIZES = (10_000, 100_000)
POOL_SIZE = 2_000


async def _ours(ours: Contender, kind: str, is_async: bool, n: int) -> float:
    plan = await ours.stream(kind, is_async)
    start = workloads.now()
    await ours.run(plan, {"n": n}, n)
    return n / (workloads.now() - start)


async def _queue(queue: QueueStream, kind: str, n: int) -> float:
    start = workloads.now()
    async for _ in queue.stream(kind, n):
        pass
    return n / (workloads.now() - start)


async def _measure(
    kind: str, n: int, options: Options, ours: Contender, queue: QueueStream, pool: PoolBackend
) -> dict[str, float]:
    return await interleave(
        {
            "sync": lambda: _ours(ours, kind, False, n),
            "mp.Queue": lambda: _queue(queue, kind, n),
            "async": lambda: _ours(ours, kind, True, n),
            "pool": lambda: workloads.results_per_second(pool, kind, POOL_SIZE),
        },
        options.repeats if n == SIZES[0] else 3 - options.quick,
    )


async def run(options: Options) -> list[Figure]:
    async with Contender() as ours, QueueStream() as queue, PoolBackend() as pool:
        found = {(kind, n): await _measure(kind, n, options, ours, queue, pool) for kind in TARGETS for n in SIZES}
    others = external.measure("small_results", options.quick)
    return [
        Figure(
            f"{n:,} {kind}, {how} generator",
            "results/s",
            values[how],
            {"mp.Queue": values["mp.Queue"], "pool": values["pool"], **others.get(kind, {})},
            Target(TARGETS[kind], at_least=True),
        )
        for (kind, n), values in found.items()
        for how in ("sync", "async")
    ]


if __name__ == "__main__":
    main("small_results", __doc__, run)
