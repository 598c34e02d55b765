"""Programs outside a federation, for the benchmarks of the exchange: ``python -m benchmarks.programs KIND``.

They import no more than they need, because some benchmarks measure how long they take to start.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from dfm_async.exchange import FlareAgent, SubprocessLauncher, Task


def launcher(kind: str, **rest: Any) -> SubprocessLauncher:
    """Launches a program of this kind."""
    from benchmarks.external import environment

    return SubprocessLauncher([sys.executable, "-m", "benchmarks.programs", kind], environment=environment(), **rest)


async def _echo() -> None:
    async with FlareAgent.from_environment() as agent:
        async for task in agent:
            await agent.submit_result(task.data)


def _echo_sync() -> None:
    from dfm_async.exchange import sync

    sync.init()
    while (task := sync.receive()) is not None:
        sync.send(task.data)
    sync.shutdown()


async def _modules() -> None:
    """Answers with what is loaded when the program is up."""
    async with FlareAgent.from_environment() as agent:
        loaded = list(sys.modules)
        async for _ in agent:
            await agent.submit_result(loaded)


def _spin() -> None:
    while True:
        pass


class _Worker:
    """Does what the name of a task says."""

    def __init__(self, agent: FlareAgent) -> None:
        self._agent = agent
        self._arrays: dict[int, Any] = {}

    async def work(self, task: Task) -> Any:
        if task.name == "pid":
            return os.getpid()
        if task.name == "array":
            return self._array(task.data)
        self._agent.progress(0)  # it has begun
        return await asyncio.to_thread(_spin)

    def _array(self, size: int) -> Any:
        """The same one every time: making it is not what is measured."""
        if size not in self._arrays:
            import numpy

            self._arrays[size] = numpy.arange(size // 8, dtype="f8")
        return self._arrays[size]


async def _work() -> None:
    async with FlareAgent.from_environment() as agent:
        await agent.run(_Worker(agent).work)


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "sync":
        _echo_sync()
    else:
        asyncio.run({"echo": _echo, "modules": _modules, "work": _work}[kind]())
