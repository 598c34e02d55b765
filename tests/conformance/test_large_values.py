"""Large values on both targets: they arrive as they were, and no more of them are under way than the limits allow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, Pipeline, PlaceParam, ResultLimits, Yield
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import all_values

MIB = 1 << 20

federation = Federation("large")
field = federation.site("archive")
lab = federation.site("lab")


@field.operation
def make(size: int) -> Any:
    return np.arange(size // 8)


@field.operation
def arrays(n: int, size: int) -> Iterator[Any]:
    array = np.zeros(size // 8)
    for i in range(n):
        array[0] = i  # the same object again and again
        yield array


@field.operation
async def arrays_async(n: int, size: int) -> AsyncIterator[Any]:
    array = np.zeros(size // 8)
    for i in range(n):
        array[0] = i
        yield array


@lab.operation
def add(values: Any) -> int:
    if values.flags.writeable:
        raise ValueError("it is writable")
    return int(values.sum())


@lab.operation
async def firsts(values: Any) -> list[int]:
    return [int(array[0]) async for array in values]


@lab.operation
def pass_on(values: Any) -> Any:
    return {"again": [values, values[:10]], "bytes": values.tobytes()}


@pytest.mark.parametrize("size", [800, 80_000, 8 * MIB])
async def test_arrays_cross_sites_and_come_back(connect: Connect, size: int) -> None:
    with Pipeline("p") as pipeline:
        array = make(PlaceParam("size"))
        Yield(array, place="array")
        Yield(add(array), place="sum")
        Yield(pass_on(array), place="again")
    count = size // 8
    async with connect(federation) as session:
        job = await session.execute(pipeline, {"size": size})
        found = {result.place: result.value async for result in job}
        await job
    expected = np.arange(count)
    assert found["sum"] == expected.sum()
    assert np.array_equal(found["array"], expected)
    assert np.array_equal(found["again"]["again"][0], expected)
    assert np.array_equal(found["again"]["again"][1], expected[:10])
    assert found["again"]["bytes"] == expected.tobytes()
    assert not found["array"].flags.writeable


async def test_large_parameters_arrive(connect: Connect) -> None:
    pipeline = pipeline_of(add, "values")
    rows = [{"values": np.full(MIB // 2, i)} for i in range(20)]  # more than may be in flight
    async with connect(federation) as session:
        job = await session.execute(pipeline, rows)
        found = {result.frame[0]: result.value async for result in job}
        await job
    assert found == {i: i * MIB // 2 for i in range(20)}


@pytest.mark.parametrize("operation", [arrays, arrays_async], ids=["sync", "async"])
@pytest.mark.parametrize("size", [800, 80_000, 3 * MIB])
async def test_elements_are_what_they_were_when_they_were_produced(connect: Connect, operation: Any, size: int) -> None:
    n = 60 if size < MIB else 16  # many times the bytes that may be in flight
    here = yielding(lambda: operation(PlaceParam("n"), size))
    there = yielding(lambda: firsts(operation(PlaceParam("n"), size)))
    async with connect(federation) as session:
        job = await session.execute(here, {"n": n}, options=ResultLimits(max_bytes=8 * MIB, window_bytes=4 * MIB))
        assert [result.value[0] async for result in job] == list(range(n))
        assert await all_values(session, there, {"n": n}) == [list(range(n))]


async def test_overestimated_values_do_not_block_the_job(connect: Connect) -> None:
    pipeline = pipeline_of(zeros, "n")
    limits = ResultLimits(window_bytes=4096, max_bytes=MIB)
    async with connect(federation) as session:
        job = await session.execute(pipeline, {"n": 50}, options=limits)
        assert sum([len(result.value) async for result in job]) == 50 * 1000
        job = await session.execute(pipeline, [{"n": 2}] * 50, options=limits)
        assert sum([len(result.value) async for result in job]) == 100 * 1000


@field.operation
def zeros(n: int) -> Iterator[list[int]]:
    for _ in range(n):
        yield [0] * 1000  # counts as 8,000 bytes at first
