"""Functions as pipelines: ``@federation.pipeline`` and ``session.run``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Literal

import pytest

from dfm_async import (
    Federation,
    ForEach,
    JobFailed,
    JobStatus,
    ParameterError,
    Pipeline,
    PipelineError,
    PlaceParam,
    Yield,
    collect,
)
from dfm_async.web.pipeline_schemas import pipeline_schemas
from tests.conftest import Connect
from tests.support.sessions import SHORT
from tests.support.waiting import file_created

fed = Federation("functions")
archive, lab = fed.site("archive"), fed.site("lab")


@archive.operation
def load(day: str) -> list[float]:
    return {"mon": [14.0, 19.5], "tue": [9.5]}[day]


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


@lab.operation
def several(n: int) -> Iterator[int]:
    yield from range(n)


@lab.operation
async def forever(path: str) -> None:
    Path(path).touch()  # noqa: ASYNC240 - a gate for the test, which may run in another process
    await asyncio.Event().wait()


@fed.pipeline
def anomalies(day: str, base: float = 15.0) -> list[float]:
    """Return the anomalies of a day.

    Args:
        day: the day of
            the week.
        base: the usual temperature.
    """
    with ForEach(load(day)) as temperature:
        delta = anomaly(temperature, base)
        Yield(delta, place="live")
    return collect(delta)


@fed.pipeline(name="counted")
def counted(n: int) -> list[int]:
    return several(n)


@fed.pipeline
def silent(path: str) -> None:
    forever(path)


async def test_run_returns_what_the_function_returns(connect: Connect) -> None:
    async with connect(fed) as session:
        assert await session.run(anomalies, "mon") == [-1.0, 4.5]
        assert await session.run(anomalies, day="tue", base=9.0) == [0.5]
        assert await session.run(counted, 3) == [0, 1, 2]


async def test_parameters_and_places_may_have_the_same_names(connect: Connect) -> None:
    @fed.pipeline
    def level(value: float, result: float = 1.0) -> float:
        Yield(anomaly(result, 0.5), place="value")
        return anomaly(value, result)

    async with connect(fed) as session:
        assert await session.run(level, 3.0) == 2.0
        job = await session.execute(level, {"value": 3.0, "result": 2.0})
        assert {item.place: item.value for item in await job.collect()} == {"value": 1.5, "result": 1.0}


async def test_a_pipeline_function_is_executed_as_any_pipeline(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(anomalies, [{"day": "mon"}, {"day": "tue", "base": 9.0}])
        results = [result.value async for result in job.results("result", ordered=True)]
        assert results == [[-1.0, 4.5], [0.5]]
        assert job.plan.places == ("live", "result")


async def test_run_refuses_wrong_parameters_and_other_pipelines(connect: Connect) -> None:
    with Pipeline() as other:
        Yield(anomaly(PlaceParam("x")))
    async with connect(fed) as session:
        with pytest.raises(TypeError, match=r"anomalies\(\) missing a required argument: 'day'"):
            await session.run(anomalies)  # type: ignore[call-arg]
        with pytest.raises(ParameterError, match="parameter 'base'"):
            await session.run(anomalies, "mon", "warm")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"use session\.execute"):
            await session.run(other)
        with pytest.raises(JobFailed, match="sun"):
            await session.run(anomalies, "sun")


async def test_a_cancelled_run_cancels_its_job(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:
        task = asyncio.create_task(session.run(silent, str(tmp_path / "began")))
        await file_created(tmp_path / "began")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (job,) = session.jobs()
        assert job.status is JobStatus.ABORTED


def test_calling_a_pipeline_is_refused_with_a_hint() -> None:
    with pytest.raises(TypeError, match=r"cannot be called: await session\.run\(anomalies, \.\.\.\) runs it"):
        anomalies("mon")  # type: ignore[operator]
    with Pipeline(), pytest.raises(TypeError, match="cannot be called: in another pipeline, call a plain function"):
        anomalies("mon")  # type: ignore[operator]


def test_a_pipeline_function_is_the_same_as_a_block() -> None:
    with Pipeline("anomalies", result="result") as block:
        with ForEach(load(PlaceParam("day"))) as temperature:
            delta = anomaly(temperature, PlaceParam("base", default=15.0))
            Yield(delta, place="live")
        Yield(collect(delta), place="result")
    assert anomalies == block
    assert counted.name == "counted"
    assert silent.result is None


def test_a_pipeline_function_keeps_its_result_and_description_in_json() -> None:
    found: Pipeline = Pipeline.model_validate_json(anomalies.model_dump_json())
    assert found == anomalies
    assert found.description.startswith("Return the anomalies of a day.")
    assert {"description", "result"}.isdisjoint(silent.model_dump())


async def test_the_docstring_and_signature_are_in_the_schemas(connect: Connect) -> None:
    @fed.pipeline
    def looped(days: list[str]) -> None:
        with ForEach(days) as day:
            Yield(load(day))

    async with connect(fed) as session:
        found, _ = await pipeline_schemas(session, {"a": anomalies, "b": looped}, "#/{model}")
    params = found["a"].params
    assert params["description"].startswith("Return the anomalies of a day.")
    assert params["required"] == ["day"]
    assert params["properties"] == {
        "day": {"type": "string", "description": "the day of the week."},
        "base": {"type": "number", "default": 15.0, "description": "the usual temperature."},
    }
    assert found["b"].params["properties"] == {"days": {"type": "array", "items": {"type": "string"}}}


@lab.operation
def untyped(value, day):  # type: ignore[no-untyped-def]
    return [type(value).__name__, day]


@fed.pipeline
def typed(value: date | None, day: Literal["mon", "tue"] = "mon") -> list[str]:
    Yield(load(day), place="loaded")
    return untyped(value, day)  # type: ignore[no-any-return]


@fed.pipeline
def typed_otherwise(value: int, day: str = "mon") -> list[str]:
    Yield(load(day), place="loaded")
    return untyped(value, day)  # type: ignore[no-any-return]


async def test_the_types_of_a_function_check_and_convert_parameters(connect: Connect) -> None:
    async with connect(fed) as session:
        assert await session.run(typed, "2026-01-02") == ["date", "mon"]  # type: ignore[arg-type]
        assert await session.run(typed_otherwise, "2") == ["int", "mon"]  # type: ignore[arg-type]
        with pytest.raises(ParameterError) as caught:
            await session.execute(typed, {"value": "soon", "day": "sun"})
        first, second = sorted(caught.value.problems)
        assert first == "parameter 'day': Input should be 'mon' or 'tue', not 'sun'"
        assert second.startswith("parameter 'value': Input should be a valid date")
        found, _ = await pipeline_schemas(session, {"typed": typed}, "#/{model}")
        properties = found["typed"].params["properties"]
        assert list(properties) == ["value", "day"], "the order of the function"
        assert properties["day"] == {"default": "mon", "enum": ["mon", "tue"], "type": "string"}


def test_a_function_that_is_no_pipeline_is_refused() -> None:
    with pytest.raises(TypeError, match="plain function, without async or yield"):

        @fed.pipeline
        async def later(day: str) -> None: ...

    with pytest.raises(TypeError, match="parameter 'days' of pipeline 'many' is variadic positional"):

        @fed.pipeline
        def many(*days: str) -> None: ...

    with pytest.raises(PipelineError, match="base: is a parameter that is not used"):

        @fed.pipeline
        def unused(day: str, base: float) -> list[float]:
            return load(day)

    with pytest.raises(PipelineError, match="yield to another one"):

        @fed.pipeline
        def twice(day: str) -> list[float]:
            Yield(load(day), place="result")
            return load(day)


async def test_run_names_an_unknown_argument_with_the_one_that_may_be_meant(connect: Connect) -> None:
    async with connect(fed) as session:
        with pytest.raises(
            TypeError, match=r"anomalies\(\) got .* 'dya' \(did you mean 'day'\?\); it takes: day, base"
        ):
            await session.run(anomalies, dya="mon")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"anomalies\(\) missing a required argument: 'day'"):
            await session.run(anomalies, base=1.0)  # type: ignore[call-arg]
