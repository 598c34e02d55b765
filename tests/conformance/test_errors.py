from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dfm_async import (
    DfmError,
    EncodingError,
    Failure,
    Federation,
    ForEach,
    If,
    JobAborted,
    JobFailed,
    JobStatus,
    OperationFailed,
    ParameterError,
    Pipeline,
    PipelineError,
    PlaceParam,
    Result,
    RetryPolicy,
    Session,
    SessionClosed,
    Yield,
    collect,
)
from tests.conformance import weather as w
from tests.conftest import Connect, TargetName


async def test_an_error_names_site_node_frame_and_carries_the_remote_traceback(
    connect: Connect, target: TargetName
) -> None:
    with Pipeline("fails") as pipeline:
        Yield(w.fail("so it goes"))
    async with connect(w.fed) as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobFailed) as caught:
            await job
    (error,) = caught.value.errors
    assert isinstance(error, OperationFailed)
    assert (error.site, error.operation, error.node, error.frame) == ("lab", "fail", "fail#0", (0,))
    assert (error.attempt, error.type_name, error.message) == (1, "ValueError", "so it goes")
    assert "in fail" in error.remote_traceback
    # Of an error of another organisation nothing is unpickled: its text must do.
    assert isinstance(error.__cause__, ValueError) or target == "flare"
    assert caught.value.__cause__ is error
    assert job.status is JobStatus.FAILED


async def test_good_results_come_before_the_error_is_raised(connect: Connect) -> None:
    with Pipeline("mixed") as pipeline, ForEach(["mon", "tue", "wed"]) as day:
        Yield(w.fail_for(day, "tue"))
    async with connect(w.fed) as session:
        job = await session.execute(pipeline)
        values = []
        with pytest.raises(JobFailed):
            async for result in job:
                values.append(result.value)
    assert sorted(values) == ["mon", "wed"]


async def test_several_errors_form_a_group(connect: Connect) -> None:
    with Pipeline("two") as pipeline:
        Yield(w.fail("one"), place="a")
        Yield(w.fail("two"), place="b")
    async with connect(w.fed) as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobFailed) as caught:
            await job
    group = caught.value.__cause__
    assert isinstance(group, ExceptionGroup)
    assert {error.message for error in group.exceptions if isinstance(error, OperationFailed)} == {"one", "two"}


async def test_what_needs_a_failed_value_is_reported_because_of_it_and_the_rest_goes_on(connect: Connect) -> None:
    with Pipeline("because") as pipeline:
        bad = w.fail_for(PlaceParam("day", multiuse=True), "tue")
        Yield(w.echo(bad, site="desk"), place="needs")
        Yield(w.echo(PlaceParam("day", multiuse=True), site="archive"), place="free")
        with If(bad == "mon"):
            Yield(1, place="branch")
        with ForEach([1, 2]):
            inner = w.echo(bad, site="archive")
        Yield(collect(inner), place="loop")
    async with connect(w.fed) as session:
        job = await session.execute(pipeline, [{"day": "mon"}, {"day": "tue"}])
        items: list[Any] = [item async for item in job.results(errors="yield")]
    good = sorted((item.frame, item.place) for item in items if isinstance(item, Result))
    lost = sorted((item.frame, item.place) for item in items if isinstance(item, Failure) and item.place)
    roots = {id(item.error) for item in items if isinstance(item, Failure)}
    assert good == [((0,), "branch"), ((0,), "free"), ((0,), "loop"), ((0,), "needs"), ((1,), "free")]
    assert lost == [((1,), "branch"), ((1,), "loop"), ((1,), "needs")]
    assert len(roots) == 1


async def test_on_error_stop_ends_the_job_at_once(connect: Connect) -> None:
    with Pipeline("stop") as pipeline:
        Yield(w.wait_for_ever(), place="never")
        Yield(w.fail("now"), place="fails")
    async with connect(w.fed) as session:
        job = await session.execute(pipeline, on_error="stop")
        async with asyncio.timeout(10):
            with pytest.raises(JobFailed, match="now"):
                await job
        assert job.status is JobStatus.FAILED


async def test_a_missing_field_is_an_error_of_the_statement(connect: Connect) -> None:
    with Pipeline("field") as pipeline:
        Yield(w.highest(w.load("mon", site="lab"), site="lab")["fahrenheit"])
    async with connect(w.fed) as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobFailed, match="KeyError"):
            await job


