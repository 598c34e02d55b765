"""Schedules: a job for each tick, once, whatever happens to the programs that run it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from dfm_async import Federation, Job, JobStatus, ParameterError, Session, SessionClosed
from dfm_async.base.wall_clock import moment_text
from dfm_async.session import Schedule, ScheduleInfo
from dfm_async.testing import VirtualClock, virtual_time
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.postgres import PostgresServer
from tests.support.waiting import running, settled

NOON = datetime(2026, 11, 19, 12, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")

fed = Federation("reports")
lab = fed.site("lab")
calls: Counter[str] = Counter()
gates_of_test: list[asyncio.Event] = []


@lab.operation
async def report(day: str) -> str:
    calls[day] += 1
    return day


@lab.operation
async def gated() -> None:
    await gates_of_test[-1].wait()


reports = pipeline_of(report, "day")
gates = pipeline_of(gated)


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    calls.clear()


@pytest.fixture
def gate() -> asyncio.Event:
    """Lets the operation ``gated`` return."""
    gates_of_test[:] = [asyncio.Event()]
    return gates_of_test[0]


def at(hour: int, minute: int = 0, day: int = 19) -> str:
    return f"nightly@2026-11-{day}T{hour:02}:{minute:02}:00Z"


def day_of(moment: datetime) -> dict[str, str]:
    return {"day": moment.isoformat()}


@asynccontextmanager
async def afternoon(store: str | None = None) -> AsyncIterator[tuple[VirtualClock, Session]]:
    async with virtual_time(NOON) as clock, Session(fed, target="inline", store=store) as session:
        yield clock, session


def ids_of(session: Session) -> list[str]:
    return sorted(job.job_id for job in session.jobs())


async def test_every_tick_is_a_job() -> None:
    async with afternoon() as (clock, session):
        schedule = session.schedule("nightly", reports, day_of, cron="0 15,16 * * *", tz="Europe/Berlin")
        assert (schedule.next_at, schedule.last_job, schedule.closed) == (None, None, True)
        async with schedule:
            assert schedule.next_at == datetime(2026, 11, 19, 15, tzinfo=BERLIN)
            assert "next at 2026-11-19 15:00:00+01:00" in repr(schedule)
            await clock.advance(2 * 3600 - 1)
            assert session.jobs() == []
            await clock.advance(1)
            job = await anext(schedule)
            assert (job.job_id, await job) == (at(14), JobStatus.FINISHED)
            assert [result.value async for result in job] == ["2026-11-19T15:00:00+01:00"]
            assert job.info().label == schedule.label == "schedule nightly"
            await clock.advance(86400)
            assert ids_of(session) == [at(14), at(15), at(14, day=20)]
            assert schedule.last_job is not None
            assert schedule.last_job.job_id == at(14, day=20)
        await clock.advance(86400)
        assert [found.job_id async for found in schedule] == [at(15), at(14, day=20)]
        assert len(session.jobs()) == 3
        assert (schedule.next_at, schedule.closed) == (None, True)


async def test_open_schedules_are_listed() -> None:
    async with afternoon() as (clock, session):
        later = session.schedule("weekly", reports, day_of, every=7 * 86400, missed="all")
        async with session.schedule("nightly", reports, day_of, cron="0 15 * * *", tz="Europe/Berlin"):
            (nightly,) = session.schedules()
            assert nightly == ScheduleInfo(
                name="nightly",
                timetable="cron '0 15 * * *' Europe/Berlin",
                next_at=datetime(2026, 11, 19, 14, tzinfo=UTC).timestamp(),
                last_job=None,
                missed="skip",
            )
            async with later:
                assert [(found.name, found.missed) for found in session.schedules()] == [
                    ("nightly", "skip"),
                    ("weekly", "all"),
                ]
            await clock.advance(2 * 3600)
            (nightly,) = session.schedules()
            assert nightly.last_job == at(14)
            assert nightly.next_at == datetime(2026, 11, 20, 14, tzinfo=UTC).timestamp()
        assert session.schedules() == []


async def test_schedule_runs_wherever_jobs_run(connect: Connect) -> None:
    name = f"often-{os.urandom(4).hex()}"
    async with connect(fed) as session, session.schedule(name, reports, {"day": "mon"}, every=1) as schedule:
        job = await anext(schedule)
        assert [result.value async for result in job] == ["mon"]
        assert job.job_id.startswith(f"{name}@20")


async def test_jobs_go_on_after_their_schedule(gate: asyncio.Event) -> None:
    async with afternoon() as (clock, session):
        async with session.schedule("nightly", gates, every=3600) as schedule:
            await clock.advance(3600)
            job = await anext(schedule)
            await running(job)
        gate.set()
        assert await clock.until(job) is JobStatus.FINISHED


async def test_schedule_ends_with_its_session() -> None:
    async with afternoon() as (_, session):
        schedule = await session.schedule("nightly", reports, day_of, every=3600).__aenter__()
        reader = asyncio.ensure_future(anext(schedule, None))
        await settled()
        assert not reader.done()
    assert await reader is None
    assert schedule.closed
    await schedule.aclose()


@pytest.mark.parametrize(
    ("missed", "late", "expected"),
    [
        ("skip", timedelta(seconds=20), [at(15)]),  # it is on time: late by less than a minute
        ("skip", timedelta(minutes=20), []),
        ("once", timedelta(minutes=20), [at(15)]),
        ("all", timedelta(minutes=20), [at(13), at(14), at(15)]),
    ],
)
async def test_machine_that_slept_runs_what_it_missed(missed: Any, late: timedelta, expected: list[str]) -> None:
    async with afternoon() as (clock, session):
        async with session.schedule("nightly", reports, day_of, every=3600, missed=missed):
            await clock.advance(60)
            clock.set_wall(NOON + timedelta(hours=3) + late)
            await clock.advance(30)
            assert ids_of(session) == expected
            await clock.advance(3600)
            assert ids_of(session) == [*expected, at(16)]


async def test_clock_that_is_set_back_does_not_repeat_a_tick() -> None:
    async with afternoon() as (clock, session):
        async with session.schedule("nightly", reports, day_of, every=3600):
            await clock.advance(3600)
            clock.set_wall(NOON + timedelta(minutes=30))
            await clock.advance(3600)
            assert ids_of(session) == [at(13)]
            await clock.advance(1800)
            assert ids_of(session) == [at(13), at(14)]
    assert set(calls.values()) == {1}


@pytest.mark.parametrize(("missed", "expected"), [("skip", []), ("once", [at(16)]), ("all", [at(14), at(15), at(16)])])
async def test_restarted_program_runs_what_it_missed(store_url: str, missed: Any, expected: list[str]) -> None:
    async with virtual_time(NOON) as clock:

        def scheduled(session: Session) -> Schedule[Any]:
            return session.schedule("nightly", reports, day_of, every=3600, missed=missed)

        async with Session(fed, target="inline", store=store_url) as session, scheduled(session) as schedule:
            assert schedule.last_job is None
            await clock.advance(3600)
            await (await anext(schedule))
        await clock.advance(3 * 3600 + 120)
        async with Session(fed, target="inline", store=store_url) as session, scheduled(session) as schedule:
            assert schedule.last_job is not None
            for job_id in expected:
                job = await anext(schedule)
                assert (job.job_id, await job) == (job_id, JobStatus.FINISHED)
            assert schedule.next_at == NOON + timedelta(hours=5)
    assert set(calls.values()) == {1}


@asynccontextmanager
async def replicas(store_url: str, one: Any, other: Any) -> AsyncIterator[tuple[list[Schedule[Any]], list[str]]]:
    """Open a schedule in two sessions that have missed at least ten ticks; in real time, as databases need it."""
    options: Any = {"every": 1, "missed": "all"}
    async with (
        Session(fed, target="inline", store=store_url) as first,
        Session(fed, target="inline", store=store_url) as second,
    ):
        last = int(time.time()) - 10
        ids = [f"nightly@{moment_text(tick)}" for tick in range(last, last + 11)]
        await (await first.execute(reports, {"day": "last"}, job_id=ids[0], label="schedule nightly"))
        async with (
            first.schedule("nightly", reports, one, **options) as here,
            second.schedule("nightly", reports, other, **options) as there,
        ):
            yield [here, there], ids[1:]


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_replicas_run_each_tick_once(database: str, store_url: str, request: pytest.FixtureRequest) -> None:
    if database == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        store_url = server.url(server.new_database())
    async with replicas(store_url, day_of, day_of) as (schedules, ids):
        found = await asyncio.gather(*[until_tick(schedule, ids[-1]) for schedule in schedules])
        assert {*found[0], *found[1]} >= set(ids)
    assert set(calls.values()) == {1}


async def test_ticks_that_another_replica_runs_with_other_parameters_are_joined(store_url: str) -> None:
    async with replicas(store_url, {"day": "a"}, {"day": "b"}) as (schedules, ids):
        found = await asyncio.gather(*[until_tick(schedule, ids[-1]) for schedule in schedules])
        both = {**found[0], **found[1]}
        assert both.keys() >= set(ids)
        for job in both.values():
            assert len([result.value async for result in job]) == 1


async def until_tick(schedule: Schedule[Any], last: str) -> dict[str, Job]:
    """Return the ended jobs of a schedule up to a tick. A replica that opens late begins behind those of the other."""
    jobs: dict[str, Job] = {}
    async for job in schedule:
        jobs[job.job_id] = job
        assert await job is JobStatus.FINISHED
        if job.job_id >= last:
            break
    return jobs


async def dies_in_its_third_tick(store_url: str) -> None:
    async with virtual_time(NOON) as clock, Session(fed, target="inline", store=store_url) as session:
        async with session.schedule("nightly", reports, day_of, every=3600) as schedule:
            for _ in range(2):
                await clock.advance(3600)
                await (await anext(schedule))
            await clock.advance(3600)
            await anext(schedule)
            os.kill(os.getpid(), signal.SIGKILL)


async def test_killed_program_runs_no_tick_twice(store_url: str) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c",
        f"import asyncio; from tests.conformance import test_schedules as t; "
        f"asyncio.run(t.dies_in_its_third_tick({store_url!r}))",
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert await child.wait() == -signal.SIGKILL
    async with (
        virtual_time(NOON + timedelta(hours=5, minutes=30)) as clock,
        Session(fed, target="inline", store=store_url) as session,
        session.schedule("nightly", reports, day_of, every=3600, missed="all") as schedule,
    ):
        jobs: list[Job] = []
        for _ in range(2):
            jobs.append(await anext(schedule))
            await jobs[-1]
        assert [job.job_id for job in jobs] == [at(16), at(17)]
        states = {info.job_id: info.status async for info in session.find_jobs(label=schedule.label)}
        assert set(states) == {at(hour) for hour in range(13, 18)}
        assert states[at(15)] in (JobStatus.INTERRUPTED, JobStatus.FINISHED)
        if states[at(15)] is JobStatus.INTERRUPTED:  # it was started: it is resumed like any other job
            await (await session.resume(at(15)))
        await clock.advance(0)


async def test_jobs_need_not_overlap(gate: asyncio.Event) -> None:
    async with afternoon() as (clock, session):
        async with session.schedule("nightly", gates, every=3600, overlap="skip"):
            await clock.advance(3 * 3600)
            assert ids_of(session) == [at(13)]
            gate.set()
            await clock.advance(3600)
            assert ids_of(session) == [at(13), at(16)]


async def test_jobs_may_overlap(gate: asyncio.Event) -> None:
    async with afternoon() as (clock, session):
        async with session.schedule("nightly", gates, every=3600, deadline=9000):
            await clock.advance(3 * 3600)
            assert [job.status for job in session.jobs()] == [JobStatus.RUNNING] * 3
            assert not gate.is_set()
            await clock.advance(3600)
            assert [job.status for job in session.jobs()] == [JobStatus.ABORTED, *[JobStatus.RUNNING] * 3]


async def test_schedule_goes_on_after_a_tick_whose_parameters_fail(caplog: pytest.LogCaptureFixture) -> None:
    def params(moment: datetime) -> Any:
        if moment.hour == 13:
            raise LookupError("no data")
        return {} if moment.hour == 14 else {"day": "fine"}

    async with afternoon() as (clock, session):
        async with session.schedule("nightly", reports, params, every=3600):
            with caplog.at_level(logging.ERROR, "dfm_async"):
                await clock.advance(3 * 3600)
            assert ids_of(session) == [at(15)]
    first, second = caplog.records
    assert first.getMessage() == f"job {at(13)} was not started: its parameters cannot be made"
    assert "missing parameter 'day'" in second.getMessage()


async def test_unread_jobs_are_bounded() -> None:
    async with afternoon() as (clock, session):
        async with session.schedule("nightly", reports, {"day": "x"}, every=60) as schedule:
            await clock.advance(120 * 60)
            assert calls["x"] == 120
        read = [job.job_id async for job in schedule]
        assert (len(read), read[0]) == (100, at(12, 21))


async def test_invalid_schedules_are_refused() -> None:
    async with Session(fed, target="inline") as session:
        for name in ("", "a/b", "x" * 101, 7):
            with pytest.raises(ValueError, match="name of a schedule"):
                session.schedule(name, reports, every=60)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="overlap must be"):
            session.schedule("a", reports, every=60, overlap="no")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="missed must be"):
            session.schedule("a", reports, every=60, missed="no")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'deadlin' \(did you mean 'deadline'\?\)"):
            session.schedule("a", reports, every=60, deadlin=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="deadline must be"):
            session.schedule("a", reports, every=60, deadline=-1)
        with pytest.raises(TypeError, match="params must be"):
            session.schedule("a", reports, 7, every=60)  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="missing parameter 'day'"):
            async with session.schedule("a", reports, every=60):
                pass
        async with session.schedule("a", reports, day_of, every=3600) as schedule:
            with pytest.raises(ValueError, match="'a' is open already"):
                async with session.schedule("a", reports, day_of, every=60):
                    pass
        with pytest.raises(SessionClosed, match="opened before"):
            async with schedule:
                pass
        async with session.schedule("a", reports, day_of, every=3600):
            pass
    with pytest.raises(SessionClosed):
        session.schedule("a", reports, every=60)
