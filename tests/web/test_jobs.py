"""Submitting, inspecting, streaming and steering jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dfm_async import JobStatus
from tests.support.waiting import PROMPT
from tests.web.rig import PIPELINES, STREAM, Server, all_events, events, gates, new_service, refusal, serving


async def test_a_job_is_submitted_and_its_events_come_as_a_stream(server: Server) -> None:
    job_id = await server.submit("squares", [{"x": 3}, {"x": 4}])
    found = await all_events(server.client, f"/jobs/{job_id}/stream")
    assert sorted(event.name for event in found[1:-2]) == ["frame", "frame", "result", "result"]
    assert [found[0].name, found[-2].name, found[-1].name] == ["status", "status", "end"]
    assert [event.id for event in found[:-1]] == [0, 1, 2, 3, 4, 5]
    assert sorted(event.data["value"] for event in found if event.name == "result") == [9, 16]
    result = next(event for event in found if event.name == "result")
    assert set(result.data) == {"event", "offset", "place", "value", "frame", "site", "node"}
    assert found[-1].data == {"event": "end", "offset": 5, "status": "finished"}


async def test_the_answer_to_a_submission_can_be_the_stream_itself(server: Server) -> None:
    url = "/pipelines/squares/jobs"
    async with server.client.stream("POST", url, json={"params": {"x": 5}}, headers=STREAM) as response:
        assert response.status_code == 201
        found = [event async for event in events(response)]
        job_id = response.headers["x-job-id"]
    assert [event.data["value"] for event in found if event.name == "result"] == [25]
    assert (await server.client.get(f"/jobs/{job_id}")).json()["status"] == "finished"


async def test_each_kind_of_event_has_a_name(server: Server) -> None:
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
    assert failures[1]["error"]["message"] == "no 1"
    assert "traceback" not in failures[1]["error"], "once is enough"
    assert found[-1].data["status"] == "failed"


async def test_reconnecting_reader_loses_and_repeats_nothing(server: Server) -> None:
    gates["back"] = asyncio.Event()
    seen: list[int] = []
    job_id = await server.submit("gated", {"n": 100, "gate": "back"})
    last = -1
    for portion in (7, 20, 13, 200):
        headers = {} if last < 0 else {"last-event-id": str(last)}
        async with server.follow(f"/jobs/{job_id}/stream", headers=headers) as found:
            for _ in range(portion):
                event = await anext(found, None)
                if event is None:
                    break
                seen += [event.data["value"]] if event.name == "result" else []
                assert event.id is not None
                last = event.id
        if portion == 13:
            gates["back"].set()
    assert seen == list(range(100))


async def test_last_event_id_takes_precedence_over_the_query(server: Server) -> None:
    url = f"/jobs/{await server.submit('counting', {'n': 10})}/stream?after=2"
    assert (await all_events(server.client, url))[0].id == 3
    assert (await all_events(server.client, url, headers={"last-event-id": "5"}))[0].id == 6
    assert await refusal(server.client.get(url, headers={"last-event-id": "five"})) == (422, "query")


async def test_reader_with_all_events_of_an_ended_job_gets_204(server: Server) -> None:
    job_id = await server.submit("squares", {"x": 3})
    last = (await all_events(server.client, f"/jobs/{job_id}/stream"))[-1]
    response = await server.client.get(f"/jobs/{job_id}/stream", headers={"last-event-id": str(last.id)})
    assert response.status_code == 204
    for job in (job_id, await server.submit("squares", None)):
        ahead = await server.client.get(f"/jobs/{job}/stream", headers={"last-event-id": "1000"})
        assert (ahead.status_code, ahead.json()["error"]) == (422, "query")
        assert ahead.json()["message"].startswith("Last-Event-ID is 1000, but its last event is ")


async def test_status_of_a_job_shows_its_progress(server: Server) -> None:
    job_id = await server.submit("squares", [{"x": 1}, {"x": 2}], open=True, job_id="mine")
    found = (await server.client.get(f"/jobs/{job_id}")).json()
    assert (found["job_id"], found["pipeline"], found["sets"], found["accepts"]) == ("mine", "squares", 2, True)
    assert (found["principal"], found["places"]) == ("anyone", ["yield"])


async def test_inputs_are_accepted_until_the_job_is_finished(server: Server) -> None:
    client = server.client
    job_id = await server.submit("squares", None)
    assert (await client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 2}})).status_code == 202
    assert await refusal(client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": "two"}})) == (422, "parameters")
    assert (await client.post(f"/jobs/{job_id}/inputs", json={"params": [{"x": 3}, {"x": 4}]})).status_code == 202
    assert (await client.post(f"/jobs/{job_id}/finish")).status_code == 202
    assert sorted(await server.results(job_id)) == [4, 9, 16]
    assert await refusal(client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 5}})) == (409, "closed")


async def test_cancelled_job_reports_how_its_sites_stopped(server: Server) -> None:
    job_id = await server.submit("endless")
    async with server.follow(f"/jobs/{job_id}/stream") as found:
        assert (await anext(found)).data["status"] == "running"
        done = await server.client.post(f"/jobs/{job_id}/cancel", json={"reason": "enough"})
        assert (done.json()["status"], done.json()["reason"]) == ("aborted", "enough")
        assert done.json()["outcomes"]["lab"] == "stopped"
        rest = [event async for event in found]
    assert [event.name for event in rest] == ["status", "end"]
    assert rest[0].data["reason"] == "enough"


async def test_a_job_that_has_ended_can_be_forgotten(server: Server) -> None:
    job_id = await server.submit("endless", job_id="mine")
    assert await refusal(server.client.delete(f"/jobs/{job_id}")) == (409, "not ended")
    await server.client.post(f"/jobs/{job_id}/cancel")
    assert (await server.client.delete(f"/jobs/{job_id}")).status_code == 204
    assert (await server.client.get(f"/jobs/{job_id}")).status_code == 404
    assert (await server.client.delete(f"/jobs/{job_id}")).status_code == 404
    assert await server.submit("squares", {"x": 3}, job_id="mine") == "mine"  # the id is free again


async def test_stream_of_a_forgotten_job_ends_with_its_offset(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    service = new_service(store=store)
    async with serving(service) as server:
        job_id = await server.submit("texts", {"n": 4000, "size": 4000})
        await server.finished(job_id)
    async with serving(service) as server:
        async with server.follow(f"/jobs/{job_id}/stream") as found:
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


async def test_all_problems_of_a_submission_are_reported(server: Server) -> None:
    post = server.client.post
    found = await post("/pipelines/texts/jobs", json={"params": {"n": "many", "sice": 2}})
    assert (found.status_code, found.json()["error"]) == (422, "parameters")
    problems = "; ".join(found.json()["problems"])
    assert all(part in problems for part in ("missing parameter 'size'", "unknown parameter 'sice'", "'n'"))
    found = await post("/pipelines/squares/jobs", json={"priority": "high", "colour": 3, "deadline": -1})
    assert (found.status_code, len(found.json()["problems"])) == (422, 3)
    assert await refused_fields(post("/pipelines/squares/jobs", json={"x": 3})) == [
        "x: unknown field (the request has: params, open, job_id, priority, deadline, start_at, on_error, "
        "checkpoint, on_disconnect). "
        'Write parameters of the pipeline as {"params": {"x": ...}}'
    ]
    assert await refused_fields(post("/pipelines/squares/jobs", json=[])) == ["the body must be a JSON object"]
    job_id = await server.submit("squares", {"x": 3})
    unknown = await refused_fields(post(f"/jobs/{job_id}/cancel", json={"why": "enough"}))
    assert unknown == ["why: unknown field (the request has: reason)"]
    found = await post("/pipelines/sqares/jobs", json={})
    assert found.status_code == 404
    assert found.json()["message"].endswith(f"'sqares' here; there are: {', '.join(sorted(PIPELINES))}")
    assert await refusal(post("/pipelines/endless/jobs", json={"on_disconnect": "cancel"})) == (
        422,
        "body",
    )  # no stream
    assert (await post("/pipelines/squares/jobs", json={"params": 3})).status_code == 422
    assert (await post("/pipelines/squares/jobs", content="{", headers=JSON)).status_code == 400
    assert (await post("/pipelines/squares/jobs", json=[1])).status_code == 422
    assert (await post("/pipelines/squares/jobs", content='{"params": {}}')).status_code == 415
    assert len((await server.client.get("/jobs")).json()["jobs"]) == 1


async def refused_fields(answer: Awaitable[httpx2.Response]) -> list[str]:
    found = await answer
    assert (found.status_code, found.json()["error"]) == (422, "body")
    problems: list[str] = found.json()["problems"]
    return problems


JSON = {"content-type": "application/json"}


async def test_the_same_id_again_is_the_same_job_and_other_content_is_refused(server: Server) -> None:
    first = await server.submit("squares", {"x": 3}, job_id="order-17")
    assert await server.submit("squares", {"x": 3}, job_id="order-17") == first
    other = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 4}, "job_id": "order-17"})
    assert (other.status_code, other.json()["error"]) == (409, "exists")
    bad = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 4}, "job_id": "a/b"})
    assert bad.status_code == 422


UNKNOWN = [("GET", ""), ("GET", "/stream"), ("GET", "/events"), ("GET", "/graph")]
UNKNOWN += [("POST", "/inputs"), ("POST", "/finish"), ("POST", "/cancel")]


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
async def test_an_unknown_job_is_not_found(server: Server, method: str, path: str) -> None:
    body: dict[str, Any] = {"params": {}} if path == "/inputs" else {}
    assert await refusal(server.client.request(method, f"/jobs/nothing{path}", json=body)) == (404, "job")


async def test_job_goes_on_when_its_reader_disconnects(server: Server) -> None:
    gates["alone"] = asyncio.Event()
    job_id = await server.submit("gated", {"n": 4, "gate": "alone"})
    async with server.follow(f"/jobs/{job_id}/stream") as found:
        await anext(found)
    gates["alone"].set()
    assert (await server.finished(job_id)).status is JobStatus.FINISHED


@pytest.mark.parametrize("how", ["submitted", "read"])
async def test_a_job_can_end_with_the_reader_of_its_stream(how: str, server: Server) -> None:
    if how == "submitted":
        url, body = "/pipelines/endless/jobs", {"on_disconnect": "cancel"}
        request = server.client.stream("POST", url, json=body, headers=STREAM)
    else:
        job_id = await server.submit("endless")
        request = server.client.stream("GET", f"/jobs/{job_id}/stream?on_disconnect=cancel")
    async with request as response:
        job_id = response.headers["x-job-id"]
        await anext(events(response))
    job = await server.session.reattach(job_id)
    await asyncio.wait_for(job.completed.wait(), PROMPT)
    assert (job.status, job.info().reason) == (JobStatus.ABORTED, "the reader of its stream has gone")
