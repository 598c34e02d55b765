"""A pipeline over a script of NVFLARE, in the process of a site: prints its results and metrics."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dfm_async import Federation, Pipeline, PlaceParam, Program, Session, Yield
from dfm_async.events import Metrics
from dfm_async.exchange import LauncherExecutor, Model, SubprocessLauncher, Task

SCRIPT = Path(__file__).with_name("cross_site_train.py")
STAND_INS = Path(__file__).with_name("stand_ins")


async def pipeline(python: str, transport: str) -> dict[str, object]:
    """Two sites train one model in turn, then each evaluates the models of both: one program and process per site."""
    federation = Federation("training")
    first, second = federation.site("site_1"), federation.site("site_2")
    program = Program(argv=[python, SCRIPT], transport=transport, site_name="site-1")  # type: ignore[arg-type]

    @first.operation(program=program)
    def learn(model: Model, round: int, total_rounds: int) -> Model:  # noqa: A002 - what NVFLARE calls it
        raise NotImplementedError

    @first.operation(program=program)
    def submit_model() -> Model:
        raise NotImplementedError

    @first.operation(program=program)
    def validate(model: Model) -> Model:
        raise NotImplementedError

    @first.operation(program=replace(program, params_transfer_type="DIFF"))
    def learn_converted(model: Model, round: int, total_rounds: int) -> Model:  # noqa: A002
        raise NotImplementedError

    for operation in (learn, submit_model, validate):
        second.operation(operation, program=replace(program, site_name="site-2"))

    with Pipeline("cyclic training and cross-site evaluation") as pipeline:
        model, rounds = PlaceParam("model"), {"round": 0, "total_rounds": 1}
        Yield(learn(PlaceParam("changed"), **rounds, site=first), place="difference")
        if transport == "nvflare-2.8":  # the tensors of 2.9 are converted as well
            Yield(learn_converted(model, **rounds), place="converted")
        trained = learn(model, **rounds, site=first)
        Yield(trained, place="learn site-1")
        trained = learn(trained, **rounds, site=second)
        Yield(trained, place="learn site-2")
        for owner, name in ((first, "site-1"), (second, "site-2")):
            submitted = submit_model(site=owner, after=trained)
            Yield(submitted, place=f"submit_model {name}")
            for judge in (first, second):
                Yield(validate(submitted, site=judge), place=f"validate {name} {judge.name}")
    found: dict[str, object] = {}
    metrics: dict[str, object] = {}
    params = {"w": np.zeros(2)}
    models = {"model": Model(params=params), "changed": Model(params=params, meta={"send": "DIFF"})}
    async with Session(federation, target="inline") as session:
        job = await session.execute(pipeline, models)
        for result in await job.collect():
            meta = dict(result.value.meta)
            meta["meta"].pop("job_id")
            found[result.place] = {
                **meta,
                "params": None if result.value.params is None else result.value.params["w"].tolist(),
                "params_type": result.value.params_type,
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
