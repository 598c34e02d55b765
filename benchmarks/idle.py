"""Nothing polls.

Processor time and voluntary context switches of the whole tree of processes, with three warm and connected sites that
have nothing to do. Claimed: below 0.1 % of one processor, and less than one wake-up per process and second.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks import child, external
from benchmarks.common import Figure, Options, Target, Usage, main, tree

SETTLE = 2.0


def _idle(contender: str, python: str, seconds: float) -> tuple[float, float, int]:
    with child.running(contender, python) as found:
        time.sleep(SETTLE)
        processes = tree(found.pid, found.mark)
        before = Usage.of(processes)
        time.sleep(seconds)
        return *Usage.of(processes).since(before), len(processes)


def _measure(options: Options) -> list[Figure]:
    seconds = 3.0 if options.quick else 10.0
    contenders = {"ours": sys.executable, "pool": sys.executable, **external.interpreters()}
    found = {name: _idle(name, python, seconds) for name, python in contenders.items()}
    cpu, switches, processes = found.pop("ours")
    return [
        Figure("processor", "%", cpu, {name: values[0] for name, values in found.items()}, Target(0.1)),
        Figure("wake-ups", "1/s", switches, {name: values[1] for name, values in found.items()}, Target(processes)),
        Figure("processes", "", processes, {name: values[2] for name, values in found.items()}),
    ]


async def run(options: Options) -> list[Figure]:
    return await asyncio.to_thread(_measure, options)


if __name__ == "__main__":
    main("idle", __doc__, run)
