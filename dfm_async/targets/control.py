"""What a session steers a job by, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar

from dfm_async.model.stats import Traffic
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.results.seen import Seen
from dfm_async.targets.failures import Told
from dfm_async.targets.frames import Row
from dfm_async.targets.rules import JobRules
from dfm_async.telemetry.traces import JobTrace

__all__ = ["FrameCounts", "JobControl"]

C = TypeVar("C")


class FrameCounts(Protocol):
    """How far the parameter sets of a job are."""

    stopped: bool
    """Whether all have come."""

    @property
    def added(self) -> int:
        """How many have come."""
        ...

    @property
    def opened(self) -> int:
        """How many were opened."""
        ...

    @property
    def open(self) -> Sized:
        """Those that are under way."""
        ...


class JobControl(Protocol):
    """One job that has not ended."""

    record: JobRecord
    plan: Plan
    rules: JobRules
    outcomes: dict[str, str]
    measured: bool

    @property
    def trace(self) -> Any:
        """The job's spans, if it is traced."""
        ...

    @trace.setter
    def trace(self, trace: JobTrace | None) -> None: ...

    @property
    def frames(self) -> FrameCounts:
        """Its parameter sets."""
        ...

    @property
    def yielded(self) -> Traffic:
        """The results that have come."""
        ...

    @property
    def state(self) -> str:
        """How far the job is, in words."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""
        ...

    def add(self, rows: Sequence[Row]) -> None:
        """Adds parameter sets."""
        ...

    def stop(self) -> None:
        """Says that no further parameter set will come."""
        ...

    async def room(self) -> None:
        """Waits until there is room for a further parameter set, or the job takes none any more."""
        ...

    def resume(self, rows: Mapping[int, Row], added: int, seen: Seen, failed: Told) -> None:
        """Begins where an earlier run has ended."""
        ...

    def on_end(self, call: Callable[[Any], None]) -> None:
        """Has something called when the job has ended."""
        ...

    def deadline(self, seconds: float, began: float) -> None:
        """Aborts the job if it has not ended so many seconds after it began, by the loop's clock."""
        ...

    def halt(self, status: JobStatus, reason: str, grace: float) -> None:
        """Stops the job; it ends with this status."""
        ...

    def shorten(self, grace: float) -> None:
        """Kills what has not stopped after a further grace."""
        ...

    def shut_down(self, reason: str, grace: float) -> None:
        """Stops the job because the session is closed."""
        ...

    def fail(self, error: Any) -> None:
        """Ends the job with an error of its own."""
        ...

    def abandon(self, at: int, how: str = "abandoned") -> None:
        """Gives up on a location."""
        ...
