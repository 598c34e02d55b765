from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    JobFailed,
    JobStatus,
    Pipeline,
    PlaceParam,
    Result,
    ResultLimits,
    Session,
    Yield,
    collect,
)
from dfm_async.errors import ResultsUnread
from tests.conformance import weather as w
from tests.conftest import Connect, TargetName
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import first_value

fed = w.fed


@pytest.mark.parametrize("source", [w.count_up, w.count_slowly], ids=["sync", "async"])
@pytest.mark.parametrize("n", [0, 1, 3000])
async def test_a_yielded_generator_arrives_element_by_element_in_order(
    session: Session, source: object, n: int
) -> None:
    with Pipeline("stream") as pipeline:
        Yield(source(PlaceParam("n")))  # type: ignore[operator]
    job = await session.execute(pipeline, {"n": n})
    found = [(result.frame, result.value) async for result in job]
    assert found == [((0, i), i) for i in range(n)]


@pytest.mark.parametrize("consumer", [w.total, w.total_of_stream, w.total_of_iterator])
@pytest.mark.parametrize("source", [w.count_up, w.count_slowly], ids=["sync", "async"])
async def test_a_generator_travels_to_another_site_as_an_argument(
    session: Session, source: object, consumer: object
) -> None:
    with Pipeline("argument") as pipeline:
        Yield(consumer(source(PlaceParam("n"))))  # type: ignore[operator]
    for n in (0, 1, 2000):
        assert await first_value(session, pipeline, {"n": n}) == sum(range(n))


async def test_a_loop_over_a_generator_runs_its_body_at_other_sites(session: Session) -> None:
    with Pipeline("loop") as pipeline:
        with ForEach(w.count_up(PlaceParam("n"))) as number:
            value = w.echo(number, site="desk")
        Yield(w.total(collect(value)))
    assert await first_value(session, pipeline, {"n": 1000}) == sum(range(1000))


async def test_several_consumers_of_one_generator_each_see_every_element(session: Session) -> None:
    with Pipeline("tee") as pipeline:
        numbers = w.count_up(500)
        Yield(numbers, place="raw")
        Yield(w.total(numbers), place="total")
        Yield(w.total_of_stream(numbers), place="elsewhere")
        with ForEach(numbers) as number:
            value = w.echo(number, site="archive")
        Yield(collect(value), place="loop")
    found: dict[str, list[object]] = {}
    async for result in await session.execute(pipeline):
        found.setdefault(result.place, []).append(result.value)
    assert found["raw"] == list(range(500))
    assert found["total"] == found["elsewhere"] == [sum(range(500))]
    assert found["loop"] == [list(range(500))]


async def test_reader_of_one_element_ends_an_endless_generator(session: Session) -> None:
    pipeline = yielding(lambda: w.first_of(w.forever()))
    assert await first_value(session, pipeline) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 65, 66])
async def test_elements_arrive_although_the_next_one_never_comes(session: Session, n: int) -> None:
    pipeline = yielding(lambda: w.then_nothing(n))
    job = await session.execute(pipeline)
    results = job.results()
    assert [(await anext(results)).value for _ in range(n)] == list(range(n))
    await job.cancel()


async def test_a_generator_that_fails_half_way_keeps_what_it_yielded(session: Session, target: TargetName) -> None:
    pipeline = yielding(lambda: w.broken_stream(3))
    job = await session.execute(pipeline)
    values = []
    with pytest.raises(JobFailed) as caught:
        async for result in job:
            values.append(result.value)
    assert values == [0, 1, 2]
    assert caught.value.count == 1
    assert isinstance(caught.value.errors[0].__cause__, OSError) or target == "flare"


async def test_a_generator_that_fails_fails_its_readers_because_of_it(session: Session) -> None:
    with Pipeline("torn") as pipeline:
        torn = w.broken_stream(2)
        Yield(w.total(torn), place="total")
        Yield(w.total_of_stream(torn), place="stream")
    job = await session.execute(pipeline)
    failures = [item async for item in job.events()]
    assert {failure.place for failure in failures if isinstance(failure, Failure)} == {None, "total", "stream"}
    assert {failure.error.node for failure in failures if isinstance(failure, Failure)} == {"broken_stream#0"}


async def test_a_reader_that_stops_reading_stops_the_producer(session: Session, target: TargetName) -> None:
    """An endless generator neither fills the memory nor keeps the job from being cancelled."""
    pipeline = pipeline_of(w.forever)
    limits = ResultLimits(max_items=100, window=16)
    job = await session.execute(pipeline, options=limits)
    results = job.results()
    for expected in range(500):
        assert (await anext(results)).value == expected
    reader = job._known().log
    while not reader.full:  # the producer goes on until the log is full, and no further
        await reader.changed.wait()
    held = reader.held
    for _ in range(20):
        await asyncio.sleep(0)
    if target == "flare":  # what is in flight from the hub may still come
        assert reader.held <= 100 + 4 * 16
    else:
        assert reader.held == held <= 100 + 3 * 16
    for expected in range(500, 1500):
        assert (await anext(results)).value == expected
    await results.aclose()
    await job.cancel()


async def test_waiting_for_a_job_with_unread_results_raises(session: Session) -> None:
    pipeline = yielding(lambda: w.count_up(3_000))
    job = await session.execute(pipeline, options=ResultLimits(max_items=50, window=8))
    with pytest.raises(ResultsUnread, match="unread events") as caught:
        await job
    assert caught.value.limit == "max_items=50, which each site may exceed by window=8"
    assert len(await job.collect()) == 3_000  # nothing is lost


