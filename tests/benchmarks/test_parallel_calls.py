"""The benchmark of parallel calls: all of its jobs make the calls that its peers make."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks import operations, workloads
from benchmarks.backends import PoolBackend
from benchmarks.parallel_calls import CASES, fed, rate, request_times
from benchmarks.workloads import CALLS, Calls
from dfm_async import Session


@pytest.fixture(autouse=True)
def steps_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(operations.STEPS, "1e6")


@pytest.mark.parametrize(("name", "shape"), [pytest.param(case[1], case[2], id=case[0]) for case in CASES])
async def test_a_job_makes_as_many_calls_as_are_counted(name: str, shape: Any) -> None:
    calls = Calls(5, 1e-5, CALLS[name].size)
    async with Session(fed, target="inline") as session:
        assert await rate(session, shape(calls, calls.count), calls.count) > 0
        with pytest.raises(RuntimeError, match="5 of 6 results"):
            await rate(session, shape(calls, calls.count), calls.count + 1)


@pytest.mark.parametrize("size", [0, 1024])
async def test_a_pool_makes_the_same_calls(size: int) -> None:
    async with PoolBackend(1, 1) as pool:
        assert await workloads.parallel_calls(pool, Calls(5, 1e-5, size), 5) > 0


async def test_requests_are_timed_one_after_the_other() -> None:
    async with Session(fed, target="inline") as session:
        found = await request_times(session, 20)
    assert 0 < found["median"] <= found["p99"]


def test_the_amount_of_work_is_calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(operations.STEPS)
    steps = operations.steps_in(0.001)
    assert steps > 0
    assert operations.steps_in(0.001) == steps
    assert float(os.environ[operations.STEPS]) == pytest.approx(steps * 1000, rel=0.01)
