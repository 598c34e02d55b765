"""What only worker processes show: starting, dying, leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from dfm_async import (
    DfmError,
    Federation,
    ForEach,
    Job,
    JobAborted,
    JobFailed,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    Progress,
    Session,
    ShippingError,
    WorkerLost,
    Yield,
)
from dfm_async.workers.start import WorkerProcess
from tests.conformance import weather as w
from tests.waiting import running

with Pipeline("pid") as pid_of_lab:
    Yield(w.lab_process(1))

with Pipeline("hang") as hang:
    Yield(w.hang())  # type: ignore[call-overload] # the context is not passed by callers

with Pipeline("block") as block:
    Yield(w.block(PlaceParam("seconds")))

with Pipeline("never") as never:
    Yield(w.wait_for_ever())


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
    async with Session(w.fed, options=LocalOptions(start_method=method)) as session:
        job = await session.execute(pid_of_lab)
        assert (await job.first()).value != os.getpid()


async def test_an_end_that_is_told_before_it_can_be_waited_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WorkerProcess.exitcode
    asked: list[int | None] = []

    def exitcode(process: WorkerProcess) -> int | None:
        asked.append(None if not asked else original.fget(process))  # type: ignore[attr-defined]
        return asked[-1]

    monkeypatch.setattr(WorkerProcess, "exitcode", property(exitcode))
    async with asyncio.timeout(20), Session(w.fed, options=LocalOptions(start_method="spawn")) as session:
        await (await session.execute(pid_of_lab))
    assert asked == [None, 0]


async def test_uvloop_in_the_workers() -> None:
    async with Session(w.fed, options=LocalOptions(uvloop=True)) as session:
        assert (await (await session.execute(pid_of_lab)).first()).value != os.getpid()


async def test_a_closed_session_leaves_no_process_and_no_descriptor() -> None:
    descriptors = psutil.Process().num_fds()
    before = workers()
    for _ in range(3):
        async with Session(w.fed) as session:
            await (await session.execute(pid_of_lab))
            assert workers() - before
        assert workers() - before == set()
    await asyncio.sleep(0)
    assert psutil.Process().num_fds() <= descriptors + 4  # the fork server's own, opened once


async def test_sites_that_a_job_does_not_use_are_not_started() -> None:
    before = workers()
    async with Session(w.fed) as session:
        await (await session.execute(pid_of_lab))
        assert len(workers() - before) == 1


async def test_jobs_spread_over_the_workers_of_a_site() -> None:
    async with Session(w.fed) as session:
        first, second = [await session.execute(never) for _ in range(2)]
        await running(first)
        await running(second)
        pids = {(await (await session.execute(pid_of_lab)).first()).value for _ in range(1)}
        jobs = [await session.execute(block, {"seconds": 0.2}) for _ in range(2)]
        assert [await job for job in jobs] == [JobStatus.FINISHED] * 2
        assert pids
        await first.cancel()
        await second.cancel()


async def test_a_killed_worker_is_noticed_at_once_and_replaced() -> None:
    async with Session(w.fed) as session:
        pid = (await (await session.execute(pid_of_lab)).first()).value
        job = await session.execute(never)
        await running(job)
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(JobAborted) as caught:
            await job
        assert time.monotonic() - start < 1.0
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert (caught.value.__cause__.site, caught.value.__cause__.exit_code) == ("lab", -signal.SIGKILL)
        assert job.status is JobStatus.ABORTED
        again = (await (await session.execute(pid_of_lab)).first()).value
        assert again != pid


@pytest.mark.parametrize("code", [0, 3])
async def test_a_worker_that_exits_by_itself_is_lost_too(code: int) -> None:
    fed = Federation("exits")
    site = fed.site("site")

    @site.operation
    def leave(code: int) -> None:
        os._exit(code)

    with Pipeline("leave") as pipeline:
        Yield(leave(code))
    async with Session(fed) as session:
        with pytest.raises(JobAborted) as caught:
            await (await session.execute(pipeline))
    assert isinstance(caught.value.__cause__, WorkerLost)
    assert caught.value.__cause__.exit_code == code


async def test_only_the_jobs_on_a_lost_worker_are_affected() -> None:
    with Pipeline("elsewhere") as elsewhere:
        Yield(w.echo(PlaceParam("n"), site="archive"))
    async with Session(w.fed) as session:
        other = await session.execute(elsewhere, None)
        await running(other)
        pid = (await (await session.execute(pid_of_lab)).first()).value
        os.kill(pid, signal.SIGKILL)
        await other.send_input_params({"n": 1})
        await other.send_stop_frame()
        assert [r.value for r in await other.collect()] == [1]


async def begun(job: Job) -> None:
    """Waits until an operation of a job reports that it runs."""
    async for event in job.events():
        if isinstance(event, Progress):
            return


async def test_a_synchronous_operation_that_does_not_return_is_killed_after_the_grace() -> None:
    async with Session(w.fed) as session:
        pid = (await (await session.execute(pid_of_lab)).first()).value
        job = await session.execute(hang)
        await begun(job)
        start = time.monotonic()
        assert await job.cancel(grace=0.2) == {"lab": "killed"}
        assert time.monotonic() - start < 5
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert (await (await session.execute(pid_of_lab)).first()).value != pid


async def test_close_kills_what_does_not_stop_within_the_grace() -> None:
    before = workers()
    session = Session(w.fed, options=LocalOptions(shutdown_grace=0.3))
    await session.connect()
    job = await session.execute(hang)
    await begun(job)
    start = time.monotonic()
    await session.close()
    assert time.monotonic() - start < 5
    assert job.status is JobStatus.ABORTED
    assert workers() - before == set()


async def test_killing_the_fork_server_does_not_take_the_session_down() -> None:
    async with Session(w.fed) as session:
        pid = (await (await session.execute(pid_of_lab)).first()).value
        server = psutil.Process(psutil.Process(pid).ppid())
        server.kill()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while True:
                try:
                    again = (await (await session.execute(pid_of_lab)).first()).value
                    break
                except JobAborted:  # the worker's end was still unnoticed
                    continue
        assert again != pid


async def test_cancelling_connect_leaves_nothing() -> None:
    before = workers()
    session = Session(w.fed)
    task = asyncio.create_task(session.connect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers() - before == set()


async def test_what_cannot_be_shipped_is_refused_at_connect_with_its_name() -> None:
    fed = Federation("unshippable")
    site = fed.site("site")
    lock = threading.Lock()

    @site.operation
    def locked() -> bool:
        return lock.locked()

    with pytest.raises(ShippingError, match="operation 'locked' of site 'site'"):
        await Session(fed).connect()


async def test_code_that_cannot_be_loaded_in_the_worker_fails_the_job_with_the_reason() -> None:
    fed = Federation("unloadable")
    site = fed.site("site")

    class Trap:
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    trap = Trap()

    @site.operation
    def trapped() -> str:
        return str(trap)

    with Pipeline("trapped") as pipeline:
        Yield(trapped())
    async with Session(fed) as session:
        with pytest.raises(JobFailed, match="cannot load its operations: ValueError"):
            await (await session.execute(pipeline))


async def test_closures_and_lambdas_travel_by_value() -> None:
    fed = Federation("closures")
    site = fed.site("site")
    base = 40
    add = site.operation(lambda x: x + base, name="add")
    with Pipeline("closure") as pipeline:
        Yield(add(2))
    async with Session(fed) as session:
        assert (await (await session.execute(pipeline)).first()).value == 42


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
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.mark.parametrize("guard", ["if __name__ == '__main__':\n    asyncio.run(main())", "asyncio.run(main())"])
def test_a_script_works_with_and_without_a_main_guard(tmp_path: Path, guard: str) -> None:
    done = run_script(tmp_path, SCRIPT + "\n" + guard)
    assert (done.returncode, done.stdout, done.stderr) == (0, "value 6\n", "")


def test_code_typed_into_a_repl_works(tmp_path: Path) -> None:
    """A notebook cell has no file either."""
    source = SCRIPT + "\nasyncio.run(main())\n"
    done = subprocess.run(
        [sys.executable, "-"], input=source, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
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

with Pipeline("pid") as pids:
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
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(1)", "raise RuntimeError", "return"])
def test_workers_end_when_the_application_does_however_it_does(tmp_path: Path, how: str, busy: str) -> None:
    """Also when it forgets to close, and while an operation spins."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS.replace("HOW", how))
    done = subprocess.run([sys.executable, str(script), busy], capture_output=True, text=True, timeout=60, check=False)
    worker = int(done.stdout)
    try:
        psutil.Process(worker).wait(10)
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
        Session(w.fed, target="moon")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "uvloop", None)
    async with Session(w.fed, options=LocalOptions(uvloop=True)) as session:
        with pytest.raises(DfmError, match="needs uvloop"):
            await session.execute(pid_of_lab)