async def test_a_thousand_parameter_sets_with_a_loop_keep_their_frames_apart(session: Session) -> None:
    with Pipeline("many") as pipeline, ForEach(w.count_slowly(PlaceParam("n", multiuse=True))) as k:
        Yield(w.echo([PlaceParam("n", multiuse=True), k], site="archive"))
    job = await session.execute(pipeline, [{"n": i % 3} for i in range(1000)])
    found = sorted([(result.frame, result.value) async for result in job])
    assert found == [((i, k), [i % 3, k]) for i in range(1000) for k in range(i % 3)]


# streams in all directions between sites


async def test_streams_between_sites_in_both_directions_end(session: Session) -> None:
    there = yielding(lambda: w.total_at(w.tripled(w.numbers(PlaceParam("n"), site="lab"), site="desk"), site="lab"))
    with Pipeline("ring") as ring:
        values = w.numbers(PlaceParam("n"), site="archive")
        for site in ("lab", "desk", "archive", "lab", "desk"):
            values = w.tripled(values, site=site)
        Yield(w.total_at(values, site="archive"))
    with Pipeline("two that cross") as crossing:
        n = PlaceParam("n", multiuse=True)
        Yield(w.total_at(w.numbers(n, site="lab"), site="desk"), place="one")
        Yield(w.total_at(w.numbers(n, site="desk"), site="lab"), place="other")
    for n in (0, 2, 1000):
        for pipeline, factor in ((there, 3), (ring, 3**5), (crossing, 1)):
            async with asyncio.timeout(60):
                found = await (await session.execute(pipeline, {"n": n})).collect()
            assert {result.value for result in found} == {factor * sum(range(n))}


async def test_streams_in_both_directions_inside_loops_end(session: Session) -> None:
    with Pipeline("loops") as pipeline:
        outer = w.numbers(5, site="archive")
        with ForEach([1, 2, 3], concurrency=1):
            inner = w.tripled(outer, site="desk")
            both = w.total_at(w.tripled(inner, site="lab"), site="archive")
            with ForEach(inner) as value:
                again = w.total_at(w.tripled(outer, site="lab"), site="desk")
                w.echo([value, again], site="archive")
        Yield(collect(both))
    assert await first_value(session, pipeline) == [90, 90, 90]


async def test_streams_may_be_elements_of_a_loop_at_other_sites(session: Session) -> None:
    with Pipeline("streams") as pipeline:
        shared = w.numbers(4, site="lab")
        with ForEach([shared, w.numbers(3, site="archive"), shared]) as values:
            one = w.total_at(values, site="desk")
            other = w.total_at(w.tripled(values, site="archive"), site="lab")
        Yield(collect(one), place="one")
        Yield(collect(other), place="other")
        Yield(w.total_at(shared, site="archive"), place="shared")
    found = {result.place: result.value for result in await (await session.execute(pipeline)).collect()}
    assert found == {"one": [6, 3, 6], "other": [18, 9, 18], "shared": 6}


async def test_an_endless_ring_of_streams_can_be_left_and_cancelled(session: Session) -> None:
    with Pipeline("endless") as pipeline:
        endless = w.tripled(w.forever(), site="archive")
        Yield(w.first_of(w.tripled(endless, site="lab")), place="first")
        Yield(w.tripled(endless, site="desk"))
    job = await session.execute(pipeline, options=ResultLimits(max_items=50, window=8))
    results = job.results(place="yield")
    assert [(await anext(results)).value for _ in range(20)] == [9 * i for i in range(20)]
    await results.aclose()
    assert await job.cancel()
    assert job.status is JobStatus.ABORTED


async def test_closed_readers_do_not_keep_elements(session: Session) -> None:
    """More than may be kept for a slow reader: those that stopped early count no more, also inside generators."""
    with Pipeline("left") as pipeline:
        values = w.numbers(110_000, site="archive")
        mapped = w.tripled(values, site="lab")
        left = [w.first_of(values), w.first_of(mapped)]
        Yield(w.total_at(values, site="archive", after=[*left, mapped]))
    assert await first_value(session, pipeline) == sum(range(110_000))


async def test_generator_that_raises_cancelled_error_fails_its_frame_only(connect: Connect) -> None:
    federation = Federation("cancelled generators")

    @federation.site("archive").operation
    def numbers(x: int) -> Iterator[int]:
        yield x
        if x == 1:
            raise asyncio.CancelledError
        yield x + 10

    @federation.site("lab").operation
    def total(values: list[int]) -> int:
        return sum(values)

    elsewhere = yielding(lambda: total(numbers(PlaceParam("x"))))
    yielded = pipeline_of(numbers, "x")
    async with connect(federation) as session:
        for pipeline, expected in ((elsewhere, [10, 14]), (yielded, [0, 10, 1, 2, 12])):
            job = await session.execute(pipeline, [{"x": x} for x in range(3)])
            found = [item async for item in job.results(errors="yield")]
            assert sorted(item.value for item in found if isinstance(item, Result)) == sorted(expected)
            errors = {(error.node, error.type_name) for error in job.errors}
            assert errors == {("numbers#0", "asyncio.exceptions.CancelledError")}
            assert {item.frame for item in found if isinstance(item, Failure)} == {(1,)}
