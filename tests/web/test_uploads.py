"""Requests with a body: how slow, how many and how large they may be."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

from tests.support.waiting import until
from tests.web.rig import STREAM, Server, Tokens, gates, new_service, serving, wire

URL = "/dfm/pipelines/squares/jobs"
BODY = json.dumps({"params": {"x": 3}}).encode()


async def test_slow_body_is_refused() -> None:
    async with serving(new_service(body_seconds=0.1)) as server, wire(server) as slow:
        await slow.post(URL, BODY[:5], len(BODY))
        found = await slow.answer()
        assert (found.status, found.data["error"], found.headers["connection"]) == (408, "slow", "close")
        assert await slow.ended()
        assert server.service._state.uploads.held == 0


async def test_requests_with_a_body_in_flight_are_limited() -> None:
    service = new_service(uploads_per_principal=2, authorizer=Tokens())
    async with serving(service) as server, wire(server) as first, wire(server) as second:
        for slow in (first, second):
            await slow.post(URL, BODY[:5], len(BODY), authorization="ada")
        await until(lambda: service._state.uploads.held == 10)
        ada, bob = {"authorization": "ada"}, {"authorization": "bob"}
        third = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}}, headers=ada)
        assert (third.status_code, third.json()["error"]) == (429, "uploads")
        assert int(third.headers["retry-after"]) > 0
        other = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}}, headers=bob)
        assert other.status_code == 201
        for slow in (first, second):
            await slow.send(BODY[5:])
            assert (await slow.answer()).status == 201
        again = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}}, headers=ada)
        assert again.status_code == 201


async def test_all_bodies_together_hold_no_more_than_allowed() -> None:
    large = BODY.ljust(90_000)
    async with serving(new_service(upload_bytes=100_000)) as server, wire(server) as slow, wire(server) as late:
        uploads = server.service._state.uploads
        await slow.post(URL, large[:-1], len(large))
        await until(lambda: uploads.held == len(large) - 1)
        await late.post(URL, large)
        found = await late.answer()
        assert (found.status, found.data["error"]) == (503, "uploads")
        assert await server.submit("squares", {"x": 3})  # there is room for small ones
        await slow.send(large[-1:])
        assert (await slow.answer()).status == 201
        assert uploads.held == 0


async def test_one_principal_cannot_keep_others_from_sending() -> None:
    service = new_service(upload_bytes=400_000, body_bytes=60_000, authorizer=Tokens())
    large = BODY.ljust(50_000)
    async with serving(service) as server, AsyncExitStack() as stack:
        held = [await stack.enter_async_context(wire(server)) for _ in range(8)]
        for number, slow in enumerate(held, 1):  # as much as all may hold together
            await slow.post(URL, large[:-1], len(large), authorization="mallory")
            await until(lambda number=number: service._state.uploads.held >= min(number, 2) * (len(large) - 1))  # type: ignore[misc]
        for slow in held[2:]:
            found = await slow.answer()
            assert (found.status, found.data["error"]) == (429, "uploads")
        for _ in range(3):
            ada = await stack.enter_async_context(wire(server))
            await ada.post(URL, large, authorization="ada")
            assert (await ada.answer()).status == 201
        for slow in held[:2]:
            await slow.send(large[-1:])
            assert (await slow.answer()).status == 201
        assert service._state.uploads.held == 0


async def test_submitted_body_is_released_while_its_stream_is_open(server: Server) -> None:
    async with server.client.stream("POST", "/pipelines/endless/jobs", json={}, headers=STREAM):
        await server.streams(1)
        assert server.service._state.uploads.held == 0


async def waiting_job(server: Server, gate: str) -> str:
    """A job that accepts no further parameter sets until its gate is open."""
    gates[gate] = asyncio.Event()
    job_id = await server.submit("gated", None)
    full = [{"n": 1, "gate": gate}] * 512  # 256 of them run, and as many may wait
    assert (await server.client.post(f"/jobs/{job_id}/inputs", json={"params": full})).status_code == 202
    return job_id


async def test_requests_that_wait_for_room_in_a_job_are_limited() -> None:
    async with serving(new_service(inputs_per_job=2)) as server, AsyncExitStack() as stack:
        job_id = await waiting_job(server, "room")
        uploads, body = server.service._state.uploads, {"params": {"n": 1, "gate": "room"}}
        waiting = [await stack.enter_async_context(wire(server)) for _ in range(2)]
        for client in waiting:
            await client.post(f"/dfm/jobs/{job_id}/inputs", json.dumps(body).encode())
        await until(lambda: uploads.waiting(job_id) == 2)
        found = await server.client.post(f"/jobs/{job_id}/inputs", json=body)
        assert (found.status_code, found.json()["error"]) == (429, "inputs")
        assert int(found.headers["retry-after"]) > 0
        other = await server.submit("squares", None)
        assert (await server.client.post(f"/jobs/{other}/inputs", json={"params": {"x": 1}})).status_code == 202
        gates["room"].set()
        assert [(await client.answer()).status for client in waiting] == [202, 202]
        await server.client.post(f"/jobs/{job_id}/finish")
        assert len(await server.results(job_id)) == 514


async def test_inputs_of_a_disconnected_client_are_dropped() -> None:
    async with serving(new_service(inputs_per_job=1)) as server:
        job_id = await waiting_job(server, "left")
        uploads, body = server.service._state.uploads, {"params": {"n": 1, "gate": "left"}}
        async with wire(server) as leaving:
            await leaving.post(f"/dfm/jobs/{job_id}/inputs", json.dumps(body).encode())
            await until(lambda: uploads.waiting(job_id) == 1)
        await until(lambda: uploads.waiting(job_id) == 0 and uploads.held == 0)
        gates["left"].set()
        last = await server.client.post(f"/jobs/{job_id}/inputs", json={**body, "last": True})
        assert last.status_code == 202
        assert len(await server.results(job_id)) == 513


async def test_rest_of_an_unneeded_body_is_not_read() -> None:
    async with serving(new_service()) as server, wire(server) as client:
        await client.post("/dfm/pipelines/nothing/jobs", BODY[:5], 1000)
        found = await client.answer()
        assert (found.status, found.headers["connection"]) == (404, "close")
        assert await client.ended()
