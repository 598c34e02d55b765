"""Faults that were found once. Each of these hung, lost something, or took others down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    If,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationFailed,
    Pipeline,
    PipelineError,
    Repeat,
    ResultLimits,
    Session,
    TryFromCache,
    Yield,
)
from dfm_async.errors import ResultsExpired
from dfm_async.targets.inline import InlineTarget
from tests.conformance.conftest import NewSession
from tests.conftest import TargetName
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import all_values

fed = Federation("regressions")
a = fed.site("archive")
b = fed.site("lab")
home = fed.site("home")


@a.operation
async def agen(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


@a.operation
def sgen() -> Iterator[int]:
    i = 0
    while True:
        yield i
        i += 1


@a.operation
async def one_then_wait() -> AsyncIterator[int]:
    yield 1
    await asyncio.get_running_loop().create_future()


@a.operation
async def slow(x: Any) -> Any:
    for _ in range(20):
        await asyncio.sleep(0.005)
    return x


@a.operation
async def first(values: Any) -> Any:
    return await anext(aiter(values))


@b.operation
async def first_at_b(values: Any) -> Any:
    return await anext(aiter(values))


@b.operation
def total_at_b(values: Any) -> int:
    return sum(values)


@a.operation
def total_at_a(values: Any) -> int:
    return sum(values)


@a.operation
async def trouble_at_the_end() -> AsyncIterator[int]:
    try:
        for i in range(9):
            yield i
    finally:
        raise RuntimeError("clean-up")


@b.operation
async def nothing() -> list[int]:
    return []


@b.operation
async def everything(values: Any, element: Any) -> list[Any]:
    return [value async for value in values]


@a.operation
async def both(x: Any, y: Any) -> list[list[int]]:
    return [[i async for i in x], [i async for i in y]]


@b.operation
async def both_at_once(x: Any, y: Any) -> list[Any]:
    async def read(values: Any) -> list[int]:
        return [value async for value in values]

    return list(await asyncio.gather(read(x), read(y)))


@b.operation
def lists(x: list[int], y: list[int]) -> list[list[int]]:
    return [x, y]


@b.operation
def list_and_stream(a: list[int], b: Iterator[int]) -> list[list[int]]:
    return [a, list(b)]


@a.operation
async def echo(x: Any) -> Any:
    return x


b.operation(echo)


@a.operation
async def surrogates(where: str) -> Any:
    if where == "raise":
        raise ValueError("x\ud800y")
    return {"value": "\ud800", "key": {"\ud800": 1}, "list": ["a", "\udcff"] * 9}[where]


@a.operation
async def pid() -> int:
    return os.getpid()


def _exit(*_: Any) -> None:
    raise SystemExit("from a pickle")


class Evil(Exception):
    def __reduce__(self) -> Any:
        return (_exit, ())


@a.operation
async def evil() -> None:
    raise Evil("q")


@home.operation
async def stubborn() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return_later.append(1)
            if len(return_later) > 3:
                raise


return_later: list[int] = []


async def alive(session: Session) -> None:
    assert await all_values(session, yielding(lambda: echo(echo("yes", site="archive"), site="lab"))) == ["yes"]


async def test_generator_that_raises_on_close_fails_no_other_call(session: Session) -> None:
    assert await all_values(session, yielding(lambda: first(trouble_at_the_end()))) == [0]
    await alive(session)


async def test_a_remote_reader_may_stop_while_the_next_element_is_awaited(session: Session) -> None:
    with Pipeline("p") as pipeline:
        Yield(first_at_b(one_then_wait()))
        Yield(slow(1), place="other")
    assert sorted(await all_values(session, pipeline)) == [1, 1]
    await alive(session)


@pytest.mark.parametrize("reader", [total_at_a, total_at_b])
async def test_cancelling_a_thread_that_reads_a_stream_stops_it(session: Session, reader: Any) -> None:
    with Pipeline("p") as pipeline:
        Yield(one_then_wait(), place="ready")
        Yield(reader(one_then_wait()))
    job = await session.execute(pipeline)
    await job.first("ready")
    async with asyncio.timeout(30):
        assert set((await job.cancel(grace=60)).values()) <= {"stopped", "stopped after grace"}
    await alive(session)


@pytest.mark.parametrize("where", ["value", "key", "list"])
async def test_strings_that_utf8_cannot_hold_arrive_as_they_were(session: Session, where: str) -> None:
    assert await all_values(session, yielding(lambda: echo(surrogates(where), site="lab"))) == [await surrogates(where)]


async def test_error_text_with_surrogates_arrives(session: Session) -> None:
    pipeline = yielding(lambda: surrogates("raise"))
    with pytest.raises(JobFailed) as caught:
        await all_values(session, pipeline)
    assert isinstance(caught.value.errors[0], OperationFailed)
    assert caught.value.errors[0].message == "x\\ud800y"
    await alive(session)


async def test_a_stream_whose_only_reader_is_a_loop_over_nothing_is_released(session: Session) -> None:
    with Pipeline("p") as pipeline:
        stream = agen(slow(1))
        late = slow(2)
        with ForEach(nothing()) as element:
            Yield(everything(stream, element))
            Yield(echo([late, element], site="lab"), place="plain")
    assert await all_values(session, pipeline) == []
    await alive(session)


async def test_stream_with_a_reader_in_a_skipped_branch_is_released(session: Session) -> None:
    with Pipeline("p") as pipeline:
        stream = agen(slow(1))
        with If(echo(1, site="lab") == 2), ForEach([1, 2]) as element:
            Yield(everything(stream, element))
    assert await all_values(session, pipeline) == []


@pytest.mark.parametrize("reader", [both, both_at_once, lists, list_and_stream])
async def test_one_stream_twice_in_one_call_is_read_twice(session: Session, reader: Any) -> None:
    with Pipeline("p") as pipeline:
        stream = agen(4)
        Yield(reader(stream, stream))
    assert await all_values(session, pipeline) == [[[0, 1, 2, 3], [0, 1, 2, 3]]]


async def test_ended_readers_do_not_block_a_stream(session: Session) -> None:
    with Pipeline("p") as pipeline:
        stream = agen(120_000)
        Yield(stream)
        Yield(first(stream), place="head")
        Yield(echo(1, site="lab", after=stream), place="after")
    assert len(await all_values(session, pipeline)) == 120_002


async def test_a_stream_in_a_condition_is_refused(session: Session) -> None:
    with Pipeline("p") as pipeline, If(agen(3) == 3):
        Yield(1)
    with pytest.raises(JobFailed, match="a stream cannot be compared"):
        await all_values(session, pipeline)


async def test_streams_that_only_another_site_reads_end_with_their_frame(session: Session, target: TargetName) -> None:
    pipeline = yielding(lambda: first_at_b(sgen()))
    job = await session.execute(pipeline, [{}] * 40, autostop=False)
    results = job.results()
    assert [(await anext(results)).value for _ in range(40)] == [0] * 40
    if target == "inline":
        sites = cast("InlineTarget", session._target)._hosts
        (at_a,), (at_b,) = (sites[name].runtime._jobs.values() for name in ("archive", "lab"))
        here, there = at_a.streams, at_b.streams
        while here.live or here.closing or here.exports or there.imports:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    await job.cancel()


async def test_nested_cache_blocks_with_the_same_key_do_not_wait_for_each_other(session: Session) -> None:
    key = os.urandom(8).hex()
    with Pipeline("p") as pipeline:
        with TryFromCache(key) as outer:
            with TryFromCache(key) as inner:
                inner.store(slow(1))
            outer.store(inner)
        Yield(outer)
    assert await all_values(session, pipeline) == [1]


async def test_cache_blocks_with_crossed_keys_do_not_deadlock(session: Session) -> None:
    salt = os.urandom(8).hex()
    with Pipeline("p") as pipeline, ForEach([["x", "y"], ["y", "x"]]) as keys:
        with TryFromCache([salt, keys[0]]) as one:
            one.store(slow(keys[0]))
        with TryFromCache([salt, keys[1]]) as two:
            two.store(echo([one], site="archive"))
        Yield(two)
    assert len(await all_values(session, pipeline)) == 2


async def test_an_exception_whose_pickle_is_poisoned_is_only_text(session: Session) -> None:
    pipeline = pipeline_of(evil)
    with pytest.raises(JobFailed, match="Evil"):
        await all_values(session, pipeline)
    await alive(session)


async def test_reattaching_a_callback_to_expired_results_raises(session: Session) -> None:
    pipeline = yielding(lambda: agen(50))
    job = await session.execute(pipeline, options=ResultLimits(max_items=10, window=4))
    await job.collect()
    with pytest.raises(ResultsExpired):
        await session.reattach(job.job_id, default_callback=lambda *_: None)
    await alive(session)


async def test_parameter_stream_that_raises_on_close_fails_no_other_job(session: Session) -> None:
    async def params() -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {}
                await asyncio.sleep(0.001)
        finally:
            raise RuntimeError("clean-up")

    pipeline = yielding(lambda: echo(1, site="archive"))
    job = await session.execute(pipeline, params())
    await job.first()
    await job.cancel()
    await alive(session)


async def test_a_callback_that_is_cancelled_inside_is_a_callback_error(session: Session) -> None:
    async def callback(*_: Any) -> None:
        task = asyncio.create_task(asyncio.sleep(1))
        task.cancel()
        await task

    pipeline = yielding(lambda: agen(3))
    job = await session.execute(pipeline, default_callback=callback)
    assert await job is JobStatus.FINISHED
    assert [type(error) for error in job.callback_errors] == [asyncio.CancelledError] * 3


async def test_a_job_without_yields_needs_no_reader(session: Session) -> None:
    with Pipeline("p") as pipeline:
        echo(1, site="archive")
    job = await session.execute(pipeline, [{}] * 2000, options=ResultLimits(max_items=20))
    assert await job is JobStatus.FINISHED
    assert job._known().log.held <= 22
    assert await job.collect() == []


async def test_failures_are_bounded_by_the_log_too(session: Session) -> None:
    pipeline = yielding(lambda: surrogates("raise"))
    job = await session.execute(pipeline, [{}] * 1500, options=ResultLimits(max_items=100))
    reader = job.events()
    first = await anext(reader)
    while not job._known().log.full:
        await job._known().log.changed.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert job._known().log.held < 100 + 3 * 300
    events = [first, *[event async for event in reader]]
    assert sum(isinstance(event, Failure) for event in events) == 3000


async def test_full_log_fails_the_job_with_overflow_fail(session: Session) -> None:
    pipeline = pipeline_of(sgen)
    job = await session.execute(pipeline, options=ResultLimits(max_items=50, window=8, overflow="fail"))
    with pytest.raises(JobFailed, match="nobody has read"):
        await job


async def test_a_long_repeat_without_operations_does_not_block_the_loop(session: Session) -> None:
    with Pipeline("p") as pipeline:
        with Repeat(1, times=20_000) as current:
            current.next(current)
        Yield(current)
    turns = 0
    job = await session.execute(pipeline)
    while not job.completed.is_set():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 3
    assert (await job.first()).value == 1


async def test_closing_does_not_wait_for_a_task_that_ignores_its_cancellation(
    new_session: NewSession, target: TargetName, caplog: pytest.LogCaptureFixture
) -> None:
    return_later.clear()
    with Pipeline("p") as pipeline:
        Yield("up", place="up")
        Yield(stubborn())
    session = new_session(fed, options=LocalOptions(shutdown_grace=0.2))
    await session.connect()
    job = await session.execute(pipeline)
    await job.first("up")
    await session.close()
    # The workers of a federation on FLARE do not end with the session.
    assert "ignores its cancellation" in caplog.text or target == "flare"
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)


async def test_a_literal_that_cannot_be_rebuilt_fails_the_job_only(session: Session, target: TargetName) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return (int, ("no number",))

    pipeline = yielding(lambda: echo(Odd(), site="lab"))
    with pytest.raises(PipelineError if target == "flare" else JobFailed):
        await all_values(session, pipeline)
    await alive(session)
