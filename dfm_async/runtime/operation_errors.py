"""Errors and cancellations of the code of operations."""

from __future__ import annotations

import asyncio
import pickle
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import cloudpickle

from dfm_async.base.redaction import holds_secret
from dfm_async.model.events import ErrorRecord
from dfm_async.model.scalars import plain_text

_LARGEST_CAUSE: Final = 64 * 1024


ENDS: Final = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a task, a process or a generator, although nothing may have failed."""


class _Causes:
    """Whether exceptions leave this process as objects; their texts always do."""

    travel = True


def keep_causes_here() -> None:
    """Send no exception of this process as an object from now on: its receivers must not unpickle it."""
    _Causes.travel = False


def cause_of(error: BaseException) -> bytes:
    """Return the pickled exception, for the application; empty if it cannot be pickled, or has a secret in it."""
    if not _Causes.travel:
        return b""
    try:
        dumps = cloudpickle.dumps if type(error).__module__ == "__main__" else pickle.dumps
        data = dumps(error, protocol=5)
    except BaseException:  # noqa: BLE001 - exceptions can hold anything
        return b""
    return data if len(data) <= _LARGEST_CAUSE and not holds_secret(data) else b""


def broken_record(site: str, error: BaseException) -> ErrorRecord:
    """Describe an error that no operation has raised."""
    text, message = plain_text("".join(traceback.format_exception(error))), plain_text(str(error))
    return ErrorRecord(
        id=f"broken:{id(error)}",
        site=site,
        operation="job",
        node="job",
        frame=(),
        attempt=1,
        type_name=type(error).__qualname__,
        message=message,
        traceback=text,
    )


_cancelled: Final[weakref.WeakSet[asyncio.Task[Any]]] = weakref.WeakSet()
"""The tasks that were cancelled here. Their own code can cancel them, too, which is a failure of the code."""


def ordinary(error: BaseException, source: str) -> Exception:
    """Return an error that its readers can raise: it ends no iterator, task or loop. ``source`` is what raised it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    found = RuntimeError(f"{source} raised {error!r}")
    found.__cause__ = error
    return found


@contextmanager
def survivable(source: str) -> Iterator[None]:
    """Raise what is neither an ``Exception`` nor one of ``ENDS`` as an error that tasks and servers survive."""
    try:
        yield
    except (Exception, *ENDS):
        raise
    except BaseException as error:
        raise ordinary(error, source) from error


def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task in which the user's code may run."""
    _cancelled.add(task)
    task.cancel()


def is_our_cancellation(error: BaseException, task: asyncio.Task[Any] | None = None) -> bool:
    """Return whether the running task, or another one, ends because :func:`cancel_task` has cancelled it.

    Anything else is a failure of the code that runs in it.
    """
    return isinstance(error, asyncio.CancelledError) and (task or asyncio.current_task()) in _cancelled


def check_cancellation(task: asyncio.Task[Any] | None) -> None:
    """Raise at once if the running task is to be cancelled, and not at the next await, which may be of this library.

    Raises:
        asyncio.CancelledError: it is.
    """
    if task is not None and task.cancelling():
        raise asyncio.CancelledError("the code has cancelled the task that runs it")


async def drop_cancellation() -> None:
    """Drop the cancellation of the running task that the user's code has requested: the task has other work to do."""
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
