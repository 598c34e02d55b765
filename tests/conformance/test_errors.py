from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dfm_async import (
    DfmError,
    Failure,
    FailureInfo,
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
    Repeat,
    Reply,
    Result,
    RetryPolicy,
    Session,
    SessionClosed,
    Yield,
    collect,
    gather,
)
from dfm_async.errors import EncodingError
from dfm_async.events import FailureHandled, Replies
from tests.conformance import weather as w
from tests.conftest import Connect, TargetName
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import first_value

fed = w.fed


async def test_an_error_names_site_node_frame_and_carries_the_remote_traceback(
    session: Session, target: TargetName
) -> None:
    pipeline = yielding(lambda: w.fail("so it goes"))
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


async def test_good_results_come_before_the_error_is_raised(session: Session) -> None:
    with Pipeline("mixed") as pipeline, ForEach(["mon", "tue", "wed"]) as day:
        Yield(w.fail_for(day, "tue"))
    job = await session.execute(pipeline)
    values = []
    with pytest.raises(JobFailed):
        async for result in job:
            values.append(result.value)
    assert sorted(values) == ["mon", "wed"]


async def test_several_errors_form_a_group(session: Session) -> None:
    with Pipeline("two") as pipeline:
        Yield(w.fail("one"), place="a")
        Yield(w.fail("two"), place="b")
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed) as caught:
        await job
    group = caught.value.__cause__
    assert isinstance(group, ExceptionGroup)
    assert {error.message for error in group.exceptions if isinstance(error, OperationFailed)} == {"one", "two"}


async def test_dependants_of_a_failure_fail_and_the_rest_goes_on(session: Session) -> None:
    with Pipeline("because") as pipeline:
        bad = w.fail_for(PlaceParam("day", multiuse=True), "tue")
        Yield(w.echo(bad, site="desk"), place="needs")
        Yield(w.echo(PlaceParam("day", multiuse=True), site="archive"), place="free")
        with If(bad == "mon"):
            Yield(1, place="branch")
        with ForEach([1, 2]):
            inner = w.echo(bad, site="archive")
        Yield(collect(inner), place="loop")
    job = await session.execute(pipeline, [{"day": "mon"}, {"day": "tue"}])
    items: list[Any] = [item async for item in job.events()]
    good = sorted((item.frame, item.place) for item in items if isinstance(item, Result))
    lost = sorted((item.frame, item.place) for item in items if isinstance(item, Failure) and item.place)
    roots = {id(item.error) for item in items if isinstance(item, Failure)}
    assert good == [((0,), "branch"), ((0,), "free"), ((0,), "loop"), ((0,), "needs"), ((1,), "free")]
    assert lost == [((1,), "branch"), ((1,), "loop"), ((1,), "needs")]
    assert len(roots) == 1


async def test_failures_are_items_once_for_each_failed_call(session: Session) -> None:
    """With a place, they are items once for each of its results that does not come."""
    with Pipeline("once") as pipeline:
        bad = w.fail_for(PlaceParam("day"), "tue")
        Yield(w.echo(bad, site="desk"), place="near")
        Yield(w.echo(bad, site="archive"), place="far")
    job = await session.execute(pipeline, [{"day": "mon"}, {"day": "tue"}, {"day": "tue"}])
    found = [item async for item in job.results(errors="yield", ordered=True) if isinstance(item, Failure)]
    assert [(failure.frame, failure.place) for failure in found] == [((1,), None), ((2,), None)]
    assert found == sorted(
        (item for item in await job.collect(errors="yield") if isinstance(item, Failure)), key=lambda item: item.frame
    )
    missing = [item.place for item in await job.collect("far", errors="yield") if isinstance(item, Failure)]
    assert missing == ["far", "far"]
    assert [result.frame for result in await job.collect("near", errors="skip")] == [(0,)]
    assert len([event async for event in job.events() if isinstance(event, Failure)]) == 6


async def test_on_error_stop_ends_the_job_at_once(session: Session) -> None:
    with Pipeline("stop") as pipeline:
        Yield(w.wait_for_ever(), place="never")
        Yield(w.fail("now"), place="fails")
    job = await session.execute(pipeline, on_error="stop")
    with pytest.raises(JobFailed, match="now"):
        await job
    assert job.status is JobStatus.FAILED


