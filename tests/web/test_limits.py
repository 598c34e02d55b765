"""What clients may have at most, and what happens to those who want more."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from dfm_async import JobStatus
from dfm_async.web import WebLimits
from tests.web.rig import STREAM, Server, all_events, new_service, refusal, rest_of, serving, unread

JSON = {"content-type": "application/json"}


async def test_large_body_is_refused_also_without_content_length() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 1000

    async with serving(new_service(body_bytes=10_000)) as server:
        announced = await server.client.post("/pipelines/squares/jobs", content=b" " * 10_001, headers=JSON)
        assert (announced.status_code, announced.json()["error"]) == (413, "size")
        unannounced = await server.client.post("/pipelines/squares/jobs", content=chunks(), headers=JSON)
        assert (unannounced.status_code, unannounced.json()["error"]) == (413, "size")
        assert unannounced.headers["connection"] == "close"  # the rest of an endless body is not received
        fits = json.dumps({"params": {"x": 3}}).encode().ljust(10_000)
        assert (await server.client.post("/pipelines/squares/jobs", content=fits, headers=JSON)).status_code == 201


@pytest.mark.parametrize("depth", [21, 100_000])
async def test_json_that_is_too_deep_is_refused(depth: int) -> None:
    async with serving(new_service(json_depth=20)) as server:
        body = b'{"params": {"x": ' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"}}"
        found = await server.client.post("/pipelines/squares/jobs", content=body, headers=JSON)
        assert (found.status_code, found.json()["error"]) == (422, "depth")


async def test_running_jobs_of_a_principal_are_limited() -> None:
    async with serving(new_service(jobs_per_principal=2)) as server:
        first = await server.submit("endless")
        await server.submit("endless")
        found = await server.client.post("/pipelines/endless/jobs", json={})
        assert (found.status_code, found.json()["error"]) == (429, "jobs")
        assert int(found.headers["retry-after"]) > 0
        await server.client.post(f"/jobs/{first}/cancel")
        assert (await server.client.post("/pipelines/endless/jobs", json={})).status_code == 201


async def test_simultaneous_submissions_count_too() -> None:
    async with serving(new_service(jobs_per_principal=5)) as server:
        sent = [server.client.post("/pipelines/endless/jobs", json={}) for _ in range(12)]
        found = [response.status_code for response in await asyncio.gather(*sent)]
        assert (found.count(201), found.count(429)) == (5, 7)


@pytest.mark.parametrize("limits", [{"streams": 2}, {"streams_per_principal": 2}])
async def test_open_streams_are_limited(limits: dict[str, float]) -> None:
    async with serving(new_service(**limits)) as server:
        job_id = await server.submit("endless")
        url = f"/jobs/{job_id}/stream"
        async with server.client.stream("GET", url):
            async with server.client.stream("GET", url):
                await server.streams(2)
                assert await refusal(server.client.get(url)) == (429, "streams")
                submission = server.client.post("/pipelines/endless/jobs", json={}, headers=STREAM)
                assert await refusal(submission) == (429, "streams")
            await server.streams(1)
            async with server.client.stream("GET", url) as response:
                assert response.status_code == 200
        assert len(server.session.jobs()) == 1  # what was refused did not begin


async def test_stream_sends_heartbeats_and_a_retry_delay() -> None:
    async with serving(new_service(heartbeat=0.02, retry=1.5)) as server:
        job_id = await server.submit("endless")
        async with server.client.stream("GET", f"/jobs/{job_id}/stream") as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "retry: 1500"
            beats = 0
            async for line in lines:
                beats += line.startswith(":")
                if beats == 3:
                    break


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset, as a machine does that has crashed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


async def test_stalled_reader_is_dropped_and_blocks_no_other() -> None:
    async with serving(new_service(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 4000, "size": 2000})
        async with unread(server, f"/jobs/{job_id}/stream"):
            assert len(await server.results(job_id)) == 4000
            await server.streams(0)
            assert server.service._state.streams.stalled == 1
        assert (await server.finished(job_id)).status is JobStatus.FINISHED


async def test_a_reader_whose_connection_breaks_is_noticed_at_once(server: Server) -> None:
    job_id = await server.submit("endless")
    async with unread(server, f"/jobs/{job_id}/stream") as broken:
        await server.streams(1)
        reset(broken)
        await server.streams(0)
    assert (await server.client.get(f"/jobs/{job_id}")).json()["status"] == "running"


@pytest.mark.parametrize("how", ["breaks", "takes nothing"])
async def test_a_job_can_end_with_a_reader_that_is_lost(how: str) -> None:
    async with serving(new_service(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 4000, "size": 2000}, open=True)
        async with unread(server, f"/jobs/{job_id}/stream?on_disconnect=cancel") as lost:
            await server.streams(1)
            if how == "breaks":
                reset(lost)
            job = await asyncio.wait_for(server.finished(job_id), 20)
        assert (job.status, job.info().reason) == (JobStatus.ABORTED, "the reader of its stream has gone")


async def test_dropped_reader_resumes_at_its_offset() -> None:
    async with serving(new_service(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 3000, "size": 2000})
        async with unread(server, f"/jobs/{job_id}/stream") as stuck:
            await server.streams(1)
            await server.streams(0)
            data = await rest_of(stuck)
        ids = [int(line[4:]) for line in data.split(b"\n") if line.startswith(b"id: ") and line[4:].isdigit()]
        assert 0 < len(ids) < 3000
        whole = ids[-2]  # the last may have been cut
        rest = await all_events(server.client, f"/jobs/{job_id}/stream", headers={"last-event-id": str(whole)})
        assert rest[0].id == whole + 1
        assert [event.id for event in rest[:-1]] == list(range(whole + 1, rest[-1].data["offset"] + 1))


@pytest.mark.parametrize("wrong", [{"streams": 0}, {"stall": -1.0}, {"body_bytes": "many"}, {"page_size": True}])
def test_invalid_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        WebLimits(**wrong)  # type: ignore[arg-type]
