"""Clients that are slow, greedy or broken, and others who get their answers meanwhile; the server is a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx2
import psutil
import pytest

from tests.support.processes import started_server
from tests.web.rig import Wire, all_events

SERVER = """
import uvicorn
from tests.web.rig import new_service

service = new_service(stall=1.0, body_seconds=1.0)
uvicorn.run(service.app, port=0, access_log=False, timeout_graceful_shutdown=1)
"""
MIB = 1024 * 1024
MOST = 64 * MIB
"""By how much the memory of the server may grow; what it is sent, and asked for, is many times as much."""


@dataclass(frozen=True)
class Target:
    """The server."""

    port: int
    process: psutil.Process
    job: str
    """A job with a log of about 16 MiB."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with started_server("-c", SERVER) as (process, url):
        with httpx2.Client(base_url=url, timeout=30) as client:
            body = {"params": {"n": 8000, "size": 2000}}
            job = client.post("/pipelines/texts/jobs", json=body).json()["job_id"]
            assert client.get(f"/jobs/{job}/stream").status_code == 200  # to its end
        yield Target(int(url.rpartition(":")[2]), psutil.Process(process.pid), job)
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert "Traceback" not in log, log


@asynccontextmanager
async def connections(target: Target, number: int) -> AsyncIterator[list[Wire]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            stack.callback(writer.transport.abort)
            found.append(Wire(reader, writer))
        yield found


async def each(wires: list[Wire], act: Callable[[Wire], Awaitable[object]]) -> None:
    for outcome in await asyncio.gather(*(act(wire) for wire in wires), return_exceptions=True):
        # A client that is disconnected gets what it deserves.
        if isinstance(outcome, BaseException) and not isinstance(
            outcome, (ConnectionError, asyncio.IncompleteReadError)
        ):
            raise outcome


# what they do

Deed: TypeAlias = Callable[[list[Wire], Target], Coroutine[Any, Any, None]]


async def say_nothing(wires: list[Wire], _target: Target) -> None:
    """Idle connections."""


async def send_headers_slowly(wires: list[Wire], _target: Target) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "
    for at in range(len(head)):
        await each(wires, lambda wire, at=at: wire.send(head[at : at + 1]))  # type: ignore[misc]


async def send_bodies_slowly(wires: list[Wire], _target: Target) -> None:
    await each(wires, lambda wire: wire.post("/pipelines/squares/jobs", b"{", 100_000))
    for _ in range(50):
        await each(wires, lambda wire: wire.send(b" "))


async def send_garbage(wires: list[Wire], _target: Target) -> None:
    await each(wires, lambda wire: wire.send(b"\x16\x03\x01\x00\xff\xff" * 5000))


async def send_thousands_of_headers(wires: list[Wire], _target: Target) -> None:
    many = "".join(f"x-{number}: {'v' * 100}\r\n" for number in range(10_000))
    await each(wires, lambda wire: wire.send(f"GET /health HTTP/1.1\r\nhost: localhost\r\n{many}"))


async def declare_huge_bodies(wires: list[Wire], _target: Target) -> None:
    async def act(wire: Wire) -> None:
        await wire.post("/pipelines/squares/jobs", b" " * MIB, 10_000_000_000)
        assert (await wire.answer()).status == 413

    await each(wires, act)


async def send_bodies_without_end(wires: list[Wire], _target: Target) -> None:
    async def act(wire: Wire) -> None:
        head = "POST /pipelines/squares/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        await wire.send(head + "transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(200):  # more than ten times what is allowed
            await wire.send(chunk)

    await each(wires, act)


async def leave_in_the_middle(wires: list[Wire], _target: Target) -> None:
    await each(wires, lambda wire: wire.post("/pipelines/squares/jobs", b"{" * 1000, 100_000))
    for wire in wires:
        wire.writer.transport.abort()


async def read_nothing(wires: list[Wire], target: Target) -> None:
    """Readers of a long stream who stop after its beginning; so do those whose machine has vanished."""

    async def act(wire: Wire) -> None:
        transport = wire.writer.transport
        await wire.send(f"GET /jobs/{target.job}/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await wire.reader.readuntil(b"\r\n\r\n")
        transport.pause_reading()  # type: ignore[attr-defined] # it has it, if one may read from it

    await each(wires, act)


DEEDS: dict[Deed, int] = {
    say_nothing: 400,
    send_headers_slowly: 100,
    send_bodies_slowly: 50,
    send_garbage: 50,
    send_thousands_of_headers: 50,
    declare_huge_bodies: 50,
    send_bodies_without_end: 50,
    leave_in_the_middle: 100,
    read_nothing: 100,
}
"""What clients do, and how many of them."""


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
async def test_hostile_clients_leave_service_and_memory_bounded(target: Target, deed: Deed) -> None:
    async with httpx2.AsyncClient(base_url=target.url, timeout=10) as client:

        async def work() -> None:
            """What a client without bad intentions does."""
            submitted = await client.post("/pipelines/squares/jobs", json={"params": {"x": 3}})
            assert submitted.status_code == 201
            found = await all_events(client, f"/jobs/{submitted.json()['job_id']}/stream")
            assert [event.data["value"] for event in found if event.name == "result"] == [9]

        await work()
        before = target.process.memory_info().rss
        most = before
        async with connections(target, DEEDS[deed]) as wires:
            doing = asyncio.create_task(deed(wires, target))
            for _ in range(10):
                await work()
                most = max(most, target.process.memory_info().rss)
            await doing
            await work()
            most = max(most, target.process.memory_info().rss)
        await work()
        assert most - before < MOST, f"it has grown by {(most - before) / MIB:.0f} MiB"
