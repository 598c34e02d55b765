"""With the real NVFLARE: its scripts under our executor, our agent in its jobs."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, Pipeline, PlaceParam, Result, Session, Yield
from dfm_async.errors import ProgramExited, TaskAborted
from dfm_async.events import Metrics
from dfm_async.exchange import (
    ExecutorOptions,
    FilePipeTransport,
    LauncherExecutor,
    Model,
    Program,
    SubprocessLauncher,
    Task,
)
from dfm_async.exchange.task import ProgramState
from tests.interop.conftest import PROGRAMS, found_by, output_of
from tests.interop.jobs import RunningJob, client_2_8, client_2_9

STOCK = str(PROGRAMS / "stock_train.py")
AGENT = f"env -u PYTHONPATH {sys.executable} {PROGRAMS / 'our_agent.py'}"
INITIAL = np.arange(1, 10, dtype=np.float32).reshape(3, 3)


METRICS = sorted(
    [site, f"loss of {site} in simulate_job", 1.0 / (1 + number), number]
    for site in ("site-1", "site-2")
    for number in range(2)
)


class Stock:
    """The stock script of 2.8.3 under our executor, and what it says."""

    def __init__(self, python: Path, *args: str, options: ExecutorOptions | None = None, **launcher: Any) -> None:
        self.lines: list[str] = []
        self.metrics: list[tuple[dict[str, Any], int | None]] = []
        self.launcher = SubprocessLauncher(
            [str(python), STOCK, *args], on_output=lambda record: self.lines.append(record.message), **launcher
        )
        self.executor = LauncherExecutor(
            self.launcher,
            options,
            transport=FilePipeTransport(),
            site="north",
            job="j1",
            on_metrics=lambda values, step: self.metrics.append((dict(values), step)),
        )


def train(params: Any, number: int = 0) -> Task:
    return Task("train", params, round=number, total_rounds=5)


@pytest.mark.timeout(180)
async def test_an_unmodified_script_of_2_8_trains_under_our_executor(nvflare_2_8: Path) -> None:
    stock = Stock(nvflare_2_8)
    params: Any = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    async with stock.executor as executor:
        for number in range(3):
            result = await executor.execute(train(Model(params=params), number))
            params = result.data.params
        assert result.ok
        assert result.data.metrics == {"sum": pytest.approx(float(np.sum(params["w"])))}
        assert result.data.meta == {"NUM_STEPS_CURRENT_ROUND": 1}
        large = np.random.default_rng(0).random(3_000_000)
        result = await executor.execute(train({"w": large}, 3))
        assert np.array_equal(result.data.params["w"], large + 1)
    assert np.array_equal(params["w"], np.arange(6, dtype=np.float32).reshape(2, 3) + 3)
    assert stock.metrics == [({"loss": 1.0 / (1 + number)}, number) for number in range(4)]
    assert stock.lines[0] == "site north"
    assert stock.lines[-1] == "the loop has ended", "it was asked to end, and did so by itself"


async def test_a_script_of_2_8_that_is_killed_fails_its_task_and_is_launched_again(nvflare_2_8: Path) -> None:
    stock = Stock(nvflare_2_8)
    async with stock.executor as executor:
        await executor.execute(train({"w": np.zeros(3)}))
        execution = asyncio.ensure_future(executor.execute(train({"w": np.zeros(3_000_000)}, 1)))
        await asyncio.sleep(0)
        process = stock.launcher._process
        assert process is not None
        process.signal(signal.SIGKILL)
        with pytest.raises(ProgramExited) as caught:
            await execution
        assert caught.value.exit_code == -signal.SIGKILL
        result = await executor.execute(train({"w": np.zeros(3)}, 2))
        assert result.data.params["w"].tolist() == [1.0, 1.0, 1.0]


async def test_a_script_of_2_8_for_one_task_is_launched_for_each(nvflare_2_8: Path) -> None:
    stock = Stock(nvflare_2_8, "--once", launch_once=False)
    async with stock.executor as executor:
        for number in range(2):
            result = await executor.execute(train({"w": np.full(3, float(number))}, number))
            assert result.data.params["w"].tolist() == [number + 1.0] * 3
    assert stock.lines.count("the loop has ended") == 2
    assert stock.launcher.status().state is ProgramState.SUCCESS


async def test_a_script_of_2_8_is_ended_by_an_abort(nvflare_2_8: Path) -> None:
    stock = Stock(nvflare_2_8)
    async with stock.executor as executor:
        await executor.execute(train({"w": np.zeros(3)}))
        abort = asyncio.Event()
        execution = asyncio.ensure_future(executor.execute(train({"w": np.zeros(3)}, 1), abort=abort))
        await asyncio.sleep(0)
        abort.set()
        with pytest.raises(TaskAborted):
            await execution
        assert executor.status().state is not ProgramState.RUNNING


@pytest.fixture(scope="module")
def jobs(
    nvflare_2_8: Path, nvflare_2_9: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningJob]]:
    """Jobs of NVFLARE in which our agent trains; most of their time is waiting, so they run beside each other."""
    there = f"env -u PYTHONPATH {nvflare_2_9} {PROGRAMS / 'our_agent.py'}"
    clients = {
        "2.8": (nvflare_2_8, client_2_8(AGENT, launch_once=True)),
        "2.8, a program for each task": (nvflare_2_8, client_2_8(AGENT, launch_once=False)),
        "2.9": (nvflare_2_9, client_2_9(there, launch_once=True)),
    }
    found = {
        name: RunningJob(tmp_path_factory.mktemp("job"), python, client, rounds=2)
        for name, (python, client) in clients.items()
    }
    yield found
    for job in found.values():
        job.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["2.8", "2.8, a program for each task", "2.9"])
def test_our_agent_trains_in_a_job_of_nvflare(jobs: dict[str, RunningJob], name: str) -> None:
    found = jobs[name].ended()
    assert "Finished FedAvg." in found["log"], found["log"][-5000:]
    assert np.array_equal(found["model"], INITIAL + 2)
    assert sorted(found["metrics"]) == METRICS


@pytest.mark.timeout(180)
def test_an_unmodified_script_of_2_9_trains_under_our_executor(nvflare_2_9: Path) -> None:
    found = found_by(nvflare_2_9, PROGRAMS / "site_2_9.py", STOCK)  # NVFLARE's threads do not keep its process
    assert found["params"] == (np.arange(6).reshape(2, 3) + 3.0).tolist()
    assert found["sum"] == pytest.approx(np.sum(found["params"]))
    assert found["large"] is True
    assert found["killed"] == -signal.SIGKILL
    assert found["again"] == (np.arange(6).reshape(2, 3) + 4.0).tolist()
    assert sorted(step for _, step in found["metrics"])[:4] == [0, 1, 2, 3]
    assert found["lines"] == ["site north", "site north", "the loop has ended"]


@pytest.mark.timeout(180)
def test_a_cell_that_is_cancelled_while_it_starts_does_not_keep_the_process(nvflare_2_9: Path) -> None:
    assert "LEFT []" in output_of(nvflare_2_9, PROGRAMS / "cancelled_2_9.py")


async def test_a_script_of_2_8_is_an_operation_of_a_pipeline(nvflare_2_8: Path) -> None:
    federation = Federation("training")
    site = federation.site("north")
    program = Program(argv=[str(nvflare_2_8), STOCK], transport="nvflare-2.8")

    @site.operation(program=program)
    def train(model: Model, round: int, total_rounds: int = 2) -> Model:  # noqa: A002 - what NVFLARE calls it
        raise NotImplementedError

    with Pipeline("rounds") as rounds:
        first = train(PlaceParam("model"), 0)
        Yield(train(first, 1), "trained")
    async with Session(federation) as session:
        job = await session.execute(rounds, {"model": Model(params={"w": np.zeros(3)})})
        events = [event async for event in job.events()]
    [result] = [event for event in events if isinstance(event, Result)]
    assert result.value.params["w"].tolist() == [2.0, 2.0, 2.0]
    found = [event for event in events if isinstance(event, Metrics)]
    assert [(event.values, event.step) for event in found] == [({"loss": 1.0}, 0), ({"loss": 0.5}, 1)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["nvflare-2.8", "nvflare-2.9"])
def test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites(
    nvflare_2_8: Path, nvflare_2_9: Path, transport: str
) -> None:
    python = nvflare_2_8 if transport == "nvflare-2.8" else nvflare_2_9
    found = found_by(nvflare_2_9, PROGRAMS / "cross_site.py", python, transport)
    assert found["learn site-1"]["params"] == [1.0, 1.0]
    assert found["learn site-2"]["params"] == [2.0, 2.0], "it continues where the first one stopped"
    for number, site in enumerate(("site-1", "site-2")):
        here = f"site_{number + 1}"
        own = [found[place] for place in (f"learn {site}", f"submit_model {site}", f"validate {site} {here}")]
        assert [seen["kind"] for seen in own] == ["train", "submit", "evaluate"]
        assert [seen["site"] for seen in own] == [site] * 3
        assert len({seen["process"] for seen in own}) == 1, "one process serves the three operations"
        assert own[0]["meta"]["site_name"] == site
        assert own[1]["meta"] == {"site_name": site, "submit_model_name": "best_model"}
        assert own[1]["params"] == [number + 1.0] * 2
        assert own[2]["metrics"] == {"loss": 0.0}
    assert found["validate site-1 site_2"]["metrics"] == {"loss": -1.0}
    assert found["validate site-2 site_1"]["metrics"] == {"loss": 1.0}
    assert (found["difference"]["params"], found["difference"]["params_type"]) == ([0.25, 0.25], "DIFF")
    if transport == "nvflare-2.8":
        assert (found["converted"]["params"], found["converted"]["params_type"]) == ([1.0, 1.0], "DIFF")
    assert found["logged"] == {
        "scalar": [1.5, 3],
        "scalars/a": [1.0, 3],
        "scalars/b": [2.0, 3],
        "metrics/w": [3.0, 4],
        "rate": [0.1, None],
        "params/layers": [2, None],
        "params/name": ["net", None],
        "metric": [4.0, 5],
        "metrics/m": [5.0, 5],
        "text": ["words", None],
        "tag": ["blue", None],
        "tags/t": ["red", None],
    }
    if transport == "nvflare-2.9":
        assert found["tensors"] == {"params": [1.0, 1.0], "kind": "DIFF", "types": ["Tensor"]}
        assert "Set params_exchange_format='pytorch'" in found["refused"]["reason"]
