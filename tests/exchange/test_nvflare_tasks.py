"""What programs of NVFLARE get with their tasks: the format of parameters, headers, models without parameters."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, Pipeline, Program, Session, Yield
from dfm_async.errors import HandshakeRefused
from dfm_async.exchange import ExecutorOptions, LauncherExecutor, Model, SubprocessLauncher, Task
from dfm_async.exchange.filepipe.transport import API_TYPE, EX_PROCESS, FilePipeTransport, read_client_config
from dfm_async.exchange.nvflare import named_metrics
from dfm_async.exchange.transports import site_transport

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
    async with LauncherExecutor(
        launcher, options, transport=FilePipeTransport(**gate), site="site-1", job="j1"
    ) as executor:
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


def test_a_job_with_another_pipe_than_files_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "client_api_config.json"
    pipe = {"CLASS_NAME": "nvflare.fuel.utils.pipe.cell_pipe.CellPipe", "ARG": {}}
    path.write_text(json.dumps({"TASK_EXCHANGE": {"pipe": pipe}}))
    with pytest.raises(HandshakeRefused, match=r"names .*cell_pipe\.CellPipe, but only .*\.FilePipe is supported"):
        read_client_config(path, {API_TYPE: EX_PROCESS})


@pytest.mark.parametrize("transport", ["nvflare-2.8", "nvflare-2.9"])
def test_formats_that_nvflare_does_not_have_are_refused(transport: str) -> None:
    with pytest.raises(ValueError, match=r"params_exchange_format must be one of numpy, pytorch, .* not 'torch'"):
        site_transport(transport, params_exchange_format="torch")
    with pytest.raises(ValueError, match="params_transfer_type must be FULL or DIFF, not 'full'"):
        site_transport(transport, params_transfer_type="full")


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


async def test_operations_give_tasks_as_the_options_name_them(script: Path) -> None:
    federation = Federation("training")
    site = federation.site("north")

    def declared(model: Model) -> Model:
        raise NotImplementedError

    plain = Program(
        argv=[sys.executable, script],
        transport="nvflare-2.8",
        site_name="site-1",
        params_exchange_format="raw",
        options=ExecutorOptions(train_task_name="learn", evaluate_task_name="score"),
    )
    named = dataclasses.replace(plain, task="other")
    anything = site.operation(declared, name="anything", program=plain)
    score = site.operation(declared, name="score", program=plain)
    other = site.operation(declared, name="validate", program=named)
    with Pipeline("names") as pipeline:
        for operation in (anything, score, other):
            Yield(operation(Model(params={})), place=operation.name)
    async with Session(federation, target="inline") as session:
        results = await (await session.execute(pipeline)).collect()
    found = {result.place: result.value.meta for result in results}
    assert {place: meta["name"] for place, meta in found.items()} == {
        "anything": "learn",
        "score": "score",
        "validate": "other",
    }
    assert found["anything"]["process"] == found["score"]["process"] != found["validate"]["process"]
    assert found["anything"]["meta"]["site_name"] == found["anything"]["agent"][0] == "site-1"
    assert found["anything"]["config"]["exchange_format"] == "raw"
