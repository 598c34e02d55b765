"""How long workers, and what starts them, may take to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dfm_async import Federation, JobAborted, LocalOptions, Pipeline, Session, SessionClosed, Site, current_context
from dfm_async.engine import site_host
from dfm_async.engine.site_host import Code
from dfm_async.federation import VaultConfig
from dfm_async.model.ids import Location
from dfm_async.workers.fork_server import ForkServer, ForkServerEnded
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value


class SlowVault:
    """Takes longer to close than a worker that has closed its own channel may take to end."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def secret_for_key(self, key: str) -> str:
        return key

    def close(self) -> None:
        time.sleep(1.0)
        self._file.write_text("closed")


def define(lab: Site, added: int) -> Pipeline:
    @lab.operation
    async def add(n: int) -> int:
        await current_context().secret("key")
        return n + added

    return pipeline_of(add, "n")


@pytest.mark.parametrize("when", ["closed", "reloaded"])
async def test_a_worker_has_the_whole_grace_period_to_close_its_vault(tmp_path: Path, when: str) -> None:
    file = tmp_path / "vault"
    fed = Federation("graceful")
    lab = fed.site("lab", vault=VaultConfig(path=f"{__name__}.SlowVault", args={"file": str(file)}))
    async with Session(fed, target="local", options=LocalOptions(lanes=1, shutdown_grace=30)) as session:
        assert await first_value(session, define(lab, 1), {"n": 1}) == 2
        if when == "reloaded":
            (worker,) = session.target.workers("lab")  # type: ignore[attr-defined]
            assert await first_value(session, define(lab, 2), {"n": 1}) == 3
            async with asyncio.timeout(30):
                assert await asyncio.shield(worker.ended) == 0
            assert file.read_text() == "closed"
    assert file.read_text() == "closed"


async def test_an_outdated_worker_that_does_not_end_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    file = tmp_path / "vault"
    fed = Federation("graceful")
    lab = fed.site("lab", vault=VaultConfig(path=f"{__name__}.SlowVault", args={"file": str(file)}))
    async with Session(fed, target="local", options=LocalOptions(lanes=1, shutdown_grace=0.01)) as session:
        assert await first_value(session, define(lab, 1), {"n": 1}) == 2
        (worker,) = session.target.workers("lab")  # type: ignore[attr-defined]
        assert await first_value(session, define(lab, 2), {"n": 1}) == 3
        async with asyncio.timeout(30):
            assert await asyncio.shield(worker.ended) == -9
        assert not file.exists()


@pytest.fixture
def own_fork_server() -> Iterator[None]:
    """Has the sessions of a test start a fork server of their own, with their own modules."""
    shared, ForkServer._shared = ForkServer._shared, None
    try:
        yield
    finally:
        ForkServer._shared = shared


@pytest.mark.usefixtures("own_fork_server")
def test_a_worker_that_starts_after_the_last_session_has_gone_starts_no_process() -> None:
    class Late:
        abandoned = False

    server = ForkServer.acquire(())
    server.release()
    with pytest.raises(ForkServerEnded, match="was closed"):
        server.start([], Late())
    assert not server.kept


@pytest.fixture
def endless_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module whose import does not end. Returns a pipe that it opens and closes first."""
    file = tmp_path / "importing"
    os.mkfifo(file)
    (tmp_path / "endless_module.py").write_text(
        f"import threading\nopen({str(file)!r}, 'w').close()\nthreading.Event().wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return file


@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_does_not_wait_for_modules_that_are_never_loaded(
    endless_module: Path, sessions: int, cancelled: bool
) -> None:
    fed = Federation("endless")
    pipeline = define(fed.site("lab"), 1)
    grace = 600 if cancelled else 0.1
    options = LocalOptions(preload=("endless_module",), shutdown_grace=grace, lanes=2)
    opened = [Session(fed, target="local", options=options) for _ in range(sessions)]
    jobs = []
    for session in opened:
        await session.connect()
        jobs += [await session.execute(pipeline, {"n": n}) for n in (1, 2)]
    async with asyncio.timeout(60):
        await asyncio.to_thread(endless_module.read_bytes)
        closing = [asyncio.create_task(session.close()) for session in opened]
        if cancelled:
            await asyncio.sleep(0.2)
            for task in closing:
                task.cancel()
        await asyncio.wait(closing)
        for task in closing:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()
        for job in jobs:
            with pytest.raises(JobAborted):
                await job


@pytest.mark.usefixtures("own_fork_server")
async def test_closing_without_jobs_does_not_wait_for_modules_that_are_never_loaded(endless_module: Path) -> None:
    session = Session(Federation("endless"), target="local", options=LocalOptions(preload=("endless_module",)))
    await session.connect()
    await asyncio.to_thread(endless_module.read_bytes)
    async with asyncio.timeout(30):
        await session.close()


async def test_no_worker_starts_after_those_of_its_site_have_ended() -> None:
    """A job whose worker has just ended takes another one, unless the session is being closed."""
    code = Code(shipped=b"", workers=1, threads=1, lanes=1)
    made: list[Code] = []
    group = site_host._WorkerGroup(code, made.append, lambda _: None)  # type: ignore[arg-type]
    await group.shut_down(0.0)
    with pytest.raises(SessionClosed):
        group.worker(Location("lab"), 0)
    assert made == []
