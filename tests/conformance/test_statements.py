from __future__ import annotations

import os
from datetime import date
from typing import Any

import pytest

from dfm_async import (
    BestOf,
    ForEach,
    If,
    JobStatus,
    ParameterError,
    Pipeline,
    PlaceParam,
    Repeat,
    Session,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.planning import Plan
from tests.conformance import weather as w
from tests.conftest import TargetName
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import all_values, first_value

fed = w.fed


async def run(
    session: Session,
    pipeline: Pipeline | Plan,
    params: Any = {},  # noqa: B006
) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
    """Runs a pipeline to its end; results by place, in frame order."""
    job = await session.execute(pipeline, params)
    found: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    async for result in job:
        found.setdefault(result.place, []).append((result.frame, result.value))
    assert await job is JobStatus.FINISHED
    return {place: sorted(items, key=lambda item: item[0]) for place, items in found.items()}


async def test_every_statement_of_the_language_in_one_pipeline(session: Session) -> None:
    with Pipeline("report") as report:
        days = w.list_days(PlaceParam("month"))
        with ForEach(days, concurrency=4) as day:
            with TryFromCache(key=("temps", day)) as temps:
                temps.store(w.load(day, site="archive"))
            peak = w.highest(temps, site="lab")
            with If((peak["celsius"] > 35) | (day == "tue")) as hot:
                Yield(w.alert(day, peak["celsius"]), place="alert")
            with hot.otherwise():
                Yield(day, place="calm")
        peaks = collect(peak)
        Yield(w.summary(peaks, scale=PlaceParam("scale")), place="summary")
        Yield(w.audit(days, after=peaks), place="audit")

    found = await run(session, report, [{"month": "jan", "scale": 2.0}, {"month": "feb", "scale": 1.0}])
    assert found == {
        "alert": [((0, 0), "mon: 36.5"), ((0, 1), "tue: 12.0"), ((0, 2), "wed: 40.0")],
        "summary": [((0,), [73.0, 24.0, 80.0]), ((1,), [])],
        "audit": [((0,), 3), ((1,), 0)],
    }


async def test_results_name_place_frame_site_and_node(session: Session) -> None:
    pipeline = yielding(lambda: w.load("tue", site="lab"), place="temps")
    result = await (await session.execute(pipeline)).first("temps")
    assert (result.place, result.frame, result.site, result.node) == ("temps", (0,), "lab", "load#0")
    assert result.value == [9.5, 12.0]


async def test_nested_containers_and_fields_are_filled_in(session: Session) -> None:
    with Pipeline("nested") as pipeline:
        peak = w.highest(w.load("mon", site="archive"), site="lab")
        Yield(w.echo({"a": [peak["celsius"], (peak, 1)], "p": PlaceParam("p")}, site="desk"))
    found = await run(session, pipeline, {"p": {1, 2}})
    peak_value = {"celsius": 36.5, "kelvin": 309.65}
    assert found["yield"] == [((0,), {"a": [36.5, (peak_value, 1)], "p": {1, 2}})]


async def test_literals_and_parameters_can_be_yielded(session: Session) -> None:
    with Pipeline("plain") as pipeline:
        Yield(42, place="literal")
        Yield(PlaceParam("p"), place="param")
        Yield(PlaceParam("q")["k"], place="field")
    found = await run(session, pipeline, {"p": (1, 2), "q": {"k": "v"}})
    assert found == {"literal": [((0,), 42)], "param": [((0,), (1, 2))], "field": [((0,), "v")]}


async def test_parameter_sets_may_lack_parameters_with_a_default(session: Session) -> None:
    given = [1]
    with Pipeline("defaults") as pipeline:
        Yield(w.echo(PlaceParam("items", default=given), site="lab"), place="one")
        Yield(w.echo([PlaceParam("when", default=date(2026, 1, 2)), PlaceParam("n")], site="desk"), place="both")
    given.append(2)
    plan = Plan.from_json((await session.prepare(pipeline)).to_json())
    for executed in (pipeline, Pipeline.model_validate_json(pipeline.model_dump_json()), plan):
        found = await run(session, executed, [{"n": 1}, {"n": 2, "items": [], "when": None}])
        assert found["one"] == [((0,), [1]), ((1,), [])]
        assert found["both"] == [((0,), [date(2026, 1, 2), 1]), ((1,), [None, 2])]
    for params, message in [({}, "missing parameter 'n'$"), ({"n": 1, "x": 1}, "unknown parameter 'x'")]:
        with pytest.raises(ParameterError, match=message):
            await session.execute(pipeline, params)


async def test_a_default_is_never_shared_between_parameter_sets(session: Session) -> None:
    with Pipeline("own copies") as pipeline:
        Yield(w.append_to(PlaceParam("items", default=[1]), 2, site="lab"))
    found = await run(session, pipeline, [{}, {}, {}])
    assert [value for _, value in found["yield"]] == [[1, 2]] * 3


async def test_a_value_leaves_the_branch_that_ran(session: Session) -> None:
    with Pipeline("choice") as pipeline:
        with ForEach(w.list_days("jan")) as day:
            peak = w.highest(w.load(day, site="archive"), site="lab")
            with If(peak["celsius"] > 35) as hot:
                text = w.alert(day, peak["celsius"])
                with If(day == "wed") as last:
                    pass
                ending = last.value("!", PlaceParam("end"))
            with hot.otherwise():
                calm = w.echo([day], site="archive")
            both = hot.value([text, ending], calm[0])
            Yield(w.echo(both, site="desk"), place="each")
        Yield(collect(both), place="all")
    found = await run(session, pipeline, {"end": "."})
    expected = [["mon: 36.5", "."], "tue", ["wed: 40.0", "!"]]
    assert [value for _, value in found["each"]] == expected
    assert found["all"] == [((0,), expected)]


async def test_fields_can_be_collected(session: Session) -> None:
    with Pipeline("fields") as pipeline:
        with ForEach(["mon", "tue"]) as day:
            peak = w.highest(w.load(day, site="archive"), site="lab")
        Yield(w.echo(collect(peak["celsius"]), site="desk"))
    assert (await run(session, pipeline))["yield"] == [((0,), [36.5, 12.0])]


async def test_nested_loops_over_three_sites(session: Session) -> None:
    with Pipeline("nested") as pipeline, ForEach(w.list_days("jan")) as day:
        with ForEach(w.load(day, site="lab")) as value:
            Yield(w.echo([day, value], site="desk"))
            doubled = w.echo(value, site="archive")
        Yield(w.echo(collect(doubled), site="desk"), place="row")
    found = await run(session, pipeline)
    assert [value for _, value in found["yield"]] == [
        ["mon", 14.0], ["mon", 36.5], ["mon", 16.0], ["tue", 9.5], ["tue", 12.0], ["wed", 40.0],
    ]  # fmt: skip
    assert [frame for frame, _ in found["yield"]] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0)]
    assert [value for _, value in found["row"]] == [[14.0, 36.5, 16.0], [9.5, 12.0], [40.0]]


