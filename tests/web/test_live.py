"""What is seen live: the stream of the whole service, what operations do, drawings, and the files of the page."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

import pytest

from dfm_async import Pipeline, PlaceParam, Yield
from dfm_async.web import WebLimits
from dfm_async.web.assets import read_assets
from tests.web.rig import Events, Sent, Server, Tokens, all_events, client_of, gates, new_service, serving, square


async def until(found: Events, **wanted: Any) -> list[Sent]:
    """Read up to an event whose data has these members."""
    read = []
    async for event in found:
        read.append(event)
        if wanted.items() <= event.data.items():
            return read
    raise AssertionError(f"the stream has ended: {read}")


async def test_service_stream_sends_all_jobs_and_then_changes(server: Server) -> None:
    gates["live"] = asyncio.Event()
    first = await server.submit("squares", {"x": 2})
    async with server.follow() as found:
        read = await until(found, job_id=first, status="finished")
        assert {event.name for event in read} <= {"job", "sites"}
        second = await server.submit("gated", {"n": 2, "gate": "live"})
        await until(found, job_id=second, status="running")
        gates["live"].set()
        read = await until(found, job_id=second, status="finished")
    assert all(event.id is None for event in read)  # a state, not a history
    assert read[-1].data == (await server.client.get(f"/jobs/{second}")).json()
    await server.streams(0)


async def test_service_stream_can_begin_with_the_active_jobs_only(server: Server) -> None:
    gates["active"] = asyncio.Event()
    ended = await server.submit("squares", {"x": 2})
    await server.finished(ended)
    running = await server.submit("gated", {"n": 2, "gate": "active"})
    async with server.follow("/stream?active=true") as found:
        read = await until(found, job_id=running, status="running")
        gates["active"].set()
        read += await until(found, job_id=running, status="finished")
    assert {event.data["job_id"] for event in read if event.name == "job"} == {running}


async def test_the_stream_of_a_service_is_a_stream_like_others() -> None:
    async with serving(new_service(limits=WebLimits(streams=1, heartbeat=0.05))) as server:
        async with server.follow() as found:
            assert (await server.client.get("/stream")).status_code == 429
            assert (await anext(event async for event in found if event.name == ":")).data == {"comment": "heartbeat"}
            await server.service.drain()
            assert [event.name async for event in found if event.name != ":"][-1] == "drain"
        assert (await server.client.get("/stream")).status_code == 503


async def test_the_stream_of_a_service_ends_with_its_session(server: Server) -> None:
    async with server.follow() as found:
        await until(found, event="sites")
        await server.session.close()
        assert [event.name async for event in found] == ["drain"]


async def test_service_stream_shows_only_what_a_principal_may_see() -> None:
    class NoMetrics(Tokens):
        def allows(self, principal: Any, action: Any, job: Any) -> bool:
            return action != "metrics" and super().allows(principal, action, job)

    async with serving(new_service(authorizer=NoMetrics())) as server:
        for name in ("ada", "bob"):
            headers = {"authorization": name}
            answer = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 1}}, headers=headers)
            assert answer.status_code == 201
        async with server.follow(headers={"authorization": "bob"}) as found:
            read = await until(found, principal="bob", status="finished")
            await server.service.drain()
            read += [event async for event in found]
        assert {event.data.get("principal") for event in read if event.name == "job"} == {"bob"}
        assert "sites" not in {event.name for event in read}
        assert (await server.client.get("/stream")).status_code == 401


async def test_stream_reports_activity_on_request(server: Server) -> None:
    gates["seen"] = asyncio.Event()
    job_id = await server.submit("gated", {"n": 4, "gate": "seen"})
    async with server.follow(f"/jobs/{job_id}/stream?activity=true") as found:
        read = await until(found, event="activity")
        node = read[-1].data["nodes"][0]
        assert read[-1].id is None
        assert (node["node"], node["site"], node["started"], node["done"]) == ("gated#0", "lab", 1, 0)
        gates["seen"].set()
        read = [event async for event in found]
    last = next(event for event in reversed(read) if event.name == "activity")
    assert last.data["nodes"] == [{"node": "gated#0", "site": "lab", "started": 1, "done": 1, "failed": 0}]
    (call,) = last.data["calls"]
    assert call["frame"] == [0]
    assert call["start"] <= call["end"]
    assert not call["failed"]
    assert read[-1].name == "end"  # with the totals before it
    again = await all_events(server.client, f"/jobs/{job_id}/stream?activity=1")
    assert [event.data["nodes"] for event in again if event.name == "activity"] == [last.data["nodes"]]
    for path in (f"/jobs/{job_id}/stream", f"/jobs/{job_id}/stream?activity=false"):
        assert "activity" not in {event.name for event in await all_events(server.client, path)}
    assert (await server.client.get(f"/jobs/{job_id}/stream?activity=perhaps")).status_code == 422


async def test_jobs_are_not_watched_if_there_is_no_page() -> None:
    async with serving(new_service(page=False)) as server:
        job_id = await server.submit("squares", {"x": 1})
        found = await all_events(server.client, f"/jobs/{job_id}/stream?activity=true")
        assert "activity" not in {event.name for event in found}
        assert not (await server.session.reattach(job_id)).watched
        assert (await server.client.get("/")).status_code == 404
        assert (await server.client.get("/page/main.js")).status_code == 404


async def test_the_pipeline_of_a_job_can_be_drawn() -> None:
    async with serving(new_service(authorizer=Tokens())) as server:
        ada, bob = {"authorization": "ada"}, {"authorization": "bob"}
        body = {"params": {"x": 1}}
        job_id = (await server.client.post("/pipelines/squares/jobs", json=body, headers=ada)).json()["job_id"]
        answer = await server.client.get(f"/jobs/{job_id}/graph", headers=ada)
        assert answer.headers["content-type"] == "image/svg+xml"
        drawing = ElementTree.fromstring(answer.text)
        assert drawing.find(".//*[@data-node='square#0']") is not None
        tagged = {**ada, "if-none-match": answer.headers["etag"]}
        same = await server.client.get(f"/jobs/{job_id}/graph", headers=tagged)
        assert (same.status_code, same.content) == (304, b"")
        assert (await server.client.get(f"/jobs/{job_id}/graph", headers=bob)).status_code == 404


async def test_drawing_for_many_clients_is_made_once() -> None:
    drawing: list[str] = []

    def began(*_: object) -> None:
        sys.setprofile(None)
        drawing.append(threading.current_thread().name)

    with Pipeline("long") as long:  # takes longer to draw than it takes the others to come
        values: list[Any] = [square(PlaceParam("x"))]
        for _ in range(300):
            values.append(square(values[-1]))
        Yield(values[-1])
    async with serving(new_service(pipelines={"long": long})) as server:
        job_id = await server.submit("long", {"x": 1})
        await asyncio.gather(*(server.client.get("/health") for _ in range(8)))  # so that they are connected
        threading.setprofile(began)  # is called in each thread that begins
        try:
            asked = await asyncio.gather(*(server.client.get(f"/jobs/{job_id}/graph") for _ in range(8)))
        finally:
            threading.setprofile(None)
        assert {found.status_code for found in asked} == {200}
        assert drawing.count("dfm-drawing") == 1


async def test_tracebacks_need_the_permission_to_debug() -> None:
    async with serving(new_service(authorizer=Tokens())) as server:
        headers = {"authorization": "ada"}
        body = {"params": {"x": 1}, "job_id": "broken"}
        assert (await server.client.post("/pipelines/failing/jobs", json=body, headers=headers)).status_code == 201
        for name, reported in (("ada", False), ("root", True)):
            found = await all_events(server.client, "/jobs/broken/stream", headers={"authorization": name})
            failure = next(event.data for event in found if event.name == "failure")
            assert ("raise ValueError" in str(failure)) is reported
            page = await server.client.get("/jobs/broken/events", headers={"authorization": name})
            assert ("raise ValueError" in page.text) is reported


@pytest.mark.parametrize(
    ("path", "media"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
async def test_page_files_have_strict_headers_and_are_cached(path: str, media: str) -> None:
    service = new_service()
    async with service.lifespan(), client_of(service) as client:
        answer = await client.get(path)
        assert answer.headers["content-type"] == media
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        same = await client.get(path, headers={"if-none-match": f'"other", {answer.headers["etag"]}'})
        assert (same.status_code, same.content) == (304, b"")
        plain = await client.get(path, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == answer.text


def test_page_files_are_served_without_comments_and_with_all_their_lines() -> None:
    sources = {file.name: file.read_text() for file in files("dfm_async.web").joinpath("page").iterdir()}
    served = {name: asset.body.decode() for name, asset in read_assets().items()}
    assert served.keys() == sources.keys()
    for name, source in sources.items():
        pairs = list(zip(source.split("\n"), served[name].split("\n"), strict=True))
        assert all(line in ("", original.strip()) for original, line in pairs)
        assert not [line for _, line in pairs if line.startswith(("//", "/**", "*/"))]
        kept = [original for original, line in pairs if not line and original.strip()]
        assert all(original.strip().startswith(("//", "/**", "*")) for original in kept), name


def test_page_loads_all_its_modules_at_once() -> None:
    served = read_assets()
    loaded = re.findall(r'<link rel="modulepreload" href="page/(.+)">', served["index.html"].body.decode())
    assert sorted([*loaded, "main.js"]) == sorted(name for name in served if name.endswith(".js"))


async def test_the_page_is_found_without_a_slash_at_the_end(server: Server) -> None:
    found = await server.client.get(f"http://127.0.0.1:{server.port}/dfm", follow_redirects=True)
    assert str(found.url).endswith("/dfm/")
    assert found.headers["content-type"].startswith("text/html")


async def test_only_files_of_the_page_are_served() -> None:
    service = new_service()
    async with service.lifespan(), client_of(service) as client:
        for name in ("nothing.js", "..%2Fservice.py", "%2e%2e/service.py", "__init__.py"):
            assert (await client.get(f"/page/{name}")).status_code == 404
    service = new_service(authorizer=None)
    for address, status in (("192.168.1.7", 403), ("127.0.0.1", 401)):
        async with service.lifespan(), client_of(service, address) as client:
            for path in ("/", "/page/main.js"):
                assert (await client.get(path)).status_code == status
