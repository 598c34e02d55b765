"""Jobs and events, page by page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dfm_async import JobStatus, LocalOptions, ResultLimits
from dfm_async.client import Client
from tests.support.stores import execute_sql
from tests.web.rig import Server, gates, new_service, serving


async def test_jobs_are_listed_page_by_page_the_newest_first(server: Server) -> None:
    made = [await server.submit("squares", {"x": x}) for x in range(7)]
    for job_id in made:
        await server.finished(job_id)
    made.append(await server.submit("endless"))
    found: list[str] = []
    after = None
    while True:
        query = {"limit": "3", **({} if after is None else {"after": after})}
        page = (await server.client.get("/jobs", params=query)).json()
        assert len(page["jobs"]) <= 3
        found += [job["job_id"] for job in page["jobs"]]
        if after is None:
            await server.submit("squares", {"x": 1})  # one that comes between two pages moves nothing
        after = page["next"]
        if after is None:
            break
    assert found == made[::-1]
    page = (await server.client.get("/jobs", params={"status": "running"})).json()
    assert made[-1] in [job["job_id"] for job in page["jobs"]]
    for wrong in ({"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after": "x"}, {"status": "odd"}):
        assert (await server.client.get("/jobs", params=wrong)).status_code == 422


@pytest.mark.parametrize("stored", [False, True])
async def test_lists_of_jobs_are_filtered_page_by_page(store_url: str, *, stored: bool) -> None:
    service = new_service(store=store_url if stored else None, page_size=2)
    async with serving(service) as server:
        made = {}
        for pipeline, params in 3 * [("squares", {"x": 1}), ("counting", {"n": 1})]:
            job_id = await server.submit(pipeline, params)
            made[job_id] = (await server.finished(job_id)).info().created
        async with Client(str(server.client.base_url)) as client:

            async def ids(**wanted: Any) -> list[str]:
                return [info.job_id for info in await client.jobs(**wanted)]

            newest = list(made)[::-1]
            assert await ids() == newest
            assert await ids(pipeline="squares") == newest[1::2]
            assert await ids(pipeline="squares", limit=2) == newest[1:4:2]
            assert await ids(principal="anyone") == newest
            for query in {"label": "anyone"}, {"label": "anyone", "principal": "anyone"}:
                listed = (await server.client.get("/jobs", params=query)).json()["jobs"]
                assert [job["job_id"] for job in listed] == newest[:2]
            for query in {"label": "nobody"}, {"label": "anyone", "principal": "nobody"}:
                assert (await server.client.get("/jobs", params=query)).json() == {"jobs": [], "next": None}
            with pytest.raises(ValueError, match=r"JobStatus\.FINISHED, .*, not 'finished'"):
                await client.jobs(status="finished")  # type: ignore[arg-type]
            assert await ids(principal="nobody") == await ids(pipeline="none") == []
            assert await ids(since=made[newest[2]]) == newest[:3]
            assert await ids(since=made[newest[4]], until=made[newest[0]], pipeline="counting") == [
                newest[2],
                newest[4],
            ]
            assert await ids(status=JobStatus.FINISHED, pipeline="counting") == newest[::2]
            assert await ids(search="UNT any") == newest[::2]
            assert await ids(search=newest[3][2:]) == newest[3:4]
            assert await ids(search="nobody") == []
        for wrong in ({"since": "-1"}, {"since": "now"}, {"until": "nan"}, {"until": "1e999"}, {"search": 17 * "x "}):
            assert (await server.client.get("/jobs", params=wrong)).status_code == 422


async def test_events_come_page_by_page_until_the_job_has_ended(server: Server) -> None:
    job_id = await server.submit("counting", {"n": 50})
    await server.finished(job_id)
    values: list[int] = []
    offsets: list[int] = []
    after, ended = -1, False
    while not ended:
        page = (await server.client.get(f"/jobs/{job_id}/events?after={after}&limit=8")).json()
        assert 0 < len(page["events"]) <= 8
        values += [event["value"] for event in page["events"] if event["event"] == "result"]
        offsets += [event["offset"] for event in page["events"]]
        after, ended = page["next"], page["ended"]
    assert values == list(range(50))
    assert offsets == list(range(len(offsets)))
    assert page["status"] == "finished"


async def test_a_page_can_wait_for_an_event(server: Server) -> None:
    gates["page"] = asyncio.Event()
    job_id = await server.submit("gated", {"n": 2, "gate": "page"})
    job = await server.session.reattach(job_id)
    last = (await job.first()).offset
    empty = (await server.client.get(f"/jobs/{job_id}/events?after={last}")).json()
    assert (empty["events"], empty["next"], empty["ended"]) == ([], last, False)
    waiting = asyncio.create_task(server.client.get(f"/jobs/{job_id}/events?after={last}&wait=30"))
    await server.streams(1)
    gates["page"].set()
    page = (await waiting).json()
    assert page["events"][0]["value"] == 1


async def test_expired_events_are_refused_with_the_first_offset() -> None:
    options = LocalOptions(results=ResultLimits(max_items=10))
    async with serving(new_service(options=options)) as server:
        job_id = await server.submit("counting", {"n": 100})
        job = await server.session.reattach(job_id)
        assert len([event async for event in job.events()]) > 100
        for path in ("events", "stream"):
            found = await server.client.get(f"/jobs/{job_id}/{path}")
            assert (found.status_code, found.json()["error"]) == (410, "expired")
            first = found.json()["first"]
            again = await server.client.get(f"/jobs/{job_id}/{path}?after={first - 1}")
            assert again.status_code == 200


async def test_jobs_of_a_store_are_read_also_by_the_next_service(store_url: str) -> None:
    service = new_service(store=store_url, page_size=500)
    async with serving(service) as server:
        job_id = await server.submit("counting", {"n": 20}, job_id="kept")
        assert (await server.finished(job_id)).status is JobStatus.FINISHED
    async with serving(service) as server:
        (job,) = (await server.client.get("/jobs")).json()["jobs"]
        assert (job["job_id"], job["principal"], job["status"]) == ("kept", "anyone", "finished")
        page = (await server.client.get("/jobs/kept/events?limit=500")).json()
        assert [event["value"] for event in page["events"] if event["event"] == "result"] == list(range(20))
        assert page["ended"]


async def test_failing_store_is_reported_without_its_path(store_path: Path, store_url: str) -> None:
    async with serving(new_service(store=store_url)) as server:
        execute_sql(store_path, "ALTER TABLE jobs RENAME TO lost")
        found = await server.client.get("/jobs/some")
        assert (found.status_code, found.json()["error"], "retry-after" in found.headers) == (503, "store", True)
        assert str(store_path.parent) not in found.text
        execute_sql(store_path, "ALTER TABLE lost RENAME TO jobs")
        assert (await server.client.get("/jobs/some")).status_code == 404
