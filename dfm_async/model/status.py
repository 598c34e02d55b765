"""The states of a job."""

from __future__ import annotations

from enum import Enum

__all__ = ["JobStatus"]


class JobStatus(Enum):
    """``SUBMITTED -> RUNNING -> FINISHED | FAILED | ABORTED``; ``UNKNOWN`` only for an id that was never seen.

    ``INTERRUPTED``: a stored job whose process ended before the job did. It is as it was, and can be taken up again.
    """

    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"

    @property
    def terminal(self) -> bool:
        """Whether the status can no longer change."""
        return self in _TERMINAL

    def __repr__(self) -> str:
        return f"JobStatus.{self.name}"

    __str__ = __repr__


_TERMINAL = frozenset({JobStatus.FINISHED, JobStatus.FAILED, JobStatus.ABORTED})
