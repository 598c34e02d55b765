"""A site with NVFLARE 2.9 in its own process: runs a training script under our executor, and tells what came of it."""

import asyncio
import json
import sys

import numpy as np

from dfm_async.errors import ProgramExited
from dfm_async.exchange import LauncherExecutor, Model, SubprocessLauncher, Task
from dfm_async.exchange.cell.transport import CellTransport


async def main(script: str) -> dict[str, object]:
    """Three rounds, a large array, a program that is killed, and one that is launched after it."""
    metrics: list[tuple[dict[str, float], int | None]] = []
    lines: list[str] = []
    launcher = SubprocessLauncher([sys.executable, script], on_output=lambda record: lines.append(record.message))
    found: dict[str, object] = {}
    async with LauncherExecutor(
        launcher,
        transport=CellTransport(),
        site="north",
        job="j1",
        on_metrics=lambda values, step: metrics.append((dict(values), step)),
    ) as executor:
        params = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
        for number in range(3):
            result = await executor.execute(Task("train", Model(params=params), round=number, total_rounds=3))
            params = result.data.params
        found["params"] = params["w"].tolist()
        found["sum"] = result.data.metrics["sum"]
        large = np.random.default_rng(0).random(3_000_000)
        result = await executor.execute(Task("train", Model(params={"w": large}), round=3, total_rounds=4))
        found["large"] = bool(np.array_equal(result.data.params["w"], large + 1))
        execution = asyncio.ensure_future(
            executor.execute(Task("train", Model(params={"w": large}), round=4, total_rounds=5))
        )
        await asyncio.sleep(0)
        launcher._process.signal(9)  # type: ignore[union-attr]
        try:
            await execution
        except ProgramExited as error:
            found["killed"] = error.exit_code
        result = await executor.execute(Task("train", params, round=5, total_rounds=6))
        found["again"] = result.data.params["w"].tolist()
    found["metrics"] = metrics
    found["lines"] = [line for line in lines if line.startswith(("site", "the loop"))]
    return found


print("FOUND " + json.dumps(asyncio.run(main(sys.argv[1]))), flush=True)
