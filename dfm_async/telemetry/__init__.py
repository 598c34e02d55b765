"""Traces: what ran when, where and because of what; to a file, or to the OpenTelemetry SDK that the user has set up."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.telemetry.cpu_profile import CpuProfile as CpuProfile
    from dfm_async.telemetry.cpu_profile import CpuRow as CpuRow
    from dfm_async.telemetry.recorder import UserSpan as UserSpan
    from dfm_async.telemetry.sinks import FileSink as FileSink
    from dfm_async.telemetry.sinks import Sink as Sink
    from dfm_async.telemetry.spans import Span as Span
    from dfm_async.telemetry.spans import read_trace as read_trace
