"""Collects the spans of one job at one location of a site: of calls, and those that users' code opens."""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol

from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.model.scalars import plain_text, plain_values
from dfm_async.telemetry.current import Position, current_position, enter_position
from dfm_async.telemetry.sampling import CallStacks
from dfm_async.telemetry.spans import (
    Made,
    Origin,
    decode_made,
    failure_attributes,
    frame_text,
    hop_attributes,
    new_span_id,
)

_BATCH: Final = 256
"""The number of waiting spans that are sent at once."""
_LIMIT: Final = 8192
"""The most spans that may wait or be in flight. Further ones are counted and dropped."""

_SHORTEST_WAIT: Final = 0.001
"""The least number of seconds of waiting that is recorded."""
_LONGEST: Final = 4096
"""The most characters of a text that are kept."""
_LONGEST_TRACEBACK: Final = 16 * 1024

Failure = tuple[str, str, str]
"""The type of an error, its message, its traceback."""


class TracedCall:
    """One attempt of a call, while it runs. ``span`` is the id of its span."""

    __slots__ = ("_attributes", "_end", "_queued", "_start", "recorder", "span", "stacks")

    def __init__(self, recorder: Recorder, span: int, attributes: dict[str, Scalar]) -> None:
        self.recorder = recorder
        self.span = span
        self.stacks = CallStacks() if recorder.sampled else None
        """The samples of the call, if it is sampled."""
        self._attributes = attributes
        self._queued = self._start = time.time_ns()
        self._end: int | None = None

    def given(self, provider: str | None, size: int | None) -> None:
        """Record the provider and the size of its arguments."""
        if provider is not None:
            self._attributes["dfm.provider"] = provider
        if size is not None:
            self._attributes["dfm.bytes_in"] = size
        self._queued = self._start = time.time_ns()  # that took time of its own

    def started(self) -> None:
        """Record that the wait, such as for a thread, is over; its span begins now."""
        self._began(time.time_ns())

    def granted(self, waited_for: str) -> None:
        """Record that the limits of the site let it start, and which of them it had to wait for."""
        if waited_for:
            self._attributes["dfm.wait.for"] = waited_for
        self._began(time.time_ns())

    def _began(self, start: int) -> None:
        waited = (start - self._queued) / 1e9
        if waited >= _SHORTEST_WAIT:
            self._attributes["dfm.waited"] = round(waited, 6)
        self._start = start

    def ran(self, start: float, seconds: float, worker: int, stacks: str) -> None:
        """Record when it ran in another process: since when, in seconds since 1970, for how long; and its samples."""
        self._began(int(start * 1e9))
        self._attributes["dfm.worker"] = worker
        if stacks:
            self._attributes["dfm.stacks"] = stacks
        self._end = self._start + int(seconds * 1e9)

    def returned(self, size: Callable[[], int | None]) -> None:
        """Record the size of its result; the time to find that out does not count."""
        self._end = self._end or time.time_ns()
        found = size()
        if found is not None:
            self._attributes["dfm.bytes_out"] = found

    @property
    def position(self) -> Position:
        """Where its code is."""
        return Position(self.recorder.trace_id, self.span, self.span)

    def end(self, failure: Failure | None) -> None:
        """Record that it has returned or raised; only the first call counts."""
        recorder = self.recorder
        if recorder.open.pop(self.span, None) is not None:
            if self.stacks is not None:
                self._attributes.setdefault("dfm.worker", os.getpid())
                if text := self.stacks.text():
                    self._attributes["dfm.stacks"] = text
            recorder.add("dfm.operation", self.span, recorder.span, self._start, self._attributes, failure, self._end)


