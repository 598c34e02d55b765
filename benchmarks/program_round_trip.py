"""A task for a program outside the federation costs little more than its bytes on a socket.

A task that does nothing goes from our executor to our agent in another process and back, settled on both sides; one
after the other. The peer sends the same number of bytes there and back between two processes, over a Unix socket with
asyncio's streams, and does nothing else. Claimed: over our Unix socket, at most 3 times as long.

Beside it, where it is installed, NVFLARE: its script under our executor (2.8 over files, 2.9 over its cell), and 2.8's
own executor with the same script over files.
"""

from __future__ import annotations

import asyncio

from benchmarks import programs, stock, workloads
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.raw import BytesEcho
from dfm_async.exchange import ExecutorOptions, LauncherExecutor, Task
from tests.interop.environments import NVFLARE_2_8, NVFLARE_2_9

PAYLOAD = bytes(range(100))
ANY = ExecutorOptions(other_tasks=("*",))


class _Ours:
    def __init__(self, executor: LauncherExecutor, n: int) -> None:
        self._executor = executor
        self._n = n

    async def block(self) -> float:
        return await workloads.latency(self._once, self._n)

    async def _once(self, _: int) -> None:
        result = await self._executor.execute(Task("nothing", PAYLOAD))
        if result.data != PAYLOAD:
            raise RuntimeError("another result came")


async def _sockets(options: Options) -> dict[str, float]:
    n = options.size(400)
    async with (
        LauncherExecutor(programs.launcher("echo"), ANY) as unix,
        LauncherExecutor(programs.launcher("echo"), ANY, transport="tcp") as tcp,
        LauncherExecutor(programs.launcher("sync"), ANY) as sync,
        BytesEcho() as socket,
    ):
        found = await interleave(
            {
                "unix": _Ours(unix, n).block,
                "socket": lambda: workloads.latency(lambda _: socket.round_trip(PAYLOAD), n),
                "tcp": _Ours(tcp, n).block,
                "sync": _Ours(sync, n).block,
            },
            options.repeats,
        )
    return scaled(found, 1e3)


async def _nvflare_2_8(ours: float, options: Options) -> list[Figure]:
    python = stock.interpreter(NVFLARE_2_8, options.quick)
    if python is None:
        return []
    script = await stock.with_script_of_2_8(python, options.size(40)) * 1e3
    theirs = await asyncio.to_thread(stock.measure, python, "site_2_8", options.size(20)) * 1e3
    peers = {"NVFLARE 2.8": theirs}
    return [
        Figure("no-op task, script of NVFLARE 2.8 under our executor, files", "ms", script, peers),
        Figure("NVFLARE 2.8 over files, by ours with the same script", "times", theirs / script),
        Figure("NVFLARE 2.8 over files, by ours over the Unix socket", "times", theirs / ours),
    ]


async def _nvflare_2_9(options: Options) -> list[Figure]:
    python = stock.interpreter(NVFLARE_2_9, options.quick)
    if python is None:
        return []
    script = await asyncio.to_thread(stock.measure, python, "site_2_9", options.size(80)) * 1e3
    return [Figure("no-op task, script of NVFLARE 2.9 under our executor, its cell", "ms", script)]


async def run(options: Options) -> list[Figure]:
    found = await _sockets(options)
    peers = {"socket": found["socket"]}
    return [
        Figure("no-op task, Unix socket", "ms", found["unix"], peers, Target(3, "socket")),
        Figure("no-op task, TCP", "ms", found["tcp"], peers),
        Figure("no-op task, Unix socket, program without an event loop", "ms", found["sync"], peers),
        *await _nvflare_2_8(found["unix"], options),
        *await _nvflare_2_9(options),
    ]


if __name__ == "__main__":
    main("program_round_trip", __doc__, run)
