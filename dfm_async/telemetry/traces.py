"""In the application: the traces of a session's jobs, put together from what happens here and what the sites send."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Final

from dfm_async.model.events import Scalar
from dfm_async.telemetry.current import Position, current_position
from dfm_async.telemetry.sinks import Sink
from dfm_async.telemetry.spans import APPLICATION, Made, Origin, Span, SpanIds, new_trace_id, span_text

if TYPE_CHECKING:
    from dfm_async.telemetry.otel import Bridge, StartedSpan

__all__ = ["Execution", "JobTrace", "Traces"]

_UNTOLD: Final = "its end was not told"
_UNTRACED: Final[AbstractContextManager[None]] = nullcontext()


class Traces:
    """Decides what is traced, and where it goes. Nothing is, unless there is a sink or an SDK of OpenTelemetry.

    Args:
        sink: where spans go besides.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keeps the sink open. What opening it raises, this raises."""
        if self._sink is not None:
            self._sink.open()
        try:
            yield
        finally:
            if self._sink is not None:
                self._sink.close()

    def begin(self, start: int, pipeline: str | None, **attributes: Scalar) -> AbstractContextManager[Execution | None]:
        """Begins the span of an execution, the first of a trace or a part of the current one; or nothing."""
        bridge = _bridge()
        if bridge is None and self._sink is None:
            return _UNTRACED
        told = {"dfm.pipeline": pipeline or "", **attributes}
        sinks: list[Sink] = [] if self._sink is None else [self._sink]
        if bridge is None:
            return Execution("dfm.execute", start, told, sinks, current_position())
        started = bridge.start("dfm.execute", told, start)
        if started is None:
            return _UNTRACED  # the user's sampler does not want it
        return Execution("dfm.execute", start, told, [bridge, *sinks], None, started)


def _bridge() -> Bridge | None:
    if "opentelemetry.trace" not in sys.modules:
        return None
    from dfm_async.telemetry.otel import find_bridge  # loads OpenTelemetry

    return find_bridge()


class Execution:
    """A span of the application that is under way. It can be entered, which ends it.

    Attributes:
        position: where in the trace it is.
    """

    def __init__(
        self,
        name: str,
        start: int,
        attributes: dict[str, Scalar],
        sinks: list[Sink],
        parent: Position | None,
        started: StartedSpan | None = None,
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._sinks = sinks
        self._started = started
        self._start = start
        self._parent: str | None
        if started is not None:
            self.position = started.position
            self._parent = started.parent_id
        else:
            trace_id = new_trace_id() if parent is None else parent.trace_id
            self.position = Position(trace_id, SpanIds().take())
            self._parent = None if parent is None else span_text(parent.span)

    def job(self, job_id: str, sites: Sequence[str]) -> JobTrace:
        """Begins the trace of a job; ``sites``: where its locations are."""
        self._attributes["dfm.job"] = job_id
        if self._started is not None:
            self._started.set("dfm.job", job_id)
        return JobTrace(self.position, self._sinks, dict(self._attributes), sites)

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        message = None if error is None else f"{type(error).__qualname__}: {error}"
        if self._started is not None:
            self._started.end(error, message)
        span = Span(
            name=self._name,
            trace_id=self.position.trace_id,
            span_id=span_text(self.position.span),
            parent_id=self._parent,
            start=self._start,
            end=time.time_ns(),
            process=APPLICATION,
            attributes=self._attributes,
            status="ok" if message is None else "error",
            message=message or "",
        )
        for sink in self._sinks if self._started is None else self._sinks[1:]:  # the first made this one itself
            sink.write([span])
            if error is not None:
                sink.flush()


class JobTrace:
    """The spans of one job, from its submission to its end. Each run of it has a span at each of its locations."""

    __slots__ = (
        "_attributes",
        "_attributes_at",
        "_ids",
        "_missing",
        "_parent",
        "_runs",
        "_sinks",
        "_sites",
        "_start",
        "span",
        "trace_id",
    )

    def __init__(
        self, parent: Position, sinks: Sequence[Sink], attributes: dict[str, Scalar], sites: Sequence[str]
    ) -> None:
        self.trace_id = parent.trace_id
        self._ids = SpanIds()
        self.span = self._ids.take()
        self._parent = span_text(parent.span)
        self._sinks = sinks
        self._sites = sites
        self._attributes = attributes
        self._attributes_at = [{**self._attributes, "dfm.site": site} for site in sites]
        self._start = time.time_ns()
        self._missing: dict[int, tuple[int, int, str]] = {}
        self._runs = 0

    def launch(self) -> list[int]:
        """The job runs, for the first time or again; gives the id of each location's span."""
        self._give_up()
        self._runs += 1
        now = time.time_ns()
        self._missing = {at: (self._ids.take(), now, _UNTOLD) for at in range(len(self._sites))}
        return [self._missing[at][0] for at in range(len(self._sites))]

    def origin(self) -> Origin:
        """What a message tells that is sent now."""
        return Origin(self.span, time.time_ns(), APPLICATION)

    def arrived(self, origin: Origin, tokens: int, size: int) -> None:
        """Values have come from a site."""
        attributes: dict[str, Scalar] = {
            **self._attributes,
            "dfm.from": origin.process,
            "dfm.to": APPLICATION,
            "dfm.tokens": tokens,
            "dfm.bytes": size,
        }
        made: Made = ("dfm.hop", self._ids.take(), origin.span, origin.sent, time.time_ns(), attributes, None)
        self._write([self._span(made, APPLICATION)])

    def take(self, at: int, spans: list[Made]) -> None:
        """Takes the spans that a location has sent."""
        site, more = self._sites[at], self._attributes_at[at]
        for made in spans:
            if made[0] == "dfm.site":
                self._missing.pop(at, None)
                made[5]["dfm.attempt"] = self._runs
            made[5].update(more)
        self._write([self._span(made, site) for made in spans])

    def lost(self, at: int, why: str) -> None:
        """The worker of a location has ended, with all that it has not sent."""
        if at in self._missing:
            span, start, _ = self._missing[at]
            self._missing[at] = (span, start, why)

    def end(self, status: str, error: str | None) -> None:
        """The job has ended."""
        self._give_up()
        attributes = {**self._attributes, "dfm.status": status}
        made: Made = ("dfm.job", self.span, 0, self._start, time.time_ns(), attributes, error)
        self._write([self._span(made, APPLICATION, self._parent)])
        for sink in self._sinks:
            sink.flush()

    def _give_up(self) -> None:
        """Writes the spans of locations that have not told of their end."""
        missing, self._missing = self._missing, {}
        now = time.time_ns()
        for at, (span, start, why) in missing.items():
            attributes = {**self._attributes_at[at], "dfm.attempt": self._runs}
            made: Made = ("dfm.site", span, 0, start, now, attributes, why)
            self._write([self._span(made, self._sites[at])])

    def _span(self, made: Made, process: str, parent_id: str | None = None) -> Span:
        name, span, parent, start, end, attributes, error = made
        return Span(
            name=name,
            trace_id=self.trace_id,
            span_id=span_text(span),
            parent_id=parent_id or span_text(parent or self.span),
            start=start,
            end=end,
            process=process,
            attributes=attributes,
            status="ok" if error is None else "error",
            message=error or "",
        )

    def _write(self, spans: list[Span]) -> None:
        for sink in self._sinks:
            sink.write(spans)
