"""Measures peers in processes of their own: what runs there, and who starts it.

The stock ``aiomultiprocess`` pool is always there. ``dask``, ``ray`` and ``dbos`` take part if they are importable, or
if ``DFM_BENCH_PEERS`` names a directory with a virtual environment of each name. Those that run calls are not
interleaved with ours, because some of them keep the processor busy while they wait.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from benchmarks import workloads
from benchmarks.backends import BACKENDS, Backend

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120
_MODULES = {"aiomultiprocess": "aiomultiprocess", "dask": "distributed", "ray": "ray", "dbos": "dbos"}
POOLS = ("aiomultiprocess", "dask", "ray")
"""The peers that run calls in other processes."""

Block = Callable[[Backend], Awaitable[float]]


def _parallel(calls: workloads.Calls) -> Block:
    return lambda b: workloads.parallel_calls(b, calls, min(calls.count, 2000))


def _frames(mb: int) -> Block:
    return lambda b: workloads.frames(b, 3, mb * 1_000_000)


# Per workload: sites, workers, and the blocks with the names under which they are reported.
WORKLOADS: dict[str, tuple[int, int, dict[str, Block]]] = {
    "round_trip": (1, 1, {"round_trip": lambda b: workloads.round_trip(b, 500)}),
    "jobs_per_second": (
        1,
        2,
        {
            "16": lambda b: workloads.jobs_per_second(b, 1000, 16),
            "256": lambda b: workloads.jobs_per_second(b, 1000, 256),
        },
    ),
    "parallel_calls": (1, 2, {name: _parallel(calls) for name, calls in workloads.CALLS.items()}),
    "small_results": (
        1,
        1,
        {
            "ints": lambda b: workloads.results_per_second(b, "ints", 10_000),
            "dicts": lambda b: workloads.results_per_second(b, "dicts", 10_000),
        },
    ),
    "first_result": (1, 1, {"first": lambda b: workloads.first_result(b, 10_000)}),
    "graphs": (1, 1, {"fan": lambda b: workloads.fan(b, 100), "chain": lambda b: workloads.chain(b, 100)}),
    "cross_site": (
        3,
        1,
        {
            "one": lambda b: workloads.stages(b, 100, 1),
            "three": lambda b: workloads.stages(b, 100, 3),
            "many": lambda b: workloads.many_through(b, 100),
        },
    ),
    **{f"frames_{mb}": (2, 1, {"GB/s": _frames(mb)}) for mb in (100, 800)},
}


def interpreters(peers: Collection[str] = POOLS) -> dict[str, str]:
    """The Python interpreter for each of these peers that is there."""
    found = {}
    directory = os.environ.get("DFM_BENCH_PEERS")
    for peer in peers:
        theirs = Path(directory) / peer / "bin" / "python" if directory else None
        if importlib.util.find_spec(_MODULES[peer]) is not None:
            found[peer] = sys.executable
        elif theirs is not None and theirs.exists():
            found[peer] = str(theirs)
    if directory and (Path(directory) / "nv_dfm_core").exists():
        print("note: nv_dfm_core is left out, it needs a generated package", file=sys.stderr)
    return found


def environment(root: Path = ROOT) -> dict[str, str]:
    """What a process needs to import this package, or that of another checkout."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def measure(
    workload: str, quick: bool, *, peers: Collection[str] = POOLS, workers: int | None = None
) -> dict[str, dict[str, float]]:
    """Runs a workload with every peer that is there; gives for each metric the value of each peer."""
    found: dict[str, dict[str, float]] = {}
    for peer, python in interpreters(peers).items():
        count = str(workers or WORKLOADS[workload][1])
        command = [python, "-m", "benchmarks.external", peer, workload, "1" if quick else "3", count]
        try:
            done = subprocess.run(
                command, env=environment(), cwd=ROOT, timeout=LIMIT, check=True, capture_output=True, text=True
            )
            values = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            print(f"note: {peer} is left out, {type(error).__name__} in {workload}", file=sys.stderr)
            continue
        for metric, value in values.items():
            found.setdefault(metric, {})[peer] = value
    return found


async def _run(peer: str, workload: str, repeats: int, workers: int) -> dict[str, float]:
    sites, _, blocks = WORKLOADS[workload]
    async with BACKENDS[peer](sites, workers) as backend:
        await backend.warm()
        found = {}
        for name, block in blocks.items():
            await block(backend)
            found[name] = statistics.median([await block(backend) for _ in range(repeats)])
        return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
