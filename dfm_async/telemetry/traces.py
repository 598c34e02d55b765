"""The traces of a session's jobs, assembled in the application from its own spans and those of the sites."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Final

from dfm_async.model.events import Scalar
from dfm_async.telemetry.current import Position, current_position, enter_position, read_traceparent
from dfm_async.telemetry.recorder import failure_of
from dfm_async.telemetry.sinks import Sink, SpanBridge, SpanQueue, SpanSource
from dfm_async.telemetry.spans import (
    APPLICATION,
    Made,
    Origin,
    failure_attributes,
    hop_attributes,
    new_span_id,
    new_trace_id,
)

if TYPE_CHECKING:
    from dfm_async.telemetry.otel import Bridge

_UNREPORTED: Final = "its end was not reported"
_UNTRACED: Final[AbstractContextManager[None]] = nullcontext()


class Traces:
    """Decides what is traced, and where it goes. Nothing is, unless there is a sink or an SDK of OpenTelemetry.

    Args:
        sink: where spans go besides the SDK.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._queue = SpanQueue()
        if sink is not None:
            self._queue.sinks.append(sink)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the sink open. What opening it raises, this raises."""
        if self._sink is not None:
            self._sink.open()
        try:
            yield
        finally:
            self._queue.flush()
            if self._sink is not None:
                self._sink.close()

    def add(self, sink: Sink) -> None:
        """Let another sink take spans, too, until it is removed. Once is enough."""
        if sink not in self._queue.sinks:
            self._queue.sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        """Remove a sink."""
        if sink in self._queue.sinks:
            self._queue.sinks.remove(sink)

    def flush(self) -> None:
        """Hand on all spans that have come."""
        self._queue.flush()

    def execution(
        self, start: int, pipeline: str | None, *, resumed: bool = False
    ) -> AbstractContextManager[ApplicationSpan | None]:
        """Begin the span of an execution, if it is to be traced."""
        if not self._queue.sinks and "opentelemetry.trace" not in sys.modules:
            return _UNTRACED
        attributes: dict[str, Scalar] = {"dfm.pipeline": pipeline or ""}
        if resumed:
            attributes["dfm.resumed"] = True
        return self.begin("dfm.execute", start, attributes)

    @contextmanager
    def request(
        self, start: int, attributes: dict[str, Scalar], headers: Mapping[str, str]
    ) -> Iterator[ApplicationSpan | None]:
        """Begin the span of a request, a part of the caller's trace if there is one; or nothing.

        Nothing, too, if there is a span for the request already: the execution belongs to that.
        """
        bridge = _bridge()
        if bridge is not None and bridge.in_span():
            yield None
            return
        with self.begin("dfm.request", start, attributes, headers) as span:
            if span is not None:
                leave: Callable[[], object] = enter_position(span.position)
            elif bridge is not None:
                leave = bridge.enter_unsampled()  # its executions are not traced, either
            else:
                yield None
                return
            try:
                yield span
            finally:
                leave()

    def begin(
        self, name: str, start: int, attributes: dict[str, Scalar], headers: Mapping[str, str] | None = None
    ) -> AbstractContextManager[ApplicationSpan | None]:
        """Begin a span of the application: the first of a trace, or a part of the current one; or nothing.

        Args:
            name: what it is.
            start: when it began.
            attributes: what is known of it.
            headers: the headers of a request, which may name a trace.
        """
        bridge = _bridge()
        if bridge is None and not self._queue.sinks:
            return _UNTRACED
        decided = None if bridge is None else bridge.decide(name, attributes, headers)
        if decided is not None:
            trace_id, parent, attributes = decided
        elif bridge is not None and all(sink is self._sink for sink in self._queue.sinks):
            return _UNTRACED
        else:
            bridge = None  # there is none, or it has not sampled this one, but a sink takes it
            above = current_position()
            if above is None and headers is not None:
                above = read_traceparent(headers.get("traceparent"))
            trace_id, parent = (new_trace_id(), 0) if above is None else (above.trace_id, above.span)
        source = SpanSource(trace_id, parent, APPLICATION, {}, bridge)
        return ApplicationSpan(self._queue, source, name, start, attributes)


def _bridge() -> Bridge | None:
    if "opentelemetry.trace" not in sys.modules:
        return None
    from dfm_async.telemetry.otel import find_bridge  # loads OpenTelemetry

    return find_bridge()


class ApplicationSpan:
    """A span of the application, which ends when it is left.

    Attributes:
        position: where in the trace it is.
    """

    __slots__ = ("_attributes", "_name", "_queue", "_refusal", "_source", "_start", "position")

    def __init__(
        self, queue: SpanQueue, source: SpanSource, name: str, start: int, attributes: dict[str, Scalar]
    ) -> None:
        self._queue = queue
        self._source = source
        self._name = name
        self._start = start
        self._attributes = attributes
        self._refusal: str | None = None
        self.position = Position(source.trace_id, new_span_id())

    def job(self, job_id: str, pipeline: str | None, sites: Sequence[str]) -> JobTrace:
        """Begin the trace of a job; ``sites``: where its locations are."""
        self._attributes["dfm.job"] = job_id
        return JobTrace(self.position, self._queue, self._source.bridge, job_id, pipeline or "", sites)

    def set(self, attributes: dict[str, Scalar]) -> None:
        """Add attributes."""
        self._attributes |= attributes

    def refused(self, why: str, attributes: dict[str, Scalar]) -> None:
        """Record that it was not granted: what is raised then is an answer, and no error of ours."""
        self._refusal = why
        self._attributes |= attributes

    def __enter__(self) -> ApplicationSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        message = self._refusal
        if error is not None and message is None:
            failure = failure_of(error)
            message = ": ".join(filter(None, failure[:2]))
            self._attributes |= failure_attributes(*failure)
        made: Made = (self._name, self.position.span, 0, self._start, time.time_ns(), self._attributes, message)
        self._queue.add(self._source, [made])


class JobTrace:
    """The spans of one job, from its submission to its end. Each run of it has a span at each of its locations.

    Attributes:
        trace_id: the trace that it belongs to.
        span: the id of the job's own span.
    """

    def __init__(
        self,
        parent: Position,
        queue: SpanQueue,
        bridge: SpanBridge | None,
        job_id: str,
        pipeline: str,
        sites: Sequence[str],
    ) -> None:
        self.trace_id = parent.trace_id
        self.span = new_span_id()
        self._bridge = bridge
        self._parent = parent.span
        self._queue = queue
        self._common: dict[str, Scalar] = {"dfm.job": job_id, "dfm.pipeline": pipeline}
        self._sites = sites
        self._sources: dict[int, SpanSource] = {}
        self._start = time.time_ns()
        self._missing: dict[int, tuple[int, int, str]] = {}
        self._runs = 0

    def _source(self, at: int) -> SpanSource:
        """Return what all spans of a location have in common, or of the application (-1)."""
        found = self._sources.get(at)
        if found is None:
            process = APPLICATION if at < 0 else self._sites[at]
            common = self._common if at < 0 else {**self._common, "dfm.site": process}
            found = self._sources[at] = SpanSource(self.trace_id, self.span, process, common, self._bridge)
        return found

    def launch(self) -> list[tuple[str, int, int]]:
        """Begin a run of the job, the first or a further one; return what each location has to know."""
        self._end_missing()
        self._runs += 1
        now = time.time_ns()
        self._missing = {at: (new_span_id(), now, _UNREPORTED) for at in range(len(self._sites))}
        return [(self.trace_id, span, self._runs) for span, _, _ in self._missing.values()]

    def relaunch(self, at: int) -> tuple[str, int, int]:
        """Begin again at one location, whose worker was lost; return what it has to know."""
        self._end_missing(at)
        span = new_span_id()
        self._missing[at] = (span, time.time_ns(), _UNREPORTED)
        return self.trace_id, span, self._runs

    def origin(self) -> Origin:
        """Return the origin of a message that is sent now."""
        return Origin(self.span, time.time_ns(), APPLICATION)

    def arrived(self, origin: Origin, tokens: int, size: int) -> None:
        """Record values that have arrived from a site."""
        attributes = hop_attributes(origin, APPLICATION, tokens, size)
        made: Made = ("dfm.hop", new_span_id(), origin.span, origin.sent, time.time_ns(), attributes, None)
        self._queue.add(self._source(-1), [made])

    def take(self, at: int, spans: bytes, count: int, *, last: bool) -> None:
        """Take the spans that a location has sent; ``last``: no more will come of this run."""
        if last:
            self._missing.pop(at, None)
        self._queue.add(self._source(at), spans, count)

    def lost(self, at: int, why: str) -> None:
        """Record that the worker of a location was lost, with all spans that it has not sent."""
        if at in self._missing:
            span, start, _ = self._missing[at]
            self._missing[at] = (span, start, why)

    def end(self, status: str, error: str | None) -> None:
        """End the job's own span."""
        self._end_missing()
        made: Made = ("dfm.job", self.span, self._parent, self._start, time.time_ns(), {"dfm.status": status}, error)
        self._queue.add(self._source(-1), [made])

    def _end_missing(self, only: int | None = None) -> None:
        """End the spans of locations that have not reported their ends."""
        missing = {at: found for at, found in self._missing.items() if only in (None, at)}
        self._missing = {at: found for at, found in self._missing.items() if at not in missing}
        now = time.time_ns()
        for at, (span, start, why) in missing.items():
            self._queue.add(self._source(at), [("dfm.site", span, 0, start, now, {"dfm.attempt": self._runs}, why)])
