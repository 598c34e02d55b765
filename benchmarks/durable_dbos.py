"""The peer DBOS: durable workflows of one step, in a process of its own, so that each library has its own event loop.

``Dbos`` starts the process and asks it for one block after the other: blocks alternate with ours, and DBOS waits for
input meanwhile. It is used through its asynchronous API: an ``async`` workflow that awaits one ``async`` step, awaited
by its caller, which needs fewer transactions than a handle. On SQLite, its connections have the settings of our
store (WAL, ``synchronous = NORMAL``) instead of its own, with which it is several times slower.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

NAME = "dbos"


class Dbos:
    """The process, as the benchmark uses it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"{NAME} ended before it answered")
        return line

    async def rate(self, n: int, concurrency: int) -> float:
        """Return the workflows per second of n workflows, this many at a time."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n} {concurrency}\n".encode())
        return float(await self.line())


@asynccontextmanager
async def running(python: str, url: str) -> AsyncIterator[Dbos]:
    """Start a process with a database, and end it with the context."""
    from benchmarks.external import ROOT, environment

    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        "benchmarks.durable_dbos",
        url,
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        dbos = Dbos(process)
        await dbos.line()  # it is ready
        yield dbos
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(30):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _main(url: str) -> None:
    from dbos import DBOS  # type: ignore[import-not-found]
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    from benchmarks import operations, workloads

    if url.startswith("sqlite"):

        @event.listens_for(Engine, "connect")
        def as_ours(connection: sqlite3.Connection, _: object) -> None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")

    step = DBOS.step()(operations.echo_async)

    @DBOS.workflow()  # type: ignore[untyped-decorator]
    async def one(x: int) -> dict[str, int]:
        found: dict[str, int] = await step(x)
        return found

    DBOS(config={"name": "benchmarks", "system_database_url": url, "log_level": "ERROR"})
    DBOS.launch()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        n, concurrency = map(int, line.split())
        print(await workloads.rate(one, n, concurrency), flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
