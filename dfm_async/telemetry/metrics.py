"""Metrics of sessions for OpenTelemetry: gives those who ask, in whatever thread, what a session tells on its loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from dfm_async.model.stats import SessionStats

__all__ = ["ObservedSession", "observed", "sessions"]

T = TypeVar("T")

_PATIENCE: Final = 1.0
"""How many seconds somebody waits for a loop that is busy; they get what was known before then."""
_FRESH: Final = 0.1
"""For how many seconds an answer is good: all metrics are asked for one after the other."""


class ObservedSession:
    """What a session tells, for other threads. Made on its loop.

    Args:
        federation: the name of its federation.
        stats: tells how it is; called on the loop.
    """

    def __init__(self, federation: str, stats: Callable[[], SessionStats]) -> None:
        self.federation = federation
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._last = stats()
        self._known_at = float("-inf")  # nobody has asked yet

    def stats(self) -> SessionStats:
        """How the session is, or was when its loop last answered."""
        if time.monotonic() - self._known_at > _FRESH:
            found = self._stats() if threading.get_ident() == self._thread else self._ask()
            if found is not None:
                self._last, self._known_at = found, time.monotonic()
        return self._last

    def _ask(self) -> SessionStats | None:
        future: concurrent.futures.Future[SessionStats] = concurrent.futures.Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(self._stats())

        try:
            self._loop.call_soon_threadsafe(answer)
            return future.result(_PATIENCE)
        except (RuntimeError, TimeoutError):  # the loop is closed, or busy
            future.cancel()
            return None


_sessions: Final[weakref.WeakSet[ObservedSession]] = weakref.WeakSet()
_lock: Final = threading.Lock()


def sessions(beside: Callable[[], T]) -> tuple[list[ObservedSession], T]:
    """The sessions that are connected, and something to be read in the same moment. Any thread may ask."""
    with _lock:
        return list(_sessions), beside()


@contextmanager
def observed(federation: str, stats: Callable[[], SessionStats]) -> Iterator[None]:
    """Shows a session to those who collect metrics while the context is open, if somebody has set up an SDK."""
    if "opentelemetry.metrics" not in sys.modules:
        yield
        return
    from dfm_async.telemetry.otel_metrics import keep, register  # loads OpenTelemetry

    session = ObservedSession(federation, stats)
    with _lock:
        _sessions.add(session)
    register()
    try:
        yield
    finally:
        last = stats()
        with _lock:
            _sessions.discard(session)
            keep(federation, last)
