"""Forks: processes that operations leave behind, and children of the application that outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfm_async import Federation, JobAborted, JobStatus, LocalOptions, PlaceParam, RetryPolicy, Session, WorkerLost
from dfm_async.testing.leaks import ResourceSnapshot
from dfm_async.workers.fork_server import ForkServer
from tests.exchange.processes import gone
from tests.support.pipelines import pipeline_of, yielding
from tests.support.processes import run_python, started
from tests.support.sessions import first_value

OF_OTHERS = re.compile(r"/dev/shm/(sem|PostgreSQL)\.")
"""Named semaphores, and the shared memory of databases."""
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])
LONG = 300.0

fed = Federation("forks")
site, other = fed.site("site"), fed.site("other")


@site.operation
def leave_behind(how: str) -> Iterator[int]:
    """Start a process that outlives this call, and then do what the test asks for."""
    kind, _, end = how.partition(" ")
    if kind == "fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(LONG)
            os._exit(0)
        yield pid
    elif kind == "pool":
        pool = multiprocessing.get_context("fork").Pool(2)
        pool.map_async(time.sleep, [LONG, LONG])
        yield from [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    elif kind == "program":
        yield subprocess.Popen(["sleep", str(LONG)]).pid
    else:
        yield subprocess.Popen(["sleep", str(LONG)], start_new_session=True).pid
    if end.startswith("crashes"):
        gate = Path(end.split()[1])
        while not gate.exists():  # until the test has read the results
            time.sleep(0.01)
        os._exit(5)
    elif end == "hangs":
        time.sleep(LONG)


@site.operation
async def double(value: int) -> int:
    return 2 * value


@other.operation
async def halve(value: int) -> int:
    return value // 2


leaves = pipeline_of(leave_behind, "how")
echoes = yielding(lambda: halve(double(PlaceParam("value"))))


async def left_behind(session: Session, how: str) -> tuple[Any, list[int]]:
    job = await session.execute(leaves, {"how": how})
    results = job.results()
    wanted = 2 if how.startswith("pool") else 1
    return job, [(await anext(results)).value for _ in range(wanted)]


@METHODS
@pytest.mark.parametrize("kind", ["fork", "pool", "program"])
async def test_cancel_kills_processes_of_an_operation_that_does_not_stop(kind: str, method: Any) -> None:
    async with asyncio.timeout(60):
        async with Session(fed, options=LocalOptions(start_method=method)) as session:
            job, pids = await left_behind(session, f"{kind} hangs")
            assert (await job.cancel(grace=0.1))["site"] == "killed"
            for pid in pids:
                await gone(pid)


@METHODS
async def test_a_worker_that_crashes_leaves_no_process_behind(method: Any, tmp_path: Path) -> None:
    async with asyncio.timeout(60), Session(fed, options=LocalOptions(start_method=method)) as session:
        job, pids = await left_behind(session, f"fork crashes {tmp_path / 'gate'}")
        (tmp_path / "gate").touch()
        with pytest.raises(JobAborted) as caught:
            await job
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert caught.value.__cause__.exit_code == 5
        await gone(pids[0])


@METHODS
@pytest.mark.parametrize("kind", ["fork", "program"])
async def test_close_kills_what_operations_have_left_behind(kind: str, method: Any) -> None:
    async with asyncio.timeout(60):
        async with Session(fed, options=LocalOptions(start_method=method)) as session:
            job, pids = await left_behind(session, f"{kind} returns")
            assert await job is JobStatus.FINISHED
            os.kill(pids[0], 0)  # it lives as long as its worker
        await gone(pids[0])


async def test_a_process_with_a_session_of_its_own_outlives_its_worker() -> None:
    async with asyncio.timeout(60):
        async with Session(fed) as session:
            _, pids = await left_behind(session, "daemon returns")
        daemon = psutil.Process(pids[0])
        assert daemon.status() != psutil.STATUS_ZOMBIE
        daemon.kill()


async def test_a_killed_fork_server_takes_its_workers_and_their_processes_along() -> None:
    async with asyncio.timeout(60), Session(fed) as session:
        job, pids = await left_behind(session, "fork hangs")
        os.kill(fork_server(), signal.SIGKILL)
        with pytest.raises(JobAborted):
            await job
        await gone(pids[0])
        assert await first_value(session, echoes, {"value": 1}) == 1


def fork_server() -> int:
    assert ForkServer._shared is not None
    assert ForkServer._shared._process is not None
    return ForkServer._shared._process.pid


# an application that forks


def application(how: str, method: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.local.forking", how, method]
    return started(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


async def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await asyncio.to_thread(process.stdout.readline)).split()


@pytest.mark.parametrize(
    ("how", "method"),
    [("os.fork", "forkserver"), ("os.fork", "spawn"), ("thread", "forkserver"), ("multiprocessing", "forkserver")],
)
async def test_workers_end_with_a_killed_application_that_has_forked(how: str, method: str) -> None:
    with application(how, method) as process:
        child, *workers = map(int, await said(process))
        assert len(workers) == 2
        # Stopped, so that its copies of descriptors stay whatever else ends.
        os.kill(child, signal.SIGSTOP)
        process.kill()
        try:
            for pid in workers:
                await gone(pid, 30)
        finally:
            os.kill(child, signal.SIGKILL)


@METHODS
async def test_close_does_not_wait_for_a_forked_child(method: str) -> None:
    with application("closes", method) as process:
        assert await said(process) == ["closed", "True"]


@pytest.mark.parametrize("how", ["exits", "raises", "returns", "uses"])
async def test_a_forked_child_cannot_disturb_the_session_of_its_parent(how: str) -> None:
    with application(how, "forkserver") as process:
        assert await said(process) == ["True", "True", "True"]
        assert await said(process) == ["ended"]


async def test_a_forked_child_can_have_sessions_of_its_own() -> None:
    with application("connects", "forkserver") as process:
        assert await said(process) == ["True", "True"]
        assert await said(process) == ["ended"]


# descriptors


@METHODS
@pytest.mark.parametrize("seed", range(2))
async def test_random_signals_leave_no_descriptor_behind(seed: int, method: Any) -> None:
    """Kills workers, the fork server and the resource tracker at any moment of their start or work."""
    chance = random.Random(seed)

    async def kill() -> None:
        for _ in range(8):
            await asyncio.sleep(chance.random() * 0.3)
            victim = chance.choice([*psutil.Process().children(recursive=True), None])
            if victim is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))

    before = ResourceSnapshot()
    async with asyncio.timeout(100), Session(fed, options=LocalOptions(start_method=method)) as session:
        killer = asyncio.create_task(kill())
        while not killer.done():
            job = await session.execute(echoes, {"value": 3}, retry=RetryPolicy(on_worker_lost=3))
            with contextlib.suppress(JobAborted):
                assert (await job.first()).value == 3
            await asyncio.sleep(0)
        await killer
    # Those of other programs on this machine, such as the database of another test: we use none.
    assert [found for found in before.leaks() if not OF_OTHERS.search(found)] == []


_FEW_DESCRIPTORS = """
import asyncio, os, resource, sys
from dfm_async import *
fed = Federation("few")
site = fed.site("site")
@site.operation
def end(code: int) -> int:
    if code: os._exit(code)
    return code
