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

from dfm_async import Job, LocalOptions, Pipeline, Session, WorkerNotice, Yield
from dfm_async.wire.output import Pulse
from dfm_async.workers.watch import Watch
from tests.local import talkers as t
from tests.waiting import running

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
    (worker,) = found._target._pools.pools[site].processes  # type: ignore[attr-defined]
    return worker


def check(found: list[WorkerNotice]) -> None:
    assert [(notice.site, notice.kind) for notice in found] == [("talk", "unresponsive"), ("talk", "responsive")]
    assert found[0].seconds >= LIMIT
    assert "has not responded for" in found[0].detail
    assert "responds again" in found[1].detail


@METHODS
async def test_a_blocked_loop_is_noticed_and_so_is_its_return(caplog: pytest.LogCaptureFixture, method: Any) -> None:
    async with session(start_method=method) as found:
        job = await found.execute(t.pipeline(t.blocks_the_loop, "seconds"), {"seconds": 3.0})
        (first,) = await notices(job, 1)
        worker = worker_of(found)
        assert worker.unresponsive
        assert first.seconds < 2.5  # while it is blocked
        check(await notices(job, 2))
        assert not worker.unresponsive
        assert worker.lag is not None
        await job.cancel()
    warnings = [record.getMessage() for record in caplog.records if "respond" in record.getMessage()]
    assert len(warnings) == 2


@METHODS
async def test_a_stopped_process_is_noticed_and_so_is_its_return(method: Any) -> None:
    async with session(start_method=method) as found:
        pid = (await (await found.execute(t.pipeline(t.pid))).first()).value
        job = await found.execute(t.pipeline(t.waits))
        await running(job)
        os.kill(pid, signal.SIGSTOP)
        await notices(job, 1)
        os.kill(pid, signal.SIGCONT)
        check(await notices(job, 2))
        await job.cancel()


async def test_a_call_that_keeps_the_interpreter_is_noticed_and_so_is_its_return() -> None:
    async with session() as found:
        job = await found.execute(t.pipeline(t.keeps_the_interpreter, "letters"), {"letters": 26})
        check(await notices(job, 2))
        await job.cancel()


async def test_what_does_not_respond_is_killed_when_its_job_is_cancelled() -> None:
    async with session() as found:
        pid = (await (await found.execute(t.pipeline(t.pid))).first()).value
        stopped = await found.execute(t.pipeline(t.waits))
        await running(stopped)
        os.kill(pid, signal.SIGSTOP)
        await notices(stopped, 1)
        assert await stopped.cancel(grace=0.1) == {"talk": "killed"}
        stuck = await found.execute(t.pipeline(t.keeps_the_interpreter, "letters"), {"letters": 60})
        await notices(stuck, 1)
        assert await stuck.cancel(grace=0.1) == {"talk": "killed"}
        assert (await (await found.execute(t.pipeline(t.pid))).first()).value != pid


async def test_a_job_that_comes_to_a_silent_worker_is_told() -> None:
    async with session() as found:
        job = await found.execute(t.pipeline(t.blocks_the_loop, "seconds"), {"seconds": 60})
        await notices(job, 1)
        late = await found.execute(t.pipeline(t.waits))
        (notice,) = await notices(late, 1)
        assert (notice.kind, notice.seconds > LIMIT) == ("unresponsive", True)
        await job.cancel(grace=0.1)


async def test_nothing_is_reported_without_a_limit() -> None:
    async with session(None) as found:
        job = await found.execute(t.pipeline(t.blocks_the_loop, "seconds"), {"seconds": 0.5})
        await running(job)
        worker = worker_of(found)
        assert (worker.lag, worker.unresponsive, worker.silence) == (None, False, 0.0)
        await job.cancel()


async def test_a_worker_that_has_done_its_part_of_a_job_may_be_silent() -> None:
    with Pipeline("two sites") as pipeline:
        Yield(t.waits_a_moment(t.pid(), 2.0))
    async with session() as found:
        job = await found.execute(pipeline)
        await job
        assert [event async for event in job.events() if isinstance(event, WorkerNotice)] == []


async def test_workers_are_not_blamed_for_our_own_absence() -> None:
    async with session() as found:
        job = await found.execute(t.pipeline(t.waits))
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
        pid = (await (await found.execute(t.pipeline(t.pid))).first()).value
        idle = asyncio.Event()
        worker = worker_of(found)
        take = worker._watch.pulse

        def pulse(pulse: Pulse) -> None:
            take(pulse)
            if pulse.idle:
                idle.set()

        worker._watch.pulse = pulse
        await idle.wait()
        assert worker._watch._timer is None
        before = _switches(pid)
        await asyncio.sleep(3)
        assert _switches(pid) - before <= 1  # it may have been on its way to sleep


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


async def test_pulses_that_wait_unread_count() -> None:
    desk = Desk(0.05)
    desk.reading = False
    desk.watch.begin()
    await desk.something.wait()
    desk.watch.pulse(Pulse(0.0, time.monotonic()))
    desk.unread.pop()()
    assert desk.told == []
    desk.watch.end()


async def test_after_our_own_absence_there_is_time_to_give_a_sign() -> None:
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


async def test_an_idle_pulse_from_before_a_job_does_not_end_the_watch() -> None:
    desk = Desk(0.05)
    old = Pulse(0.0, time.monotonic(), idle=True)
    desk.watch.begin()
    desk.watch.pulse(old)
    assert desk.armed()
    desk.watch.pulse(Pulse(0.0, time.monotonic(), idle=True))
    assert not desk.armed()
    desk.watch.pulse(Pulse(0.0, time.monotonic()))  # it has work after all
    assert desk.armed()
    await desk.something.wait()
    assert not desk.armed()
    desk.watch.pulse(Pulse(0.0, time.monotonic()))
    assert desk.told == ["late", "back"]
    desk.watch.end()
