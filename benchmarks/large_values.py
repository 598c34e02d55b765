"""Large arrays arrive at the speed of a copy in memory, and use no more memory than the log's limits allow.

One job yields arrays of 64 KiB to 16 MiB from a generator to the application, or from one site to an operation of
another. The peers are two processes that do nothing else: one copies into shared memory and tells the other over a
socket, or sends through a ``multiprocessing.Pipe``. The shared copy goes round and round in up to 64 MiB, so that
arrays stay where they are for a while, as they do for a reader of ours; the cached copy uses only four slots, which
the processor's caches hold up to 1 MiB. Claimed: at 1 MiB at least 0.7 times the speed of the shared copy, at 16 MiB
half of it. Memory is what the sites' arenas have ever used, and what the application itself has grown by; its bound is
the log, the window, and what a generator is ahead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from benchmarks import operations, workloads
from benchmarks.common import Figure, Options, Target, interleave, main, tree
from benchmarks.raw import PickledPipe, SharedCopy
from dfm_async import Federation, Pipeline, PlaceParam, ResultLimits, Session, Yield
from dfm_async.planning import Plan

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "256 KiB": 256 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
CLAIMED = {"1 MiB": 0.7, "16 MiB": 0.5}
"""The least speed of each size, in multiples of that of the shared copy."""
COPY, CACHED = "shared copy", "cached copy"
SLOTS = 128
"""No more: what the two processes tell each other must fit into the socket's buffer."""
LEAD = 16
"""How far the generator's thread is ahead of what is sent, in MiB."""


class _Ours:
    def __init__(self) -> None:
        self.federation = Federation("large values")
        a, b = self.federation.site("a"), self.federation.site("b")
        self.arrays: Any = a.operation(operations.arrays)
        self.count: Any = b.operation(operations.count_arrays)
        self.session = Session(self.federation)

    async def plans(self) -> tuple[Plan, Plan]:
        """To the application, and from site to site; parameters n and size."""
        with Pipeline("to the application") as here:
            Yield(self.arrays(PlaceParam("n"), PlaceParam("size")))
        with Pipeline("from site to site") as there:
            Yield(self.count(self.arrays(PlaceParam("n"), PlaceParam("size"))))
        return await self.session.prepare(here), await self.session.prepare(there)

    async def read(self, plan: Plan, n: int, size: int, limits: ResultLimits | None = None) -> None:
        """Runs a job and reads what it yields."""
        job = await self.session.execute(plan, {"n": n, "size": size}, options=limits)
        count = 0
        async for result in job:
            if result.value[0] != count:
                raise RuntimeError("an array came out of turn")
            count += 1
        await job

    async def pass_on(self, plan: Plan, n: int, size: int) -> None:
        """Runs a job whose arrays go from site to site."""
        job = await self.session.execute(plan, {"n": n, "size": size})
        async for result in job:
            if result.value != n:
                raise RuntimeError(f"{result.value} of {n} arrays came")
        await job


def _arenas() -> dict[int, float]:
    """How much memory each arena of all our processes has, in MiB."""
    found = {}
    for process in tree(os.getpid()):
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                if "dfm-arena" in os.readlink(file):
                    status = os.stat(file)
                    found[status.st_ino] = status.st_blocks * 512 / MIB
            except OSError:
                continue
    return found


def _own() -> float:
    return float(psutil.Process().memory_full_info().uss) / MIB


async def _memory(limits: ResultLimits, name: str, options: Options) -> Figure:
    ours = _Ours()
    known = _arenas()  # what was read before may still be held
    async with ours.session:
        plan, _ = await ours.plans()
        await ours.read(plan, 1, 8)
        before = _own()
        await ours.read(plan, options.size(128), 16 * MIB, limits)
        peak = sum(size for arena, size in _arenas().items() if arena not in known) + max(0.0, _own() - before)
    bound = (limits.max_bytes + limits.window_bytes) / MIB + LEAD + 3 * 16  # three arrays are on their way
    return Figure(f"memory for {options.size(128) * 16:,} MiB, {name}", "MiB", peak, target=Target(bound))


async def run(options: Options) -> list[Figure]:
    figures = []
    ours = _Ours()
    async with ours.session, SharedCopy(64 * MIB) as copy, PickledPipe() as pipe:
        here, there = await ours.plans()
        for name, size in SIZES.items():
            n = options.size(min(2048, 512 * MIB // size))

            async def timed(work: Any, n: int = n, size: int = size) -> float:
                return n * size / 1e9 / await workloads.elapsed(work)

            found = await interleave(
                {
                    "ours": lambda n=n, size=size, timed=timed: timed(ours.read(here, n, size)),  # type: ignore[misc]
                    COPY: lambda n=n, size=size, timed=timed: timed(copy.read(n, size, min(SLOTS, 64 * MIB // size))),  # type: ignore[misc]
                    CACHED: lambda n=n, size=size, timed=timed: timed(copy.read(n, size, 4)),  # type: ignore[misc]
                    "there": lambda n=n, size=size, timed=timed: timed(ours.pass_on(there, n, size)),  # type: ignore[misc]
                    "mp.Pipe": lambda n=n, size=size, timed=timed: timed(pipe.read(n // 8, size), n // 8),  # type: ignore[misc]
                },
                options.repeats,
            )
            peers = {COPY: found[COPY], CACHED: found[CACHED], "mp.Pipe": found["mp.Pipe"]}
            target = Target(CLAIMED[name], COPY, at_least=True) if name in CLAIMED else None
            figures.append(Figure(f"{name}, to the application", "GB/s", found["ours"], peers, target))
            figures.append(Figure(f"{name}, site to site", "GB/s", found["there"], peers, target))
    small = ResultLimits(max_bytes=16 * MIB, window_bytes=16 * MIB)
    figures.append(await _memory(ResultLimits(), "usual limits", options))
    figures.append(await _memory(small, "16 MiB each", options))
    return figures


if __name__ == "__main__":
    main("large_values", __doc__, run)
