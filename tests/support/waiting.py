"""Waiting for what a test needs to have happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dfm_async import Event, Job, JobStatus, StatusChanged

EventType = TypeVar("EventType", bound=Event)

PROMPT = 20.0
"""The number of seconds within which happens what waits for nothing, on a machine that is busy with other things."""


async def running(job: Job, after: int | None = None) -> None:
    """Return when a job runs; ``after``: the offset behind which to look for that."""
    async for event in job.events(after=after):
        if isinstance(event, StatusChanged) and event.status is JobStatus.RUNNING:
            return


async def first_event(job: Job, kind: type[EventType]) -> EventType:
    """Return the first event of a kind in the log of a job."""
    async for event in job.events():
        if isinstance(event, kind):
            return event
    raise AssertionError(f"{job} has ended without a {kind.__name__}")


async def until(reached: Callable[[], object], limit: float = 30) -> None:
    """Poll for a state that no event reports."""
    async with asyncio.timeout(limit):
        while not reached():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def settled() -> None:
    """Let everything happen that is due in the next turns of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def file_created(path: str | Path) -> None:
    """Return when a file exists: a gate for operations, which may run in another process or incarnation."""
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - another process may create it
        await asyncio.sleep(0.01)
