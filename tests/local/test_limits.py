"""Limits of a site in worker processes: GPUs, lost workers, waiting calls of killed ones."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, ForEach, JobFailed, LocalOptions, Pipeline, RetryPolicy, Session, WorkerLost, Yield
from dfm_async.workers.gpu_workers import visible_devices
from tests.support.pipelines import pipeline_of
from tests.support.waiting import until

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")
"""What the code of a module saw when it was imported."""

fed = Federation("gpus")
lab = fed.site("lab", gpus=2, workers=2)


def note(folder: str, name: str) -> None:
    Path(folder, name).touch()


@lab.operation
def items(n: int) -> list[int]:
    return list(range(n))


@lab.operation
def without() -> tuple[int, str | None]:
    return os.getpid(), AT_IMPORT


@lab.operation(gpus=1)
def one(x: int) -> tuple[int, str | None, str | None]:
    time.sleep(0.05)
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), AT_IMPORT


@lab.operation(gpus=2)
def both(x: int) -> tuple[int, str | None, str | None]:
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), AT_IMPORT


@lab.operation(gpus=1)
async def awaited(x: int) -> tuple[int, str | None]:
    await asyncio.sleep(0.01)
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


@lab.operation(gpus=2)
async def awaits_for_ever(folder: str) -> None:
    note(folder, "began")
    await asyncio.Event().wait()


@lab.operation(gpus=2, deadline=0.3)
def hangs() -> None:
    threading.Event().wait()


@lab.operation(gpus=1, retry=RetryPolicy(attempts=1, on_worker_lost=2))
def dies_once(folder: str) -> int:
    try:
        Path(folder, "died").touch(exist_ok=False)
    except FileExistsError:
        return os.getpid()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@lab.operation(gpus=1)
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@lab.operation(gpus=1)
def unsendable(x: Any = None) -> Any:
    return threading.Lock()


@lab.operation(limit=1)
async def holds(x: int, folder: str) -> int:
    note(folder, f"{x}-{os.getpid()}")
    if x == 0:
        await asyncio.Event().wait()
    return x


def holder(folder: Path) -> int | None:
    """The process that runs the call which holds the limit."""
    return next((int(path.name.partition("-")[2]) for path in folder.glob("0-*")), None)


with Pipeline() as ones:
    with ForEach(items(6)) as x:
        Yield(one(x))


async def test_calls_run_in_processes_that_see_only_their_gpus() -> None:
    async with Session(fed) as session:
        (home, seen) = (await (await session.execute(pipeline_of(without))).first()).value
        found = [result.value for result in await (await session.execute(ones)).collect()]
        assert seen is None
        assert {devices for _, devices, _ in found} == {"0", "1"}
        assert all(imported == devices for _, devices, imported in found), "set before the code is imported"
        assert len({pid for pid, _, _ in found}) == 2
        assert home not in {pid for pid, _, _ in found}
        assert "gpus" in {limit.limit for limit in session.stats().sites["lab"].limits}


async def test_another_set_of_gpus_replaces_workers() -> None:
    async with Session(fed) as session:
        first = {result.value[0] for result in await (await session.execute(ones)).collect()}
        pid, devices, _ = (await (await session.execute(pipeline_of(both, x=1))).first()).value
        assert devices == "0,1"
        assert pid not in first
        pids = {worker.pid for worker in session.stats().sites["lab"].workers}
        assert pid in pids
        assert not pids & first, "they ended before the other one started"
        again, _, _ = (await (await session.execute(pipeline_of(both, x=1))).first()).value
        assert again == pid


async def test_an_idle_gpu_worker_ends() -> None:
    federation = Federation("idle")
    federation.site("lab", gpus=2, idle_after=0.1).operation(both)
    async with Session(federation) as session:
        pid, _, _ = (await (await session.execute(pipeline_of(both, x=1))).first()).value
        await until(lambda: pid not in {worker.pid for worker in session.stats().sites["lab"].workers})
        assert session.stats().sites["lab"].restarts == 0


async def test_async_code_runs_with_its_gpus_too() -> None:
    async with Session(fed) as session:
        (home, _) = (await (await session.execute(pipeline_of(without))).first()).value
        pid, devices = (await (await session.execute(pipeline_of(awaited, x=1))).first()).value
        assert devices in ("0", "1")
        assert pid != home


async def test_cancel_stops_async_code_with_gpus(tmp_path: Path) -> None:
    async with Session(fed) as session:
        job = await session.execute(pipeline_of(awaits_for_ever, folder=str(tmp_path)))
        await until((tmp_path / "began").exists)
        await job.cancel()
        assert (await (await session.execute(pipeline_of(both, x=1))).first()).value[1] == "0,1"


async def test_a_call_that_hangs_frees_its_gpus_with_its_process() -> None:
    async with Session(fed) as session:
        job = await session.execute(pipeline_of(hangs))
        with pytest.raises(JobFailed, match=r"deadline of 0\.3 s"):
            await job
        assert (await (await session.execute(pipeline_of(both, x=1))).first()).value[1] == "0,1"


async def test_a_lost_gpu_worker_costs_its_call_alone(tmp_path: Path) -> None:
    async with Session(fed) as session:
        pipeline = pipeline_of(dies)
        with pytest.raises(JobFailed) as failed:
            await (await session.execute(pipeline))
        assert "WorkerLost" in str(failed.value)
        assert isinstance(failed.value.errors[0].__cause__, WorkerLost)
        job = await session.execute(pipeline_of(dies_once, folder=str(tmp_path)))
        assert (await job.first()).value > 0


async def test_a_result_with_gpus_that_cannot_be_sent_is_an_error() -> None:
    async with Session(fed) as session:
        with pytest.raises(JobFailed, match="EncodingError"):
            await (await session.execute(pipeline_of(unsendable)))


async def test_the_loss_of_a_worker_frees_what_its_calls_held(tmp_path: Path) -> None:
    pipeline = pipeline_of(holds, "x", "folder")
    async with Session(fed, options=LocalOptions(lanes=2, jobs_per_lane=1)) as session:
        first = await session.execute(pipeline, {"x": 0, "folder": str(tmp_path)})
        await until(lambda: holder(tmp_path))
        home = holder(tmp_path)
        second = await session.execute(pipeline, {"x": 1, "folder": str(tmp_path)})
        await until(lambda: session.stats().sites["lab"].waiting == {"limit": 1})
        assert home is not None
        os.kill(home, signal.SIGKILL)
        assert (await second.first()).value == 1
        with pytest.raises(Exception, match="SIGKILL"):
            await first


async def test_a_killed_worker_waits_for_nothing_any_longer(tmp_path: Path) -> None:
    pipeline = pipeline_of(holds, "x", "folder")
    async with Session(fed, options=LocalOptions(lanes=2, jobs_per_lane=1)) as session:
        first = await session.execute(pipeline, {"x": 0, "folder": str(tmp_path)})
        await until(lambda: holder(tmp_path))
        home = holder(tmp_path)
        second = await session.execute(pipeline, {"x": 1, "folder": str(tmp_path)})
        await until(lambda: session.stats().sites["lab"].waiting == {"limit": 1})
        (other,) = [worker.pid for worker in session.stats().sites["lab"].workers if worker.pid not in (None, home)]
        assert other is not None
        os.kill(other, signal.SIGKILL)
        with pytest.raises(Exception, match="SIGKILL"):
            await second
        assert session.stats().sites["lab"].waiting == {}
        await first.cancel()


async def test_a_gpu_worker_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import os", "if 'CUDA_VISIBLE_DEVICES' in os.environ:", "    raise RuntimeError('there is no driver')"]
    (tmp_path / "driven.py").write_text("\n".join([*lines, "def act(): return 1", ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    federation = Federation("driven")
    act = federation.site("lab", gpus=1).operation(importlib.import_module("driven").act, gpus=1)
    async with Session(federation) as session:
        for _ in range(2):
            with pytest.raises(JobFailed, match="there is no driver"):
                await (await session.execute(pipeline_of(act)))
        assert [limit.used for limit in session.stats().sites["lab"].limits] == [0]


def test_devices_are_counted_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices((0, 2)) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-17")
    assert visible_devices((0, 1)) == "4,GPU-17"
