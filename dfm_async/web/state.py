"""The state that the handlers of a service share while it is open."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import HTTPConnection

from dfm_async.language.pipeline import Pipeline
from dfm_async.model.info import JobInfo
from dfm_async.results.log import ResultLog
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.web.access import Action, Guard, Principal
from dfm_async.web.limits import JobQuota, Uploads, WebLimits
from dfm_async.web.open_streams import Streams
from dfm_async.web.pipeline_schemas import PipelineSchemas, pipeline_schemas
from dfm_async.web.records import LogRecords, Records
from dfm_async.web.responses import Refusal


class State:
    """The state that the handlers of a service share."""

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
        """The session; requests are refused while the service is not open."""
        if self.current is None or not self.current.connected:
            raise Refusal(503, "closed", "the service is not ready: its lifespan has not begun, or has ended")
        return self.current

    @property
    def ready(self) -> bool:
        """Whether jobs and streams are taken."""
        return self.current is not None and self.current.connected and not self.streams.draining

    @property
    def slots(self) -> int:
        """The number of jobs that can run at the same time."""
        session = self.session
        return session.options.slots_for(site.workers for site in session.federation.sites.values())

    async def schemas(self, ref_template: str) -> PipelineSchemas:
        """Return the schemas of the registered pipelines, and the definitions that they refer to."""
        while (found := self._schemas.get(ref_template)) is None:
            pipelines = self.pipelines
            made = await pipeline_schemas(self.session, pipelines, ref_template)
            if self.pipelines is pipelines:  # else they were replaced meanwhile
                self._schemas[ref_template] = made
        return found

    def known_schemas(self, ref_template: str) -> PipelineSchemas:
        """Return the same if they were made already, else none."""
        return self._schemas.get(ref_template, ({}, {}))

    def replace_pipelines(self, pipelines: Mapping[str, Pipeline]) -> None:
        """Register other pipelines instead."""
        self.pipelines = dict(pipelines)
        self._schemas.clear()

    def forget(self) -> None:
        """Drop what was made for clients: the service is closed."""
        self.records.forget()
        self._schemas.clear()

    def records_for(self, principal: Principal, info: JobInfo, log: ResultLog) -> LogRecords:
        """Return the records of a job as a principal may see them."""
        return self.records.of(log, self.guard.allows(principal, "debug", info))

    async def authorize(self, request: HTTPConnection, action: Action) -> Principal:
        """Return the principal of a request that is about no particular job, if that principal may do this."""
        principal = await self.guard.principal(request)
        self.guard.check(principal, action)
        return principal

    async def job(self, request: HTTPConnection, action: Action) -> tuple[Principal, Job, JobInfo]:
        """Return the principal of a request and the job that it is about, if that principal may do this with it."""
        principal = await self.guard.principal(request)
        job = await self.session.reattach(request.path_params["job_id"])
        if not job.was_found:
            raise Refusal(404, "job", "there is no such job")
        info = job.info()
        self.guard.check_job(principal, action, info)
        return principal, job, info


class Handlers:
    """Handlers of requests that belong together."""

    def __init__(self, state: State) -> None:
        self._state = state
