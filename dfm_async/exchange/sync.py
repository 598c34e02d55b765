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

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from dfm_async.base.loop_thread import LoopStopped, LoopThread
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
        self._loop = LoopThread("dfm-agent")
        self._loop.start()
        try:
            self._agent = self._loop.call(make)
            self._wait(self._agent.start())
        except BaseException:
            self._loop.stop()
            raise

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        call = getattr(work, "__name__", "call")
        try:
            return self._loop.run(work)
        except LoopStopped:
            forked = self._loop.forked
            if forked is not None:
                problem = f"only process {forked}, which has connected, can call it, and none of its forks"
                raise CallStateError(call, problem) from None
            raise AgentClosed("closed here") from None
        except BaseException as error:  # noqa: BLE001 - it is raised again
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
        return self._loop.running and self._agent.closed is None

    def log(self, record: Mapping[str, Any], *, step: SupportsIndex | None = None) -> None:
        """Send metrics to the site."""
        self._wait(self._agent.log(record, step=step))

    def progress(self, done: SupportsFloat, total: SupportsFloat | None = None, note: str = "") -> None:
        """Report the progress of the task to the site."""
        what = (float(done), None if total is None else float(total), str(note))
        self._loop.call_soon(self._agent.progress, *what)

    def shutdown(self) -> None:
        """End the connection and the thread. Calls that still wait are ended; a second one changes nothing."""
        if self._loop.forked is not None:
            return
        try:
            with contextlib.suppress(AgentClosed):  # another thread is doing it, or has done it
                self._wait(self._agent.close())
        finally:
            self._loop.stop()


def _new_agent(
    bootstrap: Bootstrap | str | os.PathLike[str] | None, options: AgentOptions | None, **rest: Any
) -> FlareAgent:
    if bootstrap is None:
        return FlareAgent.from_environment(options, **rest)
    return FlareAgent(bootstrap, options, **rest)


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
    """Report the progress of the task to the site."""
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
