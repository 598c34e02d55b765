"""Objects of classes live as long as their job: when it has ended, they are closed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

from dfm_async import (
    Federation,
    JobAborted,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationContext,
    Pipeline,
    PlaceParam,
    Session,
    StatusChanged,
    Yield,
    current_context,
)
from dfm_async.engine.engine import Engine
from dfm_async.events import Metrics
from dfm_async.model.ids import JobId
from dfm_async.model.job_spec import JobSpec
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.site_runtime import SiteRuntime
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from tests.conftest import Connect
from tests.support.waiting import first_event

SHORT = LocalOptions(cancel_grace=0.3, shutdown_grace=0.3)

fed = Federation("resources")
lab, desk = fed.site("lab"), fed.site("desk")


class Noted:
    """Writes down what happens to it, in a folder that it learns with its first call."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def note(self, text: str) -> None:
        assert self.folder is not None
        with (self.folder / "notes").open("a") as file:
            file.write(f"{text}\n")

    def begin(self, folder: str) -> None:
        if self.folder is None:
            self.folder = Path(folder)
            self.note("opened")
        current_context().metrics({"begun": True})


@lab.operation(name="ask")
class Asynchronous(Noted):
    async def body(self, folder: str) -> int:
        self.begin(folder)
        return 1

    async def aclose(self) -> None:
        await asyncio.sleep(0.05)  # whoever does not wait for it comes too early
        self.note("closed")

    def close(self) -> None:
        self.note("closed wrongly")


@desk.operation(name="ask_in_thread")
class Synchronous(Noted):
    def body(self, folder: str) -> int:
        self.begin(folder)
        return 2

    def close(self) -> None:
        assert threading.current_thread().name.startswith("dfm-desk")
        self.note("closed")


@lab.operation(name="ask_apart", in_process=True)
class Apart(Asynchronous.code.__dfm_code__):  # type: ignore[misc, name-defined] # the class behind the operation
    pass


@lab.operation(name="wait")
class Waiting(Noted):
    async def body(self, folder: str) -> None:
        self.begin(folder)
        try:
            await asyncio.Event().wait()
        finally:
            self.note("returned")

    async def aclose(self) -> None:
        self.note("closed")


@lab.operation(name="stream")
class Streaming(Noted):
    async def body(self, folder: str) -> AsyncIterator[int]:
        self.begin(folder)
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.05)
            self.note("returned")

    async def aclose(self) -> None:
        self.note("closed")


@lab.operation(name="break_at_the_end")
class Broken(Noted):
    async def body(self, folder: str) -> int:
        return 3

    async def aclose(self) -> None:
        raise RuntimeError("the connection was gone")


@lab.operation(name="hang_at_the_end")
class Hanging(Noted):
    async def body(self, folder: str) -> int:
        return 4

    async def aclose(self) -> None:
        await asyncio.Event().wait()


@lab.operation(name="hang_in_a_thread")
class HangingThread(Noted):
    async def body(self, folder: str) -> int:
        self.begin(folder)
        return 5

    def close(self) -> None:
        assert self.folder is not None
        while not (self.folder / "open").exists():
            threading.Event().wait(0.01)


