"""What only worker processes show: starting, dying, leaving nothing behind."""

from __future__ import annotations

import asyncio
import math
import multiprocessing.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from dfm_async import (
    DfmError,
    Federation,
    ForEach,
    JobAborted,
    JobFailed,
    JobStatus,
    LocalOptions,
    Pipeline,
    Progress,
    Session,
    WorkerLost,
    Yield,
)
from dfm_async.base.tasks import in_thread
from dfm_async.errors import ShippingError
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.site_worker import SiteWorker
from dfm_async.workers.start import WorkerProcess
from tests.conformance import weather as w
from tests.support.pipelines import pipeline_of, yielding
from tests.support.processes import run_python
from tests.support.sessions import first_value
from tests.support.waiting import PROMPT, first_event, running

fed = w.fed

pid_of_lab = yielding(lambda: w.lab_process(1))

with Pipeline("hang") as hang:
    Yield(w.hang())

block = pipeline_of(w.block, "seconds")
never = pipeline_of(w.wait_for_ever)


def workers() -> set[int]:
    """The worker processes below this one; the fork server and the resource tracker stay between sessions."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_both_start_methods(method: Any) -> None:
    async with Session(fed, options=LocalOptions(start_method=method)) as session:
        assert await first_value(session, pid_of_lab) != os.getpid()


async def test_early_report_of_a_process_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WorkerProcess.exitcode
    asked: list[int | None] = []

    def exitcode(process: WorkerProcess) -> int | None:
        asked.append(None if not asked else original.fget(process))  # type: ignore[attr-defined]
        return asked[-1]

    monkeypatch.setattr(WorkerProcess, "exitcode", property(exitcode))
    async with Session(fed, options=LocalOptions(start_method="spawn")) as session:
        await (await session.execute(pid_of_lab))
    assert asked == [None, 0]


async def test_uvloop_in_the_workers() -> None:
    async with Session(fed, options=LocalOptions(uvloop=True)) as session:
        assert await first_value(session, pid_of_lab) != os.getpid()


async def test_a_closed_session_leaves_no_process_and_no_descriptor() -> None:
    descriptors = psutil.Process().num_fds()
    before = workers()
    for _ in range(3):
        async with Session(fed) as session:
            await (await session.execute(pid_of_lab))
            assert workers() - before
        assert workers() - before == set()
    await asyncio.sleep(0)
    assert psutil.Process().num_fds() <= descriptors + 4  # the fork server's own, opened once


async def test_only_the_workers_that_a_job_needs_are_started(session: Session) -> None:
    resource_tracker.ensure_running()
    before = set(psutil.Process().children(recursive=True))
    worker = await first_value(session, pid_of_lab)
    started = {process.pid for process in set(psutil.Process().children(recursive=True)) - before}
    assert started - {psutil.Process(worker).ppid()} == {worker}


async def test_a_call_does_not_wait_for_a_poll(session: Session) -> None:
    quickest = math.inf
    for _ in range(500):
        start = time.perf_counter()
        await first_value(session, pid_of_lab)
        quickest = min(quickest, time.perf_counter() - start)
        if quickest < 0.005:
            break
    assert quickest < 0.005


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_the_loop_turns_while_a_worker_starts(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resource_tracker.ensure_running()
    loop = asyncio.get_running_loop()
    turned: list[bool] = []

    def watch(owner: Any, name: str) -> None:
        start = getattr(owner, name)

        def started(*args: Any) -> Any:
            seen = threading.Event()
            loop.call_soon_threadsafe(seen.set)
            turned.append(seen.wait(20))
            return start(*args)

        monkeypatch.setattr(owner, name, started)

    watch(multiprocessing.util, "spawnv_passfds")
    watch(ForkServer, "start")
    async with Session(fed, options=LocalOptions(start_method=method)) as session:
        await (await session.execute(pid_of_lab))
    assert turned
    assert all(turned), "the loop was blocked"


async def test_a_killed_worker_is_noticed_at_once_and_replaced(session: Session) -> None:
    pid = await first_value(session, pid_of_lab)
    job = await session.execute(never)
    await running(job)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(JobAborted) as caught:
        async with asyncio.timeout(PROMPT):  # without waiting for heartbeats
            await job
    assert isinstance(caught.value.__cause__, WorkerLost)
    assert (caught.value.__cause__.site, caught.value.__cause__.exit_code) == ("lab", -signal.SIGKILL)
    assert job.status is JobStatus.ABORTED
    again = await first_value(session, pid_of_lab)
    assert again != pid


@pytest.mark.parametrize("code", [0, 3])
async def test_a_worker_that_exits_by_itself_is_lost_too(code: int) -> None:
    fed = Federation("exits")
    site = fed.site("site")

    @site.operation
    def leave(code: int) -> None:
        os._exit(code)

    pipeline = yielding(lambda: leave(code))
    async with Session(fed) as session:
        with pytest.raises(JobAborted) as caught:
            await (await session.execute(pipeline))
    assert isinstance(caught.value.__cause__, WorkerLost)
    assert caught.value.__cause__.exit_code == code


async def test_only_the_jobs_on_a_lost_worker_are_affected(session: Session) -> None:
    elsewhere = pipeline_of(w.echo, "n", site="archive")
    other = await session.execute(elsewhere, None)
    await running(other)
    pid = await first_value(session, pid_of_lab)
    os.kill(pid, signal.SIGKILL)
    await other.send_input_params({"n": 1})
    await other.send_stop_frame()
    assert [r.value for r in await other.collect()] == [1]


async def test_hanging_synchronous_operation_is_killed_after_the_grace_period(session: Session) -> None:
    pid = await first_value(session, pid_of_lab)
    job = await session.execute(hang)
    await first_event(job, Progress)
    assert await job.cancel(grace=0.2) == {"lab": "killed"}
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert await first_value(session, pid_of_lab) != pid


async def test_close_kills_workers_after_the_grace_period() -> None:
    before = workers()
    session = Session(fed, options=LocalOptions(shutdown_grace=0.3))
    await session.connect()
    job = await session.execute(hang)
    await first_event(job, Progress)
    await session.close()
    assert job.status is JobStatus.ABORTED
    assert workers() - before == set()


async def test_session_survives_a_killed_fork_server(session: Session) -> None:
    pid = await first_value(session, pid_of_lab)
    server = psutil.Process(psutil.Process(pid).ppid())
    server.kill()
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            again = await first_value(session, pid_of_lab)
            break
        except JobAborted:  # the worker's end was still unnoticed
            continue
    assert again != pid


async def test_cancelling_connect_leaves_nothing() -> None:
    before = workers()
    session = Session(fed)
    task = asyncio.create_task(session.connect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers() - before == set()


async def test_unshippable_code_is_refused_at_connect_by_name() -> None:
    fed = Federation("unshippable")
    site = fed.site("site")
    lock = threading.Lock()

    @site.operation
    def locked() -> bool:
        return lock.locked()

    with pytest.raises(ShippingError, match="operation 'locked' of site 'site'"):
        await Session(fed).connect()


@pytest.mark.parametrize("ended", [False, True], ids=["runs", "ended"])
async def test_unloadable_code_fails_the_job_with_the_reason(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = SiteWorker._connect

    async def connect_late(worker: SiteWorker, ends: Any) -> None:
        assert worker.aio_process is not None
        sentinel = worker.aio_process.sentinel
        await in_thread(lambda: connection.wait([sentinel]), "wait")
        await connect(worker, ends)

    if ended:
        monkeypatch.setattr(SiteWorker, "_connect", connect_late)
    fed = Federation("unloadable")
    site = fed.site("site")

    class Trap:
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    trap = Trap()

    @site.operation
    def trapped() -> str:
        return str(trap)

    pipeline = pipeline_of(trapped)
    async with Session(fed) as session:
        with pytest.raises(JobFailed, match="cannot load its operations: ValueError"):
            await (await session.execute(pipeline))


async def test_closures_and_lambdas_travel_by_value() -> None:
    fed = Federation("closures")
    site = fed.site("site")
    base = 40
    add = site.operation(lambda x: x + base, name="add")
    pipeline = yielding(lambda: add(2))
    async with Session(fed) as session:
        assert await first_value(session, pipeline) == 42


SCRIPT = """
import asyncio, dataclasses, enum, os
from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: int
    color: Color

