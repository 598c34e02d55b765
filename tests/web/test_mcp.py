"""Pipelines as tools for agents, with the client of the official SDK over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    CallToolResult,
    TextContent,
)
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount, Route

from dfm_async import Federation, JobInfo, JobStatus, Pipeline, PlaceParam, Session, SessionClosed, Yield
from dfm_async.web import Action, Principal
from dfm_async.wire.json_values import JsonValues
from tests.support.pipelines import pipeline_of
from tests.support.waiting import PROMPT, until
from tests.web.rig import PIPELINES, Server, Tokens, count, new_service, serving, square, wire

MODERN, LEGACY = "2026-07-28", "legacy"


@pytest.fixture(params=[MODERN, LEGACY])
def mode(request: pytest.FixtureRequest) -> str:
    """The protocol without sessions, and the one before it."""
    return str(request.param)


@asynccontextmanager
async def tools(path: str = "/mcp", **given: Any) -> AsyncIterator[Server]:
    """Serve tools beside a service."""
    service = new_service(**given)
    found = service.mcp()
    route = Mount(path.rstrip("/"), found) if path.endswith("/") else Route(path, found)
    app = Starlette(lifespan=service.lifespan, routes=[route, Mount("/dfm", service.app)])
    async with serving(service, app) as server:
        yield server


@asynccontextmanager
async def agent(server: Server, mode: str = MODERN, path: str = "/mcp", **headers: str) -> AsyncIterator[Client]:
    """Connect the client of the SDK."""
    async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
        transport = streamable_http_client(f"http://127.0.0.1:{server.port}{path}", http_client=http)
        async with Client(transport, mode=mode, cache=None) as client:
            yield client


def texts(result: CallToolResult) -> list[str]:
    return [block.text for block in result.content if isinstance(block, TextContent)]


async def running_job(server: Server, pipeline: str) -> str:
    """Return the id of the job of a pipeline, when there is one."""
    async with asyncio.timeout(PROMPT):
        async for info in server.session.changes(0.01):
            if info.pipeline == pipeline and info.status is JobStatus.RUNNING:
                return info.job_id
    raise AssertionError("the session was closed")


# what a tool is


@dataclass
class Station:
    name: str
    height: float = 0.0


stations = Federation("stations")
north = stations.site("north")


@north.operation
def describe(station: Station, days: int, note: str) -> str:
    return f"{station.name}: {days} {note}"


@stations.pipeline
def report(station: Station, days: int = 7, note: str = "days") -> str:
    """Describe a station.

    Args:
        station: which one.
        days: how many days back.
    """
    text = describe(station, days, note)
    Yield(text, place="live")
    return text


with Pipeline("two places") as two_places:
    Yield(square(PlaceParam("x")), place="squares")
    Yield(count(3), place="numbers")


async def test_a_tool_has_the_signature_of_its_pipeline(mode: str) -> None:
    plain = pipeline_of(describe, "station", "days", "note", name="Plain text")
    session = Session(stations, target="inline")
    async with tools(session=session, pipelines={"report": report, "plain": plain}) as server:
        async with agent(server, mode) as client:
            tool, other = (await client.list_tools()).tools
            schema = tool.input_schema
            assert (tool.name, other.name, other.title) == ("report", "plain", "Plain text")
            assert tool.description == "Describe a station."
            assert schema["properties"]["days"] == {
                "type": "integer",
                "default": 7,
                "description": "how many days back.",
            }
            assert schema["properties"]["station"]["description"] == "which one."
            assert schema["$defs"]["Station"]["required"] == ["name"]
            assert (schema["required"], schema["additionalProperties"]) == (["station"], False)
            result = await client.call_tool("report", {"station": {"name": "north"}})
            assert (result.structured_content, texts(result)) == ({"result": "north: 7 days"}, ["north: 7 days"])


async def test_results_are_structured_and_text() -> None:
    async with tools(pipelines={**PIPELINES, "places": two_places}) as server, agent(server) as client:
        one = await client.call_tool("squares", {"x": 3})
        assert (one.structured_content, texts(one), one.is_error) == ({"result": 9}, ["9"], False)
        several = await client.call_tool("counting", {"n": 3})
        assert (several.structured_content, texts(several)) == ({"results": [0, 1, 2]}, ["[0,1,2]"])
        none = await client.call_tool("counting", {"n": 0})
        assert (none.structured_content, texts(none)) == ({"results": []}, ["the pipeline has ended without a result"])
        places = await client.call_tool("places", {"x": 3})
        assert isinstance(places.structured_content, dict)
        assert {"place": "squares", "value": 9} in places.structured_content["results"]
        assert one.meta is not None
        assert (await server.session.reattach(one.meta["job_id"])).status is JobStatus.FINISHED


async def test_large_results_are_summarised_and_the_rest_is_omitted(mode: str) -> None:
    async with tools(record_bytes=300) as server, agent(server, mode) as client:
        large = await client.call_tool("texts", {"n": 1, "size": 1000})
        assert large.structured_content == {"result": {"type": "str", "json_bytes": 1004, "omitted": True}}
        many = await client.call_tool("texts", {"n": 10, "size": 97})
        assert isinstance(many.structured_content, dict)
        assert (len(many.structured_content["results"]), many.structured_content["omitted"]) == (2, 8)
        assert texts(many)[1] == "8 further results are omitted, because they are too large for one response"


async def test_progress_and_results_are_streamed(mode: str) -> None:
    seen: list[tuple[float, str | None]] = []

    async def report(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))

    async with tools() as server, agent(server, mode) as client:
        result = await client.call_tool("telling", {"x": 3}, progress_callback=report)
        assert result.structured_content == {"result": 3}
        (first, said), (second, streamed) = seen
        assert (first, second, said) == (1, 2, "tells#0 at lab: 1 of 2, half")
        assert json.loads(streamed or "")["value"] == 3


# failures


async def test_arguments_that_do_not_fit_are_an_error_of_the_tool(mode: str) -> None:
    async with tools() as server, agent(server, mode) as client:
        result = await client.call_tool("squares", {"x": "three", "y": 1})
        assert result.is_error
        head, *problems = texts(result)[0].splitlines()
        assert head == "the parameters do not fit"
        assert problems[0] == "- unknown parameter 'y' (the pipeline has: 'x')"
        assert problems[1].startswith("- parameter 'x': Input should be a valid integer")
        with pytest.raises(MCPError, match="there is no tool 'circles' here"):
            await client.call_tool("circles", {})
        assert not server.session.infos()


async def test_a_failed_pipeline_shows_its_traceback_only_to_those_who_may_debug(mode: str) -> None:
    async with tools(authorizer=Tokens()) as server:
        for name, lines in (("ada", 1), ("root", 6)):
            async with agent(server, mode, authorization=name) as client:
                result = await client.call_tool("failing", {"x": 3})
                head, error = texts(result)
                assert (result.is_error, head) == (True, "the pipeline failed")
                assert error.splitlines()[0] == "fails#0 at site 'lab' raised ValueError: no 3"
                assert len(error.splitlines()) == lines


# the ends of calls


async def ended(server: Server, job_id: str) -> JobInfo:
    async with asyncio.timeout(PROMPT):
        return (await server.finished(job_id)).info()


async def test_cancelling_a_call_cancels_its_job(mode: str) -> None:
    async with tools() as server, agent(server, mode) as client:
        call = asyncio.create_task(client.call_tool("endless", {}))
        job_id = await running_job(server, "endless")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        info = await ended(server, job_id)
        assert info.status is JobStatus.ABORTED
        assert str(info.reason).startswith("the client of the tool call has cancelled it")
        assert (await client.call_tool("squares", {"x": 2})).structured_content == {"result": 4}


def request(method: str, **params: Any) -> dict[str, Any]:
    """Return the arguments of a request that is written by hand."""
    meta = {PROTOCOL_VERSION_META_KEY: MODERN, CLIENT_CAPABILITIES_META_KEY: {}, "progressToken": 1}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": MODERN, "mcp-method": method}
    return {"json": body, "headers": {**headers, **({"mcp-name": params["name"]} if "name" in params else {})}}


async def initialized(client: httpx2.AsyncClient, **headers: str) -> httpx2.Response:
    """Open a session by hand."""
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    accept = {"accept": "application/json, text/event-stream"}
    return await client.post("/mcp", json=body, headers={**accept, **headers})


@asynccontextmanager
async def by_hand(server: Server, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=30) as client:
        yield client


async def refused(request: Awaitable[httpx2.Response]) -> tuple[int, str]:
    """Send a request that is refused; return the status and the message."""
    response = await request
    assert response.json()["jsonrpc"] == "2.0"
    return response.status_code, response.json()["error"]["message"]


async def test_a_client_that_disconnects_cancels_its_job(mode: str) -> None:
    async with tools() as server, by_hand(server) as client:
        given = request("tools/call", name="endless", arguments={})
        if mode == LEGACY:
            session_id = (await initialized(client)).headers["mcp-session-id"]
            given["headers"] = {"accept": given["headers"]["accept"], "mcp-session-id": session_id}
            del given["json"]["params"]["_meta"]
        call = asyncio.create_task(client.post("/mcp", **given))
        job_id = await running_job(server, "endless")
        call.cancel()  # closes the connection, and sends nothing more
        assert (await ended(server, job_id)).status is JobStatus.ABORTED
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    async with tools(stall=0.2) as server, wire(server) as connection:
        given = request("tools/call", name="texts", arguments={"n": 10**7, "size": 10_000})
        await connection.post("/mcp", json.dumps(given["json"]).encode(), **given["headers"])
        info = await ended(server, await running_job(server, "texts"))
        assert info.status is JobStatus.ABORTED


async def test_a_service_that_drains_ends_calls(mode: str) -> None:
    async with tools() as server, agent(server, mode) as client:
        call = asyncio.create_task(client.call_tool("endless", {}))
        job_id = await running_job(server, "endless")
        async with asyncio.timeout(PROMPT):
            await server.service.drain()
            result = await call
        assert result.is_error
        assert texts(result) == [f"the service is shutting down: the call ended before its job {job_id!r}"]
        assert (await server.session.reattach(job_id)).status is JobStatus.RUNNING


async def test_tools_can_be_served_again_and_from_another_task() -> None:
    service = new_service()
    app = service.mcp()
    assert service.mcp() is app
    for _ in range(2):
        context = service.lifespan()
        await asyncio.create_task(context.__aenter__())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.post("/", **request("tools/call", name="squares", arguments={"x": 3}))
            assert json.loads(answer.text.split("data: ")[-1])["result"]["structuredContent"] == {"result": 9}
            await initialized(client)
        await asyncio.create_task(context.__aexit__(None, None, None))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.post("/", **request("tools/list"))).status_code == 503


# access


async def test_principals_see_and_call_what_the_authorizer_allows(mode: str) -> None:
    async with tools(authorizer=Tokens()) as server:
        async with agent(server, mode, authorization="ada") as ada, agent(server, mode, authorization="bob") as bob:
            for client, name in ((ada, "ada"), (bob, "bob")):
                result = await client.call_tool("squares", {"x": 2})
                assert result.meta is not None
                job_id = result.meta["job_id"]
                assert (await server.session.reattach(job_id)).info().label == name
                for other in ("ada", "bob"):
                    found = await server.client.get(f"/jobs/{job_id}", headers={"authorization": other})
                    assert found.status_code == (200 if other == name else 404)
        async with agent(server, mode, authorization="eve") as eve:
            assert len((await eve.list_tools()).tools) == len(PIPELINES)
            result = await eve.call_tool("squares", {"x": 2})
            assert (result.is_error, texts(result)) == (True, ["you may not submit here"])


async def test_principals_who_may_not_list_see_no_tools(mode: str) -> None:
    class Hidden(Tokens):
        def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
            return action != "list"

    async with tools(authorizer=Hidden()) as server, agent(server, mode, authorization="ada") as client:
        with pytest.raises(MCPError, match="you may not list here"):
            await client.list_tools()


async def test_unknown_clients_are_refused(mode: str) -> None:
    async with tools(authorizer=Tokens()) as server:
        with pytest.raises(ExceptionGroup) as caught:
            async with agent(server, mode) as client:
                await client.call_tool("squares", {"x": 2})
        found = caught.group_contains(MCPError, match="the request has no credentials that this service accepts")
        assert found, caught.value
        async with by_hand(server) as client:
            answer = await client.post("/mcp", **request("tools/list"))
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_service_without_authorizer_checks_token_host_and_origin() -> None:
    async with tools(authorizer=None) as server, by_hand(server) as client:
        token = {"authorization": f"Bearer {server.service.token}"}
        given = request("tools/list")
        wanted = given.pop("headers")
        for headers, status in (
            (token, 200),
            ({"authorization": "Bearer wrong"}, 401),
            ({**token, "host": "evil.example"}, 403),
            ({**token, "x-forwarded-for": "10.0.0.1"}, 403),
        ):
            assert (await client.post("/mcp", **given, headers={**wanted, **headers})).status_code == status
    async with tools() as server, by_hand(server, origin="http://evil.example") as client:
        assert await refused(client.post("/mcp", **request("tools/list"))) == (
            403,
            "pages of other sites are not served",
        )


async def test_a_session_belongs_to_its_principal() -> None:
    async with tools(authorizer=Tokens(), streams_per_principal=2) as server, by_hand(server) as client:
        session_id = (await initialized(client, authorization="ada")).headers["mcp-session-id"]
        given = request("tools/call", name="squares", arguments={"x": 2})
        del given["json"]["params"]["_meta"]
        headers = {"accept": given.pop("headers")["accept"], "mcp-session-id": session_id}
        gone = "there is no such session: it has ended, or was never opened here"
        assert await refused(client.post("/mcp", **given, headers={**headers, "authorization": "bob"})) == (404, gone)
        assert (await client.post("/mcp", **given, headers={**headers, "authorization": "ada"})).status_code == 200
        assert (await initialized(client, authorization="ada")).status_code == 200
        assert await refused(initialized(client, authorization="ada")) == (
            429,
            "you have 2 sessions open, as many as you may have",
        )
        assert (await initialized(client, authorization="bob")).status_code == 200
        await client.delete("/mcp", headers={**headers, "authorization": "ada"})
        assert (await initialized(client, authorization="ada")).status_code == 200


async def test_requests_have_the_limits_of_the_service() -> None:
    async with tools(body_bytes=2000, json_depth=8) as server, by_hand(server) as client:
        deep: Any = 1
        for _ in range(10):
            deep = [deep]
        large = request("tools/call", name="squares", arguments={"x": "y" * 3000})
        nested = request("tools/call", name="squares", arguments={"x": deep})
        assert await refused(client.post("/mcp", **large)) == (413, "the body may have 2000 bytes")
        assert await refused(client.post("/mcp", **nested)) == (422, "the body may be 8 levels deep")
        assert (await client.get("/mcp")).headers["allow"] == "POST, DELETE"
        assert await refused(client.get("/mcp")) == (405, "GET is not possible at this address")
    async with tools(jobs_per_principal=1) as server, agent(server) as client:
        call = asyncio.create_task(client.call_tool("endless", {}))
        await running_job(server, "endless")
        result = await client.call_tool("squares", {"x": 2})
        assert texts(result) == ["1 of your jobs have not ended, as many as you may have"]
        call.cancel()
        await asyncio.wait([call])


async def test_tools_can_be_mounted() -> None:
    async with tools("/mcp/") as server, agent(server, path="/mcp") as client:
        assert (await client.call_tool("squares", {"x": 3})).structured_content == {"result": 9}


async def test_what_cannot_be_a_tool_is_refused() -> None:
    with pytest.raises(ValueError, match="the name 'a~b' of a pipeline cannot be that of a tool"):
        new_service(pipelines={"a~b": PIPELINES["squares"]}).mcp()
    service = new_service()
    async with service.lifespan():
        with pytest.raises(SessionClosed, match=r"call service.mcp\(\) before its lifespan begins"):
            service.mcp()


# failures


class Odd(BaseException):
    """Not an Exception, as the panics of libraries that are written in Rust."""


async def test_a_value_that_raises_anything_fails_only_its_own_requests(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(value: Any) -> None:
        if value == 169 or (isinstance(value, dict) and value.get("value") == 169):
            raise Odd("no value for you")

    for name in ("encode", "encode_whole"):
        own = getattr(JsonValues, name)

        def encode(self: JsonValues, value: Any, own: Any = own) -> bytes:
            refuse(value)
            return bytes(own(self, value))

        monkeypatch.setattr(JsonValues, name, encode)
    async with tools() as server, agent(server, mode) as client, agent(server, mode) as other:
        open_call = asyncio.create_task(other.call_tool("endless", {}))
        await running_job(server, "endless")
        with pytest.raises(MCPError, match="Internal server error"):
            await client.call_tool("squares", {"x": 13})
        assert not open_call.done()
        open_call.cancel()
        for working in (client, other):
            assert (await working.call_tool("squares", {"x": 3})).structured_content == {"result": 9}
        job_id = await server.submit("squares", {"x": 13})
        await server.finished(job_id)
        async with asyncio.timeout(PROMPT):
            for path in ("events", "stream"):
                with contextlib.suppress(httpx2.HTTPError):
                    await server.client.get(f"/jobs/{job_id}/{path}")
            assert await server.results(await server.submit("squares", {"x": 3})) == [9]
            await server.service._state.streams.until(0)
        await asyncio.wait([open_call])


async def test_tools_are_served_again_after_an_error_has_ended_all_sessions() -> None:
    async with tools() as server:
        endpoint: Any = server.service.mcp()
        async with agent(server, LEGACY) as client:
            manager = endpoint._manager

            async def fail() -> None:
                raise Odd

            manager._task_group.start_soon(fail)
            await until(lambda: endpoint._manager not in (None, manager))
            with pytest.raises(MCPError):
                await client.list_tools()
        async with agent(server, LEGACY) as client:
            assert len((await client.list_tools()).tools) == len(PIPELINES)


async def test_replaced_pipelines_are_the_tools_of_the_next_request(mode: str) -> None:
    async with tools() as server, agent(server, mode) as client:
        assert len((await client.list_tools()).tools) == len(PIPELINES)
        server.service._replace_pipelines({"other": pipeline_of(square, "x")})
        assert [tool.name for tool in (await client.list_tools()).tools] == ["other"]
        assert (await client.call_tool("other", {"x": 3})).structured_content == {"result": 9}
        with pytest.raises(MCPError, match="there is no tool 'squares' here"):
            await client.call_tool("squares", {"x": 3})


async def test_names_of_tools_cannot_be_found_out_without_permission(mode: str) -> None:
    async with tools(authorizer=Tokens()) as server, agent(server, mode, authorization="eve") as eve:
        for name in ("squares", "circles"):
            result = await eve.call_tool(name, {"x": 2})
            assert (result.is_error, texts(result)) == (True, ["you may not submit here"])


@pytest.mark.parametrize("first", [False, True], ids=["started here", "started before"])
async def test_other_applications_keep_their_sse_watcher(first: bool) -> None:
    async def endless() -> AsyncIterator[str]:
        yield "one"
        await asyncio.Event().wait()

    async def stream(_request: Request) -> EventSourceResponse:
        return EventSourceResponse(endless())

    async def begin(client: httpx2.AsyncClient, stack: contextlib.AsyncExitStack) -> None:
        response = await stack.enter_async_context(client.stream("GET", "/"))
        lines: Any = response.aiter_lines()
        await anext(lines)
        stack.push_async_callback(lines.aclose)

    other = Starlette(routes=[Route("/", stream)])
    async with serving(new_service(), other) as apart, contextlib.AsyncExitStack() as stack:
        address = f"http://127.0.0.1:{apart.port}"
        client = await stack.enter_async_context(httpx2.AsyncClient(base_url=address, timeout=30))
        if first:
            await begin(client, stack)
        async with tools() as server, agent(server) as ours:
            await ours.list_tools()
            if not first:
                await begin(client, stack)
        (watcher,) = [task for task in asyncio.all_tasks() if "_shutdown_watcher" in repr(task.get_coro())]
        assert not watcher.cancelling()
    watcher.cancel()
    await asyncio.wait([watcher])
