"""Faults on purpose, while jobs run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
    Yield,
)
from dfm_async.events import WorkerNotice
from dfm_async.testing import Faults, Gate
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of

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


squares = pipeline_of(square, "x")
cubes = pipeline_of(cube, "x")

with Pipeline("patient squares") as patient:
    Yield(square(PlaceParam("x"), retry=RetryPolicy(attempts=2, backoff=0.0)))

of_each_kind = pytest.mark.parametrize("pipeline", [squares, cubes], ids=["async", "sync"])


async def lost(job: Job) -> WorkerLost:
    with pytest.raises(JobAborted) as caught:
        await job
    assert isinstance(caught.value.__cause__, WorkerLost)
    return caught.value.__cause__


async def value(session: Session, x: int) -> int:
    found: int = (await (await session.execute(squares, {"x": x})).first()).value
    return found


@asynccontextmanager
async def held(options: LocalOptions | None = None) -> AsyncIterator[tuple[Session, Faults, Gate, Job]]:
    """A job whose call waits at a gate, in a worker process."""
    async with Session(fed, options=options) as session:
        faults = Faults(session)
        gate = faults.hold("square")
        job = await session.execute(squares, {"x": 3})
        await gate.arrived()
        yield session, faults, gate, job


async def test_operation_fails_the_requested_number_of_times(session: Session, faults: Faults) -> None:
    fault = faults.fail_operation("square", ValueError("unlucky"))
    job = await session.execute(squares, {"x": 3})
    with pytest.raises(JobFailed) as caught:
        await job
    (error,) = caught.value.errors
    assert isinstance(error, OperationFailed)
    assert (error.type_name, error.message) == ("ValueError", "unlucky")
    assert await value(session, 3) == 9
    assert [(call.operation, call.site) for call in fault.calls] == [("square", "lab")]


async def test_a_retry_survives_one_failure(session: Session, faults: Faults) -> None:
    fault = faults.fail_operation(square, OSError)
    job = await session.execute(patient, {"x": 4})
    assert (await job.first()).value == 16
    assert len(fault.calls) == 1


@of_each_kind
async def test_fault_affects_a_running_job(session: Session, faults: Faults, pipeline: Pipeline) -> None:
    name = pipeline.name.removesuffix("s") if pipeline.name else ""
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
async def test_a_held_operation_waits_for_the_test(session: Session, pipeline: Pipeline) -> None:
    gate = Faults(session).hold("square" if pipeline is squares else "cube")
    job = await session.execute(pipeline, {"x": 1})
    await gate.arrived()
    assert job.status is JobStatus.RUNNING
    gate.open()
    assert (await job.first()).value == 1


async def test_a_delay_is_one_of_the_sessions_loop(session: Session) -> None:
    loop = asyncio.get_running_loop()
    with Faults(session) as faults:
        faults.delay("square", 0.2, times=1)
        began = loop.time()
        assert await value(session, 2) == 4
        assert loop.time() - began >= 0.2
        assert await value(session, 2) == 4


async def test_a_delayed_call_can_be_cancelled(session: Session, faults: Faults) -> None:
    faults.delay("square", 1000)
    job = await session.execute(squares, {"x": 2}, deadline=0.3)
    with pytest.raises(JobAborted, match="deadline"):
        await job


async def test_faults_of_one_session_do_not_affect_another(connect: Connect) -> None:
    async with connect(fed) as session, connect(fed) as other:
        Faults(session).fail_operation("square", ValueError, times=None)
        assert await value(other, 2) == 4
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


async def test_invalid_faults_are_refused(session: Session, faults: Faults) -> None:
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
    async with held() as (session, faults, gate, job):
        pid = await faults.kill_worker("lab", signal=number)
        assert not psutil.pid_exists(pid)
        assert (await lost(job)).exit_code == -number
        await gate.cleared()
        assert gate.waiting == 0
        assert session.stats().sites["lab"].restarts == 1


async def test_job_with_retries_runs_again_after_its_worker_was_killed() -> None:
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
    async with held(options=LocalOptions(unresponsive_after=0.3)) as (_, faults, gate, job):
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
    async with held() as (session, faults, gate, job):
        pid = await faults.drop_connection("lab")
        assert not psutil.pid_exists(pid)
        assert pid != os.getpid()
        await lost(job)
        gate.open()
        assert await value(session, 5) == 25
