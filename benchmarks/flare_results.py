"""Results stream to the application in batches, through the gateway and by app commands.

One job yields small results, as fast as they are read; all the time of the job counts. A command is one that does
nothing: with one per result there could not be more than these. nv_dfm_core asks for its results by commands, too; its
rate is between the first and the last of them.

Claimed: through the gateway at least 100 times as many per second as there are commands, and by commands 50 times.
"""

from __future__ import annotations

import asyncio

from benchmarks import flare, flare_dfm, workloads
from benchmarks.common import Figure, Options, Target, interleave, main
from benchmarks.flare_raw import RawJob
from dfm_async.planning import Plan

COMMAND = "command"


async def _rate(ours: flare.Contender, plan: Plan, n: int) -> float:
    return n / await workloads.elapsed(ours.run(plan, {"n": n}, n))


async def run(options: Options) -> list[Figure]:
    peer = await asyncio.to_thread(flare_dfm.measure, "results", options.quick)
    n = options.size(20_000)
    async with (
        flare.up() as up,
        flare.Contender(up) as ours,
        flare.Contender(up, gateway="never") as other,
        RawJob(up) as raw,
    ):
        here, there = await ours.stream(), await other.stream()
        found = await interleave(
            {
                "gateway": lambda: _rate(ours, here, n),
                COMMAND: lambda: workloads.rate(raw.command, options.size(40), 1),
                "commands": lambda: _rate(other, there, n),
            },
            options.repeats,
        )
    peers = {COMMAND: found[COMMAND], **flare_dfm.beside(peer, "results")}
    return [
        Figure("results of one job, gateway", "results/s", found["gateway"], peers, Target(100, COMMAND, True)),
        Figure("results of one job, app commands", "results/s", found["commands"], peers, Target(50, COMMAND, True)),
    ]


if __name__ == "__main__":
    main("flare_results", __doc__, run)
