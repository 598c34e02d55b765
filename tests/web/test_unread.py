"""Clients that do not read what they have asked for: what the server holds for them, and for how long they count."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from dfm_async.web import AllowAnyone, Service, WebLimits
from dfm_async.web.records import LogRecords
from tests.web.rig import PIPELINES, Server, events, inline, serving

KIB = 1024
SIZE = 3_000_000
"""How large a result is: far more than a server may buffer for a client."""
READERS = 6
BUFFERED = 512 * KIB
"""The most that a server may hold for one client, besides what the kernel buffers."""


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET /dfm{path} HTTP/1.1", "host: localhost", *lines, "", ""]).encode()


def stream(job_id: str) -> bytes:
    return head(f"/jobs/{job_id}/stream", "connection: close")


def page(job_id: str) -> bytes:
    return head(f"/jobs/{job_id}/events?limit=100")


def websocket(job_id: str) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = ("upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13", f"sec-websocket-key: {key}")
    return head(f"/jobs/{job_id}/socket", *upgrade)


@asynccontextmanager
async def unread(server: Server, request: bytes, window: int = 4096) -> AsyncIterator[socket.socket]:
    """A connection that sends a request, and reads nothing."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        found.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(found, ("127.0.0.1", server.port))
        await loop.sock_sendall(found, request)
        yield found


def buffered(server: Server) -> int:
    """The bytes that the server holds for the client that it holds most for."""
    connections = server.uvicorn.server_state.connections
    return max(connection.transport.get_write_buffer_size() for connection in connections)


async def until(reached: Callable[[], bool]) -> None:
    """Wait for a state of the server that nothing notifies."""
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110 - what a server has buffered has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def large_job(**limits: float) -> AsyncIterator[tuple[Server, str]]:
    service = Service(
        session=inline,
        pipelines=PIPELINES,
        limits=WebLimits(streams_per_principal=READERS, **limits),  # type: ignore[arg-type]
        authorizer=AllowAnyone(),
    )
    async with serving(service) as server:
        job_id = await server.submit("texts", {"n": 4, "size": SIZE})
        await (await server.session.reattach(job_id)).wait_until_finished()
        yield server, job_id


@pytest.mark.parametrize("request_of", [stream, page, websocket])
async def test_clients_that_read_nothing_keep_their_seats_and_little_memory(
    request_of: Callable[[str], bytes],
) -> None:
    async with large_job(stall=0.3) as (server, job_id):
        streams = server.service._state.streams
        job = job_id
        if request_of is websocket:  # its messages are short: there must be many
            job = await server.submit("texts", {"n": 3000, "size": 4000})
            await (await server.session.reattach(job)).wait_until_finished()
        async with AsyncExitStack() as stack:
            for _ in range(READERS):
                await stack.enter_async_context(unread(server, request_of(job)))
            await until(lambda: streams.stalled == READERS)
            assert len(streams) == 0, "nobody reads the job any more"
            assert streams.seats == READERS, "the server still has their connections"
            assert buffered(server) < BUFFERED
            for path in (f"/jobs/{job_id}/stream", f"/jobs/{job_id}/events"):
                refused = await server.client.get(path)
                assert (refused.status_code, refused.json()["error"]) == (429, "streams")
            assert (await server.client.get(f"/jobs/{job_id}")).status_code == 200
        await until(lambda: streams.seats == 0)
        assert (await server.client.get(f"/jobs/{job_id}/events?limit=1")).status_code == 200


async def test_a_client_that_reads_again_gets_the_end_of_its_stream() -> None:
    async with large_job(stall=0.3) as (server, job_id):
        streams = server.service._state.streams
        async with unread(server, stream(job_id), 1 << 20) as stuck:
            await until(lambda: streams.stalled == 1)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(20):
                data = b""
                while part := await loop.sock_recv(stuck, 1 << 20):
                    data += part
            assert 0 < len(data) < 4 * SIZE
            await until(lambda: streams.seats == 0)


async def test_seats_of_clients_that_read_nothing_do_not_hold_up_a_drain() -> None:
    async with large_job(stall=0.2) as (server, job_id):
        streams = server.service._state.streams
        async with unread(server, stream(job_id)):
            await until(lambda: streams.stalled == 1)
            async with asyncio.timeout(5):
                await server.service.drain()
                await until(lambda: streams.seats == 0)


async def test_records_are_made_when_they_are_written_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    encode = LogRecords._encode

    def counted(self: LogRecords, event: object, values: object) -> bytes:
        found = encode(self, event, values)  # type: ignore[arg-type]
        made.append(len(found))
        return found

    monkeypatch.setattr(LogRecords, "_encode", counted)
    async with large_job() as (server, job_id), AsyncExitStack() as stack:
        for _ in range(READERS):
            await stack.enter_async_context(unread(server, stream(job_id)))
        await until(lambda: len(server.service._state.streams) == READERS)
        await until(lambda: buffered(server) > 0)
        log = (await server.session.reattach(job_id)).events().attach().log
        held = list(server.service._state.records.of(log, True)._large.values())
        assert 1 <= len(held) <= 2, "readers share the records that they are at, and none is made ahead"
        assert len([size for size in made if size >= SIZE]) <= 2 * READERS


async def test_a_large_page_is_one_json_document() -> None:
    async with large_job() as (server, job_id):
        found = (await server.client.get(f"/jobs/{job_id}/events")).json()
        assert [event["event"] for event in found["events"]] == ["status", "result", "result"], "up to record_bytes"
        rest = (await server.client.get(f"/jobs/{job_id}/events?after={found['next']}")).json()
        last = (await server.client.get(f"/jobs/{job_id}/events?after={rest['next']}")).json()
        whole = [*found["events"], *rest["events"], *last["events"]]
        assert [event["offset"] for event in whole] == list(range(len(whole)))
        assert last["ended"]
        assert {len(event["value"]) for event in whole if event["event"] == "result"} == {SIZE + 2}


async def test_a_large_value_is_told_in_short_over_a_socket() -> None:
    from websockets.asyncio.client import connect

    async with large_job() as (server, job_id):
        uri = f"ws://localhost:{server.port}/dfm/jobs/{job_id}/socket"
        async with connect(uri, host="127.0.0.1") as client:
            messages = [message async for message in client]
        assert max(map(len, messages)) < 300 * KIB
        assert sum('"omitted":true' in str(message) for message in messages) == 4


async def test_large_activity_and_records_are_not_mixed_on_one_stream() -> None:
    """Two tasks write to one connection: each event comes whole."""
    async with large_job() as (server, job_id):
        async with server.client.stream("GET", f"/jobs/{job_id}/stream?activity=true") as response:
            names = [event.name async for event in events(response)]
        assert names.count("result") == 4
        assert "activity" in names


async def test_a_few_principals_cannot_take_all_streams() -> None:
    from tests.web.test_access import Tokens

    limits = WebLimits(streams=20, streams_per_principal=18)
    service = Service(session=inline, pipelines=PIPELINES, limits=limits, authorizer=Tokens())
    async with serving(service) as server, AsyncExitStack() as stack:

        async def opened(name: str, number: int) -> list[int]:
            found = []
            for _ in range(number):
                request = server.client.stream("GET", "/stream", headers={"authorization": name})
                response: httpx.Response = await stack.enter_async_context(request)
                found.append(response.status_code)
            return found

        assert (await opened("mallory", 20)).count(200) == 18
        assert await opened("ada", 1) == [200]
        assert await opened("bob", 1) == [200]
