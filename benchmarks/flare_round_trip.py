"""A job on FLARE costs a few messages of FLARE, not a FLARE job.

One small operation at one site, from submission until the results are read and the job has finished; warm, one job
after the other, and 16 at a time. A hop is half of what a stage at another site and one back at the first add to that.
An aux message goes from site to site and is answered: the least that FLARE can do. A command is one that does nothing.

Claimed: through the gateway a job takes at most 6 aux messages, and a hop at most 2; 16 jobs at a time make at least 5
times as many per second as one after the other. By app commands a job waits for the command before it, too, which is at
the hub for up to a tenth of a second.
"""

from __future__ import annotations

import asyncio

from benchmarks import flare, flare_dfm, workloads
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.flare_raw import RawJob

AUX, COMMAND = "aux message", "command"
AT_ONCE = 16


async def run(options: Options) -> list[Figure]:
    peer = await asyncio.to_thread(flare_dfm.measure, "first_result", options.quick)
    n = options.size(40)
    async with (
        flare.up() as up,
        flare.Contender(up) as ours,
        flare.Contender(up, gateway="never") as other,
        RawJob(up) as raw,
    ):
        one, a, aba, by_command = (
            await ours.one(),
            await ours.chain(["a"]),
            await ours.chain(["a", "b", "a"]),
            await other.one(),
        )
        found = await interleave(
            {
                "gateway": lambda: workloads.latency(lambda i: ours.run(one, {"x": i}), n),
                AUX: lambda: raw.seconds(n, 100),
                "a": lambda: workloads.latency(lambda i: ours.run(a, {"x": i}), n),
                "aba": lambda: workloads.latency(lambda i: ours.run(aba, {"x": i}), n),
                "many": lambda: workloads.rate(lambda i: ours.run(one, {"x": i}), 8 * n, AT_ONCE),
                "commands": lambda: workloads.latency(lambda i: other.run(by_command, {"x": i}), options.size(20)),
                COMMAND: lambda: workloads.latency(raw.command, options.size(20)),
                "many, commands": lambda: workloads.rate(lambda i: other.run(by_command, {"x": i}), 4 * n, AT_ONCE),
            },
            options.repeats,
        )
    many = {name: found.pop(name) for name in ("many", "many, commands")}
    rates = {"one by one": 1 / found["gateway"]}, {"one by one": 1 / found["commands"]}
    found = scaled(found, 1e3)
    theirs = flare_dfm.beside(peer, "round trip", 1e3)
    aux = {AUX: found[AUX]}
    return [
        Figure("job round trip, gateway", "ms", found["gateway"], {**aux, **theirs}, Target(6, AUX)),
        Figure("job round trip, app commands", "ms", found["commands"], {COMMAND: found[COMMAND], **theirs}),
        Figure("hop from site to site", "ms", (found["aba"] - found["a"]) / 2, aux, Target(2, AUX)),
        Figure(f"{AT_ONCE} jobs at a time, gateway", "jobs/s", many["many"], rates[0], Target(5, "one by one", True)),
        Figure(f"{AT_ONCE} jobs at a time, app commands", "jobs/s", many["many, commands"], rates[1]),
    ]


if __name__ == "__main__":
    main("flare_round_trip", __doc__, run)
