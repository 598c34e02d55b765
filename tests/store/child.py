"""A process with a store of its own. Told by lines what to do; answers each with a line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import NoReturn

from dfm_async.errors import DfmError
from dfm_async.model.status import JobStatus
from dfm_async.store import Store, open_store
from tests.store.helpers import entry, found, new_job, row


def say(text: object) -> None:
    print(text, flush=True)


async def lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def obey(store: Store, words: list[str]) -> object:
    match words:
        case ["create", job_id]:
            return await store.create(new_job(job_id))
        case ["append", job_id, count]:
            end = (await found(store, job_id)).end
            for offset in range(end, end + int(count)):
                store.append(job_id, entry(offset))
        case ["status", job_id, name]:
            store.update(job_id, status=JobStatus(name))
        case ["take", job_id]:
            return (await store.take_over(job_id)).end
        case ["delete", job_id]:
            await store.delete(job_id)
        case ["request", job_id]:
            return await store.request(job_id, b"data")
        case ["pid"]:
            return os.getpid()
        case ["fork"]:
            return fork()
        case ["close"]:
            await store.close()
            return "ok"
    await store.flush()
    return "ok"


def fork() -> int:
    """Leaves a child that does nothing, but has inherited everything."""
    pid = os.fork()
    if not pid:
        os.close(0)
        os.close(1)
        while True:
            signal.pause()
    return pid


async def told(store: Store) -> None:
    reader = await lines()
    say("ready")
    while line := await reader.readline():
        try:
            say(await obey(store, line.decode().split()))
        except DfmError as error:
            say(type(error).__name__)


async def write_forever(store: Store) -> NoReturn:
    """Writes entries of all sizes and parameter sets, as fast as it can, in many small commits."""
    await store.create(new_job("j", b"plan" * 5000))
    store.update("j", status=JobStatus.RUNNING)
    committed = asyncio.Event()
    store.on_commit = lambda _: committed.set()
    end = frames = 0
    say("ready")
    while True:
        for count in (1, 3, 2, 50):
            store.append("j", entry(end, count))
            end += count
        store.add_params("j", frames, [row(frames), row(frames + 1)])
        frames += 2
        if store.backlog > 100_000:
            committed.clear()
            await committed.wait()
        await asyncio.sleep(0)


def make(url: str) -> Store:
    if url.startswith("sqlite"):
        return open_store(url)
    from dfm_async.store.postgres import PostgresStore
    from tests.store.backends import LEASE

    return PostgresStore(url, lease=LEASE)


async def main(url: str, what: str = "told") -> None:
    store = make(url)
    await store.open()
    await (write_forever(store) if what == "write" else told(store))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
