"""What a session needs of a target."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from dfm_async.federation.federation import Federation
from dfm_async.model.stats import TargetStats
from dfm_async.results.watching import Bells
from dfm_async.targets.coordinator import Coordinator
from dfm_async.targets.jobs import JobTable
from dfm_async.wire.codec import Codec

__all__ = ["Target"]


@runtime_checkable
class Target(Protocol):
    """Runs jobs over the sites of a federation."""

    @property
    def codec(self) -> Codec:
        """How values travel between the application and the sites."""
        ...

    @property
    def jobs(self) -> JobTable:
        """The jobs that the target knows."""
        ...

    @property
    def worker_bells(self) -> Bells:
        """They ring when something about the workers has changed, for those who look at :meth:`stats`."""
        ...

    def running(self, federation: Federation, homesite: str) -> AbstractAsyncContextManager[None]:
        """Keeps the target up while the context is open; entered and left in the same task."""
        ...

    async def submit(self, coordinator: Coordinator, priority: int = 0) -> None:
        """Launches a job as soon as its sites are ready; returns when it runs, or waits for them."""
        ...

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs, and returns when they have."""
        ...

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""
        ...
