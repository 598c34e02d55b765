"""The states of a job."""

from __future__ import annotations

from enum import Enum

__all__ = ["JobStatus"]


class JobStatus(Enum):
    """``SUBMITTED -> RUNNING -> FINISHED | FAILED | ABORTED``; ``UNKNOWN`` for an id that was never seen.

    A job of a store file that is damaged is ``UNKNOWN``, too; ``info().reason`` says what cannot be read.

    A durable job whose application has ended is ``INTERRUPTED`` until it is resumed or aborted.
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

    @property
    def ended(self) -> bool:
        """Whether nothing runs any more: the status is terminal, or the job was interrupted."""
        return self in _ENDED

    def __repr__(self) -> str:
        return f"JobStatus.{self.name}"

    __str__ = __repr__


_TERMINAL = frozenset({JobStatus.FINISHED, JobStatus.FAILED, JobStatus.ABORTED})
_ENDED = _TERMINAL | {JobStatus.INTERRUPTED}
