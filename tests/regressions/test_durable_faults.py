"""Regression tests of stored jobs: waiters are notified, nothing is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfm_async import (
    DfmError,
    Job,
    JobAborted,
    JobStatus,
    LocalOptions,
    ParameterError,
    ResultLimits,
    RetryPolicy,
    SessionClosed,
    StatusChanged,
)
from dfm_async.engine.coordinator import Coordinator
from dfm_async.errors import JobInterrupted, ResultsUnread, StoreError
from dfm_async.events import FrameCompleted
from dfm_async.store.base import NewJob, StoredJob
from dfm_async.store.sqlite import SqliteStore
from dfm_async.targets.local import FederationRunner
from dfm_async.workers.site_worker import SiteWorker
from dfm_async.workers.worker import WorkerSetup
from tests.conftest import Open
from tests.support.pipelines import pipeline_of
from tests.support.stored import counts, site, squares, waits
from tests.support.stored import fed as fed  # the federation of ``opens``
from tests.support.stores import locked
from tests.support.waiting import file_created, running

active = 0


@site.operation
async def companions(folder: str, n: int) -> int:
    """Return how many calls run at the same time."""
    global active
    active += 1
    try:
        most = active
        if n >= 3:
            await file_created(f"{folder}/open")
        for _ in range(20):
            await asyncio.sleep(0)
            most = max(most, active)
        return most
    finally:
        active -= 1


alone = pipeline_of(companions, "folder", "n")


async def story(job: Job) -> list[JobStatus]:
    return [event.status async for event in job.events() if isinstance(event, StatusChanged)]


async def leave_open_job(opens: Open, *job_ids: str) -> None:
    """Leave open jobs that were interrupted after their first parameter set."""
    async with opens() as session:
        jobs = [await session.execute(squares, None, job_id=job_id) for job_id in job_ids]
        for job in jobs:
            await job.send_input_params({"n": 1})
            assert (await job.first()).value == 1
    assert [job.status for job in jobs] == [JobStatus.INTERRUPTED for _ in jobs]


# the ends of jobs


async def test_a_late_reader_of_a_job_that_waits_for_one_gets_everything(opens: Open, store_path: Path) -> None:
    """Reading from the store makes room in memory, too."""
    store = SqliteStore(store_path)
    async with opens(store=store) as session:
        job = await session.execute(counts, {"n": 1500}, options=ResultLimits(max_items=300, window=64))
        async with job.results() as results:
            for _ in range(200):
                await anext(results)
        with pytest.raises(ResultsUnread):
            await job
        await store.flush()
        assert [r.value async for r in job.results()] == list(range(1500))
        assert await job is JobStatus.FINISHED


@pytest.mark.parametrize("kept", [0, 1])
async def test_waiters_are_notified_although_few_jobs_are_kept(opens_inline: Open, kept: int) -> None:
    async with opens_inline(options=LocalOptions(keep_finished=kept)) as session:
        jobs = [await session.execute(squares, {"n": n}) for n in range(20)]

        async def outcome(job: Job) -> JobStatus:
            return await job

        found = await asyncio.gather(*map(outcome, jobs))
        assert found == [JobStatus.FINISHED] * 20


async def test_waiters_are_notified_although_the_job_is_forgotten_at_once(
    opens_inline: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    update = SqliteStore.update

    def update_and_notify(store: SqliteStore, job_id: str, **changes: Any) -> None:
        update(store, job_id, **changes)
        if changes.get("status") is JobStatus.FINISHED:
            ended.set()

    monkeypatch.setattr(SqliteStore, "update", update_and_notify)
    async with opens_inline() as session:
        job = await session.execute(squares, None, job_id="short")
        await running(job)
        await job.send_input_params({"n": 2})
        assert (await job.first()).value == 4
        waiter = asyncio.create_task(job.wait_until_finished())
        reader = asyncio.create_task(job.collect())
        await asyncio.sleep(0)
        with locked(store_path):
            # The store is busy with another job. The end comes after it, in one commit with the deletion.
            other = asyncio.create_task(session.execute(squares, {"n": 3}))
            await asyncio.sleep(0)
            stopping = asyncio.create_task(job.send_stop_frame())
            await ended.wait()
            forgetting = asyncio.create_task(session.forget("short"))
            await asyncio.sleep(0)
        await asyncio.gather(other, stopping)
        outcomes = await asyncio.gather(waiter, reader, forgetting, return_exceptions=True)
        assert [
            error for error in outcomes if isinstance(error, BaseException) and not isinstance(error, DfmError)
        ] == []


# creating


@pytest.mark.parametrize("written", [False, True], ids=["before it is written", "when it was written"])
async def test_cancelled_execute_leaves_no_job_in_the_store(
    opens_inline: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    creating, gate = asyncio.Event(), asyncio.Event()
    create = SqliteStore.create

    async def create_slowly(store: SqliteStore, job: NewJob) -> bool:
        if not written:
            creating.set()
            return await create(store, job)
        found = await create(store, job)
        creating.set()
        await gate.wait()
        return found

    monkeypatch.setattr(SqliteStore, "create", create_slowly)
    async with opens_inline() as session:
        with nullcontext() if written else locked(store_path):
            task = asyncio.create_task(session.execute(squares, {"n": 2}, job_id="x"))
            await creating.wait()
            task.cancel()
            await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not (await session.reattach("x")).was_found
        assert [job.job_id for job in await session.refresh_jobs()] == []
        job = await session.execute(squares, {"n": 2}, job_id="x")
        assert [r.value for r in await job.collect()] == [4]
        assert await job is JobStatus.FINISHED


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_job_that_was_not_submitted_is_not_listed(
    opens_inline: Open, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    read, refused = asyncio.Event(), asyncio.Event()
    jobs = SqliteStore.jobs

    async def jobs_slowly(store: SqliteStore, **wanted: Any) -> Any:
        found = await jobs(store, **wanted)
        read.set()
        if when == "meanwhile":
            await refused.wait()
        return found

    listings: list[asyncio.Task[Any]] = []
    async with opens_inline() as session:
        monkeypatch.setattr(SqliteStore, "jobs", jobs_slowly)

        async def submit(*_: Any) -> None:
            listings.append(listing := asyncio.create_task(session.refresh_jobs()))
            await (listing if when == "before" else read.wait())
            raise SessionClosed("while it was submitted")

        monkeypatch.setattr(session._target, "submit", submit)
        with pytest.raises(SessionClosed):
            await session.execute(squares, {"n": 2}, job_id="x")
        refused.set()
        await asyncio.gather(*listings)
        assert session.jobs() == []


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when all else has ended"])
async def test_close_abandons_an_execute_that_waits_for_the_store(
    opens: Open, opens_inline: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    async with opens() as session:
        await (await session.execute(squares, {"n": 1}, job_id="first"))
    before = children()
    creating, all_else_ended = asyncio.Event(), asyncio.Event()
    create, close = SqliteStore.create, SqliteStore.close

    async def create_and_notify(store: SqliteStore, job: NewJob) -> bool:
        if job.job_id == "x":
            creating.set()
        return await create(store, job)

    async def close_and_notify(store: SqliteStore) -> None:
        all_else_ended.set()
        await close(store)

    session = opens()
    await session.connect()
    try:
        await (await session.execute(squares, {"n": 2}, job_id="second"))
        monkeypatch.setattr(SqliteStore, "create", create_and_notify)
        monkeypatch.setattr(SqliteStore, "close", close_and_notify)
        with locked(store_path):
            executing = asyncio.create_task(session.execute(squares, {"n": 3}, job_id="x"))
            await creating.wait()
            closing = asyncio.create_task(session.close())
            await asyncio.sleep(0)
            if late:
                ended = asyncio.create_task(all_else_ended.wait())
                # Whether closing waits for execute, or execute for it, does not matter: only that neither hangs.
                await asyncio.wait([executing, ended], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
        with pytest.raises(SessionClosed):
            await executing
        await closing
    finally:
        await session.close()
    assert children() <= before
    async with opens_inline() as session:
        assert [job.job_id for job in session.jobs()] == ["first", "second"]


async def test_close_with_interrupted_callbacks_logs_no_error(
    opens_inline: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with opens_inline() as session:
        job = await session.execute(squares, None, default_callback=lambda *_: None)
        await running(job)
    assert job.status is JobStatus.INTERRUPTED
    assert [
        record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR
    ] == []


# resuming


@pytest.mark.parametrize("target", ["local"])
async def test_resumed_job_is_retried_if_its_worker_dies_at_start(
    opens: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(store_path.parent)
    async with opens() as session:
        rows = [{"folder": folder, "n": n} for n in (3, 4, 5)]
        job = await session.execute(waits, rows, job_id="x", retry=RetryPolicy(on_worker_lost=2))
        await running(job)
    (store_path.parent / "open").touch()
    start = SiteWorker._start
    killed: list[int] = []

    def start_and_die(worker: SiteWorker, setup: WorkerSetup) -> None:
        start(worker, setup)
        pid = worker.pid
        if pid is not None and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(SiteWorker, "_start", start_and_die)
    async with opens() as session:
        job = await session.resume("x")
        assert sorted(r.value for r in await job.collect()) == [3, 4, 5]
        assert await job is JobStatus.FINISHED
    assert killed


async def leave_unfinished_stream(opens: Open, folder: str) -> None:
    """Leave a job whose unfinished parameter stream has yielded three sets, of which two are done."""
    pulled = asyncio.Event()

    async def stream() -> AsyncIterator[dict[str, Any]]:
        for n in (1, 2, 3):
            yield {"folder": folder, "n": n}
        pulled.set()
        await asyncio.get_running_loop().create_future()

    async with opens() as session:
        job = await session.execute(waits, stream(), job_id="x")
        await pulled.wait()
        done = 0
        async for event in job.events():
            done += isinstance(event, FrameCompleted)
            if done == 2:
                break
    assert job.status is JobStatus.INTERRUPTED


async def test_resume_of_an_unfinished_parameter_stream_needs_the_rest(
    opens: Open, opens_inline: Open, store_path: Path
) -> None:
    folder = str(store_path.parent)
    await leave_unfinished_stream(opens_inline, folder)
    (store_path.parent / "open").touch()
    async with opens() as session:
        with pytest.raises(ParameterError, match="stream") as caught:
            await session.resume("x")
        assert "input_params" in str(caught.value)
        assert (await session.reattach("x")).status is JobStatus.INTERRUPTED
        job = await session.resume("x", input_params=[{"folder": folder, "n": n} for n in (4, 5)])
        found = sorted((r.frame, r.value) for r in await job.collect())
        assert found == [((0,), 1), ((1,), 2), ((2,), 3), ((3,), 4), ((4,), 5)]
        assert await job is JobStatus.FINISHED


async def test_unfinished_parameter_stream_can_be_ended_on_resume(
    opens: Open, opens_inline: Open, store_path: Path
) -> None:
    await leave_unfinished_stream(opens_inline, str(store_path.parent))
    (store_path.parent / "open").touch()
    async with opens() as session:
        job = await session.resume("x", input_params=[])
        assert sorted((r.frame, r.value) for r in await job.collect()) == [((0,), 1), ((1,), 2), ((2,), 3)]
        assert await job is JobStatus.FINISHED


@pytest.mark.parametrize("target", ["local"])
async def test_waiting_resume_does_not_block_other_jobs(
    opens_inline: Open, opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: dict[str, asyncio.Event] = {job_id: asyncio.Event() for job_id in ("a", "b", "x", "z")}
    submit = FederationRunner.submit

    async def submit_and_notify(runner: FederationRunner, coordinator: Coordinator) -> None:
        submitted[coordinator.record.job_id].set()
        await submit(runner, coordinator)

    await leave_open_job(opens_inline, "x", "y")
    monkeypatch.setattr(FederationRunner, "submit", submit_and_notify)
    options = LocalOptions(max_concurrent_jobs=1, queue_limit=1, shutdown_grace=0.5)
    async with opens(options=options) as session:
        for job_id in ("a", "b"):
            await session.execute(squares, None, job_id=job_id)
        resuming = asyncio.create_task(session.resume("x"))
        await submitted["x"].wait()
        assert not resuming.done()
        other = await session.reattach("y")
        assert await other.cancel() == {}
        assert other.status is JobStatus.ABORTED
        late = await session.execute(squares, {"n": 1}, job_id="z", deadline=0.05)
        with pytest.raises(JobAborted, match="deadline"):
            await late
        assert not resuming.done()
        resuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resuming
        with pytest.raises(JobInterrupted):
            await (await session.reattach("x"))


@pytest.mark.parametrize("how", ["resume", "abort"])
async def test_job_that_finishes_before_the_takeover_stays_finished(
    opens_inline: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    await leave_open_job(opens_inline, "x")
    store = SqliteStore(store_path)
    take_over = store.take_over

    async def take_over_too_late(job_id: str) -> StoredJob:
        async with opens_inline() as quicker:
            job = await quicker.resume(job_id)
            await job.send_stop_frame()
            assert await job is JobStatus.FINISHED
        return await take_over(job_id)

    async with opens_inline(store=store) as session:
        seen = await session.reattach("x")
        assert seen.status is JobStatus.INTERRUPTED
        monkeypatch.setattr(store, "take_over", take_over_too_late)
        if how == "resume":
            with pytest.raises(DfmError, match="finished"):
                await session.resume("x")
        else:
            with suppress(DfmError):
                await seen.cancel()
        again = await session.reattach("x")
        assert await again is JobStatus.FINISHED
    async with opens_inline() as session:
        again = await session.reattach("x")
        expected = [JobStatus.RUNNING, JobStatus.INTERRUPTED, JobStatus.RUNNING, JobStatus.FINISHED]
        assert await story(again) == expected
        assert [r.value for r in await again.collect()] == [1]


async def test_resumed_job_runs_one_parameter_set_at_a_time_as_before(opens: Open, store_path: Path) -> None:
    rows = [{"folder": str(store_path.parent), "n": n} for n in range(12)]
    async with opens() as session:
        job = await session.execute(alone, rows, job_id="x", concurrency=1)
        async with job.results() as results:
            assert [(await anext(results)).value for _ in range(3)] == [1, 1, 1]
    (store_path.parent / "open").touch()
    async with opens() as session:
        job = await session.resume("x")
        assert [r.value for r in await job.collect()] == [1] * 12


async def test_earlier_handle_steers_the_resumed_job(opens: Open, opens_inline: Open) -> None:
    await leave_open_job(opens_inline, "x")
    async with opens() as session:
        old = await session.reattach("x")
        assert old.status is JobStatus.INTERRUPTED
        new = await session.resume("x")
        await old.send_input_params({"n": 3})
        async with new.results() as results:
            assert [(await anext(results)).value for _ in range(2)] == [1, 9]
        await old.cancel("enough")
        assert (old.status, new.status) == (JobStatus.ABORTED, JobStatus.ABORTED)
        with pytest.raises(JobAborted, match="enough"):
            await new


async def test_earlier_handle_ends_the_resumed_job(opens: Open, opens_inline: Open) -> None:
    await leave_open_job(opens_inline, "x")
    async with opens() as session:
        old = await session.reattach("x")
        new = await session.resume("x")
        await old.send_stop_frame()
        assert await new is JobStatus.FINISHED
        assert await old is JobStatus.FINISHED


# jobs of other sessions


class Unreachable:
    """Stands for an owner that is alive and cannot be reached."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def __aenter__(self) -> None:
        raise StoreError(self.path, "the owner cannot be reached", "Look there")

    async def __aexit__(self, *error: object) -> None:
        pass


