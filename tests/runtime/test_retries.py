"""The pauses between the attempts of a call."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dfm_async import Federation, ForEach, OperationContext, Pipeline, RetryPolicy, Session, Yield, current_context
from dfm_async.model.policies import retry_after
from dfm_async.testing import virtual_time
from tests.support.pipelines import pipeline_of

fed = Federation("retries")
lab = fed.site("lab")


class Busy(Exception):
    def __init__(self, retry_after: object) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after


@lab.operation(retry=RetryPolicy(attempts=2, backoff=1.0))
async def busy(seconds: float, context: OperationContext) -> int:
    if context.attempt == 1:
        raise Busy(seconds)
    return context.attempt


@lab.operation
def items() -> list[int]:
    return list(range(4))


@lab.operation(retry=RetryPolicy(attempts=2, backoff=0.0))
def busy_elsewhere(x: int) -> float:
    time.sleep(0.02)
    if current_context().attempt == 1:
        raise Busy(0.5)
    return time.time()


def test_pauses_are_shortened_at_random() -> None:
    policy = RetryPolicy(backoff=8.0, jitter=0.5)
    pauses = {policy.pause(2) for _ in range(100)}
    assert len(pauses) > 50
    assert all(8.0 <= pause <= 16.0 for pause in pauses)
    assert {RetryPolicy(backoff=8.0, jitter=0).pause(2) for _ in range(10)} == {16.0}
    with pytest.raises(ValueError, match="jitter must be a number from 0 to 1, not 2"):
        RetryPolicy(jitter=2)


def test_the_pause_that_an_exception_asks_for_counts() -> None:
    policy = RetryPolicy(backoff=1.0, max_backoff=2.0)
    assert all(10.0 <= policy.pause(1, 10.0) <= 10.25 for _ in range(20))
    assert [retry_after(Busy(value)) for value in (3, 2.5, -1, "soon", True, float("nan"), 10**9)] == [
        3.0, 2.5, 0.0, 0.0, 0.0, 0.0, 3600.0,
    ]  # fmt: skip
    assert retry_after(ValueError()) == 0.0


async def test_a_call_is_tried_again_when_its_exception_says_so() -> None:
    async with virtual_time() as clock, Session(fed, target="inline") as session:
        job = await session.execute(pipeline_of(busy, "seconds"), {"seconds": 50})
        assert (await clock.until(job.first())).value == 2
        assert 50.0 <= clock.now <= 50.25


async def test_an_exception_of_another_worker_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    with Pipeline() as pipeline:
        with ForEach(items()) as x:
            Yield(busy_elsewhere(x))
    async with Session(fed) as session:
        began = time.time()
        times = [result.value for result in await (await session.execute(pipeline)).collect()]
    assert all(when - began >= 0.5 for when in times)
