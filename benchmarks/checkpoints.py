"""What it costs to record the values of calls.

The same jobs in a session with a store, with ``execute(checkpoint="calls")`` and without. ``rows`` is what a bare
``sqlite3`` connection takes for a row with the same key and value, 64 per commit (WAL, the same settings), ``commit``
what it takes to insert one row and commit it. A call is recorded before anything that needs its value begins; here,
64 calls of a ``ForEach`` are in flight. The figure for elements is that of a generator whose elements are recorded.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import operations
from benchmarks.common import Figure, Options, Target, interleave, main, scaled
from benchmarks.workloads import latency
from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield
from dfm_async.planning import Plan

CALLS = 6_400
FLIGHT = 64

fed = Federation("checkpoints")
lab = fed.site("lab")
number: Any = lab.operation(operations.number_async)
ints: Any = lab.operation(operations.ints)

with Pipeline("one") as one:
    Yield(number(PlaceParam("x")))
with Pipeline("each") as each:
    with ForEach(PlaceParam("values"), concurrency=FLIGHT) as value:
        number(value)
    Yield(PlaceParam("last"))
with Pipeline("elements") as elements:
    Yield(ints(PlaceParam("n")))


async def job(session: Session, plan: Plan, params: dict[str, Any], checkpoint: Literal["marked", "calls"]) -> int:
    """Run a job, and return how many results it has."""
    found = await session.execute(plan, params, checkpoint=checkpoint)
    count = len([result async for result in found])
    await found
    return count


async def seconds(
    session: Session, plan: Plan, params: dict[str, Any], checkpoint: Literal["marked", "calls"], results: int
) -> float:
    """Return how long a job takes."""
    start = time.perf_counter()
    found = await job(session, plan, params, checkpoint)
    if found != results:
        raise RuntimeError(f"{found} of {results} results came")
    return time.perf_counter() - start


def insert(connection: sqlite3.Connection, count: int, per_commit: int) -> float:
    """Return how long a bare connection takes for rows as those of checkpoints."""
    connection.execute("DELETE FROM checkpoints")
    start = time.perf_counter()
    for first in range(0, count, per_commit):
        rows = [("0" * 32, "number_async#1", f"0.{at}", b"x" * 4) for at in range(first, first + per_commit)]
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", rows)
        connection.execute("COMMIT")
    return time.perf_counter() - start


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(
        "CREATE TABLE checkpoints (job TEXT, node TEXT, frame TEXT, data BLOB, PRIMARY KEY (job, node, frame))"
    )
    return connection


async def run(options: Options) -> list[Figure]:
    n, trips = options.size(CALLS), options.size(200)
    values = {"values": list(range(n)), "last": 0}
    with tempfile.TemporaryDirectory() as folder, closing(_open(Path(folder) / "bare.db")) as bare:
        async with Session(fed, store=f"sqlite:///{folder}/jobs.db") as session:
            plans = [await session.prepare(pipeline) for pipeline in (one, each, elements)]

            async def trip(checkpoint: Literal["marked", "calls"]) -> float:
                return await latency(lambda x: job(session, plans[0], {"x": x}, checkpoint), trips)

            found = await interleave(
                {
                    "calls": lambda: seconds(session, plans[1], values, "calls", 1),
                    "no calls": lambda: seconds(session, plans[1], values, "marked", 1),
                    "elements": lambda: seconds(session, plans[2], {"n": n}, "calls", n),
                    "no elements": lambda: seconds(session, plans[2], {"n": n}, "marked", n),
                    "rows": lambda: asyncio.to_thread(insert, bare, n, FLIGHT),
                    "trip": lambda: trip("calls"),
                    "no trip": lambda: trip("marked"),
                    "commit": partial(asyncio.to_thread, insert, bare, trips, 1),
                },
                options.repeats,
            )
    each_of = scaled(found, 1e6 / n)
    trip_of = scaled(found, 1e3)
    call = each_of["calls"] - each_of["no calls"]
    peers = {"unrecorded": each_of["no calls"], "rows": each_of["rows"]}
    stream = {"unrecorded": each_of["no elements"], "rows": each_of["rows"]}
    return [
        Figure("recording a call, 64 in flight", "us", call, {"rows": each_of["rows"]}, Target(50)),
        Figure("a recorded call, 64 in flight", "us", each_of["calls"], peers),
        Figure("recording an element", "us", each_of["elements"] - each_of["no elements"], {"rows": each_of["rows"]}),
        Figure("a recorded element", "us", each_of["elements"], stream),
        Figure(
            "job round trip, recorded",
            "ms",
            trip_of["trip"],
            {"unrecorded": trip_of["no trip"], "commit": found["commit"] * 1e3 / trips},
            Target(1.5),
        ),
    ]


if __name__ == "__main__":
    main("checkpoints", __doc__, run)