async def test_a_loop_over_nothing_collects_an_empty_list(session: Session) -> None:
    with Pipeline("empty") as pipeline:
        with ForEach(w.list_days("feb")) as day:
            value = w.echo(day, site="lab")
            Yield(value, place="never")
        Yield(collect(value), place="all")
    assert await run(session, pipeline) == {"all": [((0,), [])]}


async def test_collect_leaves_out_elements_whose_branch_did_not_run(session: Session) -> None:
    with Pipeline("odd") as pipeline:
        with ForEach([1, 2, 3, 4]) as number, If((number == 1) | (number == 3)):
            odd = w.echo(number, site="lab")
        Yield(collect(odd))
    assert (await run(session, pipeline))["yield"] == [((0,), [1, 3])]


async def test_a_loop_inside_a_branch_that_does_not_run_does_nothing(session: Session) -> None:
    with Pipeline("skipped") as pipeline:
        flag = w.echo(False, site="archive")
        with If(flag == True) as branch:  # noqa: E712
            with ForEach(w.list_days("jan")) as day:
                Yield(w.echo(day, site="desk"), place="never")
        with branch.otherwise():
            Yield(w.echo("else", site="lab"), place="otherwise")
    assert await run(session, pipeline) == {"otherwise": [((0,), "else")]}


