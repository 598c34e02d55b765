"""Many readers of one job at the same time, over real connections from a process of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.web.rig import Server

READERS = 500
CLIENTS = """
import asyncio, collections, json, sys

async def read(port, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n".encode())
    ids, values, name = [], [], ""
    async for line in reader:
        if line.startswith(b"id: "):
            ids.append(int(line[4:]))
        elif line.startswith(b"event: "):
            name = line[7:].strip()
        elif line.startswith(b"data: ") and name == b"result":
            values.append(json.loads(line[6:])["value"])
    writer.close()
    return json.dumps([ids, values, name.decode()])

async def main(port, path, readers):
    found = await asyncio.gather(*(read(port, path) for _ in range(int(readers))))
    print(json.dumps(collections.Counter(found)))

asyncio.run(main(*sys.argv[1:]))
"""
"""Readers that tell which events came to them, and how many of them saw the same."""


@asynccontextmanager
async def readers(server: Server, job_id: str, number: int) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-c", CLIENTS, str(server.port), f"/dfm/jobs/{job_id}/stream", str(number))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def seen(process: asyncio.subprocess.Process) -> Counter[str]:
    out, _ = await process.communicate()
    assert process.returncode == 0
    return Counter(json.loads(out))


async def test_five_hundred_readers_get_every_event_once_and_in_order(server: Server) -> None:
    job_id = await server.submit("counting", None)
    async with readers(server, job_id, READERS) as process:
        async with asyncio.timeout(60):
            await server.service._state.streams.until(READERS)
        body = {"params": {"n": 100}, "last": True}
        assert (await server.client.post(f"/jobs/{job_id}/inputs", json=body)).status_code == 202
        found = await seen(process)
    info = (await server.client.get(f"/jobs/{job_id}")).json()
    last = info["events"] - 1
    assert found == {json.dumps([[*range(last + 1), last], [*range(100)], "end"]): READERS}
