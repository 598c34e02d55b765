"""Jobs that are written down, and what an application does with them however often it was killed before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dfm_async import (
    Event,
    Federation,
    ForEach,
    Job,
    JobStatus,
    LocalOptions,
    Pipeline,
    PlaceParam,
    Repeat,
    Result,
    Session,
    StatusChanged,
    Yield,
    current_context,
)
from dfm_async.events import FrameCompleted
from dfm_async.store import PostgresStore
from tests.chaos.values import MEBIBYTE, comparable

fed = Federation("lasting chaos")
a, b, c = fed.site("a"), fed.site("b"), fed.site("c")


def append(path: Path, text: str) -> None:
    """Writes a line that is there as a whole, or not at all."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


def note_call(folder: str, element: int | None = None) -> None:
    """Notes that a call begins, or that it yields an element."""
    context = current_context()
    frame = ".".join(map(str, context.frame))
    append(Path(folder) / f"calls-{context.job_id}", f"{context.node} {frame} {'' if element is None else element}")


@a.operation
def begin(folder: str, n: int) -> int:
    note_call(folder)
    context = current_context()
    append(Path(folder) / f"runs-{context.job_id}", str(context.frame[0]))
    time.sleep(0.01)
    return n


@b.operation(checkpoint=True)
async def double(folder: str, n: int) -> int:
    note_call(folder)
    await asyncio.sleep(0.005)
    return n * 2


@c.operation(checkpoint=True)
def count(folder: str, n: int, resume_from: int = 0) -> Iterator[int]:
    for i in range(resume_from, n):
        time.sleep(0.001)
        note_call(folder, i)
        yield i


@c.operation
async def block(folder: str, n: int) -> np.ndarray[Any, Any]:
    note_call(folder)
    return np.full(MEBIBYTE, n % 100, dtype=np.uint8)


functions: dict[str, Any] = {
    "begin": lambda folder, n: n,
    "double": lambda folder, n: n * 2,
    "count": lambda folder, n: iter(range(n)),
    "block": lambda folder, n: np.full(MEBIBYTE, n % 100, dtype=np.uint8),
}

with Pipeline("lasting") as pipeline:
    where = PlaceParam("folder")
    first = begin(where, PlaceParam("n"))
    with ForEach(count(where, first)) as element:
        Yield(double(where, element), place="double")
    with Repeat(first, times=2) as current:
        current.next(double(where, current))
    Yield(current, place="end")
    Yield(count(where, first), place="count")
    Yield(block(where, first), place="block")


def jobs(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """What the application of a seed runs: for each job, the arguments of execute."""
    rng = random.Random(seed)
    found = {}
    for at in range(rng.randint(1, 3)):
        sets = [{"folder": str(folder), "n": rng.randint(0, 5)} for _ in range(rng.randint(1, 15))]
        options = {"concurrency": rng.choice([None, 1, 4]), "checkpoint": rng.choice(["marked", "calls"])}
        found[f"job-{at}"] = {"input_params": sets, **options}
    return found


DATABASE = "database"
"""The file that names a PostgreSQL database, if the jobs are not kept in a file."""
LEASE = 2.0


def store(folder: Path) -> str | PostgresStore:
    """Where the jobs are kept."""
    path = folder / DATABASE
    return PostgresStore(path.read_text(), lease=LEASE) if path.exists() else f"sqlite:///{folder}/jobs.db"


def new_session(folder: Path) -> Session:
    """A session that keeps jobs and checkpoints there."""
    return Session(fed, store=store(folder), options=LocalOptions(checkpoints=str(folder / "checkpoints")))


def recorded(folder: Path) -> set[tuple[str, str]]:
    """The calls and elements that are recorded: by the checkpoints of their job, each as it is noted."""
    found: set[tuple[str, str]] = set()
    for path in (folder / "checkpoints").glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables >= {"checkpoints", "elements"}:
                continue  # the application was killed while it created the file
            for job, node, frame in file.execute("SELECT job, node, frame FROM checkpoints"):
                found.add((job, f"{node} {frame} "))
            for job, node, frame, start, number in file.execute("SELECT job, node, frame, first, count FROM elements"):
                found |= {(job, f"{node} {frame} {at}") for at in range(start, start + number)}
    return found


def noted_calls(folder: Path, name: str) -> list[str]:
    """What the calls of a job have noted."""
    path = folder / f"calls-{name}"
    return path.read_text().splitlines() if path.exists() else []


async def leases_expired(folder: Path) -> None:
    """Wait until everybody knows that the applications that were killed are dead."""
    found = store(folder)
    if isinstance(found, str):
        return  # it is known at once
    await found.open()
    try:
        for fence in {job.owner.fence for job in await found.jobs()}:
            async with found.follow(fence) as follower:
                while await follower.changed():
                    pass
    finally:
        await found.close()


def note(event: Event) -> list[Any]:
    """An event as it goes to a file."""
    if isinstance(event, Result):
        return [event.offset, "result", event.place, list(event.frame), comparable(event.value)]
    if isinstance(event, FrameCompleted):
        return [event.offset, "done", "", list(event.frame), None]
    if isinstance(event, StatusChanged):
        return [event.offset, "status", event.status.value, [], None]
    return [event.offset, type(event).__name__, "", [], None]


def notes(folder: Path, name: str) -> list[list[Any]]:
    """What all readers of a job have noted."""
    path = folder / f"read-{name}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def read_on(folder: Path, name: str, job: Job, heard: Callable[[], None]) -> None:
    """Reads a job from where the last reader stopped, notes every event, and then says that it has."""
    before = notes(folder, name)
    async for event in job.events(after=before[-1][0] if before else None):
        append(folder / f"read-{name}", json.dumps(note(event)))
        heard()


async def submit(session: Session, name: str, arguments: dict[str, Any]) -> Job:
    """Starts a job, or goes on with it, or finds that it has ended."""
    job = await session.execute(pipeline, job_id=name, **arguments)
    return await session.resume(name) if job.status is JobStatus.INTERRUPTED else job


async def run(session: Session, folder: Path, seed: int, heard: Callable[[], None] = lambda: None) -> None:
    """Runs all jobs to their ends."""
    async with asyncio.TaskGroup() as group:
        for name, arguments in jobs(folder, seed).items():
            job = await submit(session, name, arguments)
            append(folder / "submitted", name)
            group.create_task(read_on(folder, name, job, heard))
