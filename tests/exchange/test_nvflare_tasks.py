"""What programs of NVFLARE get with their tasks: the format of parameters, headers, models without parameters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, Pipeline, PlaceParam, Program, Session, Yield
from dfm_async.exchange import ExecutorOptions, LauncherExecutor, Model, SubprocessLauncher, Task
from dfm_async.exchange.cell.gate import CellGate
from dfm_async.exchange.filepipe.gate import FilePipeGate
from dfm_async.exchange.nvflare import named_metrics

SEEN = """
import json, os
from dfm_async.errors import ConversionError
from dfm_async.exchange import Model, sync

agent = sync.init()
config = json.load(open("config/client_api_config.json"))["TASK_EXCHANGE"]
while (task := sync.receive()) is not None:
    data = task.data
    if task.round == 99:
        try:
            sync.send(Model(meta={"nothing": "else"}))
        except ConversionError:
            continue
    seen = {
        "name": task.name,
        "agent": [agent.site, agent.job],
        "config": {name: config[name] for name in ("exchange_format", "server_expected_format", "transfer_type")},
        "meta": None if data is None else dict(data.meta),
        "params": None if data is None or data.params is None else sorted(data.params),
        "process": os.getpid(),
    }
    sync.send(Model(params={}, metrics={"loss": 1.0}, meta=seen))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "seen.py"
    path.write_text(SEEN)
    return path


@asynccontextmanager
async def launched(
    script: Path, options: ExecutorOptions | None = None, **gate: Any
) -> AsyncIterator[LauncherExecutor]:
    launcher = SubprocessLauncher([sys.executable, script])
    async with LauncherExecutor(launcher, options, transport=FilePipeGate(**gate), site="site-1", job="j1") as executor:
        yield executor


async def test_tasks_have_the_headers_that_nvflare_puts_into_the_meta(script: Path) -> None:
    ours = {"site_name": "site-1", "job_id": "j1"}
    weights = {"w": np.zeros(2)}
    cases: list[tuple[str, Any, dict[str, Any], list[str] | None]] = [
        ("train", Model(params=weights, meta={"a": 1}), {"a": 1, **ours}, ["w"]),
        ("train", weights, ours, ["w"]),
        ("train", None, ours, []),
        ("train", Model(meta={"start_round": 2}), {"start_round": 2, **ours}, []),
        ("validate", Model(params=weights, meta={"validate_type": "x"}), {"validate_type": "x", **ours}, ["w"]),
        ("submit_model", None, {"submit_model_name": "best_model", **ours}, None),
        ("submit_model", Model(meta={"submit_model_name": "mine"}), {"submit_model_name": "mine", **ours}, None),
        ("submit_model", Model(params=weights), ours, ["w"]),
    ]
    async with launched(script) as executor:
        for name, data, meta, params in cases:
            seen = (await executor.execute(Task(name, data, round=0, total_rounds=1))).data.meta
            assert (seen["name"], seen["meta"], seen["params"]) == (name, meta, params), (name, data)
            assert seen["agent"] == ["site-1", "j1"]
        failed = await executor.execute(Task("train", None, round=99, total_rounds=1))
    assert failed.rc == "EXECUTION_EXCEPTION", "results need parameters or metrics; files carry no reason"


async def test_the_task_that_asks_for_a_model_may_have_another_name(script: Path) -> None:
    async with launched(script, ExecutorOptions(submit_model_task_name="hand_over")) as executor:
        seen = (await executor.execute(Task("hand_over"))).data.meta
    assert seen["meta"]["submit_model_name"] == "best_model"


async def test_the_gate_of_2_8_writes_the_format_of_parameters(script: Path) -> None:
    async with launched(script, params_exchange_format="pytorch", params_transfer_type="DIFF") as executor:
        seen = (await executor.execute(Task("train", {"w": np.zeros(2)}, round=0, total_rounds=1))).data.meta
    assert seen["config"] == {
        "exchange_format": "pytorch",
        "server_expected_format": "numpy",
        "transfer_type": "DIFF",
    }


@pytest.mark.parametrize("kind", [FilePipeGate, CellGate])
def test_formats_that_nvflare_does_not_have_are_refused(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"params_exchange_format must be one of numpy, pytorch, .* not 'torch'"):
        kind(params_exchange_format="torch")
    with pytest.raises(ValueError, match="params_transfer_type must be FULL or DIFF, not 'full'"):
        kind(params_transfer_type="full")


def test_records_of_trackers_become_metrics_with_a_name_each() -> None:
    assert named_metrics("loss", 0.5, "SCALAR") == {"loss": 0.5}
    assert named_metrics("metrics", {"a": 1, "b": {"c": 2.0}}, "METRICS") == {"metrics/a": 1, "metrics/b/c": 2.0}
    assert named_metrics("params", {"layers": [1, 2], "rate": 0.1}, "PARAMETERS") == {
        "params/layers": "[1, 2]",
        "params/rate": 0.1,
    }
    assert named_metrics("note", None, "TAG") == {"note": "None"}
    assert named_metrics("metrics", {}, "METRICS") == {}


# in pipelines


async def test_operations_of_one_program_share_its_process(script: Path) -> None:
    federation = Federation("training")
    site = federation.site("site_1")
    program = Program(
        argv=[sys.executable, script], transport="nvflare-2.8", site_name="site-1", params_exchange_format="raw"
    )

    @site.operation(program=program)
    def fit(model: Model, round: int, total_rounds: int) -> Model:  # noqa: A002 - what NVFLARE calls it
        raise NotImplementedError

    @site.operation(program=program)
    def submit_model() -> Model:
        raise NotImplementedError

    @site.operation(program=program)
    def validate(model: Model) -> Model:
        raise NotImplementedError

    with Pipeline("cross-site") as pipeline:
        trained = fit(PlaceParam("model"), 0, 1)
        submitted = submit_model(after=trained)
        Yield(trained, place="fit")
        Yield(submitted, place="submit_model")
        Yield(validate(submitted), place="validate")
    async with Session(federation) as session:
        job = await session.execute(pipeline, {"model": Model(params={"w": np.zeros(2)})})
        found = {result.place: result.value.meta for result in await job.collect()}
    assert {place: meta["name"] for place, meta in found.items()} == {
        "fit": "train",
        "submit_model": "submit_model",
        "validate": "validate",
    }
    assert len({meta["process"] for meta in found.values()}) == 1
    assert found["fit"]["meta"]["site_name"] == found["fit"]["agent"][0] == "site-1"
    assert found["fit"]["config"]["exchange_format"] == "raw"
    assert found["submit_model"]["meta"]["submit_model_name"] == "best_model"


async def test_operations_with_other_names_give_train_tasks_as_the_options_name_them(script: Path) -> None:
    federation = Federation("training")
    options = ExecutorOptions(train_task_name="learn", evaluate_task_name="score")
    site = federation.site("north")

    def declared(model: Model) -> Model:
        raise NotImplementedError

    plain = Program(argv=[sys.executable, script], transport="nvflare-2.8", options=options)
    named = dataclasses.replace(plain, task="other")
    anything = site.operation(declared, name="anything", program=plain)
    score = site.operation(declared, name="score", program=plain)
    other = site.operation(declared, name="validate", program=named)
    with Pipeline("names") as pipeline:
        for operation in (anything, score, other):
            Yield(operation(Model(params={})), place=operation.name)
    async with Session(federation, target="inline") as session:
        results = await (await session.execute(pipeline)).collect()
    found = {result.place: result.value.meta["name"] for result in results}
    assert found == {"anything": "learn", "score": "score", "validate": "other"}
