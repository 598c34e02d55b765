"""Workers are killed while they run calls of another worker's job: that job goes on, and nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    Job,
    JobFailed,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    Result,
    RetryPolicy,
    Session,
    Yield,
)
from dfm_async.events import FrameCompleted
from tests.chaos.describe import describe
from tests.chaos.jobs import of_worker
from tests.chaos.left import nothing_left
from tests.chaos.seeds import seeds
from tests.chaos.test_kill_worker import pids_of
from tests.chaos.values import MEBIBYTE
from tests.support.pipelines import pipeline_of

ROUNDS = 4
"""How many jobs one session runs."""
BOUND = 60.0

fed = Federation("guests")
lab = fed.site("lab")


@lab.operation
def numbers(n: int) -> list[int]:
    return list(range(n))


@lab.operation
async def home() -> int:
    return os.getpid()


@lab.operation
def nap(x: int) -> int:
    time.sleep(0.003 * (x % 5))
    return x * 2


@lab.operation
def grow(x: int) -> np.ndarray[Any, Any]:
    time.sleep(0.005)
    return np.full(MEBIBYTE // 4, x % 100, dtype=np.uint8)


@lab.operation
def weigh(x: int, block: np.ndarray[Any, Any]) -> int:
    time.sleep(0.002)
    assert block.min() == block.max() == x % 100
    return int(block[0]) + len(block)


with Pipeline("spread") as pipeline, ForEach(numbers(PlaceParam("n"))) as x:
    doubled = nap(x)
    Yield(doubled, place="number")
    Yield(weigh(doubled, grow(doubled)), place="block")


def expected(sets: list[dict[str, Any]]) -> dict[tuple[Any, ...], int]:
    """Return what each place of each frame is to yield."""
    found = {}
    for index, params in enumerate(sets):
        for x in range(params["n"]):
            found["number", (index, x)] = x * 2
            found["block", (index, x)] = x * 2 % 100 + MEBIBYTE // 4
    return found


@pytest.fixture(autouse=True)
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers run all calls in other workers."""
    monkeypatch.setenv("DFM_SPREAD", "always")


async def home_of(session: Session) -> int:
    """Return the process that runs the nets."""
    return int((await (await session.execute(pipeline_of(home))).first()).value)


async def kill_guests(session: Session, job: Job, rng: random.Random, total: int, spared: int) -> int:
    """Kill workers that run calls for the job, each when some of its results have come; return how many."""
    moments = sorted(rng.randint(0, total * 3 // 4) for _ in range(rng.randint(1, 4)))
    killed: set[int] = set()
    seen = 0
    async for event in job.events():
        while moments and seen >= moments[0]:
            moments.pop(0)
            await asyncio.sleep(rng.choice([0, 0, 0.003, 0.02]))
            guests = [pid for pid in pids_of(session) if pid not in killed and pid != spared]
            if guests:
                killed.add(pid := rng.choice(guests))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        seen += isinstance(event, Result)
    return len(killed)


async def check(job: Job, sets: list[dict[str, Any]], *, again: bool) -> int:
    """Check the whole log of a job; return how many calls were lost."""
    events = [event async for event in job.events()]
    assert [event.offset for event in events] == list(range(len(events)))
    results = [event for event in events if isinstance(event, Result)]
    failures = [event for event in events if isinstance(event, Failure)]
    assert all(map(of_worker, failures)), failures
    wanted = expected(sets)
    for index in {event.frame[0] for event in failures if len(event.frame) == 1 and event.place is not None}:
        wanted = {key: value for key, value in wanted.items() if key[1][0] != index}  # the list of its loop was lost
        wanted |= {(place, (index,)): -1 for place in ("number", "block")}
    assert not [event for event in results if wanted[event.place, event.frame] != event.value]
    yields = Counter((event.place, event.frame) for event in results)
    yields.update((event.place, event.frame) for event in failures if event.place is not None)
    assert yields == dict.fromkeys(wanted, 1), f"{job}: missing {wanted.keys() - yields.keys()}"
    assert Counter(e.frame for e in events if isinstance(e, FrameCompleted)) == {(at,): 1 for at in range(len(sets))}
    lost = [event for event in failures if event.place is None]
    assert not (again and lost), lost
    assert job.status is (JobStatus.FAILED if lost else JobStatus.FINISHED)
    return len(lost)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.timeout(300)
async def test_the_loss_of_other_workers_costs_their_calls_only(seed: int) -> None:
    rng = random.Random(seed)
    killed = lost = 0
    async with nothing_left():
        async with Session(fed, options=LocalOptions(max_workers=rng.choice([2, 3, 4]))) as session:
            spared = await home_of(session)
            for at in range(ROUNDS):
                again = rng.random() < 0.6
                retry = RetryPolicy(on_worker_lost=100) if again else None
                sets = [{"n": rng.randint(5, 25)} for _ in range(rng.randint(1, 6))]
                try:
                    async with asyncio.timeout(BOUND):
                        job = await session.execute(pipeline, sets, retry=retry, concurrency=rng.choice([None, 1, 3]))
                        killed += await kill_guests(session, job, rng, len(expected(sets)), spared)
                        with suppress(JobFailed):
                            await job
                        lost += await check(job, sets, again=again)
                        assert await home_of(session) == spared, "the worker of the net was replaced"
                except TimeoutError:
                    pytest.fail(f"round {at} of seed {seed} hangs: {job!r} {describe(session)}")
                stats = session.stats()
                assert (stats.running, stats.waiting) == (0, 0)
    print(f"seed {seed}: killed {killed} workers of others, which cost {lost} calls")
