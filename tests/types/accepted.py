"""Code that must pass strict type checking. It is not run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, assert_type

from dfm_async import (
    Advise,
    BestOf,
    DfmError,
    Event,
    Failure,
    FailureInfo,
    ForEach,
    Job,
    JobFailed,
    JobStatus,
    Operation,
    Pipeline,
    PlaceParam,
    Repeat,
    Result,
    Results,
    RetryPolicy,
    Session,
    TryFromCache,
    Yield,
    collect,
    gather,
)
from dfm_async.stats import LaneStats
from tests.types.weather import (
    Station,
    anomalies,
    anomaly,
    anything,
    archive,
    count,
    double,
    download,
    fed,
    lab,
    last,
    load,
    many,
    named,
    pages,
    ping,
    query,
    scale,
    several,
    silent,
    squares,
    station,
    ticks,
    total,
    train,
    untyped,
    upload,
)


def calls_in_a_pipeline() -> None:
    with Pipeline("calls") as pipeline:
        assert_type(anomaly(17.0), float)
        assert_type(anomaly(17, base=2.0), float)
        assert_type(anomaly(PlaceParam("value")), float)
        assert_type(double(double(1)), int)
        assert_type(ping(), str)
        assert_type(named(x=1), int)
        assert_type(several(1, 2, 3), int)
        assert_type(anything({"any": "thing"}), str)
        assert_type(load("mon"), list[float])
        Yield(anomaly(load("mon")[0]), place="first")
        assert_type(station("zrh"), Station)
        Yield(station("zrh").name, place="name")
    assert_type(pipeline, Pipeline)


def options_of_calls() -> None:
    with Pipeline("options"):
        first = load("mon", site="archive")
        assert_type(first, list[float])
        assert_type(anomaly(17.0, site=lab), float)
        assert_type(anomaly(17.0, 2.0, site=BestOf([lab, archive])), float)
        assert_type(anomaly(17.0, base=2.0, provider="era5"), float)
        assert_type(anomaly(value=17.0, after=first), float)
        assert_type(anomaly(17.0, after=[first]), float)
        assert_type(double(1, retry=RetryPolicy(attempts=2), deadline=2), int)
        assert_type(double(PlaceParam("x"), fallback=0), int)
        assert_type(ping(deadline=2.0), str)
        assert_type(named(x=1, site=lab), int)
        assert_type(several(1, 2, 3, 4, site=lab), int)
        assert_type(many(1, "b", b"c", 2.0, site=lab), int)
        assert_type(download(3, site=lab), str)
        untyped(7, site="lab")
        untyped("x", other=1)


def contexts_are_not_passed() -> None:
    with Pipeline("contexts"):
        assert_type(download(3), str)
        assert_type(download(parts=3, name="x"), str)
        assert_type(upload(3), str)
        assert_type(upload(parts=3, site=lab), str)
        with ForEach(pages(3, "x")) as page:
            assert_type(page, str)


def classes_and_objects() -> None:
    with Pipeline("classes"):
        assert_type(query(1.0), str)
        assert_type(query(1.0, unit="F", deadline=2), str)
        assert_type(scale(1.0), float)


def streams() -> None:
    with Pipeline("streams"):
        assert_type(total(count(3)), int)
        assert_type(total(ticks(3)), int)
        assert_type(total(squares(ticks(4))), int)
        assert_type(last(count(3)), int)
        with ForEach(ticks(2)) as number:
            assert_type(number, int)


def statements() -> None:
    with Pipeline("statements", mode="discovery"):
        with ForEach(PlaceParam("days"), concurrency=4) as day:
            delta = anomaly(day)
        assert_type(collect(delta), list[float])
        assert_type(collect(delta, errors="skip"), list[float])
        assert_type(collect(delta, errors="keep"), list[float | FailureInfo])
        with Repeat(1.0, times=5) as current:
            current.next(anomaly(current, base=0.5))
        with TryFromCache(key=("delta", "mon")) as cached:
            cached.store(anomaly(17.0))
        replies = gather([train([1.0], site=site) for site in (lab, archive)], at_least=1)
        assert_type(replies[0].value, list[float])
        anomaly(Advise(), site=Advise())


async def operations_outside_pipelines() -> None:
    assert_type(anomaly(17.0), float)
    print(await load.code("mon"))
    print(list(count(3)))
    print([number async for number in ticks(3)])


async def direct_calls(session: Session) -> None:
    assert_type(await session.call(anomaly, 17.0), float)
    assert_type(await session.call(anomaly, 17.0, base=10.0), float)
    assert_type(await session.call(load, "mon"), list[float])
    assert_type(await session.call(count, 3), list[int])
    assert_type(await session.call(ticks, 3), list[int])
    assert_type(await session.call(download, 3), str)
    assert_type(await session.call(query, 1.0), str)
    assert_type(await session.call(ping, site=lab), str)
    assert_type(await session.call(anomaly, 17.0, site="lab", retry=RetryPolicy()), float)
    assert_type(await session.call(load, day="mon", deadline=2), list[float])
    print(await session.call(anomaly, 17.0, retry=RetryPolicy()))


async def maps(session: Session) -> None:
    async for value in session.map(anomaly, range(1000)):
        assert_type(value, float)
    async for value in session.map(anomaly, [17.0, 12.5], itertools.repeat(10.0), concurrency=2):
        assert_type(value, float)
    async for values in session.map(load, ["mon"], site=archive, deadline=60):
        assert_type(values, list[float])
    async for item in session.map(anomaly, [1.0], errors="yield", ordered=False):
        assert_type(item.index, int)
        assert_type(item.value, float)
        assert_type(item.error, DfmError | None)

    async def inputs() -> AsyncIterator[float]:
        yield 1.0

    async with session.map(anomaly, inputs(), base=0.0) as deltas:
        assert_type(await anext(deltas), float)


async def every_site(session: Session) -> None:
    async for reply in session.each(train, [8.0, 4.0], at_least=1, within=60):
        assert_type(reply.site, str)
        assert_type(reply.value, list[float])
    async for reply in session.each(train, [8.0], rounds=2):
        assert_type(reply.error, Exception | None)


async def pipelines_of_functions(session: Session) -> None:
    assert_type(await session.run(anomalies, day="mon"), list[float])
    assert_type(await session.run(anomalies, "mon", base=1.0), list[float])
    await session.run(silent, "mon")
    job = await session.execute(anomalies, [{"day": "mon"}, {"day": "tue"}])
    assert_type(job, Job[list[float]])
    assert_type((await job.first("result")).value, list[float])
    async for result in job.results("result", ordered=True):
        assert_type(result.value, list[float])
    async for item in job.results("result", errors="yield"):
        assert_type(item, Result[list[float]] | Failure)
    assert_type(await job.collect("result"), Results[Result[list[float]]])
    assert_type((await job.collect("result", errors="skip"))[0].value, list[float])
    assert_type((await job.collect("result"))[:2], Results[Result[list[float]]])
    assert_type(await job.collect("result", errors="yield"), list[Result[list[float]] | Failure])
    plain: list[Result[list[float]]] = await job.collect("result")
    print(plain)
    plan = await session.prepare(anomalies)
    assert_type(await session.execute(plan, {"day": "mon"}), Job[list[float]])
    assert_type(await session.execute(Pipeline("other")), Job)


async def jobs(session: Session, job: Job) -> None:
    assert_type(await job, JobStatus)
    assert_type(await job.first("warm"), Result)
    assert_type(await job.collect(), Results)
    assert_type(await job.collect("warm"), Results)
    assert_type(await job.collect(errors="yield"), list[Result | Failure])
    async for result in job:
        assert_type(result, Result)
    async for event in job.events():
        assert_type(event, Event)
    for known in session.jobs():
        assert_type(known.status, JobStatus)


async def failures(job: Job) -> None:
    async for item in job.results(errors="yield"):
        assert_type(item, Result | Failure)
        if isinstance(item, Result):
            print(item.value)
        else:
            assert_type(item, Failure)
            assert_type(item.error, DfmError)
            print(item.error.node, item.error.type_name, item.error.message)
    try:
        await job
    except JobFailed as error:
        failed = error.errors[0]
        print(failed.node, failed.type_name, failed.message, failed.operation, failed.remote_traceback)
        assert_type(failed.frame, tuple[int, ...])
        assert_type(failed.attempt, int)


def operations_as_values() -> None:
    typed: Operation[[int], int] = double
    read: Operation[[str], list[float]] = load
    plain: Callable[[float], float] = anomaly
    known: list[Operation[..., Any]] = [double, load, anomaly, count, upload]
    print(typed, read, plain, known, [operation.name for operation in known])
    flow: Pipeline = anomalies
    print(flow, LaneStats(jobs=1, alive=True).jobs)


async def main() -> None:
    async with asyncio.timeout(10), Session(fed, target="inline") as session:
        await direct_calls(session)
