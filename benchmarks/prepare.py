"""Preparing a pipeline is quick, linear in its size, and quicker than nv_dfm_core.

Chains and fans of 10 to 10,000 operations, on one site and on three (a chain in three parts, or with a change of site
at every step). Claimed: at most 40 microseconds per node, and at 1,000 and more at most 1.5 times as much per node as
at 100. Building the pipeline is not included.

Then the same chains beside nv_dfm_core, which has an environment of its own; also with a free choice of three sites for
every operation, where both have to reckon with costs. Claimed: ours takes at most half of its time. A size that it has
not done in half a minute (ten seconds with ``--quick``) is left out, and so are larger ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import workloads
from benchmarks.common import Block, Figure, Options, Target, interleave, main
from benchmarks.external import ROOT
from benchmarks.ours import SITES, Contender
from dfm_async import BestOf, Federation, Pipeline, PlaceParam, Yield
from dfm_async.federation import Cost, SendCost
from dfm_async.planning.prepare import prepare
from tests.interop.environments import NV_DFM_CORE, environment

SIZES = (10, 100, 1000, 10_000)
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
    return figures + [
        Figure(f"{name}, {n:,}", "us/node", found[str(n)], {"at 100": found["100"]}, Target(1.5, "at 100"))
        for n in SIZES[2:]
    ]


# beside nv_dfm_core

CHOICES: dict[str, tuple[str, Callable[[int], Any]]] = {
    "one": ("chain, one site", lambda i: "a"),
    "turns": ("chain, three sites in turn", lambda i: SITES[i % len(SITES)]),
    "free": ("chain, any of three sites", lambda i: BestOf(SITES)),
}


def _federation() -> Federation:
    """As ``prepare_dfm`` has it."""
    fed = Federation("costs")

    def stage(v: Any) -> Any:
        return v

    for name in SITES:
        site = fed.site(name)
        site.operation(fed.operations.get("stage", stage), cost=Cost(fixed_time=0.1, output_factor=1.0))
        others = {*SITES, "home"} - {name}
        site.send_cost = {other: SendCost(fixed_time=0.01, bandwidth=1e6) for other in sorted(others)}
    return fed


async def _ours(choice: str, n: int, times: int) -> float:
    """Milliseconds to prepare a pipeline."""
    fed = _federation()
    pipelines = []
    for _ in range(times):
        with Pipeline() as pipeline:
            value: Any = PlaceParam("x")
            for i in range(n):
                value = fed.operations["stage"](value, site=CHOICES[choice][1](i))
            Yield(value)
        pipelines.append(pipeline)
    start = workloads.now()
    for pipeline in pipelines:
        prepare(pipeline, fed, "home")
    return (workloads.now() - start) / times * 1e3


def _theirs(python: str, choice: str, n: int, limit: int) -> float | None:
    """Milliseconds that nv_dfm_core takes; None if it is not done in time, or fails."""
    command = [python, "-m", "benchmarks.prepare_dfm", choice, str(n)]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=limit, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        print(f"note: nv_dfm_core has not prepared a {CHOICES[choice][0]}, {n:,} in {limit} s", file=sys.stderr)
        return None
    except subprocess.CalledProcessError as error:
        said = error.stderr.splitlines()[-1:]
        print(f"note: nv_dfm_core failed at a {CHOICES[choice][0]}, {n:,}: {said}", file=sys.stderr)
        return None
    return float(done.stdout.splitlines()[-1]) * 1e3


def _peer() -> str | None:
    try:
        return str(environment(*NV_DFM_CORE))
    except (subprocess.SubprocessError, OSError) as error:
        print(f"note: nv_dfm_core is left out, it cannot be installed: {error}", file=sys.stderr)
        return None


async def _beside(options: Options) -> list[Figure]:
    python = _peer()
    limit = 10 if options.quick else 30
    figures = []
    for choice, (name, _) in CHOICES.items():
        late = python is None
        for n in SIZES:
            ours = await _ours(choice, n, max(options.size(1000) // n, 1))
            theirs = None if late or python is None else _theirs(python, choice, n, limit)
            late = late or theirs is None
            peers = {} if theirs is None else {"nv_dfm_core": theirs}
            told = f", nv_dfm_core not in {limit} s" if late and python is not None else ""
            metric = f"{name}, {n:,} operations{told}"
            figures.append(Figure(metric, "ms", ours, peers, Target(0.5, "nv_dfm_core")))
    return figures


async def run(options: Options) -> list[Figure]:
    return [figure for name in SHAPES for figure in await _shape(name, options)] + await _beside(options)


if __name__ == "__main__":
    main("prepare", __doc__, run)
