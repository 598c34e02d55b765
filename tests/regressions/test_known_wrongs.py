"""What other systems for federations of sites are known to do wrong, and ours must not. "There" means such a system."""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dfm_async
from dfm_async import (
    Failure,
    If,
    Job,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationFailed,
    Pipeline,
    PipelineError,
    PlaceParam,
    Result,
    Session,
    TryFromCache,
    Yield,
)
from dfm_async.events import FrameCompleted
from tests.conftest import Connect
from tests.regressions import wrongs as w
from tests.support.pipelines import pipeline_of, yielding

fed = w.fed


def unique() -> str:
    return os.urandom(8).hex()


async def run(session: Session, pipeline: Pipeline, params: Any = {}) -> list[Result]:  # noqa: B006
    return await (await session.execute(pipeline, params)).collect()


def opening(gate: str, site: str = "b") -> Pipeline:
    return yielding(lambda: w.open_gate(gate, site=site))


# statements


async def test_conditions_choose_one_of_two_branches(session: Session) -> None:
    """No pipeline with a condition compiles there."""
    with Pipeline("branches") as pipeline:
        x = w.echo(PlaceParam("x", multiuse=True), site="a")
        y = w.echo(PlaceParam("x", multiuse=True), site="b")
        with If(((x > 1) & ~(y == 3)) | (x == 0)) as outer:
            with If(y >= 2) as inner:
                Yield(w.echo([x, y], site="c"), place="large")
            with inner.otherwise():
                Yield(x, place="zero")
        with outer.otherwise():
            Yield(w.echo("no", site="c"), place="otherwise")
    found = await run(session, pipeline, [{"x": n} for n in range(5)])
    assert sorted((result.frame[0], result.place, result.value) for result in found) == [
        (0, "zero", 0),
        (1, "otherwise", "no"),
        (2, "large", [2, 2]),
        (3, "otherwise", "no"),
        (4, "large", [4, 4]),
    ]


# frames


async def test_a_place_ends_with_the_last_of_its_producers(session: Session) -> None:
    """There, the first of two stops is enough: what the slower one sends afterwards is lost."""
    gate = unique()
    with Pipeline("two producers") as pipeline:
        n = PlaceParam("n", multiuse=True)
        quick, late = w.echo(n, site="a"), w.gated(gate, n, site="b")
        Yield(quick, place="both", multiuse=True)
        Yield(late, place="both", multiuse=True)
        Yield(w.echo([quick, late], site="c"), place="joined")
    sets = range(20)
    job = await session.execute(pipeline, [{"n": n} for n in sets])  # and no more: the stop is on its way
    async with job.results() as results:
        found = [await anext(results) for _ in sets]
        assert {result.site for result in found} == {"a"}
        await run(session, opening(gate))
        found += [result async for result in results]
    assert await job is JobStatus.FINISHED
    assert Counter((result.place, result.site) for result in found) == {
        ("both", "a"): 20,
        ("both", "b"): 20,
        ("joined", "c"): 20,
    }
    assert sorted(result.value for result in found if result.place == "joined") == [[n, n] for n in sets]


async def test_parameters_are_freed_when_their_set_is_done(session: Session) -> None:
    """There, a parameter stays where it was sent to until the job ends."""
    with Pipeline("parcels") as pipeline:
        Yield(w.echo(1, site="b", after=w.receive(w.receive(PlaceParam("parcel"), site="a"), site="b")))
    with Pipeline("left") as left:
        Yield(w.parcels(site="a"), place="a")
        Yield(w.parcels(site="b"), place="b")
    sent: weakref.WeakSet[w.Parcel] = weakref.WeakSet()
    job = await session.execute(pipeline, None)
    events = job.events()
    for _ in range(30):
        parcel = w.Parcel()
        sent.add(parcel)
        await job.send_input_params({"parcel": parcel})
        del parcel
        async for event in events:
            if isinstance(event, FrameCompleted):
                break
    gc.collect()
    assert len(sent) <= 1
    assert all(result.value <= 2 for result in await run(session, left))
    assert job.status is JobStatus.RUNNING
    await job.send_stop_frame()
    assert await job is JobStatus.FINISHED


# firing


@pytest.mark.parametrize("operation", [w.meet, w.meet_in_threads])
async def test_operations_of_one_site_that_wait_for_each_other_meet(session: Session, operation: Any) -> None:
    """There, the operations of a block at one site run in a row: the first would wait for ever."""
    name = unique()
    with Pipeline("meeting") as pipeline:
        Yield(operation(name), place="one")
        Yield(operation(name), place="two")
    assert [result.value for result in await run(session, pipeline)] == [True, True]


async def test_values_leave_a_site_while_its_other_operations_run(session: Session) -> None:
    """There, the results of a block, and what other sites wait for, leave when all of the block is done."""
    gate = unique()
    with Pipeline("early") as pipeline:
        Yield(w.gated(gate, "late", site="a"), place="late")
        value = w.echo("early", site="a")
        Yield(value, place="here")
        Yield(w.echo(value, site="b"), place="there")
    job = await session.execute(pipeline)
    assert (await job.first("here")).value == "early"
    assert (await job.first("there")).value == "early"
    assert job.status is JobStatus.RUNNING
    await run(session, opening(gate, "a"))
    assert (await job.first("late")).value == "late"


