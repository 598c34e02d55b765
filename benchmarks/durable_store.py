"""What it costs to write jobs down.

The same jobs with a store in a file and without one, in one run. ``commit`` is what a bare ``sqlite3`` connection takes
to insert one row and commit it (WAL, the same settings), ``rows`` how many rows of one integer it inserts in a second,
1,000 per commit. A durable job has at least two commits: it is written before it starts, and its end is.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from pathlib import Path

from benchmarks import workloads
from benchmarks.common import Block, Figure, Options, interleave, main
from benchmarks.ours import Contender

STREAM = 10_000


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


async def _blocks(ours: Contender, name: str, n: int) -> dict[str, Block]:
    one = await ours.one(is_async=True)
    stream = await ours.stream("ints", is_async=True)

    async def results() -> float:
        return STREAM / await workloads.elapsed(ours.run(stream, {"n": STREAM}, STREAM))

    return {
        f"{name} job": lambda: workloads.latency(lambda i: ours.run(one, {"x": i}), n),
        f"{name} at once": lambda: workloads.rate(lambda i: ours.run(one, {"x": i}), n, 64),
        f"{name} results": results,
    }


async def run(options: Options) -> list[Figure]:
    n = options.size(200)
    with tempfile.TemporaryDirectory() as folder:
        bare = _Bare(Path(folder) / "bare.db")
        store = f"sqlite:///{folder}/jobs.db"
        async with Contender() as memory, Contender(store=store) as durable:
            found = await interleave(
                {
                    **await _blocks(memory, "memory", n),
                    **await _blocks(durable, "durable", n),
                    "commit": lambda: bare.commit(n),
                    "rows": bare.rows,
                },
                options.repeats,
            )
        bare.close()
    job = {"memory": found["memory job"] * 1e3, "commit": found["commit"] * 1e3}
    results = {"memory": found["memory results"], "rows": found["rows"]}
    return [
        Figure("job round trip, written down", "ms", found["durable job"] * 1e3, job),
        Figure(
            "jobs, 64 at a time, written down", "1/s", found["durable at once"], {"memory": found["memory at once"]}
        ),
        Figure("results of one job, written down", "1/s", found["durable results"], results),
    ]


if __name__ == "__main__":
    main("durable_store", __doc__, run)
