"""A random worker is killed in the middle of a job, again and again: every result comes once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from dfm_async import Federation, ForEach, Job, JobStatus, Pipeline, PlaceParam, Result, RetryPolicy, Session, Yield
from dfm_async.base.cores import usable_cores
from dfm_async.events import FrameCompleted, WorkerNotice
from tests.chaos.left import nothing_left
from tests.chaos.seeds import seeds

ROUNDS = 5
"""How many jobs one session runs."""
AGAIN = RetryPolicy(on_worker_lost=100)

fed = Federation("mortals")
a, b, c = fed.site("a"), fed.site("b", workers=2), fed.site("c")


@a.operation
async def numbers(n: int) -> list[int]:
    await asyncio.sleep(0.005)
    return list(range(n))


@b.operation
def triple(x: int) -> int:
    time.sleep(0.005)
    return x * 3


@c.operation
async def less(x: int) -> int:
    await asyncio.sleep(0.002)
    return x - 1


@a.operation
def steps(x: int) -> Iterator[int]:
    for n in range(x):
        time.sleep(0.001)
        yield n


with Pipeline("over three sites") as pipeline:
    with ForEach(numbers(PlaceParam("n", multiuse=True))) as x:
        Yield(less(triple(x)), place="value")
    Yield(steps(PlaceParam("n", multiuse=True)), place="step")


def expected(sets: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for index, params in enumerate(sets):
        found.update(("value", (index, x), x * 3 - 1) for x in range(params["n"]))
        found.update(("step", (index, n), n) for n in range(params["n"]))
    return found


def pids_of(session: Session) -> list[int]:
    """The workers that a session believes to be alive."""
    found = [worker.pid for site in session.stats().sites.values() for worker in site.workers]
    return [pid for pid in found if pid is not None]


async def kill(session: Session, job: Job, rng: random.Random, total: int, killed: set[int]) -> None:
    """Kills one or two workers while the job runs, each when some of its results have come.

    A job that loses three workers in a row, with no set done in between, is aborted: that is left to other tests.
    """
    moments = sorted(rng.randint(0, total - 1) for _ in range(rng.choice([1, 1, 1, 2])))
    seen = in_row = 0
    async for event in job.events():
        in_row += isinstance(event, WorkerNotice) and event.kind == "lost"
        if isinstance(event, FrameCompleted):
            in_row = 0
        while moments and seen >= moments[0]:
            moments.pop(0)
            await asyncio.sleep(rng.choice([0, 0, 0.003, 0.02]))
            known = pids_of(session)
            pids = [pid for pid in known if pid not in killed]
            if pids and in_row + len(killed & set(known)) < 2:
                killed.add(pid := rng.choice(pids))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        seen += isinstance(event, Result)


async def check(job: Job, sets: list[dict[str, Any]]) -> int:
    """Checks the whole log of a job; tells how many workers it has lost."""
    events = [event async for event in job.events()]
    assert job.status is JobStatus.FINISHED, f"{job}: {events[-1]}"
    assert [event.offset for event in events] == list(range(len(events)))
    assert Counter((e.place, e.frame, e.value) for e in events if isinstance(e, Result)) == expected(sets)
    done = Counter(e.frame for e in events if isinstance(e, FrameCompleted))
    assert done == {(index,): 1 for index in range(len(sets))}
    return sum(isinstance(event, WorkerNotice) and event.kind == "lost" for event in events)


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.timeout(300)
async def test_every_result_comes_once_although_workers_are_killed(seed: int) -> None:
    rng = random.Random(seed)
    killed: set[int] = set()
    noticed = 0
    async with nothing_left():
        async with Session(fed) as session:
            for at in range(ROUNDS):
                sets = [{"n": rng.randint(1, 8)} for _ in range(rng.randint(1, 12))]
                try:
                    async with asyncio.timeout(30):
                        job = await session.execute(pipeline, sets, retry=AGAIN, concurrency=rng.choice([None, 1, 3]))
                        await kill(session, job, rng, 2 * sum(params["n"] for params in sets), killed)
                        noticed += await check(job, sets)
                except TimeoutError:
                    pytest.fail(f"round {at} of seed {seed} hangs: {job!r} {session!r} {session.stats()}")
                stats = session.stats()
                assert (stats.running, stats.waiting, stats.ended) == (0, 0, {"finished": at + 1})
            async with asyncio.timeout(60):  # nobody may have missed the last one yet
                while killed & set(pids_of(session)):  # noqa: ASYNC110 - the session tells jobs, and nobody else
                    await asyncio.sleep(0.01)
            restarts = sum(site.restarts for site in session.stats().sites.values())
            assert noticed <= len(killed)
            alone = os.environ.get("DFM_SPREAD") == "never"  # else those that run calls of a lost worker end with it
            assert restarts <= len(killed) * (1 if alone else max(2, usable_cores()))
    print(f"seed {seed}: killed {len(killed)} workers, of which jobs missed {noticed}")
