"""The states of a job."""

from __future__ import annotations

from enum import Enum


class JobStatus(Enum):
    """The status of a job: ``SUBMITTED -> RUNNING -> FINISHED | FAILED | ABORTED``.

    ``UNKNOWN`` is the status of an unknown id, and of a damaged job of a store, where ``info().reason`` states what
    cannot be read.

    A durable job whose application has ended is ``INTERRUPTED`` until it is resumed or aborted.
    """

    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"

    terminal: bool
    """Whether the status can no longer change."""
    ended: bool
    """Whether nothing runs any longer: the status is terminal, or the job was interrupted."""

    def __init__(self, value: str) -> None:
        self.terminal = value in ("finished", "failed", "aborted")
        self.ended = self.terminal or value == "interrupted"

    def __repr__(self) -> str:
        return f"JobStatus.{self.name}"

    __str__ = __repr__
    __hash__ = object.__hash__  # that of Enum is a Python function


def check_status(name: str, value: object) -> None:
    """Check that a user has given a status.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, JobStatus):
        known = ", ".join(map(str, JobStatus))
        raise ValueError(f"{name} must be one of {known}, not {value!r}")  # noqa: TRY004 - a wrong name is the usual case
