"""What random pipelines wait for."""

from __future__ import annotations

import contextlib

from dfm_async import Event, Job, ParameterError, SessionClosed
from dfm_async.errors import JobInterrupted, StoreError
from dfm_async.events import WaitBegan
from tests.reference import value_of


async def send_awaited(job: Job, event: Event) -> None:
    """Send the event that a parameter set waits for, if this is such a wait, and somebody still takes it."""
    if isinstance(event, WaitBegan):
        await send_event(job, event.name, event.frame[0])


async def send_all_awaited(job: Job) -> None:
    """Send the events that a job waits for now: for a reader that came after its first events were gone."""
    for wait in job.info().waits:
        await send_event(job, wait.name, wait.frame[0])


async def send_event(job: Job, name: str, index: int) -> None:
    """Send an event, unless nobody ever sends it."""
    if name and not name.startswith("never"):
        with contextlib.suppress(ParameterError, JobInterrupted, SessionClosed, StoreError):
            await job.send(name, value_of(name), frame=index)
