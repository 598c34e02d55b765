from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dfm_async import (
    Event,
    Federation,
    JobAborted,
    JobNotFound,
    JobStatus,
    LocalOptions,
    ParameterError,
    Pipeline,
    PlaceParam,
    Result,
    ResultLimits,
    Session,
    StatusChanged,
    Yield,
)
from dfm_async.callbacks import ManualDispatcher, OtherLoopDispatcher
from dfm_async.errors import ResultsExpired
from dfm_async.events import FrameCompleted
from tests.conformance import weather as w
from tests.conformance.conftest import NewSession
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value
from tests.support.waiting import running

fed = w.fed

echo = pipeline_of(w.echo, "n", site="lab")

never = pipeline_of(w.wait_for_ever)
count = pipeline_of(w.count_up, "n")


async def test_events_of_a_job_are_complete(session: Session) -> None:
    job = await session.execute(echo, [{"n": 1}, {"n": 2}])
    events: list[Event] = [event async for event in job.events()]
    assert [event.offset for event in events] == list(range(len(events)))
    assert isinstance(events[0], StatusChanged)
    assert events[0].status is JobStatus.RUNNING
    assert isinstance(events[-1], StatusChanged)
    assert events[-1].status is JobStatus.FINISHED
    for index in (0, 1):
        frames = [e.frame for e in events if isinstance(e, (Result, FrameCompleted)) and e.frame == (index,)]
        kinds = [type(e) for e in events if isinstance(e, (Result, FrameCompleted)) and e.frame == (index,)]
        assert (len(frames), kinds) == (2, [Result, FrameCompleted])


async def test_completion_is_an_event(session: Session) -> None:
    job = await session.execute(echo, {"n": 1}, autostop=False)
    assert not job.completed.is_set()
    await job.send_stop_frame()
    await job.completed.wait()
    assert job.status is JobStatus.FINISHED


async def test_parameters_can_come_as_a_stream_pulled_with_backpressure(session: Session) -> None:
    pulled = 0

    async def numbers() -> AsyncIterator[dict[str, int]]:
        nonlocal pulled
        for i in range(3000):
            pulled = i
            yield {"n": i}

    job = await session.execute(echo, numbers(), options=ResultLimits(max_items=10, window=4))
    results = job.results()
    assert (await anext(results)).value == 0
    for _ in range(50):
        await asyncio.sleep(0)
    assert pulled < 2000  # far from all: the reader has read one
    rest = [result.value async for result in results]
    assert sorted([0, *rest]) == list(range(3000))


async def test_a_stream_of_parameters_that_fails_fails_the_job(session: Session) -> None:
    async def numbers() -> AsyncIterator[dict[str, Any]]:
        yield {"n": 1}
        yield {"wrong": 1}

    job = await session.execute(echo, numbers())
    assert await job.wait_until_finished(60)
    assert job.status is JobStatus.FAILED
    assert "missing parameter 'n'" in str(job._known().errors[0])


async def test_late_inputs_and_the_stop_frame(session: Session) -> None:
    job = await session.execute(echo, None)
    results = job.results()
    await job.send_input_params({"n": 1})
    assert (await anext(results)).frame == (0,)
    await job.send_input_params([{"n": 2}, {"n": 3}])
    assert sorted([(await anext(results)).frame, (await anext(results)).frame]) == [(1,), (2,)]
    with pytest.raises(ParameterError, match="missing"):
        await job.send_input_params({})
    assert not await job.wait_until_finished(timeout=0.01)
    await job.send_stop_frame()
    assert await job is JobStatus.FINISHED
    with pytest.raises(ParameterError, match="no further parameter sets"):
        await job.send_input_params({"n": 4})


async def test_any_number_of_readers_each_see_everything(session: Session) -> None:
    async def read(job: Any, after: int | None = None) -> list[int]:
        return [result.value async for result in job.results(after=after)]

    job = await session.execute(count, {"n": 500})
    found = await asyncio.gather(*(read(job) for _ in range(5)))
    assert found == [list(range(500))] * 5
    offsets = [result.offset async for result in job]
    assert await read(job, after=offsets[99]) == list(range(100, 500))


async def test_results_of_a_place_in_frame_order(session: Session) -> None:
    with Pipeline("order") as pipeline:
        Yield(w.count_slowly(PlaceParam("n")), place="numbers")
        Yield(1, place="other")
    job = await session.execute(pipeline, [{"n": 30}, {"n": 0}, {"n": 20}, {"n": 1}])
    frames = [result.frame async for result in job.results(place="numbers", ordered=True)]
    assert frames == sorted(frames)
    assert len(frames) == 51
    every = [result.frame async for result in job.results(ordered=True)]
    assert every == sorted(every)
    middle = [result async for result in job.results(place="numbers")][25].offset
    behind = [result.offset async for result in job.results(place="numbers", ordered=True, after=middle)]
    assert sorted(behind) == [r.offset async for r in job.results(place="numbers", after=middle)]


