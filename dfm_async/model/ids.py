"""Names and numbers that identify things."""

from __future__ import annotations

from typing import NewType, TypeAlias

__all__ = ["Frame", "JobId", "JobNumber", "Location", "SiteName"]

JobId = NewType("JobId", str)
"""What users know a job by."""

JobNumber = NewType("JobNumber", int)
"""What a job is called on the wire: counted up by the application, never used twice."""

SiteName = NewType("SiteName", str)
"""The name of a site."""

Location = NewType("Location", str)
"""Where a net runs: a site, or a process of its own at a site (``site#operation``)."""

Frame: TypeAlias = tuple[int, ...]
"""Which execution of the pipeline or of a loop a token belongs to."""
