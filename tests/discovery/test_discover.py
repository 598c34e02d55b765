"""``session.discover`` asks the advisors at the sites, and reports everything that they return."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Advise,
    BestOf,
    Federation,
    ForEach,
    JobAborted,
    JobFailed,
    Pipeline,
    PipelineError,
    PlaceParam,
    Session,
)
from dfm_async.discovery import (
    AdviceContext,
    AdvisedError,
    AdvisedLiteral,
    AdvisedOneOf,
    AdvisedSubsetOf,
    AdvisedValue,
    BranchFieldAdvice,
    Discovery,
    ErrorFieldAdvice,
    Okay,
    SingleFieldAdvice,
    field_advisor,
)
from dfm_async.federation import VaultConfig
from tests.conftest import Connect

weather = Federation("weather")
north, south = weather.site("north"), weather.site("south")


@north.operation
class Forecast:
    """A class with advisors."""

    def body(self, city: str, day: str, unit: str = "C") -> str:
        return f"{city} {day} {unit}"

    @field_advisor("city", order=0)
    async def cities(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return AdvisedOneOf(["Oslo", "Bergen"], split_on_advice=True)

    @field_advisor("day")
    def days(self, value: Any, context: AdviceContext) -> AdvisedValue:
        if context.get("city") == "Bergen":
            raise RuntimeError("it rains")
        return AdvisedOneOf(["Monday", "Tuesday"])


ask = weather.operations  # as pipelines use them that do not know the code


@south.implements(ask.Forecast)
def forecast_south(city: str, day: str, unit: str = "C") -> str:
    return f"{city} {day} {unit}"


@south.advisor(ask.Forecast, "city")
async def southern_cities(value: Any, context: AdviceContext) -> AdvisedValue:
    return AdvisedSubsetOf(["Rome", context.get("unit")])


@north.operation
def shout(text: str) -> str:
    return text.upper()


@south.operation
def quiet(text: str, level: int = 3) -> str:
    return text.lower()


@quiet.advisor("text")
def texts(value: Any, context: AdviceContext) -> AdvisedValue:
    return AdvisedLiteral("hush") if isinstance(value, Advise) else Okay()


@quiet.advisor("level", order=-2)
def levels(value: Any, context: AdviceContext) -> AdvisedValue:
    return AdvisedError("there are no levels") if context.get("text", None) == "loud" else AdvisedOneOf([1, 2, 3])


async def test_the_tree_of_each_site_and_node_is_what_its_advisors_say(connect: Connect) -> None:
    with Pipeline("tour", mode="discovery") as pipeline:
        found = ask.Forecast(city=Advise(), day=Advise())
        ask.shout(found)
    async with connect(weather) as session:
        discovery = await session.discover(pipeline)
        assert session.jobs() == []
    assert list(discovery.sites) == ["north", "south"]
    assert list(discovery.sites["north"]) == ["Forecast#0", "shout#1"]
    assert discovery.sites["north"]["shout#1"] is None
    tree = discovery.sites["north"]["Forecast#0"]
    assert isinstance(tree, BranchFieldAdvice)
    assert list(tree) == ["Oslo"]
    assert tree.select("Oslo") == SingleFieldAdvice(field="day", value=["Monday", "Tuesday"], form="one of")
    assert tree.collect_error_messages() == {"day": {"RuntimeError: it rains"}}
    south_tree = discovery.sites["south"]["Forecast#0"]
    assert south_tree == SingleFieldAdvice(field="city", value=["Rome", "C"], form="subset of")
    (error,) = discovery.errors()
    assert (error.site, error.node, error.field, dict(error.values)) == (
        "north",
        "Forecast#0",
        "day",
        {"city": "Bergen"},
    )
    assert "in days" in error.traceback
    assert Discovery.from_json(discovery.to_json()) == discovery
    page = discovery._repr_html_()
    assert "<b>city</b>" in page
    assert "1 of 2 possible" in page
    assert "RuntimeError: it rains" in page
    assert str(discovery).splitlines() == [
        "Discovery of 'tour'",
        "north",
        "├─ Forecast#0",
        "│  └─ city:",
        '│     ├─ "Oslo"',
        '│     │  └─ day: one of "Monday", "Tuesday"',
        '│     └─ "Bergen"',
        "│        └─ day  ✗ RuntimeError: it rains",
        "└─ shout#1  no advice",
        "south",
        "└─ Forecast#0",
        '   └─ city: some of "Rome", "C"',
    ]


async def asked(pipeline: Pipeline, federation: Federation = weather, **options: Any) -> Discovery:
    async with Session(federation, target="inline") as session:
        return await session.discover(pipeline, **options)


def advised_by(advise: Any) -> tuple[Federation, Pipeline]:
    """Return a federation with one operation, whose parameter x has this advisor, and a pipeline that asks for it."""
    federation = Federation("advised")

    @federation.site("here").operation
    def op(x: int) -> int:
        return x

    op.advisor("x")(advise)
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.op()
    return federation, pipeline


async def test_values_that_are_given_are_checked_and_not_advised() -> None:
    with Pipeline(mode="discovery") as pipeline:
        ask.quiet("loud", 4)
        ask.quiet("calm", 4)
        ask.quiet("calm", 2)
    nodes = (await asked(pipeline)).sites["south"]
    wrong = nodes["quiet#0"]
    assert wrong == SingleFieldAdvice(
        field="level", value=4, form="literal", edge=ErrorFieldAdvice("there are no levels")
    )
    assert not wrong.has_good_options()
    other = nodes["quiet#1"]
    assert isinstance(other, SingleFieldAdvice)
    assert other.edge == ErrorFieldAdvice("expected one of [1, 2, 3], not 4")
    assert nodes["quiet#2"] is None


async def test_what_nodes_and_parameters_will_give_is_asked_for_like_what_is_left_out() -> None:
    with Pipeline(mode="discovery") as pipeline:
        ask.quiet(PlaceParam("p"))
        ask.quiet()
        with ForEach([1]):
            ask.quiet(ask.shout("x"))
    nodes = (await asked(pipeline)).sites["south"]
    trees = {str(tree) for tree in nodes.values()}
    assert len(nodes) == 3
    assert len(trees) == 1


async def test_only_the_sites_that_may_run_a_node_are_asked() -> None:
    with Pipeline(mode="discovery") as pipeline:
        ask.Forecast(site=south)
        ask.Forecast(site=BestOf([north]))
        ask.Forecast(site=Advise())
    discovery = await asked(pipeline)
    assert {site: list(nodes) for site, nodes in discovery.sites.items()} == {
        "north": ["Forecast#1", "Forecast#2"],
        "south": ["Forecast#0", "Forecast#2"],
    }
    with Pipeline(mode="discovery") as free:
        ask.Forecast()
    assert list((await asked(free, restrict_to_sites=["south"])).sites) == ["south"]


async def test_every_provider_that_may_run_a_node_is_asked(connect: Connect) -> None:
    fed = Federation("providers")
    lab = fed.site("lab")

    def slow(city: str) -> str:
        return city

    operation = lab.operation(slow, name="Look", provider="slow")

    @lab.implements(operation, provider="quick")
    def quick(city: str) -> str:
        return city

    @operation.advisor("city")
    def cities(value: Any, context: AdviceContext) -> AdvisedValue:
        return AdvisedOneOf(["Oslo"])

    with Pipeline(mode="discovery") as pipeline:
        operation(city=Advise())
        operation(city=Advise(), provider="quick")
    async with connect(fed) as session:
        discovery = await session.discover(pipeline)
    assert list(discovery.sites["lab"]) == ["Look#0/slow", "Look#0/quick", "Look#1"]
    for tree in discovery.sites["lab"].values():
        assert isinstance(tree, SingleFieldAdvice)
        assert list(tree) == ["Oslo"]


async def test_all_problems_are_reported_at_once() -> None:
    with Pipeline(mode="discovery") as pipeline:
        ask.Forecast([Advise()])
        ask.Forecast(3)
        ask.quiet(site=north)
        ask.quiet(site="nowhere")
    with pytest.raises(PipelineError) as caught:
        await asked(pipeline)
    found = [(problem.statement, problem.message) for problem in caught.value.problems]
    assert [statement for statement, _ in found] == ["Forecast#0", "Forecast#1", "quiet#2", "quiet#3"]
    assert "whole value" in found[0][1]


async def test_a_pipeline_that_is_executed_is_not_discovered() -> None:
    with Pipeline() as pipeline:
        ask.shout("x")
    with pytest.raises(PipelineError, match="mode='discovery'"):
        await asked(pipeline)


async def test_an_adapter_that_cannot_be_built_is_an_error_of_its_node_only(connect: Connect) -> None:
    federation = Federation("broken")
    here = federation.site("here")

    @here.operation
    class Broken:
        def __init__(self) -> None:
            raise OSError("no disk")

        def body(self, x: int) -> int:
            return x

    @here.operation
    def fine(x: int) -> int:
        return x

    @fine.advisor("x")
    def one(value: Any, context: AdviceContext) -> Any:
        return AdvisedLiteral(1)

    with Pipeline(mode="discovery") as pipeline:
        federation.operations.Broken()
        federation.operations.fine()
    async with connect(federation) as session:
        nodes = (await session.discover(pipeline)).sites["here"]
    broken = nodes["Broken#0"]
    assert isinstance(broken, ErrorFieldAdvice)
    assert broken.msg == "OSError: no disk"
    assert nodes["fine#1"] == SingleFieldAdvice(field="x", value=1, form="literal")


async def test_cancelling_a_discovery_cancels_the_advisors() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(value: Any, context: AdviceContext) -> Any:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    federation, pipeline = advised_by(wait)
    async with Session(federation, target="inline") as session:
        task = asyncio.create_task(session.discover(pipeline))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        assert session.jobs() == []


async def test_an_advisor_that_returns_something_else_is_an_error() -> None:
    def lazy(value: Any, context: AdviceContext) -> Any:
        return [1, 2]

    federation, pipeline = advised_by(lazy)
    (error,) = (await asked(pipeline, federation)).errors()
    assert "'lazy' must return an advised value" in error.message


def test_advisors_are_for_parameters_that_exist() -> None:
    with pytest.raises(ValueError, match="no parameter 'colour'"):
        quiet.advisor("colour")(texts)
    with pytest.raises(ValueError, match="does not offer"):
        north.advisor(quiet, "text")


async def test_a_worker_that_dies_while_it_is_asked_is_an_error(tmp_path: Path) -> None:
    federation, pipeline = advised_by(lambda value, context: os._exit(3))
    async with Session(federation, store=f"sqlite:///{tmp_path / 'jobs.db'}") as session:
        with pytest.raises(JobAborted, match="here"):
            await session.discover(pipeline)
        assert session.jobs() == []


async def test_a_site_that_cannot_start_is_an_error_in_the_discovery(tmp_path: Path) -> None:
    federation, pipeline = advised_by(levels)
    federation.sites["here"].vault = VaultConfig(path="file", args={"path": str(tmp_path / "none.yaml")})
    async with Session(federation) as session:
        with pytest.raises(JobFailed, match="site 'here' does not start"):
            await session.discover(pipeline)
        assert session.jobs() == []
