"""A program is up almost as soon as its interpreter has loaded what it needs.

From the launch until the executor knows that the program is up, with a bootstrap file, a connection and a handshake
between them. The peer is an interpreter that is started in the same way, imports the same modules, and writes one byte
to a pipe. Claimed: at most 1.5 times as long.

Both find their modules compiled, as installed packages are, in a cache that a first round fills.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.external import environment
from dfm_async.exchange import ExecutorOptions, Invitation, LauncherExecutor, SubprocessLauncher, Task
from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.handshake import HandshakeTransport

ANY = ExecutorOptions(other_tasks=("*",))

# What a program does at least: it is up, and answers one task with the modules that were loaded by then.
PROGRAM = """
import asyncio, sys
from dfm_async.exchange import FlareAgent
async def main():
    async with FlareAgent.from_environment() as agent:
        loaded = list(sys.modules)
        async for task in agent:
            await agent.submit_result(loaded)
asyncio.run(main())
"""
BARE = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
os.write(1, b"x")
"""


class _Gate(HandshakeTransport):
    """Notes when a program is expected, and when it is up."""

    seconds = 0.0

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        start = time.perf_counter()

        def up(pipe: Pipe) -> None:
            on_up(pipe)
            self.seconds = time.perf_counter() - start

        return super().expect(up, launch_once=launch_once)


class _Ours:
    """Every task gets a new process."""

    def __init__(self, variables: dict[str, str]) -> None:
        launcher = SubprocessLauncher([sys.executable, "-c", PROGRAM], environment=variables, launch_once=False)
        self._gate = _Gate()
        self.executor = LauncherExecutor(launcher, ANY, transport=self._gate)
        self.modules: list[str] = []
        self.first: list[float] = []
        """How long each took until its result was there."""

    async def once(self) -> float:
        start = time.perf_counter()
        self.modules = (await self.executor.execute(Task("modules"))).data
        self.first.append(time.perf_counter() - start)
        await self.executor._wait_for_deferred_stop()  # nothing of it runs while the other one is measured
        return self._gate.seconds


def _bare(modules: list[str], variables: dict[str, str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", BARE, *modules],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise RuntimeError("the bare interpreter failed")
        return time.perf_counter() - start


async def run(options: Options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as bytecode:
        variables: dict[str, Any] = {**environment(), "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        ours = _Ours(variables)
        async with ours.executor:
            await ours.once()
            modules = [name for name in ours.modules if name != "__main__"]

            async def bare() -> float:
                return await asyncio.to_thread(_bare, modules, variables)

            found = await interleave({"ours": ours.once, "bare": bare}, 3 * options.repeats)
    found = scaled(found, 1e3)
    peers = {"bare": found["bare"]}
    first = statistics.median(ours.first[2:]) * 1e3  # without those that fill the cache
    return [
        Figure("launch until the program is up", "ms", found["ours"], peers, Target(1.5, "bare")),
        Figure("launch until the result of its first task", "ms", first, peers),
    ]


if __name__ == "__main__":
    main("program_start", __doc__, run)
