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

from dfm_async import JobStatus
from dfm_async.web import WebLimits
from tests.web.rig import Server, events, gates, inline, new_service, serving

COUNT = 6


@pytest.fixture
def store(tmp_path: Path) -> str:
    gates["restart"] = asyncio.Event()
    return f"sqlite:///{tmp_path}/jobs.db"


@asynccontextmanager
async def restarted(store: str) -> AsyncIterator[tuple[Server, int, list[int]]]:
    """A service whose job was interrupted by a restart; gives what a reader had before it."""
    limits = WebLimits(heartbeat=0.1)
    service = new_service(store=store, limits=limits)
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
