"""Tasks that have an owner, work that cancellation must not interrupt, and blocking calls in threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from dfm_async.base.signals import Outcome

_log = logging.getLogger(__name__)

T = TypeVar("T")

INTERRUPTS: Final = (KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit)
"""What ends a program, a task or a generator. Other base exceptions are failures, such as the panics of Rust."""


class OwnedTasks:
    """The tasks of one object, for which no task group is open. The object must :meth:`close` it at its own end.

    Args:
        on_error: is called with a task that has failed, and its error. Without it, errors are logged.
    """

    __slots__ = ("_on_error", "_tasks")

    def __init__(self, on_error: Callable[[asyncio.Task[Any], BaseException], object] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error or _log_error

    def __len__(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[Any, Any, T], name: str, *, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        """Start a task, in a copy of the current context unless another one is passed."""
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(task, error)

    async def wait(self) -> None:
        """Wait until all tasks have ended by themselves, including those that are started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, including those that are started meanwhile, and wait for their end."""
        while self._tasks:
            self.cancel()
            await asyncio.wait(set(self._tasks))


def _log_error(task: asyncio.Task[Any], error: BaseException) -> None:
    _log.error("task %r failed", task.get_name(), exc_info=error)


async def completed(
    work: Coroutine[Any, Any, T],
    undo: Callable[[T], Coroutine[Any, Any, object]] | None = None,
    hurry: Callable[[asyncio.Task[T]], object] | None = None,
) -> T:
    """Run work to its end, even if the caller is cancelled any number of times meanwhile.

    A cancellation of the caller is raised when the work is done; if the work failed as well, its error is the cause.

    ``anyio.CancelScope(shield=True)`` protects from cancelled anyio scopes only, ``asyncio.shield`` protects the work
    but not the caller that waits for it. Clean-up has to hold against both, however often the caller is cancelled: two
    cancellations are common (nested timeouts, a task group that fails, a second Ctrl-C).

    Args:
        work: what to run. It must be bounded, since nothing else ends it.
        undo: what to run, also to its end, with a result that the cancelled caller does not receive.
        hurry: is called once, with the task of the work, when the caller is cancelled: has the work end early.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    with _anyio_shield():
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


def _anyio_shield() -> contextlib.AbstractContextManager[object]:
    """Shield from the anyio scopes of the caller: a cancelled one would cancel again in every turn of the loop."""
    if "anyio" not in sys.modules:  # there are no such scopes
        return contextlib.nullcontext()
    import anyio

    return anyio.CancelScope(shield=True)  # noqa: TID251 - see above


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Run a blocking call in a new thread, and wait for it. Cancelling the wait does not stop the call.

    ``anyio.to_thread`` and the loop's executor keep their threads for the next call; here none is left behind.

    Args:
        call: what to run.
        name: a part of the thread's name.
    """
    loop = asyncio.get_running_loop()
    outcome: Outcome[T] = Outcome(loop)

    def run() -> None:
        try:
            settle, result = outcome.settle, call()
        except BaseException as error:  # noqa: BLE001 - raised again in the waiter
            on_loop(loop, outcome.fail, error)
        else:
            on_loop(loop, settle, result)

    threading.Thread(target=run, name=f"dfm-{name}", daemon=True).start()
    return await outcome


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object], argument: object) -> None:
    """Call a function on the loop of another thread, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
        loop.call_soon_threadsafe(call, argument)
