"""Who is served, and what they may do."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from dfm_async.web import AllowAnyone, Authorizer, Service, TokenAuthorizer
from tests.web.rig import PIPELINES, STREAM, Tokens, client_of, new_service, refusal


def bearer(service: Service) -> dict[str, str]:
    return {"authorization": f"Bearer {service.token}"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
async def test_without_an_authorizer_clients_on_this_machine_need_the_token(host: str) -> None:
    service = new_service(authorizer=None)
    async with service.lifespan(), client_of(service, host) as local:
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


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}], ids=["missing", "wrong"])
async def test_a_refusal_names_the_token_and_where_to_read_about_tokens_per_user(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFM_TOKEN", "a-token-of-the-user")
    authorizers = {" in its variable DFM_TOKEN": None, "": TokenAuthorizer("a-token-of-all-users")}
    for where, authorizer in authorizers.items():
        service = new_service(authorizer=authorizer)
        async with service.lifespan(), client_of(service, "127.0.0.1") as client:
            message = (await client.get("/jobs", headers=headers)).json()["message"]
        assert message.startswith(f"this service needs the token{where}: send it as 'Authorization: Bearer ...'")
        assert message.endswith("for a token per user, see 'Authorizers' on the page 'Web services' of the guide")
    guide = (Path(__file__).parents[2] / "docs" / "web.md").read_text()
    assert "\n# Web services" in guide
    assert "\n### Authorizers\n" in guide


async def test_generated_token_is_printed_at_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = new_service(authorizer=None)
    assert service.token is not None
    assert len(service.token) >= 32
    assert service.token != new_service(authorizer=None).token
    async with service.lifespan():
        assert f"?token={service.token}\n" in capsys.readouterr().err
    monkeypatch.setenv("DFM_TOKEN", "a-token-of-the-user")
    service = new_service(authorizer=None)
    async with service.lifespan():
        assert capsys.readouterr().err == ""
    assert service.token == "a-token-of-the-user"
    assert new_service(authorizer=Tokens()).token is None


@pytest.mark.parametrize("prefix", ["", "/dfm"])
async def test_browser_gets_a_cookie_that_is_not_the_token(prefix: str) -> None:
    service = new_service(authorizer=None)
    app = Starlette(lifespan=service.lifespan, routes=[Mount(prefix or "/", service.app)])
    transport = httpx2.ASGITransport(app, client=("127.0.0.1", 5))
    async with service.lifespan(), httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as browser:
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
        service = new_service(authorizer=TokenAuthorizer(token))
        async with service.lifespan(), client_of(service) as browser:
            entered = await browser.get(f"/?token={token}")
            names.append(entered.headers["set-cookie"].partition("=")[0])
    assert len(set(names)) == 2


async def test_the_cookie_is_only_for_tls_behind_tls() -> None:
    service = new_service(authorizer=TokenAuthorizer("0123456789abcdef"))
    async with service.lifespan(), client_of(service) as browser:
        assert "Secure" in (await browser.get("https://dfm.example/?token=0123456789abcdef")).headers["set-cookie"]


@pytest.mark.parametrize("token", ["short", "t\u00f6k" * 10, "two words and more", "line\nbreak" * 3, 17])
def test_invalid_token_is_refused(token: Any) -> None:
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
async def test_without_an_authorizer_remote_clients_are_refused(outside: dict[str, Any]) -> None:
    service = new_service(authorizer=None, allow_pipelines=True)
    async with service.lifespan(), client_of(service, **outside, **bearer(service)) as far:
        for path in ("/", f"/?token={service.token}", "/jobs", "/jobs/x", "/jobs/x/stream", "/health", "/ready"):
            assert (await far.get(path)).status_code == 403
        for path in ("/pipelines/squares/jobs", "/jobs/x/cancel", "/jobs/x/inputs", "/jobs/x/finish"):
            assert (await far.post(path, json={"params": {"x": 1}})).status_code == 403
        assert service.current is not None
        assert service.current.jobs() == []


async def test_without_an_authorizer_the_service_has_only_names_of_this_machine() -> None:
    service = new_service(authorizer=None)
    async with service.lifespan(), client_of(service, **bearer(service)) as local:
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
    service = new_service(authorizer=authorizer)
    async with service.lifespan(), client_of(service) as browser:
        entered = await browser.get(f"/?token={service.token or token}")
        assert entered.status_code == (200 if how == "anyone" else 303)
        assert (await browser.get("/jobs")).status_code == 200
        assert (await browser.get("/jobs", headers=foreign)).status_code == 403
        assert (await browser.get("/jobs/x/stream?on_disconnect=cancel", headers=foreign)).status_code == 403
        assert (await browser.post("/jobs/x/cancel", headers=foreign)).status_code == 403
        own = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
        assert (await browser.post("/jobs/x/cancel", headers=own)).status_code == 404


async def test_a_link_of_another_site_leads_to_the_page() -> None:
    service = new_service()
    link = {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document", "sec_fetch_mode": "navigate"}
    async with service.lifespan(), client_of(service, **link) as browser:
        assert (await browser.get("/")).status_code == 200
        assert (await browser.get("/?job=x")).status_code == 200


async def test_a_link_cannot_cancel_a_job_whatever_the_authorizer_allows() -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        job_id = (await ada.post("/pipelines/endless/jobs", json={})).json()["job_id"]
        path = f"/jobs/{job_id}/stream?on_disconnect=cancel"
        for headers in ({"sec-fetch-mode": "navigate"}, {"sec-fetch-site": "same-site"}):
            assert (await ada.get(path, headers=headers)).status_code == 403
        assert (await ada.get(f"/jobs/{job_id}")).json()["status"] == "running"


async def test_unknown_client_may_use_only_the_probes() -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan(), client_of(service, "192.168.1.7") as nobody:
        for path in ("/jobs", "/jobs/x", "/jobs/x/stream"):
            found = await nobody.get(path)
            assert (found.status_code, found.json()["error"]) == (401, "unauthenticated")
            assert found.headers["www-authenticate"] == "Bearer"
        assert (await nobody.post("/pipelines/squares/jobs", json={})).status_code == 401
        assert (await nobody.get("/health")).status_code == 200
        assert (await nobody.get("/ready")).status_code == 200


async def test_metrics_and_priorities_need_a_permission() -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        assert (await ada.get("/metrics")).status_code == 403
        assert (await ada.get("/stats")).status_code == 403
        urgent = {"params": {"x": 1}, "priority": 5}
        assert await refusal(ada.post("/pipelines/squares/jobs", json=urgent)) == (403, "forbidden")
        assert (await ada.post("/pipelines/squares/jobs", json={**urgent, "priority": -5})).status_code == 201
        async with client_of(service, authorization="root") as root:
            assert (await root.post("/pipelines/squares/jobs", json=urgent)).status_code == 201
            assert (await root.get("/metrics")).status_code == 200


@pytest.mark.parametrize("authorizer", [AllowAnyone(), None], ids=["anyone", "token"])
def test_the_test_client_of_fastapi_works_with_one_line(authorizer: Authorizer | None) -> None:
    with warnings.catch_warnings():  # it wants another client library than the one that everybody has
        warnings.simplefilter("ignore")
        from fastapi.testclient import TestClient
    service = new_service(authorizer=authorizer)
    app = FastAPI(lifespan=service.lifespan)
    app.mount("/dfm", service.app)
    headers = {"host": "localhost", "authorization": f"Bearer {service.token}"}
    made = TestClient(app) if authorizer else TestClient(app, client=("127.0.0.1", 0), headers=headers)
    expected = ["status", "result", "frame", "status", "end"]
    with made as tester:
        job = tester.post("/dfm/pipelines/squares/jobs", json={"params": {"x": 3}}).json()
        with tester.websocket_connect(f"/dfm/jobs/{job['job_id']}/socket") as socket:
            assert [socket.receive_json()["event"] for _ in range(5)] == expected
        stream = tester.post("/dfm/pipelines/squares/jobs", json={"params": {"x": 3}}, headers=STREAM)
        assert re.findall(r"^event: (\w+)$", stream.text, re.MULTILINE) == expected


def test_the_test_client_is_told_how_to_be_accepted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from starlette.testclient import TestClient
    with TestClient(new_service(authorizer=None).app) as tester:
        refused = tester.get("/jobs")
        assert refused.status_code == 403
        assert "in tests: Service(authorizer=AllowAnyone())" in refused.json()["message"]


ROUTES = [
    ("GET", ""),
    ("GET", "/events"),
    ("GET", "/stream"),
    ("POST", "/inputs"),
    ("POST", "/finish"),
    ("POST", "/cancel"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_job_of_another_principal_is_not_found(method: str, path: str) -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        job = (await ada.post("/pipelines/squares/jobs", json={"params": {"x": 1}, "open": True})).json()
        assert job["principal"] == "ada"
        body = {"params": {"x": 2}} if path == "/inputs" else {}
        async with client_of(service, authorization="bob") as bob:
            found = await bob.request(method, f"/jobs/{job['job_id']}{path}", json=body)
            nothing = await bob.request(method, f"/jobs/nothing{path}", json=body)
            assert (found.status_code, found.content) == (404, nothing.content)
            assert (await bob.get("/jobs")).json()["jobs"] == []
        assert len((await ada.get("/jobs")).json()["jobs"]) == 1
        assert (await ada.get(f"/jobs/{job['job_id']}")).json()["status"] == "running"
        if path != "/stream":
            async with client_of(service, authorization="root") as root:
                found = await root.request(method, f"/jobs/{job['job_id']}{path}", json=body)
                assert found.status_code in (200, 202)


async def test_jobs_that_the_application_started_itself_belong_to_no_principal() -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan():
        assert service.current is not None
        job = await service.current.execute(PIPELINES["squares"], {"x": 2})
        async with client_of(service, authorization="ada") as ada:
            assert (await ada.get(f"/jobs/{job.job_id}")).status_code == 404


async def test_read_only_principal_gets_forbidden() -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="eve") as eve:
        assert await refusal(eve.post("/pipelines/squares/jobs", json={"params": {"x": 1}})) == (403, "forbidden")
        assert service.current is not None
        job = await service.current.execute(PIPELINES["endless"], label="eve")
        assert (await eve.get(f"/jobs/{job.job_id}")).status_code == 200
        assert (await eve.post(f"/jobs/{job.job_id}/cancel")).status_code == 403
        assert (await eve.get(f"/jobs/{job.job_id}/stream?on_disconnect=cancel")).status_code == 403


async def test_failed_sets_run_again_for_the_principal_that_wants_it() -> None:
    service = new_service(authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        assert service.current is not None
        job = await service.current.execute(PIPELINES["failing"], [{"x": 1}, {"x": 2}], label="ada", priority=7)
        retry = f"/jobs/{job.job_id}/retry"
        await job.wait_until_finished()
        async with client_of(service, authorization="bob") as bob:
            assert (await bob.post(retry)).status_code == 404
        async with client_of(service, authorization="root") as root:
            found = await root.post(retry)
            assert (found.status_code, found.json()["principal"]) == (201, "root")
        found = await ada.post(retry)
        assert (found.status_code, found.json()["retry_of"], found.json()["sets"]) == (201, job.job_id, 2)
        again = await service.current.reattach(found.json()["job_id"])
        assert again.plan is job.plan
        assert again._known().spec.priority == 0, "ada may not have one above 0"
        running = await service.current.execute(PIPELINES["endless"], label="ada")
        finished = await service.current.execute(PIPELINES["squares"], {"x": 1}, label="ada")
        await finished
        assert await refusal(ada.post(f"/jobs/{running.job_id}/retry")) == (409, "not ended")
        assert await refusal(ada.post(f"/jobs/{finished.job_id}/retry")) == (409, "refused")
        eves = await service.current.execute(PIPELINES["failing"], {"x": 1}, label="eve")
        await eves.wait_until_finished()
        async with client_of(service, authorization="eve") as eve:
            assert await refusal(eve.post(f"/jobs/{eves.job_id}/retry")) == (403, "forbidden")


async def test_job_id_of_another_principal_is_taken() -> None:
    service = new_service(authorizer=Tokens())
    body = {"params": {"x": 1}, "job_id": "order-17"}
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        assert (await ada.post("/pipelines/squares/jobs", json=body)).status_code == 201
        async with client_of(service, authorization="bob") as bob:
            found = await bob.post("/pipelines/squares/jobs", json=body)
            assert (found.status_code, found.json()["error"]) == (409, "exists")
            other = await bob.post("/pipelines/squares/jobs", json={**body, "params": {"x": 2}})
            assert other.content == found.content
            assert "'order-17' belongs to a job" in found.json()["message"]