async def test_a_value_that_cannot_be_sent_is_one_error_of_its_node(session: Session) -> None:
    """It is an ordinary error, however many places and sites would have got the value."""
    with Pipeline("many uses") as pipeline:
        value = w.make()
        Yield(value, place="one")
        Yield(value, place="two")
        Yield(w.echo(value, site="b"), place="three")
        Yield(w.echo(value, site="c"), place="four")
    job = await session.execute(pipeline)
    failures = [item async for item in job.events() if isinstance(item, Failure)]
    assert sorted(failure.place for failure in failures if failure.place) == ["four", "one", "three", "two"]
    assert len([failure for failure in failures if failure.place is None]) == 1


# errors


async def test_errors_that_meet_keep_their_types_and_tracebacks(session: Session) -> None:
    """There, where two errors come together they become one, of another type and without a traceback."""
    pipeline = yielding(lambda: w.echo([w.misfit(7), w.no_such_thing("x")], site="c"))
    job = await session.execute(pipeline)
    items = [item async for item in job.events()]
    with pytest.raises(JobFailed) as caught:
        await job
    errors = {error.operation: error for error in caught.value.errors if isinstance(error, OperationFailed)}
    assert caught.value.count == len(errors) == 2
    first, second = errors["misfit"], errors["no_such_thing"]
    assert isinstance(first.__cause__, w.Misfit)
    assert first.__cause__.number == 7
    assert "in _deep" in first.remote_traceback
    assert isinstance(second.__cause__, LookupError)
    assert "in no_such_thing" in second.remote_traceback
    (lost,) = [item.error for item in items if isinstance(item, Failure) and item.place == "yield"]
    assert lost in (first, second)


# jobs


async def cancelled_and_next(session: Session, gate: str) -> tuple[Job, Job]:
    """A job that is cancelled while it sends as fast as it can, and one that is executed at the same time."""
    floods = pipeline_of(w.flood)
    pipeline = yielding(lambda: w.gated(gate, "own", site="a"))
    ping = pipeline_of(w.pid)
    cancelled = await session.execute(floods)
    await cancelled.first()
    cancelling = asyncio.create_task(cancelled.cancel())
    job = await session.execute(pipeline)
    assert (await cancelling)["a"].startswith("stopped")
    await run(session, ping)  # what the worker had sent before has arrived now
    return cancelled, job


async def test_a_cancelled_job_neither_ends_the_next_one_nor_gives_it_results(connect: Connect) -> None:
    """There, the next job takes the marker of the cancelled one's end, and unread results, for its own."""
    async with connect(w.fed, options=LocalOptions(lanes=1)) as session:
        for _ in range(10):
            gate = unique()
            cancelled, job = await cancelled_and_next(session, gate)
            assert (cancelled.status, job.status) == (JobStatus.ABORTED, JobStatus.RUNNING)
            await run(session, opening(gate, "a"))
            assert [result.value for result in await job.collect()] == ["own"]
            assert (cancelled.status, await job) == (JobStatus.ABORTED, JobStatus.FINISHED)


async def test_a_pipeline_for_another_major_version_is_refused_by_execute(session: Session) -> None:
    """There, ``execute`` never returns."""
    for version, fits in (("1.9", False), ("3.0.0", False), ("2.0", True), ("2.9.9", True)):
        with Pipeline("versions", api_version=version) as pipeline:
            Yield(w.echo(version, site="a"))
        if fits:
            assert [result.value for result in await run(session, pipeline)] == [version]
        else:
            with pytest.raises(PipelineError, match=re.escape(version)):
                await session.execute(pipeline)


# plans


@pytest.mark.parametrize(
    "text",
    [
        "\"); import os; os.environ['HARMED'] = '1'; (\"",
        "'); __import__('os').environ.update(HARMED='1'); ('",
        "\"\"\"\nimport os\nos.environ['HARMED'] = '1'\n'''",
        "{__import__('os').environ} %s \\N{BULLET} \\",
        "line\nbreak\r\ttab \x00 \u2028 \U0001f600",
        "a.b[0] -> c",
    ],
)
async def test_strings_of_a_pipeline_are_data(session: Session, text: str) -> None:
    """There, sites run generated code, into which names and literals are written as they are."""
    with Pipeline(text) as pipeline:
        value = w.echo({text: [text, PlaceParam(text)]}, site="a")
        Yield(value, place=text + "0")
        Yield(w.echo(value[text], site="b"), place=text + "1")
        with TryFromCache(key=text, site="a") as cached:
            cached.store(w.echo(text, site="a"))
        with If(cached == text):
            Yield(cached, place=text + "2")
        Yield(w.harmed(site="a"), place="a")
        Yield(w.harmed(site="b"), place="b")
    again = Pipeline.model_validate_json(pipeline.model_dump_json())
    plan = await session.prepare(again)
    job = await session.execute(type(plan).from_json(plan.to_json()), {text: text}, job_id=text)
    found = {result.place: result.value for result in await job.collect()}
    assert found == {
        text + "0": {text: [text, text]},
        text + "1": [text, text],
        text + "2": text,
        "a": False,
        "b": False,
    }
    assert "HARMED" not in os.environ


def test_the_library_runs_no_text_as_code() -> None:
    """There, a plan becomes source code that each site executes."""
    files = list(Path(dfm_async.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("exec", "eval", "compile"), f"{file}:{node.lineno}"
