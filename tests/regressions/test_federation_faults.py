"""Regression tests of running jobs: a fault of one job must not fail, hang or starve the others."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    Job,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationFailed,
    Pipeline,
    PlaceParam,
    Progress,
    ResultLimits,
    RetryPolicy,
    Session,
    TryFromCache,
    Yield,
    current_context,
)
from dfm_async.engine.coordinator import Coordinator
from dfm_async.engine.engine import Engine
from dfm_async.errors import QueueFull, ResultsUnread
from dfm_async.events import WorkerNotice
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.job_spec import JobSpec
from dfm_async.results.record import JobRecord
from dfm_async.wire import messages as msg
from dfm_async.wire.channel import Channel
from dfm_async.wire.codec import Codec
from dfm_async.workers.site_worker import SiteWorker
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import SHORT
from tests.support.waiting import first_event, running

fed = Federation("faults")
site, desk = fed.site("site"), fed.site("desk")


@site.operation
async def square(n: int) -> int:
    return n * n


@site.operation
async def process_of(n: int) -> int:
    return os.getpid()


@site.operation
def numbers(n: int) -> Iterator[int]:
    yield from range(n)


@site.operation
async def fail(n: int) -> int:
    raise ValueError(f"{n} is not wanted")


@site.operation
async def send_with_number_as_key(n: int, job: str) -> int:
    await current_context().send_to_place("n", n, job=job, key=n)  # type: ignore[arg-type] # the fault
    return n


@site.operation
async def say(text: str) -> int:
    current_context().progress(1, note=text)
    return 7


@site.operation
def say_half() -> int:
    current_context().progress("half")  # type: ignore[arg-type] # the fault
    return 7


@site.operation
def say_half_of_a_stream() -> Iterator[int]:
    current_context().progress(1, "half")  # type: ignore[arg-type] # the fault
    yield 7


@site.operation
async def say_half_on_the_loop() -> int:
    current_context().progress("half")  # type: ignore[arg-type] # the fault
    return 7


@site.operation
def lock(n: int) -> Any:
    return threading.Lock()


@site.operation
def second(first: Any, n: int) -> int:
    return n


@desk.operation
async def tell(n: int, job: str) -> int:
    await current_context().send_to_place("n", n, job=job)
    return n


@site.operation
async def square_or_die_once(n: int, folder: str) -> int:
    if n == 0:
        try:
            (Path(folder) / "died").touch(exist_ok=False)
        except FileExistsError:
            return 0
        os.kill(os.getpid(), signal.SIGKILL)
    return n * n


squares = pipeline_of(square, "n")
processes = pipeline_of(process_of, "n")
says = pipeline_of(say, "text")
sends = pipeline_of(send_with_number_as_key, "n", "job")

with Pipeline("fails") as fails:
    with ForEach(numbers(PlaceParam("n"))) as element:
        Yield(fail(element))

with Pipeline("locks") as locks:
    with TryFromCache(PlaceParam("n", multiuse=True)) as cached:
        cached.store(lock(PlaceParam("n", multiuse=True)))
    Yield(second(cached, PlaceParam("n", multiuse=True)))

tells = pipeline_of(tell, "n", "job")


async def start_open(session: Session, pipeline: Pipeline = squares, **options: Any) -> Job:
    """Start an open job, and wait until it runs."""
    job = await session.execute(pipeline, None, **options)
    await running(job)
    return job


async def ends_well(job: Job) -> None:
    """Check that an open job takes a parameter set, and finishes."""
    await job.send_input_params({"n": 12})
    await job.send_stop_frame()
    assert [r.value for r in await job.collect()] == [144]
    assert await job is JobStatus.FINISHED


@pytest.fixture
async def session(connect: Connect) -> AsyncIterator[Session]:
    """A session with another job, which must not be affected by what the test does."""
    async with connect(fed, options=SHORT) as session:
        other = await start_open(session, job_id="other")
        yield session
        await ends_well(other)


def first_error(error: JobFailed) -> OperationFailed:
    found = error.errors[0]
    assert isinstance(found, OperationFailed)
    return found


# unsendable values


async def test_key_that_is_not_text_is_an_error_of_the_sender(session: Session) -> None:
    taker = await start_open(session, job_id="taker")
    sender = await session.execute(sends, {"n": 3, "job": "taker"})
    with pytest.raises(JobFailed) as caught:
        await sender
    assert first_error(caught.value).type_name.endswith("TypeError")
    assert "key" in str(caught.value)
    await ends_well(taker)


async def test_note_with_surrogates_is_escaped(session: Session) -> None:
    job = await session.execute(says, {"text": "caf\udce9"})
    assert await job is JobStatus.FINISHED
    assert [event.note async for event in job.events() if isinstance(event, Progress)] == ["caf\\udce9"]


@pytest.mark.parametrize(("job_id", "error"), [(5, TypeError), ("caf\udce9", ValueError)], ids=["number", "surrogate"])
async def test_invalid_job_id_is_refused_before_anything_starts(
    session: Session, job_id: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await session.execute(squares, {"n": 2}, job_id=job_id)
    assert [job.job_id for job in session.jobs()] == ["other"]
    assert session.stats().running == 1


class Written(asyncio.WriteTransport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()

    def write(self, data: Any) -> None:
        self.data += data


async def test_unencodable_message_raises_and_the_channel_stays_usable() -> None:
    got: list[Any] = []
    here, there = Channel(got.append, got.append), Channel(got.append, got.append)
    transport = Written()
    here.connection_made(transport)
    before, after = msg.WorkerReady(1, "before"), msg.WorkerReady(2, "after")
    here.send(before)
    with pytest.raises(ValueError, match="surrogates"):
        here.send(msg.WorkerReady(3, "caf\udce9"))
    here.send(after)
    with pytest.raises(ValueError, match="surrogates"):
        here.send(msg.WorkerRefused("reason", "caf\udce9"))
    here.flush()
    there.data_received(bytes(transport.data))
    assert got == [before, after]
    await asyncio.sleep(0)  # the flush that was scheduled finds nothing
    assert got == [before, after]


# progress


@pytest.mark.parametrize("operation", [say_half, say_half_of_a_stream, say_half_on_the_loop])
async def test_invalid_progress_is_an_error_of_its_operation(session: Session, operation: Any) -> None:
    with pytest.raises(JobFailed) as caught:
        await (await session.execute(pipeline_of(operation)))
    assert first_error(caught.value).type_name.rpartition(".")[2] in ("TypeError", "ValueError")


async def test_unread_progress_is_bounded() -> None:
    """While the log is full, the last report of each call waits, for a limited number of calls."""
    async with Session(fed, target="inline") as session:
        plan = await session.prepare(says)
    record = JobRecord(JobSpec(job_id=JobId("job"), limits=ResultLimits(max_items=10, window=10)), plan)
    codec = Codec.for_processes()
    coordinator = Coordinator(record, codec, None)
    coordinator.launch(JobNumber(1), ())
    at = plan.sites_at.index("site")
    values = codec.dumps([codec.pack(n) for n in range(20)])
    coordinator.receive(msg.ResultBatch(1, at, [(0, (0,), 0, 20)], values, []))
    assert record.log.full
    for first in range(0, 5000, 500):
        reports: list[tuple[str, tuple[int, ...], float, float | None, str]] = [
            ("say#0", (n,), 1.0, None, "note") for n in range(first, first + 500)
        ]
        coordinator.receive(msg.ProgressMade(1, at, reports))
    reader = record.log.reader(record.log.first - 1)
    coordinator.halt(JobStatus.ABORTED, "enough", 5)
    for location in range(len(plan.locations)):
        coordinator.receive(msg.JobStopped(1, location))
    found = []
    while (event := await reader.next()) is not None:
        found.append(event)
    told = [event for event in found if isinstance(event, Progress)]
    assert 0 < len(told) <= 1000


# the queue


async def test_job_cancelled_when_it_leaves_the_queue_affects_no_other() -> None:
    options = LocalOptions(max_concurrent_jobs=2, queue_limit=1)
    async with Session(fed, options=options) as session:
        victim = await start_open(session, processes)
        await victim.send_input_params({"n": 1})
        worker = (await victim.first()).value
        first = await start_open(session)
        queued = await session.execute(squares, None)
        crowding = asyncio.create_task(session.execute(squares, None, priority=9))
        await asyncio.sleep(0)
        assert session.stats().waiting == 2
        await first.send_stop_frame()
        await first
        crowding.cancel()  # it has just got its slot, but has not been notified
        with pytest.raises(asyncio.CancelledError):
            await crowding
        await ends_well(queued)
        await victim.send_input_params({"n": 1})
        await victim.send_stop_frame()
        assert [r.value for r in await victim.collect()] == [worker, worker]
        assert victim.status is JobStatus.FINISHED
        assert session.stats().running == 0


async def test_refused_jobs_neither_count_nor_evict_others() -> None:
    options = LocalOptions(keep_finished=2, max_concurrent_jobs=1, queue_limit=1, queue_overflow="fail")
    async with Session(fed, options=options) as session:
        done = await session.execute(squares, {"n": 3})
        await done
        first = await start_open(session)
        queued = await session.execute(squares, None)
        for _ in range(6):
            with pytest.raises(QueueFull):
                await session.execute(squares, {"n": 1})
        again = await session.reattach(done.job_id)
        assert [r.value for r in await again.collect()] == [9]
        assert session.stats().ended == {"finished": 1}
        assert [job.job_id for job in session.jobs()] == [done.job_id, first.job_id, queued.job_id]
        await first.cancel()
        await queued.cancel()


# errors


async def test_many_simultaneous_unyielded_failures_end_the_job(connect: Connect) -> None:
    """There are more failures than credit: the last calls end while reports wait for credit."""
    with Pipeline("unwanted") as unwanted:
        fail(PlaceParam("n"))
    async with connect(fed, options=SHORT) as session:
        job = await session.execute(unwanted, [{"n": n} for n in range(200)], options=ResultLimits(window=10))
        failures = [event async for event in job.events() if isinstance(event, Failure)]
        assert len(failures) == 200
        assert job.status is JobStatus.FAILED


@pytest.mark.parametrize("reruns", [0, 1])
async def test_uncacheable_value_is_an_error_of_its_parameter_set(connect: Connect, reruns: int) -> None:
    async with connect(fed, options=SHORT) as session:
        rows = [{"n": n} for n in range(50)]
        job = await session.execute(locks, rows, retry=RetryPolicy(attempts=1, on_worker_lost=reruns))
        with pytest.raises(JobFailed) as caught:
            await job
        assert caught.value.count == 50
        failures = [event async for event in job.events() if isinstance(event, Failure) and event.place is None]
        assert sorted(failure.frame for failure in failures) == [(n,) for n in range(50)]


async def test_unread_failures_apply_backpressure(connect: Connect) -> None:
    async with connect(fed, options=SHORT) as session:
        job = await session.execute(fails, {"n": 100_000}, options=ResultLimits(max_items=100, window=10))
        with pytest.raises(ResultsUnread):
            await job
        assert session.stats().results < 1000
        # Everything that the site had in flight has arrived before this.
        assert await (await session.execute(squares, {"n": 1})) is JobStatus.FINISHED
        assert session.stats().results < 1000
        assert job.status is JobStatus.RUNNING
        await job.cancel()


async def test_read_failures_arrive_completely(connect: Connect) -> None:
    async with connect(fed, options=SHORT) as session:
        job = await session.execute(fails, {"n": 2000}, options=ResultLimits(max_items=100, window=10))
        own: list[int] = []
        yielded: list[int] = []
        async for event in job.events():
            if isinstance(event, Failure):
                (own if event.place is None else yielded).append(event.frame[1])
        assert sorted(own) == list(range(2000))
        assert sorted(yielded) == list(range(2000))
        with pytest.raises(JobFailed):
            await job


# lost workers


async def test_values_for_a_job_with_a_restarting_worker_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, gate = asyncio.Semaphore(0), asyncio.Event()
    gate.set()
    opens, send = SiteWorker.open, Engine.receive

    async def open_later(worker: SiteWorker) -> None:
        if worker.site == "site":
            await gate.wait()
        await opens(worker)

    def receive(engine: Engine, message: Any) -> None:
        send(engine, message)
        if isinstance(message, msg.SendToPlace):
            sent.release()

    monkeypatch.setattr(SiteWorker, "open", open_later)
    monkeypatch.setattr(Engine, "receive", receive)
    dies = yielding(lambda: square_or_die_once(PlaceParam("n"), str(tmp_path)))
    async with Session(fed, options=SHORT) as session:
        taker = await start_open(session, dies, job_id="taker", retry=RetryPolicy(on_worker_lost=3))
        gate.clear()
        await taker.send_input_params({"n": 0})
        await first_event(taker, WorkerNotice)
        sender = await session.execute(tells, [{"n": n, "job": "taker"} for n in range(1, 6)])
        for _ in range(5):
            await sent.acquire()
        gate.set()
        assert await sender is JobStatus.FINISHED
        await taker.send_stop_frame()
        assert sorted(r.value for r in await taker.collect()) == [0, 1, 4, 9, 16, 25]


async def test_values_for_a_job_waiting_after_a_lost_worker_are_accepted(tmp_path: Path) -> None:
    """It ran before, and will run again: whoever sends to it cannot know that somebody else was more urgent."""
    dies = yielding(lambda: square_or_die_once(PlaceParam("n"), str(tmp_path)))
    options = LocalOptions(max_concurrent_jobs=2, cancel_grace=0.5, shutdown_grace=0.5)
    async with Session(fed, options=options) as session:
        taker = await start_open(session, dies, job_id="taker", retry=RetryPolicy(on_worker_lost=3))
        sender = await start_open(session, tells)
        urgent = await session.execute(squares, None, priority=9)
        await taker.send_input_params({"n": 0})
        await running(urgent)  # in the slot of the job that has lost its worker
        assert session.stats().waiting == 1
        await sender.send_input_params([{"n": n, "job": "taker"} for n in range(1, 6)])
        await sender.send_stop_frame()
        assert await sender is JobStatus.FINISHED
        await urgent.send_stop_frame()
        await taker.send_stop_frame()
        assert sorted(r.value for r in await taker.collect()) == [0, 1, 4, 9, 16, 25]