async def test_a_missing_field_is_an_error_of_the_statement(session: Session) -> None:
    pipeline = yielding(lambda: w.highest(w.load("mon", site="lab"), site="lab")["fahrenheit"])
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed, match="KeyError"):
        await job


async def test_retries_until_it_works_and_then_not(session: Session) -> None:
    pipeline = pipeline_of(w.flaky, "good")
    assert await first_value(session, pipeline, {"good": 3}) == 3
    with pytest.raises(JobFailed) as caught:
        await (await session.execute(pipeline, {"good": 4}))
    assert caught.value.errors[0].attempt == 3


async def test_retry_policy_applies_only_to_its_exceptions(session: Session) -> None:
    with Pipeline("named") as pipeline:
        Yield(w.fail("x", retry=RetryPolicy(attempts=5, backoff=0, on=("LookupError",))), place="a")
        Yield(w.fail("y", retry=RetryPolicy(attempts=2, backoff=0, on=("ValueError",))), place="b")
    with pytest.raises(JobFailed) as caught:
        await (await session.execute(pipeline))
    attempts = {error.message: error.attempt for error in caught.value.errors if isinstance(error, OperationFailed)}
    assert attempts == {"x": 1, "y": 2}


async def test_policy_of_a_job_applies_to_calls_without_their_own(session: Session) -> None:
    with Pipeline("default") as pipeline:
        Yield(w.fail("x"), place="a")
        Yield(w.fail("y", retry=RetryPolicy(attempts=1)), place="b")
        Yield(w.flaky(9), place="c")
    with pytest.raises(JobFailed) as caught:
        await (await session.execute(pipeline, retry=RetryPolicy(attempts=2, backoff=0)))
    attempts = {error.node: error.attempt for error in caught.value.errors if isinstance(error, OperationFailed)}
    assert attempts == {"fail#0": 2, "fail#2": 1, "flaky#4": 3}


async def test_deadline_of_an_operation_names_the_operation(session: Session) -> None:
    with Pipeline("late") as pipeline:
        Yield(w.late(), place="a")
        Yield(w.wait_for_ever(deadline=0.05), place="b")
        Yield(w.block(0.5, deadline=0.05), place="c")
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed) as caught:
        await job
    assert sorted(e.message for e in caught.value.errors if isinstance(e, OperationFailed)) == [
        "the deadline of 0.05 s for 'block' was exceeded",
        "the deadline of 0.05 s for 'late' was exceeded",
        "the deadline of 0.05 s for 'wait_for_ever' was exceeded",
    ]


async def test_a_deadline_of_a_job_aborts_it(session: Session) -> None:
    pipeline = pipeline_of(w.wait_for_ever)
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
    bad = yielding(lambda: operations["take"](operations[name]()))
    good = yielding(lambda: operations["take"](1))
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
        assert await first_value(session, good) == 1


async def test_unsendable_value_can_be_used_at_its_own_site(connect: Connect) -> None:
    fed = Federation("stays")
    site = fed.site("lab")

    @site.operation
    def make() -> Any:
        return threading.Lock()

    @site.operation
    def use(lock: Any) -> bool:
        return bool(lock.acquire(blocking=False))

    pipeline = yielding(lambda: use(make()))
    async with connect(fed) as session:
        assert await first_value(session, pipeline) is True


async def test_wrong_parameters_are_refused_before_anything_runs(session: Session) -> None:
    pipeline = pipeline_of(w.load, "day", site="lab")
    for params, message in [
        ({}, "missing parameter 'day'"),
        ({"day": "mon", "x": 1}, "unknown parameter 'x'"),
        ({"day": 3}, "parameter 'day': Input should be a valid string"),
        ([{"day": "mon"}, {}], "set 1: missing"),
        ([3], "a parameter set is a dict"),
        ("mon", "a dict is one parameter set.*, not a value of type str$"),
        (
            ({"day": day} for day in ["mon"]),
            r"a list contains.*, not a value of type generator: write list\(...\)$",
        ),
    ]:
        with pytest.raises(ParameterError, match=message):
            await session.execute(pipeline, params)  # type: ignore[arg-type]
    anything = pipeline_of(w.echo, "v", site="lab")
    with pytest.raises(ParameterError, match="cannot be sent"):
        await session.execute(anything, {"v": threading.Lock()})
    assert session.jobs() == []


