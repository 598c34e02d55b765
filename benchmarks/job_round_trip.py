"""A job costs little more than a bare call into a process pool.

One small operation at one site, from submission until the results are read and the job has finished; warm, one job
after the other. Claimed: at most twice the time of the same call through a pool.
"""

from __future__ import annotations

from benchmarks import external, workloads
from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.ours import Contender
from benchmarks.raw import SocketEcho


async def run(options: Options) -> list[Figure]:
    n = options.size(400)
    async with Contender() as ours, PoolBackend() as pool, SocketEcho() as socket:
        sync, awaited = await ours.one(False), await ours.one(True)
        found = await interleave(
            {
                "sync": lambda: workloads.latency(lambda i: ours.run(sync, {"x": i}), n),
                "pool": lambda: workloads.round_trip(pool, n),
                "async": lambda: workloads.latency(lambda i: ours.run(awaited, {"x": i}), n),
                "socket": lambda: workloads.latency(socket.round_trip, n),
            },
            options.repeats,
        )
    found = scaled(found, 1e3)
    others = external.measure("round_trip", options.quick).get("round_trip", {})
    peers = {"pool": found["pool"], "socket": found["socket"], **scaled(others, 1e3)}
    return [
        Figure(f"job round trip, {kind} operation", "ms", found[kind], peers, Target(2, "pool"))
        for kind in ("sync", "async")
    ]


if __name__ == "__main__":
    main("job_round_trip", __doc__, run)
