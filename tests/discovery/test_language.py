"""Advise() is a value of calls in pipelines for discovery, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from dfm_async import Advise, BestOf, Federation, Pipeline, PipelineError, Session, Yield

fed = Federation("asking")
here = fed.site("here")


@here.operation
def forecast(city: str, day: Any, unit: str = "C") -> float:
    return 20.0


def asking() -> Pipeline:
    with Pipeline("asking", mode="discovery") as pipeline:
        forecast(Advise(), "Monday")
    return pipeline


async def problems(pipeline: Pipeline) -> dict[str, str]:
    async with Session(fed, target="inline") as session:
        with pytest.raises(PipelineError) as caught:
            await session.prepare(pipeline)
    return {problem.statement: problem.message for problem in caught.value.problems}


def test_a_pipeline_that_asks_is_the_same_after_json() -> None:
    pipeline = asking()
    again = Pipeline.model_validate_json(pipeline.model_dump_json())
    assert again == pipeline
    assert again.mode == "discovery"
    assert again.body[0].args["city"] == Advise()  # type: ignore[union-attr]


def test_its_text_is_the_python_that_builds_it() -> None:
    assert str(asking()).splitlines() == [
        "with Pipeline('asking', mode='discovery') as pipeline:",
        "    n0 = forecast(city=Advise(), day='Monday')",
    ]


def test_it_can_be_drawn() -> None:
    assert "forecast#0" in asking().to_svg()
    assert "forecast#0" in asking().to_mermaid()


def test_calls_may_leave_out_what_is_to_be_asked_for() -> None:
    with Pipeline(mode="discovery") as pipeline:
        forecast()  # type: ignore[call-overload]
    assert pipeline.body[0].args == {}  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="city"), Pipeline():
        forecast()  # type: ignore[call-overload]


def test_asking_for_the_site_means_all_that_offer_it() -> None:
    with Pipeline(mode="discovery") as pipeline:
        forecast("Rome", site=Advise())
    assert pipeline.body[0].site == BestOf()  # type: ignore[union-attr]
    with pytest.raises(PipelineError, match=r"mode='discovery'"), Pipeline():
        forecast("Rome", 1, site=Advise())


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'execute' or 'discovery'"):
        Pipeline(mode="explore")  # type: ignore[arg-type]


async def test_prepare_names_the_parameter_that_asks_in_a_pipeline_that_is_executed() -> None:
    with Pipeline() as pipeline:
        forecast(Advise(), [1, Advise()])
        Yield(Advise())
    found = await problems(pipeline)
    assert found.keys() == {"forecast#0", "Yield#1"}
    assert "session.discover" in found["forecast#0"]


async def test_a_pipeline_for_discovery_is_not_executed() -> None:
    assert "session.discover" in (await problems(asking()))["mode"]
    async with Session(fed, target="inline") as session:
        with pytest.raises(PipelineError, match=r"session\.discover"):
            await session.execute(asking())
