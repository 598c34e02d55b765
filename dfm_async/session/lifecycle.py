"""The lifetime of a session: one supervisor task owns everything that runs in it.

So a session can be entered and left from different tasks: fixtures of tests, cells of notebooks, lifespans of services.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from dfm_async.base.descriptors import OwnLoop, close_in_children
from dfm_async.base.signals import Outcome, Signal
from dfm_async.base.tasks import completed
from dfm_async.errors import SessionClosed
from dfm_async.runtime.operation_errors import ENDS, cancel_task

_log = logging.getLogger(__name__)

_NOT_CONNECTED: Final = "the session is not connected; use 'async with Session(...)'"
_inside: Final[contextvars.ContextVar[Supervisor | None]] = contextvars.ContextVar("dfm_async session", default=None)
"""The supervisor that owns the running task, such as one that calls callbacks, or owns what has started it."""

Hook = Callable[[contextlib.AsyncExitStack], Awaitable[None]]


class Supervisor:
    """Open and close what a session needs, and own its tasks.

    Args:
        start: opens everything, in a stack that closes it in reverse order. :meth:`close` cancels it.
        started: is called when everything is open and tasks can be spawned, before the session can be used.
        stop: ends the jobs; called when the session is closed, and once more when no submission is pending.
    """

    def __init__(self, *, start: Hook, started: Hook, stop: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._started = started
        self._stop = stop
        self._task: asyncio.Task[None] | None = None
        self._ready: Outcome[None] | None = None
        self._pid = 0
        self._forked = False
        self._group: asyncio.TaskGroup | None = None
        self._closing = asyncio.Event()
        self._starting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.submitting = _Submissions()
        """To be entered while a job is submitted: closing waits for it."""

    # opening and closing

    def begin(self) -> None:
        """Start the supervisor task.

        Raises:
            SessionClosed: it was started before.
        """
        if self._task is not None:
            raise SessionClosed("the session is connected already, or was closed; make a new one")
        self._ready = Outcome()
        task = self._task = asyncio.create_task(self._supervise(self._ready), name="dfm_async session")
        self._pid = os.getpid()
        close_in_children(self)
        loop = self._loop = OwnLoop(task.get_loop())
        task.add_done_callback(lambda _: loop.release())

    async def wait_started(self) -> None:
        """Wait until everything is open, and raise what cannot be opened. Cancelled, it closes everything again."""
        assert self._task is not None and self._ready is not None  # noqa: S101, PT018 - begun
        try:
            await self._ready.wait()
        except asyncio.CancelledError:
            await completed(self.close())
            raise
        except BaseException:
            self._closing.set()
            await asyncio.wait([self._task])
            self._task.exception()
            raise

    async def close(self) -> None:
        """End everything. Cancelled, it skips the grace period of what still runs."""
        self._closing.set()
        task = self._task
        if task is None or self._forked:  # a forked child has nothing to close
            return
        if self._starting:  # the store may be locked, or a site may wait for something that never comes
            self._starting = False
            task.cancel()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if _inside.get() is not self:  # the supervisor waits for its own tasks: they cannot wait for it
                task.cancel()
                await completed(_settled(task))
            raise
        await _settled(task)

    async def _supervise(self, ready: Outcome[None]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._open(stack)
                self._group = await stack.enter_async_context(asyncio.TaskGroup())
                await self._started(stack)
                ready.settle(None)
                try:
                    await self._closing.wait()
                    await self._stop()
                    await self.submitting.none()  # they were refused, or got in
                    await self._stop()
                finally:
                    for task in self._tasks:
                        cancel_task(task)
        except BaseException as error:  # noqa: BLE001 - raised in connect, or in close
            if not ready.fail(_unwrapped(error)):
                raise _unwrapped(error) from None
        finally:
            self._group = None
            self._closing.set()

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        closed = SessionClosed("the session was closed while it started")
        if self._closing.is_set():
            raise closed
        self._starting = True
        try:
            await self._start(stack)
        except asyncio.CancelledError:
            if self._closing.is_set():
                raise closed from None
            raise
        finally:
            self._starting = False

    def close_in_child(self) -> None:
        """Note, in a forked child, that the session belongs to its parent."""
        self._forked = True

    # state

    @property
    def connected(self) -> bool:
        """Whether everything is open, and closing has not begun."""
        return self._group is not None and not self._closing.is_set()

    @property
    def state(self) -> str:
        """The state in words, for a session that is not connected."""
        return "not connected" if self._task is None else "closed"

    def check_open(self) -> asyncio.TaskGroup:
        """Return the task group.

        Raises:
            SessionClosed: the session is not connected.
        """
        if self._forked:
            raise SessionClosed(f"the session belongs to process {self._pid}, which forked this one; make a new one")
        if self._group is None or self._closing.is_set():
            raise SessionClosed(_NOT_CONNECTED if self._task is None else "the session was closed")
        return self._group

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the session was connected on.

        Raises:
            SessionClosed: it was not connected.
        """
        if self._task is None:
            raise SessionClosed(_NOT_CONNECTED)
        return self._task.get_loop()

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call back when everything of a session that was connected has ended."""
        if self._task is not None:
            self._task.add_done_callback(lambda _: callback())

    # tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the session. Its errors are logged."""
        context = contextvars.copy_context()
        context.run(_inside.set, self)
        task: asyncio.Task[None] = self.check_open().create_task(_guarded(work), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled early has not begun it
        return task


class _Submissions:
    """Counts the jobs that are being submitted."""

    __slots__ = ("_changed", "_count")

    def __init__(self) -> None:
        self._count = 0
        self._changed = Signal()

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        self._changed.notify()

    async def none(self) -> None:
        """Wait until none is being submitted."""
        await self._changed.wait_until(lambda: not self._count)


async def _settled(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task, and raise its error, but not its cancellation."""
    await asyncio.wait([task])
    error = None if task.cancelled() else task.exception()
    if error is not None:
        raise error


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    """Keep a bug in one task from ending the session with everything in it."""
    try:
        await work
    except ENDS:
        raise
    except BaseException:  # noqa: BLE001 - a bug of this library, logged with its traceback
        _log.exception("a task of the session failed")


def _unwrapped(error: BaseException) -> BaseException:
    """Return the only error of a group, if it has only one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
