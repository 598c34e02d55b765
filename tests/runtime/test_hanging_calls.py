"""Calls that exceed their deadline and do not return: what they may cost others, and what becomes of their process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from dfm_async import (
    Failure,
    Federation,
    Job,
    JobAborted,
    JobFailed,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    Program,
    Result,
    RetryPolicy,
    Session,
    Yield,
    current_context,
)
from dfm_async.events import WorkerNotice
from dfm_async.runtime.threads import ABANDONED_LIMIT
from dfm_async.telemetry import read_trace
from dfm_async.web import Service
from dfm_async.workers import site_worker
from tests.conftest import Connect
from tests.runtime.hanging import (
    Body,
    Closed,
    Slow,
    SlowToBegin,
    apart,
    at_home,
    blocks,
    fed,
    hang,
    holds,
    holds_in_steps,
    lazily,
    many,
    other,
    quickly,
    steps,
    sticks,
    thousand,
    unlimited,
    where,
    work,
    written,
)
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import first_value
from tests.support.waiting import running, until


def hanging(operation: Any) -> Pipeline:
    return pipeline_of(operation, "x", "gate", "hanging")


class Gate:
    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._open: int | None = None

    def open(self) -> None:
        """Lets those go that wait for it, in whatever process, and all who come."""
        if self._open is None:
            self._open = os.open(self.path, os.O_RDWR)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    found = Gate(tmp_path / "gate")
    yield found
    found.open()
    for thread in threading.enumerate():  # those that were abandoned in this process
        if thread.name.startswith("dfm-"):
            thread.join(10)
    found.close()


def sets(gate: Gate, count: int, hanging: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"x": x, "gate": gate.path, "hanging": hanging} for x in range(first, first + count)]


async def outcome(job: Job) -> Counter[str]:
    found: Counter[str] = Counter()
    item: Any
    async for item in job.results(errors="yield"):
        if isinstance(item, Result):
            found["ok"] += 1
        elif item.place is None:
            found[getattr(item.error, "type_name", type(item.error).__name__)] += 1
    return found


KINDS = [work, apart, Body, Closed, lazily]


@pytest.mark.parametrize("operation", KINDS, ids=lambda found: found.name)
async def test_more_hanging_calls_than_threads_fail_alone(connect: Connect, gate: Gate, operation: Any) -> None:
    pipeline = hanging(operation)
    async with connect(fed) as session, asyncio.timeout(30):
        job = await session.execute(pipeline, sets(gate, 30, hanging=5))
        assert await outcome(job) == {"ok": 25, "TimeoutError": 5}
        job = await session.execute(pipeline, sets(gate, 5, hanging=0))
        assert await outcome(job) == {"ok": 5}


async def test_a_hundred_hanging_calls_fail_alone(connect: Connect, gate: Gate, tmp_path: Path) -> None:
    free = Gate(tmp_path / "free")
    free.open()
    async with connect(many) as session, asyncio.timeout(60):
        job = await session.execute(sticks, [{"gate": path} for path in (gate.path, free.path) for _ in range(100)])
        assert await outcome(job) == {"ok": 100, "TimeoutError": 100}
        assert await (await session.execute(sticks, {"gate": free.path})) is JobStatus.FINISHED
    free.close()


async def test_several_operations_and_jobs_hang_side_by_side(connect: Connect, gate: Gate) -> None:
    async with connect(fed) as session, asyncio.timeout(30):
        jobs = [
            await session.execute(hanging(operation), sets(gate, 10, hanging=3)) for operation in (work, other, work)
        ]
        for job in jobs:
            assert await outcome(job) == {"ok": 7, "TimeoutError": 3}
        assert await first_value(session, quickly, {"x": 7}) == 7


async def test_a_call_that_hangs_is_tried_again_in_another_thread(connect: Connect, gate: Gate) -> None:
    with Pipeline("again") as again:
        retry = RetryPolicy(attempts=3, backoff=0.0)
        Yield(work(PlaceParam("x"), PlaceParam("gate"), PlaceParam("hanging"), retry=retry))
    async with connect(fed) as session, asyncio.timeout(30):
        job = await session.execute(again, sets(gate, 1, hanging=1))
        with pytest.raises(JobFailed) as caught:
            await job
        error: Any = caught.value.errors[0]
        assert error.attempt == 3
        assert await first_value(session, quickly, {"x": 7}) == 7


async def retired(session: Session, location: str = "lab", restarts: int = 1) -> None:
    """Returns when a worker was replaced and has ended."""
    while True:  # no event reports the end of a worker that has no jobs
        site = session.stats().sites[location]
        if site.restarts >= restarts and not any(worker.retired for worker in site.workers):
            return
        await asyncio.sleep(0.02)


async def test_a_worker_with_hanging_calls_is_replaced(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    async with Session(fed) as session:
        before = await first_value(session, where)
        await outcome(await session.execute(hanging(work), sets(gate, 3, hanging=3)))
        await retired(session)
        after = await first_value(session, where)
        assert after != before
        assert session.stats().sites["lab"].restarts == 1
        assert not psutil.pid_exists(before)
    assert "takes no further jobs and is replaced: a call of 'work' of job" in caplog.text


async def test_the_process_of_an_operation_is_replaced(gate: Gate) -> None:
    async with Session(fed) as session:
        await outcome(await session.execute(hanging(apart), sets(gate, 3, hanging=0)))
        (old,) = [worker.pid for worker in session.stats().sites["lab:apart"].workers]
        await outcome(await session.execute(hanging(apart), sets(gate, 3, hanging=3)))
        await retired(session, "lab:apart")
        assert old is not None
        assert not psutil.pid_exists(old)
        assert await outcome(await session.execute(hanging(apart), sets(gate, 3, hanging=0))) == {"ok": 3}


async def test_a_call_that_returns_soon_after_its_deadline_replaces_nothing(gate: Gate) -> None:
    with Pipeline("late") as late:
        given = [PlaceParam(name, multiuse=True) for name in ("x", "gate", "hanging")]
        Yield(work(*given, deadline=60.0))
        Yield(work(*given, deadline=0.5), place="late")
    async with Session(fed) as session:
        before = await first_value(session, where)
        job = await session.execute(late, sets(gate, 1, hanging=1))
        item: Any
        async for item in job.results(errors="yield"):
            if isinstance(item, Failure):
                gate.open()
        assert await first_value(session, where) == before
        assert session.stats().sites["lab"].restarts == 0


async def test_healthy_jobs_of_a_replaced_worker_run_to_their_end(gate: Gate, tmp_path: Path) -> None:
    started, release = Gate(tmp_path / "started"), Gate(tmp_path / "release")
    async with Session(fed) as session:
        healthy = await session.execute(holds, {"started": started.path, "gate": release.path})
        await asyncio.to_thread(hang, started.path)
        job = await session.execute(hanging(work), sets(gate, 3, hanging=3))
        assert (await outcome(job))["TimeoutError"] == 3
        notice = await anext(event async for event in healthy.events() if isinstance(event, WorkerNotice))
        assert notice.kind == "retired"
        assert "a call of 'work' of job" in notice.detail
        fresh = await first_value(session, where)
        stats = session.stats().sites["lab"]
        assert {worker.pid: worker.retired for worker in stats.workers}[fresh] is False
        assert sum(worker.abandoned for worker in stats.workers) >= 1
        release.open()
        old = (await healthy.first()).value
        assert old != fresh
        assert await healthy is JobStatus.FINISHED
        await retired(session)
    started.close()
    release.close()


async def test_too_many_hanging_calls_end_their_worker(gate: Gate) -> None:
    async with Session(many) as session, asyncio.timeout(60):
        job = await session.execute(sticks, [{"gate": gate.path}] * (ABANDONED_LIMIT * 3))
        with pytest.raises(JobAborted, match="too many calls on it do not return: a call of 'stuck'"):
            await job
        gate.open()
        assert await (await session.execute(sticks, {"gate": gate.path})) is JobStatus.FINISHED


async def test_too_many_hanging_calls_are_an_error_in_the_own_process(gate: Gate) -> None:
    session = Session(many, target="inline")
    service = Service(session=session, pipelines={"stuck": sticks})
    transport = httpx2.ASGITransport(service.app)
    async with (
        service.lifespan(),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        asyncio.timeout(60),
    ):
        assert (await client.get("/ready")).status_code == 200
        found = await outcome(await session.execute(sticks, [{"gate": gate.path}] * (ABANDONED_LIMIT * 3)))
        assert found["TimeoutError"] > ABANDONED_LIMIT
        assert found["RuntimeError"] == ABANDONED_LIMIT * 3 - found["TimeoutError"]
        assert session.stats().unready == ("lab",)
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert "sites that cannot serve: lab" in answer.text
        refused = await session.execute(sticks, {"gate": gate.path})
        with pytest.raises(JobFailed, match="site 'lab' runs no further synchronous calls: "):
            await refused
        gate.open()
        while True:  # the threads come back one by one
            if not session.stats().unready:
                break
            await asyncio.sleep(0.01)
        assert await (await session.execute(sticks, {"gate": gate.path})) is JobStatus.FINISHED
        assert (await client.get("/ready")).status_code == 200


async def test_the_homesite_goes_on_when_its_calls_hang(gate: Gate) -> None:
    async with Session(fed, homesite="desk") as session, asyncio.timeout(30):
        job = await session.execute(hanging(at_home), sets(gate, 12, hanging=4))
        assert await outcome(job) == {"ok": 8, "TimeoutError": 4}


@pytest.mark.parametrize("pipeline", [holds, holds_in_steps], ids=["calls", "generators"])
async def test_hanging_calls_of_a_cancelled_job_keep_no_threads(
    connect: Connect, gate: Gate, tmp_path: Path, pipeline: Pipeline
) -> None:
    """A healthy job keeps the worker from being killed at once; another job on it needs the threads."""
    started, hanging, release = (Gate(tmp_path / name) for name in ("started", "hanging", "release"))
    async with connect(fed) as session, asyncio.timeout(30):
        healthy = await session.execute(holds, {"started": started.path, "gate": release.path})
        await asyncio.to_thread(hang, started.path)
        job = await session.execute(pipeline, {"started": hanging.path, "gate": gate.path})
        await asyncio.to_thread(hang, hanging.path)
        after = await session.execute(quickly, [{"x": x} for x in range(4)])
        outcomes = await job.cancel(grace=0.1)
        assert outcomes["lab"] in ("retired", "abandoned")
        assert await outcome(after) == {"ok": 4}
        release.open()
        assert await healthy is JobStatus.FINISHED
    release.close()


async def test_cancelling_after_a_deadline_does_not_wait_for_hanging_calls(connect: Connect, gate: Gate) -> None:
    with Pipeline("two") as two:
        Yield(work(PlaceParam("x", multiuse=True), PlaceParam("gate", multiuse=True), PlaceParam("hanging")))
        Yield(steps(PlaceParam("x", multiuse=True), PlaceParam("gate", multiuse=True), 0), place="steps")
    async with connect(fed) as session, asyncio.timeout(30):
        job = await session.execute(two, input_params=_endless(gate))
        item: Any
        async for item in job.results(errors="yield"):
            if isinstance(item, Failure):
                break
        assert (await job.cancel(grace=60))["lab"] in ("stopped", "stopped after grace")


async def _endless(gate: Gate) -> AsyncIterator[dict[str, Any]]:
    yield sets(gate, 1, hanging=1)[0]
    await asyncio.Event().wait()


@pytest.mark.parametrize("operation", [work, apart, unlimited, steps], ids=lambda found: found.name)
async def test_closing_is_bounded_while_calls_hang(connect: Connect, gate: Gate, operation: Any) -> None:
    async with asyncio.timeout(30):
        async with connect(fed, options=LocalOptions(shutdown_grace=0.2)) as session:
            job = await session.execute(hanging(operation), sets(gate, 4, hanging=4))
            await running(job)
        assert job.status in (JobStatus.ABORTED, JobStatus.FAILED)


@pytest.mark.parametrize("cancels", [True, False], ids=["cancel", "close"])
async def test_a_constructor_that_hangs_is_killed_with_its_worker(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    monkeypatch.setenv("HANGING_GATE", gate.path)
    slow = pipeline_of(Slow, "x")
    async with asyncio.timeout(30):
        async with Session(fed, options=LocalOptions(shutdown_grace=0.2)) as session:
            job = await session.execute(slow, {"x": 1})
            await running(job)
            if cancels:
                assert await job.cancel(grace=0.2) == {"lab": "killed"}
                assert await first_value(session, quickly, {"x": 3}) == 3
        assert job.status is JobStatus.ABORTED


@pytest.mark.parametrize("operation", [blocks, SlowToBegin], ids=lambda found: found.name)
async def test_worker_whose_loop_is_blocked_beyond_a_deadline_is_replaced(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, operation: Any
) -> None:
    monkeypatch.setenv("HANGING_GATE", gate.path)
    monkeypatch.setattr(site_worker, "_OVERDUE", 0.1)
    async with asyncio.timeout(30):
        async with Session(fed, options=LocalOptions(unresponsive_after=0.4)) as session:
            job = await session.execute(pipeline_of(operation, "x"), {"x": 1})
            with pytest.raises(JobAborted, match=r"has blocked its event loop .* the deadline of a call passed"):
                await job
            assert await first_value(session, quickly, {"x": 3}) == 3


async def test_async_call_that_ignores_its_cancellation_fails_after_its_deadline() -> None:
    ignoring, released = Federation("ignoring"), asyncio.Event()

    @ignoring.site("lab").operation(deadline=0.05)
    async def ignores(x: int) -> int:
        while x and not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()
        return x

    async with Session(ignoring, target="inline", options=LocalOptions(shutdown_grace=0.05)) as session:
        job = await session.execute(pipeline_of(ignores, "x"), [{"x": 0}, {"x": 1}])
        async with asyncio.timeout(30):
            assert await outcome(job) == {"ok": 1, "TimeoutError": 1}
        released.set()


@pytest.mark.parametrize("late", ["returns", "raises", "goes on"])
async def test_async_call_that_ignores_its_cancellation_is_tried_again(late: str) -> None:
    ignoring, released, second = Federation("ignoring"), asyncio.Event(), asyncio.Event()
    attempts: list[int] = []

    @ignoring.site("lab").operation(deadline=0.2, retry=RetryPolicy(attempts=3, backoff=0.01), limit=1)
    async def ignores(x: int) -> int:
        attempts.append(number := len(attempts))
        if number == 1:  # it runs beside the first one
            second.set()
        ends = released if late == "goes on" else second
        while number < 2 and not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()
        if number == 0 and late == "raises":
            raise ValueError(x)
        if number == 1:
            await asyncio.sleep(3600)
        return 10 * x + number

    async with Session(ignoring, target="inline", options=LocalOptions(shutdown_grace=0.05)) as session:
        try:
            async with asyncio.timeout(30):
                assert await session.call(ignores, 4) == 42
        finally:
            released.set()
            second.set()
    assert attempts == [0, 1, 2]


async def test_calls_that_wait_are_not_run_after_a_cancellation(connect: Connect, gate: Gate, tmp_path: Path) -> None:
    started, noted = Gate(tmp_path / "started"), tmp_path / "noted"
    noting = Federation("noting")

    @noting.site("lab", threads=1).operation
    def note(path: str, started: str, gate: str) -> None:
        with Path(path).open("a") as file:
            file.write("x")
        os.close(os.open(started, os.O_WRONLY))
        while not current_context().cancelled:
            time.sleep(0.01)
        os.close(os.open(gate, os.O_RDONLY))

    pipeline = pipeline_of(note, "path", "started", "gate")
    async with connect(noting) as session, asyncio.timeout(30):
        gate.open()
        given = {"path": str(noted), "started": started.path, "gate": gate.path}
        job = await session.execute(pipeline, [given] * 5)
        await asyncio.to_thread(hang, started.path)
        await job.cancel(grace=20)
    assert noted.read_text() == "x"


@pytest.mark.parametrize("target", ["inline"])
@pytest.mark.parametrize("hangs", ["reader", "source"])
async def test_abandoned_call_does_not_take_closed_input_as_complete(
    connect: Connect, gate: Gate, tmp_path: Path, hangs: str
) -> None:
    path = tmp_path / "end"
    with Pipeline("written") as pipeline:
        if hangs == "reader":
            written(thousand(), PlaceParam("gate"), PlaceParam("path"))
        else:
            written(steps(0, PlaceParam("gate"), 1), "", PlaceParam("path"))
    async with connect(fed) as session, asyncio.timeout(30):
        job = await session.execute(pipeline, {"gate": gate.path, "path": str(path)})
        with pytest.raises(JobFailed, match="the deadline of"):
            await job
        gate.open()
        await until(path.exists)  # nobody waits for the call any more
    assert path.read_text() == "the call has ended or exceeded its deadline: its stream is closed"


@pytest.mark.parametrize("target", ["inline"])
async def test_a_generator_that_hangs_is_abandoned_with_its_cancelled_job(
    connect: Connect, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = Gate(tmp_path / "started")
    async with connect(fed) as session, asyncio.timeout(30):
        job = await session.execute(holds_in_steps, {"started": started.path, "gate": gate.path})
        await asyncio.to_thread(hang, started.path)
        assert await job.cancel(grace=0.1) == {"lab": "abandoned"}
        await until(lambda: not any("stop of job" in task.get_name() for task in asyncio.all_tasks()))
        await until(lambda: "a call of 'held_steps#0' of job" in caplog.text)
    assert "site lab: 1 calls do not return and are abandoned" in caplog.text


@pytest.mark.parametrize("target", ["inline"])
async def test_too_many_generators_that_hang_make_their_site_unready(
    connect: Connect, gate: Gate, tmp_path: Path
) -> None:
    pipeline = yielding(lambda: steps(0, PlaceParam("gate"), 1))
    count = ABANDONED_LIMIT + 1
    async with connect(fed) as session, asyncio.timeout(60):
        job = await session.execute(pipeline, [{"gate": gate.path}] * count, concurrency=count)
        results = job.results()
        for _ in range(count):
            await anext(results)
        await job.cancel(grace=0.0)
        await until(lambda: session.stats().unready == ("lab",))
        with pytest.raises(JobFailed, match="site 'lab' runs no further synchronous calls: "):
            await (await session.execute(pipeline, {"gate": gate.path}))
        gate.open()
        await until(lambda: not session.stats().unready)  # the threads return one by one
        assert await first_value(session, quickly, {"x": 3}) == 3


# waiting and running


async def test_the_time_that_a_call_waits_does_not_count(connect: Connect) -> None:
    narrow = Federation("narrow")
    site = narrow.site("lab", threads=1)

    @site.operation(deadline=0.5)
    def sleepy(x: int) -> int:
        time.sleep(0.05)
        return x

    pipeline = pipeline_of(sleepy, "x")
    async with connect(narrow) as session, asyncio.timeout(60):
        job = await session.execute(pipeline, [{"x": x} for x in range(25)])
        assert await outcome(job) == {"ok": 25}


async def test_a_late_call_reports_how_long_it_had_waited(connect: Connect, gate: Gate) -> None:
    narrow = Federation("narrow")
    site = narrow.site("lab", threads=1)

    @site.operation(deadline=0.4)
    def stuck(gate: str) -> None:
        os.close(os.open(gate, os.O_RDONLY))

    pipeline = pipeline_of(stuck, "gate")
    async with connect(narrow) as session, asyncio.timeout(60):
        job = await session.execute(pipeline, [{"gate": gate.path}] * 2)
        texts = []
        item: Any
        async for item in job.results(errors="yield"):
            if isinstance(item, Failure) and item.place is None:
                texts.append(str(getattr(item.error, "message", "")))
    assert sorted(text.partition(",")[2][:14] for text in texts) == ["", " not counting "]


async def test_a_job_over_its_deadline_reports_calls_that_waited(connect: Connect, gate: Gate) -> None:
    async with connect(fed) as session, asyncio.timeout(30):
        await first_value(session, quickly, {"x": 1})  # the workers have started
        job = await session.execute(hanging(unlimited), sets(gate, 6, hanging=6), deadline=1.0)
        opening = asyncio.get_running_loop().call_later(1.5, gate.open)
        with pytest.raises(JobAborted, match="of 1 s was exceeded; 4 calls were waiting for a thread at 'lab'"):
            await job
        opening.cancel()


PROGRAM = """
import os
from dfm_async.exchange import sync

