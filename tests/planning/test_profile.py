"""Measured costs: what a profile keeps, what fits it, and that placement improves with use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from dfm_async import Federation, JobStatus, Pipeline, PipelineError, Session
from dfm_async.federation import Cost
from dfm_async.planning import Plan, Profile
from dfm_async.planning.prepare import prepare
from tests.property.random_pipelines import fed as random_federation
from tests.property.random_pipelines import pipelines
from tests.support.pipelines import pipeline_of

fed = Federation("lies")
quick = fed.site("quick")
slow = fed.site("slow")


@slow.operation(cost=Cost(fixed_time=0.001))  # it is not
async def work(data: bytes) -> bytes:
    await asyncio.sleep(0.02)
    return data[: len(data) // 2]


@quick.implements(work, cost=Cost(fixed_time=5.0))  # it is not, either
async def work_quickly(data: bytes) -> bytes:
    return data[: len(data) // 2]


@quick.operation(provider="first")
async def either(x: int) -> int:
    return x


works = pipeline_of(work, "data")


def fixed(site: str) -> Pipeline:
    return pipeline_of(work, "data", site=site)


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with Session(fed, target="inline") as session:
        yield session


async def run(session: Session, pipeline: Pipeline, *data: bytes) -> None:
    job = await session.execute(pipeline, [{"data": value} for value in data])
    assert await job is JobStatus.FINISHED


async def test_placement_improves_with_use(session: Session) -> None:
    before = await session.prepare(works)
    assert before.nodes[0].site == "slow", "as the costs say that were configured"
    with session.profile() as profile:
        for site in ("quick", "slow"):
            await run(session, fixed(site), *map(bytes, (10, 1000, 5000, 20000)))
    after = await session.prepare(works, costs="measured")
    assert after.nodes[0].site == "quick"
    assert (await session.prepare(works, costs=profile)).nodes[0].site == "quick"
    assert (await session.prepare(works)).nodes[0].site == "slow", "only who asks for it gets it"
    job = await session.execute(after, {"data": b"abcd"})
    assert (await job.first()).value == b"ab"
    found = profile.cost("slow", "work")
    assert found is not None
    assert 0.015 < found.fixed_time < 0.2
    assert found.output_factor == pytest.approx(0.5, rel=0.05)
    assert {(link.source, link.target) for link in profile.links} >= {("home", "slow"), ("slow", "home")}


async def test_worker_processes_are_measured_too() -> None:
    async with Session(fed) as session:
        async with session.profile() as profile:
            await run(session, fixed("slow"), *(bytes(100 * i) for i in range(4)))
        assert [(calls.site, calls.operation, calls.count) for calls in profile.calls] == [("slow", "work", 4)]
        assert sorted(given > 100 * i for i, (given, _, _) in enumerate(sorted(profile.calls[0].points))) == [True] * 4
        assert "work" in str(profile)
        assert "slow" in str(profile)


async def test_only_jobs_of_an_open_profile_are_measured(session: Session) -> None:
    with pytest.raises(PipelineError, match=r"nothing was measured.*session\.profile"):
        await session.prepare(works, costs="measured")
    await run(session, fixed("quick"), b"")
    with session.profile() as profile:
        assert not profile
    await run(session, fixed("quick"), b"")
    assert not profile
    assert str(profile) == "nothing was measured"
    with pytest.raises(ValueError, match="'configured', 'measured' or a Profile"):
        await session.prepare(works, costs="guessed")  # type: ignore[arg-type]


async def test_two_profiles_at_once_measure_the_same_and_the_session_counts_it_once(session: Session) -> None:
    with session.profile() as outer:
        with session.profile() as inner:
            await run(session, fixed("quick"), b"1")
        await run(session, fixed("quick"), b"2")
    assert [profile.calls[0].count for profile in (outer, inner)] == [2, 1]
    with pytest.raises(PipelineError):
        await session.prepare(fixed("nowhere"), costs="measured")


async def test_a_job_that_outlives_the_block_is_measured_to_its_end(session: Session) -> None:
    with session.profile() as profile:
        job = await session.execute(fixed("slow"), {"data": b"12"})
        assert not profile
    await job
    await session.execute(fixed("quick"), {"data": b""})
    session.profile()
    with session.profile():  # leaving it hands on all that has come
        pass
    assert [calls.site for calls in profile.calls] == ["slow"]


async def test_providers_are_measured_apart(session: Session) -> None:
    with session.profile() as profile:
        await (await session.execute(pipeline_of(either, "x"), [{"x": i} for i in range(3)]))
    assert profile.cost("quick", "either", "first") is not None
    assert profile.cost("quick", "either") is None


def test_a_fit_finds_the_costs_that_made_the_samples_whatever_single_calls_took() -> None:
    profile = Profile()
    for i in range(1000):
        size = 1e6 * (i % 7)
        late = 30.0 if i % 10 == 0 else 0.0
        profile.add_call("a", "op", None, size, 0.5 + size / 2e6 + late, 100 + 0.25 * size)
        profile.add_send("a", "b", size, 0.1 + size / 1e7)
    cost, link = profile.cost("a", "op"), profile.link("a", "b")
    assert cost is not None
    assert link is not None
    assert cost.fixed_time == pytest.approx(0.5, rel=0.05)
    assert cost.throughput == pytest.approx(2e6, rel=0.05)
    assert cost.fixed_size == pytest.approx(100, rel=0.05)
    assert cost.output_factor == pytest.approx(0.25, rel=0.05)
    assert link.fixed_time == pytest.approx(0.1)
    assert link.bandwidth == pytest.approx(1e7)
    assert profile.calls[0].count == 1000
    assert len(profile.calls[0].points) < 200, "what is kept has a limit"


def test_a_fit_of_many_small_inputs_and_a_few_large_ones_holds_for_the_large_ones() -> None:
    profile = Profile()
    for index, size in enumerate([4.0] * 9 + [10.0, 1000.0, 100_000.0]):
        seconds = 1e-4 * (1 + index % 3)  # whatever the size
        profile.add_call("lab", "same", None, size, seconds, size if size > 4 else 1.0)
    cost = profile.calls[0].cost
    assert cost.output_factor == pytest.approx(1, rel=0.01)
    slope = 0.0 if cost.throughput is None else 1 / cost.throughput
    assert cost.fixed_time + 100_000 * slope < 5e-4


def test_less_than_three_samples_are_not_a_cost() -> None:
    profile = Profile()
    for _ in range(2):
        profile.add_call("a", "op", None, 1, 1, 1)
        assert profile.cost("a", "op") is None
    profile.add_call("a", "op", None, 1, 1, 1)
    assert profile.cost("a", "op") == Cost(fixed_time=1, fixed_size=1, output_factor=0)


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    profile = Profile()
    for i in range(5):
        profile.add_call("a", "op", "gpu", i, i, i)
        profile.add_send("a", "b", i, i)
    path = tmp_path / "costs.json"
    profile.save(path)
    again = Profile.load(path)
    assert again.cost("a", "op", "gpu") == profile.cost("a", "op", "gpu")
    assert str(again) == str(profile)
    assert list(tmp_path.iterdir()) == [path]
    negative = '{"format": 1, "calls": [], "links": [{"source": "a", "target": "b", "points": [[1, -1]]}]}'
    newer = '{"format": 2, "calls": [], "links": []}'
    for text, reason in ((newer, "format 2"), (negative, "not a profile"), ("[1]", "not a profile")):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            Profile.load(path)


def everything() -> Profile:
    """Costs of all operations and sites of the random pipelines."""
    profile = Profile()
    for i, site in enumerate(random_federation.sites.values()):
        for j, (operation, provider) in enumerate(site.adapters):
            for size in (10, 1000, 5000):
                profile.add_call(site.name, operation, provider, size, 0.01 * (i + j) + size / 1e4, size * j / 3)
        for other in ("app", *random_federation.sites):
            for size in (10, 1000, 5000):
                profile.add_send(site.name, other, size, 0.1 * i + size / 1e4)
    return profile


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(pipelines())
def test_any_pipeline_can_be_placed_by_measured_costs(pipeline: Pipeline) -> None:
    try:
        plan = prepare(pipeline, random_federation, "app", measured=everything())
    except PipelineError:
        assume(False)
        raise
    assert plan.cost is not None
    calls = [node for node in plan.nodes if node.kind in ("call", "yield")]
    assert all(node.cost is not None for node in calls)
    ends = [node.cost.start + node.cost.seconds for node in calls if node.cost is not None]
    assert plan.cost.seconds >= max(ends, default=0.0) - 1e-6
    assert all(other.total >= plan.cost.seconds - 1e-6 for node in calls for other in node.alternatives)
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan.explain())
