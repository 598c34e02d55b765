"""Cost grows with the number of parameter sets, and memory does not.

One job sends parameter sets through three sites. Claimed: a set of 10,000 costs at most 1.3 times what a set of 1,000
costs; the memory of the application and of the workers after 10,000 is at most 1.1 times that after 1,000. The pool
sends every value through the application, with as many sets under way as we have.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, main, memory, tree
from benchmarks.ours import SITES, Contender
from dfm_async import ResultLimits
from dfm_async.planning import Plan

FEW, MANY = 1_000, 10_000
WINDOW = 256
LIMITS = ResultLimits(max_items=1_000)


async def _sets(count: int) -> AsyncIterator[dict[str, int]]:
    for i in range(count):
        yield {"x": i}


async def _through(ours: Contender, plan: Plan, count: int) -> float:
    start = time.perf_counter()
    job = await ours.session.execute(plan, _sets(count), options=LIMITS)
    seen = 0
    async for _ in job:
        seen += 1
    if seen != count:
        raise RuntimeError(f"{seen} results of {count}")
    return (time.perf_counter() - start) / count * 1e6


def _application() -> float:
    return memory(process for process in tree(os.getpid()) if process.pid == os.getpid())


def _workers() -> float:
    return memory(process for process in tree(os.getpid()) if process.pid != os.getpid())


async def _pool(count: int) -> float:
    limit = asyncio.Semaphore(WINDOW)
    async with PoolBackend(3) as pool:
        await pool.warm()

        async def one(value: int) -> None:
            async with limit:
                await pool.through(value, range(3))

        start = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(count)))
        return (time.perf_counter() - start) / count * 1e6


async def run(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    pool = await _pool(FEW)
    for kind in ("sync", "async"):
        async with Contender() as ours:
            plan = await ours.chain(list(SITES), kind == "async")
            await _through(ours, plan, FEW)
            few = await _through(ours, plan, FEW)
            before = {"application": _application(), "workers": _workers()}
            many = await _through(ours, plan, MANY)
            after = {"application": _application(), "workers": _workers()}
        name = f"{kind} operations"
        figures += [
            Figure(f"one of {FEW:,} sets, three sites, {name}", "us", few, {"pool": pool}),
            Figure(f"one of {MANY:,} sets, three sites, {name}", "us", many, {f"{FEW}": few}, Target(1.3, f"{FEW}")),
        ]
        figures += [
            Figure(f"memory of the {who} after {MANY:,}, {name}", "MiB", after[who], {f"{FEW}": before[who]}, target)
            for who, target in (("application", Target(1.1, f"{FEW}")), ("workers", Target(1.1, f"{FEW}")))
        ]
    return figures


if __name__ == "__main__":
    main("param_sets", __doc__, run)
