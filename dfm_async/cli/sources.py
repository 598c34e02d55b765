"""Where jobs are looked at from outside: a running service, or a store file."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dfm_async.model.activity import Activity
from dfm_async.model.events import Event
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus

__all__ = ["JobSource", "open_source"]


class JobSource(Protocol):
    """Jobs that run, or ran, in another process."""

    async def infos(self, limit: int, status: JobStatus | None) -> list[JobInfo]:
        """What is known of the newest jobs, of all or of those in one state; the newest first."""
        ...

    async def info(self, job_id: str) -> JobInfo:
        """What is known of one job.

        Raises:
            Unreachable: there is none.
        """
        ...

    def events(self, job_id: str, after: int, *, following: bool) -> AsyncGenerator[Event | Activity, None]:
        """Gives the events of a job behind an offset: those that are there, or all until it ends.

        While it is followed, what its operations do stands between them, if that is known.

        Raises:
            Unreachable: there is none, or what comes behind the offset is gone.
        """
        ...

    async def cancel(self, job_id: str, reason: str) -> dict[str, str]:
        """Cancels a job, and gives what became of it at each site.

        Raises:
            Unreachable: there is none, or it runs in another process, which alone can cancel it.
        """
        ...


def open_source(
    url: str, store: str | None, token: str | None, imports: tuple[str, ...] = ()
) -> AbstractAsyncContextManager[JobSource]:
    """Opens the source that the user asks for: a store if one is given, else a service.

    Args:
        url: the address of the service.
        store: the URL of the store.
        token: what the service knows us by.
        imports: modules with the classes of stored values.
    """
    if store is not None:
        from dfm_async.cli.stored import stored_jobs

        return stored_jobs(store, imports)
    from dfm_async.cli.remote import served_jobs

    return served_jobs(url, token)