async def test_following_an_unreachable_owner_raises(opens_inline: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteStore, "follow", lambda store, _fence: Unreachable(store.path))
    async with opens_inline() as owner, opens_inline() as session:
        job = await owner.execute(squares, None, job_id="x")
        await job.send_input_params({"n": 1})
        await job.first()
        followed = await session.reattach("x")
        with pytest.raises(StoreError, match="cannot be reached"):
            await followed
        with pytest.raises(StoreError, match="cannot be reached"):
            await followed.collect()
        with pytest.raises(StoreError, match="cannot be reached"):  # an end would mean that the job has ended
            _ = [event async for event in followed.events()]
        await job.send_stop_frame()
        assert await job is JobStatus.FINISHED


async def test_job_resumed_elsewhere_is_seen_completely(opens: Open, opens_inline: Open) -> None:
    await leave_open_job(opens_inline, "x")
    async with opens_inline() as watcher, opens() as owner:
        before = await watcher.reattach("x")
        assert before.status is JobStatus.INTERRUPTED
        last = [event.offset async for event in before.events()][-1]
        job = await owner.resume("x")
        await running(job, after=last)
        again = await watcher.reattach("x")
        assert not again.status.ended
        assert not again.completed.is_set()
        collecting = asyncio.create_task(again.collect())
        await asyncio.sleep(0)
        await job.send_input_params({"n": 5})
        await job.send_stop_frame()
        assert sorted(r.value for r in await job.collect()) == [1, 25]
        assert sorted(r.value for r in await collecting) == [1, 25]
        assert await again is JobStatus.FINISHED
        assert sorted(r.value for r in await before.collect()) == [1, 25]