async def test_ordered_results_of_an_open_job_do_not_wait_for_its_end(session: Session) -> None:
    job = await session.execute(echo, None)
    await job.send_input_params({"n": 0})
    first = await anext(job.results(ordered=True))
    await job.send_input_params({"n": 1})
    second = await anext(job.results(place="yield", ordered=True, after=first.offset))
    assert (first.value, second.value) == (0, 1)
    await job.send_stop_frame()
    await job


async def test_dropped_events_raise_instead_of_a_gap(session: Session) -> None:
    job = await session.execute(count, {"n": 1000}, options=ResultLimits(max_items=50, window=10))
    assert [r.value async for r in job] == list(range(1000))
    with pytest.raises(ResultsExpired) as caught:
        await anext(job.results())
    rest = [r.value async for r in job.results(after=caught.value.first - 1)]
    assert rest == list(range(1000 - len(rest), 1000))
    assert rest


async def test_abandoned_iterator_does_not_block_the_job(session: Session) -> None:
    job = await session.execute(count, {"n": 1000}, options=ResultLimits(max_items=50, window=10))
    async for result in job:
        if result.value == 5:
            break
    rest = [later.value async for later in job.results(after=result.offset)]
    assert rest == list(range(6, 1000))


async def test_detach_and_reattach(session: Session) -> None:
    job = await session.execute(echo, None, job_id="mine")
    await job.send_input_params({"n": 1})
    first = await job.first()
    await job.detach()
    again = await session.reattach("mine", after=first.offset)
    assert again.was_found
    await again.send_input_params({"n": 2})
    assert (await again.first()).value == 2
    await again.send_stop_frame()
    assert await again is JobStatus.FINISHED
    assert [r.value for r in await (await session.reattach("mine")).collect()] == [1, 2]
    assert [known.job_id for known in session.jobs()] == ["mine"]


async def test_an_unknown_job_is_known_to_be_unknown(session: Session) -> None:
    job = await session.reattach("nobody")
    assert (job.was_found, job.status, job.job_id) == (False, JobStatus.UNKNOWN, "nobody")
    for call in (job.cancel, job.collect, job.first, job.detach, job.send_stop_frame, job.wait_until_finished):
        with pytest.raises(JobNotFound):
            await call()
    with pytest.raises(JobNotFound):
        await job


async def test_a_job_id_is_an_idempotency_key(session: Session) -> None:
    first = await session.execute(echo, {"n": {"a": 1, "b": {1, 2}}}, job_id="once")
    again = await session.execute(echo, {"n": {"b": {2, 1}, "a": 1}}, job_id="once")
    assert await first is await again is JobStatus.FINISHED
    assert [r.offset for r in await again.collect()] == [r.offset for r in await first.collect()]
    with pytest.raises(ParameterError, match="different content"):
        await session.execute(echo, {"n": 2}, job_id="once")
    assert len(session.jobs()) == 1


async def test_cancel_returns_when_every_site_has_stopped(session: Session) -> None:
    job = await session.execute(never)
    await running(job)
    outcome = await job.cancel("enough")
    assert outcome in ({"lab": "stopped"}, {"lab": "stopped after grace"})
    assert job.status is JobStatus.ABORTED
    with pytest.raises(JobAborted, match="enough"):
        await job
    assert await job.cancel() == {}
    assert await first_value(session, echo, {"n": 7}) == 7


async def test_a_job_can_be_cancelled_before_its_workers_are_up(session: Session) -> None:
    job = await session.execute(never)
    await job.cancel()
    assert job.status is JobStatus.ABORTED


async def test_cancelling_twice_and_from_many_tasks(session: Session) -> None:
    job = await session.execute(never, [{}] * 300)
    await asyncio.gather(*(job.cancel() for _ in range(5)))
    assert job.status is JobStatus.ABORTED


async def test_cancelling_a_waiting_task_leaves_the_job_alone(session: Session) -> None:
    job = await session.execute(echo, None)
    await running(job)
    for waiting in (job._wait(), job.wait_until_finished(), job.collect(), job.first()):
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert job.status is JobStatus.RUNNING
    await job.send_input_params({"n": 1})
    await job.send_stop_frame()
    assert await job is JobStatus.FINISHED


