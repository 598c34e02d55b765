"""Sinks of spans, and the queue of the application that delivers spans to them.

Jobs come first: spans are queued as they arrive, and are decoded and delivered in batches a moment later.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from dfm_async.model.events import Scalar
from dfm_async.telemetry.spans import Made, Span, decode_made, encode_spans, span_text

_log = logging.getLogger(__name__)

_PAUSE: Final = 0.1
"""The number of seconds that spans wait for others."""
_AT_ONCE: Final = 64
"""The number of spans that are delivered in one turn of the loop, so that other tasks run."""
_LIMIT: Final = 16_384
"""The most spans that wait; all are delivered at once then."""


@runtime_checkable
class Sink(Protocol):
    """Takes the spans of a session. All methods are called on its loop, and must neither wait nor raise."""

    def open(self) -> None:
        """Begin a session. Errors are raised by the session's ``connect``."""
        ...

    def write(self, spans: list[Span]) -> None:
        """Take spans that have ended, some at a time."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class FileSink:
    """Appends spans to a file, one JSON object per line; ``read_trace`` reads them back.

    Several processes may write to one file: each writes whole lines. The loop waits for the file, a few hundred lines
    at a time; so it should be on a disk of this machine. Only its owner may read a file that it makes. If it cannot be
    written any longer, that is logged once, and jobs go on without it.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._file: int | None = None

    def open(self) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be written.
            RuntimeError: it is open already.
        """
        if self._file is not None:
            raise RuntimeError(f"the sink for {self.path} is already open; give each session its own sink, or the path")
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = file
        end = os.fstat(file).st_size
        if end and os.pread(file, 1, end - 1) != b"\n":
            self._append(b"\n")  # an earlier writer was killed in the middle of a line

    def write(self, spans: list[Span]) -> None:
        """Write spans."""
        if self._file is not None:
            self._append(encode_spans(spans))

    def _append(self, data: bytes) -> None:
        assert self._file is not None  # noqa: S101 - the callers have seen it
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _log.error("cannot write spans to %s any longer, they are lost from now on: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def sink_of(trace: str | os.PathLike[str] | Sink | None) -> Sink | None:
    """Return the sink of an option ``trace``: a path is a file.

    Raises:
        TypeError: it is neither a path nor a sink.
    """
    if trace is None or (isinstance(trace, Sink) and not isinstance(trace, str)):
        return trace
    if isinstance(trace, (str, os.PathLike)):
        return FileSink(trace)
    raise TypeError(f"trace must be a path of a file or a sink, not {trace!r}")


class SpanBridge(Protocol):
    """Takes the spans of the application to another tracing library."""

    def end(self, source: SpanSource, spans: Sequence[Made]) -> None:
        """Pass on spans that have ended."""


@dataclass(frozen=True, slots=True)
class SpanSource:
    """The common properties of the spans of one location, or of the application.

    Attributes:
        trace_id: their trace.
        parent: the parent of those that have no other; 0 for the first of a trace.
        process: the site, or ``application``.
        attributes: the attributes that all of them have.
        bridge: the SDK that gets them, if one does.
    """

    trace_id: str
    parent: int
    process: str
    attributes: Mapping[str, Scalar]
    bridge: SpanBridge | None

    def span(self, made: Made) -> Span:
        """Return a span from its queued form."""
        name, span, parent, start, end, attributes, error = made
        parent = parent or self.parent
        return Span(
            name=name,
            trace_id=self.trace_id,
            span_id=span_text(span),
            parent_id=span_text(parent) if parent else None,
            start=start,
            end=end,
            process=self.process,
            attributes={**attributes, **self.attributes},
            status="ok" if error is None else "error",
            message=error or "",
        )


class SpanQueue:
    """Queues spans for a moment. All of it happens on the loop that it is used on.

    Attributes:
        sinks: the sinks that get all of them.
    """

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self._waiting: deque[tuple[SpanSource, Sequence[Made] | bytes, int]] = deque()
        self._count = 0
        self._handle: asyncio.Handle | None = None
        self._failed: set[int] = set()

    def add(self, source: SpanSource, spans: Sequence[Made] | bytes, count: int = 1) -> None:
        """Queue spans; those of sites are still encoded."""
        self._waiting.append((source, spans, count))
        self._count += count
        if self._count > _LIMIT:
            self.flush()
        elif self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(_PAUSE, self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._deliver(_AT_ONCE)
        self._handle = loop.call_soon(self._turn, loop) if self._waiting else None

    def flush(self) -> None:
        """Deliver all queued spans."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._deliver(_LIMIT + _AT_ONCE)

    def _deliver(self, most: int) -> None:
        found: list[Span] = []
        while self._waiting and most > 0:
            source, spans, count = self._waiting.popleft()
            self._count -= count
            most -= count
            made = decode_made(spans)
            if source.bridge is not None:
                try:
                    source.bridge.end(source, made)
                except Exception:  # noqa: BLE001 - a user's span processor: its errors must not affect jobs
                    self._report(source.bridge)
            if self.sinks:
                found.extend(map(source.span, made))
        for sink in list(self.sinks) if found else ():
            try:
                sink.write(found)
            except Exception:  # noqa: BLE001 - a user's sink: its errors must not affect jobs
                self._report(sink)

    def _report(self, culprit: Sink | SpanBridge) -> None:
        if id(culprit) not in self._failed:  # once: further errors will follow
            self._failed.add(id(culprit))
            _log.exception("spans are lost, because %r raised; this is reported once", culprit)
