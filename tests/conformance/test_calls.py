"""Calls of single operations: ``session.call``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Federation,
    JobStatus,
    Operation,
    OperationFailed,
    ParameterError,
    Pipeline,
    PipelineError,
    RetryPolicy,
)
from dfm_async.errors import ShippingError
from tests.conftest import Connect
from tests.support.sessions import LIMIT, SHORT
from tests.support.waiting import file_created, until

fed = Federation("called")
lab = fed.site("lab")
desk = fed.site("desk")


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


@lab.operation
@desk.operation
async def where(place: str) -> str:
    return place


@lab.operation
def several(n: int) -> Iterator[int]:
    yield from range(n)


@lab.operation
async def ticks(n: int) -> AsyncIterator[int]:
    for tick in range(n):
        yield tick


@lab.operation
def pairs(n: int) -> Any:
    return zip(range(n), "abc", strict=False)


@lab.operation
def total(*values: int, **named: int) -> int:
    return sum(values) + sum(named.values())


@lab.operation(args={"step": 10})
class Adder:
    def __init__(self, step: int) -> None:
        self.step = step

    def body(self, x: int) -> int:
        return x + self.step


@lab.operation
def broken(x: int) -> int:
    raise ValueError(f"no {x}")


@lab.operation
async def forever(path: str) -> None:
    Path(path).touch()  # noqa: ASYNC240 - a gate for the test, which may run in another process
    await asyncio.Event().wait()


@lab.operation
def flaky(path: str) -> str:
    marker = Path(path)
    if not marker.exists():
        marker.touch()
        raise OSError("not yet")
    return "done"


async def test_a_call_returns_the_value_of_an_operation(connect: Connect) -> None:
    async with connect(fed) as session:
        assert await session.call(anomaly, 17.0) == 2.0
        assert await session.call(anomaly, 17.0, base=7.0) == 10.0
        assert await session.call(anomaly, base=1.0, value=3.0) == 2.0
        assert await session.call(where, "x", site=lab) == await session.call(where, "x", site="desk") == "x"
        assert await session.call(desk.operations.where, "x") == "x"
        assert await session.call(total, 1, 2, three=3) == 6
        assert await session.call(total) == 0
        assert await session.call(Adder, 1) == 11


async def test_a_call_of_a_generator_returns_a_list(connect: Connect) -> None:
    async with connect(fed) as session:
        assert await session.call(several, 3) == [0, 1, 2]
        assert await session.call(several, 1) == [0]
        assert await session.call(several, 0) == []
        assert await session.call(ticks, 2) == [0, 1]
        assert await session.call(pairs, 2) == [(0, "a"), (1, "b")]


async def test_a_call_raises_the_error_of_its_operation(connect: Connect) -> None:
    async with connect(fed) as session:
        with pytest.raises(OperationFailed, match="no 3") as caught:
            await session.call(broken, 3)
        assert caught.value.type_name == "ValueError"
        assert (caught.value.site, caught.value.operation) == ("lab", "broken")


async def test_a_call_refuses_wrong_arguments(connect: Connect) -> None:
    async with connect(fed) as session:
        with pytest.raises(TypeError, match="missing a required argument: 'value'"):
            await session.call(anomaly)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="did you mean 'base'"):
            await session.call(anomaly, 1.0, bas=2.0)  # type: ignore[call-arg]
        for option in ("fallback", "after"):
            with pytest.raises(TypeError, match=f"call of operation 'anomaly': {option}= is an option of calls in pip"):
                await session.call(anomaly, 1.0, **{option: 0})
        with pytest.raises(TypeError, match=r"keyword argument 'falback'; it takes: value, base"):
            await session.call(anomaly, 1.0, falback=0)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"'retri' \(did you mean 'retry'\?\)"):
            await session.call(anomaly, 1.0, retri=0)  # type: ignore[call-arg]
        with pytest.raises(
            TypeError, match="each of operation 'anomaly': fallback= is an option of calls in pipelines"
        ):
            session.each(anomaly, 1.0, fallback=0)  # type: ignore[call-arg]
        with pytest.raises(ParameterError, match="parameter 'value'"):
            await session.call(anomaly, "warm")  # type: ignore[call-overload]
        with pytest.raises(PipelineError, match="no site 'attic'"):
            await session.call(anomaly, 1.0, site="attic")
        with pytest.raises(TypeError, match="leave site= out"):
            await session.call(desk.operations.where, "x", site="lab")
        with pytest.raises(TypeError, match=r"offer it at a site, with @site\.operation"):
            await session.call(len, "x")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="pass the operation itself, then its arguments"):
            await session.call(anomaly(17.0))  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"use session\.run"):
            await session.call(Pipeline("p"))  # type: ignore[call-overload]
        with pytest.raises(PipelineError, match="deadline= takes a positive number of seconds, not 'soon'"):
            await session.call(anomaly, 1.0, deadline="soon")  # type: ignore[call-arg]
        with pytest.raises(PipelineError, match="retry= takes a RetryPolicy, not 3"):
            await session.call(anomaly, 1.0, retry=3)  # type: ignore[call-arg]
        assert [job for job in session.jobs() if job.status is not JobStatus.FINISHED] == []


async def test_a_cancelled_call_cancels_its_job(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:
        async with asyncio.timeout(LIMIT):
            task = asyncio.create_task(session.call(forever, str(tmp_path / "began")))
            await file_created(tmp_path / "began")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        (job,) = session.jobs()
        assert job.status is JobStatus.ABORTED
        assert job.info().reason == "the call was cancelled"


async def test_a_call_takes_the_options_of_calls_in_pipelines(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:
        assert await session.call(flaky, str(tmp_path / "tried"), retry=RetryPolicy(attempts=2, backoff=0)) == "done"
        with pytest.raises(OperationFailed, match=r"the deadline of 0\.05 s"):
            await session.call(forever, str(tmp_path / "late"), deadline=0.05)


async def test_calls_of_one_operation_share_a_plan(connect: Connect) -> None:
    async with connect(fed) as session:
        values = await asyncio.gather(*(session.call(anomaly, float(n)) for n in range(5)))
        assert values == [n - 15.0 for n in range(5)]
        await session.call(anomaly, 1.0, 2.0)
        plans = [job.plan for job in session.jobs()]
        assert len({id(plan) for plan in plans}) == 2
        assert {plan.pipeline for plan in plans} == {"anomaly"}


def define(federation: Federation, added: int) -> Operation[[int], int]:
    @federation.sites["lab"].operation
    def f(x: int) -> int:
        return x + added

    return f


async def test_a_call_runs_an_operation_as_it_is_defined_now(connect: Connect) -> None:
    federation = Federation("redefined")
    federation.site("lab")
    first = define(federation, 1)
    async with connect(federation) as session:
        assert await session.call(first, 1) == 2
        second = define(federation, 100)
        assert await session.call(second, 1) == await session.call(first, 1) == 101


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_a_call_is_a_job_of_its_store(connect: Connect, store_url: str) -> None:
    async with connect(fed, store=store_url) as session:
        assert await session.call(anomaly, 17.0) == 2.0
    async with connect(fed, store=store_url) as session:
        (job,) = await session.refresh_jobs()
        assert job.status is JobStatus.FINISHED
        assert (await job.first()).value == 2.0


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_a_call_ends_with_its_session(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:
        task = asyncio.create_task(session.call(forever, str(tmp_path / "began")))
        await file_created(tmp_path / "began")
    await until(task.done)
    with pytest.raises(Exception, match="the session was closed"):
        await task


@pytest.mark.parametrize("target", ["local", "flare"])
async def test_an_operation_that_cannot_be_sent_fails_only_its_own_calls(connect: Connect) -> None:
    federation, lock = Federation("unshippable"), threading.Lock()
    site = federation.site("lab")

    @site.operation
    def good(x: int) -> int:
        return x

    async with connect(federation) as session:

        @site.operation
        def bad(x: int) -> bool:
            return lock.locked()

        assert await session.call(good, 1) == 1
        with pytest.raises(ShippingError, match="it refers to the variable 'lock'"):
            await session.call(bad, 1)
        assert await session.call(good, 2) == 2