async def test_retries_until_it_works_and_then_not(connect: Connect) -> None:
    with Pipeline("flaky") as pipeline:
        Yield(w.flaky(PlaceParam("good")))
    async with connect(w.fed) as session:
        assert (await (await session.execute(pipeline, {"good": 3})).first()).value == 3
        with pytest.raises(JobFailed) as caught:
            await (await session.execute(pipeline, {"good": 4}))
    assert caught.value.errors[0].attempt == 3  # type: ignore[attr-defined]


async def test_a_retry_policy_in_the_pipeline_is_only_for_the_exceptions_it_names(connect: Connect) -> None:
    with Pipeline("named") as pipeline:
        Yield(w.fail("x", retry=RetryPolicy(attempts=5, backoff=0, on=("LookupError",))), place="a")
        Yield(w.fail("y", retry=RetryPolicy(attempts=2, backoff=0, on=("ValueError",))), place="b")
    async with connect(w.fed) as session:
        with pytest.raises(JobFailed) as caught:
            await (await session.execute(pipeline))
    attempts = {error.message: error.attempt for error in caught.value.errors if isinstance(error, OperationFailed)}
    assert attempts == {"x": 1, "y": 2}


async def test_a_deadline_of_an_operation_says_what_was_waited_for(connect: Connect) -> None:
    with Pipeline("late") as pipeline:
        Yield(w.late(), place="a")
        Yield(w.wait_for_ever(deadline=0.05), place="b")
        Yield(w.block(0.5, deadline=0.05), place="c")
    async with connect(w.fed) as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobFailed) as caught:
            await job
    assert sorted(e.message for e in caught.value.errors if isinstance(e, OperationFailed)) == [
        "the deadline of 0.05 s for 'block' is over",
        "the deadline of 0.05 s for 'late' is over",
        "the deadline of 0.05 s for 'wait_for_ever' is over",
    ]


async def test_a_deadline_of_a_job_aborts_it(connect: Connect) -> None:
    with Pipeline("job deadline") as pipeline:
        Yield(w.wait_for_ever())
    async with connect(w.fed) as session:
        job = await session.execute(pipeline, deadline=0.1)
        with pytest.raises(JobAborted, match=r"deadline of 0\.1 s"):
            await job
        assert job.status is JobStatus.ABORTED


def _misbehaving() -> tuple[Federation, dict[str, Callable[..., Any]]]:
    fed = Federation("misbehaving")
    site, other = fed.site("lab"), fed.site("desk")

    @site.operation
    def unsendable() -> dict[str, Any]:
        return {"a": [1, threading.Lock()]}

    @site.operation
    def leave() -> None:
        raise SystemExit(3)

    @site.operation
    async def leave_async() -> None:
        raise SystemExit(3)

    @site.operation
    def interrupt() -> None:
        raise KeyboardInterrupt

    @site.operation
    async def cancel_itself() -> None:
        raise asyncio.CancelledError

    @site.operation
    def recurse() -> None:
        recurse.code()

    @site.operation
    def strange() -> None:
        class Strange(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise Strange

    @site.operation
    def wrong_value() -> int:
        return object()  # type: ignore[return-value]

    @other.operation
    def take(value: Any) -> Any:
        return value

    names = [unsendable, leave, leave_async, interrupt, cancel_itself, recurse, strange, wrong_value, take]
    return fed, {operation.name: operation for operation in names}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unsendable", "dfm_async.errors.EncodingError"),
        ("leave", "SystemExit"),
        ("leave_async", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("cancel_itself", "asyncio.exceptions.CancelledError"),
        ("recurse", "RecursionError"),
        ("strange", "Strange"),
    ],
)
async def test_an_operation_that_misbehaves_fails_and_the_site_goes_on(
    connect: Connect, target: TargetName, name: str, expected: str
) -> None:
    fed, operations = _misbehaving()
    with Pipeline("bad") as bad:
        Yield(operations["take"](operations[name]()))
    with Pipeline("good") as good:
        Yield(operations["take"](1))
    async with connect(fed) as session:
        job = await session.execute(bad)
        with pytest.raises(JobFailed) as caught:
            await job
        error = caught.value.errors[0]
        assert isinstance(error, OperationFailed)
        assert error.type_name.endswith(expected.rpartition(".")[2])
        assert error.node == f"{name}#0"
        if name == "unsendable":
            assert "value['a'][1]" in error.message
            assert isinstance(error.__cause__, EncodingError) or target == "flare"
        assert (await (await session.execute(good)).first()).value == 1


