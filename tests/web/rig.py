"""A service on a real server in the loop of the test, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from dfm_async import Federation, Job, JobInfo, OperationContext, Session
from dfm_async.web import Action, AllowAnyone, Authorizer, Principal, Service, WebLimits
from tests.support.pipelines import pipeline_of
from tests.support.processes import free_socket
from tests.support.waiting import PROMPT

fed = Federation("numbers")
lab = fed.site("lab")

gates: dict[str, asyncio.Event] = {}
"""What operations of the inline target wait for, by name."""


@lab.operation
async def square(x: int) -> int:
    return x * x


@lab.operation
async def count(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


@lab.operation
async def text(n: int, size: int) -> AsyncIterator[str]:
    for number in range(n):
        yield f"{number} " + "x" * size


@lab.operation
async def gated(n: int, gate: str) -> AsyncIterator[int]:
    """The second half comes when the gate is open."""
    for number in range(n):
        if number == n // 2:
            await gates[gate].wait()
        yield number


@lab.operation
async def forever() -> None:
    await asyncio.Event().wait()


@lab.operation
async def fails(x: int) -> int:
    raise ValueError(f"no {x}")


@lab.operation
async def tells(x: int, context: OperationContext) -> int:
    context.progress(1, 2, "half")
    context.metrics({"loss": 0.5}, step=1)
    return x


PIPELINES = {
    "squares": pipeline_of(square, "x", name="squares"),
    "counting": pipeline_of(count, "n", name="counting"),
    "texts": pipeline_of(text, "n", "size", name="texts"),
    "gated": pipeline_of(gated, "n", "gate", name="gated"),
    "endless": pipeline_of(forever, name="endless"),
    "failing": pipeline_of(fails, "x", name="failing"),
    "telling": pipeline_of(tells, "x", name="telling"),
}


def inline(**options: Any) -> Session:
    return Session(fed, target="inline", **options)


def new_service(**given: Any) -> Service:
    """Return a service that serves anyone; takes options of sessions, limits and services by their names."""
    limits = {name: given.pop(name) for name in WebLimits.__struct_fields__ if name in given}
    session = {name: given.pop(name) for name in ("store", "options", "trace") if name in given}
    defaults = {"pipelines": PIPELINES, "limits": WebLimits(**limits), "authorizer": AllowAnyone()}
    return Service(**{"session": lambda: inline(**session), **defaults, **given})


@dataclass
class Sent:
    """One event of a stream of server-sent events."""

    name: str = "message"
    id: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


Events: TypeAlias = AsyncIterator[Sent]
STREAM = {"accept": "text/event-stream"}
"""The headers of a submission that is answered by the stream of its job."""


async def events(response: httpx2.Response) -> Events:
    """Read server-sent events; comments are events with the name ``:``."""
    found = Sent()
    filled = False
    async for line in response.aiter_lines():
        if not line:
            if filled:
                yield found
            found, filled = Sent(), False
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "":
            yield Sent(":", None, {"comment": value})
        elif name == "event":
            found.name, filled = value, True
        elif name == "id":
            found.id = int(value)
        elif name == "data":
            found.data, filled = json.loads(value), True


async def all_events(client: httpx2.AsyncClient, path: str, **options: Any) -> list[Sent]:
    async with client.stream("GET", path, **options) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in events(response) if event.name != ":"]


async def refusal(request: Awaitable[httpx2.Response]) -> tuple[int, str]:
    """Send a request that is refused; return the status and the error."""
    response = await request
    return response.status_code, response.json()["error"]


@dataclass
class Server:
    """A server that runs, and a client for it."""

    client: httpx2.AsyncClient
    service: Service
    port: int
    uvicorn: uvicorn.Server

    @property
    def session(self) -> Session:
        found = self.service.current
        assert found is not None
        return found

    async def submit(self, name: str, params: Any = {}, **more: Any) -> str:  # noqa: B006 - never changed
        response = await self.client.post(f"/pipelines/{name}/jobs", json={"params": params, **more})
        assert response.status_code == 201, response.text
        return str(response.json()["job_id"])

    async def finished(self, job_id: str) -> Job:
        """Return a job when it has ended."""
        job = await self.session.reattach(job_id)
        await job.wait_until_finished()
        return job

    async def results(self, job_id: str) -> list[Any]:
        """Return the values that a job yields, when it has ended."""
        found = await all_events(self.client, f"/jobs/{job_id}/stream")
        return [event.data["value"] for event in found if event.name == "result"]

    @asynccontextmanager
    async def follow(self, path: str = "/stream", method: str = "GET", **options: Any) -> AsyncIterator[Events]:
        """Open a stream; give its events."""
        async with self.client.stream(method, path, **options) as response:
            assert response.is_success, await response.aread()
            yield events(response)

    async def streams(self, number: int) -> None:
        """Return when this number of streams is open."""
        async with asyncio.timeout(PROMPT):
            await self.service._state.streams.until(number)


@dataclass
class Answer:
    """What a server said to a request that was written by hand."""

    status: int
    headers: dict[str, str]
    data: Any


class Wire:
    """A connection on which a test writes what it wants, as slowly as it wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: str | bytes) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, size: int | None = None, **headers: str) -> None:
        """Sends a request; with a size, only the beginning of one with so many bytes."""
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"content-length: {len(body) if size is None else size}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def answer(self) -> Answer:
        async with asyncio.timeout(PROMPT):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        json_body = headers.get("content-type") == "application/json"
        return Answer(int(head[0].split()[1]), headers, json.loads(body) if json_body else body)

    async def ended(self) -> bool:
        """Waits for the end of the connection; what comes until then is of no interest."""
        async with asyncio.timeout(PROMPT):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        return True


