"""Waiting for what a test needs to have happened."""

from __future__ import annotations

from dfm_async import Job, JobStatus, StatusChanged

__all__ = ["running"]


async def running(job: Job) -> None:
    """Returns when a job runs."""
    async for event in job.events():
        if isinstance(event, StatusChanged) and event.status is JobStatus.RUNNING:
            return
