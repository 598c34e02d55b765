"""The failed parameter sets of a job, and running them again as a new job."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, JobStatus, LocalOptions, OperationFailed, Session
from dfm_async.errors import DfmError, JobAborted, JobFailed
from dfm_async.events import FailedSet, Failure, FrameCompleted, Result
from dfm_async.results.unfinished import UnfinishedSets
from tests.conftest import Connect, Open
from tests.support.pipelines import pipeline_of
from tests.support.waiting import file_created

fed = Federation("halving")
lab = fed.site("lab")


@lab.operation
def halve(n: int, mended: str) -> int:
    """Refuse odd numbers, until somebody has mended it."""
    if n % 2 and not Path(mended).exists():
        raise ValueError(f"{n} is odd")
    return n // 2


@lab.operation
async def wait(n: int, opened: str) -> int:
    """Wait for a file if the number is negative."""
    if n < 0:
        await file_created(opened)
    return n


@lab.operation
def total(values: Any, limit: float) -> float:
    """Return a sum, unless the first number is too large."""
    if values[0] >= limit:
        raise ValueError("too large")
    return float(values.sum())


sums = pipeline_of(total, "values", "limit")
halves = pipeline_of(halve, "n", "mended")
waits = pipeline_of(wait, "n", "opened")


def described(failures: list[FailedSet]) -> list[tuple[int, int, str]]:
    return [(found.index, found.params["n"], type(found.error).__name__) for found in failures]


async def retried(session: Session, path: Path, params: Any) -> None:
    """Run sets of which some fail; mend the operation, and run those again."""
    mended = path / "mended"
    job = await session.execute(halves, params, label="ann", priority=3)
    with pytest.raises(JobFailed):
        await job
    assert sorted(result.value for result in await job.collect(errors="skip")) == [0, 1, 2]
    kinds = [type(item) for item in await job.collect(errors="yield")]
    assert (kinds.count(Result), kinds.count(Failure)) == (3, 3)
    failures = await job.failures()
    assert described(failures) == [(n, n, "OperationFailed") for n in (1, 3, 5)]
    assert all(isinstance(found.error, OperationFailed) and "is odd" in str(found.error) for found in failures)
    still = await job.retry_failed()
    assert [found.params for found in await still.failures()] == [found.params for found in failures]
    mended.touch()
    again = await still.retry_failed(priority=0)
    assert sorted(result.value for result in await again.collect()) == [0, 1, 2]
    info = again.info()
    assert (info.retry_of, info.label, info.sets) == (still.job_id, "ann", 3)
    assert await again.failures() == []
    with pytest.raises(DfmError, match="has no failed parameter sets"):
        await again.retry_failed()


async def test_failed_sets_run_again_as_a_new_job(connect: Connect, tmp_path: Path) -> None:
    sets = [{"n": n, "mended": str(tmp_path / "mended")} for n in range(6)]
    async with connect(fed) as session:
        await retried(session, tmp_path, sets)


async def test_failed_sets_of_a_stream_run_again(connect: Connect, tmp_path: Path) -> None:
    async def stream() -> Any:
        for n in range(6):
            yield {"n": n, "mended": str(tmp_path / "mended")}

    async with connect(fed) as session:
        await retried(session, tmp_path, stream())


async def test_sets_that_a_cancelled_job_has_not_completed_run_again(connect: Connect, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    async with connect(fed) as session:
        job = await session.execute(waits, [{"n": n, "opened": str(opened)} for n in (1, -2, 3)])
        completed = 0
        async with aclosing(job.events()) as events:
            while completed < 2:
                completed += isinstance(await anext(events), FrameCompleted)
        await job.cancel("enough")
        failures = await job.failures()
        assert described(failures) == [(1, -2, "JobAborted")]
        assert isinstance(failures[0].error, JobAborted)
        opened.touch()
        again = await job.retry_failed()
        assert [result.value for result in await again.collect()] == [-2]


async def test_a_job_that_still_runs_is_waited_for(connect: Connect, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    async with connect(fed) as session:
        job = await session.execute(waits, {"n": -1, "opened": str(opened)})
        waiting = asyncio.ensure_future(job.failures())
        await asyncio.sleep(0)
        assert not waiting.done()
        opened.touch()
        assert await waiting == []


@lab.operation(name="strict")
class Strict:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("the disk is missing")

    def body(self, n: int) -> int:
        """Return the number."""
        return n


async def test_all_sets_fail_with_an_object_that_cannot_be_made(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(pipeline_of(Strict, "n"), [{"n": 1}, {"n": 2}])
        failures = await job.failures()
        assert [found.params for found in failures] == [{"n": 1}, {"n": 2}]
        assert all("the disk is missing" in str(found.error) for found in failures)


async def test_sets_with_arrays_run_again(connect: Connect) -> None:
    async with connect(fed) as session:
        job = await session.execute(sums, [{"values": np.full(100_000, n), "limit": 1.0} for n in range(3)])
        failures = await job.failures()
        assert [(found.index, found.params["values"].sum()) for found in failures] == [(1, 1e5), (2, 2e5)]
        assert (await (await job.retry_failed()).failures())[1].params["values"].sum() == 2e5


# with a store


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_failed_sets_of_a_store_run_again_in_a_later_session(opens: Open, tmp_path: Path) -> None:
    sets = [{"n": n, "mended": str(tmp_path / "mended")} for n in range(6)]
    async with opens() as session:
        job = await session.execute(halves, sets, job_id="first")
        with pytest.raises(JobFailed):
            await job
    (tmp_path / "mended").touch()
    async with opens() as session:
        known = await session.reattach("first")
        assert described(await known.failures()) == [(n, n, "OperationFailed") for n in (1, 3, 5)]
        again = await known.retry_failed()
        assert sorted(result.value for result in await again.collect()) == [0, 1, 2]
    async with opens() as session:
        assert (await session.reattach(again.job_id)).info().retry_of == "first"


@pytest.mark.parametrize("target", ["inline"])
async def test_an_interrupted_job_is_resumed_instead(opens: Open, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    async with opens() as session:
        job = await session.execute(waits, {"n": -1, "opened": str(opened)}, job_id="first")
        await anext(aiter(job.events()))
    assert job.status is JobStatus.INTERRUPTED
    async with opens() as session:
        known = await session.reattach("first")
        assert await known.failures() == []
        with pytest.raises(DfmError, match=r"is interrupted: session\.resume"):
            await known.retry_failed()


# parameters that are not known


@pytest.mark.parametrize("target", ["inline"])
async def test_sets_of_a_log_that_has_expired_are_not_known(connect: Connect, tmp_path: Path) -> None:
    options = LocalOptions(keep_finished=0)
    async with connect(fed, options=options) as session:
        job = await session.execute(halves, {"n": 1, "mended": str(tmp_path / "mended")})
        with pytest.raises(JobFailed):
            await job
        with pytest.raises(DfmError, match=r"the parameter sets of job \w+ are not known here"):
            await job.failures()


@pytest.mark.parametrize("target", ["inline"])
async def test_sets_that_were_too_large_to_be_kept_are_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.session.submission.UnfinishedSets", lambda: UnfinishedSets(limit=500_000))
    async with connect(fed) as session:
        job = await session.execute(sums, {"values": np.ones(100_000), "limit": 0.0})
        with pytest.raises(DfmError, match=r"the parameters of set 0 of job \w+ were not kept.* Use a store"):
            await job.retry_failed()