async def test_many_tasks_use_one_session(connect: Connect) -> None:
    async def one(session: Session, n: int) -> int:
        job = await session.execute(echo, {"n": n})
        return (await job.first()).value  # type: ignore[no-any-return]

    async with connect(w.fed) as session:
        assert await asyncio.gather(*(one(session, n) for n in range(200))) == list(range(200))


async def test_a_session_can_be_left_in_another_task_than_it_was_entered(new_session: NewSession) -> None:
    session = new_session(w.fed)
    await asyncio.create_task(session.connect())
    assert await first_value(session, echo, {"n": 1}) == 1
    await asyncio.create_task(session.close())
    await session.close()


async def test_closing_a_session_ends_its_jobs(new_session: NewSession) -> None:
    session = new_session(w.fed, options=LocalOptions(shutdown_grace=1))
    await session.connect()
    never_ends = await session.execute(never)
    open_job = await session.execute(echo, None)
    waiting = asyncio.ensure_future(never_ends._wait())
    await session.close()
    with pytest.raises(JobAborted, match="closed"):
        await waiting
    assert open_job.status is JobStatus.ABORTED


async def test_callbacks_sync_and_async_are_called_in_order(session: Session) -> None:
    seen: list[Any] = []

    def plain(site: str, node: str, frame: tuple[int, ...], place: str, data: Any) -> None:
        seen.append((site, node, frame, place, data))

    async def asynchronous(site: str, node: str, frame: tuple[int, ...], place: str, data: Any) -> None:
        await asyncio.sleep(0)
        seen.append((place, data))

    with Pipeline("places") as pipeline:
        Yield(w.count_up(3), place="numbers")
        Yield(w.echo("x", site="lab"), place="other")
    job = await session.execute(pipeline, default_callback=plain, place_callbacks={"numbers": asynchronous})
    assert await job is JobStatus.FINISHED
    with pytest.raises(ValueError, match="no place 'nowhere'"):
        await session.execute(pipeline, place_callbacks={"nowhere": plain})
    assert [item for item in seen if item[0] == "numbers"] == [("numbers", i) for i in range(3)]
    assert ("lab", "echo#2", (0,), "other", "x") in seen


async def test_a_callback_that_raises_is_reported_on_the_job(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(*_: Any) -> None:
        raise RuntimeError("callback")

    job = await session.execute(count, {"n": 2}, default_callback=bad)
    assert await job is JobStatus.FINISHED
    assert [str(error) for error in job.callback_errors] == ["callback", "callback"]
    assert "a callback of job" in caplog.text


async def test_callbacks_on_another_loop(connect: Connect) -> None:
    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever)
    thread.start()
    seen: list[tuple[threading.Thread, Any]] = []

    async def callback(_site: str, _node: str, _frame: Any, _place: str, data: Any) -> None:
        seen.append((threading.current_thread(), data))

    async with connect(w.fed, callback_dispatcher=OtherLoopDispatcher(other)) as session:
        await (await session.execute(count, {"n": 3}, default_callback=callback))
    other.call_soon_threadsafe(other.stop)
    thread.join()
    other.close()
    assert seen == [(thread, 0), (thread, 1), (thread, 2)]


async def test_callbacks_by_hand(connect: Connect) -> None:
    dispatcher = ManualDispatcher()
    seen: list[Any] = []
    async with connect(w.fed, callback_dispatcher=dispatcher) as session:
        job = await session.execute(count, {"n": 5}, default_callback=lambda *args: seen.append(args[-1]))
        await job.completed.wait()
        assert seen == []
        while len(seen) < 5:
            dispatcher.process_pending()
            await asyncio.sleep(0)
        assert await job is JobStatus.FINISHED
    assert seen == list(range(5))


async def test_two_consumers_of_one_job_and_a_third_that_comes_late(session: Session) -> None:
    job = await session.execute(count, {"n": 100})
    first = job.results()
    second = job.results()
    assert [(await anext(first)).value, (await anext(second)).value, (await anext(first)).value] == [0, 0, 1]
    await job
    assert [r.value async for r in first] == list(range(2, 100))
    assert [r.value async for r in second] == list(range(1, 100))
    assert len(await job.collect()) == 100


@pytest.mark.parametrize("target", ["inline", "local"])  # a federation on FLARE remembers them by itself
async def test_finished_jobs_lose_their_log_and_then_are_forgotten(connect: Connect) -> None:
    async with connect(w.fed, options=LocalOptions(keep_finished=2, keep_summaries=2)) as session:
        for n in range(6):
            await (await session.execute(echo, {"n": n}, job_id=f"job-{n}"))
        assert [job.job_id for job in session.jobs()] == ["job-2", "job-3", "job-4", "job-5"]
        assert (await session.reattach("job-1")).status is JobStatus.UNKNOWN
        summary = await session.reattach("job-3")
        assert await summary is JobStatus.FINISHED
        with pytest.raises(ResultsExpired):
            await summary.first()
        assert (await (await session.reattach("job-4")).first()).value == 4