sync.init()
while (task := sync.receive()) is not None:
    os.close(os.open(task.data["gate"], os.O_RDONLY))
    sync.send(task.data["x"])
"""


@pytest.mark.parametrize("target", ["local"])
async def test_a_deadline_does_not_count_what_a_call_waits_for_a_program(
    connect: Connect, gate: Gate, tmp_path: Path
) -> None:
    script, opened, never = tmp_path / "program.py", Gate(tmp_path / "opened"), Gate(tmp_path / "never")
    script.write_text(PROGRAM)
    programs = Federation("programs")

    @programs.site("lab").operation(program=Program(argv=[sys.executable, script]))
    def run(x: int, gate: str) -> int: ...  # type: ignore[empty-body]

    with Pipeline("three") as three:
        Yield(run(0, PlaceParam("gate")))
        Yield(run(1, PlaceParam("opened"), deadline=1.0), place="second")
        Yield(run(2, PlaceParam("never"), deadline=0.5), place="third")
    opened.open()
    async with connect(programs) as session, asyncio.timeout(60):
        job = await session.execute(three, {"gate": gate.path, "opened": opened.path, "never": never.path})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job.first(), 3.0)  # longer than any deadline
        assert job.status is JobStatus.RUNNING
        gate.open()
        values = []
        item: Any
        async for item in job.results(errors="yield"):
            if isinstance(item, Result):
                values.append(item.value)
        assert sorted(values) == [0, 1]
        with pytest.raises(JobFailed, match=r"the deadline of 0\.5 s for 'run' was exceeded, not counting "):
            await job
    opened.close()


async def test_spans_begin_when_calls_have_their_threads(connect: Connect, tmp_path: Path) -> None:
    narrow = Federation("narrow")

    @narrow.site("lab", threads=1).operation
    def sleepy(x: int) -> int:
        time.sleep(0.05)
        return x

    pipeline = pipeline_of(sleepy, "x")
    path = tmp_path / "trace.jsonl"
    async with connect(narrow, trace=path) as session, asyncio.timeout(60):
        job = await session.execute(pipeline, [{"x": x} for x in range(8)], watch=True)
        await job
        calls = [call async for activity in job.activity() for call in activity.calls]
    calls.sort(key=lambda call: call.start)
    assert all(after.start - before.start > 0.04 for before, after in itertools.pairwise(calls))
    assert calls[-1].waited >= 6 * 0.05
    spans = sorted((span for span in read_trace(path) if span.name == "dfm.operation"), key=lambda span: span.start)
    assert len(spans) == 8
    assert all(after.start - before.start > 0.04e9 for before, after in itertools.pairwise(spans))
    assert float(spans[-1].attributes["dfm.waited"]) >= 6 * 0.05  # the first may run before the last is queued
