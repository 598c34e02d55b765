"""OpenTelemetry: the only module that knows it. Loaded only where somebody else has loaded OpenTelemetry already."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, ProxyTracerProvider, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from dfm_async.model.events import Scalar
from dfm_async.telemetry.current import Position
from dfm_async.telemetry.spans import Span, span_text

__all__ = ["Bridge", "StartedSpan", "enter_span", "find_bridge"]

_log = logging.getLogger(__name__)

_SCOPE: Final = "dfm_async"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def enter_span(trace_id: str, span: int) -> Callable[[], None]:
    """Makes a span the current one for libraries that use OpenTelemetry; the function that it gives undoes that."""
    before = context.get_current()
    place = SpanContext(int(trace_id, 16), span, is_remote=True, trace_flags=_SAMPLED)
    context.attach(trace.set_span_in_context(NonRecordingSpan(place), before))
    # Attached again instead of detached: a generator can be entered in one task and left in another.
    return lambda: _leave(before)


def _leave(before: Any) -> None:
    context.attach(before)


class StartedSpan:
    """A span that was begun with the API."""

    __slots__ = ("_span", "parent_id", "position")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        place = span.get_span_context()
        self.position = Position(f"{place.trace_id:032x}", place.span_id)
        parent = getattr(span, "parent", None)
        self.parent_id: str | None = None if parent is None else span_text(parent.span_id)

    def set(self, name: str, value: Scalar) -> None:
        """Adds an attribute."""
        self._span.set_attribute(name, value)

    def end(self, error: BaseException | None, message: str | None) -> None:
        """Ends it."""
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()


class Bridge:
    """Hands spans to the SDK that the user has set up. Those of sites keep the ids that the sites gave them.

    The SDK's API makes ids itself, and takes seven times as long. So finished spans are handed to the span processors
    of the provider, which is all that happens to a span when it ends.
    """

    def __init__(self, provider: Any, sdk: Any, scope: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(_SCOPE)
        self._processor = provider._active_span_processor  # noqa: SLF001 - there is no public way
        self._resource = provider.resource
        self._readable = sdk.ReadableSpan
        self._event = sdk.Event
        self._scope = scope(_SCOPE)
        self._ok = Status(StatusCode.UNSET)

    def start(self, name: str, attributes: dict[str, Scalar], start: int) -> StartedSpan | None:
        """Begins a span below the current one; None if the user's sampler does not want it."""
        span = self._tracer.start_span(name, attributes=attributes, start_time=start)
        if not span.get_span_context().trace_flags.sampled:
            return None
        return StartedSpan(span)

    def open(self) -> None:
        """Nothing to do: the user has set it up."""

    def write(self, spans: list[Span]) -> None:
        """Hands finished spans to the span processors."""
        on_end = self._processor.on_end
        for span in spans:
            on_end(self._made(span))

    def flush(self) -> None:
        """Nothing to do: the SDK exports when it thinks fit."""

    def close(self) -> None:
        """Nothing to do: the user closes it."""

    def _made(self, span: Span) -> Any:
        trace_id = int(span.trace_id, 16)
        parent = span.parent_id
        attributes, status = span.attributes, self._ok
        events: tuple[Any, ...] = ()
        if span.status == "error":
            status = Status(StatusCode.ERROR, span.message)
            attributes = {name: value for name, value in attributes.items() if not name.startswith("exception.")}
            told = {name: value for name, value in span.attributes.items() if name.startswith("exception.")}
            events = (self._event("exception", told, timestamp=span.end),) if told else ()
        return self._readable(
            span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED),
            parent=None if parent is None else SpanContext(trace_id, int(parent, 16), False, _SAMPLED),
            resource=self._resource,
            attributes=attributes,
            events=events,
            status=status,
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=self._scope,
        )


class _Known:
    """The provider that was seen last, and the bridge to it."""

    provider: Any = None
    bridge: Bridge | None = None


def find_bridge() -> Bridge | None:
    """The bridge to the SDK that is set up in this process, if one is."""
    provider = trace.get_tracer_provider()
    if provider is not _Known.provider:
        _Known.provider, _Known.bridge = provider, _bridge_to(provider)
    return _Known.bridge


def _bridge_to(provider: Any) -> Bridge | None:
    if isinstance(provider, (ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    try:
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        return Bridge(provider, sdk, InstrumentationScope)
    except (ImportError, AttributeError) as error:
        kind = type(provider)
        _log.warning(
            "the OpenTelemetry provider %s.%s is not that of opentelemetry-sdk, and cannot take the spans of jobs "
            "(%s); Session(..., trace='trace.jsonl') writes them to a file",
            kind.__module__,
            kind.__qualname__,
            error,
        )
        return None
