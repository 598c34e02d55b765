"""Names and numbers that identify things."""

from __future__ import annotations

from typing import Final, NewType, TypeAlias

import msgspec

JobId = NewType("JobId", str)
"""What users know a job by."""

JobNumber = NewType("JobNumber", int)
"""What a job is called on the wire: counted up by the application, never used twice."""

HOME: Final = "home"
"""The address of the application among the processes of a job."""

Frame: TypeAlias = tuple[int, ...]
"""Which execution of the pipeline or of a loop a token belongs to."""


class Location(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a net runs: at a site, in the process of one operation there, or where the site's cache is kept.

    ``str(location)`` is what users see: ``lab``, ``lab:train``, ``lab:cache``.

    Attributes:
        site: the name of the site.
        operation: the operation that has a process of its own; empty for the other kinds.
        cache: whether it is the one worker that keeps the cache of a site with several.
    """

    site: str
    operation: str = ""
    cache: bool = False

    def __post_init__(self) -> None:
        if self.operation and self.cache:
            raise ValueError(f"the process of operation {self.operation!r} cannot keep the cache of {self.site!r}")

    def __str__(self) -> str:
        part = "cache" if self.cache else self.operation
        return f"{self.site}:{part}" if part else self.site


OperationKey: TypeAlias = tuple[str, str, str | None]
"""A site, an operation of it, and the provider."""
