"""Many clients read one job of a web service as server-sent events.

The job has ended; so many readers at once take all its events from the beginning, over real connections from a process
of their own. The figure is events per second of all readers together. The peer is an endpoint of Starlette on the same
server that sends the same bytes from one list, in chunks of the same size: it reads no log, makes no records, and
neither resumes, drains nor drops slow clients. Claimed: at least half of what the peer does.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route

from benchmarks.common import Figure, Options, Target, interleave, main
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.web import AllowAnyone, Service, WebLimits

EVENTS = {1: 20_000, 100: 4_000, 500: 1_000}
"""How many events each reader takes, for so many readers."""
CHUNK = 256
"""How many events the peer sends at once; as many as the service does."""

fed = Federation("bench")
lab = fed.site("lab")


@lab.operation
async def count(n: int) -> AsyncIterator[dict[str, Any]]:
    for number in range(n):
        yield {"number": number, "text": "some text"}


with Pipeline("counting") as counting:
    Yield(count(PlaceParam("n")))


class Bench:
    """The service and its peer on one server, and what the peer sends."""

    def __init__(self) -> None:
        limits = WebLimits(streams=2000, streams_per_principal=2000)
        self.service = Service(
            session=lambda: Session(fed, target="inline"),
            pipelines={"c": counting},
            limits=limits,
            authorizer=AllowAnyone(),
        )
        self.parts: list[bytes] = []
        self.app = Starlette(
            lifespan=self.service.lifespan, routes=[Route("/bare", self._bare), Mount("/dfm", self.service.app)]
        )

    async def _bare(self, _request: Request) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            for start in range(0, len(self.parts), CHUNK):
                yield b"".join(self.parts[start : start + CHUNK])

        return StreamingResponse(body(), media_type="text/event-stream")


_CLIENT = """
import asyncio, sys

async def read(port, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n".encode())
    found, tail = 0, b""
    while part := await reader.read(1 << 18):
        part = tail + part
        found += part.count(b"\\nevent: ")
        tail = part[-7:]
    writer.close()
    return found

async def main():
    port, readers = int(sys.argv[1]), int(sys.argv[2])
    for line in sys.stdin:
        found = await asyncio.gather(*(read(port, line.strip()) for _ in range(readers)))
        print(sum(found), flush=True)

asyncio.run(main())
"""
"""The clients: they count events and do nothing else, so that the server is what is measured."""


async def _rate(clients: asyncio.subprocess.Process, path: str) -> float:
    assert clients.stdin is not None
    assert clients.stdout is not None
    start = time.perf_counter()
    clients.stdin.write(f"{path}\n".encode())
    found = int(await clients.stdout.readline())
    assert found, "nothing came"
    return found / (time.perf_counter() - start)


async def _measure(port: int, path: str, readers: int, options: Options) -> dict[str, float]:
    command = (sys.executable, "-c", _CLIENT, str(port), str(readers))
    pipe = asyncio.subprocess.PIPE
    clients = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        return await interleave(
            {"ours": lambda: _rate(clients, path), "bare endpoint": lambda: _rate(clients, "/bare")}, options.repeats
        )
    finally:
        assert clients.stdin is not None
        clients.stdin.close()
        await clients.wait()


async def run(options: Options) -> list[Figure]:
    bench = Bench()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(bench.app, log_level="error"))
    serving = asyncio.create_task(server.serve([listening]))
    figures = []
    try:
        for readers, events in EVENTS.items():
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}/dfm", timeout=60) as client:
                submitted = await client.post(
                    "/pipelines/c/jobs",
                    json={"params": {"n": options.size(events)}},
                    headers={"accept": "text/event-stream"},
                )
            path = f"/dfm/jobs/{submitted.headers['x-job-id']}/stream"
            bench.parts = [part + b"\n\n" for part in submitted.content.split(b"\n\n") if part]
            found = await _measure(port, path, readers, options)
            peers = {"bare endpoint": found["bare endpoint"]}
            target = Target(0.5, "bare endpoint", at_least=True)
            metric = f"{readers} reader{'s' * (readers > 1)}, all together"
            figures.append(Figure(metric, "events/s", found["ours"], peers, target))
    finally:
        server.should_exit = True
        await serving
    return figures


if __name__ == "__main__":
    main("sse_readers", __doc__, run)
