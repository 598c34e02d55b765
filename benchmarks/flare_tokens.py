"""A token between two sites costs a fraction of a message of FLARE, because they travel in batches.

Small values go from one site to another: the elements of a generator that the other site reads; the elements of a loop
whose body goes on at the other site, and is a result; parameter sets that do the same. All the time of the job counts.
The aux message is one per token, answered before the next is sent; with 4 at a time, 4 threads send them. nv_dfm_core
sends its tokens through the server, one by one.

Claimed: a token costs at most a twentieth of an aux message.
"""

from __future__ import annotations

import asyncio

from benchmarks import flare, flare_dfm, workloads
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.flare_raw import RawJob

AUX, AUX_4 = "aux message", "4 at a time"


async def run(options: Options) -> list[Figure]:
    peer = await asyncio.to_thread(flare_dfm.measure, "tokens", options.quick)
    elements, tokens = options.size(40_000), options.size(8_000)
    async with flare.up() as up, flare.Contender(up) as ours, RawJob(up) as raw:
        stream, loop, sets = await ours.elements(), await ours.loop(["a", "b"]), await ours.chain(["a", "b"])
        values = {"values": list(range(tokens))}
        rows = [{"x": i} for i in range(tokens)]

        async def of(work: object, n: int) -> float:
            return await workloads.elapsed(work) / n  # type: ignore[arg-type] # a coroutine

        found = await interleave(
            {
                "elements": lambda: of(ours.run(stream, {"n": elements}), elements),
                AUX: lambda: raw.seconds(options.size(200), 100),
                "loop": lambda: of(ours.run(loop, values, tokens), tokens),
                AUX_4: lambda: raw.seconds(options.size(200), 100, 4),
                "sets": lambda: of(ours.run(sets, rows, tokens), tokens),
            },
            options.repeats,
        )
    found = scaled(found, 1e6)
    theirs = {name: 1e6 / value for name, value in flare_dfm.beside(peer, "tokens").items()}
    peers = {AUX: found[AUX], AUX_4: found[AUX_4], **theirs}
    names = {"elements": "element of a generator", "loop": "element of a loop", "sets": "parameter set"}
    costs = [Figure(text, "us", found[name], peers, Target(0.05, AUX)) for name, text in names.items()]
    rates = {name: 1e6 / value for name, value in peers.items()}
    return [*costs, Figure("elements of a generator", "tokens/s", 1e6 / found["elements"], rates)]


if __name__ == "__main__":
    main("flare_tokens", __doc__, run)
