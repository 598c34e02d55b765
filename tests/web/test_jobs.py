"""Submitting, looking at, streaming and steering jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from dfm_async import JobStatus
from dfm_async.web import AllowAnyone, Service
from tests.web.rig import PIPELINES, all_events, events, gates, inline, serving


def make(**options: object) -> Service:
    return Service(session=inline, pipelines=PIPELINES, **options, authorizer=AllowAnyone())  # type: ignore[arg-type]


async def test_a_job_is_submitted_and_its_events_come_as_a_stream() -> None:
    async with serving(make()) as server:
        job_id = await server.submit("squares", [{"x": 3}, {"x": 4}])
        found = await all_events(server.client, f"/jobs/{job_id}/stream")
    assert sorted(event.name for event in found[1:-2]) == ["frame", "frame", "result", "result"]
    assert [found[0].name, found[-2].name, found[-1].name] == ["status", "status", "end"]
    assert [event.id for event in found[:-1]] == [0, 1, 2, 3, 4, 5]
    assert sorted(event.data["value"] for event in found if event.name == "result") == [9, 16]
    assert next(event for event in found if event.name == "result").data.keys() == {
        "event",
        "offset",
        "place",
        "value",
        "frame",
        "site",
        "node",
    }
    assert found[-1].data == {"event": "end", "offset": 5, "status": "finished"}


async def test_the_answer_to_a_submission_can_be_the_stream_itself() -> None:
    async with serving(make()) as server:
        headers = {"accept": "text/event-stream"}
        url = "/pipelines/squares/jobs"
        async with server.client.stream("POST", url, json={"params": {"x": 5}}, headers=headers) as response:
            assert response.status_code == 201
            found = [event async for event in events(response)]
            job_id = response.headers["x-job-id"]
        assert [event.data["value"] for event in found if event.name == "result"] == [25]
        assert (await server.client.get(f"/jobs/{job_id}")).json()["status"] == "finished"


async def test_each_kind_of_event_has_a_name() -> None:
    async with serving(make()) as server:
        found = await all_events(server.client, f"/jobs/{await server.submit('telling', {'x': 1})}/stream")
        by_name = {event.name: event.data for event in found}
        assert by_name["progress"]["note"] == "half"
        assert by_name["metrics"]["values"] == {"loss": 0.5}
        found = await all_events(server.client, f"/jobs/{await server.submit('failing', {'x': 1})}/stream")
    failures = [event.data for event in found if event.name == "failure"]
    assert [failure["place"] for failure in failures] == [None, "yield"]
    assert failures[0]["error"]["type"] == "ValueError"
    assert failures[0]["error"]["message"] == "no 1"
    assert "raise ValueError" in failures[0]["error"]["traceback"]
    assert found[-1].data["status"] == "failed"


async def test_a_reader_that_comes_back_loses_and_repeats_nothing() -> None:
    gates["back"] = asyncio.Event()
    seen: list[int] = []
    async with serving(make()) as server:
        job_id = await server.submit("gated", {"n": 100, "gate": "back"})
        last = -1
        for portion in (7, 20, 13, 200):
            headers = {} if last < 0 else {"last-event-id": str(last)}
            async with server.client.stream("GET", f"/jobs/{job_id}/stream", headers=headers) as response:
                taken = 0
                async for event in events(response):
                    if event.name == "result":
                        seen.append(event.data["value"])
                    assert event.id is not None
                    last = event.id
                    taken += 1
                    if taken == portion:
                        break
            if portion == 13:
                gates["back"].set()
    assert seen == list(range(100))


async def test_what_a_browser_remembers_counts_more_than_the_address() -> None:
    async with serving(make()) as server:
        url = f"/jobs/{await server.submit('counting', {'n': 10})}/stream?after=2"
        assert (await all_events(server.client, url))[0].id == 3
        assert (await all_events(server.client, url, headers={"last-event-id": "5"}))[0].id == 6
        wrong = await server.client.get(url, headers={"last-event-id": "five"})
        assert (wrong.status_code, wrong.json()["error"]) == (422, "query")


async def test_a_reader_who_knows_everything_of_an_ended_job_need_not_come_back() -> None:
    async with serving(make()) as server:
        job_id = await server.submit("squares", {"x": 3})
        last = (await all_events(server.client, f"/jobs/{job_id}/stream"))[-1]
        response = await server.client.get(f"/jobs/{job_id}/stream", headers={"last-event-id": str(last.id)})
        assert response.status_code == 204
        ahead = await server.client.get(f"/jobs/{job_id}/stream", headers={"last-event-id": "1000"})
        assert (ahead.status_code, ahead.json()["error"]) == (422, "query")


async def test_the_status_of_a_job_tells_how_far_it_is() -> None:
    async with serving(make()) as server:
        job_id = await server.submit("squares", [{"x": 1}, {"x": 2}], open=True, job_id="mine")
        found = (await server.client.get(f"/jobs/{job_id}")).json()
        assert (found["job_id"], found["pipeline"], found["sets"], found["accepts"]) == ("mine", "squares", 2, True)
        assert (found["principal"], found["places"]) == ("anyone", ["yield"])


async def test_inputs_are_sent_to_a_job_until_it_is_told_that_there_are_no_more() -> None:
    async with serving(make()) as server:
        client = server.client
        job_id = await server.submit("squares", None)
        assert (await client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 2}})).status_code == 202
        wrong = await client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": "two"}})
        assert (wrong.status_code, wrong.json()["error"]) == (422, "parameters")
        assert (await client.post(f"/jobs/{job_id}/inputs", json={"params": [{"x": 3}, {"x": 4}]})).status_code == 202
        assert (await client.post(f"/jobs/{job_id}/finish")).status_code == 202
        found = await all_events(client, f"/jobs/{job_id}/stream")
        assert sorted(event.data["value"] for event in found if event.name == "result") == [4, 9, 16]
        late = await client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 5}})
        assert (late.status_code, late.json()["error"]) == (409, "closed")


async def test_inputs_can_be_the_last() -> None:
    async with serving(make()) as server:
        job_id = await server.submit("squares", {"x": 1}, open=True)
        await server.client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 2}, "last": True})
        found = await all_events(server.client, f"/jobs/{job_id}/stream")
        assert found[-1].data["status"] == "finished"


async def test_a_cancelled_job_tells_how_its_sites_stopped() -> None:
    async with serving(make()) as server:
        job_id = await server.submit("endless")
        async with server.client.stream("GET", f"/jobs/{job_id}/stream") as response:
            found = events(response)
            assert (await anext(found)).data["status"] == "running"
            done = await server.client.post(f"/jobs/{job_id}/cancel", json={"reason": "enough"})
            assert (done.json()["status"], done.json()["reason"]) == ("aborted", "enough")
            assert done.json()["outcomes"]["lab"] == "stopped"
            rest = [event async for event in found]
        assert [event.name for event in rest] == ["status", "end"]
        assert rest[0].data["reason"] == "enough"


async def test_a_job_that_has_ended_can_be_forgotten() -> None:
    async with serving(make()) as server:
        job_id = await server.submit("endless", job_id="mine")
        early = await server.client.delete(f"/jobs/{job_id}")
        assert (early.status_code, early.json()["error"]) == (409, "not ended")
        await server.client.post(f"/jobs/{job_id}/cancel")
        assert (await server.client.delete(f"/jobs/{job_id}")).status_code == 204
        assert (await server.client.get(f"/jobs/{job_id}")).status_code == 404
        assert (await server.client.delete(f"/jobs/{job_id}")).status_code == 404
        assert await server.submit("squares", {"x": 3}, job_id="mine") == "mine"  # the id is free again


async def test_a_stream_says_where_it_was_when_its_job_is_forgotten_meanwhile(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    service = Service(session=lambda: inline(store=store), pipelines=PIPELINES, authorizer=AllowAnyone())
    async with serving(service) as server:
        job_id = await server.submit("texts", {"n": 4000, "size": 4000})
        assert await (await server.session.reattach(job_id)) is JobStatus.FINISHED
    async with serving(service) as server:
        async with server.client.stream("GET", f"/jobs/{job_id}/stream") as response:
            found = events(response)
            offset = (await anext(found)).id or 0
            assert (await server.client.delete(f"/jobs/{job_id}")).status_code == 204
            async for event in found:
                assert event.id is not None
                assert event.name in ("drain", "result")
                assert event.id == (offset if event.name == "drain" else offset + 1)
                offset = event.id
        assert event.name == "drain"
        back = await server.client.get(f"/jobs/{job_id}/stream", headers={"last-event-id": str(offset)})
        assert back.status_code == 404


async def test_everything_that_is_wrong_with_a_submission_is_told() -> None:
    async with serving(make()) as server:
        post = server.client.post
        found = await post("/pipelines/texts/jobs", json={"params": {"n": "many", "sice": 2}})
        assert (found.status_code, found.json()["error"]) == (422, "parameters")
        problems = "; ".join(found.json()["problems"])
        assert all(part in problems for part in ("missing parameter 'size'", "unknown parameter 'sice'", "'n'"))
        found = await post("/pipelines/squares/jobs", json={"priority": "high", "colour": 3, "deadline": -1})
        assert (found.status_code, len(found.json()["problems"])) == (422, 3)
        assert (await post("/pipelines/nothing/jobs", json={})).status_code == 404
        assert (await post("/pipelines/squares/jobs", json={"params": 3})).status_code == 422
        assert (await post("/pipelines/squares/jobs", content="{", headers=JSON)).status_code == 400
        assert (await post("/pipelines/squares/jobs", json=[1])).status_code == 422
        assert (await post("/pipelines/squares/jobs", content='{"params": {}}')).status_code == 415
        assert (await server.client.get("/jobs")).json()["jobs"] == []


JSON = {"content-type": "application/json"}


async def test_the_same_id_again_is_the_same_job_and_other_content_is_refused() -> None:
    async with serving(make()) as server:
        first = await server.submit("squares", {"x": 3}, job_id="order-17")
        assert await server.submit("squares", {"x": 3}, job_id="order-17") == first
        other = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 4}, "job_id": "order-17"})
        assert (other.status_code, other.json()["error"]) == (409, "exists")
        bad = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 4}, "job_id": "a/b"})
        assert bad.status_code == 422


@pytest.mark.parametrize("path", ["", "/stream", "/events"])
async def test_an_unknown_job_is_not_found(path: str) -> None:
    async with serving(make()) as server:
        found = await server.client.get(f"/jobs/nothing{path}")
        assert (found.status_code, found.json()["error"]) == (404, "job")


@pytest.mark.parametrize("path", ["/inputs", "/finish", "/cancel"])
async def test_an_unknown_job_cannot_be_steered(path: str) -> None:
    async with serving(make()) as server:
        found = await server.client.post(f"/jobs/nothing{path}", json={"params": {}} if path == "/inputs" else {})
        assert (found.status_code, found.json()["error"]) == (404, "job")


async def test_a_reader_that_leaves_does_not_matter_to_the_job() -> None:
    gates["alone"] = asyncio.Event()
    async with serving(make()) as server:
        job_id = await server.submit("gated", {"n": 4, "gate": "alone"})
        async with server.client.stream("GET", f"/jobs/{job_id}/stream") as response:
            await anext(events(response))
        gates["alone"].set()
        job = await server.session.reattach(job_id)
        assert await job is JobStatus.FINISHED


@pytest.mark.parametrize("how", ["submitted", "read"])
async def test_a_job_can_end_with_the_reader_of_its_stream(how: str) -> None:
    async with serving(make()) as server:
        if how == "submitted":
            request = server.client.stream(
                "POST",
                "/pipelines/endless/jobs",
                json={"on_disconnect": "cancel"},
                headers={"accept": "text/event-stream"},
            )
        else:
            job_id = await server.submit("endless")
            request = server.client.stream("GET", f"/jobs/{job_id}/stream?on_disconnect=cancel")
        async with request as response:
            job_id = response.headers["x-job-id"]
            await anext(events(response))
        job = await server.session.reattach(job_id)
        await asyncio.wait_for(job.completed.wait(), 10)
        assert (job.status, job.info().reason) == (JobStatus.ABORTED, "the reader of its stream has gone")


async def test_a_job_ends_only_with_the_reader_of_a_stream() -> None:
    async with serving(make()) as server:
        found = await server.client.post("/pipelines/endless/jobs", json={"on_disconnect": "cancel"})
        assert (found.status_code, found.json()["error"]) == (422, "body")


async def test_a_service_can_be_called_without_a_server() -> None:
    service = make()
    app = Starlette(routes=[Mount("/dfm", service.app)])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/dfm") as client:
        closed = await client.get("/jobs/nothing")
        assert (closed.status_code, closed.json()["error"]) == (503, "closed")
        async with service.lifespan():
            found = await client.post("/pipelines/squares/jobs", json={"params": {"x": 3}})
            assert found.status_code == 201
