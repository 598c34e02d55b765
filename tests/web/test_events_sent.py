"""Sending events to jobs whose pipelines wait for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import pytest

from dfm_async import Federation, JobStatus, ParameterError, Pipeline, ResultLimits, Session, Wait, Yield
from dfm_async.client import Client
from dfm_async.errors import EventsFull, ServiceError
from dfm_async.web import AllowAnyone, Service
from tests.web.rig import Server, Tokens, all_events, client_of, refusal, serving

fed = Federation("approvals")
fed.site("lab")

with Pipeline("approvals") as approvals:
    Yield(Wait("approval/of it", bool, timeout=3600))
    Yield(Wait("choice", Literal["a", "b"]), place="choice")


def new_service(store: str | None = None, **given: Any) -> Service:
    options = {"pipelines": {"approvals": approvals}, "authorizer": AllowAnyone(), **given}
    return Service(session=lambda: Session(fed, target="inline", store=store), **options)


async def waiting(server: Server, job_id: str) -> None:
    """Wait until two statements of a job wait."""
    job = await server.session.reattach(job_id)
    async for info in job.changes(interval=0):
        if len(info.waits) == 2:
            return


async def test_events_are_sent_by_post() -> None:
    async with serving(new_service()) as server:
        job_id = await server.submit("approvals", {})
        await waiting(server, job_id)
        info = (await server.client.get(f"/jobs/{job_id}")).json()
        assert info["events_awaited"]["choice"] == {"enum": ["a", "b"], "type": "string"}
        assert [(wait["name"], wait["frame"], wait["node"]) for wait in info["waits"]] == [
            ("approval/of it", [0], "Wait#0"),
            ("choice", [0], "Wait#2"),
        ]
        assert info["waits"][1]["until"] is None
        assert info["waits_for"] == "the event 'approval/of it'; the event 'choice'"
        path = f"/jobs/{job_id}/events"
        response = await server.client.post(f"{path}/approval%2Fof%20it", json={"value": True})
        assert response.status_code == 202
        assert [wait["name"] for wait in response.json()["waits"]] == ["choice"]
        response = await server.client.post(f"{path}/choice", json={"value": "c"})
        assert response.status_code == 422
        assert "not 'c'" in response.json()["problems"][0]
        assert await refusal(server.client.post(f"{path}/other", json={"value": 1})) == (422, "parameters")
        assert await refusal(server.client.post(f"{path}/choice", json={"values": 1})) == (422, "body")
        assert await refusal(server.client.post(f"{path}/choice", json={"value": "a", "frame": 1})) == (
            422,
            "parameters",
        )
        assert (await server.client.post(f"{path}/choice", json={"value": "a", "frame": 0.0})).status_code == 202
        found = await all_events(server.client, f"/jobs/{job_id}/stream")
        assert {event.data["place"]: event.data["value"] for event in found if event.name == "result"} == {
            "yield": True,
            "choice": "a",
        }
        (sent, _) = [event.data for event in found if event.name == "event_sent"]
        assert (sent["name"], sent["value"], sent["frame"]) == ("approval/of it", True, [0])
        assert await refusal(server.client.post(f"{path}/choice", json={"value": "a"})) == (409, "ended")


with Pipeline("texts") as texts:
    Yield(Wait("text", str))

TEXT = "x" * 60_000


async def test_events_of_a_job_are_limited_in_bytes() -> None:
    async with serving(new_service(pipelines={"texts": texts})) as server:
        job_id = await server.submit("texts", [{}] * 300)  # the last 44 sets are not opened yet
        job = await server.session.reattach(job_id)
        number = 0
        with contextlib.suppress(EventsFull):
            for number in range(2000):
                await job.send("text", TEXT, frame=256 + number % 44)
        assert 1000 < number < 1100
        path = f"/jobs/{job_id}/events/text"
        assert await refusal(server.client.post(path, json={"value": TEXT, "frame": 299})) == (429, "events")
        async with Client(str(server.client.base_url)) as client:
            with pytest.raises(EventsFull, match="the events of all parameter sets take 64 MB, which is the limit"):
                await client.send(job_id, "text", TEXT, frame=299)
        await job.cancel()


async def test_events_are_refused_while_nobody_reads_the_results() -> None:
    async with serving(new_service(pipelines={"texts": texts})) as server:
        job = await server.session.execute(texts, [{}] * 20, options=ResultLimits(max_items=10))
        path = f"/jobs/{job.job_id}/events/text"
        taken = 0
        while (await server.client.post(path, json={"value": "x", "frame": taken})).status_code == 202:
            taken += 1
            assert taken < 20
        assert await refusal(server.client.post(path, json={"value": "x", "frame": 19})) == (429, "events")
        with pytest.raises(EventsFull, match="the log of the job is full: read its results"):
            await job.send("text", "x", frame=19)
        results = job.results()
        for _ in range(taken):
            await anext(results)
        await job.send("text", "x", frame=19)
        await job.cancel()


async def test_requests_that_change_an_interrupted_job_can_be_repeated(store_url: str) -> None:
    async with serving(new_service(store_url)) as server:
        job_id = await server.submit("approvals", open=True)
        await waiting(server, job_id)
    async with serving(new_service(store_url)) as server:
        send = server.client.post
        for path, body in ("events/choice", {"value": "a", "frame": 0}), ("inputs", {"params": {}}), ("finish", {}):
            refused = await send(f"/jobs/{job_id}/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]) == (503, "interrupted")
            assert int(refused.headers["retry-after"]) > 0
        assert (await send(f"/jobs/{job_id}/resume")).status_code == 202
        for path, body in ("events/choice", {"value": "a", "frame": 0}), ("inputs", {"params": {}}), ("finish", {}):
            assert (await send(f"/jobs/{job_id}/{path}", json=body)).status_code == 202
        cancelled = await send(f"/jobs/{job_id}/cancel", json={"reason": "enough"})
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "aborted")


async def test_interrupted_jobs_can_be_cancelled(store_url: str) -> None:
    async with serving(new_service(store_url)) as server:
        job_id = await server.submit("approvals")
    async with serving(new_service(store_url)) as server:
        cancelled = await server.client.post(f"/jobs/{job_id}/cancel", json={"reason": "enough"})
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "aborted")


async def test_only_who_may_send_to_a_job_may_send_events() -> None:
    service = new_service(authorizer=Tokens())
    async with serving(service) as server:
        ann, eve, bob = (client_of(service, authorization=name) for name in ("ann", "eve", "bob"))
        job = (await ann.post("/pipelines/approvals/jobs", json={})).json()["job_id"]
        await waiting(server, job)
        for client in (eve, bob):
            response = await client.post(f"/jobs/{job}/events/choice", json={"value": "a"})
            assert response.status_code in (403, 404)
        assert (await ann.post(f"/jobs/{job}/events/choice", json={"value": "a"})).status_code == 202
        await asyncio.gather(*(client.aclose() for client in (ann, eve, bob)))


async def test_the_client_sends_events() -> None:
    async with serving(new_service()) as server, Client(str(server.client.base_url)) as client:
        job = (await client.submit("approvals")).job_id
        assert (await client.send(job, "choice", "b")).job_id == job
        with pytest.raises(ParameterError, match="not 'perhaps'"):
            await client.send(job, "approval/of it", "perhaps")
        await client.send(job, "approval/of it", True, frame=0)
        assert {found.place: found.value async for found in client.results(job)} == {"yield": True, "choice": "b"}
        info = await client.info(job)
        assert (info.status, info.waits) == (JobStatus.FINISHED, ())
        with pytest.raises(ServiceError, match="takes no events"):
            await client.send(job, "choice", "a")
