"""Requests with a body: how slow, how many and how large they may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from dfm_async.web import AllowAnyone, Service, WebLimits
from dfm_async.web.uploads import Uploads
from tests.web.rig import PIPELINES, Server, all_events, gates, inline, serving, wire
from tests.web.test_access import Tokens

URL = "/dfm/pipelines/squares/jobs"
BODY = json.dumps({"params": {"x": 3}}).encode()


def limited(**limits: float) -> Service:
    return Service(session=inline, pipelines=PIPELINES, limits=WebLimits(**limits), authorizer=AllowAnyone())  # type: ignore[arg-type]


class Watched(Uploads):
    """Tells when something has changed."""

    changed = asyncio.Event()

    def hold(self, who: str, size: int) -> None:
        super().hold(who, size)
        self._tell()

    def leave(self, who: str, size: int) -> None:
        super().leave(who, size)
        self._tell()

    def wait_for_job(self, job_id: str) -> None:
        super().wait_for_job(job_id)
        self._tell()

    def _tell(self) -> None:
        changed, Watched.changed = Watched.changed, asyncio.Event()
        changed.set()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.web.state.Uploads", Watched)


async def until(reached: Callable[[], bool]) -> None:
    """Waits for what the service does with bytes that are on their way."""
    async with asyncio.timeout(20):
        while not reached():
            await Watched.changed.wait()


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with serving(limited(body_seconds=0.1)) as server, wire(server) as slow:
        await slow.post(URL, BODY[:5], len(BODY))
        found = await slow.answer()
        assert (found.status, found.data["error"], found.headers["connection"]) == (408, "slow", "close")
        assert await slow.ended()
        assert server.service._state.uploads.held == 0


async def test_nobody_has_more_requests_with_a_body_under_way_than_allowed() -> None:
    limits = WebLimits(uploads_per_principal=2)
    service = Service(session=inline, pipelines=PIPELINES, limits=limits, authorizer=Tokens())
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
    async with serving(limited(upload_bytes=100_000)) as server, wire(server) as slow, wire(server) as late:
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
    limits = WebLimits(upload_bytes=400_000, body_bytes=60_000)
    service = Service(session=inline, pipelines=PIPELINES, limits=limits, authorizer=Tokens())
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


async def test_what_was_submitted_is_not_held_while_its_stream_is_open() -> None:
    async with serving(limited()) as server:
        headers = {"accept": "text/event-stream"}
        async with server.client.stream("POST", "/pipelines/endless/jobs", json={}, headers=headers):
            await server.streams(1)
            assert server.service._state.uploads.held == 0


async def waiting_job(server: Server, gate: str) -> str:
    """A job that takes no further parameter sets until its gate is open."""
    gates[gate] = asyncio.Event()
    job_id = await server.submit("gated", None)
    full = [{"n": 1, "gate": gate}] * 512  # 256 of them are under way, and so many may wait
    assert (await server.client.post(f"/jobs/{job_id}/inputs", json={"params": full})).status_code == 202
    return job_id


async def test_only_so_many_requests_wait_until_a_job_has_room() -> None:
    async with serving(limited(inputs_per_job=2)) as server, AsyncExitStack() as stack:
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
        results = await all_events(server.client, f"/jobs/{job_id}/stream")
        assert sum(event.name == "result" for event in results) == 514


async def test_parameter_sets_of_a_client_that_has_left_are_not_waited_for() -> None:
    async with serving(limited(inputs_per_job=1)) as server:
        job_id = await waiting_job(server, "left")
        uploads, body = server.service._state.uploads, {"params": {"n": 1, "gate": "left"}}
        async with wire(server) as leaving:
            await leaving.post(f"/dfm/jobs/{job_id}/inputs", json.dumps(body).encode())
            await until(lambda: uploads.waiting(job_id) == 1)
        await until(lambda: uploads.waiting(job_id) == 0 and uploads.held == 0)
        gates["left"].set()
        last = await server.client.post(f"/jobs/{job_id}/inputs", json={**body, "last": True})
        assert last.status_code == 202
        found = await all_events(server.client, f"/jobs/{job_id}/stream")
        assert sum(event.name == "result" for event in found) == 513


async def test_the_rest_of_a_body_that_nobody_wants_is_not_taken() -> None:
    async with serving(limited()) as server, wire(server) as client:
        await client.post("/dfm/pipelines/nothing/jobs", BODY[:5], 1000)
        found = await client.answer()
        assert (found.status, found.headers["connection"]) == (404, "close")
        assert await client.ended()