@lab.operation(name="die_at_the_end")
class Dying(Noted):
    async def body(self, folder: str) -> int:
        return 6

    async def aclose(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@lab.operation(name="stuck", deadline=0.05)
class Stuck(Noted):
    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()

    def body(self, folder: str) -> None:
        self.begin(folder)
        self.closed.wait()

    async def aclose(self) -> None:
        self.note("closed")
        self.closed.set()


@lab.operation(name="last_words")
class LastWords:
    def __init__(self) -> None:
        self.context: OperationContext | None = None

    async def body(self, folder: str) -> None:
        self.context = current_context()

    async def aclose(self) -> None:
        assert self.context is not None
        self.context.metrics({"last": "words"})


@lab.operation(name="plain")
class Plain:
    async def body(self, folder: str) -> int:
        return 7


@desk.operation
async def fail_when_begun(folder: str) -> None:
    while not (Path(folder) / "notes").exists():  # noqa: ASYNC110 - it may be written by another process
        await asyncio.sleep(0.01)
    raise ValueError("something else")


def pipeline_of(*operations: Any) -> Pipeline:
    with Pipeline("resources") as pipeline:
        folder = PlaceParam("folder", multiuse=True)
        for index, operation in enumerate(operations):
            Yield(operation(folder), place=f"p{index}")
    return pipeline


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


# the end of a job that finishes


@pytest.mark.parametrize("operation", [Asynchronous, Synchronous, Apart], ids=lambda o: o.name)
async def test_an_object_is_closed_once_before_its_job_has_ended(
    connect: Connect, tmp_path: Path, operation: Any
) -> None:
    async with connect(fed) as session:
        job = await session.execute(pipeline_of(operation), [{"folder": str(tmp_path)}] * 3)
        async for event in job.events():
            if isinstance(event, StatusChanged) and event.status.ended:
                assert notes(tmp_path) == ["opened", "closed"]
        assert job.status is JobStatus.FINISHED
    assert notes(tmp_path) == ["opened", "closed"]


async def test_objects_of_several_sites_are_all_closed(session: Session, tmp_path: Path) -> None:
    job = await session.execute(pipeline_of(Asynchronous, Synchronous), {"folder": str(tmp_path)})
    await job
    assert sorted(notes(tmp_path)) == ["closed", "closed", "opened", "opened"]


async def test_a_job_that_was_kept_open_ends_when_its_objects_are_closed(session: Session, tmp_path: Path) -> None:
    job = await session.execute(pipeline_of(Asynchronous), None, autostop=False)
    await job.send_input_params({"folder": str(tmp_path)})
    await job.first()
    assert notes(tmp_path) == ["opened"]
    await job.send_stop_frame()
    assert await job is JobStatus.FINISHED
    assert notes(tmp_path) == ["opened", "closed"]


async def test_each_job_has_its_own_objects(session: Session, tmp_path: Path) -> None:
    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        jobs.append(await session.execute(pipeline_of(Asynchronous), {"folder": str(tmp_path / name)}))
    for job, name in zip(jobs, ("a", "b"), strict=True):
        await job
        assert notes(tmp_path / name) == ["opened", "closed"]


async def test_object_that_cannot_be_closed_is_logged_and_its_job_finishes(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dfm_async.site.lab"):
        async with connect(fed) as session:
            job = await session.execute(pipeline_of(Broken), {"folder": ""}, job_id="unclosed")
            assert [result.value for result in await job.collect()] == [3]
            assert job.status is JobStatus.FINISHED
    (record,) = [found for found in caplog.records if found.name == "dfm_async.site.lab"]
    assert record.levelno == logging.WARNING
    assert record.__dict__["job"] == "unclosed"
    assert "closing Broken of job unclosed raised" in caplog.text
    assert "RuntimeError: the connection was gone" in caplog.text
    assert "Traceback" in caplog.text


async def test_reports_while_an_object_is_closed_arrive(session: Session) -> None:
    job = await session.execute(pipeline_of(LastWords), {"folder": ""})
    assert [event.values async for event in job.events() if isinstance(event, Metrics)] == [{"last": "words"}]


async def test_objects_without_close_send_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    receive = Engine.receive

    def spy(engine: Engine, message: Any) -> None:
        seen.append(type(message))
        receive(engine, message)

    monkeypatch.setattr(Engine, "receive", spy)
    async with Session(fed, target="inline") as session:
        await (await session.execute(pipeline_of(Plain), {"folder": ""}))
        assert seen == [msg.ResultBatch]


async def test_worker_lost_while_closing_objects_loses_no_result() -> None:
    async with Session(fed) as session:
        job = await session.execute(pipeline_of(Dying), {"folder": ""})
        assert [result.value for result in await job.collect()] == [6]
        assert job.status is JobStatus.FINISHED


async def test_hanging_call_does_not_keep_objects_open(tmp_path: Path) -> None:
    async with Session(fed, target="inline", options=SHORT) as session:
        job = await session.execute(pipeline_of(Stuck), {"folder": str(tmp_path)})
        with pytest.raises(JobFailed, match="deadline"):
            await job
        assert notes(tmp_path) == ["opened", "closed"]


# other ends


@pytest.mark.parametrize("operation", [Waiting, Streaming], ids=lambda o: o.name)
async def test_a_cancelled_job_has_stopped_when_its_objects_are_closed(
    session: Session, tmp_path: Path, operation: Any
) -> None:
    job = await session.execute(pipeline_of(operation), {"folder": str(tmp_path)})
    await first_event(job, Metrics)
    outcomes = await job.cancel()
    assert notes(tmp_path) == ["opened", "returned", "closed"]
    assert outcomes["lab"] in ("stopped", "stopped after grace")
    assert job.status is JobStatus.ABORTED


@pytest.mark.parametrize("on_error", ["continue", "stop"])
async def test_objects_are_closed_when_another_node_fails(
    session: Session, tmp_path: Path, on_error: Literal["continue", "stop"]
) -> None:
    operation = Asynchronous if on_error == "continue" else Waiting
    pipeline = pipeline_of(operation, fail_when_begun)
    job = await session.execute(pipeline, {"folder": str(tmp_path)}, on_error=on_error)
    with pytest.raises(JobFailed, match="something else"):
        await job
    assert [note for note in notes(tmp_path) if note != "returned"] == ["opened", "closed"]


async def test_objects_are_closed_when_the_session_is(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        job = await session.execute(pipeline_of(Waiting), {"folder": str(tmp_path)})
        await first_event(job, Metrics)
    assert notes(tmp_path) == ["opened", "returned", "closed"]


async def test_a_cancellation_while_objects_are_being_closed_closes_them_once(session: Session, tmp_path: Path) -> None:
    job = await session.execute(pipeline_of(Asynchronous), {"folder": str(tmp_path)})
    await job.first()
    await job.cancel()
    assert notes(tmp_path) == ["opened", "closed"]


async def test_hanging_close_is_bounded_by_the_grace_period(connect: Connect) -> None:
    async with connect(fed, options=SHORT) as session:
        job = await session.execute(pipeline_of(Hanging), {"folder": ""})
        assert (await job.first()).value == 4
        outcomes = await job.cancel(grace=0.2)
        assert outcomes["lab"] in ("killed", "abandoned")
        assert job.status is JobStatus.ABORTED


async def test_hanging_close_is_bounded_by_the_deadline_of_its_job(connect: Connect) -> None:
    async with connect(fed, options=SHORT) as session:
        job = await session.execute(pipeline_of(Hanging), {"folder": ""}, deadline=1)
        with pytest.raises(JobAborted, match="deadline"):
            await job


async def test_hanging_close_in_a_thread_is_bounded_by_the_grace_period(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:
        job = await session.execute(pipeline_of(HangingThread), {"folder": str(tmp_path)})
        assert (await job.first()).value == 5
        outcomes = await job.cancel(grace=0.2)
        assert outcomes["lab"] in ("killed", "abandoned")
        (tmp_path / "open").touch()  # so that the thread ends, where it was left alone


async def test_a_site_that_is_shut_down_closes_the_objects_of_jobs_that_run(tmp_path: Path) -> None:
    async with Session(fed, target="inline") as session:
        plan = await session.prepare(pipeline_of(Waiting))
    at = plan.sites_at.index("lab")
    codec = Codec.for_processes()
    reported: asyncio.Queue[msg.Message] = asyncio.Queue()
    table = OperationTable("lab", lab.adapters.values())
    resources = SiteResources("lab", table, codec, report=reported.put_nowait, send=lambda *_: None, threads=1, grace=1)
    async with SiteRuntime(resources) as runtime:
        runtime.add_program(plan.hash, at, plan.nets[at])
        routes = tuple("" for _ in plan.locations)
        payload = codec.dumps([codec.pack([str(tmp_path)])])
        runtime.receive(
            msg.StartJob(
                job=1,
                at=at,
                spec=JobSpec(job_id=JobId("job")),
                plan=plan.hash,
                routes=routes,
                first=0,
                count=1,
                payload=payload,
                last=True,
            )
        )
        assert isinstance(await reported.get(), msg.ObjectsBuilt)
        assert isinstance(await reported.get(), msg.EventsMade)
    assert notes(tmp_path) == ["opened", "returned", "closed"]
