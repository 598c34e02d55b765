"""Who is served, and what they may do."""

from __future__ import annotations

import warnings
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from dfm_async import JobInfo
from dfm_async.web import Action, AllowAnyone, Authorizer, Principal, Service, TokenAuthorizer
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


def client(service: Service, host: str | None = "127.0.0.1", http: str = "1.1", **headers: str) -> httpx.AsyncClient:
    """A client that seems to come from some address."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["client"] = None if host is None else (host, 1234)
        scope["http_version"] = http
        await service.app(scope, receive, send)

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000", headers=named)


def bearer(service: Service) -> dict[str, str]:
    return {"authorization": f"Bearer {service.token}"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
async def test_without_an_authorizer_clients_on_this_machine_need_the_token(host: str) -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    async with service.lifespan(), client(service, host) as local:
        for path in ("/health", "/ready"):
            assert (await local.get(path)).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {service.token}"}):
            refused = await local.get("/jobs", headers=headers)
            assert (refused.status_code, refused.json()["error"]) == (401, "unauthenticated")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "the token that the service printed when it started" in refused.json()["message"]
        assert (await local.get("/jobs", headers=bearer(service))).status_code == 200
        job = await local.post("/pipelines/squares/jobs", json={"params": {"x": 1}}, headers=bearer(service))
        assert job.json()["principal"] == "local"


async def test_the_token_is_printed_once_at_the_start_unless_the_user_has_set_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    assert service.token is not None
    assert len(service.token) >= 32
    assert service.token != Service(session=inline).token
    async with service.lifespan():
        assert f"?token={service.token}\n" in capsys.readouterr().err
    monkeypatch.setenv("DFM_TOKEN", "a-token-of-the-user")
    service = Service(session=inline, pipelines=PIPELINES)
    async with service.lifespan():
        assert capsys.readouterr().err == ""
    assert service.token == "a-token-of-the-user"
    assert Service(session=inline, authorizer=Tokens()).token is None


@pytest.mark.parametrize("prefix", ["", "/dfm"])
async def test_a_browser_that_brings_the_token_gets_a_cookie_that_is_not_the_token(prefix: str) -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    app = Starlette(lifespan=service.lifespan, routes=[Mount(prefix or "/", service.app)])
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 5))
    async with service.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as browser:
        assert (await browser.get(f"{prefix}/?token=wrong")).status_code == 401
        entered = await browser.get(f"{prefix}/?token={service.token}&job=order-17")
        assert (entered.status_code, entered.headers["location"]) == (303, f"{prefix}/?job=order-17")
        cookie = entered.headers["set-cookie"]
        assert service.token is not None
        assert service.token not in cookie
        for part in ("HttpOnly", "SameSite=strict", f"Path={prefix}/"):
            assert part in cookie
        assert "Secure" not in cookie
        name, _, rest = cookie.partition("=")
        value = rest.partition(";")[0]
        with_cookie = {"cookie": f"{name}={value}"}
        browser.cookies.clear()
        assert (await browser.get(f"{prefix}/jobs", headers=with_cookie)).status_code == 200
        assert (await browser.get(f"{prefix}/jobs", headers={"authorization": f"Bearer {value}"})).status_code == 401
        assert (await browser.get(f"{prefix}/jobs", headers={"cookie": f"{name}={service.token}"})).status_code == 401


async def test_services_with_different_tokens_have_different_cookies() -> None:
    names = []
    for token in ("0123456789abcdef", "fedcba9876543210"):
        service = Service(session=inline, authorizer=TokenAuthorizer(token))
        transport = httpx.ASGITransport(service.app)
        async with service.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://h:1") as browser:
            entered = await browser.get(f"/?token={token}")
            names.append(entered.headers["set-cookie"].partition("=")[0])
    assert len(set(names)) == 2


async def test_the_cookie_is_only_for_tls_behind_tls() -> None:
    service = Service(session=inline, authorizer=TokenAuthorizer("0123456789abcdef"))
    transport = httpx.ASGITransport(service.app)
    async with service.lifespan(), httpx.AsyncClient(transport=transport, base_url="https://dfm.example") as browser:
        assert "Secure" in (await browser.get("/?token=0123456789abcdef")).headers["set-cookie"]


@pytest.mark.parametrize("token", ["short", "t\u00f6k" * 10, "two words and more", "line\nbreak" * 3, 17])
def test_what_cannot_be_a_token_is_refused(token: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="token"):
        TokenAuthorizer(token)


OUTSIDE: list[dict[str, Any]] = [
    {"host": "192.168.1.7"},
    {"host": "::ffff:10.0.0.1"},
    {"host": "testclient"},
    {"host": None},
    {"http": "1.0"},
    {"forwarded": "for=127.0.0.1"},
    {"via": "1.1 proxy"},
    {"x_forwarded_for": "127.0.0.1"},
    {"x_forwarded_host": "dfm.example"},
    {"x_forwarded_proto": "https"},
    {"x_real_ip": "127.0.0.1"},
    {"x_client_ip": "127.0.0.1"},
    {"true_client_ip": "127.0.0.1"},
    {"cf_connecting_ip": "127.0.0.1"},
]


@pytest.mark.parametrize("outside", OUTSIDE, ids=str)
async def test_without_an_authorizer_nobody_else_is_served_even_with_the_token(outside: dict[str, Any]) -> None:
    service = Service(session=inline, pipelines=PIPELINES, allow_pipelines=True)
    async with service.lifespan(), client(service, **outside, **bearer(service)) as far:
        for path in ("/", f"/?token={service.token}", "/jobs", "/jobs/x", "/jobs/x/stream", "/health", "/ready"):
            assert (await far.get(path)).status_code == 403
        for path in ("/pipelines/squares/jobs", "/jobs/x/cancel", "/jobs/x/inputs", "/jobs/x/finish"):
            assert (await far.post(path, json={"params": {"x": 1}})).status_code == 403
        assert service.current is not None
        assert service.current.jobs() == []


async def test_without_an_authorizer_the_service_has_only_names_of_this_machine() -> None:
    service = Service(session=inline, pipelines=PIPELINES)
    async with service.lifespan(), client(service, **bearer(service)) as local:
        assert (await local.get("/jobs", headers={"host": "rebound.example"})).status_code == 403
        assert (await local.get("/jobs", headers={"host": "[::1"})).status_code == 403
        assert (await local.get("/jobs", headers={"host": "[::1]:80"})).status_code == 200


FOREIGN: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "http://localhost:3000"},
    {"origin": "null"},
    {"origin": "http://[localhost"},
    {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"},
    {"sec-fetch-site": "cross-site", "sec-fetch-dest": "iframe"},
    {"sec-fetch-site": "same-site", "sec-fetch-dest": "empty"},
    {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document", "sec-fetch-mode": "navigate"},
]


@pytest.mark.parametrize("how", ["local", "token", "anyone"])
@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
async def test_pages_of_other_sites_cannot_use_the_rights_of_a_browser(foreign: dict[str, str], how: str) -> None:
    token = "0123456789abcdef"
    authorizer = {"local": None, "token": TokenAuthorizer(token), "anyone": AllowAnyone()}[how]
    service = Service(session=inline, pipelines=PIPELINES, authorizer=authorizer)
    async with service.lifespan(), client(service) as browser:
        entered = await browser.get(f"/?token={service.token or token}")
        assert entered.status_code == (200 if how == "anyone" else 303)
        assert (await browser.get("/jobs")).status_code == 200
        assert (await browser.get("/jobs", headers=foreign)).status_code == 403
        assert (await browser.get("/jobs/x/stream?on_disconnect=cancel", headers=foreign)).status_code == 403
        assert (await browser.post("/jobs/x/cancel", headers=foreign)).status_code == 403
        own = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
        assert (await browser.post("/jobs/x/cancel", headers=own)).status_code == 404


async def test_a_link_of_another_site_leads_to_the_page() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=AllowAnyone())
    link = {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document", "sec_fetch_mode": "navigate"}
    async with service.lifespan(), client(service, **link) as browser:
        assert (await browser.get("/")).status_code == 200
        assert (await browser.get("/?job=x")).status_code == 200


async def test_a_link_cannot_cancel_a_job_whatever_the_authorizer_allows() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan(), client(service, authorization="ada") as ada:
        job_id = (await ada.post("/pipelines/endless/jobs", json={})).json()["job_id"]
        path = f"/jobs/{job_id}/stream?on_disconnect=cancel"
        for headers in ({"sec-fetch-mode": "navigate"}, {"sec-fetch-site": "same-site"}):
            assert (await ada.get(path, headers=headers)).status_code == 403
        assert (await ada.get(f"/jobs/{job_id}")).json()["status"] == "running"


async def test_who_is_not_known_is_refused_but_may_ask_whether_the_service_is_there() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan(), client(service, "192.168.1.7") as nobody:
        for path in ("/jobs", "/jobs/x", "/jobs/x/stream"):
            found = await nobody.get(path)
            assert (found.status_code, found.json()["error"]) == (401, "unauthenticated")
            assert found.headers["www-authenticate"] == "Bearer"
        assert (await nobody.post("/pipelines/squares/jobs", json={})).status_code == 401
        assert (await nobody.get("/health")).status_code == 200
        assert (await nobody.get("/ready")).status_code == 200


async def test_metrics_and_priorities_are_only_for_principals_that_are_allowed_to() -> None:
    service = Service(session=inline, pipelines=PIPELINES, authorizer=Tokens())
    async with service.lifespan(), client(service, authorization="ada") as ada:
        assert (await ada.get("/metrics")).status_code == 403
        urgent = {"params": {"x": 1}, "priority": 5}
        refused = await ada.post("/pipelines/squares/jobs", json=urgent)
        assert (refused.status_code, refused.json()["error"]) == (403, "forbidden")
        assert (await ada.post("/pipelines/squares/jobs", json={**urgent, "priority": -5})).status_code == 201
        async with client(service, authorization="root") as root:
            assert (await root.post("/pipelines/squares/jobs", json=urgent)).status_code == 201
            assert (await root.get("/metrics")).status_code == 200


def test_fastapis_test_client_works_with_a_service_that_allows_anyone() -> None:
    with warnings.catch_warnings():  # it wants another client library than the one that everybody has
        warnings.simplefilter("ignore")
        from fastapi.testclient import TestClient
    service = Service(session=inline, pipelines=PIPELINES, authorizer=AllowAnyone())
    app = FastAPI(lifespan=service.lifespan)
    app.mount("/dfm", service.app)
    with TestClient(app) as tester:
        job = tester.post("/dfm/pipelines/squares/jobs", json={"params": {"x": 3}}).json()
        with tester.websocket_connect(f"/dfm/jobs/{job['job_id']}/socket") as socket:
            assert [socket.receive_json()["event"] for _ in range(5)] == ["status", "result", "frame", "status", "end"]


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
            other = await bob.post("/pipelines/squares/jobs", json={**body, "params": {"x": 2}})
            assert other.content == found.content
            assert "'order-17' is taken" in found.json()["message"]
