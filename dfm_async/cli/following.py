"""Follows a job: its results go to a writer, and what happens to it to a view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from dfm_async.cli.results import ResultWriter
from dfm_async.cli.view import JobView
from dfm_async.model.activity import Activity
from dfm_async.model.events import Event, Result, StatusChanged
from dfm_async.session.job import Job

__all__ = ["follow", "watched"]


async def follow(
    events: AsyncIterator[Event | Activity], writer: ResultWriter, view: JobView, places: Collection[str]
) -> StatusChanged | None:
    """Reads a job to its end, and gives its last status, if there was one.

    Args:
        events: the events of the job; what its operations do may stand between them.
        writer: writes the results.
        view: shows how the job is getting on.
        places: of which places results are written; none means of all.
    """
    last: StatusChanged | None = None
    async for event in events:
        if isinstance(event, Activity):
            view.look(event)
            continue
        view.take(event)
        if isinstance(event, Result):
            if not places or event.place in places:
                await writer.write(event)
        elif isinstance(event, StatusChanged):
            last = event
    return last


@asynccontextmanager
async def watched(job: Job, view: JobView) -> AsyncIterator[None]:
    """Shows what the operations of a job do while the block runs, if they are counted."""
    if not job.watched:
        yield
        return
    task = asyncio.create_task(_look(job, view), name="dfm_async view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def _look(job: Job, view: JobView) -> None:
    async with job.activity() as reader:
        async for activity in reader:
            view.look(activity)
