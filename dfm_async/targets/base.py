"""What a session needs of a target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from dfm_async.errors import Problem
from dfm_async.federation.federation import Federation
from dfm_async.model.stats import TargetStats
from dfm_async.planner.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import Bells
from dfm_async.targets.control import JobControl
from dfm_async.targets.frames import Row
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.rules import JobRules
from dfm_async.wire.codec import Codec

__all__ = ["AlreadySubmitted", "Target"]


class AlreadySubmitted(Exception):
    """The same job was submitted before, here or elsewhere."""


@runtime_checkable
class Target(Protocol):
    """Runs jobs over the sites of a federation."""

    @property
    def codec(self) -> Codec:
        """How values travel between the application and the sites."""
        ...

    @property
    def jobs(self) -> JobTable[Any]:
        """The jobs that the target knows."""
        ...

    @property
    def worker_bells(self) -> Bells:
        """They ring when something about the workers has changed, for those who look at :meth:`stats`."""
        ...

    def running(self, federation: Federation, homesite: str) -> AbstractAsyncContextManager[None]:
        """Keeps the target up while the context is open; entered and left in the same task."""
        ...

    def coordinate(self, record: JobRecord, rules: JobRules, pack_rows: Callable[[Any], list[Row]]) -> JobControl:
        """Makes what a session steers a new job by; ``pack_rows`` checks and packs sets that other jobs send."""
        ...

    async def refusals(self, plan: Plan) -> list[Problem]:
        """What the target cannot give to a plan, and why."""
        ...

    async def find(self, job_id: str) -> JobRecord | None:
        """Finds a job."""
        ...

    async def refresh(self) -> None:
        """Gets to know jobs that others have started, if there are any."""
        ...

    async def forget(self, job_id: str) -> None:
        """Forgets an ended job, wherever else it is known."""
        ...

    async def submit(self, coordinator: Any, priority: int = 0) -> None:
        """Launches a job as soon as its sites are ready; returns when it runs, or waits for them."""
        ...

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs, and returns when they have."""
        ...

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""
        ...
