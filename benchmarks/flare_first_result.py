"""A warm federation on FLARE gives the first result of a job in milliseconds, where a FLARE job takes seconds.

One small operation at one site. Cold is from the start of a session in a federation that carries nothing yet; a new
session finds the host job running; warm is a further job of a session. The last two come through the gateway of the
homesite, and by app commands. A bare FLARE job is from its submission until it answers a command and both sites have
said that they are there, in the same federation, without the connection to the server. nv_dfm_core makes one FLARE job
of each of its own; beside cold, its time to connect counts, too. It needs nvflare 2.6, and has a federation of its own.

Claimed: warm through the gateway at most 0.02 times a bare FLARE job, and by app commands 0.1 times; cold at most 3
times, because it connects, submits a FLARE job, and starts the workers of the sites, and no slower than nv_dfm_core.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Literal

from benchmarks import flare, flare_dfm, workloads
from benchmarks.common import Figure, Options, Target, main
from benchmarks.flare_raw import RawJob
from dfm_async.flare import LocalFlare
from dfm_async.planning import Plan

BARE = "bare FLARE job"
WAYS: dict[str, Literal["auto", "never"]] = {"gateway": "auto", "commands": "never"}


async def _first(ours: flare.Contender, plan: Plan) -> float:
    """Seconds from submission to the first result; the job is read to its end."""
    start = workloads.now()
    job = await ours.session.execute(plan, {"x": 1})
    first = None
    async for _ in job:
        first = first or workloads.now() - start
    await job
    return first or 0.0


async def _session(make: Callable[[], flare.Contender]) -> float:
    """Seconds from the start of a session to its first result."""
    start = workloads.now()
    async with make() as ours:
        return workloads.now() - start + await _first(ours, await ours.one())


async def _bare(up: LocalFlare) -> float:
    async with RawJob(up) as raw:
        return raw.started


async def _federation(options: Options, found: defaultdict[str, list[float]]) -> None:
    """Everything in one fresh federation."""
    async with flare.up() as up:
        found["cold"].append(await _session(lambda: flare.Contender(up)))
        found["bare"].append(await _bare(up))
        for name, gateway in WAYS.items():
            make = partial(flare.Contender, up, gateway=gateway)
            found[f"session, {name}"] += [await _session(make) for _ in range(options.size(4))]
            async with make() as ours:
                if ours.way != name:
                    raise RuntimeError(f"results come through {ours.way}")
                plan = await ours.one()
                await _first(ours, plan)
                found[f"warm, {name}"] += [await _first(ours, plan) for _ in range(options.size(40))]


async def run(options: Options) -> list[Figure]:
    peer = await asyncio.to_thread(flare_dfm.measure, "first_result", options.quick)
    values: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(1 if options.quick else 3):
        await _federation(options, values)
    found = {name: statistics.median(times) * 1e3 for name, times in values.items()}
    bare = {BARE: found["bare"]}
    theirs = flare_dfm.beside(peer, "first result", 1e3)
    connected = {name: value + peer["connect"] * 1e3 for name, value in theirs.items()}
    return [
        Figure("cold: session, host job, workers", "ms", found["cold"], {**bare, **connected}, Target(3, BARE)),
        Figure("cold, beside nv_dfm_core", "ms", found["cold"], connected, Target(1, flare_dfm.NAME)),
        Figure("new session, gateway", "ms", found["session, gateway"], {**bare, **connected}, Target(0.1, BARE)),
        Figure("new session, app commands", "ms", found["session, commands"], {**bare, **connected}),
        Figure("warm, gateway", "ms", found["warm, gateway"], {**bare, **theirs}, Target(0.02, BARE)),
        Figure("warm, app commands", "ms", found["warm, commands"], {**bare, **theirs}, Target(0.1, BARE)),
    ]


if __name__ == "__main__":
    main("flare_first_result", __doc__, run)
