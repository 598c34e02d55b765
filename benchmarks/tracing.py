"""What traces cost: with an SDK of OpenTelemetry whose exporter does nothing, and with a file.

Each contender is an application of its own; their blocks are run in turn. ``CPU`` is the time of all processors, which
other load on the machine disturbs less. The peers do the same without traces, twice: ``again`` shows the noise.
``DFM_BEFORE=DIR`` adds an earlier version of the package, from a checkout in that folder: a job that is not traced must
not differ from it by more than the noise. Claimed: less than 5 % for job round trips and for operations of 1 ms. What
the smallest operations pay is told.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.external import environment

CHILD = Path(__file__).with_name("tracing_child.py")
SIZES = {"round trip": 1000, "calls": 10_000, "work": 300}
"""Large enough that what is put aside for later is also done later."""
UNITS = {
    "round trip": ("job round trip", "ms", 1e3),
    "calls": ("empty operation, 10,000 in a job", "us", 1e6),
    "work": ("operation of 1 ms", "ms", 1e3),
}


class Child:
    """One contender."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.used: list[float] = []

    @classmethod
    async def start(cls, mode: str, path: str, code: str | None = None) -> Child:
        pipe = asyncio.subprocess.PIPE
        env = environment() if code is None else {**environment(), "PYTHONPATH": code}
        command = (sys.executable, str(CHILD), mode, path)
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env))

    async def run(self, name: str, size: int) -> float:
        """Runs a workload; gives seconds per unit, and notes those of processors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {size}\n".encode())
        seconds, used = map(float, (await self._process.stdout.readline()).split())
        self.used.append(used)
        return seconds

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def run(options: Options) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        children = {
            "untraced": await Child.start("none", path),
            "sdk": await Child.start("sdk", path),
            "file": await Child.start("file", path),
            "again": await Child.start("none", path),
        }
        before = os.environ.get("DFM_BEFORE")
        if before:
            children["before"] = await Child.start("none", path, before)
        try:
            for name, size in SIZES.items():
                metric, unit, factor = UNITS[name]
                blocks = {key: _block(child, name, options.size(size)) for key, child in children.items()}
                found = scaled(await interleave(blocks, options.repeats), factor)
                target = None if name == "calls" else Target(1.05, "untraced")
                figures += _figures(metric, unit, found, target)
                used = {key: statistics.median(child.used[1:]) for key, child in children.items()}
                figures += _figures(f"{metric}, CPU", unit, scaled(used, factor))
                for child in children.values():
                    child.used.clear()
        finally:
            for child in children.values():
                await child.close()
    return figures


def _figures(metric: str, unit: str, found: dict[str, float], target: Target | None = None) -> list[Figure]:
    peers = {key: value for key, value in found.items() if key not in ("sdk", "file")}
    sdk = Figure(f"{metric}, SDK", unit, found["sdk"], peers, target)
    return [sdk, Figure(f"{metric}, file", unit, found["file"], peers)]


def _block(child: Child, name: str, size: int):  # type: ignore[no-untyped-def]
    return lambda: child.run(name, size)


if __name__ == "__main__":
    main("tracing", __doc__, run)
