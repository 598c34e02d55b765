"""The same no-op task with NVFLARE's own programs, in environments that have it; they are kept beside nox's own.

This file is also what runs there: ``script`` is a program as users of ``nvflare.client`` write it, ``site_2_8`` is
NVFLARE 2.8's own executor over files, without its launcher and with its usual intervals, and ``site_2_9`` is our
executor over a cell of NVFLARE 2.9.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__).resolve())
LIMIT = 120
WARM = 3
"""How many tasks do not count: a script waits in steps of half a second until it has found its rhythm."""


def interpreter(wanted: tuple[str, ...], quick: bool) -> str | None:
    """The interpreter of an environment; a quick run makes none. None if there is none."""
    from tests.interop.environments import environment

    try:
        found = environment(*wanted, make=not quick)
    except (OSError, subprocess.SubprocessError):
        found = None
    if found is None:
        print(f"note: {wanted[0]} is not installed, its rows are left out", file=sys.stderr)
    return str(found) if found else None


def measure(python: str, site: str, n: int) -> float:
    """Runs a site there; gives the median seconds of a task."""
    from benchmarks.external import ROOT, environment

    done = subprocess.run(
        [python, SCRIPT, site, str(n)], env=environment(), cwd=ROOT, timeout=LIMIT, check=True, capture_output=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"SECONDS ")]
    return float(lines[-1].split()[1])


def _script() -> None:
    import nvflare.client as flare

    flare.init()
    while flare.is_running():
        model = flare.receive()
        flare.send(flare.FLModel(params=model.params))


def _site_2_8(n: int) -> list[float]:
    """Their executor, their pipe, their script."""
    import uuid

    import numpy
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FLContextKey, ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.signal import Signal
    from nvflare.apis.utils.decomposers import flare_decomposers
    from nvflare.app_common.decomposers import common_decomposers
    from nvflare.app_common.executors.task_exchanger import TaskExchanger
    from nvflare.fuel.utils.pipe.file_pipe import FilePipe

    flare_decomposers.register()
    common_decomposers.register()
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "pipe")
        pipe = FilePipe("PASSIVE", root)

        class Engine:
            """As much of an engine as the executor asks for."""

            def get_component(self, _: str) -> Any:
                return pipe

        context = FLContext()
        context.set_prop(ReservedKey.ENGINE, Engine())
        context.set_prop(ReservedKey.RUN_NUM, "job")
        context.set_prop(ReservedKey.IDENTITY_NAME, "site")
        executor = TaskExchanger("pipe")
        executor.handle_event(EventType.START_RUN, context)
        theirs = {"CLASS_NAME": f"{FilePipe.__module__}.FilePipe", "ARG": {"mode": "ACTIVE", "root_path": root}}
        exchange = {
            "pipe_channel_name": "task",
            "pipe": theirs,
            "exchange_format": "numpy",
            "train_task_name": "train",
            "launch_once": True,
        }
        config = Path(folder) / "config" / "client_api_config.json"
        config.parent.mkdir()
        config.write_text(json.dumps({"site_name": "site", "job_id": "job", "TASK_EXCHANGE": exchange}))
        executor.handle_event(EventType.BEFORE_TASK_EXECUTION, context)
        program = subprocess.Popen(
            [sys.executable, SCRIPT, "script"], cwd=folder, env={**os.environ, "CLIENT_API_TYPE": "EX_PROCESS_API"}
        )
        times = []
        try:
            for number in range(n + WARM):
                task = DXO(DataKind.WEIGHTS, data={"w": numpy.zeros(16)}).to_shareable()
                task.set_header(FLContextKey.TASK_ID, str(uuid.uuid4()))
                task.set_header(FLContextKey.TASK_NAME, "train")
                task.set_header("current_round", number)
                task.set_header("num_rounds", n)
                start = time.perf_counter()
                answer = executor.execute("train", task, context, Signal())
                times.append(time.perf_counter() - start)
                if answer.get_return_code() != "OK":
                    raise RuntimeError(f"the task failed: {answer.get_return_code()}")
            executor.handle_event(EventType.ABOUT_TO_END_RUN, context)
            program.wait(10)
        finally:
            program.kill()
            program.wait()
    return times[WARM:]


async def ours(executor: Any, n: int) -> list[float]:
    """Our executor with their script."""
    import numpy

    from dfm_async.exchange import Task

    times = []
    for number in range(n + WARM):
        task = Task("train", {"w": numpy.zeros(16)}, round=number, total_rounds=n)
        start = time.perf_counter()
        await executor.execute(task)
        times.append(time.perf_counter() - start)
    return times[WARM:]


async def with_script_of_2_8(python: str, n: int) -> float:
    """The median seconds of a task, with our executor and their script over files."""
    from dfm_async.exchange import FilePipeTransport, LauncherExecutor, SubprocessLauncher

    launcher = SubprocessLauncher([python, SCRIPT, "script"], on_output=lambda _: None)
    async with LauncherExecutor(launcher, transport=FilePipeTransport()) as executor:
        return statistics.median(await ours(executor, n))


async def _site_2_9(n: int) -> list[float]:
    from dfm_async.exchange import LauncherExecutor, SubprocessLauncher
    from dfm_async.exchange.cell.transport import CellTransport

    launcher = SubprocessLauncher([sys.executable, SCRIPT, "script"], on_output=lambda _: None)
    async with LauncherExecutor(launcher, transport=CellTransport()) as executor:
        return await ours(executor, n)


if __name__ == "__main__":
    if sys.argv[1] == "script":
        _script()
    elif sys.argv[1] == "site_2_8":
        print("SECONDS", statistics.median(_site_2_8(int(sys.argv[2]))), flush=True)
    else:
        print("SECONDS", statistics.median(asyncio.run(_site_2_9(int(sys.argv[2])))), flush=True)
