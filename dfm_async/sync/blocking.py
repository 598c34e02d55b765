"""What blocking sessions, jobs and iterators have in common: an object of a loop, and the thread of that loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from dfm_async.base.loop_thread import LoopStopped, LoopThread
from dfm_async.errors import DfmError, SessionClosed

A = TypeVar("A")
T = TypeVar("T")


def wait(loop: LoopThread, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop of a session, and wait for it.

    Raises:
        SessionClosed: the session is not connected, was closed, or belongs to another process.
    """
    try:
        return loop.run(work)
    except LoopStopped:
        if loop.forked is not None:
            problem = f"the session belongs to process {loop.forked}, which forked this one; make a new one"
        elif loop.stopped:
            problem = "the session was closed"
        else:
            problem = "the session is not connected; use 'with Session(...)'"
        raise SessionClosed(problem) from None
    except DfmError as error:
        raise error.with_traceback(None) from error.__cause__  # frames of the other thread explain nothing


class Blocking(Generic[A]):
    """Wraps an object whose coroutines run on the loop of another thread."""

    def __init__(self, loop: LoopThread, wrapped: A) -> None:
        self._loop = loop
        self._async = wrapped

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return wait(self._loop, work)

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop: it may read what only the loop changes."""
        return self._loop.call(function)

    def __repr__(self) -> str:
        return self._call(lambda: repr(self._async))

    def _repr_html_(self) -> str | None:
        render = getattr(self._async, "_repr_html_", None)
        return None if render is None else self._call(render)
