"""Workers that die while jobs run on them, and jobs that survive it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfm_async import (
    Federation,
    ForEach,
    JobAborted,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    Repeat,
    Reply,
    RetryPolicy,
    Session,
    WorkerLost,
    Yield,
    current_context,
    gather,
)
from dfm_async.events import FrameCompleted, WorkerNotice
from dfm_async.workers.fork_server import ForkServerEnded
from dfm_async.workers.start import WorkerProcess
from tests.exchange.processes import gone
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import first_value
from tests.support.waiting import first_event, running

fed = Federation("mortal")
lab, desk = fed.site("lab"), fed.site("desk")

AGAIN = RetryPolicy(on_worker_lost=3)


def once(folder: str, name: str) -> bool:
    """True for the first caller with this name, in whatever process."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def note(folder: str, text: str) -> None:
    with (Path(folder) / "runs").open("a") as file:
        file.write(f"{text}\n")


@lab.operation
def die_once(folder: str, n: int, victim: int) -> int:
    note(folder, f"die_once {n}")
    if n == victim and once(folder, "died"):
        os.kill(os.getpid(), signal.SIGKILL)
    return n * 10


@desk.operation
def at_desk(n: int) -> int:
    return n + 1


@lab.operation
def count_and_die(folder: str, first: int, total: int) -> Iterator[int]:
    for n in range(total):
        if n == first and once(folder, "died"):
            time.sleep(0.1)  # what was yielded has left by then
            os.kill(os.getpid(), signal.SIGKILL)
        yield n


@lab.operation
def always_die(n: int) -> int:
    os._exit(5)


