"""Starting is cheap.

From the start of a fresh Python process until the first result of a federation with three sites, and until all three
sites have answered; then the memory of all its processes while they are warm. Claimed: at most 1.5 times the time of
three process pools, ready within 0.6 s on a quiet machine, at most 110 MiB (proportional set size).

All contenders find their modules compiled, as installed packages are: each interpreter gets a bytecode cache of its
own, which a first round that does not count fills.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import child, external
from benchmarks.common import Figure, Options, Target, main, memory, tree

SETTLE = 0.5


def _once(contender: str, python: str, bytecode: str) -> dict[str, float]:
    with child.running(contender, python, bytecode) as found:
        time.sleep(SETTLE)
        return {"first": found.first, "ready": found.ready, "memory": memory(tree(found.pid, found.mark))}


def _alternate(contenders: Mapping[str, str], repeats: int, bytecode: str) -> dict[str, dict[str, float]]:
    """Starts the contenders in turn; the first round only fills the caches."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, python in contenders.items():
            try:
                found = _once(name, python, str(Path(bytecode) / name))
            except RuntimeError as error:
                print(f"note: {error}", file=sys.stderr)
                continue
            if turn:
                runs[name].append(found)
    return {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
        if found
    }


def _measure(options: Options) -> list[Figure]:
    here = {"ours": sys.executable, "pool": sys.executable}
    with tempfile.TemporaryDirectory() as bytecode:
        found = _alternate(here, options.repeats, bytecode)
        found |= _alternate(external.interpreters(), 1 if options.quick else 3, bytecode)
    ours = found.pop("ours")
    peers = {key: {name: values[key] for name, values in found.items()} for key in ours}
    return [
        Figure("first result, three sites", "s", ours["first"], peers["first"], Target(1.5, "pool")),
        Figure("all three sites have answered", "s", ours["ready"], peers["ready"], Target(1.5, "pool")),
        Figure("all three sites have answered", "s", ours["ready"], peers["ready"], Target(0.6)),
        Figure("memory, three warm sites", "MiB", ours["memory"], peers["memory"], Target(110)),
    ]


async def run(options: Options) -> list[Figure]:
    return await asyncio.to_thread(_measure, options)


if __name__ == "__main__":
    main("cold_start", __doc__, run)
