"""A service on a real server in the loop of the test, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from dfm_async import Federation, OperationContext, Pipeline, PlaceParam, Session, Yield
from dfm_async.web import Service

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


def _pipeline(name: str, operation: Any, *params: str, place: str = "yield") -> Pipeline:
    with Pipeline(name) as made:
        Yield(operation(**{param: PlaceParam(param) for param in params}), place=place)
    return made


PIPELINES = {
    "squares": _pipeline("squares", square, "x"),
    "counting": _pipeline("counting", count, "n"),
    "texts": _pipeline("texts", text, "n", "size"),
    "gated": _pipeline("gated", gated, "n", "gate"),
    "endless": _pipeline("endless", forever),
    "failing": _pipeline("failing", fails, "x"),
    "telling": _pipeline("telling", tells, "x"),
}


def inline(**options: Any) -> Session:
    return Session(fed, target="inline", **options)


@dataclass
class Sent:
    """One event of a stream of server-sent events."""

    name: str = "message"
    id: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


async def events(response: httpx.Response) -> AsyncIterator[Sent]:
    """Reads server-sent events; comments are events with the name ``:``."""
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


async def all_events(client: httpx.AsyncClient, path: str, **options: Any) -> list[Sent]:
    async with client.stream("GET", path, **options) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in events(response) if event.name != ":"]


@dataclass
class Server:
    """A server that runs, and a client for it."""

    client: httpx.AsyncClient
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

    async def streams(self, number: int) -> None:
        """Returns when so many streams are open."""
        async with asyncio.timeout(10):
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
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        json_body = headers.get("content-type") == "application/json"
        return Answer(int(head[0].split()[1]), headers, json.loads(body) if json_body else body)

    async def ended(self) -> bool:
        """Waits for the end of the connection; what comes until then is of no interest."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        return True


@asynccontextmanager
async def wire(server: Server) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def free_socket() -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return found


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
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}{prefix}", timeout=30) as client:
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