async def test_repeat_passes_a_value_from_iteration_to_iteration_across_sites(session: Session) -> None:
    with Pipeline("averaging") as pipeline:
        with Repeat(carry=PlaceParam("start"), times=3) as model:
            step = w.improve(model)
            Yield(step["loss"], place="loss")
            model.next(w.next_model(step["value"]))
        Yield(model, place="final")
    found = await run(session, pipeline, [{"start": 1.0}, {"start": 3.0}])
    assert found["final"] == [((0,), 1.0), ((1,), 1.25)]
    assert [frame for frame, _ in found["loss"]] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("form", ["function", "inside"])
async def test_repeat_ends_when_its_condition_holds(session: Session, form: str) -> None:
    with Pipeline("until") as pipeline:
        until = (lambda value: value < 1.0) if form == "function" else None
        with Repeat(16.0, times=20, until=until) as current:
            half = w.next_model(current)
            if form == "inside":
                current.until(half < 1.0)
            current.next(half)
        Yield(current)
    assert (await run(session, pipeline))["yield"] == [((0,), 0.5)]


async def test_repeat_inside_a_loop_and_a_loop_inside_repeat(session: Session) -> None:
    with Pipeline("mixed") as pipeline, ForEach([1.0, 2.0]) as start:
        with Repeat(start, times=2) as current:
            with ForEach([0, 1]) as k:
                part = w.echo([current, k], site="lab")
            parts = w.echo(collect(part), site="desk")
            current.next(w.next_model(current))
            Yield(parts, place="parts")
        Yield(current, place="end")
    found = await run(session, pipeline)
    assert found["end"] == [((0, 0), 0.25), ((0, 1), 0.5)]
    assert found["parts"] == [
        ((0, 0, 0), [[1.0, 0], [1.0, 1]]),
        ((0, 0, 1), [[0.5, 0], [0.5, 1]]),
        ((0, 1, 0), [[2.0, 0], [2.0, 1]]),
        ((0, 1, 1), [[1.0, 0], [1.0, 1]]),
    ]


async def test_repeat_zero_times_gives_its_carry(session: Session) -> None:
    with Pipeline("none") as pipeline:
        with Repeat(7, times=0) as current:
            current.next(w.echo(current, site="lab"))
        Yield(current)
    assert (await run(session, pipeline))["yield"] == [((0,), 7)]


async def test_concurrent_misses_of_one_key_run_the_body_once(session: Session) -> None:
    key = os.urandom(8).hex()
    with Pipeline("cache") as pipeline, ForEach(list(range(20))) as number:
        with TryFromCache(key=PlaceParam("key", multiuse=True)) as found:
            found.store(w.compute_count(PlaceParam("key", multiuse=True)))
        Yield(w.echo([number, found], site="lab"))
    jobs = [await session.execute(pipeline, {"key": key}) for _ in range(3)]
    values = {result.value[1] for job in jobs for result in await job.collect()}
    assert values == {1}


async def test_a_cache_of_a_site_with_two_workers_is_one_cache(session: Session) -> None:
    key = os.urandom(8).hex()
    with Pipeline("shared") as pipeline:
        with TryFromCache(key=key, site="lab") as found:
            found.store(w.compute_count(key))
        Yield(found)
    jobs = [await session.execute(pipeline) for _ in range(8)]
    assert {(await job.first()).value for job in jobs} == {1}


async def test_a_failing_cache_body_lets_the_next_one_try(session: Session) -> None:
    key = os.urandom(8).hex()
    with Pipeline("again") as pipeline:
        with TryFromCache(key=key, site="archive") as found:
            found.store(w.fail_for(PlaceParam("day"), "tue"))
        Yield(found)
    job = await session.execute(pipeline, {"day": "tue"})
    await job.wait_until_finished()
    assert job.status is JobStatus.FAILED
    assert await first_value(session, pipeline, {"day": "mon"}) == "mon"


async def test_after_orders_operations_across_sites(session: Session) -> None:
    with Pipeline("order") as pipeline:
        first = w.stamp_late()
        Yield(first, place="first")
        Yield(w.stamp(after=first), place="second")
    found = await run(session, pipeline)
    assert found["first"][0][1] <= found["second"][0][1]


async def test_after_waits_for_failed_and_skipped_operations(session: Session) -> None:
    with Pipeline("whatever") as pipeline:
        failed = w.fail("no")
        Yield(w.echo("ran", site="desk", after=failed))
    job = await session.execute(pipeline)
    results = [result async for result in job.results(errors="yield", place="yield")]
    assert [getattr(result, "value", result) for result in results] == ["ran"]


