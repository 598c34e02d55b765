"""A store with 100,000 jobs that have ended opens at once, and takes no more memory than one with 10,000.

Each store is opened in a fresh process: until a session is connected, and until the newest 100 jobs have been read with
``find_jobs``. A search that finds nothing then reads all jobs. A session knows the newest 10,000 jobs of its store
(``keep_summaries``); ``10,000 jobs`` is a store with only those. Memory is what the process grows by meanwhile (its
unique set size). Claimed: within 0.5 s, and at most 1.1 times the memory.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, aclosing

import psutil

from benchmarks import databases
from benchmarks.common import Figure, Options, Target, main
from benchmarks.external import ROOT, environment
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.model.status import JobStatus
from dfm_async.store import NewJob, open_store

FEW, MANY = 10_000, 100_000
PEER = f"{FEW:,} jobs"
AT_ONCE = 1_000
LISTED = 100

fed = Federation("stored")


@fed.site("lab").operation
async def square(x: int) -> int:
    return x * x


with Pipeline("square") as pipeline:
    Yield(square(PlaceParam("x")))


async def fill(url: str, count: int) -> None:
    """Run one job, and store copies of it that are older."""
    async with Session(fed, target="inline", store=url) as session:
        job = await session.execute(pipeline, {"x": 3})
        await job
    store = open_store(url)
    await store.open()
    try:
        original = await store.find(job.job_id)
        assert original is not None
        entries = await store.read(job.job_id, 0)
        params = tuple((await store.params(job.job_id, range(original.frames))).values())

        async def copy(number: int) -> None:
            created = original.created - number
            made = NewJob(
                job_id=f"copy-{number}",
                plan=original.plan,
                fingerprint=original.fingerprint,
                options=original.options,
                created=created,
                params=params,
                stopped=True,
                pipeline=pipeline.name,
            )
            await store.create(made)
            for entry in entries:
                store.append(made.job_id, entry)
            store.update(made.job_id, status=JobStatus.FINISHED, finished=created + 1)

        for first in range(1, count, AT_ONCE):
            await asyncio.gather(*map(copy, range(first, min(first + AT_ONCE, count))))
    finally:
        await store.close()


async def opened(url: str) -> dict[str, float]:
    """Open a store in this process."""
    process = psutil.Process()
    before, start = process.memory_full_info().uss, time.perf_counter()
    async with Session(fed, target="inline", store=url) as session:
        connected = time.perf_counter() - start
        page: set[str] = set()
        async with aclosing(session.find_jobs()) as jobs:
            async for job in jobs:
                page.add(job.job_id)
                if len(page) == LISTED:
                    break
        listed = time.perf_counter() - start
        start = time.perf_counter()
        found = [job async for job in session.find_jobs(search="not there")]
        searched = time.perf_counter() - start
        grown = (process.memory_full_info().uss - before) / 2**20
    if len(page) != LISTED or found:
        raise RuntimeError(f"{len(page)} of {LISTED} jobs were listed, and {len(found)} found")
    return {"connected": connected, "listed": listed, "searched": searched, "MiB": grown}


def fresh(url: str) -> dict[str, float]:
    """Open a store in a fresh process."""
    code = f"import asyncio, json; from benchmarks.open_store import opened; found = asyncio.run(opened({url!r}))"
    command = [sys.executable, "-c", f"{code}; print(json.dumps(found))"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


async def measure(name: str, make: Callable[[], str], repeats: int) -> list[Figure]:
    """The figures of one kind of store."""
    urls = {FEW: make(), MANY: make()}
    for count, url in urls.items():
        await fill(url, count)
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in urls}
    for turn in range(repeats + 1):  # the first one only fills caches
        for count, url in urls.items():
            found = await asyncio.to_thread(fresh, url)
            if turn:
                runs[count].append(found)
    medians = {key: {n: statistics.median(run[key] for run in runs[n]) for n in runs} for key in runs[FEW][0]}
    few = {key: {PEER: found[FEW]} for key, found in medians.items()}
    many = {key: found[MANY] for key, found in medians.items()}
    return [
        Figure(f"{name}: {MANY:,} jobs, connected", "s", many["connected"], few["connected"], Target(0.5)),
        Figure(f"{name}: {MANY:,} jobs, {LISTED} listed", "s", many["listed"], few["listed"], Target(0.5)),
        Figure(f"{name}: {MANY:,} jobs, searched", "s", many["searched"], few["searched"], Target(0.5)),
        Figure(f"{name}: memory with {MANY:,} jobs", "MiB", many["MiB"], few["MiB"], Target(1.1, PEER)),
    ]


async def run(options: Options) -> list[Figure]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = (f"sqlite:///{folder}/{count}.db" for count in (FEW, MANY))
        figures = await measure("SQLite", lambda: next(names), options.repeats)
        server = stack.enter_context(databases.server())
        if server is not None:
            figures += await measure("PostgreSQL", lambda: server.url(server.new_database()), options.repeats)
    return figures


if __name__ == "__main__":
    main("open_store", __doc__, run)