fed = Federation("script")
site = fed.site("site")
other = fed.site("other")
SCALE = 3

def helper(x):
    return x * SCALE

@site.operation
def grow(point: Point) -> Point:
    return Point(helper(point.x), Color.RED)

@other.operation
async def check(point: Point) -> Point:
    assert isinstance(point, Point) and point.color is Color.RED, point
    return point

with Pipeline("p") as pipeline:
    Yield(check(grow(PlaceParam("point"))))

async def main():
    async with Session(fed) as session:
        job = await session.execute(pipeline, {"point": Point(2, Color.RED)})
        result = await job.first()
        assert isinstance(result.value, Point) and result.value.color is Color.RED
        print("value", result.value.x)
"""


def run_script(tmp_path: Path, source: str, **options: Any) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    return run_python(script, check=False, **options)


@pytest.mark.parametrize("guard", ["if __name__ == '__main__':\n    asyncio.run(main())", "asyncio.run(main())"])
def test_a_script_works_with_and_without_a_main_guard(tmp_path: Path, guard: str) -> None:
    done = run_script(tmp_path, SCRIPT + "\n" + guard)
    assert (done.returncode, done.stdout, done.stderr) == (0, "value 6\n", "")


UNGUARDED = """
import asyncio
import dfm_async
import dfm_async.sync

