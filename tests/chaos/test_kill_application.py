"""An application is killed while it runs jobs that are written down, and another one goes on with them."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfm_async import Job, JobStatus, Session
from dfm_async.events import FrameCompleted
from tests.chaos.lasting import (
    DATABASE,
    functions,
    jobs,
    leases_expired,
    new_session,
    note,
    noted_calls,
    notes,
    pipeline,
    recorded,
    run,
)
from tests.chaos.left import nothing_left
from tests.chaos.seeds import seeds
from tests.chaos.values import comparable
from tests.reference import interpret
from tests.support.postgres import PostgresServer

BOUND = 60.0


@dataclass
class Left:
    """What an application has left when it was killed."""

    recorded: set[tuple[str, str]]
    calls: dict[str, list[str]]
    """What calls of each job have noted."""


def total(folder: Path, seed: int) -> int:
    """About how many lines the application says, if nobody kills it."""
    sets = [params for arguments in jobs(folder, seed).values() for params in arguments["input_params"]]
    return len(interpret(pipeline, functions, sets).results) + len(sets)


async def look_on(folder: Path) -> dict[str, list[list[Any]]]:
    """Reads along from another process, until the jobs have ended, or the application that runs them has."""
    async with new_session(folder) as session:

        async def read(job_id: str) -> list[list[Any]]:
            job = await session.reattach(job_id)
            seen = [note(event) async for event in job.events()]
            assert job.status in (JobStatus.FINISHED, JobStatus.INTERRUPTED), job
            return seen

        names = [job.job_id for job in session.jobs()]
        return dict(zip(names, await asyncio.gather(*map(read, names)), strict=True))


async def run_and_kill(folder: Path, seed: int, rng: random.Random) -> dict[str, list[list[Any]]]:
    """Runs the application, kills it at a random moment, and waits until its processes have ended.

    Gives what somebody who read along has seen.
    """
    command = [sys.executable, "-m", "tests.chaos.application", str(folder), str(seed)]
    application = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert application.stdout is not None
    looking: asyncio.Task[dict[str, list[list[Any]]]] | None = None
    family: list[psutil.Process] = []
    try:
        async with asyncio.timeout(BOUND):
            match rng.choice(["early", "soon", "middle", "middle", "middle"]):
                case "early":  # perhaps before there is a session
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                case "soon":  # while jobs are submitted
                    await application.stdout.readline()
                    await asyncio.sleep(rng.uniform(0.0, 0.3))
                case "middle":
                    await application.stdout.readline()
                    looking = asyncio.create_task(look_on(folder)) if rng.random() < 0.5 else None
                    for _ in range(rng.randint(0, total(folder, seed))):
                        if not await application.stdout.readline():
                            break
                    await asyncio.sleep(rng.choice([0.0, 0.01, 0.1]))
    except TimeoutError:
        application.send_signal(signal.SIGUSR1)  # it tells on its standard error what it waits for
        await asyncio.sleep(1)
        pytest.fail(f"the application of seed {seed} hangs")
    finally:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(application.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            application.kill()
        await application.stdout.read()
        code = await application.wait()
    assert code in (0, -signal.SIGKILL), f"the application ended with {code}"
    _, orphans = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert not orphans, f"orphans: {orphans}"
    if looking is None:
        return {}
    try:
        return await asyncio.wait_for(looking, BOUND)
    except TimeoutError:
        pytest.fail(f"seed {seed}: whoever reads along is not told of the end")


async def check_list(folder: Path, session: Session) -> dict[str, set[int]]:
    """Checks what a new session tells about the jobs of the dead one; gives what is done of each."""
    found = {job.job_id: job for job in session.jobs()}
    path = folder / "submitted"
    submitted = path.read_text().split() if path.exists() else []
    assert set(submitted) <= found.keys(), "a job was submitted, but is not known"
    for name, job in found.items():
        assert job.status in (JobStatus.FINISHED, JobStatus.INTERRUPTED), job
        read = notes(folder, name)
        assert read == [] or read[-1][0] < job._known().log.end, "read, but not written down"
        if read and read[-1][1:3] == ["status", "finished"]:
            assert job.status is JobStatus.FINISHED
    return {name: await done_of(job) for name, job in found.items()}


async def done_of(job: Job) -> set[int]:
    return {event.frame[0] async for event in job.events() if isinstance(event, FrameCompleted)}


def check_read(folder: Path, name: str, sets: list[dict[str, Any]]) -> None:
    """What all readers have seen together is what the job was to give, each result once."""
    read = notes(folder, name)
    assert [line[0] for line in read] == list(range(len(read))), f"offsets are not contiguous in {name}"
    assert read[-1][1:3] == ["status", "finished"], f"the last of {name}: {read[-1]}"
    results = Counter((place, tuple(frame), value) for _, kind, place, frame, value in read if kind == "result")
    outcome = interpret(pipeline, functions, sets)
    assert results == Counter((place, frame, comparable(value)) for place, frame, value in outcome.results), name
    done = Counter(frame[0] for _, kind, _, frame, _ in read if kind == "done")
    assert done == dict.fromkeys(range(len(sets)), 1), name


def runs(folder: Path, name: str) -> Counter[int]:
    path = folder / f"runs-{name}"
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


@pytest.mark.parametrize("seed", seeds(2))
async def test_jobs_of_a_killed_application_can_be_resumed(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(seed)
    if seed % 3 == 1:
        server: PostgresServer = request.getfixturevalue("postgres")
        (tmp_path / DATABASE).write_text(server.url(server.new_database()))
    kills = rng.choice([1, 1, 2])
    seen, left = [], []
    for _ in range(kills):
        seen.append(await run_and_kill(tmp_path, seed, rng))
        left.append(Left(recorded(tmp_path), {name: noted_calls(tmp_path, name) for name in jobs(tmp_path, seed)}))
    await leases_expired(tmp_path)
    async with nothing_left():
        async with new_session(tmp_path) as session:
            done = await check_list(tmp_path, session)
            checkpoints = {job.job_id: job._known().spec.checkpoints for job in session.jobs()}
            before = {name: runs(tmp_path, name) for name in done}
            read = {name: len(notes(tmp_path, name)) for name in done}
            try:
                async with asyncio.timeout(BOUND):
                    await run(session, tmp_path, seed)
            except TimeoutError:
                pytest.fail(f"seed {seed} hangs: {session!r} {session.jobs()} {session.stats()}")
    for name, arguments in jobs(tmp_path, seed).items():
        check_read(tmp_path, name, arguments["input_params"])
        for other in seen:
            assert other.get(name, []) == notes(tmp_path, name)[: len(other.get(name, []))]
        again = runs(tmp_path, name) - before.get(name, Counter())
        assert not (done.get(name, set()) & again.keys()), "what was done has run again"
        assert max(runs(tmp_path, name).values()) <= kills + 1
        for found in left:
            known = {call for job, call in found.recorded if job == checkpoints.get(name)}
            repeated = known.intersection(noted_calls(tmp_path, name)[len(found.calls[name]) :])
            assert not repeated, f"recorded, but called again: {repeated}"
    listed = {name: f"{len(frames)} done, {read[name]} read" for name, frames in done.items()}
    counts = [len(found.recorded) for found in left]
    print(f"seed {seed}: {kills} kills, recorded: {counts}, then {listed}")
