"""Events over WebSockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dfm_async import JobStatus
from tests.support.waiting import PROMPT
from tests.web.rig import Server, all_events, new_service, serving


def to(server: Server, job_id: str, query: str = "", **options: Any) -> connect:
    return connect(f"ws://localhost:{server.port}/dfm/jobs/{job_id}/socket{query}", host="127.0.0.1", **options)


async def said(socket: ClientConnection) -> list[dict[str, Any]]:
    found = []
    try:
        while True:
            found.append(json.loads(await socket.recv()))
    except ConnectionClosed:
        return found


async def test_a_socket_gives_the_same_records_as_a_stream(server: Server) -> None:
    job_id = await server.submit("counting", {"n": 20})
    async with to(server, job_id) as socket:
        found = await said(socket)
        assert socket.close_code == 1000
    streamed = await all_events(server.client, f"/jobs/{job_id}/stream")
    assert found == [event.data for event in streamed]
    async with to(server, job_id, "?after=5") as socket:
        assert (await said(socket))[0]["offset"] == 6


async def test_socket_reports_its_offset_when_the_service_drains(server: Server) -> None:
    job_id = await server.submit("endless")
    async with to(server, job_id) as socket:
        first = json.loads(await socket.recv())
        await server.service.drain()
        assert await said(socket) == [{"event": "drain", "offset": first["offset"], "status": "running"}]
        assert socket.close_code == 1012


@pytest.mark.parametrize("ends", [True, False])
async def test_job_ends_with_its_socket_only_on_request(ends: bool, server: Server) -> None:
    job_id = await server.submit("endless")
    async with to(server, job_id, "?on_disconnect=cancel" if ends else "") as socket:
        await socket.recv()
        await socket.send("what a client says is of no interest")
    job = await server.session.reattach(job_id)
    await server.streams(0)
    if ends:
        await asyncio.wait_for(job.completed.wait(), PROMPT)
    assert job.status is (JobStatus.ABORTED if ends else JobStatus.RUNNING)


async def test_refused_socket_gets_the_http_response_and_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(new_service(streams=1)) as server:
        job_id = await server.submit("endless")

        async def refused(*where: str, **options: Any) -> tuple[int, str]:
            with pytest.raises(InvalidStatus) as caught:
                async with to(server, *where, **options):
                    pass
            response = caught.value.response
            return response.status_code, json.loads(response.body or b"{}")["error"]

        assert await refused("nothing") == (404, "job")
        assert await refused(job_id, "?after=x") == (422, "query")
        assert await refused(job_id, "?before=1") == (400, "query")
        assert await refused(job_id, origin="https://evil.example") == (403, "origin")
        async with to(server, job_id) as socket:
            await socket.recv()
            assert await refused(job_id) == (429, "streams")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_stalled_socket_is_dropped() -> None:
    async with serving(new_service(stall=0.3)) as server:
        job_id = await server.submit("texts", {"n": 6000, "size": 2000})
        async with to(server, job_id, max_queue=1, compression=None) as socket:
            await server.streams(1)
            await server.streams(0)
            assert server.service._state.streams.stalled == 1
            socket.transport.abort()
        assert (await server.finished(job_id)).status is JobStatus.FINISHED


async def test_a_socket_lets_others_run_after_a_few_messages(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    sent, most = 0, 0
    send = WebSocket.send

    async def counted(self: WebSocket, message: Message) -> None:
        nonlocal sent
        sent += message["type"] == "websocket.send"
        await send(self, message)

    async def watch() -> None:
        nonlocal most
        while True:
            before = sent
            await asyncio.sleep(0)
            most = max(most, sent - before)

    monkeypatch.setattr(WebSocket, "send", counted)
    job_id = await server.submit("counting", {"n": 1000})
    await server.finished(job_id)
    watching = asyncio.create_task(watch())
    async with to(server, job_id) as socket:
        found = await said(socket)
    watching.cancel()
    assert len(found) == sent == 1004
    assert 1 <= most <= 16
