"""Preparing a pipeline is quick, and linear in its size.

Chains and fans of 10, 100 and 1,000 operations, on one site and on three (a chain in three parts, or with a change of
site at every step). Claimed: at most 40 microseconds per node, and at 1,000 at most 1.5 times as much per
node as at 100. Building the pipeline is not included.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import workloads
from benchmarks.common import Block, Figure, Options, Target, interleave, main
from benchmarks.ours import SITES, Contender
from dfm_async import Pipeline

SIZES = (10, 100, 1000)
Shape = Callable[[Contender, int], Pipeline]


def _parts(n: int) -> list[str]:
    return [SITES[i * len(SITES) // n] for i in range(n)]


def _turns(n: int) -> list[str]:
    return [SITES[i % len(SITES)] for i in range(n)]


SHAPES: dict[str, Shape] = {
    "chain, one site": lambda ours, n: ours.chain_of(["a"] * n),
    "chain, three sites": lambda ours, n: ours.chain_of(_parts(n)),
    "chain, three sites in turn": lambda ours, n: ours.chain_of(_turns(n)),
    "fan, one site": lambda ours, n: ours.fan_of(["a"] * n),
    "fan, three sites": lambda ours, n: ours.fan_of(_turns(n)),
}


async def _block(shape: Shape, n: int, times: int) -> float:
    """Microseconds per node (an operation or a yield); of fresh pipelines, because a session remembers its plans."""
    async with Contender(target="inline") as ours:
        pipelines = [shape(ours, n) for _ in range(times)]
        start = workloads.now()
        nodes = 0
        for pipeline in pipelines:
            nodes += len((await ours.session.prepare(pipeline)).nodes)
        return (workloads.now() - start) / nodes * 1e6


async def _shape(name: str, options: Options) -> list[Figure]:
    def block(n: int) -> Block:
        return lambda: _block(SHAPES[name], n, max(options.size(1000) // n, 1))

    found = await interleave({str(n): block(n) for n in SIZES}, options.repeats)
    figures = [Figure(f"{name}, {n:,} operations", "us/node", found[str(n)], {}, Target(40)) for n in SIZES]
    return [
        *figures,
        Figure(f"{name}, 1,000", "us/node", found["1000"], {"at 100": found["100"]}, Target(1.5, "at 100")),
    ]


async def run(options: Options) -> list[Figure]:
    return [figure for name in SHAPES for figure in await _shape(name, options)]


if __name__ == "__main__":
    main("prepare", __doc__, run)
