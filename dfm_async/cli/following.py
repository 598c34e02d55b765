"""Follows a job: its results go to a writer, and what happens to it to a view."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from dfm_async.cli.results import ResultWriter
from dfm_async.cli.view import JobView
from dfm_async.model.events import Event, Result, StatusChanged

__all__ = ["follow"]


async def follow(
    events: AsyncIterator[Event], writer: ResultWriter, view: JobView, places: Collection[str]
) -> StatusChanged | None:
    """Reads a job to its end, and gives its last status, if there was one.

    Args:
        events: the events of the job.
        writer: writes the results.
        view: shows how the job is getting on.
        places: of which places results are written; none means of all.
    """
    last: StatusChanged | None = None
    async for event in events:
        view.take(event)
        if isinstance(event, Result):
            if not places or event.place in places:
                await writer.write(event)
        elif isinstance(event, StatusChanged):
            last = event
    return last
