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
    FrameCompleted,
    JobAborted,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    RetryPolicy,
    Session,
    WorkerLost,
    WorkerNotice,
    Yield,
)
from dfm_async.workers.fork_server import ForkServerEnded
from dfm_async.workers.start import WorkerProcess
from tests.waiting import running

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


with Pipeline("dies once") as dies_once:
    Yield(desk_adds(die_once(PlaceParam("folder"), PlaceParam("n"), PlaceParam("victim"))))

with Pipeline("streams and dies") as streams_and_dies:
    Yield(count_and_die(PlaceParam("folder"), PlaceParam("first"), PlaceParam("total")))

with Pipeline("always dies") as always_dies:
    Yield(always_die(PlaceParam("n")))

with Pipeline("loops and dies") as loops_and_dies:
    with ForEach(numbers(PlaceParam("total"))) as n:
        Yield(desk_adds(die_once(PlaceParam("folder"), n, PlaceParam("victim"))))


def sets(folder: Path, count: int, victim: int) -> list[dict[str, Any]]:
    return [{"folder": str(folder), "n": n, "victim": victim} for n in range(count)]


async def test_lost_parameter_sets_run_again_and_each_result_comes_once(tmp_path: Path) -> None:
    async with Session(fed) as session:
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


async def test_parameter_sets_that_were_done_do_not_run_again(tmp_path: Path) -> None:
    async with Session(fed) as session:
        job = await session.execute(dies_once, sets(tmp_path, 10, 9), retry=AGAIN, concurrency=1)
        assert len(await job.collect()) == 10
    runs = Counter((tmp_path / "runs").read_text().splitlines())
    assert runs == {**{f"die_once {n}": 1 for n in range(9)}, "die_once 9": 2}


async def test_elements_that_came_before_the_loss_are_not_repeated(tmp_path: Path) -> None:
    async with Session(fed) as session:
        params = {"folder": str(tmp_path), "first": 500, "total": 1000}
        job = await session.execute(streams_and_dies, params, retry=AGAIN)
        results = await job.collect()
        assert [r.value for r in results] == list(range(1000))
        notices = [e.offset async for e in job.events() if isinstance(e, WorkerNotice)]
        assert len(notices) == 1
        assert sum(r.offset < notices[0] for r in results) >= 1


async def test_a_loop_over_sites_runs_again_as_a_whole_and_shows_each_result_once(tmp_path: Path) -> None:
    async with Session(fed) as session:
        params = {"folder": str(tmp_path), "total": 50, "victim": 30}
        job = await session.execute(loops_and_dies, params, retry=AGAIN)
        assert sorted((r.frame, r.value) for r in await job.collect()) == [((0, n), n * 10 + 1) for n in range(50)]


async def test_without_a_policy_the_job_is_aborted(tmp_path: Path) -> None:
    async with Session(fed) as session:
        job = await session.execute(dies_once, sets(tmp_path, 3, 1))
        with pytest.raises(JobAborted) as caught:
            await job
        assert isinstance(caught.value.__cause__, WorkerLost)


async def test_a_job_that_keeps_killing_workers_is_stopped_after_three() -> None:
    async with Session(fed) as session:
        job = await session.execute(always_dies, {"n": 1}, retry=RetryPolicy(on_worker_lost=100))
        with pytest.raises(JobAborted, match="lost 3 workers in a row") as caught:
            await job
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert caught.value.__cause__.exit_code == 5
        assert (await (await session.execute(pauses, {"seconds": 0})).first()).value


async def test_a_parameter_set_runs_again_as_often_as_the_policy_says() -> None:
    async with Session(fed) as session:
        job = await session.execute(always_dies, {"n": 1}, retry=RetryPolicy(on_worker_lost=1))
        with pytest.raises(JobAborted, match="exited with code 5"):
            await job
        assert sum([isinstance(e, WorkerNotice) async for e in job.events()]) == 1


