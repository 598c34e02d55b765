"""Values travel from site to site directly.

Three stages on three sites. A hop is half of what two further sites add to the latency of one parameter set; the peer
pool sends every value through the application, and the socket is half a bare round trip between two processes. Claimed:
a hop costs at most three times the bare socket; 100 parameter sets take at most 0.3 times as long as with the pool.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import external, workloads
from benchmarks.backends import PoolBackend
from benchmarks.common import Block, Figure, Options, Target, interleave, main, scaled
from benchmarks.ours import SITES, Contender
from benchmarks.raw import SocketEcho

MANY = 100


async def _our_blocks(ours: Contender, kind: str, n: int) -> dict[str, Block]:
    one = await ours.chain(["a"], kind == "async")
    three = await ours.chain(list(SITES), kind == "async")
    rows = [{"x": i} for i in range(MANY)]
    return {
        f"{kind} one": lambda: workloads.latency(lambda i: ours.run(one, {"x": i}), n),
        f"{kind} three": lambda: workloads.latency(lambda i: ours.run(three, {"x": i}), n),
        f"{kind} many": lambda: workloads.latency(lambda _: ours.run(three, rows, MANY), 5),
    }


def _their_blocks(pool: PoolBackend, socket: SocketEcho, n: int) -> dict[str, Block]:
    return {
        "pool one": lambda: workloads.stages(pool, n, 1),
        "pool three": lambda: workloads.stages(pool, n, 3),
        "pool many": lambda: workloads.latency(lambda _: workloads.many_through(pool, MANY), 5),
        "socket": lambda: workloads.latency(socket.round_trip, n),
    }


def _hop(found: Mapping[str, float], who: str) -> float:
    return (found[f"{who} three"] - found[f"{who} one"]) / 2


async def run(options: Options) -> list[Figure]:
    n = options.size(200)
    async with Contender() as ours, PoolBackend(3) as pool, SocketEcho() as socket:
        blocks = {
            **await _our_blocks(ours, "sync", n),
            **_their_blocks(pool, socket, n),
            **await _our_blocks(ours, "async", n),
        }
        found = scaled(await interleave(blocks, options.repeats), 1e3)
    for metric, values in external.measure("cross_site", options.quick).items():
        found |= {f"{peer} {metric}": value * 1e3 for peer, value in values.items()}
    peers = [name.removesuffix(" many") for name in found if name.endswith(" many")]
    peers = [peer for peer in peers if peer not in ("sync", "async")]
    hops = {"socket": found["socket"] / 2, **{peer: _hop(found, peer) for peer in peers}}
    single = {peer: found[f"{peer} three"] for peer in peers}
    total = {peer: found[f"{peer} many"] for peer in peers}
    return [
        figure
        for kind in ("sync", "async")
        for figure in (
            Figure(f"hop, {kind} operations", "ms", _hop(found, kind), hops, Target(3, "socket")),
            Figure(f"one set, three sites, {kind}", "ms", found[f"{kind} three"], single),
            Figure(f"{MANY} sets, three sites, {kind}", "ms", found[f"{kind} many"], total, Target(0.3, "pool")),
        )
    ]


if __name__ == "__main__":
    main("cross_site", __doc__, run)
