"""Jobs of a store file. They are read beside the process that runs them, if one does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import anyio

from dfm_async.cli.exits import Unreachable
from dfm_async.cli.references import load_module
from dfm_async.cli.sources import JobSource
from dfm_async.errors import JobOwned
from dfm_async.federation.federation import Federation
from dfm_async.model.activity import Activity
from dfm_async.model.events import Event
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.store import open_store

__all__ = ["StoredJobs", "stored_jobs"]


@asynccontextmanager
async def stored_jobs(url: str, imports: tuple[str, ...]) -> AsyncIterator[JobSource]:
    """Opens the jobs of a store file that is there already.

    Args:
        url: the URL of the store.
        imports: modules with the classes of stored values, as names or files.

    Raises:
        Unreachable: there is no such file.
        StoreError: it is no store.
    """
    for name in imports:
        load_module(name)
    open_store(url)  # refuses what is no URL of a store
    path = url.partition(":///")[2]
    if not await anyio.Path(path).is_file():
        raise Unreachable(f"there is no store {path}")
    # Nothing is run here, so that a federation without sites is enough.
    async with Session(Federation("command line"), target="inline", store=url) as session:
        yield StoredJobs(session)


class StoredJobs:
    """The jobs of a store file."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def infos(self, limit: int, status: JobStatus | None) -> list[JobInfo]:
        """What is known of the newest jobs, of all or of those in one state; the newest first."""
        wanted = [info for info in self._session.infos() if status in (None, info.status)]
        found = sorted(wanted, key=lambda info: (info.created, info.job_id), reverse=True)
        return found[:limit]

    async def info(self, job_id: str) -> JobInfo:
        """What is known of one job."""
        return (await self._job(job_id)).info()

    async def events(self, job_id: str, after: int, *, following: bool) -> AsyncGenerator[Event | Activity, None]:
        """Gives the events of a job behind an offset: those that are there, or all until it ends."""
        job = await self._job(job_id)
        end = job.info().events
        if not following and after + 1 >= end:
            return
        async with aclosing(job.events(after if after >= 0 else None)) as events:
            async for event in events:
                yield event
                if not following and event.offset + 1 >= end:
                    return

    async def cancel(self, job_id: str, reason: str) -> dict[str, str]:
        """Aborts a job that was interrupted. One that runs can only be cancelled by the process that runs it."""
        try:
            return await (await self._job(job_id)).cancel(reason)
        except JobOwned as error:
            raise Unreachable(
                f"job {job_id} runs in process {error.pid} on {error.host}, which alone can cancel it: press Ctrl-C "
                f"there, or send it SIGINT (kill -INT {error.pid}); if it is a service, give --url"
            ) from error

    async def _job(self, job_id: str) -> Job:
        job = await self._session.reattach(job_id)
        if not job.was_found:
            where = f"there is no job {job_id!r} in the store"
            raise Unreachable(f"{where}: dfm-async jobs --store lists those that are there")
        return job
