"""Errors on their way to the application."""

from __future__ import annotations

import asyncio
import pickle
import traceback
import weakref
from typing import Any, Final

import cloudpickle

from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.scalars import plain_text
from dfm_async.redaction import holds_secret

__all__ = [
    "broken_record",
    "cancel_task",
    "cause_of",
    "check_cancellation",
    "drop_cancellation",
    "is_our_cancellation",
    "keep_causes_here",
]

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
    except BaseException:  # noqa: BLE001 - exceptions can hold anything
        return b""
    return data if len(data) <= _LARGEST_CAUSE and not holds_secret(data) else b""


def broken_record(site: str, error: BaseException) -> ErrorRecord:
    """Describes a fault that is no operation's."""
    text, message = plain_text("".join(traceback.format_exception(error))), plain_text(str(error))
    return ErrorRecord(f"broken:{id(error)}", site, "job", "job", (), 1, type(error).__qualname__, message, text)


_cancelled: Final[weakref.WeakSet[asyncio.Task[Any]]] = weakref.WeakSet()
"""The tasks that we have cancelled. Their own code can cancel them, too, and that is a failure of the code."""


def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task in which the user's code may run."""
    _cancelled.add(task)
    task.cancel()


def is_our_cancellation(error: BaseException, task: asyncio.Task[Any] | None = None) -> bool:
    """Tells whether the running task, or another one, ends because we have cancelled it.

    Anything else is a failure of the code that runs in it.
    """
    return isinstance(error, asyncio.CancelledError) and (task or asyncio.current_task()) in _cancelled


def check_cancellation() -> None:
    """Raises at once if the running task is to be cancelled, and not at the next await, which may be ours.

    Raises:
        asyncio.CancelledError: it is.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError("the code has cancelled the task that runs it")


async def drop_cancellation() -> None:
    """Drops what the user's code has requested: the cancellation of the running task, which has other work to do."""
    task = asyncio.current_task()
    if task is None or not task.cancelling() or task in _cancelled:
        return
    try:
        await asyncio.sleep(0)  # it may not have been raised yet
    except asyncio.CancelledError as error:
        if is_our_cancellation(error):
            raise
    while task.cancelling():
        task.uncancel()