async def test_job_that_ends_while_it_is_first_followed_is_seen_to_end(
    opens_inline: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session follows another job of the same owner already, and receives the last commit with that one."""
    async with opens_inline() as owner, opens_inline() as watcher:
        first = await owner.execute(squares, None, job_id="first")
        late = await owner.execute(squares, None, job_id="late")
        await running(first)
        await running(late)
        followed = await watcher.reattach("first")
        find, found = SqliteStore.find, asyncio.Event()

        async def find_before_the_end(store: SqliteStore, job_id: str) -> StoredJob | None:
            stored = await find(store, job_id)
            if job_id == "late" and not found.is_set():
                found.set()
                await late.send_stop_frame()
                assert await late is JobStatus.FINISHED
                await first.send_input_params({"n": 3})  # behind the end of the other one
                async for event in followed.events():
                    if isinstance(event, FrameCompleted):
                        break
            return stored

        monkeypatch.setattr(SqliteStore, "find", find_before_the_end)
        assert await (await watcher.reattach("late")) is JobStatus.FINISHED
        assert found.is_set()
        await first.send_stop_frame()
        assert await followed is JobStatus.FINISHED


async def test_ordered_results_of_a_followed_job_come_before_its_end(
    opens: Open, opens_inline: Open, store_path: Path
) -> None:
    """Also if the reader begins behind all stored events, and does not know the frames in flight."""
    folder = str(store_path.parent)
    async with opens() as owner, opens_inline() as watcher:
        rows = [{"folder": folder, "n": n} for n in (3, 4)]
        job = await owner.execute(waits, rows, autostop=False, job_id="x")
        await running(job)
        seen = await watcher.reattach("x")
        async with seen.results(ordered=True, after=0) as results:
            first = asyncio.create_task(anext(results))
            await asyncio.sleep(0)
            (store_path.parent / "open").touch()
            assert [(await first).value, (await anext(results)).value] == [3, 4]
            await job.send_input_params({"folder": folder, "n": 5})
            assert (await anext(results)).value == 5
            assert seen.status is JobStatus.RUNNING
            await job.send_stop_frame()
            assert [r.value async for r in results] == []
        assert await seen is JobStatus.FINISHED


@pytest.mark.parametrize("target", ["local"])
async def test_ordered_results_of_a_followed_waiting_job_come_early(opens_inline: Open, opens: Open) -> None:
    options = LocalOptions(max_concurrent_jobs=1, shutdown_grace=0.5)
    async with opens(options=options) as owner, opens_inline() as watcher:
        running_one = await owner.execute(squares, None)
        job = await owner.execute(squares, [{"n": 2}, {"n": 3}], autostop=False, job_id="x")
        seen = await watcher.reattach("x")
        assert seen.status.value == "submitted"
        async with seen.results(ordered=True) as results:
            first = asyncio.create_task(anext(results))
            await asyncio.sleep(0)
            await running_one.send_stop_frame()
            assert [(await first).value, (await anext(results)).value] == [4, 9]
            assert seen.status is JobStatus.RUNNING
            await job.cancel()


async def test_session_remembers_a_limited_number_of_stored_jobs(opens_inline: Open) -> None:
    async with opens_inline() as session:
        for n in range(12):
            await (await session.execute(squares, {"n": n}, job_id=f"job-{n}"))
    async with opens_inline(options=LocalOptions(keep_finished=1, keep_summaries=3)) as session:
        assert 0 < len(session.jobs()) <= 3
        assert session.stats().remembered <= 3
        assert 0 < len(await session.refresh_jobs()) <= 3
        for n in range(12):
            again = await session.reattach(f"job-{n}")
            assert again.status is JobStatus.FINISHED
            assert [r.value for r in await again.collect()] == [n * n]
        assert len(session.jobs()) <= 4, "three that were found in the store, and one with its log"
