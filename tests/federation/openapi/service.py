"""A service with all that can go wrong, on a real server in the loop of the test."""

from __future__ import annotations

import asyncio
import base64
import gzip
import inspect
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.processes import free_socket
from tests.web.rig import _Server

TOKEN = "s3cr3t-t0ken"


@dataclass
class Seen:
    """One request that came."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Service:
    """Where it is, and what it was asked."""

    url: str
    seen: list[Seen] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """What the next answers of ``/flaky`` are; then it is well."""
    repeated: list[str] = field(default_factory=list)
    """What ``/repeats`` responds with."""

    async def echo(self, request: Request) -> Response:
        seen = self.seen[-1]
        return JSONResponse(
            {"path": seen.path, "query": seen.query, "headers": seen.headers, "body": seen.body.decode("latin-1")}
        )

    async def flaky(self, _request: Request) -> Response:
        if self.statuses:
            status, headers = self.statuses.pop(0)
            return JSONResponse({"detail": f"status {status}"}, status, headers)
        return JSONResponse({"tries": len(self.seen)})

    async def slow(self, _request: Request) -> Response:
        self.asked.set()
        await self.go_on.wait()
        return JSONResponse("late")

    async def drips(self, _request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            while not self.go_on.is_set():
                yield b" "
                await asyncio.sleep(0.01)

        return StreamingResponse(content(), media_type="application/json")

    async def wrong(self, _request: Request) -> Response:
        return Response(b"<html>no JSON</html>", media_type="application/json")

    async def marked(self, _request: Request) -> Response:
        return Response(b'\xef\xbb\xbf{"a": 1}', media_type="application/json")

    async def huge(self, _request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b"x" * 10_000

        return StreamingResponse(content(), media_type="application/octet-stream")

    async def bomb(self, _request: Request) -> Response:
        return Response(gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": "gzip"})

    async def packed(self, request: Request) -> Response:
        """Answers with the encodings and the data that the request names."""
        how, data = request.query_params["how"], b"some text " * 10
        if how == "twice":
            inner = gzip.compress(gzip.compress(bytes(10_000_000)))
            return Response(inner, headers={"Content-Encoding": "gzip, gzip"})
        content = {
            "once": gzip.compress(data),
            "in pieces": gzip.compress(data[:50]) + gzip.compress(data[50:]),
            "cut": gzip.compress(data)[:-12],
            "not at all": data,
            "empty": b"",
        }[how]
        return Response(content, media_type="text/plain", headers={"Content-Encoding": "gzip"})

    async def text(self, _request: Request) -> Response:
        return PlainTextResponse("grüße".encode("latin-1"), media_type="text/plain; charset=latin-1")

    async def nothing(self, _request: Request) -> Response:
        return Response(status_code=204)

    async def elsewhere(self, _request: Request) -> Response:
        return RedirectResponse("http://internal.example/secret")

    async def cookies(self, request: Request) -> Response:
        found = JSONResponse(dict(request.cookies))
        found.set_cookie("session", "tracked")
        return found

    async def repeats(self, _request: Request) -> Response:
        return PlainTextResponse(f"who are you, {' '.join(self.repeated)}?", 401)

    async def denied(self, request: Request) -> Response:
        said = request.headers.get("authorization", "")
        basic = f"Basic {base64.b64encode(b'ann:pass').decode()}"
        allowed = said in (f"Bearer {TOKEN}", basic) or TOKEN in (
            request.query_params.get("key"),
            request.headers.get("x-key"),
            request.cookies.get("key"),
        )
        return JSONResponse("welcome") if allowed else JSONResponse({"detail": f"who are you, {said}?"}, 401)

    def app(self) -> Any:
        names = [name for name, found in vars(Service).items() if inspect.iscoroutinefunction(found) and name != "echo"]
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        routes = [Route(f"/v1/{name}", getattr(self, name), methods=methods) for name in names]
        routes.append(Route("/v1/{rest:path}", self.echo, methods=methods))
        inner = Starlette(routes=routes)

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                body, more = b"", True
                while more:
                    message = await receive()
                    body, more = body + message.get("body", b""), message.get("more_body", False)
                headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
                path = scope["raw_path"].decode()
                self.seen.append(Seen(scope["method"], path, scope["query_string"].decode(), headers, body))
            await inner(scope, receive, send)

        return noting


class _Prompt(_Server):
    """Ends as soon as it is stopped, and not at the next tick of its clock."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)


@asynccontextmanager
async def serving_app(app: Any) -> AsyncIterator[str]:
    """Runs an application; gives its address."""
    listening = free_socket()
    server = _Prompt(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    task = asyncio.create_task(server.run_here(listening))
    try:
        await server.up.wait()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.stop.set()
        await task


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    """Runs the service."""
    service = Service("")
    async with serving_app(service.app()) as url:
        service.url = f"{url}/v1"
        try:
            yield service
        finally:
            service.go_on.set()


def body_of(value: Any) -> Any:
    """The JSON that a request had."""
    return json.loads(value["body"])
