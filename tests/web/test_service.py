"""The lifecycle of a service, and how it is embedded."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import Depends, FastAPI
from openapi_spec_validator import validate
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dfm_async import Job, JobStatus, Pipeline, PipelineError, Session, SessionClosed, Yield
from dfm_async.errors import StoreError
from dfm_async.web import Authorizer, Principal, Service
from tests.support.processes import ROOT, read_until, started, started_server
from tests.support.waiting import PROMPT
from tests.web.rig import (
    PIPELINES,
    STREAM,
    Server,
    all_events,
    client_of,
    fed,
    inline,
    new_service,
    refusal,
    serving,
    square,
)

# embedding


async def test_fastapi_gives_the_session_to_handlers_of_its_own() -> None:
    service = new_service()
    app = FastAPI(lifespan=service.lifespan)
    app.mount("/dfm", service.app)

    @app.get("/dfm-own")
    async def own(session: Session = Depends(service.session)) -> int:  # noqa: B008 - as FastAPI wants it
        job = await session.execute(PIPELINES["squares"], {"x": 12})
        return int((await job.first()).value)

    async with serving(service, app) as server:
        assert (await server.client.get(f"http://127.0.0.1:{server.port}/dfm-own")).json() == 144
        job_id = await server.submit("squares", {"x": 3})
        assert (await all_events(server.client, f"/jobs/{job_id}/stream"))[-1].name == "end"


async def test_unknown_routes_and_methods_are_refused_as_json(server: Server) -> None:
    assert await refusal(server.client.get("/nothing")) == (404, "route")
    wrong = await server.client.put("/pipelines")
    assert (wrong.status_code, wrong.json()["error"], wrong.headers["allow"]) == (405, "method", "GET")


class Event(BaseModel):
    """The schema of an application; the service has one of the same name."""

    town: str


async def test_the_docs_of_fastapi_can_show_the_routes_beside_its_own() -> None:
    service = new_service()
    app = FastAPI(lifespan=service.lifespan)
    app.mount("/dfm", service.app)
    service.add_to_docs(app, "/dfm")

    @app.post("/tickets")
    async def ticket(event: Event) -> str:
        return event.town

    async with serving(service, app, prefix="") as server:
        document = (await server.client.get("/openapi.json")).json()
        assert "swagger" in (await server.client.get("/docs")).text
    validate(document)
    assert document["paths"].keys() > {"/tickets", "/dfm/jobs/{job_id}", "/dfm/pipelines/squares/jobs"}
    assert document["components"]["schemas"]["Event"]["properties"].keys() == {"town"}
    shown = document["paths"]["/dfm/jobs/{job_id}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert "status" in document["components"]["schemas"][shown["$ref"].rpartition("/")[2]]["properties"]


async def test_routes_and_lifespan_can_be_included_in_an_application() -> None:
    service = new_service()
    lived: list[str] = []

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        lived.append("before")
        async with service.lifespan():
            assert service.ready
            yield
        lived.append("after")

    async def own(request: Request) -> JSONResponse:
        job = await service.session(request).execute(PIPELINES["squares"], {"x": 4})
        return JSONResponse((await job.first()).value)

    app = Starlette(lifespan=lifespan, routes=[Route("/own", own), *service.routes])
    async with serving(service, app, prefix="") as server:
        assert (await server.client.get("/own")).json() == 16
        assert await server.submit("squares", {"x": 3})
        assert (await server.client.get("/openapi.json")).json()["servers"] == [{"url": "/"}]
    assert lived == ["before", "after"]
    assert service.current is None


async def test_a_session_that_is_connected_already_is_not_closed() -> None:
    async with inline() as session:
        async with serving(new_service(session=session)) as server:
            job_id = await server.submit("squares", {"x": 3})
        assert session.connected
        assert await (await session.reattach(job_id)) is JobStatus.FINISHED


async def test_a_service_of_a_federation_runs_in_processes() -> None:
    async with serving(new_service(session=None, federation=fed)) as server:
        assert await server.results(await server.submit("squares", {"x": 9})) == [81]


async def test_invalid_pipeline_is_reported_when_the_service_opens() -> None:
    with Pipeline("wrong") as wrong:
        Yield(square("no number"))  # type: ignore[call-overload]
    service = new_service(pipelines={"wrong": wrong})
    with pytest.raises(PipelineError):
        async with service.lifespan():
            pass
    assert service.current is None


async def test_invalid_services_are_refused() -> None:
    with pytest.raises(TypeError, match="either"):
        Service(pipelines=PIPELINES)
    with pytest.raises(TypeError, match="either"):
        Service(fed, session=inline)
    wrong: list[dict[str, Any]] = [
        {"federation": "numbers"},
        {"session": fed},
        {"federation": fed, "limits": {"streams": 1}},
        {"federation": fed, "authorizer": "token"},
    ]
    for given in wrong:
        with pytest.raises(TypeError, match=f"{list(given)[-1]} must be"):
            Service(**given)
    with pytest.raises(TypeError, match="must be a Pipeline"):
        Service(fed, pipelines={"x": square})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="URL"):
        Service(fed, pipelines={"a/b": PIPELINES["squares"]})
    service = new_service()
    with pytest.raises(SessionClosed):
        service.session(Request({"type": "http"}))
    async with service.lifespan():
        with pytest.raises(SessionClosed):
            async with service.lifespan():
                pass


# queries


class ByKey(Authorizer):
    query = ("key",)

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        return None if request.query_params.get("key") != "s3cret" else Principal("ada")


async def test_query_parameters_that_a_route_does_not_have_are_refused() -> None:
    async with serving(new_service(allow_pipelines=True)) as server:
        document = (await server.client.get("/openapi.json")).json()["paths"]
        for route in server.service.routes:
            if not isinstance(route, Route) or route.path in ("/", "/page/{name}"):  # addresses for people
                continue
            method = "".join(route.methods or ())
            path = route.path.replace(":path", "").replace("{name}", "squares")
            described = document[path][method.lower()].get("parameters", ())
            known = sorted(found["name"] for found in described if found["in"] == "query")
            where = path.replace("{job_id}", "none").replace("{event}", "approval")
            refused = await server.client.request(method, where, params={"lable": "x", "Status": "y"})
            assert (refused.status_code, refused.json()["error"]) == (400, "query"), path
            has = f"the parameters {', '.join(known)}" if known else "no parameters"
            message = f"unknown in the query: 'lable', 'Status'. This route has {has}"
            assert refused.json()["message"] == message
        many = await server.client.get("/jobs", params={f"{number}" * 200: "x" for number in range(9, 30)})
        assert len(many.json()["message"]) < 1500
        assert (await server.client.get("/?lable=x")).status_code == 200


async def test_authorizers_name_the_query_parameters_that_they_read() -> None:
    async with serving(new_service(authorizer=ByKey())) as server:
        assert (await server.client.get("/jobs?key=s3cret")).status_code == 200
        assert await refusal(server.client.get("/jobs?key=other")) == (401, "unauthenticated")
        assert await refusal(server.client.get("/jobs?key=s3cret&keys=1")) == (400, "query")


# draining


@pytest.mark.parametrize("query", ["", "?on_disconnect=cancel", "?activity=true"])
async def test_open_streams_report_their_offset_when_the_service_drains(server: Server, query: str) -> None:
    job_id = await server.submit("endless")
    async with server.follow(f"/jobs/{job_id}/stream{query}") as found:
        first = await anext(found)
        if "activity" in query:
            assert (await anext(found)).name == "activity"
        await asyncio.wait_for(server.service.drain(), PROMPT)
        rest = [event async for event in found]
    assert [(event.name, event.id) for event in rest] == [("drain", first.id)]
    assert rest[0].data == {"event": "drain", "offset": first.id, "status": "running"}
    assert (await server.client.get("/ready")).status_code == 503
    assert (await server.client.get("/health")).status_code == 200
    submission = server.client.post("/pipelines/squares/jobs", json={"params": {"x": 1}})
    for refused in (server.client.get(f"/jobs/{job_id}/stream"), submission):
        assert await refusal(refused) == (503, "draining")
    assert (await server.client.get(f"/jobs/{job_id}")).json()["status"] == "running"
    assert (await server.client.post(f"/jobs/{job_id}/cancel")).status_code == 200


async def test_a_page_that_waits_for_an_event_is_answered_when_the_service_drains(server: Server) -> None:
    job_id = await server.submit("endless")
    known = (await server.client.get(f"/jobs/{job_id}/events?wait=10")).json()["next"]
    waiting = asyncio.create_task(server.client.get(f"/jobs/{job_id}/events?wait=60&after={known}"))
    await server.streams(1)
    await asyncio.wait_for(server.service.drain(), PROMPT)
    page = (await waiting).json()
    assert (page["events"], page["next"], page["ended"]) == ([], known, False)


async def test_reader_continues_at_the_next_service_after_a_drain(store_url: str) -> None:
    service = new_service(store=store_url)
    seen: list[int] = []
    async with serving(service) as server:
        job_id = await server.submit("squares", {"x": 2}, open=True, job_id="kept")
        async with server.follow(f"/jobs/{job_id}/stream") as found:
            async for event in found:
                seen += [event.data["value"]] if event.name == "result" else []
                if event.name == "frame":
                    break
            await service.drain()
            (last,) = [event async for event in found]
    async with serving(service) as server:
        resumed = await server.client.post("/jobs/kept/resume")
        assert (resumed.status_code, resumed.json()["accepts"]) == (202, True)
        assert (await server.client.post("/jobs/kept/resume")).status_code == 409
        job = await server.session.reattach("kept")
        await job.send_input_params({"x": 3})
        await job.send_stop_frame()
        headers = {"last-event-id": str(last.data["offset"])}
        rest = await all_events(server.client, "/jobs/kept/stream", headers=headers)
        seen += [event.data["value"] for event in rest if event.name == "result"]
    assert seen == [4, 9]


SERVED = "import uvicorn; from tests.web.rig import new_service; uvicorn.run(new_service().app, port=0)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_streams_do_not_delay_the_shutdown_of_a_server(number: int) -> None:
    with started_server("-c", SERVED) as (process, address), httpx2.Client(base_url=address, timeout=20) as client:
        job_id = client.post("/pipelines/endless/jobs", json={}).json()["job_id"]
        with client.stream("GET", f"/jobs/{job_id}/stream") as response:
            lines = response.iter_lines()
            next(line for line in lines if line.startswith("event: status"))
            process.send_signal(number)
            assert [line for line in lines if line.startswith("event: ")] == ["event: drain"]
        process.communicate(timeout=20)
        assert process.returncode in (0, -number)  # the server passes the signal on when it has ended


async def test_waiting_submission_does_not_delay_the_drain() -> None:
    entered, turn = asyncio.Event(), asyncio.Event()

    class Busy(Session):
        async def execute(self, *args: Any, **options: Any) -> Job:
            entered.set()
            await turn.wait()
            return await super().execute(*args, **options)

    service = new_service(session=lambda: Busy(fed, target="inline"))
    async with serving(service) as server:
        late = asyncio.create_task(server.client.post("/pipelines/endless/jobs", json={}, headers=STREAM))
        await entered.wait()
        await asyncio.wait_for(service.drain(), PROMPT)
        turn.set()
        assert "event: drain" in (await late).text


# probes and documents


async def test_a_service_is_not_ready_before_it_is_open() -> None:
    service = new_service()
    async with client_of(service) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert await refusal(client.get("/jobs/nothing")) == (503, "closed")
        async with service.lifespan():
            assert (await client.get("/ready")).status_code == 200
            assert await refusal(client.get("/jobs/nothing")) == (404, "job")
        assert (await client.get("/ready")).status_code == 503


async def test_metrics_are_in_the_format_of_prometheus() -> None:
    service = new_service(session=None, federation=fed)
    async with serving(service) as server:
        await all_events(server.client, f"/jobs/{await server.submit('squares', {'x': 9})}/stream")
        await server.submit("endless")
        response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    sample = re.compile(r'dfm_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+-]+')
    assert all(line.startswith(("# HELP dfm_", "# TYPE dfm_")) or sample.fullmatch(line) for line in lines)
    for expected in (
        'dfm_jobs_ended_total{status="finished"} 1',
        "dfm_jobs_running 1",
        "dfm_streams_open 0",
        "dfm_streams_opened_total 1",
        'dfm_site_workers{site="lab"} 1',
    ):
        assert expected in lines
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))


async def test_the_service_describes_itself() -> None:
    async with serving(new_service(allow_pipelines=True)) as server:
        document = (await server.client.get("/openapi.json")).json()
        listed = (await server.client.get("/pipelines")).json()["pipelines"]
    validate(document)
    assert document["openapi"].startswith("3.1")
    assert document["servers"] == [{"url": "/dfm"}]
    assert {f"/pipelines/{name}/jobs" for name in PIPELINES} < document["paths"].keys()
    run = document["paths"]["/pipelines/texts/jobs"]["post"]
    assert run["x-results"] == {"yield": {"type": "string"}}
    by_name = {found["name"]: found for found in listed}
    assert by_name["texts"]["params"]["properties"] == {"n": {"type": "integer"}, "size": {"type": "integer"}}
    assert by_name["texts"]["params"]["required"] == ["n", "size"]
    assert by_name["endless"]["params"]["properties"] == {}


async def test_every_route_is_described() -> None:
    service = new_service(allow_pipelines=True)
    async with serving(service) as server:
        document = (await server.client.get("/openapi.json")).json()
    reported = {
        (method.upper(), re.sub(r"^/pipelines/\w+/jobs", "/pipelines/{name}/jobs", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in service.routes
        if isinstance(route, Route)
        for method in route.methods or set()
    }
    assert reported == routes


async def test_a_store_is_served_by_one_process(store_url: str) -> None:
    first, second = (new_service(store=store_url) for _ in range(2))
    async with first.lifespan():
        with pytest.raises(StoreError, match=r"another process serves it already.*uvicorn --workers 1"):
            async with second.lifespan():
                pass
        async with inline(store=store_url) as reader:  # others may read it
            assert reader.jobs() == []
    async with second.lifespan():
        assert second.ready


def test_second_worker_of_a_server_on_one_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(
        f"from tests.web.rig import new_service\nservice = new_service(store='sqlite:///{tmp_path}/jobs.db')\n"
    )
    command = [sys.executable, "-m", "uvicorn", "served:service.app", "--workers", "2", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with started(*command, stderr=subprocess.PIPE, env=environment, cwd=tmp_path) as process:
        read_until(process.stderr, "another process serves it already")
        process.terminate()
        process.communicate(timeout=60)
