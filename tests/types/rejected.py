"""Code that must not pass type checking: an ignored error that is not found is an error itself. It is not run."""

from __future__ import annotations

import dfm_async
from dfm_async import BestOf, ForEach, Job, Pipeline, PlaceParam, RetryPolicy, Session, Yield, collect
from tests.types.weather import (
    anomalies,
    anomaly,
    archive,
    double,
    download,
    lab,
    load,
    many,
    named,
    ping,
    query,
    station,
    total,
    train,
)


def calls_in_a_pipeline() -> None:
    with Pipeline("calls"):
        anomaly("17")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
        anomaly(17.0, bas=2.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
        anomaly(17.0, 2.0, 3.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
        anomaly(base=PlaceParam("base"))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
        double(anomaly(17.0))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        double(load("mon"))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        total(load("mon"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        anomaly(station("zrh").hight)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
        query("1.0")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        query("url", 1.0)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        download("three")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        download(3, context=None)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def options_of_calls() -> None:
    with Pipeline("options"):
        anomaly("17", site="lab")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly("17", provider="era5")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly("17", after=load("mon"))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly("17", retry=RetryPolicy(attempts=2))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly("17", deadline=2.0)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly("17", fallback=0.0)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly(17.0, "2", site=lab)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly(17.0, 2.0, 3.0, site=lab)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        many(1, "b", "c", 2.0, site=lab)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        ping(1, site=lab)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        named(1, site=lab)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        double(load("mon"), site=BestOf([lab]))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly(17.0, site=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly(17.0, retry=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        anomaly(17.0, deadline="soon")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def statements() -> None:
    with Pipeline("statements"):
        with ForEach(load("mon")) as temperature:
            load(temperature)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
            Yield(anomaly(temperature), plac="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with ForEach(double(3)):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            pass
        collect(temperature, errors="ignore")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
        total(collect(temperature))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def results_of_calls() -> None:
    with Pipeline("results"):
        text: str = anomaly(17.0)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        days: list[str] = load("mon")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text, days)


async def direct_calls(session: Session) -> None:
    await session.call(anomaly, "17")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await session.call(anomaly)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await session.call(anomaly, 17.0, bas=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await session.call(anomaly, "17", site=lab)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    await session.call(anomaly, 17.0, "2", deadline=2)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    await session.call(anomaly, 17.0, retry=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await session.call(len, [])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    text: str = await session.call(load, "mon")  # type: ignore[call-overload]  # pyright: ignore[reportAssignmentType]
    print(text)


async def maps(session: Session) -> None:
    session.map(anomaly, ["17"])  # type: ignore[misc]  # pyright: ignore[reportArgumentType, reportCallIssue]
    session.map(anomaly, 17.0)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    session.map(load, ["mon"], ["tue"])  # type: ignore[misc]  # pyright: ignore[reportArgumentType, reportCallIssue]
    session.map(anomaly, [17.0], errors="skip")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    texts: list[str] = [value async for value in session.map(anomaly, [17.0])]  # type: ignore[misc]  # pyright: ignore[reportAssignmentType]
    print(texts)


async def every_site(session: Session) -> None:
    session.each(train, "model")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    session.each(train, "model", at_least=2)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    session.each(train, [1.0], within="soon")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    async for reply in session.each(train, [1.0]):
        text: str = reply.value  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(text)


async def pipelines_of_functions(session: Session) -> None:
    await session.run(anomalies, day=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await session.run(anomalies)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await session.run(anomalies, "mon", bas=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    text: str = await session.run(anomalies, "mon")  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
    job = await session.execute(anomalies, {"day": "mon"})
    number: int = (await job.first("result")).value  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    names: list[str] = (await job.collect("result"))[0].value  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text, number, names)


async def jobs(job: Job) -> None:
    print([item.value async for item in job.results(errors="yield")])  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
    job.results(errors="skip")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    async for item in job:
        print(item.valeu)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]


def definitions() -> None:
    lab.operation(double, retries=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lab.operation(retries=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lab.operation(deadline="soon")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lab.operatoin(double)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    archive.operation(3, name="three")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def names() -> None:
    print(dfm_async.Sesion)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