def _two_sites() -> tuple[Federation, Pipeline, Pipeline]:
    fed = Federation("two")
    first, second = fed.site("first"), fed.site("second")

    @first.operation
    async def pid() -> int:
        return os.getpid()

    @second.operation
    async def same(value: int) -> int:
        return value

    with Pipeline("one site") as alone:
        Yield(pid())
    with Pipeline("both sites") as both:
        Yield(same(pid()))
    return fed, alone, both


async def test_a_worker_that_dies_while_another_starts_is_replaced_before_the_job_begins() -> None:
    fed, alone, both = _two_sites()
    async with asyncio.timeout(20), Session(fed) as session:
        pid = (await (await session.execute(alone)).first()).value
        job = await session.execute(both)  # the second site has no worker yet
        os.kill(pid, signal.SIGKILL)
        assert (await job.first()).value != pid
        assert await job is JobStatus.FINISHED


async def test_jobs_cancelled_before_their_worker_is_up_are_forgotten() -> None:
    fed, alone, _ = _two_sites()
    async with asyncio.timeout(20), Session(fed) as session:
        for job in [await session.execute(alone) for _ in range(5)]:
            await job.cancel()
        await (await session.execute(alone))
        assert session.stats().running == 0
        assert not session._target._hub._coordinators  # type: ignore[attr-defined]


async def test_an_operation_named_cache_can_have_a_process_of_its_own() -> None:
    fed = Federation("names")
    site = fed.site("site", workers=2)
    cache = site.operation(lambda: os.getpid(), name="cache", in_process=True)
    other = site.operation(lambda: os.getpid(), name="other")
    with Pipeline("pids") as pipeline:
        Yield(cache(), place="own")
        Yield(other(), place="site")
    async with asyncio.timeout(20), Session(fed) as session:
        found = {result.place: result.value for result in await (await session.execute(pipeline)).collect()}
    assert found["own"] != found["site"]