class Recorder:
    """Collects spans. They may be added by any thread; all else happens on the loop.

    Args:
        site: the site.
        trace_id: the trace of the job.
        span: the id of the location's own span, ``dfm.site``; the parent of calls.
        run: which run of the job this is.
        on_batch: is called, in whatever thread, when a batch waits to be sent.
        sampled: whether calls are sampled.

    Attributes:
        open: the spans that have not ended, by their ids.
    """

    def __init__(
        self, site: str, trace_id: str, span: int, run: int, on_batch: Callable[[], None], *, sampled: bool = False
    ) -> None:
        self.trace_id = trace_id
        self.sampled = sampled
        self.span = span
        self.site = site
        self.open: dict[int, TracedCall | RecordedSpan] = {}
        self._run = run
        self._on_batch = on_batch
        self._started = time.time_ns()
        self._waiting: deque[Made] = deque()
        self._asked = False
        self._in_flight = 0
        self._left_out = 0
        self._lock = threading.Lock()

    # recording

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
        """Take a span that ends now, or has ended before."""
        waiting = self._waiting
        if len(waiting) + self._in_flight >= _LIMIT:
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

    def adopt(self, spans: bytes) -> None:
        """Take spans that a call has made in another process."""
        for made in decode_made(spans):
            if len(self._waiting) + self._in_flight >= _LIMIT:
                with self._lock:
                    self._left_out += 1
            else:
                self._waiting.append(made)

    def begin_call(self, operation: str, node: str, frame: Frame, attempt: int) -> TracedCall:
        """Begin the span of an attempt of a call."""
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
        """Record values that have arrived from another location, or from the application."""
        attributes = hop_attributes(origin, self.site, tokens, size)
        self.add("dfm.hop", new_span_id(), origin.span, origin.sent, attributes)

    def origin(self) -> Origin:
        """Return the origin of a message that is sent now."""
        return Origin(self.span, time.time_ns(), self.site)

    # sending

    @property
    def full(self) -> bool:
        """Whether enough spans wait to be sent."""
        return len(self._waiting) >= _BATCH

    def take(self) -> list[Made]:
        """Return the waiting spans; they are in flight until they are :meth:`taken`."""
        waiting = self._waiting
        self._asked = False
        found = [waiting.popleft() for _ in range(len(waiting))]
        self._in_flight += len(found)
        return found

    def taken(self, count: int) -> None:
        """Record that the application has taken spans: there is room for others."""
        self._in_flight -= count

    def end(self, cut_short: str | None) -> list[Made]:
        """Return the waiting spans and the location's own span: the job has ended here.

        Args:
            cut_short: the error of spans that have not ended; None if that is no error, as with generators that are not
                read to their ends.
        """
        self._on_batch = lambda: None  # spans are not sent any longer
        for span in list(self.open.values()):
            span.end(None if cut_short is None else ("Cancelled", cut_short, ""))
        found = self.take()
        attributes: dict[str, Scalar] = {"dfm.attempt": self._run}
        if self._left_out:
            attributes["dfm.spans_left_out"] = self._left_out
        found.append(("dfm.site", self.span, 0, self._started, time.time_ns(), attributes, cut_short))
        return found


# spans of users


class UserSpan(Protocol):
    """The result of ``context.span(...)``. It lasts as long as its ``with`` block."""

    def set(self, **attributes: Any) -> None:
        """Add attributes, such as those that are known only at the end.

        Raises:
            TypeError: a value is not a number, a string or a truth value.
            ValueError: a whole number needs more than 64 bits.
        """
        ...

    def __enter__(self) -> UserSpan: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class RecordedSpan:
    """A span of a job that is traced.

    Args:
        call: the enclosing call.
        name: its name.
        attributes: its attributes.
    """

    __slots__ = ("_attributes", "_call", "_leave", "_name", "_parent", "_span", "_start")

    def __init__(self, call: TracedCall, name: str, attributes: Mapping[str, Any]) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a span must be a string that is not empty, not {name!r}")
        self._call = call
        self._name = _short(name)
        self._attributes = _written(attributes)
        self._span = self._parent = self._start = 0
        self._leave: Callable[[], None] | None = None

    def set(self, **attributes: Any) -> None:
        """Add attributes."""
        self._attributes.update(_written(attributes))

    def __enter__(self) -> RecordedSpan:
        if self._span:
            raise RuntimeError(f"the span {self._name!r} was opened before; call context.span(...) for each span")
        call, at = self._call, current_position()
        # A thread that the user started, or code that another call drives, has no current position.
        self._parent = at.span if at is not None and at.call == call.span else call.span
        self._span = new_span_id()
        self._leave = enter_position(Position(call.recorder.trace_id, self._span, call.span))
        self._start = time.time_ns()
        call.recorder.open[self._span] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._leave is None:
            return
        self._leave()
        self._leave = None
        # A generator that is not read to its end has not failed.
        self.end(None if error is None or isinstance(error, GeneratorExit) else failure_of(error))

    def end(self, failure: Failure | None) -> None:
        """Record its end: when it is left, or before that when the job has ended."""
        recorder = self._call.recorder
        if recorder.open.pop(self._span, None) is not None:
            recorder.add(self._name, self._span, self._parent, self._start, self._attributes, failure)


class _NoSpan:
    __slots__ = ()

    def set(self, **attributes: Any) -> None:
        """Do nothing."""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


NO_SPAN: Final[UserSpan] = _NoSpan()
"""The result of ``context.span(...)`` in a job that is not traced."""


def failure_of(error: BaseException) -> Failure:
    """Describe an error for a span."""
    try:
        message, text = str(error), "".join(traceback.format_exception(error))
    except Exception as problem:  # noqa: BLE001 - str() of a user's exception can do anything
        message, text = f"(no message: str() raised {type(problem).__name__})", ""
    return type(error).__qualname__, _short(message), plain_text(text)[-_LONGEST_TRACEBACK:]


def _written(attributes: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return attributes that fit into JSON, and are not too long."""
    found = plain_values(attributes, "attribute")
    for name, value in found.items():
        if type(value) is str:
            found[name] = _short(value)
        elif type(value) is float and not math.isfinite(value):
            found[name] = str(value)
    return found


def _short(text: str) -> str:
    return plain_text(text)[:_LONGEST]  # cut last: half a secret is one, too
