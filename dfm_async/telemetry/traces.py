"""In the application: the traces of a session's jobs, put together from what happens here and what the sites send."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Final

from dfm_async.model.events import Scalar
from dfm_async.telemetry.current import Position, current_position, enter_position
from dfm_async.telemetry.queue import SpanQueue, SpanSource
from dfm_async.telemetry.sinks import Sink
from dfm_async.telemetry.spans import APPLICATION, Made, Origin, failure_attributes, new_span_id, new_trace_id
from dfm_async.telemetry.traceparent import read_traceparent
from dfm_async.telemetry.user_spans import failure_of

if TYPE_CHECKING:
    from dfm_async.telemetry.otel import Bridge

__all__ = ["ApplicationSpan", "JobTrace", "Traces"]

_UNTOLD: Final = "its end was not told"
_UNTRACED: Final[AbstractContextManager[None]] = nullcontext()


class Traces:
    """Decides what is traced, and where it goes. Nothing is, unless there is a sink or an SDK of OpenTelemetry.

    Args:
        sink: where spans go besides the SDK.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._queue = SpanQueue()
        self._sinks: Sequence[Sink] = () if sink is None else (sink,)
        self._bridge: Bridge | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keeps the sink open. What opening it raises, this raises."""
        if self._sink is not None:
            self._sink.open()
        try:
            yield
        finally:
            self._queue.flush()
            if self._sink is not None:
                self._sink.close()

    def execution(
        self, start: int, pipeline: str | None, *, resumed: bool = False
    ) -> AbstractContextManager[ApplicationSpan | None]:
        """Begins the span of an execution, if it is to be traced."""
        if not self._sinks and self._bridge is None and "opentelemetry.trace" not in sys.modules:
            return _UNTRACED
        attributes: dict[str, Scalar] = {"dfm.pipeline": pipeline or ""}
        if resumed:
            attributes["dfm.resumed"] = True
        return self.begin("dfm.execute", start, attributes)

    @contextmanager
    def request(
        self, start: int, attributes: dict[str, Scalar], headers: Mapping[str, str]
    ) -> Iterator[ApplicationSpan | None]:
        """Begins the span of a request, a part of the caller's trace if there is one; or nothing.

        Nothing, too, if somebody else has made a span for the request already: what is executed belongs to that.
        """
        bridge = _bridge()
        if bridge is not None and bridge.in_span():
            yield None
            return
        with self.begin("dfm.request", start, attributes, headers) as span:
            if span is not None:
                leave = enter_position(span.position)
            elif bridge is not None:
                leave = bridge.enter_unwanted()  # what it executes is not traced, either
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
        """Begins a span of the application: the first of a trace, or a part of the current one; or nothing.

        Args:
            name: what it is.
            start: when it began.
            attributes: what is known of it.
            headers: of a request, which may tell a trace that it is a part of.
        """
        bridge = _bridge()
        if bridge is not self._bridge:
            self._bridge = bridge
            self._sinks = tuple(sink for sink in (bridge, self._sink) if sink is not None)
        if not self._sinks:
            return _UNTRACED
        parent = current_position()
        if parent is None and headers is not None:
            parent = read_traceparent(headers.get("traceparent"))
        trace_id = new_trace_id() if parent is None else parent.trace_id
        if bridge is not None:
            decided = bridge.decide(name, attributes, headers)
            if decided is None:
                return _UNTRACED
            trace_id, parent, attributes = decided
        source = SpanSource(trace_id, None if parent is None else parent.span, APPLICATION, attributes, self._sinks)
        return ApplicationSpan(self._queue, source, name, Position(trace_id, new_span_id()), start)


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

    def __init__(self, queue: SpanQueue, source: SpanSource, name: str, position: Position, start: int) -> None:
        self._queue = queue
        self._source = source
        self._name = name
        self._start = start
        self._attributes: dict[str, Scalar] = {}
        self._refusal: str | None = None
        self.position = position

    def job(self, job_id: str, pipeline: str | None, sites: Sequence[str]) -> JobTrace:
        """Begins the trace of a job; ``sites``: where its locations are."""
        self._attributes["dfm.job"] = job_id
        return JobTrace(self.position, self._queue, self._source.sinks, job_id, pipeline or "", sites)

    def set(self, attributes: dict[str, Scalar]) -> None:
        """Adds attributes."""
        self._attributes |= attributes

    def refused(self, why: str, attributes: dict[str, Scalar]) -> None:
        """Notes that it was not granted: what is raised then is an answer, and no error of ours."""
        self._refusal = why
        self._attributes |= attributes

    def __enter__(self) -> ApplicationSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        said = self._refusal
        if error is not None and said is None:
            failure = failure_of(error)
            said = ": ".join(filter(None, failure[:2]))
            self._attributes |= failure_attributes(*failure)
        made: Made = (self._name, self.position.span, 0, self._start, time.time_ns(), self._attributes, said)
        self._queue.add(self._source, [made])


class JobTrace:
    """The spans of one job, from its submission to its end. Each run of it has a span at each of its locations.

    Attributes:
        trace_id: the trace that it belongs to.
        span: the id of the job's own span.
    """

    __slots__ = ("_here", "_missing", "_parent", "_queue", "_runs", "_start", "_there", "span", "trace_id")

    def __init__(
        self,
        parent: Position,
        queue: SpanQueue,
        sinks: Sequence[Sink],
        job_id: str,
        pipeline: str,
        sites: Sequence[str],
    ) -> None:
        self.trace_id = trace_id = parent.trace_id
        self.span = new_span_id()
        self._parent = parent.span
        self._queue = queue
        said: dict[str, Scalar] = {"dfm.job": job_id, "dfm.pipeline": pipeline}
        self._here = SpanSource(trace_id, self.span, APPLICATION, said, sinks)
        self._there = [SpanSource(trace_id, self.span, site, {**said, "dfm.site": site}, sinks) for site in sites]
        self._start = time.time_ns()
        self._missing: dict[int, tuple[int, int, str]] = {}
        self._runs = 0

    def launch(self) -> list[int]:
        """The job runs, for the first time or again; gives the id of each location's span."""
        self._give_up()
        self._runs += 1
        now = time.time_ns()
        self._missing = {at: (new_span_id(), now, _UNTOLD) for at in range(len(self._there))}
        return [span for span, _, _ in self._missing.values()]

    def origin(self) -> Origin:
        """What a message tells that is sent now."""
        return Origin(self.span, time.time_ns(), APPLICATION)

    def arrived(self, origin: Origin, tokens: int, size: int) -> None:
        """Values have come from a site."""
        attributes: dict[str, Scalar] = {
            "dfm.from": origin.process,
            "dfm.to": APPLICATION,
            "dfm.tokens": tokens,
            "dfm.bytes": size,
        }
        made: Made = ("dfm.hop", new_span_id(), origin.span, origin.sent, time.time_ns(), attributes, None)
        self._queue.add(self._here, [made])

    def take(self, at: int, spans: list[Made]) -> bool:
        """Takes the spans that a location has sent; tells whether others will come."""
        last = spans[-1]
        if last[0] == "dfm.site":  # it ends the run there
            self._missing.pop(at, None)
            last[5]["dfm.attempt"] = self._runs
        self._queue.add(self._there[at], spans)
        return at in self._missing

    def lost(self, at: int, why: str) -> None:
        """The worker of a location has ended, with all that it has not sent."""
        if at in self._missing:
            span, start, _ = self._missing[at]
            self._missing[at] = (span, start, why)

    def end(self, status: str, error: str | None) -> None:
        """The job has ended."""
        self._give_up()
        made: Made = ("dfm.job", self.span, self._parent, self._start, time.time_ns(), {"dfm.status": status}, error)
        self._queue.add(self._here, [made])

    def _give_up(self) -> None:
        """Ends the spans of locations that have not told of their ends."""
        missing, self._missing = self._missing, {}
        now = time.time_ns()
        for at, (span, start, why) in missing.items():
            self._queue.add(self._there[at], [("dfm.site", span, 0, start, now, {"dfm.attempt": self._runs}, why)])
