"""What clients may have at most, and what happens to those who want more."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from dfm_async import JobStatus
from dfm_async.web import AllowAnyone, Service, WebLimits
from tests.web.rig import PIPELINES, Server, all_events, inline, serving

JSON = {"content-type": "application/json"}


def limited(**limits: float) -> Service:
    return Service(session=inline, pipelines=PIPELINES, limits=WebLimits(**limits), authorizer=AllowAnyone())  # type: ignore[arg-type]


async def test_a_body_that_is_too_large_is_refused_also_if_its_size_is_not_told() -> None:
    async def untold_size() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 1000

    async with serving(limited(body_bytes=10_000)) as server:
        told = await server.client.post("/pipelines/squares/jobs", content=b" " * 10_001, headers=JSON)
        assert (told.status_code, told.json()["error"]) == (413, "size")
        untold = await server.client.post("/pipelines/squares/jobs", content=untold_size(), headers=JSON)
        assert (untold.status_code, untold.json()["error"]) == (413, "size")
        assert untold.headers["connection"] == "close"  # whoever sends without end is not listened to
        fits = json.dumps({"params": {"x": 3}}).encode().ljust(10_000)
        assert (await server.client.post("/pipelines/squares/jobs", content=fits, headers=JSON)).status_code == 201


@pytest.mark.parametrize("depth", [21, 100_000])
async def test_json_that_is_too_deep_is_refused(depth: int) -> None:
    async with serving(limited(json_depth=20)) as server:
        body = b'{"params": {"x": ' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"}}"
        found = await server.client.post("/pipelines/squares/jobs", content=body, headers=JSON)
        assert (found.status_code, found.json()["error"]) == (422, "depth")


async def test_nobody_has_more_jobs_under_way_than_allowed() -> None:
    async with serving(limited(jobs_per_principal=2)) as server:
        first = await server.submit("endless")
        await server.submit("endless")
        found = await server.client.post("/pipelines/endless/jobs", json={})
        assert (found.status_code, found.json()["error"]) == (429, "jobs")
        assert int(found.headers["retry-after"]) > 0
        await server.client.post(f"/jobs/{first}/cancel")
        assert (await server.client.post("/pipelines/endless/jobs", json={})).status_code == 201


async def test_jobs_that_are_submitted_at_the_same_time_count_as_well() -> None:
    async with serving(limited(jobs_per_principal=5)) as server:
        sent = [server.client.post("/pipelines/endless/jobs", json={}) for _ in range(12)]
        found = [response.status_code for response in await asyncio.gather(*sent)]
        assert (found.count(201), found.count(429)) == (5, 7)


@pytest.mark.parametrize("limits", [{"streams": 2}, {"streams_per_principal": 2}])
async def test_there_are_no_more_streams_than_allowed(limits: dict[str, float]) -> None:
    async with serving(limited(**limits)) as server:
        job_id = await server.submit("endless")
        url = f"/jobs/{job_id}/stream"
        async with server.client.stream("GET", url):
            async with server.client.stream("GET", url):
                await server.streams(2)
                found = await server.client.get(url)
                assert (found.status_code, found.json()["error"]) == (429, "streams")
                submitted = await server.client.post(
                    "/pipelines/endless/jobs", json={}, headers={"accept": "text/event-stream"}
                )
                assert submitted.status_code == 429
            await server.streams(1)
            async with server.client.stream("GET", url) as response:
                assert response.status_code == 200
        assert len(server.session.jobs()) == 1  # what was refused did not begin


async def test_a_stream_says_that_it_is_alive_and_when_to_come_back() -> None:
    async with serving(limited(heartbeat=0.02, retry=1.5)) as server:
        job_id = await server.submit("endless")
        async with server.client.stream("GET", f"/jobs/{job_id}/stream") as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "retry: 1500"
            beats = 0
            async for line in lines:
                beats += line.startswith(":")
                if beats == 3:
                    break


async def raw_reader(server: Server, stream: str) -> socket.socket:
    """A client that asks for a stream and then reads nothing; the kernel takes little for it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(found, ("127.0.0.1", server.port))
    await loop.sock_sendall(found, f"GET /dfm/jobs/{stream} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return found


async def test_a_reader_that_takes_nothing_is_dropped_and_holds_nobody_up() -> None:
    async with serving(limited(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 4000, "size": 2000})
        stuck = await raw_reader(server, f"{job_id}/stream")
        try:
            found = await all_events(server.client, f"/jobs/{job_id}/stream")
            assert sum(event.name == "result" for event in found) == 4000
            await server.streams(0)
            assert server.service._state.streams.stalled == 1
        finally:
            stuck.close()
        job = await server.session.reattach(job_id)
        assert await job is JobStatus.FINISHED


async def test_a_reader_whose_connection_breaks_is_noticed_at_once() -> None:
    async with serving(limited()) as server:
        job_id = await server.submit("endless")
        broken = await raw_reader(server, f"{job_id}/stream")
        await server.streams(1)
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        broken.close()  # with a reset, as from a machine that has lost its mind
        await server.streams(0)
        assert (await server.client.get(f"/jobs/{job_id}")).json()["status"] == "running"


@pytest.mark.parametrize("how", ["breaks", "takes nothing"])
async def test_a_job_can_end_with_a_reader_that_is_lost(how: str) -> None:
    async with serving(limited(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 4000, "size": 2000}, open=True)
        lost = await raw_reader(server, f"{job_id}/stream?on_disconnect=cancel")
        await server.streams(1)
        if how == "breaks":
            lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            lost.close()
        job = await server.session.reattach(job_id)
        await asyncio.wait_for(job.completed.wait(), 20)
        assert (job.status, job.info().reason) == (JobStatus.ABORTED, "the reader of its stream has gone")
        lost.close()


async def test_a_dropped_reader_can_go_on_where_it_was() -> None:
    async with serving(limited(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 3000, "size": 2000})
        stuck = await raw_reader(server, f"{job_id}/stream")
        await server.streams(1)
        await server.streams(0)
        loop = asyncio.get_running_loop()
        data = b""
        while part := await asyncio.wait_for(loop.sock_recv(stuck, 1 << 20), 10):
            data += part
        stuck.close()
        ids = [int(line[4:]) for line in data.split(b"\n") if line.startswith(b"id: ") and line[4:].isdigit()]
        assert 0 < len(ids) < 3000
        whole = ids[-2]  # the last may have been cut
        rest = await all_events(server.client, f"/jobs/{job_id}/stream", headers={"last-event-id": str(whole)})
        assert rest[0].id == whole + 1
        assert [event.id for event in rest[:-1]] == list(range(whole + 1, rest[-1].data["offset"] + 1))


@pytest.mark.parametrize("wrong", [{"streams": 0}, {"stall": -1.0}, {"body_bytes": "many"}, {"page_size": True}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        WebLimits(**wrong)  # type: ignore[arg-type]
