"""What a job that outlives its application writes down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dfm_async.model.events import Event
from dfm_async.model.ids import Frame
from dfm_async.model.status import JobStatus

__all__ = ["Journal"]


class Journal(Protocol):
    """Writes the events of one job to a store. Nothing waits: the job's record is told when they are safe."""

    def event(self, event: Event, point: int) -> None:
        """Writes one event; ``point``: the yield that it is about, or -1."""
        ...

    def results(
        self,
        first: int,
        at: int,
        runs: Sequence[tuple[int, Frame, int, int]],
        values: Sequence[Any],
        payload: bytes,
        broken: int,
    ) -> None:
        """Writes results from an offset on, as they came.

        Args:
            first: the offset.
            at: the location that they come from.
            runs: which yields and frames they belong to.
            values: the results.
            payload: all of them encoded, or empty.
            broken: how many of them could not be rebuilt, and count as errors.
        """
        ...

    def params(self, first: int, rows: Sequence[Any]) -> None:
        """Writes parameter sets."""
        ...

    def stopped(self) -> None:
        """Writes that no further parameter set will come."""
        ...

    def status(self, status: JobStatus, reason: str | None, finished: float | None) -> None:
        """Writes the status."""
        ...