async def test_the_log_of_a_finished_job_is_kept_for_a_stated_time(connect: Connect) -> None:
    async with connect(w.fed, options=LocalOptions(keep_finished_for=0.05)) as session:
        job = await session.execute(echo, {"n": 1})
        async with job.results() as results:
            assert (await anext(results)).value == 1
            await job
            while session.stats().results:  # a reader keeps it; nothing else happens meanwhile
                await asyncio.sleep(0.02)
                await results.aclose()
        assert job.status is JobStatus.FINISHED
        with pytest.raises(ResultsExpired):
            await job.first()


async def test_job_info_describes_the_job(connect: Connect) -> None:
    session = Session(w.fed)
    assert not session.connected
    async with connect(w.fed) as session:
        assert session.connected
        job = await session.execute(echo, {"n": 1}, autostop=False, job_id="told", label="Ada's")
        await job.first()
        found = job.info()
        assert (found.job_id, found.label, found.pipeline, found.places) == ("told", "Ada's", echo.name, ("yield",))
        assert (found.status, found.sets, found.accepts, found.finished) == (JobStatus.RUNNING, 1, True, None)
        await job.send_stop_frame()
        await job
        found = job.info()
        assert (found.status, found.sets, found.done, found.accepts) == (JobStatus.FINISHED, 1, 1, False)
        assert (found.first, found.errors, found.finished is not None) == (0, 0, True)
        assert found.events == len([event async for event in job.events()])
    assert not session.connected


async def test_the_label_of_a_job_is_kept_as_long_as_the_job(connect: Connect) -> None:
    async with connect(w.fed, options=LocalOptions(keep_finished=1)) as session:
        for n in range(3):
            await (await session.execute(echo, {"n": n}, label=f"label {n}"))
        assert [job.info().label for job in session.jobs()] == ["label 0", "label 1", "label 2"]
        assert session.infos() == [job.info() for job in session.jobs()]


@pytest.mark.parametrize(
    "wrong", [{"priority": "high"}, {"retry": 3}, {"options": {"max_items": 3}}, {"job_id": b"x"}, {"label": 3}]
)
async def test_arguments_of_a_wrong_type_are_refused_before_anything_starts(
    session: Session, wrong: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        await session.execute(echo, {"n": 1}, **wrong)
    assert session.jobs() == []
    with pytest.raises(TypeError, match="sqlite:///jobs"):
        Session(w.fed, store=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="options must be LocalOptions"):
        Session(w.fed, options=ResultLimits())  # type: ignore[arg-type]


async def test_reprs_show_the_current_state(connect: Connect) -> None:
    assert repr(Session(w.fed, target="local")) == f"<Session of {w.fed.name!r} on local: not connected>"
    async with connect(w.fed) as session:
        job = await session.execute(echo, None, autostop=False)
        await job.send_input_params([{"n": 1}, {"n": 2}])
        assert [(await anext(results)).value for results in [job.results()] for _ in range(2)]
        done = 0
        async for event in job.events():  # the completion comes after the results
            done += isinstance(event, FrameCompleted)
            if done == 2:
                break
        assert "running, 2 of 2 so far parameter sets done" in repr(job)
        assert "1 job running, 0 ended" in repr(session)
        await job.send_stop_frame()
        await job
        assert "finished" in repr(job)
        assert "1 ended" in repr(session)
    assert "closed" in repr(session)


async def test_preparing_a_large_pipeline_does_not_block_the_loop() -> None:
    with Pipeline("large") as large:
        for index in range(2000):
            Yield(w.echo(index), multiuse=True)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Session(w.fed, target="inline") as session:
        ticking = asyncio.create_task(others())
        plan = await session.prepare(large)
        ticking.cancel()
        assert await session.prepare(large) is plan
    assert turns > 10


async def test_a_redefined_operation_runs_its_new_code_in_the_next_job(connect: Connect) -> None:
    fed = Federation("redefined")
    lab = fed.site("lab")

    def define(added: int) -> Pipeline:
        @lab.operation
        def add(x: int) -> int:
            return x + added

        return pipeline_of(add, "x")

    pipeline = define(1)
    async with connect(fed) as session:
        plan = await session.prepare(pipeline)
        found = []
        for added in (1, 100, 1):
            define(added)
            found += [await first_value(session, what, {"x": 1}) for what in (pipeline, plan)]
        assert found == [2, 2, 101, 101, 2, 2]
