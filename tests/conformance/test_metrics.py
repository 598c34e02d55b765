"""Metrics that operations report: every one of them is an event, in order, before what comes of its call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import (
    Failure,
    Federation,
    Job,
    JobFailed,
    JobStatus,
    OperationContext,
    Pipeline,
    PlaceParam,
    Result,
    ResultLimits,
    RetryPolicy,
    Session,
    current_context,
)
from dfm_async.events import FrameCompleted, Metrics
from tests.conftest import TargetName
from tests.support.pipelines import pipeline_of
from tests.support.waiting import file_created, first_event

fed = Federation("measured")
lab, desk = fed.site("lab"), fed.site("desk")

WRONG: dict[str, Any] = {
    "a list": {"loss": [1.0]},
    "nothing": {"loss": None},
    "a complex number": {"loss": 1j},
    "an array": {"loss": np.array([1.0])},
    "a time of numpy": {"loss": np.datetime64("2020-01-01")},
}


@lab.operation
async def train(rounds: int) -> int:
    context = current_context()
    for i in range(rounds):
        context.metrics({"loss": 1 / (i + 1), "i": i, "last": i == rounds - 1, "phase": "main"}, step=i)
    return rounds


@desk.operation
def train_in_thread(rounds: int) -> int:
    for i in range(rounds):
        current_context().metrics({"i": i})
    return rounds


@desk.operation
def train_as_generator(rounds: int) -> Iterator[int]:
    context = current_context()
    for i in range(rounds):
        context.metrics({"i": i})
        yield i


@lab.operation
async def train_as_stream(rounds: int) -> AsyncIterator[int]:
    context = current_context()
    for i in range(rounds):
        context.metrics({"i": i})
        yield i


@lab.operation
async def fail_after(rounds: int, context: OperationContext) -> None:
    for i in range(rounds):
        context.metrics({"i": i})
    raise ValueError("diverged")


@lab.operation
async def with_numpy(context: OperationContext) -> None:
    values = {"f": np.float32(0.5), "d": np.float64(0.25), "i": np.int64(7), "b": np.bool_(True), "s": np.str_("x")}
    context.metrics(values, step=np.int32(3))
    values["f"] = np.float32(9)  # what was reported does not change


@desk.operation
def report(what: str) -> None:
    current_context().metrics(WRONG[what])


@lab.operation
async def report_at_the_end(context: OperationContext) -> None:
    context.metrics({"when": "before"})
    try:
        await asyncio.Event().wait()
    finally:
        context.metrics({"when": "after"})


@lab.operation
async def report_and_die(folder: str, context: OperationContext) -> int:
    context.metrics({"run": 1})
    reported, died = Path(folder) / "reported", Path(folder) / "died"
    if not died.exists():
        await file_created(reported)
        died.touch()
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    return 7


training = pipeline_of(train, "n")


async def events_of(job: Job) -> list[Any]:
    return [event async for event in job.events()]


def metrics_of(events: list[Any]) -> list[Metrics]:
    return [event for event in events if isinstance(event, Metrics)]


async def test_each_report_is_an_event_before_the_result_of_its_call(session: Session) -> None:
    job = await session.execute(training, [{"n": 3}, {"n": 2}])
    events = await events_of(job)
    for frame, rounds in (((0,), 3), ((1,), 2)):
        found = [event for event in metrics_of(events) if event.frame == frame]
        assert [event.step for event in found] == list(range(rounds))
        last = found[-1]
        assert (last.site, last.node) == ("lab", "train#0")
        assert last.values == {"loss": 1 / rounds, "i": rounds - 1, "last": True, "phase": "main"}
        assert [type(value) for value in last.values.values()] == [float, int, bool, str]
        (result,) = [event for event in events if isinstance(event, Result) and event.frame == frame]
        (done,) = [event for event in events if isinstance(event, FrameCompleted) and event.frame == frame]
        assert last.offset < result.offset < done.offset


@pytest.mark.parametrize("operation", [train, train_in_thread, train_as_generator, train_as_stream])
async def test_metrics_are_neither_coalesced_nor_lost(session: Session, operation: Any) -> None:
    count = 20_000
    job = await session.execute(pipeline_of(operation, rounds=count))
    events = await events_of(job)
    assert [event.values["i"] for event in metrics_of(events)] == list(range(count))
    assert isinstance(events[-2], FrameCompleted)
    assert events[-1].status is JobStatus.FINISHED


async def test_metrics_of_a_failed_call_come_before_its_failure(session: Session) -> None:
    job = await session.execute(pipeline_of(fail_after, rounds=3))
    events = await events_of(job)
    first_failure = next(event for event in events if isinstance(event, Failure))
    assert [event.values["i"] for event in metrics_of(events) if event.offset < first_failure.offset] == [0, 1, 2]


async def test_scalars_of_numpy_become_those_of_python(session: Session) -> None:
    (event,) = metrics_of(await events_of(await session.execute(pipeline_of(with_numpy))))
    assert event.values == {"f": 0.5, "d": 0.25, "i": 7, "b": True, "s": "x"}
    assert [type(value) for value in event.values.values()] == [float, float, int, bool, str]
    assert event.step == 3
    assert type(event.step) is int


@pytest.mark.parametrize("what", WRONG)
async def test_invalid_metric_is_an_error_of_its_operation(session: Session, what: str) -> None:
    with pytest.raises(JobFailed, match=r"TypeError.*metric 'loss'"):
        await (await session.execute(pipeline_of(report, what=what)))


async def test_metrics_of_a_cancelled_call_arrive(session: Session) -> None:
    job = await session.execute(pipeline_of(report_at_the_end))
    events = job.events()
    async for event in events:
        if isinstance(event, Metrics):
            break
    await job.cancel()
    found = [event, *[later async for later in events]]
    assert [event.values["when"] for event in metrics_of(found)] == ["before", "after"]


@pytest.mark.parametrize("operation", [train_as_generator, train_as_stream])
async def test_slow_reader_of_metrics_applies_backpressure(session: Session, operation: Any) -> None:
    """Elements wait for room in the log, and with them the reports between them."""
    seen: list[Any] = []
    limits = ResultLimits(max_items=50, window=10)
    job = await session.execute(pipeline_of(operation, rounds=5000), options=limits)
    async for event in job.events():
        seen.append(event)
        if len(seen) % 1000 == 0:
            await asyncio.sleep(0.01)
            assert session.stats().results < 1000
    assert [event.values["i"] for event in metrics_of(seen)] == list(range(5000))


async def test_unread_metrics_do_not_block_a_job(session: Session) -> None:
    with Pipeline("unread") as pipeline:
        train(PlaceParam("n"))
    limits = ResultLimits(max_items=50, window=10)
    job = await session.execute(pipeline, [{"n": 500}] * 20, options=limits)
    await job
    assert session.stats().results <= 51


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_metrics_are_stored(target: TargetName, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    async with Session(fed, target=target, store=store) as session:
        job = await session.execute(pipeline_of(train, rounds=3), job_id="kept")
        await job
    async with Session(fed, target=target, store=store) as session:
        events = await events_of(await session.reattach("kept"))
    found = metrics_of(events)
    assert [event.step for event in found] == [0, 1, 2]
    assert found[-1].values == {"loss": 1 / 3, "i": 2, "last": True, "phase": "main"}
    assert [event.offset for event in events] == list(range(len(events)))


async def test_a_parameter_set_that_runs_again_reports_again(tmp_path: Path) -> None:
    async with Session(fed) as session:
        policy = RetryPolicy(attempts=1, on_worker_lost=1)
        job = await session.execute(pipeline_of(report_and_die, folder=str(tmp_path)), retry=policy)
        await first_event(job, Metrics)
        (tmp_path / "reported").touch()
        events = await events_of(job)
    assert [event.values for event in metrics_of(events)] == [{"run": 1}, {"run": 1}]
    assert [event.value for event in events if isinstance(event, Result)] == [7]