fed = dfm_async.Federation("unguarded")

@fed.site("site").operation
def one() -> int:
    return 1

async def main() -> None:
    async with dfm_async.Session(fed) as session:
        await session.call(one)

"""


@pytest.mark.parametrize("code", ["asyncio.run(main())", "with dfm_async.sync.Session(fed) as s:\n    s.call(one)"])
def test_a_module_that_runs_jobs_on_import_fails_with_advice(tmp_path: Path, code: str) -> None:
    """A worker that opened the session again would start a worker that opens the session again."""
    (tmp_path / "unguarded.py").write_text(UNGUARDED + code)
    done = run_script(tmp_path, "import unguarded")
    assert done.returncode == 1
    assert "cannot load its operations: DfmError: their module runs jobs when it is imported" in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("asyncio.run(main())", "DfmError: their module runs jobs when it is imported, and worker processes import it"),
        ("sys.exit('too early')", "SystemExit: too early"),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("import nothing_of_this_name", None),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_reported_with_its_error(
    tmp_path: Path, code: str, message: str | None
) -> None:
    options = "options=dfm_async.LocalOptions(preload=('preloaded',))"
    (tmp_path / "preloaded.py").write_text("import sys" + UNGUARDED.replace("(fed)", f"(fed, {options})") + code)
    done = run_script(tmp_path, UNGUARDED.replace("(fed)", f"(fed, {options})") + "asyncio.run(main())")
    if message is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1
        where = "cannot load its operations: DfmError: preload= names the module 'preloaded', which cannot be imported"
        assert f"{where}: {message}" in done.stderr


def test_code_typed_into_a_repl_works(tmp_path: Path) -> None:
    """A notebook cell has no file either."""
    source = SCRIPT + "\nasyncio.run(main())\n"
    done = run_python("-", input=source, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "value 6\n", "")


ORPHANS = """
import asyncio, os, sys, time
from dfm_async import Federation, Pipeline, Session, Yield

