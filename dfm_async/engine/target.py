"""What a session needs of a target, and what targets share whose jobs run in the process of the application."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from dfm_async.base.signals import Notifier
from dfm_async.engine.coordinator import Coordinator
from dfm_async.engine.engine import Engine
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobControl, JobTable
from dfm_async.engine.run import Host
from dfm_async.errors import Problem
from dfm_async.federation.federation import Federation
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import TargetStats
from dfm_async.planning.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.wire.codec import Codec


class AlreadySubmitted(Exception):
    """The same job was submitted before, here or elsewhere."""


@runtime_checkable
class Target(Protocol):
    """Runs jobs over the sites of a federation."""

    @property
    def codec(self) -> Codec:
        """How values travel between the application and the sites."""

    @property
    def jobs(self) -> JobTable[Any]:
        """The jobs that the target knows."""

    @property
    def worker_changes(self) -> Notifier:
        """Notifies subscribers when something about the workers has changed, so that :meth:`stats` differs."""

    def running(self, federation: Federation, homesite: str) -> AbstractAsyncContextManager[None]:
        """Keep the target up while the context is open; entered and left in the same task."""

    def coordinate(self, record: JobRecord, pack_rows: Callable[[Plan, Any], list[Row]]) -> JobControl:
        """Return the control of a new job; ``pack_rows`` checks and packs parameter sets that other jobs send."""

    async def refusals(self, plan: Plan) -> list[Problem]:
        """What the target cannot give to a plan, and why."""

    async def find(self, job_id: str) -> JobRecord | None:
        """Find a job."""

    async def refresh(self) -> None:
        """Look up jobs that others have started, if there are any."""

    async def forget(self, job_id: str) -> None:
        """Forget an ended job, wherever else it is known."""

    async def submit(self, coordinator: Any) -> None:
        """Launch a job as soon as its sites are ready; return when it runs, or waits for them."""

    async def shutdown(self, reason: str, grace: float) -> None:
        """End all jobs, and return when they have."""

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""


class LocalTarget:
    """The common part of targets whose jobs run in the process of the application."""

    def __init__(self, options: LocalOptions, codec: Codec) -> None:
        self.options = options
        self.codec = codec
        self.jobs: JobTable[Coordinator] = JobTable(options)
        self.worker_changes = Notifier()
        self._engine = Engine(self.jobs, codec, self._host, self._accepted)

    def _host(self, site: str) -> Host:
        """Return the host of a site."""
        raise LookupError(site)

    def _accepted(self, coordinator: Coordinator) -> None:
        """Let the submitter of a job go on."""

    def _close(self) -> None:
        self.jobs.close()
        self.worker_changes.close()

    def coordinate(self, record: JobRecord, pack_rows: Callable[[Plan, Any], list[Row]]) -> Coordinator:
        """Make what a session steers a new job by."""
        return Coordinator(record, self.codec, pack_rows)

    async def refusals(self, plan: Plan) -> list[Problem]:
        """Return nothing: every plan can run here."""
        return []

    async def find(self, job_id: str) -> JobRecord | None:
        """Find a job that runs, or ended not too long ago."""
        return self.jobs.find(job_id)

    async def refresh(self) -> None:
        """Do nothing: all jobs are known here."""

    async def forget(self, job_id: str) -> None:
        """Do nothing: a job is known nowhere else."""

    async def shutdown(self, reason: str, grace: float) -> None:
        """End all jobs, those that wait and those that run, and return when they have."""
        await self._engine.shut_down(reason, grace)
