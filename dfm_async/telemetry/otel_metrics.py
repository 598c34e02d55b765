"""The metrics of sessions as instruments of OpenTelemetry, created once for each meter provider of an SDK."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from dfm_async.model.stats import SessionStats
from dfm_async.telemetry.metrics import METRICS, Metric

_SCOPE: Final = "dfm_async"
_TIMEOUT: Final = 1.0
"""The number of seconds to wait for a busy event loop; the previous statistics are reported then."""
_MAX_AGE: Final = 0.1
"""The number of seconds that statistics are reused: the SDK reads the metrics one after the other."""

_Key: TypeAlias = tuple[tuple[str, str], ...]


class ObservedSession:
    """The statistics of a session for other threads. Created on the session's event loop.

    Args:
        federation: the name of its federation.
        stats: returns its statistics; called on the event loop.
    """

    def __init__(self, federation: str, stats: Callable[[], SessionStats]) -> None:
        self.federation = federation
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._last = stats()
        self._read_at = float("-inf")

    def stats(self) -> SessionStats:
        """Return the statistics, or the previous ones if the event loop does not answer in time."""
        if time.monotonic() - self._read_at > _MAX_AGE:
            found = self._stats() if threading.get_ident() == self._thread else self._request()
            if found is not None:
                self._last, self._read_at = found, time.monotonic()
        return self._last

    def _request(self) -> SessionStats | None:
        future: concurrent.futures.Future[SessionStats] = concurrent.futures.Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(self._stats())

        try:
            self._loop.call_soon_threadsafe(answer)
            return future.result(_TIMEOUT)
        except (RuntimeError, TimeoutError):  # the loop is closed, or busy
            future.cancel()
            return None


_sessions: Final[weakref.WeakSet[ObservedSession]] = weakref.WeakSet()
_registered: Final[weakref.WeakKeyDictionary[Any, list[_Callback]]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


@contextmanager
def observed_session(federation: str, stats: Callable[[], SessionStats]) -> Iterator[None]:
    """Report a session while the context is open; counters keep its counts afterwards."""
    session = ObservedSession(federation, stats)
    with _lock:
        _sessions.add(session)
    _register()
    try:
        yield
    finally:
        last = stats()
        with _lock:
            _sessions.discard(session)
            for counters in _registered.values():
                for counter in counters:
                    counter.keep(federation, last)


def _register() -> None:
    """Create the instruments, if an SDK is set up that does not have them."""
    provider = metrics.get_meter_provider()
    # Without an SDK the provider is a stand-in that creates instruments once one is set up: nothing would read them.
    if type(provider).__module__.startswith("opentelemetry.metrics") or provider in _registered:
        return
    meter = provider.get_meter(_SCOPE)
    counters = _registered[provider] = []
    for metric in METRICS:
        if metric.name is None:
            continue
        callback = _Callback(metric)
        if metric.kind == "counter":
            counters.append(callback)
            meter.create_observable_counter(metric.name, [callback], metric.unit, metric.about)
        else:
            meter.create_observable_gauge(metric.name, [callback], metric.unit, metric.about)


class _Callback:
    """Reads one metric of all sessions. Values of sessions of the same federation are added up."""

    def __init__(self, metric: Metric[SessionStats]) -> None:
        self._metric = metric
        self._ended: dict[_Key, float] = {}

    def __call__(self, _options: CallbackOptions) -> Iterator[Observation]:
        with _lock:
            sessions, found = list(_sessions), dict(self._ended)
        for session in sessions:
            self._add(found, session.federation, session.stats())
        for key, value in found.items():
            yield Observation(value, dict(key))

    def keep(self, federation: str, stats: SessionStats) -> None:
        """Keep the counts of a session that ends."""
        self._add(self._ended, federation, stats)

    def _add(self, found: dict[_Key, float], federation: str, stats: SessionStats) -> None:
        for labels, value in self._metric.read(stats):
            if value is not None:
                key = (("dfm.federation", federation), *((f"dfm.{name}", text) for name, text in labels.items()))
                found[key] = found.get(key, 0) + value
