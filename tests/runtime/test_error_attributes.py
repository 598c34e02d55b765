"""What applications read of the errors of a job: the same attributes on all, and tracebacks of the user's code."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from dfm_async import (
    DfmError,
    Failure,
    Federation,
    If,
    JobFailed,
    OperationFailed,
    ParameterError,
    Pipeline,
    RetryPolicy,
    Session,
    Yield,
)
from dfm_async.errors import DecodingError
from tests.conftest import Connect
from tests.support.pipelines import yielding

fed = Federation("errors")
lab = fed.site("lab")


def helper(x: int) -> float:
    return 1 / x


@lab.operation
def sync(x: int) -> float:
    return helper(x)


@lab.operation
async def on_loop(x: int) -> float:
    return helper(x)


@lab.operation
def generator(x: int) -> Iterator[float]:
    yield 1.0
    yield helper(x)


@lab.operation
async def async_generator(x: int) -> AsyncIterator[float]:
    yield 1.0
    yield helper(x)


@lab.operation(retry=RetryPolicy(attempts=2, backoff=0.0), deadline=30)
def retried(x: int) -> float:
    return helper(x)


@lab.operation(in_process=True)
def elsewhere(x: int) -> float:
    return helper(x)


@lab.operation
def chained(x: int) -> float:
    try:
        return helper(x)
    except ZeroDivisionError as error:
        raise ValueError("a chain") from error


@lab.operation
async def grouped(x: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(on_loop.code(x))


class Built:
    def __init__(self) -> None:
        helper(0)

    def body(self, x: int) -> int:
        return x


built = lab.operation(Built, name="built")


def refuse(_x: int) -> Any:
    raise LookupError("not here")


class Stubborn:
    def __reduce__(self) -> Any:
        return refuse, (1,)


@lab.operation
def stubborn() -> Any:
    return Stubborn()


async def errors_of(session: Session, operation: Any, *args: Any) -> Sequence[DfmError]:
    pipeline = yielding(lambda: operation(*args))
    job = await session.execute(pipeline)
    failures = [item.error async for item in job.results(errors="yield") if isinstance(item, Failure)]
    with pytest.raises(JobFailed) as caught:
        await job
    assert failures
    for error in (*failures, *caught.value.errors):
        assert all(isinstance(text, str) for text in (error.node, error.site, error.type_name, error.message))
    return caught.value.errors


async def test_tracebacks_begin_with_the_users_code(connect: Connect) -> None:
    operations = [sync, on_loop, generator, async_generator, retried, elsewhere, chained, grouped, built]
    async with connect(fed) as session:
        for operation in operations:
            error = (await errors_of(session, operation, 0))[0]
            assert isinstance(error, OperationFailed)
            lines = [line for line in error.remote_traceback.splitlines() if "File" in line]
            assert any("in helper" in line for line in lines), operation.name
            assert not any("/dfm_async/" in line for line in lines), error.remote_traceback


@lab.operation
def record() -> dict[str, int]:
    return {"celsius": 20}


async def test_errors_of_expressions_have_no_frames_of_the_library(connect: Connect) -> None:
    with Pipeline() as pipeline:
        Yield(record()["fahrenheit"], place="missing")
        with If(record() > 1):  # type: ignore[operator]
            Yield(1, place="compared")
    async with connect(fed) as session:
        with pytest.raises(JobFailed) as caught:
            await (await session.execute(pipeline))
    found = {error.remote_traceback for error in caught.value.errors}
    assert found == {
        "KeyError: 'fahrenheit'",
        "TypeError: '>' not supported between instances of 'dict' and 'int'",
    }


@lab.operation(deadline=0.05)
def late(_x: int) -> None:
    time.sleep(0.2)


@lab.operation(deadline=0.05)
async def late_on_loop(_x: int) -> None:
    await asyncio.sleep(10)


async def test_exceeded_deadlines_have_no_frames_of_the_library_alone(connect: Connect) -> None:
    async with connect(fed) as session:
        (error,) = await errors_of(session, late, 0)
        assert isinstance(error, OperationFailed)
        assert error.remote_traceback == "TimeoutError: the deadline of 0.05 s for 'late' was exceeded"
        (error,) = await errors_of(session, late_on_loop, 0)
        assert isinstance(error, OperationFailed)
        assert "in late_on_loop" in error.remote_traceback, "where it was cancelled"


async def test_every_error_of_a_job_has_node_type_and_message(connect: Connect) -> None:
    async with connect(fed) as session:
        (error,) = await errors_of(session, stubborn)
        assert isinstance(error, DecodingError)
        assert (error.node, error.site) == ("stubborn#0", "")
        assert error.type_name == "dfm_async.errors.DecodingError"
        assert error.message == str(error)
        assert "not here" in error.message


def test_errors_without_a_node_have_empty_ones_and_are_pickled_as_before() -> None:
    error = pickle.loads(pickle.dumps(ParameterError(["missing parameter 'x'"])))
    assert (error.node, error.site, error.type_name) == ("", "", "dfm_async.errors.ParameterError")
    assert error.message == str(error)
    assert vars(error) == vars(ParameterError(["missing parameter 'x'"]))
