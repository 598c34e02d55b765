"""What operations say while they run: progress, values for other jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dfm_async import (
    Federation,
    JobFailed,
    JobStatus,
    Pipeline,
    PlaceParam,
    Progress,
    ResultLimits,
    Session,
    Yield,
    current_context,
)
from dfm_async.events import FrameCompleted
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import all_values
from tests.support.waiting import first_event, running

fed = Federation("talkative")
left, right = fed.site("archive"), fed.site("desk")


@left.operation
async def steps(n: int) -> int:
    context = current_context()
    for i in range(n):
        context.progress(i + 1, n, f"step {i + 1}")
        await asyncio.sleep(0.03)
    return n


@right.operation
def steps_in_thread(n: int) -> int:
    for i in range(n):
        current_context().progress(i + 1, n)
    return n


@right.operation
def steps_of_a_generator(n: int) -> Iterator[int]:
    context = current_context()
    for i in range(n):
        context.progress(i + 1, n)
        yield i


@left.operation
async def tell(job: str, place: str, value: Any) -> str:
    context = current_context()
    await context.send_to_place(place, value, job=job)
    return "told"


@right.operation
def tell_from_thread(job: str, place: str, value: Any) -> str:
    context = current_context()
    context.wait(context.send_to_place(place, value, job=job))
    return "told"


@left.operation
async def tell_many(job: str, n: int) -> int:
    context = current_context()
    for i in range(n):
        await context.send_to_place("x", i, job=job, key=f"{i}")
    return n


@left.operation
async def wait_wrongly() -> None:
    context = current_context()
    context.wait(asyncio.sleep(0))


@right.operation
def double(x: int) -> int:
    return 2 * x


@right.operation
def combine(a: str, b: str) -> str:
    return a + b


@left.operation
async def look() -> AsyncIterator[bool]:
    context = current_context()
    yield context.cancelled


service = pipeline_of(double, "x")
pairs = pipeline_of(combine, "a", "b")


async def progress_of(job: Any) -> list[Progress]:
    return [event async for event in job.events() if isinstance(event, Progress)]


async def test_progress_arrives_as_events_before_the_frame_is_done(session: Session) -> None:
    pipeline = pipeline_of(steps, "n")
    job = await session.execute(pipeline, [{"n": 5}])
    await job
    found = await progress_of(job)
    assert [(p.site, p.node, p.frame) for p in found] == [("archive", found[0].node, (0,))] * len(found)
    assert (found[-1].done, found[-1].total, found[-1].note) == (5.0, 5.0, "step 5")
    assert [p.done for p in found] == sorted(p.done for p in found)
    assert len(found) > 1
    (done,) = [event.offset async for event in job.events() if isinstance(event, FrameCompleted)]
    assert found[-1].offset < done


@pytest.mark.parametrize("operation", [steps_in_thread, steps_of_a_generator])
async def test_progress_is_coalesced_and_the_last_report_arrives(session: Session, operation: Any) -> None:
    pipeline = yielding(lambda: operation(20_000))
    job = await session.execute(pipeline, options=ResultLimits(max_items=100_000))
    await job
    found = await progress_of(job)
    assert found[-1].done == 20_000
    assert len(found) < 1000


async def test_progress_does_not_fill_the_log_beyond_its_limit(session: Session) -> None:
    pipeline = yielding(lambda: steps_of_a_generator(5000))
    job = await session.execute(pipeline, options=ResultLimits(max_items=50, window=10))
    seen, done = 0, 0.0
    async for event in job.events():
        seen += 1
        done = max(done, event.done) if isinstance(event, Progress) else done
        if seen % 500 == 0:
            await asyncio.sleep(0.01)
            assert session.stats().results < 200
    assert done == 5000


async def test_a_job_that_is_kept_open_serves_others(session: Session) -> None:
    with Pipeline("clients") as client:
        job, value = PlaceParam("job", multiuse=True), PlaceParam("value", multiuse=True)
        Yield(tell(job, "x", value), place="first")
        Yield(tell_from_thread(job, "x", value), place="second")
    serving = await session.execute(service, None, autostop=False, job_id="doubler")
    await running(serving)
    rows = [{"job": "doubler", "value": n} for n in range(10)]
    asking = await session.execute(client, rows)
    assert {r.value for r in await asking.collect()} == {"told"}
    await serving.send_stop_frame()
    assert sorted(r.value for r in await serving.collect()) == sorted(2 * n for n in range(10) for _ in range(2))
    assert serving.status is JobStatus.FINISHED


async def test_values_with_one_key_make_one_parameter_set(session: Session) -> None:
    with Pipeline("halves") as client:
        Yield(tell("pairs", "a", PlaceParam("n", multiuse=True)))
        Yield(tell_from_thread("pairs", "b", PlaceParam("n", multiuse=True)), place="other")
    serving = await session.execute(pairs, None, autostop=False, job_id="pairs")
    await running(serving)
    await (await session.execute(client, [{"n": "x"}, {"n": "y"}]))
    await serving.send_stop_frame()
    assert sorted(r.value for r in await serving.collect()) == ["xx", "yy"]


async def test_slow_service_job_applies_backpressure_and_loses_nothing(session: Session) -> None:
    client = yielding(lambda: tell_many("slow", 500))
    limits = ResultLimits(max_items=20, window=4)
    serving = await session.execute(service, None, autostop=False, job_id="slow", options=limits, concurrency=2)
    await running(serving)
    asking = await session.execute(client)
    found = []
    async for result in serving:
        found.append(result.value)
        if len(found) == 500:
            await serving.send_stop_frame()
    assert sorted(found) == [2 * n for n in range(500)]
    assert (await asking.first()).value == 500


@pytest.mark.parametrize(
    ("job", "place", "value", "text"),
    [
        ("nobody", "x", 1, "job nobody is not known"),
        ("open", "y", 1, "no parameter 'y' .it has: 'x'."),
        ("ended", "x", 1, "job ended has ended .finished."),
        ("stopped", "x", 1, "accepts no further parameter sets"),
    ],
)
async def test_undeliverable_value_is_an_error_of_the_sender(
    session: Session, job: str, place: str, value: Any, text: str
) -> None:
    client = yielding(lambda: tell(job, place, value))
    slow = pipeline_of(steps, "x")
    await running(await session.execute(service, None, autostop=False, job_id="open"))
    await (await session.execute(service, {"x": 1}, job_id="ended"))
    stopped = await session.execute(slow, {"x": 30}, job_id="stopped")
    await running(stopped)
    with pytest.raises(JobFailed, match=text):
        await (await session.execute(client))
    await stopped.cancel()


@pytest.mark.parametrize("target", ["inline", "local"])  # the hub of a federation on FLARE cannot look into values
async def test_a_token_of_the_wrong_type_is_an_error_of_the_sender(session: Session) -> None:
    client = yielding(lambda: tell("typed", "x", "one"))
    await running(await session.execute(service, None, autostop=False, job_id="typed"))
    with pytest.raises(JobFailed, match="parameter 'x': Input should be a valid integer"):
        await (await session.execute(client))


async def test_waiting_on_the_loop_is_refused_with_a_hint(session: Session) -> None:
    pipeline = pipeline_of(wait_wrongly)
    with pytest.raises(JobFailed, match="await instead"):
        await (await session.execute(pipeline))


async def test_an_operation_sees_that_it_was_cancelled(session: Session) -> None:
    pipeline = pipeline_of(look)
    assert await all_values(session, pipeline) == [False]


async def test_a_synchronous_operation_can_stop_by_itself_when_its_job_is_cancelled(connect: Connect) -> None:
    patient = Federation("patient")

    @patient.site("lab").operation
    def until_cancelled() -> None:
        context = current_context()
        import time

        context.progress(0)
        while not context.cancelled:
            time.sleep(0.01)

    pipeline = pipeline_of(until_cancelled)
    async with connect(patient) as session:
        job = await session.execute(pipeline)
        await first_event(job, Progress)
        outcome = await job.cancel()
        assert outcome["lab"] in ("stopped", "stopped after grace")


async def test_stats_count_running_jobs(session: Session) -> None:
    job = await session.execute(service, None, autostop=False)
    await running(job)
    stats = session.stats()
    assert (stats.running, stats.waiting, stats.ended, stats.remembered) == (1, 0, {}, 1)
    assert stats.memory is None or stats.memory > 1_000_000
    await job.send_input_params({"x": 1})
    await job.first()
    assert session.stats().results >= 2
    await job.cancel()
    assert session.stats().ended == {"aborted": 1}
