"""Durable jobs are nearly as fast as jobs in memory, and several times faster than those of DBOS.

The same jobs without a store, with one in a file and with one in a PostgreSQL server on this machine, in one run.
``commit`` is what a bare ``sqlite3`` connection takes to insert one row and commit it (WAL, the same settings),
``rows`` how many rows of one integer it inserts in a second, 1,000 per commit. A durable job has at least two commits:
it is written before it starts, and its end is. ``dbos`` runs workflows of one step, 64 at a time, in a file of the same
file system and on the same server, alternately with ours. Neither library waits for the disk: the server runs with
``fsync = off``, and files with ``synchronous = NORMAL``.

Claimed: with 64 jobs at a time, SQLite has at least 0.7 times the rate of memory, PostgreSQL 0.5 times that of SQLite,
and both at least 3 times the rate of DBOS on the same database.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

from benchmarks import databases, durable_dbos, external, workloads
from benchmarks.common import Block, Figure, Options, Target, interleave, main
from benchmarks.ours import Contender

STREAM = 10_000
JOBS = 1024
FLIGHT = 64
STORES = {"sqlite": ("SQLite", 0.7, "memory"), "postgres": ("PostgreSQL", 0.5, "sqlite")}
"""The stores: the name of each, and the least rate of jobs, in multiples of that of a peer."""


class _Bare:
    """A file that rows are inserted into, as simply as can be."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("CREATE TABLE entries (data BLOB)")

    def insert(self, count: int, per_commit: int) -> None:
        for _ in range(0, count, per_commit):
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT INTO entries VALUES (?)", [(b"x" * 16,)] * per_commit)
            self._connection.execute("COMMIT")

    async def commit(self, n: int) -> float:
        start = time.perf_counter()
        await asyncio.to_thread(self.insert, n, 1)
        return (time.perf_counter() - start) / n

    async def rows(self) -> float:
        start = time.perf_counter()
        await asyncio.to_thread(self.insert, STREAM, 1_000)
        return STREAM / (time.perf_counter() - start)

    def close(self) -> None:
        self._connection.close()


async def _blocks(ours: Contender, name: str, options: Options) -> dict[str, Block]:
    n, many = options.size(200), options.size(JOBS)
    one = await ours.one(is_async=True)
    stream = await ours.stream("ints", is_async=True)

    async def results() -> float:
        return STREAM / await workloads.elapsed(ours.run(stream, {"n": STREAM}, STREAM))

    return {
        f"{name} job": lambda: workloads.latency(lambda i: ours.run(one, {"x": i}), n),
        f"{name} at once": lambda: workloads.rate(lambda i: ours.run(one, {"x": i}), many, FLIGHT),
        f"{name} results": results,
    }


async def run(options: Options) -> list[Figure]:
    n = options.size(200)
    python = external.interpreters([durable_dbos.NAME]).get(durable_dbos.NAME)
    if python is None:
        print("note: dbos is not installed, its column is missing", file=sys.stderr)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        bare = stack.enter_context(closing(_Bare(Path(folder) / "bare.db")))
        server = stack.enter_context(databases.server())
        urls: dict[str, Callable[[], str]] = {"sqlite": lambda: f"sqlite:///{folder}/{secrets.token_hex(4)}.db"}
        if server is not None:
            urls["postgres"] = lambda: server.url(server.new_database())
        blocks: dict[str, Block] = {"commit": lambda: bare.commit(n), "rows": bare.rows}
        blocks |= await _blocks(await stack.enter_async_context(Contender()), "memory", options)
        for name, url in urls.items():
            blocks |= await _blocks(await stack.enter_async_context(Contender(store=url())), name, options)
            if python is not None:
                dbos = await stack.enter_async_context(durable_dbos.running(python, url()))
                blocks[f"{name} dbos"] = partial(dbos.rate, options.size(JOBS), FLIGHT)
        found = await interleave(blocks, options.repeats)
    return [figure for name in urls for figure in _figures(name, found)]


def _figures(name: str, found: Mapping[str, float]) -> list[Figure]:
    """The figures of one store."""
    title, limit, peer = STORES[name]
    jobs = {peer: found[f"{peer} at once"]}
    dbos = {key: found[f"{name} {key}"] for key in [durable_dbos.NAME] if f"{name} {key}" in found}
    trip = {peer: found[f"{peer} job"] * 1e3, "commit": found["commit"] * 1e3}
    results = {peer: found[f"{peer} results"], "rows": found["rows"]}
    rate = found[f"{name} at once"]
    return [
        Figure(f"job round trip, {title}", "ms", found[f"{name} job"] * 1e3, trip),
        Figure(f"jobs, {FLIGHT} at a time, {title}", "1/s", rate, jobs, Target(limit, peer, at_least=True)),
        Figure(
            f"jobs, {FLIGHT} at a time, {title}, beside DBOS",
            "1/s",
            rate,
            dbos,
            Target(3, durable_dbos.NAME, at_least=True),
        ),
        Figure(f"results of one job, {title}", "1/s", found[f"{name} results"], results),
    ]


if __name__ == "__main__":
    main("durable_store", __doc__, run)
