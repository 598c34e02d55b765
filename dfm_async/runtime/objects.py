"""The objects of classes: built once per job at a location, and closed when the job has ended there."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any

from dfm_async.runtime.faults import is_our_cancellation
from dfm_async.runtime.job_threads import in_thread
from dfm_async.runtime.operations import Callee

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob

__all__ = ["JobObjects"]


class JobObjects:
    """The objects of one job at one location. Those that have ``aclose`` or else ``close`` get it called, once."""

    __slots__ = ("_built", "_closable", "_closing", "_job", "ending")

    def __init__(self, job: SiteJob) -> None:
        self._job = job
        self._built: dict[int, Any] = {}
        self._closable: list[Any] = []
        self._closing: asyncio.Task[None] | None = None
        self.ending = False
        """Whether the job is done here, and waits for the objects."""

    @property
    def held(self) -> bool:
        """Whether there are objects that want to be closed."""
        return bool(self._closable)

    @property
    def closing(self) -> bool:
        """Whether they are closed, or about to be."""
        return self._closing is not None

    def get(self, callee: Callee) -> Any:
        """The object of a class; it is built when it is first asked for."""
        key = id(callee)
        if key not in self._built:
            built = self._built[key] = callee.build()
            if callable(getattr(built, "aclose", None)) or callable(getattr(built, "close", None)):
                if not self._closable:
                    self._job.runtime.hold(self._job, self)
                self._closable.append(built)
        return self._built[key]

    def close(self) -> asyncio.Task[None]:
        """Closes all of them at the same time; whoever asks again gets the same task. It does not fail."""
        if self._closing is None:
            job = self._job
            self._closing = job.runtime.spawn(self._close_all(), None, f"the end of the objects of job {job.job_id}")
        return self._closing

    async def _close_all(self) -> None:
        try:
            await asyncio.gather(*[self._close(found) for found in self._closable])
        finally:
            self._job.runtime.released(self._job)

    async def _close(self, found: Any) -> None:
        try:
            asynchronous = getattr(found, "aclose", None)
            if callable(asynchronous):
                done = asynchronous()
            elif inspect.iscoroutinefunction(found.close):
                done = found.close()
            else:
                done = await in_thread(self._job, found.close)
            if inspect.isawaitable(done):
                await done
        except BaseException as error:
            if is_our_cancellation(error):
                self._warn("closing %s of job %s did not end in time", found, None)
                raise
            # The results are there: it is too late to fail the job.
            self._warn("closing %s of job %s raised", found, error)

    def _warn(self, text: str, found: Any, error: BaseException | None) -> None:
        job, site = self._job, self._job.runtime.site
        logger = logging.getLogger(f"dfm_async.site.{site}")
        extra = {"job": job.job_id, "site": site}
        logger.warning(text, type(found).__qualname__, job.job_id, exc_info=error, extra=extra)
