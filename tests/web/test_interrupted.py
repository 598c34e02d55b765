"""Jobs that are interrupted and resumed, and clients that read them meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from dfm_async import Federation, JobStatus, LocalOptions, Session
from dfm_async.web import WebLimits
from tests.support.pipelines import pipeline_of
from tests.web.rig import PIPELINES, Server, events, gates, inline, new_service, serving, square

COUNT = 6


@pytest.fixture
def store(tmp_path: Path) -> str:
    gates["restart"] = asyncio.Event()
    return f"sqlite:///{tmp_path}/jobs.db"


@asynccontextmanager
async def restarted(store: str, **options: Any) -> AsyncIterator[tuple[Server, int, list[int]]]:
    """A service whose job was interrupted by a restart; gives what a reader had before it."""
    limits = WebLimits(heartbeat=0.1)
    service = new_service(store=store, limits=limits, **options)
    seen: list[int] = []
    last = -1
    async with serving(service) as server:
        await server.submit("gated", {"n": COUNT, "gate": "restart"}, job_id="kept")
        async with server.follow("/jobs/kept/stream") as found:
            async for event in found:
                seen += [event.data["value"]] if event.name == "result" else []
                last = event.id if event.id is not None else last
                if len(seen) == COUNT // 2:
                    break
    async with serving(service) as server:
        yield server, last, seen


async def resume_here(server: Server, _store: str) -> None:
    assert (await server.client.post("/jobs/kept/resume")).status_code == 202
    gates["restart"].set()


async def resume_elsewhere(server: Server, store: str) -> None:
    async with inline(store=store) as other:
        job = await other.resume("kept")
        gates["restart"].set()
        assert await job is JobStatus.FINISHED


@pytest.mark.parametrize("resume", [resume_here, resume_elsewhere])
async def test_a_stream_goes_on_when_an_interrupted_job_is_resumed(store: str, resume: Any) -> None:
    async with restarted(store) as (server, last, seen):
        headers = {"last-event-id": str(last)}
        async with server.client.stream("GET", "/jobs/kept/stream", headers=headers) as response:
            assert response.status_code == 200
            found = events(response)
            names, ids = [], []
            async for event in found:
                if event.name == ":":
                    continue
                names.append(event.name)
                ids += [] if event.id is None else [event.id]
                if event.name == "interrupted":
                    assert event.data == {"event": "interrupted", "offset": max([last, *ids]), "status": "interrupted"}
                    await resume(server, store)
                if event.name == "result":
                    seen.append(event.data["value"])
    assert names[-1] == "end"
    assert names.count("interrupted") == 1
    assert ids == [*range(last + 1, ids[-1] + 1), ids[-1]]
    assert sorted(seen) == [*range(COUNT)]


async def test_activity_of_a_resumed_job_comes_on_the_stream_that_is_open(store: str) -> None:
    async with restarted(store) as (server, _, _):
        async with server.client.stream("GET", "/jobs/kept/stream?activity=true") as response:
            totals = {}
            async for event in events(response):
                if event.name == "interrupted":
                    await resume_here(server, store)
                if event.name == "activity":
                    totals = {node["node"]: node["done"] for node in event.data["nodes"]}
        assert totals == {"gated#0": 1}


async def test_a_socket_goes_on_when_an_interrupted_job_is_resumed(store: str) -> None:
    async with restarted(store) as (server, last, seen):
        uri = f"ws://localhost:{server.port}/dfm/jobs/kept/socket?after={last}"
        async with connect(uri, host="127.0.0.1") as socket:
            async for text in socket:
                message = json.loads(text)
                if message["event"] == "interrupted":
                    await resume_here(server, store)
                elif message["event"] == "result":
                    seen.append(message["value"])
        assert message["event"] == "end"
        assert sorted(seen) == [*range(COUNT)]


async def test_a_page_of_events_of_an_interrupted_job_is_not_the_last_one(store: str) -> None:
    async with restarted(store) as (server, last, seen):
        page = (await server.client.get(f"/jobs/kept/events?after={last}")).json()
        assert (page["ended"], page["status"]) == (False, "interrupted")
        waiting = asyncio.create_task(server.client.get(f"/jobs/kept/events?wait=20&after={page['next']}"))
        await server.streams(1)
        await resume_here(server, store)
        page = (await waiting).json()
        while not page["ended"]:
            seen += [event["value"] for event in page["events"] if event["event"] == "result"]
            page = (await server.client.get(f"/jobs/kept/events?wait=5&after={page['next']}")).json()
        seen += [event["value"] for event in page["events"] if event["event"] == "result"]
        assert sorted(seen) == [*range(COUNT)]


async def test_a_stream_ends_when_its_interrupted_job_is_forgotten(store: str) -> None:
    async with restarted(store) as (server, _, _):
        async with server.follow("/jobs/kept/stream") as found:
            async for event in found:
                if event.name == "interrupted":
                    assert (await server.client.delete("/jobs/kept")).status_code == 204
        assert event.name == "drain"


async def test_a_service_resumes_interrupted_jobs_when_it_starts(store: str, caplog: pytest.LogCaptureFixture) -> None:
    more = Federation("more")
    lab = more.site("lab")
    lab.operation(square)

    @lab.operation
    async def gone(x: int) -> int:
        await asyncio.Event().wait()
        return x

    async def unfinished() -> AsyncIterator[dict[str, int]]:
        yield {"x": 1}
        await asyncio.Event().wait()

    async with Session(more, target="inline", store=store) as session:
        await session.execute(pipeline_of(gone, "x"), {"x": 1}, job_id="not offered")
        fed_job = await session.execute(PIPELINES["squares"], unfinished(), job_id="not fed")
        await fed_job.first()
    async with restarted(store, resume=True) as (server, last, seen):
        gates["restart"].set()
        async with server.follow("/jobs/kept/stream", headers={"last-event-id": str(last)}) as found:
            seen += [event.data["value"] async for event in found if event.name == "result"]
        assert seen == list(range(COUNT))
        for job_id in ("not offered", "not fed"):
            assert (await server.client.get(f"/jobs/{job_id}")).json()["status"] == "interrupted"
            assert f"job {job_id} stays interrupted: " in caplog.text
        assert (await server.client.get("/ready")).status_code == 200


async def test_a_service_that_ends_while_it_resumes_jobs_leaves_the_rest_interrupted(store: str) -> None:
    options = LocalOptions(max_concurrent_jobs=1, queue_limit=1)
    async with inline(store=store) as session:
        for number in range(5):
            await session.execute(PIPELINES["endless"], job_id=f"{number}")
    async with serving(new_service(store=store, options=options, resume=True)) as server:
        async with server.follow("/jobs/0/stream") as found:
            async for event in found:
                if event.name == "status" and event.data["status"] == "running":
                    break
    async with inline(store=store) as session:
        assert {job.job_id: job.status for job in session.jobs()} == {
            f"{number}": JobStatus.INTERRUPTED for number in range(5)
        }


async def test_a_service_without_a_store_cannot_resume_jobs() -> None:
    with pytest.raises(ValueError, match=r"resume=True\) needs a session with a store"):
        async with new_service(resume=True).lifespan():
            pass