class Tokens(Authorizer):
    """A client that sends a name is that principal. Eve may only read her jobs, root may do everything."""

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        name = request.headers.get("authorization")
        return None if name is None else Principal(name)

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        if principal.id == "root":
            return True
        if principal.id == "eve" and action not in ("read", "list"):
            return False
        return super().allows(principal, action, job)


def client_of(
    service: Service, host: str | None = "127.0.0.1", http: str = "1.1", **headers: str
) -> httpx2.AsyncClient:
    """Return a client without a server, which seems to come from some address."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["client"] = None if host is None else (host, 1234)
        scope["http_version"] = http
        await service.app(scope, receive, send)

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost:8000", headers=named)


@asynccontextmanager
async def wire(server: Server) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def unread(server: Server, path: str, *headers: str, window: int = 4096) -> AsyncIterator[socket.socket]:
    """Send a request on a connection from which nothing is read; the kernel buffers little for it."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        found.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(found, ("127.0.0.1", server.port))
        lines = [f"GET /dfm{path} HTTP/1.1", "host: localhost", *headers, "", ""]
        await loop.sock_sendall(found, "\r\n".join(lines).encode())
        yield found


async def rest_of(connection: socket.socket) -> bytes:
    """Read from a connection until its end."""
    data = b""
    async with asyncio.timeout(PROMPT):
        while part := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
            data += part
    return data


@asynccontextmanager
async def serving(service: Service, app: Any = None, prefix: str = "/dfm") -> AsyncIterator[Server]:
    """Runs a server; the service is mounted, unless an application that has it is given."""
    if app is None:
        app = Starlette(lifespan=service.lifespan, routes=[Mount(prefix, service.app)])
    listening = free_socket()
    port = listening.getsockname()[1]
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, ws="websockets-sansio")
    server = _Server(config)
    # Handled here and not by serve(): signals are none of a test's business.
    task = asyncio.create_task(server.run_here(listening))
    try:
        await server.up.wait()
        assert server.started, "the application did not start; its log says why"
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}{prefix}", timeout=30) as client:
            yield Server(client, service, port, server)
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def run_here(self, listening: socket.socket) -> None:
        with listening, contextlib.suppress(SystemExit):  # of an application that does not start
            await self._serve([listening])
        self.up.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()
