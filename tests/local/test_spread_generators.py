"""Generators of one job run in all workers of a site."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    JobStatus,
    LocalOptions,
    OperationContext,
    Pipeline,
    PlaceParam,
    Progress,
    Result,
    RetryPolicy,
    Session,
    Yield,
)
from tests.chaos.operations import fed as chaos
from tests.local.test_spread import names, values, workers
from tests.support.pipelines import pipeline_of
from tests.support.waiting import until

fed = Federation("spread generators")
lab = fed.site("lab")


@lab.operation
async def here() -> int:
    return os.getpid()


@lab.operation
def items(n: int) -> list[int]:
    return list(range(n))


@lab.operation
def counts(x: int, size: int) -> Iterator[tuple[int, int, int]]:
    time.sleep(0.02)
    for i in range(size):
        yield x, i, os.getpid()


@lab.operation
def arrays(x: int, size: int) -> Iterator[Any]:
    time.sleep(0.02)
    block = np.zeros(100_000)
    for i in range(size):
        block[:] = i  # the same object again: what was yielded must not change
        yield block


@lab.operation
def fails_after(x: int, size: int) -> Iterator[int]:
    time.sleep(0.02)
    for _ in range(size):
        yield os.getpid()
    raise LookupError(f"{x} is missing")


@lab.operation
def reports(x: int, context: OperationContext) -> Iterator[int]:
    time.sleep(0.02)
    context.progress(x, 10)
    yield os.getpid()


@lab.operation(retry=RetryPolicy(attempts=1, on_worker_lost=1))
def dies_away_from(home: int, x: int, folder: str) -> Iterator[int]:
    time.sleep(0.02)
    for i in range(10):
        if i == 5 and os.getpid() != home:
            try:
                Path(folder, f"died-{x}").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        yield i


@lab.operation
def endless(x: int, folder: str) -> Iterator[int]:
    try:
        while True:
            yield os.getpid()
    finally:
        Path(folder, f"closed-{os.getpid()}-{x}").touch()


@lab.operation
def hangs_away_from(home: int, x: int, folder: str) -> Iterator[int]:
    time.sleep(0.02)
    yield x
    if os.getpid() != home:
        Path(folder, f"hangs-{x}").touch()
        threading.Event().wait()


@lab.operation
def unsendable(x: int) -> Iterator[Any]:
    time.sleep(0.02)
    yield threading.Lock()


@lab.operation
def kind_of(value: Any) -> str:
    return type(value).__name__


def each(operation: Any, **args: Any) -> Pipeline:
    """Return a pipeline that yields the elements of a generator for 0, 1, 2 and so on."""
    with Pipeline(operation.name) as pipeline, ForEach(items(PlaceParam("n"))) as x:
        Yield(operation(x=x, **{name: PlaceParam(name) for name in args}))
    return pipeline


@pytest.fixture
async def session(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Session]:
    monkeypatch.setenv("DFM_SPREAD", "always")
    async with Session(fed, options=LocalOptions(max_workers=3)) as connected:
        pids: set[int] = set()
        while len(pids) < 2:
            pids = {pid for _, _, pid in await values(await connected.execute(COUNTS, {"n": 30, "size": 2}))}
        yield connected


COUNTS = each(counts, size=1)


async def test_generators_of_one_job_run_in_all_workers(session: Session) -> None:
    found = await values(await session.execute(COUNTS, {"n": 30, "size": 700}))
    assert sorted((x, i) for x, i, _ in found) == [(x, i) for x in range(30) for i in range(700)]
    assert len({pid for _, _, pid in found} & workers(session)) > 1


async def test_elements_are_in_order_and_what_they_were_when_they_were_yielded(session: Session) -> None:
    job = await session.execute(each(arrays, size=1), {"n": 6, "size": 40})
    found: dict[Any, list[float]] = {}
    async for result in job:
        (value,) = set(result.value.tolist())
        found.setdefault(result.frame[:2], []).append(value)
    assert list(found.values()) == [list(range(40))] * 6


async def test_an_error_comes_after_the_elements_before_it(session: Session) -> None:
    job = await session.execute(each(fails_after, size=1), {"n": 12, "size": 3})
    events = [event async for event in job.events()]
    assert sum(isinstance(event, Result) for event in events) == 36
    failed: list[Any] = [event.error for event in events if isinstance(event, Failure)]
    assert {error.message for error in failed} == {f"{x} is missing" for x in range(12)}
    assert all("fails_after" in error.remote_traceback for error in failed)


async def test_generators_report_wherever_they_run(session: Session) -> None:
    job = await session.execute(each(reports), {"n": 20})
    events = [event async for event in job.events()]
    assert {event.done for event in events if isinstance(event, Progress)} >= {0.0, 19.0}
    assert len({event.value for event in events if hasattr(event, "value")}) > 1


async def test_a_generator_begins_again_when_its_worker_is_lost(session: Session, tmp_path: Path) -> None:
    home = await home_of_generators(session)
    params = {"n": 20, "home": home, "folder": str(tmp_path)}
    found = await values(await session.execute(each(dies_away_from, home=1, folder=""), params))
    assert sorted(found) == sorted(list(range(10)) * 20)
    assert names(tmp_path)
    assert await home_of_generators(session) == home


async def test_generators_end_when_nobody_reads_them(session: Session, tmp_path: Path) -> None:
    job = await session.execute(each(endless, folder=""), {"n": 6, "folder": str(tmp_path)})
    pids: set[int] = set()
    async for result in job:
        pids.add(result.value)
        if len(pids) > 1:
            break
    await job.cancel()
    await until(lambda: {name.split("-")[1] for name in names(tmp_path)} >= set(map(str, pids)))


async def test_a_generator_that_hangs_elsewhere_does_not_keep_a_cancelled_job(session: Session, tmp_path: Path) -> None:
    home = await home_of_generators(session)
    params = {"n": 20, "home": home, "folder": str(tmp_path)}
    job = await session.execute(each(hangs_away_from, home=1, folder=""), params)
    await until(lambda: names(tmp_path))
    await job.cancel(grace=0.1)
    assert job.status is JobStatus.ABORTED
    assert sorted({x for x, _, _ in await values(await session.execute(COUNTS, {"n": 5, "size": 1}))}) == list(range(5))


async def test_generators_whose_elements_cannot_be_sent_stay(session: Session) -> None:
    with Pipeline("locks") as pipeline, ForEach(items(PlaceParam("n"))) as x, ForEach(unsendable(x)) as lock:
        Yield(kind_of(lock))
    assert await values(await session.execute(pipeline, {"n": 10})) == ["lock"] * 10


async def home_of_generators(session: Session) -> int:
    """Return the process that runs the nets."""
    (found,) = await values(await session.execute(pipeline_of(here)))
    return int(found)


async def test_readers_that_have_all_threads_get_the_elements_that_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    ops = chaos.operations
    with Pipeline("crossed") as pipeline:
        one = ops["stream"](1, site="archive")
        some = ops["stream"](ops["inc"](PlaceParam("x")), site="desk")
        five = ops["stream"](5, site="desk")
        count = ops["counted"](ops["begun"](one, site="archive"), site="archive", after=[five])
        ops["total"](ops["tripled"](some, site="archive"), site="lab", after=[one])
        ops["total"](ops["shifted"](five, site="desk"), site="archive", after=[some])
        ops["add"](PlaceParam("x"), 0, site="lab")
        ops["stream"](count, site="archive")
        ops["consume"]({"numbers": [1, 2]}, 5, site="archive")
        Yield(count)
    async with Session(chaos, options=LocalOptions(max_concurrent_jobs=1)) as session:
        job = await session.execute(pipeline, [{"x": x} for x in (8, 5, 3, 6, 2, 9, 4, 4)])
        assert [result.value for result in await job.collect()] == [1] * 8
