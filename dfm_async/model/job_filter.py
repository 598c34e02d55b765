"""Which jobs a list has."""

from __future__ import annotations

from typing import Final

import msgspec

from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus, check_status


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that fit everything that is given.

    Attributes:
        status: their state.
        pipeline: the name of their pipeline.
        label: what ``execute(label=...)`` was given.
        since: when they were created, or later; in seconds since 1970.
        until: before when they were created.

    Raises:
        ValueError: ``status`` is no status.
    """

    status: JobStatus | None = None
    pipeline: str | None = None
    label: str | None = None
    since: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        if self.status is not None:
            check_status("status", self.status)

    def fits(self, info: JobInfo) -> bool:
        """Return whether a job fits."""
        return (
            self.status in (None, info.status)
            and self.pipeline in (None, info.pipeline)
            and self.label in (None, info.label)
            and (self.since is None or info.created >= self.since)
            and (self.until is None or info.created < self.until)
        )


ALL_JOBS: Final = JobFilter()
