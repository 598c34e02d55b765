"""How the program ends: exit codes, and what leads to which of them."""

from __future__ import annotations

from enum import IntEnum

from dfm_async.errors import (
    DfmError,
    FederationError,
    FlareError,
    JobNotFound,
    JobOwned,
    ParameterError,
    PipelineError,
    ResultsExpired,
    ShippingError,
    StoreError,
)
from dfm_async.model.status import JobStatus

__all__ = ["BadInput", "Exit", "Unreachable", "Unwritable", "exit_of", "exit_of_status"]


class Exit(IntEnum):
    """What the program's exit code tells."""

    SUCCESS = 0
    FAILED = 1
    """The job failed or was aborted, or a check found something bad."""
    BAD_INPUT = 2
    """What was given cannot be used: nothing ran."""
    UNREACHABLE = 3
    """The service, the store, the federation or the job is not there, or cannot be used from here."""
    INTERRUPTED = 130
    """Ctrl-C."""
    OUTPUT_CLOSED = 141
    """Nobody reads the standard output any more, as with ``| head``."""


class BadInput(Exception):
    """What the user gave cannot be used. The message says what is wrong, where, and what to do."""


class Unreachable(Exception):
    """A service, store or job is not there, or cannot be used from here."""


class Unwritable(Exception):
    """Results cannot be written, as when the disk is full."""


def exit_of(error: Exception) -> Exit:
    """The exit code for an error that ended a command."""
    match error:
        case BadInput() | FederationError() | PipelineError() | ParameterError() | ShippingError():
            return Exit.BAD_INPUT
        case Unreachable() | JobNotFound() | JobOwned() | ResultsExpired() | StoreError() | FlareError():
            return Exit.UNREACHABLE
        case Unwritable() | DfmError():
            return Exit.FAILED
    raise error


def exit_of_status(status: JobStatus) -> Exit:
    """The exit code for a job that ended like this."""
    return Exit.SUCCESS if status is JobStatus.FINISHED else Exit.FAILED