async def test_a_value_that_cannot_be_sent_is_no_trouble_where_it_stays(connect: Connect) -> None:
    fed = Federation("stays")
    site = fed.site("lab")

    @site.operation
    def make() -> Any:
        return threading.Lock()

    @site.operation
    def use(lock: Any) -> bool:
        return bool(lock.acquire(blocking=False))

    with Pipeline("by reference") as pipeline:
        Yield(use(make()))
    async with connect(fed) as session:
        assert (await (await session.execute(pipeline)).first()).value is True


async def test_wrong_parameters_are_refused_before_anything_runs(connect: Connect) -> None:
    with Pipeline("params") as pipeline:
        Yield(w.load(PlaceParam("day"), site="lab"))
    async with connect(w.fed) as session:
        for params, message in [
            ({}, "missing parameter 'day'"),
            ({"day": "mon", "x": 1}, "unknown parameter 'x'"),
            ({"day": 3}, "parameter 'day': Input should be a valid string"),
            ([{"day": "mon"}, {}], "set 1: missing"),
            ([3], "a parameter set is a dict"),
            ("mon", "a dict is one parameter set.*, not a value of type str$"),
            (({"day": day} for day in ["mon"]), r"a list several.*, not a value of type generator: write list\(...\)$"),
        ]:
            with pytest.raises(ParameterError, match=message):
                await session.execute(pipeline, params)  # type: ignore[arg-type]
        with Pipeline("any") as anything:
            Yield(w.echo(PlaceParam("v"), site="lab"))
        with pytest.raises(ParameterError, match="cannot be sent"):
            await session.execute(anything, {"v": threading.Lock()})
        assert session.jobs() == []


async def test_what_cannot_be_executed_is_refused_with_a_hint(connect: Connect) -> None:
    with Pipeline("params") as pipeline:
        Yield(w.load(PlaceParam("day"), site="lab"))
    hint = r"not the operation 'load'.*with Pipeline\(\) as pipeline: Yield\(load\(PlaceParam\('day'\)\)\)"
    async with connect(w.fed) as session:
        with pytest.raises(TypeError, match=hint):
            await session.execute(w.load)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected a Pipeline or a Plan, not 'load'"):
            await session.execute("load")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="write 'async with Session"):
            session.__enter__()
        for policy in (RetryPolicy(), RetryPolicy(attempts=5), RetryPolicy(on=(OSError,), on_worker_lost=1)):
            with pytest.raises(ValueError, match=r"only about lost workers.*@site\.operation\(retry=...\)"):
                await session.execute(pipeline, {"day": "mon"}, retry=policy)
        assert session.jobs() == []
        job = await session.execute(pipeline, {"day": "mon"}, retry=RetryPolicy(attempts=1))
        assert await job is JobStatus.FINISHED


async def test_an_empty_parameter_list_is_a_job_without_frames(connect: Connect) -> None:
    with Pipeline("none") as pipeline:
        Yield(w.load(PlaceParam("day"), site="lab"))
    async with connect(w.fed) as session:
        job = await session.execute(pipeline, [])
        assert await job is JobStatus.FINISHED
        assert await job.collect() == []


async def test_bad_pipelines_are_refused_with_all_their_problems(connect: Connect) -> None:
    with Pipeline("bad") as pipeline:
        Yield(w.load("mon", site="moon"))
        Yield(w.load(3, site="lab"))
    async with connect(w.fed) as session:
        with pytest.raises(PipelineError) as caught:
            await session.execute(pipeline)
        assert len(caught.value.problems) == 3
        with pytest.raises(PipelineError, match="no statements"):
            await session.prepare(Pipeline("empty"))


async def test_a_session_that_is_not_connected_or_closed_says_so(connect: Connect) -> None:
    session = Session(w.fed, target="inline")
    with Pipeline("p") as pipeline:
        Yield(1)
    with pytest.raises(SessionClosed, match="not connected"):
        await session.execute(pipeline)
    await session.connect()
    await session.close()
    with pytest.raises(SessionClosed, match="was closed"):
        await session.execute(pipeline)
    with pytest.raises(DfmError):
        await session.connect()
