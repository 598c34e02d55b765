"""A program that is killed is noticed at once, and the next task finds another one.

A program computes, or hands over a result of 256 MiB; it is killed with SIGKILL. Measured from the kill: until
``execute`` raises, and until the next task has given its result in a new process. The peer is a bare subprocess of
asyncio that computes, until its end is known. Claimed: noticed within 50 ms.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks import programs
from benchmarks.common import Figure, Options, Target, main
from dfm_async.errors import ProgramExited
from dfm_async.exchange import ExchangeState, ExecutorOptions, LauncherExecutor, Task

SIZE = 256 << 20
AHEAD = 0.02
"""How long a transfer runs before the program is killed, in seconds; all of it takes much longer."""

Times = tuple[float, float]


class _Ours:
    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self.executor = LauncherExecutor(
            programs.launcher("work"),
            ExecutorOptions(other_tasks=("*",)),
            on_progress=lambda *_: self._begun.set(),
        )

    async def computing(self) -> Times:
        """Kills a program that computes."""
        self._begun.clear()
        return await self._killed(Task("compute"), self._begun.wait())

    async def transferring(self) -> Times:
        """Kills a program whose result is on its way."""
        await self.executor.execute(Task("array", SIZE))  # makes it
        return await self._killed(Task("array", SIZE), self._on_its_way())

    async def _on_its_way(self) -> None:
        while self.executor.state is not ExchangeState.TRANSFERRING:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.001)
        await asyncio.sleep(AHEAD)

    async def _killed(self, task: Task, moment: Awaitable[object]) -> Times:
        pid = (await self.executor.execute(Task("pid"))).data
        execution = asyncio.create_task(self.executor.execute(task))
        await moment
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            await execution
        except ProgramExited:
            told = time.perf_counter() - start
        await self.executor.execute(Task("pid"))
        return told, time.perf_counter() - start


async def _bare() -> Times:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    await asyncio.sleep(0.05)  # it computes by now
    start = time.perf_counter()
    process.kill()
    await process.wait()
    return time.perf_counter() - start, 0.0


async def _medians(once: Callable[[], Awaitable[Times]], rounds: int) -> Times:
    found = [await once() for _ in range(rounds + 1)][1:]
    return statistics.median(told for told, _ in found) * 1e3, statistics.median(after for _, after in found) * 1e3


async def run(options: Options) -> list[Figure]:
    logging.getLogger("dfm_async").setLevel(logging.ERROR)  # that a program is lost is no news here
    rounds = options.size(40)
    ours = _Ours()
    async with ours.executor:
        told, after = await _medians(ours.computing, rounds)
        bare, _ = await _medians(_bare, rounds)
        told_transfer, after_transfer = await _medians(ours.transferring, max(rounds // 4, 3))
    peers = {"bare": bare}
    return [
        Figure("told after SIGKILL, computing", "ms", told, peers, Target(50)),
        Figure("result of the next task, after SIGKILL, computing", "ms", after),
        Figure("told after SIGKILL, transferring 256 MiB", "ms", told_transfer, peers, Target(50)),
        Figure("result of the next task, after SIGKILL, transferring", "ms", after_transfer),
    ]


if __name__ == "__main__":
    main("program_lost", __doc__, run)
