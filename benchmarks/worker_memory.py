"""A worker is small.

The memory (proportional set size) of all processes but the application's, three sites, warm and idle, by the number of
sites; ours include the fork server. Beside it the same for three process pools.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import child, external
from benchmarks.common import Figure, Options, main, memory, tree

SETTLE = 0.5
SITES = 3


def _once(contender: str, python: str, bytecode: str) -> float:
    with child.running(contender, python, bytecode) as found:
        time.sleep(SETTLE)
        below = [process for process in tree(found.pid, found.mark) if process.pid != found.pid]
        return memory(below) / SITES


def _measure(_options: Options) -> list[Figure]:
    contenders = {"ours": sys.executable, "pool": sys.executable, **external.interpreters()}
    with tempfile.TemporaryDirectory() as bytecode:
        found = {name: _once(name, python, str(Path(bytecode) / name)) for name, python in contenders.items()}
    return [Figure("memory per worker", "MiB", found.pop("ours"), found)]


async def run(options: Options) -> list[Figure]:
    return await asyncio.to_thread(_measure, options)


if __name__ == "__main__":
    main("worker_memory", __doc__, run)
