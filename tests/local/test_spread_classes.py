"""Objects of classes in several workers, and operations that stay in one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, ForEach, LocalOptions, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from tests.local.test_spread import names, values
from tests.support.waiting import until

fed = Federation("spread classes")
lab = fed.site("lab")


@lab.operation
def items(n: int) -> list[int]:
    return list(range(n))


class Model:
    """Writes a file for each object that is built, and for each that is closed."""

    def __init__(self, folder: str = "") -> None:
        self._folder: Path | None = None

    def body(self, x: int, folder: str) -> tuple[int, int]:
        if self._folder is None:
            self._folder = Path(folder)
            (self._folder / f"built-{os.getpid()}").touch(exist_ok=False)
        time.sleep(0.02)
        return x, os.getpid()

    def close(self) -> None:
        if self._folder is not None:
            (self._folder / f"closed-{os.getpid()}").touch(exist_ok=False)


everywhere = lab.operation(Model, name="everywhere", spread=True, retry=RetryPolicy(attempts=1, on_worker_lost=3))
at_home = lab.operation(Model, name="at_home")


@lab.operation(spread=False)
def pinned(x: int, folder: str) -> tuple[int, int]:
    time.sleep(0.02)
    return x, os.getpid()


def each(operation: Any) -> Pipeline:
    with Pipeline(operation.name) as pipeline, ForEach(items(PlaceParam("n"))) as x:
        Yield(operation(x=x, folder=PlaceParam("folder")))
    return pipeline


EVERYWHERE = each(everywhere)


@pytest.fixture
async def session(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Session]:
    monkeypatch.setenv("DFM_SPREAD", "always")
    async with Session(fed, options=LocalOptions(max_workers=3)) as connected:
        while len(await processes(connected, EVERYWHERE, tmp_path_factory.mktemp("first"))) < 2:
            pass
        yield connected


async def processes(session: Session, pipeline: Pipeline, folder: Path) -> set[int]:
    found = await values(await session.execute(pipeline, {"n": 30, "folder": str(folder)}))
    assert sorted(x for x, _ in found) == list(range(30))
    return {pid for _, pid in found}


def pids(folder: Path, what: str) -> set[int]:
    return {int(name.split("-")[1]) for name in names(folder) if name.startswith(what)}


async def test_each_worker_has_an_object_that_is_closed_with_the_job(session: Session, tmp_path: Path) -> None:
    found = await processes(session, EVERYWHERE, tmp_path)
    assert len(found) > 1
    assert pids(tmp_path, "built") == pids(tmp_path, "closed") == found


@pytest.mark.parametrize("operation", [at_home, pinned], ids=["class", "spread=False"])
async def test_what_does_not_spread_runs_in_one_process(session: Session, tmp_path: Path, operation: Any) -> None:
    assert len(await processes(session, each(operation), tmp_path)) == 1


async def test_objects_in_other_workers_are_closed_when_a_job_is_cancelled(session: Session, tmp_path: Path) -> None:
    job = await session.execute(EVERYWHERE, {"n": 100_000, "folder": str(tmp_path)})
    await until(lambda: len(pids(tmp_path, "built")) > 1)
    await job.cancel()
    assert pids(tmp_path, "closed") == pids(tmp_path, "built")


async def test_a_lost_worker_costs_its_object_and_the_calls_run_again(session: Session, tmp_path: Path) -> None:
    job = await session.execute(EVERYWHERE, {"n": 200, "folder": str(tmp_path)})
    await until(lambda: len(pids(tmp_path, "built")) > 1)
    stats = session.stats().sites["lab"]
    home = next(worker.pid for worker in stats.workers if worker.jobs)
    victim = next(pid for pid in pids(tmp_path, "built") if pid != home)
    os.kill(victim, signal.SIGKILL)
    found = await values(job)
    assert sorted(x for x, _ in found) == list(range(200))
    assert pids(tmp_path, "closed") == pids(tmp_path, "built") - {victim}


async def test_objects_are_closed_at_the_end_of_a_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    async with asyncio.timeout(60), Session(fed, options=LocalOptions(max_workers=3)) as session:
        await session.execute(EVERYWHERE, {"n": 100_000, "folder": str(tmp_path)})
        await until(lambda: len(pids(tmp_path, "built")) > 1)
    assert "did not end in time" not in caplog.text  # nobody waits for an answer of a worker that has ended
    assert pids(tmp_path, "closed") == pids(tmp_path, "built")


def test_what_waits_cannot_be_spread() -> None:
    async def waits() -> None: ...

    with pytest.raises(TypeError, match=r"operation 'waits' is asynchronous: it does not take spread=True"):
        lab.operation(waits, spread=True)
