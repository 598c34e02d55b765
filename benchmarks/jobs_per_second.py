"""Many small jobs at once are faster than calls into a process pool, and than stock aiomultiprocess.

One small operation at a site with two workers, 16 and 256 jobs at a time. The stock pool of aiomultiprocess, which
takes only asynchronous functions, is started for each of its blocks, because its processes poll while they are idle.
Claimed: at least 1.5 times the rate of a pool with two workers, and at 256 at a time at least that of aiomultiprocess.
"""

from __future__ import annotations

from benchmarks import external, workloads
from benchmarks.backends import AiomultiprocessBackend, PoolBackend
from benchmarks.common import Figure, Options, Target, interleave, main
from benchmarks.ours import Contender

WORKERS = 2
CONCURRENCY = (16, 256)
STOCK = "aiomultiprocess"


async def _stock(n: int, concurrency: int) -> float:
    async with AiomultiprocessBackend(workers=WORKERS) as stock:
        await stock.warm()
        return await workloads.jobs_per_second(stock, n, concurrency)


async def _at(concurrency: int, options: Options, ours: Contender, pool: PoolBackend) -> dict[str, float]:
    sync, awaited = await ours.one(False), await ours.one(True)
    n = max(options.size(2000), 2 * concurrency)
    return await interleave(
        {
            "sync": lambda: workloads.rate(lambda i: ours.run(sync, {"x": i}), n, concurrency),
            "pool": lambda: workloads.jobs_per_second(pool, n, concurrency),
            "async": lambda: workloads.rate(lambda i: ours.run(awaited, {"x": i}), n, concurrency),
            STOCK: lambda: _stock(n, concurrency),
        },
        options.repeats,
    )


async def run(options: Options) -> list[Figure]:
    async with Contender(WORKERS) as ours, PoolBackend(workers=WORKERS) as pool:
        found = {concurrency: await _at(concurrency, options, ours, pool) for concurrency in CONCURRENCY}
    others = external.measure("jobs_per_second", options.quick, peers=("dask", "ray"))
    figures = []
    for concurrency, rates in found.items():
        peers = {"pool": rates["pool"], STOCK: rates[STOCK], **others.get(str(concurrency), {})}
        for kind in ("sync", "async"):
            metric = f"{concurrency} at a time, {kind} operation"
            figures.append(Figure(metric, "jobs/s", rates[kind], peers, Target(1.5, "pool", at_least=True)))
            if concurrency == max(CONCURRENCY):
                beside, target = {STOCK: rates[STOCK]}, Target(1, STOCK, at_least=True)
                figures.append(Figure(f"{metric}, beside {STOCK}", "jobs/s", rates[kind], beside, target))
    return figures


if __name__ == "__main__":
    main("jobs_per_second", __doc__, run)
