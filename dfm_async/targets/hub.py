"""The application's switchboard: takes what the sites send to their jobs, or to the homesite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from dfm_async.model.ids import JobNumber
from dfm_async.runtime.site import SiteRuntime
from dfm_async.targets.coordinator import FOR_COORDINATOR, Coordinator
from dfm_async.wire import messages as msg

__all__ = ["Hub"]

Post: TypeAlias = Callable[[Coordinator, msg.SendToPlace], None]
"""Takes a token from one job to another."""


class Hub:
    """Knows the jobs that are under way by their numbers, and the runtime of the homesite."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.home: SiteRuntime | None = None
        self._coordinators: dict[int, Coordinator] = {}
        self._last_number = 0

    def register(self, coordinator: Coordinator) -> JobNumber:
        """Gives a job the next number, also when it runs again."""
        self._last_number += 1
        number = JobNumber(self._last_number)
        self._coordinators[number] = coordinator
        return number

    def forget(self, coordinator: Coordinator) -> None:
        """Nothing that still comes is for this run of the job any more."""
        self._coordinators.pop(coordinator.record.number, None)

    def receive(self, message: Any) -> None:
        """Takes a message from a site."""
        if type(message) in FOR_COORDINATOR:
            coordinator = self._coordinators.get(message.job)
            if coordinator is not None:  # else it is late: the job has ended
                coordinator.receive(message)
        elif type(message) is msg.SendToPlace:
            sender = self._coordinators.get(message.job)
            if sender is not None:
                self._post(sender, message)
        else:
            self.to_home(message)

    def to_home(self, message: Any) -> None:
        """Hands a message to the runtime of the homesite."""
        if self.home is not None:
            self.home.receive(message)
