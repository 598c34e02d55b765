"""Memory does not grow with the number of elements or parameter sets, whatever the pace of the reader."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import psutil

from dfm_async import Federation, ResultLimits, Session
from tests.support.pipelines import pipeline_of

MIB = 1024 * 1024

fed = Federation("bounded")
source, middle = fed.site("source"), fed.site("middle")


@source.operation
def count(n: int) -> Iterator[int]:
    yield from range(n)


@middle.operation
def pieces(n: int) -> bytes:
    return bytes(n)


numbers = pipeline_of(count, "n")
sets = pipeline_of(pieces, "n")


def memory(session: Session) -> int:
    """What the application and its workers use; they share what they have loaded."""
    pids = [worker.pid for site in session.stats().sites.values() for worker in site.workers if worker.pid]
    return sum(psutil.Process(pid).memory_full_info().pss for pid in (os.getpid(), *pids))


async def test_a_long_generator_and_a_reader_that_pauses(session: Session) -> None:
    limits = ResultLimits(max_items=1000)
    await (await session.execute(numbers, {"n": 1}))
    before = memory(session)
    job = await session.execute(numbers, {"n": 400_000}, options=limits)
    seen = 0
    async for result in job.results():
        assert result.value == seen
        seen += 1
        if seen in (1, 130_000, 260_000):
            await asyncio.sleep(0.3)  # the producer could run far ahead meanwhile
            assert session.stats().results < 2000
            assert memory(session) - before < 48 * MIB
    assert seen == 400_000


async def test_a_thousand_parameter_sets_with_heavy_results_and_a_reader_that_pauses(session: Session) -> None:
    limits = ResultLimits(max_bytes=8 * MIB, window_bytes=4 * MIB)
    await (await session.execute(sets, {"n": 1}))
    before = memory(session)
    job = await session.execute(sets, [{"n": MIB // 2} for _ in range(1000)], options=limits, concurrency=8)
    seen = 0
    async for _ in job.results():
        seen += 1
        if seen in (1, 500):
            await asyncio.sleep(0.3)
            assert session.stats().result_bytes < 16 * MIB
            assert memory(session) - before < 96 * MIB
    assert seen == 1000
