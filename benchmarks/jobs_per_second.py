"""Many small jobs at once are at least as fast as calls into a process pool, and faster when there are very many.

One small operation at a site with two workers, 16 and 256 jobs at a time. Claimed: at least the rate of a pool with two
workers at 16, at least 1.5 times its rate at 256.
"""

from __future__ import annotations

from benchmarks import external, workloads
from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, interleave, main
from benchmarks.ours import Contender

WORKERS = 2
TARGETS = {16: 1.0, 256: 1.5}


async def _at(concurrency: int, options: Options, ours: Contender, pool: PoolBackend) -> dict[str, float]:
    sync, awaited = await ours.one(False), await ours.one(True)
    n = max(options.size(2000), 2 * concurrency)
    return await interleave(
        {
            "sync": lambda: workloads.rate(lambda i: ours.run(sync, {"x": i}), n, concurrency),
            "pool": lambda: workloads.jobs_per_second(pool, n, concurrency),
            "async": lambda: workloads.rate(lambda i: ours.run(awaited, {"x": i}), n, concurrency),
        },
        options.repeats,
    )


async def run(options: Options) -> list[Figure]:
    async with Contender(WORKERS) as ours, PoolBackend(workers=WORKERS) as pool:
        found = {concurrency: await _at(concurrency, options, ours, pool) for concurrency in TARGETS}
    others = external.measure("jobs_per_second", options.quick)
    return [
        Figure(
            f"{concurrency} at a time, {kind} operation",
            "jobs/s",
            found[concurrency][kind],
            {"pool": found[concurrency]["pool"], **others.get(str(concurrency), {})},
            Target(limit, "pool", at_least=True),
        )
        for concurrency, limit in TARGETS.items()
        for kind in ("sync", "async")
    ]


if __name__ == "__main__":
    main("jobs_per_second", __doc__, run)
