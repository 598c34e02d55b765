"""Who is served, and what they may do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from dfm_async import JobInfo
from dfm_async.web import Action, Authorizer, Principal, Service
from tests.web.rig import PIPELINES, inline


class Tokens(Authorizer):
    """Whoever says a name is that one. Eve may only read her jobs, root may do everything."""

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        name = request.headers.get("authorization")
        return None if name is None else Principal(name)

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        if principal.id == "root":
            return True
        if principal.id == "eve" and action not in ("read", "list"):
            return False
        return super().allows(principal, action, job)


def client(service: Service, host: str | None = "127.0.0.1", **headers: str) -> httpx.AsyncClient:
    """A client that seems to come from some address."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["client"] = None if host is None else (host, 1234)
        await service.app(scope, receive, send)

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000", headers=named)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
async def test_without_an_authorizer_whoever_is_on_this_machine_is_served(host: str) -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    async with service.lifespan(), client(service, host) as local:
        for path in ("/jobs", "/health", "/ready"):
            assert (await local.get(path)).status_code == 200


OUTSIDE: list[dict[str, Any]] = [
    {"host": "192.168.1.7"},
    {"host": "::ffff:10.0.0.1"},
    {"host": "testclient"},
    {"host": None},
    {"x_forwarded_for": "127.0.0.1"},
    {"forwarded": "for=127.0.0.1"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://[localhost"},
    {"sec_fetch_site": "cross-site", "sec_fetch_dest": "image"},
    {"sec_fetch_site": "cross-site", "sec_fetch_dest": "iframe"},
]


@pytest.mark.parametrize("outside", OUTSIDE, ids=str)
async def test_without_an_authorizer_nobody_else_is_served(outside: dict[str, Any]) -> None:
    service = Service(session=inline, pipelines=PIPELINES, allow_pipelines=True)
    async with service.lifespan(), client(service, **outside) as far:
        for path in ("/jobs", "/jobs/x", "/jobs/x/events", "/jobs/x/stream", "/health", "/ready"):
            assert (await far.get(path)).status_code == 403
        for path in ("/pipelines/squares/jobs", "/jobs/x/cancel", "/jobs/x/inputs", "/jobs/x/finish"):
            assert (await far.post(path, json={"params": {"x": 1}})).status_code == 403
        assert service.current is not None
        assert service.current.jobs() == []


async def test_without_an_authorizer_a_link_of_another_site_leads_to_the_page() -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    browser = {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document", "sec_fetch_mode": "navigate"}
    async with service.lifespan(), client(service, **browser) as local:
        assert (await local.get("/")).status_code == 200


async def test_without_an_authorizer_the_service_has_only_names_of_this_machine() -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    async with service.lifespan(), client(service) as local:
        assert (await local.get("/jobs", headers={"host": "rebound.example"})).status_code == 403
        assert (await local.get("/jobs", headers={"host": "[::1"})).status_code == 403
        assert (await local.get("/jobs", headers={"host": "[::1]:80"})).status_code == 200
        assert (await local.get("/jobs", headers={"origin": "http://localhost:3000"})).status_code == 200


async def test_whoever_is_unknown_is_told_so_but_may_ask_whether_the_service_is_there() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan(), client(service, "192.168.1.7") as nobody:
        for path in ("/jobs", "/jobs/x", "/jobs/x/stream"):
            found = await nobody.get(path)
            assert (found.status_code, found.json()["error"]) == (401, "unknown")
        assert (await nobody.post("/pipelines/squares/jobs", json={})).status_code == 401
        assert (await nobody.get("/health")).status_code == 200
        assert (await nobody.get("/ready")).status_code == 200


ROUTES = [
    ("GET", ""),
    ("GET", "/events"),
    ("GET", "/stream"),
    ("POST", "/inputs"),
    ("POST", "/finish"),
    ("POST", "/cancel"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_job_of_somebody_else_is_not_there(method: str, path: str) -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan(), client(service, authorization="ada") as ada:
        job = (await ada.post("/pipelines/squares/jobs", json={"params": {"x": 1}, "open": True})).json()
        assert job["principal"] == "ada"
        body = {"params": {"x": 2}} if path == "/inputs" else {}
        async with client(service, authorization="bob") as bob:
            found = await bob.request(method, f"/jobs/{job['job_id']}{path}", json=body)
            nothing = await bob.request(method, f"/jobs/nothing{path}", json=body)
            assert (found.status_code, found.content) == (404, nothing.content)
            assert (await bob.get("/jobs")).json()["jobs"] == []
        assert len((await ada.get("/jobs")).json()["jobs"]) == 1
        assert (await ada.get(f"/jobs/{job['job_id']}")).json()["status"] == "running"
        if path != "/stream":
            async with client(service, authorization="root") as root:
                found = await root.request(method, f"/jobs/{job['job_id']}{path}", json=body)
                assert found.status_code in (200, 202)


async def test_jobs_that_the_application_started_itself_belong_to_no_principal() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan():
        assert service.current is not None
        job = await service.current.execute(PIPELINES["squares"], {"x": 2})
        async with client(service, authorization="ada") as ada:
            assert (await ada.get(f"/jobs/{job.job_id}")).status_code == 404


async def test_whoever_may_only_read_is_told_so() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan(), client(service, authorization="eve") as eve:
        found = await eve.post("/pipelines/squares/jobs", json={"params": {"x": 1}})
        assert (found.status_code, found.json()["error"]) == (403, "forbidden")
        assert service.current is not None
        job = await service.current.execute(PIPELINES["endless"], label="eve")
        assert (await eve.get(f"/jobs/{job.job_id}")).status_code == 200
        assert (await eve.post(f"/jobs/{job.job_id}/cancel")).status_code == 403
        assert (await eve.get(f"/jobs/{job.job_id}/stream?on_disconnect=cancel")).status_code == 403


async def test_the_id_of_somebody_elses_job_is_taken_also_for_an_equal_one() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    body = {"params": {"x": 1}, "job_id": "order-17"}
    async with service.lifespan(), client(service, authorization="ada") as ada:
        assert (await ada.post("/pipelines/squares/jobs", json=body)).status_code == 201
        async with client(service, authorization="bob") as bob:
            found = await bob.post("/pipelines/squares/jobs", json=body)
            assert (found.status_code, found.json()["error"]) == (409, "exists")
