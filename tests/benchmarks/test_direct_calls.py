"""The benchmark of direct calls: its contenders make the same calls, and one that loses values is an error."""

from __future__ import annotations

import pytest

from benchmarks import operations
from benchmarks.backends import PoolBackend
from benchmarks.direct_calls import (
    compute,
    each,
    each_rate,
    echo,
    fed,
    job_round_trip,
    map_rate,
    number,
    one,
    pool_rate,
)
from dfm_async import Pipeline, PlaceParam, Session, Yield


async def test_a_map_and_a_loop_make_the_same_calls() -> None:
    async with Session(fed, target="inline") as session:
        for operation in (compute, number):
            plan = await session.prepare(each(operation))
            assert await map_rate(session, operation, [3, 1, 2]) > 0
            assert await each_rate(session, plan, [3, 1, 2]) > 0


async def test_a_job_makes_the_call_that_a_direct_call_makes() -> None:
    async with Session(fed, target="inline") as session:
        plan = await session.prepare(one)
        await job_round_trip(session, plan, 4)
        assert await session.call(echo, 4) == {"x": 4}


async def test_a_job_that_loses_values_is_an_error() -> None:
    with Pipeline("only the first") as first:
        Yield(number(PlaceParam("values")[0]))
    async with Session(fed, target="inline") as session:
        plan = await session.prepare(first)
        with pytest.raises(RuntimeError, match="1 of 3 values"):
            await each_rate(session, plan, [3, 1, 2])


async def test_a_pool_maps_all_values() -> None:
    async with PoolBackend(1, 1) as pool:
        assert await pool_rate(pool, operations.number, [3, 1, 2]) > 0
