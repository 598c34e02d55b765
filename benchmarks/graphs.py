"""A graph is one job: its operations cost less than as many calls.

One hundred independent operations with all their results, and a chain of one hundred operations at one site. Claimed:
the fan takes at most 1.5 times as long as a pool, the chain at most half as long, because its values stay at the site.
"""

from __future__ import annotations

from benchmarks import external, workloads
from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.ours import Contender

SIZE = 100
TARGETS = {"fan": 1.5, "chain": 0.5}


async def _shape(shape: str, options: Options, ours: Contender, pool: PoolBackend) -> dict[str, float]:
    sites = ["a"] * SIZE
    if shape == "fan":
        plans = {is_async: await ours.fan(sites, is_async) for is_async in (False, True)}
        params, expected, theirs = {}, SIZE, workloads.fan
    else:
        plans = {is_async: await ours.chain(sites, is_async) for is_async in (False, True)}
        params, expected, theirs = {"x": 0}, 1, workloads.chain
    n = options.size(12)
    return await interleave(
        {
            "sync": lambda: workloads.latency(lambda _: ours.run(plans[False], params, expected), n),
            "pool": lambda: workloads.latency(lambda _: theirs(pool, SIZE), n),
            "async": lambda: workloads.latency(lambda _: ours.run(plans[True], params, expected), n),
        },
        options.repeats,
    )


async def run(options: Options) -> list[Figure]:
    async with Contender() as ours, PoolBackend() as pool:
        found = {shape: scaled(await _shape(shape, options, ours, pool), 1e3) for shape in TARGETS}
    others = external.measure("graphs", options.quick)
    return [
        Figure(
            f"{shape} of {SIZE}, {kind} operations",
            "ms",
            found[shape][kind],
            {"pool": found[shape]["pool"], **scaled(others.get(shape, {}), 1e3)},
            Target(limit, "pool"),
        )
        for shape, limit in TARGETS.items()
        for kind in ("sync", "async")
    ]


if __name__ == "__main__":
    main("graphs", __doc__, run)