fed = Federation("orphans")
site = fed.site("site")

@site.operation
def spin() -> None:
    while True:
        pass

@site.operation
async def pid() -> int:
    return os.getpid()

with Pipeline("pids") as pids:
    Yield(pid())
with Pipeline("spin") as pipeline:
    Yield(spin())

async def main():
    session = Session(fed)
    await session.connect()
    worker = (await (await session.execute(pids)).first()).value
    if sys.argv[1:] != ["idle"]:
        job = await session.execute(pipeline)
        async for event in job.events():
            break
    print(worker, flush=True)
    HOW

asyncio.run(main())
"""


@pytest.mark.parametrize("busy", ["idle", "busy"])
@pytest.mark.parametrize(
    "how", ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)", "os._exit(1)", "raise RuntimeError", "return"]
)
def test_workers_end_with_their_application(tmp_path: Path, how: str, busy: str) -> None:
    """Also when it forgets to close, and while an operation spins."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS.replace("HOW", how))
    worker = int(run_python(script, busy, check=False).stdout)
    try:
        psutil.Process(worker).wait(60)
    except psutil.NoSuchProcess:
        return


async def test_concurrency_of_a_loop_is_not_exceeded() -> None:
    fed = Federation("limits")
    site, other = fed.site("site"), fed.site("other")
    _ = other

    @site.operation
    class Gauge:
        def __init__(self) -> None:
            self.now = self.most = 0

        async def body(self, n: int) -> int:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            self.now -= 1
            return self.most

    with Pipeline("limited") as pipeline, ForEach(list(range(50)), concurrency=3) as n:
        Yield(Gauge(n))  # type: ignore[call-arg] # checkers see the class
    targets: list[Literal["inline", "local"]] = ["inline", "local"]
    for target in targets:
        async with Session(fed, target=target) as session:
            assert max([r.value async for r in await session.execute(pipeline)]) == 3


async def test_an_unknown_target_or_missing_uvloop_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="target must be"):
        Session(fed, target="moon")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(DfmError, match="needs uvloop"):
        await Session(fed, options=LocalOptions(uvloop=True)).connect()


def _two_sites() -> tuple[Federation, Pipeline, Pipeline]:
    fed = Federation("two")
    first, second = fed.site("first"), fed.site("second")

    @first.operation
    async def pid() -> int:
        return os.getpid()

    @second.operation
    async def same(value: int) -> int:
        return value

    alone = pipeline_of(pid)
    both = yielding(lambda: same(pid()))
    return fed, alone, both


async def test_worker_lost_before_a_job_begins_is_replaced() -> None:
    fed, alone, both = _two_sites()
    async with Session(fed) as session:
        pid = await first_value(session, alone)
        process = psutil.Process(pid)
        process.kill()
        process.wait()  # without the loop: it shall not have noticed
        job = await session.execute(both)  # the second site has no worker yet
        assert (await job.first()).value != pid
        assert await job is JobStatus.FINISHED


async def test_jobs_cancelled_before_their_worker_is_up_are_forgotten() -> None:
    fed, alone, _ = _two_sites()
    async with Session(fed) as session:
        for job in [await session.execute(alone) for _ in range(5)]:
            await job.cancel()
        await (await session.execute(alone))
        assert session.stats().running == 0
        assert not session._target._engine._runs  # type: ignore[attr-defined]


async def test_an_operation_named_cache_can_have_a_process_of_its_own() -> None:
    fed = Federation("names")
    site = fed.site("site", workers=2)
    cache = site.operation(lambda: os.getpid(), name="cache", in_process=True)
    other = site.operation(lambda: os.getpid(), name="other")
    with Pipeline("pids") as pipeline:
        Yield(cache(), place="own")
        Yield(other(), place="site")
    async with Session(fed) as session:
        found = {result.place: result.value for result in await (await session.execute(pipeline)).collect()}
    assert found["own"] != found["site"]