async def test_operations_of_the_homesite_run_in_the_application_or_beside_it(
    session: Session, target: TargetName
) -> None:
    pipeline = yielding(lambda: w.at_home(w.load("wed", site="lab")))
    (((frame, (value, pid))),) = (await run(session, pipeline))["yield"]
    assert (frame, value) == ((0,), "[40.0]")
    assert (pid == os.getpid()) is (target != "flare")  # a job that outlives its application cannot run in it


async def test_one_operation_at_several_sites_with_other_code(session: Session) -> None:
    with Pipeline("places") as pipeline:
        Yield(w.load("wed", site="archive"), place="archive")
        Yield(w.load("wed", site=w.desk), place="desk")
        Yield(w.load("wed", site=BestOf(["lab", "desk"])), place="best")
    found = await run(session, pipeline)
    assert found["archive"] == [((0,), [40.0])]
    assert found["desk"] == [((0,), [0.0])]
    assert found["best"] == [((0,), [40.0])]


async def test_classes_objects_providers_and_star_arguments(session: Session) -> None:
    with Pipeline("adapters") as pipeline:
        first: Any = w.Scaler(5)
        Yield(first, place="class")
        Yield(w.Scaler(first[0]), place="same object")
        Yield(w.add_ten(1), place="args")
        Yield(w.add_one(1), place="object")
        Yield(w.measured(2, provider="sensors"), place="provider")
        Yield(w.measured(3), place="only provider")
        Yield(w.spread(1, 2, 3, x=4), place="star")
    found = await run(session, pipeline)
    assert {place: items[0][1] for place, items in found.items()} == {
        "class": (10, 1),
        "same object": (20, 2),
        "args": 11,
        "object": 2,
        "provider": 6,
        "only provider": 9,
        "star": {"sum": 6, "x": 4},
    }


async def test_an_operation_knows_what_it_runs_for(session: Session) -> None:
    with Pipeline("context") as pipeline, ForEach([0, 1]):
        Yield(w.who())
    values = sorted(await all_values(session, pipeline, job_id="the-job"))
    assert values == [("lab", "who", (0, 0), "the-job"), ("lab", "who", (0, 1), "the-job")]


async def test_values_of_every_kind_arrive_as_what_they_were(session: Session) -> None:
    value = [(1, (2,)), {3, 4}, b"x", {5: "int key"}, float("inf"), None, 2**80, {"nested": (True, 1.5)}]
    with Pipeline("types") as pipeline:
        there = w.echo(PlaceParam("value"), site="archive")
        Yield(w.echo(there, site="desk"))
    ((_, back),) = (await run(session, pipeline, {"value": value}))["yield"]
    assert back == value
    assert [type(item) for item in back] == [type(item) for item in value]


async def test_a_pipeline_survives_json(session: Session) -> None:
    with Pipeline("json") as pipeline, ForEach(w.list_days(PlaceParam("month"))) as day:
        Yield(w.echo((day, {1, 2}), site="lab"))
    again = Pipeline.model_validate_json(pipeline.model_dump_json())
    assert await run(session, again, {"month": "jan"}) == await run(session, pipeline, {"month": "jan"})


async def test_a_plan_can_be_executed_many_times_and_survives_json(session: Session) -> None:
    pipeline = pipeline_of(w.echo, "n", site="lab")
    plan = await session.prepare(pipeline)
    again = type(plan).from_json(plan.to_json())
    assert again == plan
    values = [await first_value(session, p, {"n": n}) for p in (plan, again) for n in range(3)]
    assert values == [0, 1, 2, 0, 1, 2]


async def test_an_operation_marked_in_process_has_a_process_of_its_own() -> None:
    with Pipeline("processes") as pipeline:
        Yield(w.own_process(1), place="own")
        Yield(w.own_process(2), place="again")
        Yield(w.lab_process(1), place="lab")
    async with Session(w.fed) as session:
        job = await session.execute(pipeline)
        found = {result.place: (result.value, result.site) async for result in job}
    assert found["own"] == found["again"]
    assert len({found["own"][0], found["lab"][0], os.getpid()}) == 3
    assert found["own"][1] == "lab"
