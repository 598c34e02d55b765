"""The agent for programs that have no event loop. It runs in a thread of its own, so heartbeats go on.

from dfm_async.exchange import sync

sync.init()
while sync.is_running():
    task = sync.receive()
    if task is None:
        break
    sync.send(train(task.data))
sync.shutdown()
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from dfm_async.errors import AgentClosed, CallStateError
from dfm_async.exchange.agent import FlareAgent
from dfm_async.exchange.bootstrap import Bootstrap
from dfm_async.exchange.options import AgentOptions
from dfm_async.exchange.task import OK, Task

__all__ = ["SyncAgent", "init", "is_running", "log", "progress", "receive", "send", "shutdown"]

T = TypeVar("T")


class SyncAgent:
    """An agent whose calls block. Its methods may be called from any thread.

    Args:
        make: makes the agent, on its own loop.
    """

    def __init__(self, make: Callable[[], FlareAgent]) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run_loop, name="dfm-agent", daemon=True)
        self._thread.start()
        try:
            self._agent = self._wait(_made(make))
            self._wait(self._agent.start())
        except BaseException:
            self._stop()
            raise

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:  # calls of other threads, which wait for them
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.run_until_complete(asyncio.sleep(0))  # passes on the results of calls that have just ended
        finally:
            self._loop.close()

    @property
    def _forked(self) -> bool:
        """Whether this is a child of the process that has the thread: nothing would ever answer here."""
        return self._pid != os.getpid()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._forked:
            work.close()
            problem = f"only process {self._pid}, which has connected, can call it, and none of its forks"
            raise CallStateError(getattr(work, "__name__", "call"), problem)
        with self._lock:  # what is given to a loop that has stopped would wait for ever
            if self._stopped:
                work.close()
                raise AgentClosed("closed here")
            future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise AgentClosed("closed here") from None
        except BaseException as error:  # noqa: BLE001 - it is raised again
            future.cancel()  # an interrupt of the main thread must not leave a call behind
            # Where it came from on the other thread says nothing about the program, and would fill its last lines.
            raise error.with_traceback(None) from error.__cause__

    @property
    def agent(self) -> FlareAgent:
        """The agent itself. Its coroutines belong to another loop."""
        return self._agent

    @property
    def site(self) -> str:
        """The name of the site."""
        return self._agent.site

    @property
    def job(self) -> str:
        """The job that the program works for."""
        return self._agent.job

    def receive(self, timeout: float | None = None) -> Task | None:
        """Wait for a task; None after the timeout, or when the site has ended the exchange.

        Raises:
            AgentClosed: the site aborted the exchange, or is gone.
            CallStateError: the last task is not answered.
        """
        try:
            return self._wait(self._agent.get_task(timeout))
        except AgentClosed as closed:
            if closed.reason in ("ended", "closed here"):
                return None
            raise

    def send(self, result: Any, rc: str = OK, *, reason: str = "") -> None:
        """Answer the task; returns when the result has arrived. Raises what ``FlareAgent.submit_result`` raises."""
        self._wait(self._agent.submit_result(result, rc, reason=reason))

    def is_running(self) -> bool:
        """Whether there may be more tasks. Neither waits nor takes a task."""
        return not self._stopped and not self._forked and self._agent.closed is None

    def log(self, record: Mapping[str, Any], *, step: SupportsIndex | None = None) -> None:
        """Send metrics to the site."""
        self._wait(self._agent.log(record, step=step))

    def progress(self, done: SupportsFloat, total: SupportsFloat | None = None, note: str = "") -> None:
        """Report to the site how far the program is with its task."""
        what = (float(done), None if total is None else float(total), str(note))
        if self._forked:
            return
        with self._lock:
            if not self._stopped:
                self._loop.call_soon_threadsafe(self._agent.progress, *what)

    def shutdown(self) -> None:
        """End the connection and the thread. Calls that still wait are ended; a second one changes nothing."""
        if self._forked:
            return
        try:
            self._wait(self._agent.close())
        except AgentClosed:
            self._thread.join()  # another thread is doing it, or has done it
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _new_agent(
    bootstrap: Bootstrap | str | os.PathLike[str] | None, options: AgentOptions | None, **rest: Any
) -> FlareAgent:
    if bootstrap is None:
        return FlareAgent.from_environment(options, **rest)
    return FlareAgent(bootstrap, options, **rest)


async def _made(make: Callable[[], FlareAgent]) -> FlareAgent:
    return make()


_current: SyncAgent | None = None
_lock = threading.Lock()


def init(
    bootstrap: Bootstrap | str | os.PathLike[str] | None = None, options: AgentOptions | None = None, **rest: Any
) -> SyncAgent:
    """Connect to the site that launched this program, ours or one of NVFLARE. Further calls give the same agent.

    Args:
        bootstrap: how to find the site; by default as ``FlareAgent.from_environment`` does.
        options: how long to wait for what.
        rest: further arguments of :class:`~dfm_async.FlareAgent`.

    Raises:
        HandshakeRefused: no site wants this program.
    """
    global _current
    with _lock:
        if _current is None:
            _current = SyncAgent(lambda: _new_agent(bootstrap, options, **rest))
            atexit.register(shutdown)
        return _current


def _agent(call: str) -> SyncAgent:
    if _current is None:
        raise CallStateError(call, "call init() first")
    return _current


def receive(timeout: float | None = None) -> Task | None:
    """Wait for a task; None after the timeout, or when the site has ended the exchange."""
    return _agent("receive").receive(timeout)


def send(result: Any, rc: str = OK, *, reason: str = "") -> None:
    """Answer the task; returns when the result has arrived."""
    _agent("send").send(result, rc, reason=reason)


def is_running() -> bool:
    """Whether there may be more tasks. Neither waits nor takes a task."""
    return _current is not None and _current.is_running()


def log(record: Mapping[str, Any], *, step: SupportsIndex | None = None) -> None:
    """Send metrics to the site."""
    _agent("log").log(record, step=step)


def progress(done: SupportsFloat, total: SupportsFloat | None = None, note: str = "") -> None:
    """Report to the site how far the program is with its task."""
    _agent("progress").progress(done, total, note)


def shutdown() -> None:
    """End the connection. Called at the end of the program, if it was not called before."""
    global _current
    with _lock:
        found, _current = _current, None
    if found is not None:
        atexit.unregister(shutdown)
        found.shutdown()


def _after_fork() -> None:
    """Replace the lock, in a forked child: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
