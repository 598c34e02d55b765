"""A pipeline over a script of NVFLARE, in the process of a site: prints its results and metrics."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from dfm_async import Federation, Pipeline, PlaceParam, Program, Session, Yield
from dfm_async.events import Metrics
from dfm_async.exchange import LauncherExecutor, Model, SubprocessLauncher, Task

SCRIPT = Path(__file__).with_name("cross_site_train.py")
STAND_INS = Path(__file__).with_name("stand_ins")


async def pipeline(python: str, transport: str) -> dict[str, object]:
    """Trains, asks for the model, and evaluates it: three operations, one program."""
    federation = Federation("training")
    site = federation.site("site_1")
    program = Program(argv=[python, SCRIPT], transport=transport, site_name="site-1")  # type: ignore[arg-type]

    @site.operation(program=program)
    def learn(model: Model, round: int, total_rounds: int) -> Model:  # noqa: A002 - what NVFLARE calls it
        raise NotImplementedError

    @site.operation(program=program)
    def submit_model() -> Model:
        raise NotImplementedError

    @site.operation(program=program)
    def validate(model: Model) -> Model:
        raise NotImplementedError

    with Pipeline("cross-site evaluation") as pipeline:
        trained = learn(PlaceParam("model"), 0, 1)
        submitted = submit_model(after=trained)
        Yield(trained, place="learn")
        Yield(submitted, place="submit_model")
        Yield(validate(submitted), place="validate")
    found: dict[str, object] = {}
    metrics: dict[str, object] = {}
    async with Session(federation, target="inline") as session:
        job = await session.execute(pipeline, {"model": Model(params={"w": np.zeros(2)})})
        for result in await job.collect():
            meta = dict(result.value.meta)
            meta["meta"].pop("job_id")
            found[result.place] = {
                **meta,
                "params": None if result.value.params is None else result.value.params["w"].tolist(),
                "metrics": result.value.metrics,
            }
        async for event in job.events():
            if isinstance(event, Metrics):
                metrics.update({name: [value, event.step] for name, value in event.values.items()})
    return {**found, "logged": metrics}


async def tensors(python: str, *args: str, **params: str) -> dict[str, object]:
    """One round with a stand-in for PyTorch, whose tensors NVFLARE converts."""
    from dfm_async.exchange.cell.transport import CellTransport

    launcher = SubprocessLauncher(
        [python, SCRIPT, *args], environment={"PYTHONPATH": str(STAND_INS)}, shutdown_timeout=0.5
    )
    async with LauncherExecutor(launcher, transport=CellTransport(**params)) as executor:  # type: ignore[arg-type]
        result = await executor.execute(Task("train", {"w": np.full(2, 7.0)}, round=0, total_rounds=1))
    if not result.ok:
        return {"reason": result.reason}
    model = result.data
    return {"params": model.params["w"].tolist(), "kind": model.params_type, "types": model.meta["types"]}


async def main(python: str, transport: str) -> dict[str, object]:
    """The pipeline; with 2.9 also what becomes of tensors."""
    if transport == "nvflare-2.8":
        return await pipeline(python, transport)
    found, converted, refused = await asyncio.gather(  # most of their time is waiting
        pipeline(python, transport),
        tensors(python, params_exchange_format="pytorch", params_transfer_type="DIFF"),
        tensors(python, "--tensors"),
    )
    return {**found, "tensors": converted, "refused": refused}


print("FOUND " + json.dumps(asyncio.run(main(*sys.argv[1:]))), flush=True)
