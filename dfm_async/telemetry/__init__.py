"""Traces: what ran when, where and because of what; to a file, or to the OpenTelemetry SDK that the user has set up."""

from dfm_async.telemetry.sinks import FileSink, Sink
from dfm_async.telemetry.spans import Span, read_trace
from dfm_async.telemetry.user_spans import UserSpan

__all__ = ["FileSink", "Sink", "Span", "UserSpan", "read_trace"]


def __dir__() -> list[str]:
    return __all__
