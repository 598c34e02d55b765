"""Workers that fall silent are noticed, and so is that they are back; workers without jobs are left in peace."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Job, LocalOptions, Session
from dfm_async.events import WorkerNotice
from dfm_async.wire.worker_output import Heartbeat
from dfm_async.workers.heartbeat import Watch
from tests.local import talkers as t
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import first_value
from tests.support.waiting import running

LIMIT = 0.8
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])


@asynccontextmanager
async def session(limit: float | None = LIMIT, **options: Any) -> AsyncIterator[Session]:
    async with asyncio.timeout(90):
        async with Session(t.fed, options=LocalOptions(unresponsive_after=limit, **options)) as found:
            yield found


async def notices(job: Job, count: int) -> list[WorkerNotice]:
    """Waits for as many notices."""
    found: list[WorkerNotice] = []
    async for event in job.events():
        if isinstance(event, WorkerNotice):
            found.append(event)
            if len(found) == count:
                break
    return found


def worker_of(found: Session, site: str = "talk") -> Any:
    (worker,) = found._target.workers(site)  # type: ignore[attr-defined]
    return worker


def check(found: list[WorkerNotice]) -> None:
    assert [(notice.site, notice.kind) for notice in found] == [("talk", "unresponsive"), ("talk", "responsive")]
    assert found[0].seconds >= LIMIT
    assert "has not responded for" in found[0].detail
    assert "responds again" in found[1].detail


@METHODS
async def test_blocked_event_loop_and_its_recovery_are_reported(caplog: pytest.LogCaptureFixture, method: Any) -> None:
    async with session(start_method=method) as found:
        job = await found.execute(pipeline_of(t.blocks_the_loop, "seconds"), {"seconds": 3.0})
        await notices(job, 1)
        worker = worker_of(found)
        assert worker.stats().unresponsive  # while it is blocked
        check(await notices(job, 2))
        assert not worker.stats().unresponsive
        assert worker.stats().lag is not None
        await job.cancel()
    warnings = [record.getMessage() for record in caplog.records if "respond" in record.getMessage()]
    assert len(warnings) == 2


@METHODS
async def test_stopped_process_and_its_recovery_are_reported(method: Any) -> None:
    async with session(start_method=method) as found:
        pid = await first_value(found, pipeline_of(t.pid))
        job = await found.execute(pipeline_of(t.waits))
        await running(job)
        os.kill(pid, signal.SIGSTOP)
        await notices(job, 1)
        os.kill(pid, signal.SIGCONT)
        check(await notices(job, 2))
        await job.cancel()


async def test_call_that_holds_the_gil_and_its_end_are_reported() -> None:
    async with session() as found:
        job = await found.execute(pipeline_of(t.keeps_the_interpreter, "letters"), {"letters": 26})
        check(await notices(job, 2))
        await job.cancel()


async def test_unresponsive_worker_is_killed_when_its_job_is_cancelled() -> None:
    async with session() as found:
        pid = await first_value(found, pipeline_of(t.pid))
        stopped = await found.execute(pipeline_of(t.waits))
        await running(stopped)
        os.kill(pid, signal.SIGSTOP)
        await notices(stopped, 1)
        assert await stopped.cancel(grace=0.1) == {"talk": "killed"}
        stuck = await found.execute(pipeline_of(t.keeps_the_interpreter, "letters"), {"letters": 60})
        await notices(stuck, 1)
        assert await stuck.cancel(grace=0.1) == {"talk": "killed"}
        assert await first_value(found, pipeline_of(t.pid)) != pid


async def test_job_on_an_unresponsive_worker_is_notified() -> None:
    async with session() as found:
        job = await found.execute(pipeline_of(t.blocks_the_loop, "seconds"), {"seconds": 60})
        await notices(job, 1)
        late = await found.execute(pipeline_of(t.waits))
        (notice,) = await notices(late, 1)
        assert (notice.kind, notice.seconds > LIMIT) == ("unresponsive", True)
        await job.cancel(grace=0.1)


async def test_nothing_is_reported_without_a_limit() -> None:
    async with session(None) as found:
        job = await found.execute(pipeline_of(t.blocks_the_loop, "seconds"), {"seconds": 0.5})
        await running(job)
        stats = worker_of(found).stats()
        assert (stats.lag, stats.unresponsive) == (None, False)
        await job.cancel()


async def test_workers_report_how_many_calls_run_and_wait() -> None:
    async with session() as found, found.health() as health:
        sleeping = await found.execute(pipeline_of(t.sleeps, "seconds"), [{"seconds": 60}] * 20)
        waiting = await found.execute(pipeline_of(t.waits), [{}] * 3)
        async for sites in health:
            workers = sites["talk"].workers
            running, queued = (sum(getattr(worker, name) for worker in workers) for name in ("running", "waiting"))
            if running + queued == 23:
                break
        assert queued >= 4
        assert running > 3  # the coroutines, and some threads
        await sleeping.cancel(grace=0.1)
        await waiting.cancel(grace=0.1)


async def test_worker_without_work_may_send_no_heartbeats() -> None:
    pipeline = yielding(lambda: t.waits_a_moment(t.pid(), 3.0))
    async with session(2.0) as found:  # a worker of a busy machine may pause for long
        job = await found.execute(pipeline)
        await job
        assert [event async for event in job.events() if isinstance(event, WorkerNotice)] == []


async def test_blocked_application_does_not_report_workers() -> None:
    async with session() as found:
        job = await found.execute(pipeline_of(t.waits))
        await running(job)
        for _ in range(3):
            time.sleep(1.0)  # noqa: ASYNC251 - this is what is tested
            await asyncio.sleep(0.3)
        await job.cancel()
        assert [event async for event in job.events() if isinstance(event, WorkerNotice)] == []


def _switches(pid: int) -> int:
    """How often threads of a process went to sleep."""
    statuses = [task / "status" for task in Path(f"/proc/{pid}/task").iterdir()]
    lines = [line for status in statuses for line in status.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.parametrize("limit", [LIMIT, 10.0])
async def test_an_idle_worker_does_not_wake_up(limit: float) -> None:
    async with session(limit) as found:
        pid = await first_value(found, pipeline_of(t.pid))
        idle = asyncio.Event()
        worker = worker_of(found)
        take = worker._watch.heartbeat

        def heartbeat(heartbeat: Heartbeat) -> None:
            take(heartbeat)
            if heartbeat.idle:
                idle.set()

        worker._watch.heartbeat = heartbeat
        await idle.wait()
        assert worker._watch._timer is None
        await asyncio.sleep(0.5)  # its threads may be on their way to sleep
        before, own = _switches(pid), _switches(os.getpid())
        await asyncio.sleep(1.5)
        assert _switches(pid) == before
        assert _switches(os.getpid()) - own < 25  # nor does the application


# the watch itself


class Desk:
    """A watch without a worker."""

    def __init__(self, limit: float) -> None:
        self.told: list[str] = []
        self.unread: list[Callable[[], None]] = []
        self.reading = True
        self.something = asyncio.Event()
        self.watch = Watch(limit, self.when_read, lambda _: self.tell("late"), lambda: self.tell("back"))

    def tell(self, what: str) -> None:
        self.told.append(what)
        self.something.set()

    def armed(self) -> bool:
        return self.watch._timer is not None

    def when_read(self, call: Callable[[], None]) -> None:
        if self.reading:
            call()
        else:
            self.unread.append(call)
            self.something.set()


async def test_unread_heartbeats_count() -> None:
    desk = Desk(0.05)
    desk.reading = False
    desk.watch.begin()
    await desk.something.wait()
    desk.watch.heartbeat(Heartbeat(lag=0.0, alive=time.monotonic()))
    desk.unread.pop()()
    assert desk.told == []
    desk.watch.end()


async def test_workers_get_time_after_the_application_was_blocked() -> None:
    """Both may have been stopped, and go on at the same moment."""
    desk = Desk(0.2)
    desk.watch.begin()
    time.sleep(0.5)  # noqa: ASYNC251 - this is what is tested
    await asyncio.sleep(0.02)
    assert desk.told == []
    await desk.something.wait()
    assert desk.told == ["late"]
    desk.watch.end()


async def test_the_watch_ends_with_the_last_job() -> None:
    desk = Desk(0.05)
    desk.watch.begin()
    desk.watch.end()
    desk.reading = False
    desk.watch.begin()
    await desk.something.wait()
    desk.watch.end()
    desk.unread.pop()()  # asked before the end, answered after it
    assert desk.told == []
    assert not desk.armed()


async def test_idle_heartbeat_before_a_job_does_not_end_the_watch() -> None:
    desk = Desk(0.05)
    old = Heartbeat(lag=0.0, alive=time.monotonic(), idle=True)
    desk.watch.begin()
    desk.watch.heartbeat(old)
    assert desk.armed()
    desk.watch.heartbeat(Heartbeat(lag=0.0, alive=time.monotonic(), idle=True))
    assert not desk.armed()
    desk.watch.heartbeat(Heartbeat(lag=0.0, alive=time.monotonic()))  # it has work after all
    assert desk.armed()
    await desk.something.wait()
    assert not desk.armed()
    desk.watch.heartbeat(Heartbeat(lag=0.0, alive=time.monotonic()))
    assert desk.told == ["late", "back"]
    desk.watch.end()
