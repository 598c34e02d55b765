"""A session is closed while many callers submit, feed, cancel, look for and resume jobs that are written down."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from dfm_async import DfmError, Federation, JobAborted, JobStatus, ParameterError, Session, SessionClosed
from dfm_async.errors import JobInterrupted
from tests.chaos.left import nothing_left
from tests.chaos.seeds import seeds
from tests.support.pipelines import pipeline_of

CALLERS = 5
REFUSALS = (SessionClosed, JobInterrupted, JobAborted, ParameterError)
"""What a caller may be told when the session is closed."""

fed = Federation("closing")
site = fed.site("site")


@site.operation
async def square(n: int) -> int:
    await asyncio.sleep(0.001)
    return n * n


squares = pipeline_of(square, "n")


async def call(session: Session, name: str, rng: random.Random, submitted: dict[str, int]) -> None:
    """Does one thing after the other, until it is refused; notes how many sets each job certainly has."""
    number = 0
    while True:
        job_id = f"{name}-{number}"
        number += 1
        job = await session.execute(squares, [{"n": 1}] * number, autostop=False, job_id=job_id)
        submitted[job_id] = number
        for _ in range(rng.randint(0, 3)):
            count = rng.randint(1, 5)
            await job.send_input_params([{"n": 2}] * count)
            submitted[job_id] += count
        match rng.choice(["cancel", "finish", "find", "list"]):
            case "cancel":
                await job.cancel()
            case "finish":
                await job.send_stop_frame()
                assert await job is JobStatus.FINISHED
            case "find":
                await (await session.reattach(job_id)).send_stop_frame()
            case "list":
                assert job_id in [found.job_id for found in await session.refresh_jobs()]


@pytest.mark.parametrize("seed", seeds(4))
async def test_closing_a_session_amid_any_calls_loses_no_job(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    store = f"sqlite:///{tmp_path}/jobs.db"
    submitted: dict[str, int] = {}
    async with nothing_left(), asyncio.timeout(60):
        async with Session(fed, target="inline", store=store) as session:
            calls = [asyncio.create_task(call(session, f"caller-{n}", rng, submitted)) for n in range(CALLERS)]
            await asyncio.wait(calls, timeout=rng.uniform(0.0, 0.1))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, REFUSALS), repr(outcome)
        assert all(job.status.ended for job in session.jobs()), session.jobs()
        async with Session(fed, target="inline", store=store) as session:
            found = {job.job_id: job for job in session.jobs()}
            assert submitted.keys() == found.keys()
            for job_id, job in found.items():
                assert job.status.ended, job
                if job.status is JobStatus.INTERRUPTED:
                    job = await session.resume(job_id)
                    await job.send_stop_frame()
                    assert await job is JobStatus.FINISHED
                if job.status is JobStatus.FINISHED:
                    assert len(await job.collect()) >= submitted[job_id]
                else:
                    with pytest.raises(DfmError):
                        await job
