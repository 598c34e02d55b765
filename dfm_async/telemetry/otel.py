"""Spans in OpenTelemetry. This module is loaded only in processes that have loaded OpenTelemetry already."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import context, propagate, trace
from opentelemetry.trace import NonRecordingSpan, ProxyTracerProvider, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from dfm_async.model.events import Scalar
from dfm_async.telemetry.sinks import SpanSource
from dfm_async.telemetry.spans import Made, Span, new_span_id

_log = logging.getLogger(__name__)

_SCOPE: Final = "dfm_async"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def enter_span(trace_id: str, span: int) -> Callable[[], object]:
    """Make a span the current one for users of OpenTelemetry; return a function that restores the previous one."""
    return _enter(SpanContext(int(trace_id, 16), span, is_remote=True, trace_flags=_SAMPLED))


def _enter(place: SpanContext) -> Callable[[], object]:
    before = context.get_current()
    context.attach(trace.set_span_in_context(NonRecordingSpan(place), before))
    # Attached again instead of detached: a generator can be entered in one task and left in another.
    return lambda: context.attach(before)


class Bridge:
    """Passes spans to the SDK that the user has set up. Spans of sites keep their ids.

    Spans that the SDK makes get other ids, and cost more. So the user's sampler is called at the beginning, and
    finished spans go to the provider's span processors, as the SDK does it.
    """

    def __init__(self, provider: Any) -> None:
        self._sampler = provider.sampler
        self._new_trace_id = provider.id_generator.generate_trace_id
        self._on_end = provider._active_span_processor.on_end  # noqa: SLF001 - there is no public access
        self._made = _span_type(provider.resource)

    def in_span(self) -> bool:
        """Return whether the running code belongs to a span."""
        return bool(trace.get_current_span().get_span_context().is_valid)

    def decide(
        self, name: str, attributes: dict[str, Scalar], headers: Mapping[str, str] | None
    ) -> tuple[str, int, dict[str, Scalar]] | None:
        """Let the user's sampler decide whether to trace the work that begins now, below the current span.

        Args:
            name: the name of the span.
            attributes: its attributes.
            headers: the headers of a request, which the user's propagator reads.

        Returns:
            The trace, the parent (0 without one), and the attributes of the sampler; None for no trace.
        """
        here = context.get_current() if headers is None else propagate.extract(headers)
        kind = SpanKind.INTERNAL if headers is None else SpanKind.SERVER
        parent = trace.get_current_span(here).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._new_trace_id()
        sampled = self._sampler.should_sample(here, trace_id, name, kind, attributes, ())
        if not sampled.decision.is_sampled():
            return None
        return f"{trace_id:032x}", parent.span_id, {**attributes, **sampled.attributes}

    def enter_unsampled(self) -> Callable[[], object]:
        """Make a span the current one that is not sampled; return a function that restores the previous one."""
        return _enter(SpanContext(self._new_trace_id(), new_span_id(), is_remote=False))

    def end(self, source: SpanSource, spans: Sequence[Made]) -> None:
        """Pass spans that have ended to the span processors."""
        trace_id, on_end, made_of = int(source.trace_id, 16), self._on_end, self._made
        for made in spans:
            place = SpanContext(trace_id, made[1], is_remote=False, trace_flags=_SAMPLED)
            on_end(made_of(place, source, made))


def _span_type(resource: Any) -> Callable[[SpanContext, SpanSource, Made], Any]:
    """Return the SDK's type of spans, filled from ours on first access: usually by the thread that exports them."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    scope = InstrumentationScope(_SCOPE)

    class SiteSpan(ReadableSpan):
        def __init__(self, place: SpanContext, source: SpanSource, made: Made) -> None:
            self._context = place
            self._source = source
            self._span = made

        def __getattr__(self, name: str) -> Any:
            if name not in _FILLED:
                raise AttributeError(name)
            self._fill(self._source.span(self._span))
            return self.__dict__[name]

        def _fill(self, span: Span) -> None:
            parent = None
            if span.parent_id is not None:
                parent = SpanContext(int(span.trace_id, 16), int(span.parent_id, 16), False, _SAMPLED)
            attributes = span.attributes
            status, events = Status(StatusCode.UNSET), []
            if span.status == "error":
                status = Status(StatusCode.ERROR, span.message)
                exception = {name: value for name, value in attributes.items() if name.startswith("exception.")}
                attributes = {name: value for name, value in attributes.items() if name not in exception}
                events = [Event("exception", exception, timestamp=span.end)] if exception else []
            super().__init__(
                span.name,
                context=self._context,
                parent=parent,
                resource=resource,
                attributes=attributes,
                events=events,
                kind=SpanKind.SERVER if span.name == "dfm.request" else SpanKind.INTERNAL,
                status=status,
                start_time=span.start,
                end_time=span.end,
                instrumentation_scope=scope,
            )

    _FILLED = frozenset(vars(ReadableSpan("", resource=resource))) - {"_context"}
    return SiteSpan


class _Known:
    """The provider that was seen last, and the bridge to it."""

    provider: Any = None
    bridge: Bridge | None = None


def find_bridge() -> Bridge | None:
    """Return the bridge to the SDK that is set up in this process, if one is."""
    provider = trace.get_tracer_provider()
    if provider is not _Known.provider:
        _Known.provider, _Known.bridge = provider, _bridge_to(provider)
    return _Known.bridge


def _bridge_to(provider: Any) -> Bridge | None:
    if isinstance(provider, (ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        return Bridge(provider)
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
