"""Schedules of services, and jobs that clients start later."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from dfm_async import JobStatus, SessionClosed
from dfm_async.client import Client
from dfm_async.testing import virtual_time
from tests.web.rig import PIPELINES, Tokens, client_of, inline, new_service, serving

NOON = datetime(2026, 11, 19, 12, tzinfo=UTC)


async def test_service_runs_its_schedules_while_it_is_open() -> None:
    async with virtual_time(NOON) as clock, inline() as session:
        service = new_service(session=session)
        service.schedule("nightly", PIPELINES["squares"], {"x": 3}, cron="0 3 * * *", priority=1)
        service.schedule("hourly", PIPELINES["squares"], lambda tick: {"x": tick.hour}, every=3600)
        async with service.lifespan():
            with pytest.raises(SessionClosed, match="before its lifespan"):
                service.schedule("late", PIPELINES["squares"], {"x": 3}, every=60)
            await clock.advance(3 * 3600)
            hourly = await session.reattach("hourly@2026-11-19T15:00:00Z")
            assert [result.value async for result in hourly] == [225]
            await clock.advance(13 * 3600)
        await clock.advance(7200)
        jobs = [job.job_id for job in session.jobs()]
        assert len(jobs) == 17
        assert "nightly@2026-11-20T03:00:00Z" in jobs


async def test_jobs_of_schedules_can_be_read_over_http() -> None:
    service = new_service()
    service.schedule("often", PIPELINES["squares"], {"x": 3}, every=1)
    async with serving(service) as server:
        session = server.service.current
        assert session is not None
        async with session.changes() as changes:
            async for job in changes:
                if job.status is JobStatus.FINISHED:
                    break
        found = (await server.client.get(f"/jobs/{job.job_id}")).json()
        assert (found["job_id"], found["principal"]) == (job.job_id, "schedule often")
        listed = (await server.client.get("/jobs", params={"principal": "schedule often"})).json()
        assert job.job_id in [one["job_id"] for one in listed["jobs"]]


async def test_schedules_are_listed_for_principals_that_may_see_metrics() -> None:
    service = new_service(authorizer=Tokens())
    service.schedule("yearly", PIPELINES["squares"], {"x": 3}, every=366 * 86400, missed="once")
    async with service.lifespan(), client_of(service) as http:
        for name, seen in ("ann", []), ("root", ["yearly"]):
            found = (await http.get("/schedules", headers={"authorization": name})).json()["schedules"]
            assert [schedule["name"] for schedule in found] == seen


async def test_the_client_lists_schedules() -> None:
    service = new_service()
    service.schedule("yearly", PIPELINES["squares"], {"x": 3}, every=366 * 86400, missed="once")
    async with serving(service) as server, Client(str(server.client.base_url)) as client:
        assert await client.schedules() == server.session.schedules()


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"every": 0}, "every must be"), ({"cron": "daily"}, "cannot parse"), ({"every": 60, "tz": "Rome"}, "'Rome'")],
)
def test_invalid_schedules_are_refused_before_the_service_opens(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        new_service().schedule("nightly", PIPELINES["squares"], {"x": 3}, **options)


def test_schedules_of_a_service_have_different_names() -> None:
    service = new_service()
    service.schedule("nightly", PIPELINES["squares"], {"x": 3}, every=60)
    with pytest.raises(ValueError, match="a schedule 'nightly' already"):
        service.schedule("nightly", PIPELINES["squares"], {"x": 3}, every=60)


async def test_time_of_a_submission_is_checked() -> None:
    async with serving(new_service()) as server:
        for moment in (-1, 1e15, "tomorrow"):
            answer = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}, "start_at": moment})
            assert answer.status_code == 422
