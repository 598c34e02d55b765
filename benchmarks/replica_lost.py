"""The jobs of a service that is killed go on in another one soon after its lease has expired.

Two services with ``resume=True`` share a PostgreSQL database, in two processes. One of them runs some jobs, and is
killed with SIGKILL. Measured from the kill until the first and the last of these jobs run in the other one. ``lease``
is that of the store, by default: a process that shows no sign that it is alive keeps its jobs for so long. Claimed:
within 10 s after the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks import databases
from benchmarks.common import Figure, Options, Target, main
from benchmarks.external import ROOT, environment
from dfm_async import Federation, Pipeline, Session, Yield
from dfm_async.store import PostgresStore
from dfm_async.web import AllowAnyone, Service

JOBS = 20
LEASE = 10.0

fed = Federation("replicas")
_begun: asyncio.Queue[float] = asyncio.Queue()
"""When each job began to run in this process."""
_released = asyncio.Event()


@fed.site("lab").operation
async def hold() -> int:
    """Run until this process releases its jobs."""
    _begun.put_nowait(time.perf_counter())
    await _released.wait()
    return 0


with Pipeline("hold") as pipeline:
    Yield(hold())


@asynccontextmanager
async def service(url: str) -> AsyncIterator[Session]:
    """A service, without a server for its clients; gives its session."""
    session = Session(fed, target="inline", store=PostgresStore(url, lease=LEASE))
    made = Service(session=lambda: session, pipelines={"hold": pipeline}, authorizer=AllowAnyone(), resume=True)
    async with made.lifespan():
        yield session


async def begun(count: int) -> list[float]:
    """Return when this many jobs began to run here."""
    return [await _begun.get() for _ in range(count)]


async def replica(url: str, count: int) -> None:
    """Run jobs that do not end, and print a line when all of them have begun."""
    async with service(url) as session:
        for _ in range(count):
            await session.execute(pipeline)
        await begun(count)
        print("ready", flush=True)
        await _released.wait()


async def takeover(url: str) -> tuple[float, float]:
    """Kill a replica; return the seconds until the first and the last of its jobs run here."""
    code = f"import asyncio; from benchmarks import replica_lost as r; asyncio.run(r.replica({url!r}, {JOBS}))"
    command = [sys.executable, "-c", code]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the replica ended before its jobs ran")
        start = time.perf_counter()
        process.kill()
        async with asyncio.timeout(4 * LEASE):
            times = await begun(JOBS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
    return min(times) - start, max(times) - start


async def measure(url: str, rounds: int) -> list[tuple[float, float]]:
    """Kill one replica after the other; their jobs end when all have been measured."""
    async with service(url) as session:
        found = [await takeover(url) for _ in range(rounds)]
        _released.set()
        async for job in session.find_jobs():
            await (await session.reattach(job.job_id))
    return found


async def run(options: Options) -> list[Figure]:
    with databases.server() as server:
        if server is None:
            return []
        found = await measure(server.url(server.new_database()), 1 if options.quick else 5)
    first, last = (statistics.median(times) for times in zip(*found, strict=True))
    peers, target = {"lease": LEASE}, Target(LEASE + 10)
    return [
        Figure("first job of a killed replica runs in another one", "s", first, peers, target),
        Figure(f"all {JOBS} jobs of a killed replica run in another one", "s", last, peers, target),
    ]


if __name__ == "__main__":
    main("replica_lost", __doc__, run)
