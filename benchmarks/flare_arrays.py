"""Large arrays go from site to site about as fast as FLARE can carry their bytes.

A generator at one site yields arrays, which another site reads; all the time of the job counts. The aux message has
the same number of bytes, and is answered before the next is sent; with 4 at a time, 4 threads send them. nv_dfm_core
sends arrays as parameter sets through the server.

Claimed: an array takes at most 1.3 times as long as an aux message of its size.
"""

from __future__ import annotations

import asyncio

from benchmarks import flare, flare_dfm, workloads
from benchmarks.common import Block, Figure, Options, Target, interleave, main, scaled
from benchmarks.flare_raw import RawJob
from dfm_async.planning import Plan

MIB = 1024 * 1024
AUX, AUX_4 = "aux message", "4 at a time"
SIZES = {1: 64, 16: 8, 32: 6}
"""How many arrays of how many MiB."""


def _blocks(ours: flare.Contender, plan: Plan, raw: RawJob, mib: int, n: int) -> dict[str, Block]:
    size = mib * MIB

    async def arrays() -> float:
        seconds = await workloads.elapsed(ours.run(plan, {"n": n, "size": size}))
        return seconds / n

    return {"ours": arrays, AUX: lambda: raw.seconds(n, size), AUX_4: lambda: raw.seconds(n, size, 4)}


async def run(options: Options) -> list[Figure]:
    peer = await asyncio.to_thread(flare_dfm.measure, "arrays", options.quick)
    figures = []
    async with flare.up() as up, flare.Contender(up) as ours, RawJob(up) as raw:
        plan = await ours.large()
        for mib, count in SIZES.items():
            # Never fewer: the job itself would count for more.
            repeats = 3 if mib > 1 else options.repeats
            found = scaled(await interleave(_blocks(ours, plan, raw, mib, count), repeats), 1e3)
            peers = {AUX: found[AUX], AUX_4: found[AUX_4], **flare_dfm.beside(peer, f"{mib} MiB", 1e3)}
            figures.append(Figure(f"array of {mib} MiB", "ms", found["ours"], peers, Target(1.3, AUX)))
    return figures


if __name__ == "__main__":
    main("flare_arrays", __doc__, run)
