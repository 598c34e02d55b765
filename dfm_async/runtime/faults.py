"""Errors on their way to the application."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from typing import Final

import cloudpickle

from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.scalars import plain_text
from dfm_async.redaction import holds_secret

__all__ = ["broken_record", "cause_of", "is_our_cancellation", "keep_causes_here"]

_LARGEST_CAUSE: Final = 64 * 1024


class _Causes:
    """Whether exceptions leave this process as objects; their texts always do."""

    travel = True


def keep_causes_here() -> None:
    """From now on no exception leaves this process as an object: those who get it must not unpickle it."""
    _Causes.travel = False


def cause_of(error: BaseException) -> bytes:
    """The exception itself, for the application; empty if it cannot travel, or has a secret in it."""
    if not _Causes.travel:
        return b""
    try:
        dumps = cloudpickle.dumps if type(error).__module__ == "__main__" else pickle.dumps
        data = dumps(error, protocol=5)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - exceptions can hold anything
        return b""
    return data if len(data) <= _LARGEST_CAUSE and not holds_secret(data) else b""


def broken_record(site: str, error: Exception) -> ErrorRecord:
    """Describes a fault that is no operation's."""
    text, message = plain_text("".join(traceback.format_exception(error))), plain_text(str(error))
    return ErrorRecord(f"broken:{id(error)}", site, "job", "job", (), 1, type(error).__qualname__, message, text)


def is_our_cancellation(error: BaseException) -> bool:
    """Tells whether the running task was cancelled from outside; an operation can raise the same by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
