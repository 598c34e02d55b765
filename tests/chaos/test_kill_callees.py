"""Workers of sites that only run handled calls are killed again and again: their calls fail, and the job goes on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from dfm_async import (
    FailureInfo,
    Federation,
    ForEach,
    If,
    Job,
    JobStatus,
    Pipeline,
    PlaceParam,
    Repeat,
    Result,
    RetryPolicy,
    Session,
    Yield,
    collect,
    gather,
)
from dfm_async.events import FrameCompleted
from tests.chaos.left import nothing_left
from tests.chaos.seeds import seeds

JOBS = 4
"""How many jobs one session runs."""

fed = Federation("callees")
hub = fed.site("hub")
leaves = [fed.site("a"), fed.site("b", workers=2), fed.site("c")]


def triple(x: int, y: object = None) -> int:
    time.sleep(0.003)
    return x * 3


async def linger(x: int) -> int:
    await asyncio.sleep(0.005)
    return x * 3


work = leaves[0].operation(triple)
rest = leaves[0].operation(linger)
for leaf in leaves[1:]:
    leaf.operation(work)
    leaf.operation(rest)


@hub.operation
async def numbers(n: int) -> list[int]:
    await asyncio.sleep(0.001)
    return list(range(n))


@hub.operation
def after(x: int, _done: object) -> int:
    return x + 1


class Writer:
    """Writes a random pipeline whose calls at the leaves are all handled."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.policy = {"retry": RetryPolicy(attempts=1, on_worker_lost=100)} if rng.random() < 0.3 else {}
        self.yields = 0

    def call(self, x: Any, **options: Any) -> Any:
        site = self.rng.choice(leaves)
        inner = self.rng.random() < 0.3
        if inner and not options:  # a chain at the site
            return work(x, work(x, site=site, **self.policy), site=site, **self.policy)
        operation: Any = self.rng.choice([work, rest])
        return operation(x, site=site, **self.policy, **options)

    def place(self, kind: str) -> str:
        self.yields += 1
        return f"{kind} {self.yields}"

    def step(self, x: Any) -> None:
        if self.rng.random() < 0.7:
            count = self.rng.randint(1, 4)
            replies = gather([self.call(x) for _ in range(count)], at_least=0, within=self.rng.choice([None, 60]))
            Yield([replies, replies.failures, x, count], place=self.place("gather"))
        else:
            Yield([self.call(x, fallback=-1), x], place=self.place("fallback"))

    def body(self, x: Any, depth: int) -> None:
        for _ in range(self.rng.randint(1, 2)):
            kind = self.rng.choice(["step", "step", "foreach", "repeat", "if"]) if depth < 2 else "step"
            if kind == "step":
                self.step(x)
            elif kind == "if":
                with If(after(x, 0) > 2):
                    self.step(x)
            elif kind == "repeat":
                with Repeat(after(x, 0), times=self.rng.randint(1, 4)) as current:
                    self.body(current, depth + 1)
                    last = gather([self.call(current)], at_least=0)
                    current.next(after(current, last))
            else:
                errors: Any = self.rng.choice(["skip", "keep"])
                with ForEach(numbers(self.rng.randint(0, 5)), concurrency=self.rng.choice([None, 1, 2])) as element:
                    self.body(element, depth + 1)
                    value = self.call(element)
                Yield(collect(value, errors=errors), place=self.place(errors))

    def write(self) -> Pipeline:
        with Pipeline("callees") as pipeline:
            x = after(PlaceParam("x"), 0)
            self.body(x, 0)
            self.step(x)
        return pipeline


def check_result(result: Result, *, reliable: bool) -> None:
    kind, value = result.place.split()[0], result.value
    if kind == "gather":
        replies, failures, x, count = value
        assert all(reply.value == x * 3 for reply in replies), result
        assert len(replies) + len(failures) == count, result
    elif kind == "fallback":
        failures = [] if value[0] == value[1] * 3 else [None]
        assert value[0] in (value[1] * 3, -1), result
    else:
        failures = [found for found in value if isinstance(found, FailureInfo)]
        assert all(found % 3 == 0 for found in value if not isinstance(found, FailureInfo)), result
    assert not (reliable and failures), result
    assert all(found is None or found.type_name.endswith("WorkerLost") for found in failures), result


async def kill(session: Session, job: Job, rng: random.Random) -> int:
    """Kill workers of the leaves while the job runs; return how many."""
    killed = 0
    async for _ in job.events():
        if killed < 4 and rng.random() < 0.15:  # more often, workers would wait before they start again
            site = session.stats().sites.get(rng.choice(leaves).name)
            pids = [worker.pid for worker in site.workers if worker.pid is not None] if site else []
            if pids:
                killed += 1
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
    return killed


async def run(session: Session, rng: random.Random, at: int) -> int:
    writer = Writer(rng)
    pipeline = writer.write()
    plan = await session.prepare(pipeline)
    used = {str(plan.locations[at]) for at in range(len(plan.locations))} & {leaf.name for leaf in leaves}
    assert {str(plan.locations[at]) for at in plan.contained} == used, plan.explain()
    sets = [{"x": rng.randint(0, 3)} for _ in range(rng.randint(1, 4))]
    async with asyncio.timeout(60):
        calm = await session.execute(pipeline, sets, retry=RetryPolicy(on_worker_lost=3))  # of kills in the last round
        expected = Counter((result.place, result.frame) for result in await calm.collect())
        job = await session.execute(pipeline, sets, concurrency=rng.choice([None, 1, 2]))
        killed = await kill(session, job, rng)
    events = [event async for event in job.events()]
    assert job.status is JobStatus.FINISHED, f"job {at}: {events[-1]}\n{pipeline}"
    assert [event.offset for event in events] == list(range(len(events)))
    assert Counter((e.place, e.frame) for e in events if isinstance(e, Result)) == expected, str(pipeline)
    done = Counter(e.frame for e in events if isinstance(e, FrameCompleted))
    assert done == {(index,): 1 for index in range(len(sets))}
    for event in events:
        if isinstance(event, Result):
            check_result(event, reliable=bool(writer.policy))
    return killed


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.timeout(300)
async def test_jobs_go_on_without_the_calls_of_workers_that_are_killed(seed: int) -> None:
    rng = random.Random(seed)
    async with nothing_left():
        async with Session(fed) as session:
            killed = sum([await run(session, rng, at) for at in range(JOBS)])
    print(f"seed {seed}: killed {killed} workers")
