"""The calls of one job run in several workers of a site."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield, current_context
from tests.conftest import Connect

fed = Federation("parallel calls")
lab = fed.site("lab", workers=2)


@lab.operation
def numbers(n: int) -> list[int]:
    return list(range(n))


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@lab.operation
def computed(x: int) -> tuple[int, int]:
    burn(0.03)
    current_context().progress(x)
    return x, os.getpid()


@lab.operation
def generated(x: int) -> Iterator[tuple[int, int]]:
    for _ in range(3):
        burn(0.01)
        yield x, os.getpid()


with Pipeline("calls") as calls, ForEach(numbers(PlaceParam("n"))) as each:
    Yield(computed(each))

with Pipeline("generators") as generators, ForEach(numbers(PlaceParam("n"))) as each:
    Yield(generated(each))


async def processes(session: Session, pipeline: Pipeline, times: int) -> set[int]:
    """Return in which processes the calls of one job ran; there are as many results as there should be."""
    found = [result.value for result in await (await session.execute(pipeline, {"n": 40})).collect()]
    assert sorted(x for x, _ in found) == sorted(list(range(40)) * times)
    return {pid for _, pid in found}


@pytest.mark.parametrize("target", ["local", "flare"])
@pytest.mark.parametrize(("pipeline", "times"), [(calls, 1), (generators, 3)], ids=["calls", "generators"])
async def test_calls_of_one_job_run_in_several_processes(connect: Connect, pipeline: Pipeline, times: int) -> None:
    async with connect(fed) as session:
        while len(await processes(session, pipeline, times)) < 2:
            pass  # a machine that is busy with other things takes longer to start another worker
