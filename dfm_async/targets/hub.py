"""The application's switchboard: takes what the sites send to their jobs, or to the homesite."""

from __future__ import annotations

from typing import Any

from dfm_async.model.ids import JobNumber
from dfm_async.runtime.site import SiteRuntime
from dfm_async.targets.coordinator import Coordinator
from dfm_async.wire import messages as msg

__all__ = ["Hub"]

_FOR_COORDINATOR = frozenset(
    {msg.Results, msg.OperationError, msg.YieldFailed, msg.FramesDone, msg.JobStopped, msg.JobBroken}
)


class Hub:
    """Knows the jobs that are under way by their numbers, and the runtime of the homesite."""

    def __init__(self) -> None:
        self.home: SiteRuntime | None = None
        self._coordinators: dict[int, Coordinator] = {}
        self._last_number = 0

    def register(self, coordinator: Coordinator) -> JobNumber:
        """Gives a job the next number; it is known until it ends."""
        self._last_number += 1
        number = JobNumber(self._last_number)
        self._coordinators[number] = coordinator
        coordinator.on_end(self._forget)
        return number

    def _forget(self, coordinator: Coordinator) -> None:
        self._coordinators.pop(coordinator.record.number, None)

    @property
    def coordinators(self) -> list[Coordinator]:
        """The jobs that are under way."""
        return list(self._coordinators.values())

    def receive(self, message: Any) -> None:
        """Takes a message from a site."""
        if type(message) in _FOR_COORDINATOR:
            coordinator = self._coordinators.get(message.job)
            if coordinator is not None:  # else it is late: the job has ended
                coordinator.receive(message)
        elif self.home is not None:
            self.home.receive(message)
