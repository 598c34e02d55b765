"""Work that cancellation must not interrupt.

``anyio.CancelScope(shield=True)`` protects from cancelled anyio scopes only, ``asyncio.shield`` protects the work but
not the caller that waits for it. Clean-up has to hold against both, however often the caller is cancelled: two
cancellations are common (nested timeouts, a task group that fails, a second Ctrl-C).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["completed"]

T = TypeVar("T")


async def completed(
    work: Coroutine[Any, Any, T],
    undo: Callable[[T], Coroutine[Any, Any, object]] | None = None,
    hurry: Callable[[asyncio.Task[T]], object] | None = None,
) -> T:
    """Run work to its end, even if the caller is cancelled any number of times meanwhile.

    A cancellation of the caller is raised when the work is done; if the work failed as well, its error is the cause.

    Args:
        work: what to run. It must be bounded, since nothing else ends it.
        undo: what to run, also to its end, with a result that the cancelled caller does not receive.
        hurry: is called once, with the task of the work, when the caller is cancelled: has the work end early.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # noqa: TID251 - else a cancelled scope would cancel again in every turn of the loop
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                if cancellation is None and hurry is not None:
                    hurry(task)
                cancellation = error
    if cancellation is None:
        return task.result()
    failure = None if task.cancelled() else task.exception()
    if undo is not None and failure is None and not task.cancelled():
        await completed(undo(task.result()))
    raise cancellation from failure
