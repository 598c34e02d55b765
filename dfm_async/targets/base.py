"""What a session needs of a target."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from dfm_async.federation.federation import Federation
from dfm_async.targets.coordinator import Coordinator
from dfm_async.wire.codec import Codec

__all__ = ["Target"]


@runtime_checkable
class Target(Protocol):
    """Runs jobs over the sites of a federation."""

    @property
    def codec(self) -> Codec:
        """How values travel between the application and the sites."""
        ...

    def running(self, federation: Federation, homesite: str) -> AbstractAsyncContextManager[None]:
        """Keeps the target up while the context is open; entered and left in the same task."""
        ...

    def submit(self, coordinator: Coordinator) -> None:
        """Launches a job as soon as its sites are ready."""
        ...
