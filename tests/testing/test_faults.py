"""Faults on purpose, while jobs run."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from dfm_async import (
    Federation,
    Job,
    JobAborted,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationFailed,
    Pipeline,
    PlaceParam,
    RetryPolicy,
    Session,
    SessionClosed,
    WorkerLost,
    WorkerNotice,
    Yield,
)
from dfm_async.testing import Faults
from tests.conftest import Connect

fed = Federation("unlucky")
lab, home = fed.site("lab"), fed.site("home")


@lab.operation
async def square(x: int) -> int:
    return x * x


@lab.operation
def cube(x: int) -> int:
    return x**3


@home.operation
def at_home(x: int) -> int:
    return x


with Pipeline("squares") as squares:
    Yield(square(PlaceParam("x")))

with Pipeline("cubes") as cubes:
    Yield(cube(PlaceParam("x")))

with Pipeline("patient squares") as patient:
    Yield(square(PlaceParam("x"), retry=RetryPolicy(attempts=2, backoff=0.0)))

of_each_kind = pytest.mark.parametrize("pipeline", [squares, cubes], ids=["async", "sync"])


async def lost(job: Job) -> WorkerLost:
    with pytest.raises(JobAborted) as caught:
        await job
    assert isinstance(caught.value.__cause__, WorkerLost)
    return caught.value.__cause__


async def test_an_operation_fails_as_often_as_was_asked(connect: Connect) -> None:
    async with connect(fed) as session:
        faults = Faults(session)
        fault = faults.fail_operation("square", ValueError("unlucky"))
        job = await session.execute(squares, {"x": 3})
        with pytest.raises(JobFailed) as caught:
            await job
        (error,) = caught.value.errors
        assert isinstance(error, OperationFailed)
        assert (error.type_name, error.message) == ("ValueError", "unlucky")
        again = await session.execute(squares, {"x": 3})
        assert (await again.first()).value == 9
        assert [(call.operation, call.site) for call in fault.calls] == [("square", "lab")]


async def test_a_retry_survives_one_failure(connect: Connect) -> None:
    async with connect(fed) as session:
        faults = Faults(session)
        fault = faults.fail_operation(square, OSError)
        job = await session.execute(patient, {"x": 4})
        assert (await job.first()).value == 16
        assert len(fault.calls) == 1


@of_each_kind
async def test_a_job_that_runs_is_met_by_a_fault_that_comes_later(connect: Connect, pipeline: Pipeline) -> None:
    name = pipeline.name.removesuffix("s") if pipeline.name else ""
    async with connect(fed) as session:
        faults = Faults(session)
        job = await session.execute(pipeline, None)
        await job.send_input_params({"x": 1})
        await job.first()
        with faults.fail_operation(name, KeyError("late"), times=None):
            await job.send_input_params({"x": 2})
            async with job.results(errors="yield", after=1) as results:
                failure = await anext(results)
        assert getattr(failure, "error", None) is not None
        await job.send_input_params({"x": 1})
        await job.send_stop_frame()
        with pytest.raises(JobFailed, match="late"):
            await job


@of_each_kind
async def test_a_held_operation_waits_for_the_test(connect: Connect, pipeline: Pipeline) -> None:
    async with connect(fed) as session:
        gate = Faults(session).hold("square" if pipeline is squares else "cube")
        job = await session.execute(pipeline, {"x": 1})
        await gate.arrived()
        assert job.status is JobStatus.RUNNING
        gate.open()
        assert (await job.first()).value == 1


async def test_a_delay_is_one_of_the_sessions_loop(connect: Connect) -> None:
    async with connect(fed) as session:
        loop = asyncio.get_running_loop()
        with Faults(session) as faults:
            faults.delay("square", 0.2, times=1)
            began = loop.time()
            assert (await (await session.execute(squares, {"x": 2})).first()).value == 4
            assert loop.time() - began >= 0.2
            assert (await (await session.execute(squares, {"x": 2})).first()).value == 4


async def test_a_delayed_call_can_be_cancelled(connect: Connect) -> None:
    async with connect(fed) as session:
        faults = Faults(session)
        faults.delay("square", 1000)
        job = await session.execute(squares, {"x": 2}, deadline=0.3)
        with pytest.raises(JobAborted, match="deadline"):
            await job


async def test_faults_of_one_session_spare_another(connect: Connect) -> None:
    async with connect(fed) as session, connect(fed) as other:
        Faults(session).fail_operation("square", ValueError, times=None)
        assert (await (await other.execute(squares, {"x": 2})).first()).value == 4
        with pytest.raises(JobFailed):
            await (await session.execute(squares, {"x": 2}))


async def test_faults_end_with_their_session(connect: Connect) -> None:
    async with connect(fed) as session:
        faults = Faults(session)
        faults.fail_operation("square", ValueError, times=None)
        faults.hold("cube")
    assert all(adapter.callee is None for site in fed.sites.values() for adapter in site.adapters.values())
    with pytest.raises(SessionClosed):
        Faults(Session(fed))


async def test_what_cannot_happen_is_refused(connect: Connect) -> None:
    async with connect(fed) as session:
        faults = Faults(session)
        with pytest.raises(LookupError, match="no operation 'squares'"):
            faults.delay("squares", 1)
        with pytest.raises(ValueError, match="must not be negative"):
            faults.delay("square", -1)
        with pytest.raises(ValueError, match="at least 1"):
            faults.fail_operation("square", OSError, times=0)
        with pytest.raises(TypeError, match="not 'no'"):
            faults.fail_operation("square", "no")  # type: ignore[arg-type]
        with pytest.raises(LookupError, match="no site 'nowhere'"):
            await faults.kill_worker("nowhere")
        with pytest.raises(LookupError, match="no worker process"):
            await faults.kill_worker("lab")
        with pytest.raises(LookupError, match="no worker process"):
            await faults.drop_connection(home)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_is_killed_while_its_job_runs(number: signal.Signals) -> None:
    async with Session(fed) as session:
        faults = Faults(session)
        gate = faults.hold("square")
        job = await session.execute(squares, {"x": 3})
        await gate.arrived()
        pid = await faults.kill_worker("lab", signal=number)
        assert not psutil.pid_exists(pid)
        assert (await lost(job)).exit_code == -number
        await gate.cleared()
        assert gate.waiting == 0
        assert session.stats().sites["lab"].restarts == 1


async def test_a_job_that_may_runs_again_after_its_worker_was_killed() -> None:
    async with Session(fed) as session:
        faults = Faults(session)
        gate = faults.hold("cube", times=1)
        job = await session.execute(cubes, {"x": 3}, retry=RetryPolicy(on_worker_lost=1))
        await gate.arrived()
        await faults.kill_worker(lab)
        assert (await job.first()).value == 27


async def test_a_worker_that_is_just_starting_can_be_killed() -> None:
    async with Session(fed) as session:
        faults = Faults(session)
        faults.hold("square")
        job = await session.execute(squares, {"x": 3})
        await faults.kill_worker("lab")
        await job.cancel()


async def test_a_stopped_worker_is_noticed_and_goes_on() -> None:
    async with Session(fed, options=LocalOptions(unresponsive_after=0.3)) as session:
        faults = Faults(session)
        gate = faults.hold("square")
        job = await session.execute(squares, {"x": 3})
        await gate.arrived()
        pid = await faults.kill_worker("lab", signal.SIGSTOP)
        async with job.events() as events:
            async for event in events:
                if isinstance(event, WorkerNotice):
                    assert event.kind == "unresponsive"
                    break
        assert await faults.kill_worker("lab", signal.SIGCONT) == pid
        gate.open()
        assert (await job.first()).value == 9


async def test_a_connection_that_breaks_ends_the_worker_and_its_job() -> None:
    async with Session(fed) as session:
        faults = Faults(session)
        gate = faults.hold("square")
        job = await session.execute(squares, {"x": 3})
        await gate.arrived()
        pid = await faults.drop_connection("lab")
        assert not psutil.pid_exists(pid)
        assert pid != os.getpid()
        await lost(job)
        gate.open()
        assert (await (await session.execute(squares, {"x": 5})).first()).value == 25