async def test_invalid_pipeline_argument_is_refused_with_a_hint(session: Session) -> None:
    hint = r"not the operation 'load'.*with Pipeline\(\) as pipeline: Yield\(load\(PlaceParam\('day'\)\)\)"
    with pytest.raises(TypeError, match=hint):
        await session.execute(w.load)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a Pipeline or a Plan, not 'load'"):
        await session.execute("load")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="write 'async with Session"):
        session.__enter__()
    assert session.jobs() == []


async def test_an_empty_parameter_list_is_a_job_without_frames(session: Session) -> None:
    pipeline = pipeline_of(w.load, "day", site="lab")
    job = await session.execute(pipeline, [])
    assert await job is JobStatus.FINISHED
    assert await job.collect() == []


async def test_bad_pipelines_are_refused_with_all_their_problems(session: Session) -> None:
    with Pipeline("bad") as pipeline:
        Yield(w.load("mon", site="moon"))
        Yield(w.load(3, site="lab"))  # type: ignore[call-overload]
    with pytest.raises(PipelineError) as caught:
        await session.execute(pipeline)
    assert len(caught.value.problems) == 2
    with pytest.raises(PipelineError, match="no statements"):
        await session.prepare(Pipeline("empty"))


async def test_session_that_is_not_connected_raises(connect: Connect) -> None:
    session = Session(w.fed, target="inline")
    pipeline = yielding(lambda: 1)
    with pytest.raises(SessionClosed, match="not connected"):
        await session.execute(pipeline)
    await session.connect()
    await session.close()
    with pytest.raises(SessionClosed, match="was closed"):
        await session.execute(pipeline)
    with pytest.raises(DfmError):
        await session.connect()


async def test_a_fallback_replaces_a_call_that_failed_for_good(session: Session) -> None:
    with Pipeline("fallback") as pipeline:
        day = w.fail_for(PlaceParam("day"), "tue", fallback="none")
        Yield(w.echo([day], site="desk"))
    job = await session.execute(pipeline, [{"day": "mon"}, {"day": "tue"}])
    events = [event async for event in job.events()]
    assert await job is JobStatus.FINISHED
    assert {e.frame: e.value for e in events if isinstance(e, Result)} == {(0,): ["mon"], (1,): ["none"]}
    (handled,) = [event for event in events if isinstance(event, FailureHandled)]
    assert (handled.node, handled.frame, handled.type_name) == ("fail_for#0", (1,), "LookupError")
    assert "tue" in handled.message
    assert job.info().errors == 0


async def test_an_input_that_failed_is_no_failure_of_the_call_with_a_fallback(session: Session) -> None:
    pipeline = yielding(lambda: w.echo(w.fail_for("tue", "tue"), site="desk", fallback="none"))
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed):
        await job.collect()


async def test_failed_elements_are_left_out_or_kept_as_data(session: Session) -> None:
    with Pipeline("elements") as pipeline:
        with ForEach(["mon", "tue", "wed"]) as day:
            good = w.echo(w.fail_for(day, "tue"), site="archive")
        Yield(w.echo(collect(good, errors="skip"), site="desk"), place="good")
        Yield(w.echo(collect(good, errors="keep"), site="lab"), place="all")
        Yield(w.echo(collect(good, errors="keep")[1].site, site="desk"), place="site")
    job = await session.execute(pipeline)
    found = {result.place: result.value for result in await job.collect()}
    assert await job is JobStatus.FINISHED
    assert found["good"] == ["mon", "wed"]
    first, failed, last = found["all"]
    assert (first, last) == ("mon", "wed")
    assert isinstance(failed, FailureInfo)
    assert (failed.operation, failed.node, failed.frame) == ("fail_for", "fail_for#1", (0, 1))
    assert found["site"] == failed.site
    assert str(failed) == f"fail_for#1 at {failed.site}: LookupError: {failed.message}"


