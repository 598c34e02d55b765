"""Clients that do not read what they have asked for: what the server holds for them, and for how long they count."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest

from dfm_async.web.records import LogRecords
from tests.support.waiting import PROMPT, until
from tests.web.rig import Server, Tokens, all_events, new_service, refusal, rest_of, serving, unread

KIB = 1024
SIZE = 3_000_000
"""How large a result is: far more than a server may buffer for a client."""
READERS = 6
BUFFERED = 512 * KIB
"""The most that a server may hold for one client, besides what the kernel buffers."""
KEY = base64.b64encode(bytes(16)).decode()
UPGRADE = ("upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13", f"sec-websocket-key: {KEY}")
"""The headers of a WebSocket."""


def buffered(server: Server) -> int:
    """The bytes that the server holds for the client that it holds most for."""
    connections = server.uvicorn.server_state.connections
    return max(connection.transport.get_write_buffer_size() for connection in connections)


@asynccontextmanager
async def large_job(**limits: float) -> AsyncIterator[tuple[Server, str]]:
    async with serving(new_service(streams_per_principal=READERS, **limits)) as server:
        job_id = await server.submit("texts", {"n": 4, "size": SIZE})
        await server.finished(job_id)
        yield server, job_id


@pytest.mark.parametrize("path", ["stream", "events?limit=100", "socket"])
async def test_stalled_clients_keep_their_slots_and_little_memory(path: str) -> None:
    async with large_job(stall=0.3) as (server, job_id):
        streams = server.service._state.streams
        job = job_id
        if path == "socket":  # its messages are short: there must be many
            job = await server.submit("texts", {"n": 3000, "size": 4000})
            await server.finished(job)
        async with AsyncExitStack() as stack:
            for _ in range(READERS):
                upgrade = UPGRADE if path == "socket" else ()
                await stack.enter_async_context(unread(server, f"/jobs/{job}/{path}", *upgrade))
            await until(lambda: streams.stalled == READERS)
            assert len(streams) == 0, "nobody reads the job any more"
            assert streams.slots == READERS, "the server still has their connections"
            assert buffered(server) < BUFFERED
            for other in ("stream", "events"):
                assert await refusal(server.client.get(f"/jobs/{job_id}/{other}")) == (429, "streams")
            assert (await server.client.get(f"/jobs/{job_id}")).status_code == 200
        await until(lambda: streams.slots == 0)
        assert (await server.client.get(f"/jobs/{job_id}/events?limit=1")).status_code == 200


async def test_a_client_that_reads_again_gets_the_end_of_its_stream() -> None:
    async with large_job(stall=0.3) as (server, job_id):
        streams = server.service._state.streams
        async with unread(server, f"/jobs/{job_id}/stream", "connection: close", window=1 << 20) as stuck:
            await until(lambda: streams.stalled == 1)
            assert 0 < len(await rest_of(stuck)) < 4 * SIZE
            await until(lambda: streams.slots == 0)


async def test_slots_of_stalled_clients_do_not_delay_a_drain() -> None:
    async with large_job(stall=0.2) as (server, job_id):
        streams = server.service._state.streams
        async with unread(server, f"/jobs/{job_id}/stream"):
            await until(lambda: streams.stalled == 1)
            async with asyncio.timeout(PROMPT):
                await server.service.drain()
                await until(lambda: streams.slots == 0)


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
            await stack.enter_async_context(unread(server, f"/jobs/{job_id}/stream"))
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


async def test_large_value_is_summarised_over_a_socket() -> None:
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
        names = [event.name for event in await all_events(server.client, f"/jobs/{job_id}/stream?activity=true")]
        assert names.count("result") == 4
        assert "activity" in names


async def test_a_few_principals_cannot_take_all_streams() -> None:
    async with (
        serving(new_service(streams=20, streams_per_principal=18, authorizer=Tokens())) as server,
        AsyncExitStack() as stack,
    ):

        async def opened(name: str, number: int) -> list[int]:
            found = []
            for _ in range(number):
                request = server.client.stream("GET", "/stream", headers={"authorization": name})
                response: httpx2.Response = await stack.enter_async_context(request)
                found.append(response.status_code)
            return found

        assert (await opened("mallory", 20)).count(200) == 18
        assert await opened("ada", 1) == [200]
        assert await opened("bob", 1) == [200]
