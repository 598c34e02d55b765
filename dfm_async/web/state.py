"""What the handlers of a service share while it is open."""

from __future__ import annotations

from collections.abc import Mapping

from dfm_async.model.info import JobInfo
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.results.log import ResultLog
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.web.access import Action, Guard, Principal
from dfm_async.web.answers import Refusal
from dfm_async.web.limits import WebLimits
from dfm_async.web.quota import JobQuota
from dfm_async.web.records import LogRecords, Records
from dfm_async.web.schemas import PipelineSchemas, pipeline_schemas
from dfm_async.web.streams import Streams
from dfm_async.web.uploads import Uploads

__all__ = ["State"]


class State:
    """What the handlers of a service share.

    Args:
        guard: who may do what.
        limits: what clients may have at most.
        pipelines: the registered pipelines by name.
        allow_pipelines: whether clients may bring pipelines of their own.
        page: whether there is a live page, and jobs are watched for it.
    """

    def __init__(
        self, guard: Guard, limits: WebLimits, pipelines: Mapping[str, Pipeline], allow_pipelines: bool, page: bool
    ) -> None:
        self.guard = guard
        self.limits = limits
        self.pipelines = dict(pipelines)
        self.allow_pipelines = allow_pipelines
        self.page = page
        self.records = Records(limits)
        self.quota = JobQuota(limits)
        self.streams = Streams(limits)
        self.uploads = Uploads(limits)
        self._schemas: dict[str, PipelineSchemas] = {}
        self.current: Session | None = None
        """The session while the service is open."""

    @property
    def session(self) -> Session:
        """The session.

        Raises:
            Refusal: the service is not open.
        """
        if self.current is None or not self.current.connected:
            message = "the service is not ready: its lifespan has not begun, or has ended"
            raise Refusal(503, "closed", message, retry_after=self.limits.retry)
        return self.current

    @property
    def ready(self) -> bool:
        """Whether jobs and streams are taken."""
        return self.current is not None and self.current.connected and not self.streams.draining

    def check_draining(self) -> None:
        """Refuses what would begin something new while the service drains."""
        if self.streams.draining:
            raise Refusal(503, "draining", "the service is about to end", retry_after=self.limits.retry)

    async def schemas(self, ref_template: str) -> PipelineSchemas:
        """The schemas of the registered pipelines, and the definitions that they refer to."""
        found = self._schemas.get(ref_template)
        if found is None:
            found = self._schemas[ref_template] = await pipeline_schemas(self.session, self.pipelines, ref_template)
        return found

    def known_schemas(self, ref_template: str) -> PipelineSchemas:
        """The same, if they were made already, else none."""
        return self._schemas.get(ref_template, ({}, {}))

    def forget(self) -> None:
        """Drops what was made for clients: the service is closed."""
        self.records.forget()
        self._schemas.clear()

    def records_for(self, principal: Principal, info: JobInfo, log: ResultLog) -> LogRecords:
        """The records of a job as somebody may see them."""
        return self.records.of(log, self.guard.allows(principal, "debug", info))

    async def job(self, principal: Principal, action: Action, job_id: str) -> tuple[Job, JobInfo]:
        """Finds a job that somebody may do something with.

        Raises:
            Refusal: there is none, or they may not.
        """
        job = await self.session.reattach(job_id)
        if not job.was_found:
            raise Refusal(404, "job", "there is no such job")
        info = job.info()
        self.guard.check_job(principal, action, info)
        return job, info