@lab.operation
async def use_all_descriptors(n: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # no further one, whichever number is free
    return n


@lab.operation
async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@lab.operation
def hang() -> None:
    while True:
        time.sleep(60)


@lab.operation
async def pause(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@desk.operation
def desk_adds(n: int) -> int:
    return n + 1


@desk.operation
async def numbers(n: int) -> list[int]:
    return list(range(n))


dies_once = yielding(lambda: desk_adds(die_once(PlaceParam("folder"), PlaceParam("n"), PlaceParam("victim"))))

streams_and_dies = pipeline_of(count_and_die, "folder", "first", "total")
always_dies = pipeline_of(always_die, "n")

with Pipeline("loops and dies") as loops_and_dies:
    with ForEach(numbers(PlaceParam("total"))) as n:
        Yield(desk_adds(die_once(PlaceParam("folder"), n, PlaceParam("victim"))))


def sets(folder: Path, count: int, victim: int) -> list[dict[str, Any]]:
    return [{"folder": str(folder), "n": n, "victim": victim} for n in range(count)]


async def test_lost_parameter_sets_run_again_and_each_result_comes_once(session: Session, tmp_path: Path) -> None:
    job = await session.execute(dies_once, sets(tmp_path, 20, 7), retry=AGAIN)
    results = await job.collect()
    assert job.status is JobStatus.FINISHED
    assert sorted((r.frame, r.value) for r in results) == [((n,), n * 10 + 1) for n in range(20)]
    events = [event async for event in job.events()]
    (lost,) = [event for event in events if isinstance(event, WorkerNotice)]
    assert (lost.kind, lost.site) == ("lost", "lab")
    assert "SIGKILL" in lost.detail
    assert Counter(e.frame for e in events if isinstance(e, FrameCompleted)) == {(n,): 1 for n in range(20)}
    assert [event.offset for event in events] == list(range(len(events)))
    assert session.stats().sites["lab"].restarts == 1


async def test_parameter_sets_that_were_done_do_not_run_again(session: Session, tmp_path: Path) -> None:
    job = await session.execute(dies_once, sets(tmp_path, 10, 9), retry=AGAIN, concurrency=1)
    assert len(await job.collect()) == 10
    runs = Counter((tmp_path / "runs").read_text().splitlines())
    assert runs == {**{f"die_once {n}": 1 for n in range(9)}, "die_once 9": 2}


async def test_elements_that_came_before_the_loss_are_not_repeated(session: Session, tmp_path: Path) -> None:
    params = {"folder": str(tmp_path), "first": 500, "total": 1000}
    job = await session.execute(streams_and_dies, params, retry=AGAIN)
    results = await job.collect()
    assert [r.value for r in results] == list(range(1000))
    notices = [e.offset async for e in job.events() if isinstance(e, WorkerNotice)]
    assert len(notices) == 1
    assert sum(r.offset < notices[0] for r in results) >= 1


async def test_a_loop_over_sites_runs_again_and_shows_each_result_once(session: Session, tmp_path: Path) -> None:
    params = {"folder": str(tmp_path), "total": 50, "victim": 30}
    job = await session.execute(loops_and_dies, params, retry=AGAIN)
    assert sorted((r.frame, r.value) for r in await job.collect()) == [((0, n), n * 10 + 1) for n in range(50)]


async def test_a_gather_runs_again_with_its_parameter_set(session: Session, tmp_path: Path) -> None:
    with Pipeline("gather") as pipeline:
        with Repeat(0, times=3) as round_:
            calls = [die_once(str(tmp_path), round_, 1), at_desk(round_)]
            replies = gather(calls, at_least=2, within=60)
            round_.next(replies[1].value)
            Yield(replies)
    job = await session.execute(pipeline, retry=AGAIN)
    found = {result.frame: result.value for result in await job.collect()}
    assert found == {(0, n): [Reply("lab", n * 10), Reply("desk", n + 1)] for n in range(3)}
    assert await job is JobStatus.FINISHED


async def test_without_a_policy_the_job_is_aborted(session: Session, tmp_path: Path) -> None:
    job = await session.execute(dies_once, sets(tmp_path, 3, 1))
    with pytest.raises(JobAborted) as caught:
        await job
    assert isinstance(caught.value.__cause__, WorkerLost)


async def test_a_job_that_keeps_killing_workers_is_stopped_after_three(session: Session) -> None:
    job = await session.execute(always_dies, {"n": 1}, retry=RetryPolicy(on_worker_lost=100))
    with pytest.raises(JobAborted, match="lost 3 workers in a row") as caught:
        await job
    assert isinstance(caught.value.__cause__, WorkerLost)
    assert caught.value.__cause__.exit_code == 5
    assert await first_value(session, pauses, {"seconds": 0})


async def test_parameter_set_is_retried_as_often_as_the_policy_allows(session: Session) -> None:
    job = await session.execute(always_dies, {"n": 1}, retry=RetryPolicy(on_worker_lost=1))
    with pytest.raises(JobAborted, match="exited with code 5"):
        await job
    assert sum([isinstance(e, WorkerNotice) async for e in job.events()]) == 1


@pytest.mark.parametrize("allowed", [True, False])
async def test_job_is_retried_only_if_all_operations_allow_it(session: Session, tmp_path: Path, allowed: bool) -> None:
    safe = RetryPolicy(attempts=1, on_worker_lost=2)
    with Pipeline("policies") as pipeline:
        found = die_once(str(tmp_path), 1, 1, retry=safe)
        Yield(desk_adds(found, retry=safe) if allowed else desk_adds(found))
    job = await session.execute(pipeline)
    if allowed:
        assert (await job.first()).value == 11
    else:
        with pytest.raises(JobAborted):
            await job


pauses = pipeline_of(pause, "seconds")
waits = pipeline_of(wait_for_ever)
hangs = pipeline_of(hang)


async def test_a_job_can_be_cancelled_while_it_finds_new_workers(session: Session) -> None:
    job = await session.execute(waits, retry=RetryPolicy(on_worker_lost=100))
    await running(job)
    pid = session.stats().sites["lab"].workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await first_event(job, WorkerNotice)
    await job.cancel()
    assert job.status is JobStatus.ABORTED
    assert await first_value(session, pauses, {"seconds": 0}) != pid


async def test_killing_a_worker_again_and_again_loses_nothing(session: Session, tmp_path: Path) -> None:
    rows = [{"seconds": 0.01} for _ in range(100)]
    job = await session.execute(pauses, rows, retry=RetryPolicy(on_worker_lost=100), concurrency=4)
    killed = set()
    async with job.results() as results:
        found = []
        async for result in results:
            found.append(result)
            if len(found) in (10, 30, 50, 70):
                killed.add(result.value)
                os.kill(result.value, signal.SIGKILL)
    assert sorted(r.frame[0] for r in found) == list(range(100))
    assert len(killed) == 4


async def test_end_of_the_fork_server_ends_only_its_workers(session: Session) -> None:
    job = await session.execute(pauses, [{"seconds": 0.05}] * 10, retry=AGAIN, concurrency=2)
    other = await session.execute(waits)
    async with job.results() as results:
        worker = psutil.Process((await anext(results)).value)
        server = worker.parent()
        assert server is not None
        server.kill()
        async with asyncio.timeout(30):
            assert len([r async for r in results]) == 9
            with pytest.raises(JobAborted) as caught:
                await other
    assert isinstance(caught.value.__cause__, WorkerLost)
    await asyncio.to_thread(worker.wait, 60)


async def test_worker_start_is_retried_when_the_fork_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = WorkerProcess.start, [ForkServerEnded("it has ended"), BrokenPipeError("nobody reads")]

    def start_later(process: WorkerProcess) -> None:
        if failures:
            raise failures.pop()
        start(process)

    monkeypatch.setattr(WorkerProcess, "start", start_later)
    async with Session(fed) as session:
        with pytest.raises(JobAborted, match="it has ended") as caught:
            await (await session.execute(pauses, {"seconds": 0}))
        assert isinstance(caught.value.__cause__, WorkerLost)
        failures.append(ForkServerEnded("it has ended"))
        assert await first_value(session, pauses, {"seconds": 0})


@pytest.mark.parametrize("uvloop", [False, True])
async def test_values_pass_between_workers(uvloop: bool, tmp_path: Path) -> None:
    async with Session(fed, options=LocalOptions(uvloop=uvloop)) as session:
        job = await session.execute(dies_once, sets(tmp_path, 3, -1))
        assert sorted(r.value for r in await job.collect()) == [1, 11, 21]


@pytest.mark.parametrize("uvloop", [False, True])
async def test_worker_that_cannot_reach_a_peer_ends(uvloop: bool) -> None:
    pipeline = yielding(lambda: desk_adds(use_all_descriptors(5)))
    async with Session(fed, options=LocalOptions(uvloop=uvloop)) as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobAborted) as caught:
            await job
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert any("Too many open files" in line for line in caught.value.__cause__.lines)


async def test_cancelling_a_hanging_call_spares_other_jobs_of_its_worker(session: Session) -> None:
    other = await session.execute(pauses, None)
    stuck = await session.execute(hangs)
    await running(stuck)
    assert await stuck.cancel(grace=1) == {"lab": "retired"}
    assert [lane.alive for lane in session.stats().lanes] == [True]  # another one has its place already
    fresh = await first_value(session, pauses, {"seconds": 0})
    await other.send_input_params({"seconds": 0})
    pid = (await other.first()).value
    assert pid != fresh
    await other.send_stop_frame()
    assert await other is JobStatus.FINISHED
    await gone(pid, 60)
    async with session.health(interval=0) as health:  # the loop may be notified a little later
        async for sites in health:
            if [worker.pid for worker in sites["lab"].workers] == [fresh]:
                break


async def test_cancel_reports_a_stop_within_the_grace_period() -> None:
    slow = Federation("slow")

    @slow.site("site").operation
    def return_soon() -> None:
        while not current_context().cancelled:
            time.sleep(0.01)
        time.sleep(1.2)

    pipeline = pipeline_of(return_soon)
    async with Session(slow) as session:
        job = await session.execute(pipeline)
        await running(job)
        assert await job.cancel() == {"site": "stopped after grace"}


async def test_a_worker_that_keeps_dying_is_replaced_with_a_pause() -> None:
    async with Session(fed, options=LocalOptions()) as session:
        for _ in range(4):
            with pytest.raises(JobAborted):
                await (await session.execute(always_dies, {"n": 1}))
        start = time.monotonic()
        await (await session.execute(pauses, {"seconds": 0}))
        assert time.monotonic() - start > 0.4  # 0.1 s before the third, and twice as much before each further one
        with pytest.raises(JobAborted):
            await (await session.execute(always_dies, {"n": 1}))
        await (await session.execute(pauses, {"seconds": 0}))
        ((_, _, pool),) = session._target._hosts["lab"].pools  # type: ignore[attr-defined]
        assert pool._deaths[0] == 1, "a job had finished in between"


async def test_the_signal_of_a_lost_worker_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fed = Federation("signals")

    @fed.site("lab").operation
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    async with Session(fed) as session:
        with pytest.raises(JobAborted, match=r"SIGSEGV(.|\n)*The worker ran 'crash'"):
            await session.call(crash)
    assert "a worker of site lab ended with SIGSEGV" in caplog.messages
