"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class LoopStopped(RuntimeError):
    """The loop takes no work: it was not started, was stopped, or belongs to the process that forked this one."""


class LoopThread:
    """Run coroutines of other threads, which wait for them. Every method may be called from any thread.

    The thread does not keep the interpreter from exiting.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a finalizer may call spawn in the middle of any other call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> bool:
        """Start the thread. Return False if it was started or stopped before."""
        with self._lock:
            if self._thread is not None or self._stopped:
                return False
            self._pid = os.getpid()
            ready = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(ready,), name=self._name, daemon=True)
            self._thread.start()
        ready.wait()
        return True

    def _run(self, ready: threading.Event) -> None:
        with asyncio.Runner() as runner:  # at its end it cancels what is left, and waits for it
            self._loop, self._stopping = runner.get_loop(), asyncio.Event()
            ready.set()
            runner.run(self._until(self._stopping))

    async def _until(self, stopping: asyncio.Event) -> None:
        await stopping.wait()

    @property
    def forked(self) -> int | None:
        """The process that has the thread, if it has forked this one: nothing would ever answer here."""
        return None if self._pid == os.getpid() else self._pid

    @property
    def running(self) -> bool:
        """Whether the loop takes work."""
        return self._loop is not None and not self._stopped and self.forked is None

    @property
    def stopped(self) -> bool:
        """Whether the loop was stopped for good."""
        return self._stopped

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result, or raise its error.

        An exception in the waiting thread, such as ``KeyboardInterrupt``, cancels the coroutine and is raised when the
        coroutine has ended; a second one is raised at once.

        Raises:
            LoopStopped: the loop does not run, or was stopped meanwhile.
            RuntimeError: the caller is the thread of the loop, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(f"thread {self._name!r} runs the event loop: a call in it would wait for itself")
        call = _ThreadCall(work)
        try:
            self._submit(call.start, self._tasks)
            return call.outcome.result()
        except LoopStopped:
            work.close()
            raise
        except concurrent.futures.CancelledError:
            if not call.outcome.cancelled():
                raise  # of the work itself
            raise LoopStopped("the loop was stopped") from None
        except BaseException as error:
            if call.outcome.done():
                raise
            self._submit(call.cancel)
            concurrent.futures.wait([call.outcome])
            failure = None if call.outcome.cancelled() else call.outcome.exception()
            raise error from failure

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop, and return its result. In the calling thread, if the loop does not run."""
        if threading.current_thread() is self._thread or not self.running:
            return function()
        try:
            return self.run(_called(function))
        except LoopStopped:
            return function()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop, without waiting for it. Nothing happens if the loop does not run."""
        if self.running:
            try:
                self._submit(function, *args)
            except LoopStopped:
                return

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine on the loop, without waiting for it. Nothing happens if the loop does not run.

        Its errors are logged.
        """
        call = _ThreadCall(work)
        call.outcome.add_done_callback(_log_error)
        try:
            self._submit(call.start, self._tasks)
        except LoopStopped:
            work.close()

    def _submit(self, function: Callable[..., object], *args: Any) -> None:
        if self.forked is not None:
            raise LoopStopped(f"the loop belongs to process {self._pid}, which forked this one")
        with self._lock:  # what is given to a loop that has stopped would wait for ever
            if self._loop is None or self._stopped:
                raise LoopStopped("the loop was stopped" if self._stopped else "the loop was not started")
            self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel what is left, and end the thread. Safe to call more than once, and from several threads."""
        if self.forked is not None:
            return
        with self._lock:
            if not self._stopped:
                self._stopped = True
                if self._loop is not None and self._stopping is not None:
                    self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class _ThreadCall(Generic[T]):
    """A coroutine that another thread waits for. Its outcome is set when it has ended, also if it was cancelled."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Start it, on the loop, which holds its task in ``tasks``."""
        task = self._task = asyncio.get_running_loop().create_task(self._work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._settle)

    def cancel(self) -> None:
        """Cancel it, on the loop."""
        if self._task is not None:
            self._task.cancel()
        else:  # the caller was interrupted before it could start it
            self._work.close()
            self._cancelled()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._cancelled()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def _cancelled(self) -> None:
        self.outcome.cancel()
        self.outcome.set_running_or_notify_cancel()  # else concurrent.futures.wait does not return


def _log_error(outcome: concurrent.futures.Future[Any]) -> None:
    if not outcome.cancelled() and (error := outcome.exception()) is not None:
        _log.error("a call that nobody waits for failed", exc_info=error)


async def _called(function: Callable[[], T]) -> T:
    return function()