@pytest.mark.parametrize("allowed", [True, False])
async def test_policies_of_operations_count_if_all_of_them_allow_it(tmp_path: Path, allowed: bool) -> None:
    safe = RetryPolicy(attempts=1, on_worker_lost=2)
    with Pipeline("policies") as pipeline:
        found = die_once(str(tmp_path), 1, 1, retry=safe)
        Yield(desk_adds(found, retry=safe) if allowed else desk_adds(found))
    async with Session(fed) as session:
        job = await session.execute(pipeline)
        if allowed:
            assert (await job.first()).value == 11
        else:
            with pytest.raises(JobAborted):
                await job


with Pipeline("pauses") as pauses:
    Yield(pause(PlaceParam("seconds")))

with Pipeline("waits") as waits:
    Yield(wait_for_ever())

with Pipeline("hangs") as hangs:
    Yield(hang())


async def test_a_job_can_be_cancelled_while_it_finds_new_workers() -> None:
    async with Session(fed) as session:
        job = await session.execute(waits, retry=RetryPolicy(on_worker_lost=100))
        await running(job)
        pid = session.stats().sites["lab"].workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async for event in job.events():
            if isinstance(event, WorkerNotice):
                break
        await job.cancel()
        assert job.status is JobStatus.ABORTED
        assert (await (await session.execute(pauses, {"seconds": 0})).first()).value != pid


async def test_killing_a_worker_again_and_again_loses_nothing(tmp_path: Path) -> None:
    async with Session(fed) as session:
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


async def test_the_end_of_the_fork_server_is_the_end_of_its_workers_and_of_nothing_else() -> None:
    async with Session(fed) as session:
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
        await asyncio.to_thread(worker.wait, 5)


async def test_a_start_that_meets_the_end_of_the_fork_server_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert (await (await session.execute(pauses, {"seconds": 0})).first()).value


@pytest.mark.parametrize("uvloop", [False, True])
async def test_values_pass_between_workers(uvloop: bool, tmp_path: Path) -> None:
    async with Session(fed, options=LocalOptions(uvloop=uvloop)) as session:
        job = await session.execute(dies_once, sets(tmp_path, 3, -1))
        async with asyncio.timeout(30):
            assert sorted(r.value for r in await job.collect()) == [1, 11, 21]


@pytest.mark.parametrize("uvloop", [False, True])
async def test_a_worker_that_cannot_reach_a_living_peer_ends_rather_than_hang(uvloop: bool) -> None:
    with Pipeline("unreachable") as pipeline:
        Yield(desk_adds(use_all_descriptors(5)))
    async with Session(fed, options=LocalOptions(uvloop=uvloop)) as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobAborted) as caught:
            async with asyncio.timeout(30):
                await job
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert any("Too many open files" in line for line in caught.value.__cause__.lines)


async def test_cancelling_a_call_that_hangs_does_not_harm_other_jobs_of_the_worker() -> None:
    async with Session(fed) as session:
        other = await session.execute(pauses, None)
        stuck = await session.execute(hangs)
        await running(stuck)
        assert await stuck.cancel(grace=0.1) == {"lab": "retired"}
        assert [lane.alive for lane in session.stats().lanes] == [True]  # another one has its place already
        fresh = (await (await session.execute(pauses, {"seconds": 0})).first()).value
        await other.send_input_params({"seconds": 0})
        pid = (await other.first()).value
        assert pid != fresh
        await other.send_stop_frame()
        assert await other is JobStatus.FINISHED
        process = psutil.Process(pid) if psutil.pid_exists(pid) else None
        if process is not None:
            await asyncio.to_thread(process.wait, 5)
        async with asyncio.timeout(5), session.health(interval=0) as health:  # the loop may hear of it a little later
            async for sites in health:
                if [worker.pid for worker in sites["lab"].workers] == [fresh]:
                    break


async def test_cancel_tells_what_took_a_part_of_the_grace() -> None:
    slow = Federation("slow")

    @slow.site("site").operation
    def return_soon() -> None:
        time.sleep(0.4)

    with Pipeline("slow") as pipeline:
        Yield(return_soon())
    async with Session(slow) as session:
        job = await session.execute(pipeline)
        await running(job)
        await asyncio.sleep(0.1)
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
        (worker,) = session._target._pools.workers  # type: ignore[attr-defined]
        assert worker.delay == 0  # a job had finished in between
