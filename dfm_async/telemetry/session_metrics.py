"""Reports the metrics of sessions to OpenTelemetry, which is loaded only if the application has loaded it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dfm_async.model.stats import SessionStats


@contextmanager
def observed(federation: str, stats: Callable[[], SessionStats]) -> Iterator[None]:
    """Report a session to the OpenTelemetry SDK while the context is open, if OpenTelemetry is loaded.

    Args:
        federation: the name of the session's federation.
        stats: returns the statistics of the session; called on its event loop.
    """
    if "opentelemetry.metrics" not in sys.modules:
        yield
        return
    from dfm_async.telemetry.otel_metrics import observed_session  # loads OpenTelemetry

    with observed_session(federation, stats):
        yield
