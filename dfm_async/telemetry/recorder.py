"""At a site: gathers the spans of one job at one location, until they are sent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.telemetry.current import Position
from dfm_async.telemetry.spans import Made, Origin, failure_attributes, frame_text, new_span_id

__all__ = ["Failure", "Recorder", "TracedCall"]

_BATCH: Final = 256
"""So many spans that wait are sent without waiting for anything else."""
_LIMIT: Final = 8192
"""How many spans may wait here, or be on their way and not taken. Further ones are counted and left out."""

_SHORTEST_WAIT: Final = 0.001
"""From how many seconds on it is noted that a call has waited."""

Failure = tuple[str, str, str]
"""What went wrong: the kind of the error, its message, its traceback."""


class OpenSpan(Protocol):
    """A span that has not ended."""

    def end(self, failure: Failure | None) -> None:
        """Ends it; what comes after the first time does not count."""
        ...


class TracedCall:
    """One attempt of a call, while it runs. ``span`` is the id of its span."""

    __slots__ = ("_attributes", "_end", "_start", "recorder", "span")

    def __init__(self, recorder: Recorder, span: int, attributes: dict[str, Scalar]) -> None:
        self.recorder = recorder
        self.span = span
        self._attributes = attributes
        self._start = time.time_ns()
        self._end: int | None = None

    def given(self, provider: str | None, size: int | None) -> None:
        """Notes what it was called with: of whom, and how many bytes."""
        if provider is not None:
            self._attributes["dfm.provider"] = provider
        if size is not None:
            self._attributes["dfm.bytes_in"] = size
        self._start = time.time_ns()  # that took time of its own

    def started(self) -> None:
        """Notes that it has got what it waited for, such as a thread; its span begins now."""
        now = time.time_ns()
        waited = (now - self._start) / 1e9
        if waited >= _SHORTEST_WAIT:
            self._attributes["dfm.waited"] = round(waited, 6)
        self._start = now

    def returned(self, size: Callable[[], int | None]) -> None:
        """Notes how many bytes it has returned; finding that out does not count."""
        self._end = time.time_ns()
        found = size()
        if found is not None:
            self._attributes["dfm.bytes_out"] = found

    @property
    def position(self) -> Position:
        """Where its code is."""
        return Position(self.recorder.trace_id, self.span, self.span)

    def end(self, failure: Failure | None) -> None:
        """It has returned or raised; what comes after the first time does not count."""
        recorder = self.recorder
        if recorder.open.pop(self.span, None) is not None:
            recorder.add("dfm.operation", self.span, recorder.span, self._start, self._attributes, failure, self._end)


class Recorder:
    """Gathers spans. They may be added by any thread; all else happens on the loop.

    Args:
        site: the site.
        trace_id: the trace of the job.
        span: the id of the location's own span, ``dfm.site``; the parent of calls.
        run: which run of the job this is.
        on_batch: is called, in whatever thread, when a batch waits to be sent.

    Attributes:
        open: the spans that have not ended, by their ids.
    """

    __slots__ = (
        "_asked",
        "_left_out",
        "_lock",
        "_on_batch",
        "_on_the_way",
        "_run",
        "_started",
        "_waiting",
        "open",
        "site",
        "span",
        "trace_id",
    )

    def __init__(self, site: str, trace_id: str, span: int, run: int, on_batch: Callable[[], None]) -> None:
        self.trace_id = trace_id
        self.span = span
        self.site = site
        self.open: dict[int, OpenSpan] = {}
        self._run = run
        self._on_batch = on_batch
        self._started = time.time_ns()
        self._waiting: deque[Made] = deque()
        self._asked = False
        self._on_the_way = 0
        self._left_out = 0
        self._lock = threading.Lock()

    # what happens

    def add(
        self,
        name: str,
        span: int,
        parent: int,
        start: int,
        attributes: dict[str, Scalar],
        failure: Failure | None = None,
        end: int | None = None,
    ) -> None:
        """Takes a span that ends now, or has ended before."""
        waiting = self._waiting
        if len(waiting) + self._on_the_way >= _LIMIT:
            with self._lock:
                self._left_out += 1
            return
        error = None
        if failure is not None:
            error = ": ".join(filter(None, failure[:2]))
            attributes = {**attributes, **failure_attributes(*failure)}
        waiting.append((name, span, parent, start, end or time.time_ns(), attributes, error))
        if len(waiting) >= _BATCH and not self._asked:
            self._asked = True
            self._on_batch()

    def begin_call(self, operation: str, node: str, frame: Frame, attempt: int) -> TracedCall:
        """An attempt of a call begins."""
        attributes: dict[str, Scalar] = {
            "dfm.operation": operation,
            "dfm.node": node,
            "dfm.frame": frame_text(frame),
            "dfm.attempt": attempt,
        }
        span = new_span_id()
        call = self.open[span] = TracedCall(self, span, attributes)
        return call

    def arrived(self, origin: Origin, tokens: int, size: int) -> None:
        """Values have come from another location, or from the application."""
        attributes: dict[str, Scalar] = {
            "dfm.from": origin.process,
            "dfm.to": self.site,
            "dfm.tokens": tokens,
            "dfm.bytes": size,
        }
        self.add("dfm.hop", new_span_id(), origin.span, origin.sent, attributes)

    def origin(self) -> Origin:
        """What a message tells that is sent now."""
        return Origin(self.span, time.time_ns(), self.site)

    # sending

    @property
    def full(self) -> bool:
        """Whether so many wait that they should be sent."""
        return len(self._waiting) >= _BATCH

    def take(self) -> list[Made]:
        """Gives the spans that wait; they are on their way until they were :meth:`taken`."""
        waiting = self._waiting
        self._asked = False
        found = [waiting.popleft() for _ in range(len(waiting))]
        self._on_the_way += len(found)
        return found

    def taken(self, count: int) -> None:
        """The application has taken spans: there is room for others."""
        self._on_the_way -= count

    def end(self, cut_short: str | None) -> list[Made]:
        """The job has ended here: gives what waits, and the location's own span.

        Args:
            cut_short: what to say of spans that have not ended; None if that is well, as of generators that nobody
                reads to their ends.
        """
        self._on_batch = _nobody
        for span in list(self.open.values()):
            span.end(None if cut_short is None else ("Cancelled", cut_short, ""))
        found = self.take()
        attributes: dict[str, Scalar] = {"dfm.attempt": self._run}
        if self._left_out:
            attributes["dfm.spans_left_out"] = self._left_out
        found.append(("dfm.site", self.span, 0, self._started, time.time_ns(), attributes, cut_short))
        return found


def _nobody() -> None:
    """Whoever sent the spans does so no more."""
