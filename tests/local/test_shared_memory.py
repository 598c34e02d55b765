"""Shared memory between real processes: freed whatever happens, valid as long as somebody has it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dfm_async import Federation, JobAborted, Pipeline, PlaceParam, ResultLimits, Session
from tests.support.pipelines import pipeline_of, yielding
from tests.support.processes import run_python
from tests.support.sessions import all_values

MIB = 1 << 20

fed = Federation("shared")
field, lab = fed.site("field"), fed.site("lab")


@field.operation
def arrays(n: int, size: int) -> Iterator[Any]:
    for i in range(n):
        yield np.full(size // 8, i)


@field.operation
def process() -> int:
    return os.getpid()


@field.operation
async def used() -> int:
    """How much of the arena is in use."""
    return int(_arena().used)


@field.operation
async def shrinks(limit: int) -> int:
    """Has a smaller arena from now on. Nothing may be in it."""
    arena = _arena()
    arena.__init__(limit)  # it is not open yet
    return int(arena.limit)


def _arena() -> Any:
    from dfm_async.wire.memory import Arena

    (arena,) = (found for found in gc.get_objects() if isinstance(found, Arena))
    return arena


@lab.operation
async def first_of(values: AsyncIterator[Any]) -> Any:
    async for value in values:
        return value[:3].copy()
    return None


@lab.operation
async def first_of_several(values: AsyncIterator[Any]) -> Any:
    """Leave the stream when further elements have arrived, which nobody reads."""
    from dfm_async.wire.memory import Lease

    async for value in values:
        while sum(isinstance(found, Lease) for found in gc.get_objects()) < 3:  # noqa: ASYNC110 - arrivals notify nobody
            await asyncio.sleep(0.01)
        return value[:3].copy()
    return None


stream = pipeline_of(arrays, "n", "size")
where = pipeline_of(process)
how_much = pipeline_of(used)
small = pipeline_of(shrinks, "limit")
first = yielding(lambda: first_of(arrays(PlaceParam("n"), PlaceParam("size"))))
several = yielding(lambda: first_of_several(arrays(PlaceParam("n"), PlaceParam("size"))))


async def value_of(session: Session, pipeline: Pipeline, params: Any = None) -> Any:
    (value,) = await all_values(session, pipeline, params or {})
    return value


async def until_used(session: Session, size: int) -> None:
    """Blocks come back by messages of their own, which the question can overtake: so it is asked again."""
    while await value_of(session, how_much) != size:
        pass


def arenas(process: int) -> set[int]:
    """The arenas that a process has a file of, by what the system knows them by."""
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # such as the file that lists the others
            if "dfm-arena" in os.readlink(file):
                found.add(os.stat(file).st_ino)
    return found


async def test_arrays_stay_valid_when_their_worker_is_killed() -> None:
    async with Session(fed) as session:
        worker = await value_of(session, where)
        job = await session.execute(stream, {"n": 1000, "size": MIB})
        kept = []
        with pytest.raises(JobAborted):
            async for result in job:
                kept.append(result.value)
                if len(kept) == 10:
                    os.kill(worker, signal.SIGKILL)
        assert len(kept) >= 10
        assert all(array.sum() == i * MIB // 8 for i, array in enumerate(kept))
        assert await value_of(session, where) != worker
        again = await session.execute(stream, {"n": 3, "size": MIB})
        assert [int(result.value[0]) async for result in again] == [0, 1, 2]
    assert all(array.sum() == i * MIB // 8 for i, array in enumerate(kept))


async def test_a_cancelled_job_leaves_nothing_in_the_arena(session: Session) -> None:
    job = await session.execute(stream, {"n": 10_000, "size": MIB})
    count = 0
    async for _ in job:
        count += 1
        if count == 20:
            break
    await job.cancel()
    assert await value_of(session, how_much) > 0, "its log has what was not read"
    await session.forget(job.job_id)
    del job, _
    await until_used(session, 0)


async def test_results_that_were_read_do_not_fill_the_arena_job_after_job(session: Session) -> None:
    for _ in range(4):
        job = await session.execute(stream, {"n": 100, "size": MIB})
        async for _result in job:
            pass
    assert await value_of(session, how_much) <= 200 * MIB
    await value_of(session, where)  # it begins after the last one was read
    assert await value_of(session, how_much) <= 100 * MIB


async def test_reader_that_keeps_all_results_gets_all_results(session: Session) -> None:
    """The arena of a worker has a limit that this goes beyond: what has no room there travels in the message."""
    assert await value_of(session, small, {"limit": 64 * MIB}) == 64 * MIB
    kept = []
    for part in range(3):
        job = await session.execute(stream, {"n": 12, "size": 2 * MIB}, options=ResultLimits(max_items=1))
        kept += [result.value async for result in job]
        assert len(kept) == 12 * (part + 1)
    assert all(array[0] == array[-1] == i % 12 for i, array in enumerate(kept))
    assert len({id(array) for array in kept}) == 36
    for known in session.jobs():
        await session.forget(known.job_id)
    del kept, job
    await until_used(session, 0)


@pytest.mark.parametrize("reads", [first, several], ids=["at once", "with elements unread"])
async def test_stream_that_is_left_early_frees_elements_in_flight(session: Session, reads: Pipeline) -> None:
    assert (await value_of(session, reads, {"n": 10_000, "size": 4 * MIB})).tolist() == [0, 0, 0]
    await until_used(session, 0)


async def test_unused_memory_of_a_peer_is_unmapped() -> None:
    before = arenas(os.getpid())
    async with Session(fed) as session:
        job = await session.execute(stream, {"n": 3, "size": MIB})
        kept = [result.value async for result in job]
        assert len(arenas(os.getpid()) - before) == 1
    del session, job
    gc.collect()
    assert len(arenas(os.getpid()) - before) == 1
    del kept
    assert arenas(os.getpid()) == before


def test_killed_application_leaves_no_shared_memory() -> None:
    code = textwrap.dedent(
        """
        import asyncio
        from dfm_async import Session
        from tests.local.test_shared_memory import MIB, fed, stream

        async def main():
            async with Session(fed) as session:
                job = await session.execute(stream, {"n": 10_000, "size": MIB})
                kept = []
                async for result in job:
                    kept.append(result.value)
                    if len(kept) == 20:
                        print("ready", flush=True)

        asyncio.run(main())
        """
    )
    application = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert application.stdout is not None
    with application.stdout:
        assert application.stdout.readline() == "ready\n"
        below = psutil.Process(application.pid).children(recursive=True)
        assert any(arenas(found.pid) for found in below)
        application.kill()
        application.wait()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive


def test_arrays_that_outlive_the_loop_do_not_disturb_the_exit() -> None:
    code = textwrap.dedent(
        """
        import asyncio
        from dfm_async import Session
        from tests.local.test_shared_memory import MIB, fed, stream

        kept = []

        async def main():
            async with Session(fed) as session:
                job = await session.execute(stream, {"n": 5, "size": MIB})
                kept.extend([result.value async for result in job])

        asyncio.run(main())
        assert [int(array.sum()) for array in kept] == [i * MIB // 8 for i in range(5)]
        cycle = [kept]
        cycle.append(cycle)
        """
    )
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("", "")
