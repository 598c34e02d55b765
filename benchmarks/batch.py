"""A batch of files keeps all cores busy from beginning to end, and loses none when workers are killed.

One job parses and summarizes 5,000 small files of JSON lines, a parameter set for each. The pool does the same with as
many processes. The cores are busy as far as the processes of the batch, the application included, use processor time;
this is sampled four times per second, without the first and the last second. In another run, 20 random workers are
killed with SIGKILL, and every file has to come exactly once; a pool would be broken by the first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import operations
from benchmarks.backends import PoolBackend
from benchmarks.common import Figure, Options, Target, cpu_times, interleave, main, tree
from benchmarks.workloads import now
from dfm_async import Federation, LocalOptions, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.base.cores import usable_cores

INTERVAL = 0.25
EDGE = 1.0
"""The seconds at the beginning and at the end that do not count."""
AGAIN = RetryPolicy(on_worker_lost=100)

fed = Federation("batch")
lab = fed.site("lab")
with Pipeline("batch") as pipeline:
    Yield(lab.operation(operations.summarize)(PlaceParam("path")))


def write_files(folder: Path, count: int) -> dict[str, int]:
    """Write the files of a batch; return their paths with their numbers of rows."""
    rng = random.Random(count)
    begin = datetime(2024, 5, 1, tzinfo=UTC)
    lines = [
        json.dumps({"time": str(begin + timedelta(minutes=n)), "sensor": f"s{n % 7}", "value": n / 7}) + "\n"
        for n in range(10_000)
    ]
    rows = {}
    for at in range(count):
        path = folder / f"{at:05}.jsonl"
        start, size = rng.randrange(9_000), rng.randint(200, 600)
        path.write_text("".join(lines[start : start + size]), encoding="utf-8")
        rows[str(path)] = size
    return rows


def check(summaries: Sequence[dict[str, Any]], rows: dict[str, int]) -> None:
    """Raise an error unless every file came exactly once, as a whole."""
    seen = Counter(summary["path"] for summary in summaries)
    if wrong := {path: seen[path] for path in rows.keys() | seen.keys() if seen[path] != 1}:
        raise RuntimeError(f"{len(wrong)} of {len(rows)} files did not come exactly once: {list(wrong.items())[:5]}")
    if torn := [summary["path"] for summary in summaries if summary["rows"] != rows[summary["path"]]]:
        raise RuntimeError(f"{len(torn)} files came incompletely: {torn[:5]}")


# how busy the cores are


class Busy:
    """Samples what part of the cores the processes below this one use."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._samples: list[tuple[float, float]] = []
        """The end of each interval, and what part of the cores was busy in it."""
        self._stop = threading.Event()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Sample until the end of the block."""
        self._began = time.monotonic()
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._ended = time.monotonic()

    def _sample(self) -> None:
        before, at = cpu_times(tree(os.getpid())), time.monotonic()
        while not self._stop.wait(INTERVAL):
            times, then = cpu_times(tree(os.getpid())), at
            at = time.monotonic()
            used = sum(seconds - before.get(pid, 0.0) for pid, seconds in times.items())
            self._samples.append((at, used / (at - then) / self._cores))
            before = times

    @property
    def samples(self) -> list[float]:
        """The samples of the middle; all, if the run was too short to have one."""
        first, last = self._began + EDGE + INTERVAL, self._ended - EDGE
        return [part for at, part in self._samples if first <= at <= last] or [part for _, part in self._samples]


# contenders


async def summaries(session: Session, rows: dict[str, int], kills: int = 0) -> AsyncIterator[dict[str, Any]]:
    """Run a job over all files, and kill this many of its workers, evenly spread over its results."""
    rng, killed = random.Random(kills), set[int]()
    job = await session.execute(pipeline, [{"path": path} for path in rows], retry=AGAIN)
    due = [len(rows) * (at + 1) // (kills + 1) for at in range(kills)]
    seen = 0
    async for result in job:
        yield result.value
        seen += 1
        if due and seen >= due[0]:
            pids = [worker.pid for worker in session.stats().sites["lab"].workers]
            alive = [pid for pid in pids if pid is not None and pid not in killed]
            if alive:
                due.pop(0)
                killed.add(pid := rng.choice(alive))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    await job
    if due:
        raise RuntimeError(f"only {len(killed)} of {kills} workers were killed")


async def collected(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


async def rate(found: Awaitable[list[dict[str, Any]]], rows: dict[str, int]) -> float:
    """Files per second."""
    start = now()
    all_of_them = await found
    took = now() - start
    check(all_of_them, rows)
    return len(rows) / took


async def run(options: Options) -> list[Figure]:
    async with Session(fed, options=LocalOptions(max_workers=usable_cores())) as session:
        return await figures(session, options)


async def figures(session: Session, options: Options) -> list[Figure]:
    """Run the batch in a session and in a pool, in turn, and then in the session while its workers are killed."""
    logging.getLogger("dfm_async").setLevel(logging.ERROR)  # that a worker is lost is no news here
    cores = usable_cores()
    count, kills, repeats = (500, 3, 1) if options.quick else (5000, 20, 3)
    busy: dict[str, list[Busy]] = {"ours": [], "pool": []}

    async def observed(name: str, work: Awaitable[float]) -> float:
        busy[name].append(Busy(cores))
        with busy[name][-1].measuring():
            return await work

    with tempfile.TemporaryDirectory() as folder:
        rows = await asyncio.to_thread(write_files, Path(folder), count)
        async with PoolBackend(1, cores) as pool:
            found = await interleave(
                {
                    "ours": lambda: observed("ours", rate(collected(summaries(session, rows)), rows)),
                    "pool": lambda: observed("pool", rate(pool.each(operations.summarize, list(rows)), rows)),
                },
                repeats,
            )
        disturbed = await rate(collected(summaries(session, rows, kills)), rows)
    samples = {name: [run.samples for run in runs[1:]] for name, runs in busy.items()}  # the first run warms up
    mean = {name: statistics.fmean(chain(*runs)) for name, runs in samples.items()}
    lowest = {name: statistics.median(map(min, runs)) for name, runs in samples.items()}
    at_least = Target(0.9, at_least=True)
    pool_rate, undisturbed = {"pool": found["pool"]}, {"no kills": found["ours"]}
    return [
        Figure("batch of files", "files/s", found["ours"], pool_rate, Target(0.95, "pool", at_least=True)),
        Figure("cores busy, mean", "", mean["ours"], {"pool": mean["pool"]}, at_least),
        Figure(f"cores busy, lowest of {INTERVAL} s", "", lowest["ours"], {"pool": lowest["pool"]}, at_least),
        Figure(f"batch while {kills} workers are killed", "files/s", disturbed, undisturbed),
    ]


if __name__ == "__main__":
    main("batch", __doc__, run)