async def test_a_failure_that_is_also_used_elsewhere_fails_the_job(session: Session) -> None:
    with Pipeline("elsewhere") as pipeline:
        with ForEach(["mon", "tue"]) as day:
            good = w.fail_for(day, "tue")
            Yield(good, place="live")
        Yield(collect(good, errors="skip"), place="good")
    job = await session.execute(pipeline)
    results = [result async for result in job.results(errors="yield")]
    assert ["mon"] in [result.value for result in results if isinstance(result, Result)]
    with pytest.raises(JobFailed):
        await job


async def test_a_value_that_cannot_be_sent_is_handled_as_any_failure(connect: Connect, target: TargetName) -> None:
    fed = Federation("unsendable")
    here, there = fed.site("lab"), fed.site("archive")

    @here.operation
    def make(n: int) -> Any:
        return threading.Lock() if n else n

    @there.operation
    def take(value: Any) -> Any:
        return value

    with Pipeline("unsendable") as pipeline:
        with ForEach([0, 1]) as n:
            taken = take(make(n))
        Yield(collect(taken, errors="skip"))
    if target == "inline":  # nothing is sent there but results
        return
    async with connect(fed) as session:
        job = await session.execute(pipeline)
        assert [result.value for result in await job.collect()] == [[0]]
        assert await job is JobStatus.FINISHED


async def test_gather_goes_on_without_the_calls_that_fail(session: Session) -> None:
    with Pipeline("gather") as pipeline:
        with Repeat(0, times=2) as count:
            with ForEach(["mon", "tue"]) as day:
                calls = [w.fail_for(day, "tue"), w.echo(day, site="archive"), w.echo([day, count], site="desk")]
                replies = gather(calls, at_least=2)
                Yield(w.echo(replies, site="archive"), place="replies")
                Yield(replies.failures, place="failures")
                Yield(replies[0].site, place="first")
            sizes = w.echo(collect(replies[1].value), site="lab")
            Yield(sizes, place="second")
            count.next(1)
    job = await session.execute(pipeline)
    found: dict[tuple[str, Any], Any] = {(r.place, r.frame): r.value for r in await job.collect()}
    assert await job is JobStatus.FINISHED
    for number in (0, 1):
        good = [Reply("lab", "mon"), Reply("archive", "mon"), Reply("desk", ["mon", number])]
        assert found["replies", (0, number, 0)] == good
        assert found["replies", (0, number, 1)] == [Reply("archive", "tue"), Reply("desk", ["tue", number])]
        assert isinstance(found["replies", (0, number, 1)], Replies)
        assert found["failures", (0, number, 0)] == []
        (failure,) = found["failures", (0, number, 1)]
        assert (failure.site, failure.operation, failure.frame) == ("lab", "fail_for", (0, number, 1))
        assert (found["first", (0, number, 0)], found["first", (0, number, 1)]) == ("lab", "archive")
        assert found["second", (0, number)] == ["mon", ["tue", number]]


async def test_gather_fails_with_every_failure_if_too_few_calls_succeed(session: Session) -> None:
    with Pipeline("too few") as pipeline:
        calls = [w.fail_for("mon", "mon"), w.echo(1, site="archive"), w.fail("broken")]
        Yield(w.echo(gather(calls, at_least=2), site="desk"))
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed) as caught:
        await job
    (error,) = caught.value.errors
    assert (error.node, error.type_name) == ("gather#3", "dfm_async.errors.NotEnoughReplies")
    assert error.message == (
        "1 of 3 calls succeeded, 2 needed:\n"
        "  - fail_for#0 at lab: LookupError: no data for mon\n"
        "  - fail#2 at lab: ValueError: broken"
    )


async def test_calls_of_a_gather_that_take_too_long_are_failures(session: Session) -> None:
    with Pipeline("late") as pipeline:
        policy = RetryPolicy(attempts=1000, backoff=0.01)
        calls = [w.wait_for_ever(), w.block(2.0), w.fail("always", retry=policy), w.echo(1, site="archive")]
        replies = gather(calls, within=0.5)
        Yield([replies, replies.failures])
    async with asyncio.timeout(20):
        good, failures = (await (await session.execute(pipeline)).first()).value
    assert good == [Reply("archive", 1)]
    assert [(failure.operation, failure.type_name) for failure in failures] == [
        ("wait_for_ever", "TimeoutError"),
        ("block", "TimeoutError"),
        ("fail", "ValueError"),
    ]