with Pipeline("ends") as ends:
    Yield(end(PlaceParam("code")))
async def main():
    trouble = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: trouble.append(context))
    async with Session(fed) as session:
        await (await session.execute(ends, {"code": 0}))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")), hard))
        for code in (3, 0):  # the worker of the first cannot be replaced
            try:
                await (await session.execute(ends, {"code": code}))
            except JobAborted as error:
                print(type(error.__cause__).__name__, "ulimit -n" in str(error))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(await (await session.execute(ends, {"code": 0})), len(trouble))
asyncio.run(main())
"""


def test_start_without_descriptors_fails_the_job_with_the_reason() -> None:
    done = run_python("-c", _FEW_DESCRIPTORS)
    assert done.stdout.splitlines() == ["WorkerLost False", "WorkerLost True", "JobStatus.FINISHED 0"], done.stderr


# surroundings


_PLAIN = """
import asyncio, os, sys
from dfm_async import *
fed = Federation("plain")
site = fed.site("site")
@site.operation
def talk() -> int:
    print("said")
    os.system("echo said by a program")
    return 1
with Pipeline("talks") as talks:
    Yield(talk())
async def main():
    async with Session(fed, options=LocalOptions(start_method=sys.argv[2])) as session:
        return (await (await session.execute(talks)).first()).value
found = asyncio.run(main())
with open(sys.argv[1], "w") as file:
    file.write(f"{found}")
"""


def run_plain(tmp_path: Path, method: str, around: str = "{}", **options: Any) -> None:
    script = tmp_path / "plain.py"
    script.write_text(_PLAIN)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **options.pop("env", {})}
    command = around.format(f"{sys.executable} {script} {tmp_path / 'result'} {method}")
    done = subprocess.run(["/bin/sh", "-c", command], timeout=60, check=False, env=environment, **options)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == "1"


@pytest.mark.parametrize(
    ("closed", "method"),
    [
        ("<&-", "forkserver"),
        ("<&- >&-", "forkserver"),
        ("<&- >&-", "spawn"),
        (">&- 2>&-", "forkserver"),
        ("<&- >&- 2>&-", "forkserver"),
        ("<&- >&- 2>&-", "spawn"),
    ],
)
def test_workers_run_with_closed_standard_streams(closed: str, method: str, tmp_path: Path) -> None:
    run_plain(tmp_path, method, f"{{}} {closed}")


@METHODS
def test_workers_run_in_a_folder_that_was_deleted(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    run_plain(tmp_path, method, 'rmdir "$PWD" && {}', cwd=folder)


@METHODS
def test_workers_run_with_a_long_path_for_temporary_files(method: str, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    run_plain(tmp_path, method, env={"TMPDIR": str(folder)})


def test_descriptors_are_not_inherited_even_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfm_async.workers import worker

    here, there = os.pipe()
    try:
        os.set_inheritable(there, True)
        monkeypatch.setattr(worker, "_MOST_DESCRIPTORS", there + 1)
        monkeypatch.setattr(os, "listdir", _no_proc)
        worker._keep_descriptors()
        assert not os.get_inheritable(there)
    finally:
        os.close(here)
        os.close(there)


def _no_proc(path: str) -> list[str]:
    raise FileNotFoundError(path)
