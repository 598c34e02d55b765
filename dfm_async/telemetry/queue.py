"""In the application: spans on their way to their sinks, written together a moment after they came.

Whoever waits for a job comes first. So spans are put aside as they are, and are made and written when some have
gathered: that costs less than one by one, and much of it is done while the loop would wait for sites anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from dfm_async.model.events import Scalar
from dfm_async.telemetry.sinks import Sink
from dfm_async.telemetry.spans import Made, Span, span_text

__all__ = ["SpanQueue", "SpanSource"]

_log = logging.getLogger(__name__)

_PAUSE: Final = 0.01
"""How many seconds spans wait for others."""
_AT_ONCE: Final = 256
"""How many spans are written in one turn of the loop, so that others get theirs."""
_LIMIT: Final = 16_384
"""How many spans wait at most; all are written at once then."""


class SpanSource:
    """Where spans come from, and where they go.

    Args:
        trace_id: their trace.
        parent: the parent of those that have no other; None for the first of a trace.
        process: the site, or ``application``.
        attributes: what all of them have.
        sinks: where they go.
    """

    __slots__ = ("_attributes", "_parent_id", "_process", "_trace_id", "sinks")

    def __init__(
        self,
        trace_id: str,
        parent: int | None,
        process: str,
        attributes: dict[str, Scalar],
        sinks: Sequence[Sink],
    ) -> None:
        self._trace_id = trace_id
        self._parent_id = None if parent is None else span_text(parent)
        self._process = process
        self._attributes = attributes
        self.sinks = sinks

    def span(self, made: Made) -> Span:
        """Makes a span of what was put aside."""
        name, span, parent, start, end, attributes, error = made
        return Span(
            name=name,
            trace_id=self._trace_id,
            span_id=span_text(span),
            parent_id=span_text(parent) if parent else self._parent_id,
            start=start,
            end=end,
            process=self._process,
            attributes={**attributes, **self._attributes},
            status="ok" if error is None else "error",
            message=error or "",
        )


class SpanQueue:
    """Keeps spans for a moment. All is done on the loop that it is first used on."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[SpanSource, Sequence[Made]]] = deque()
        self._count = 0
        self._handle: asyncio.Handle | None = None
        self._failed: list[Sink] = []

    def add(self, source: SpanSource, spans: Sequence[Made]) -> None:
        """Takes spans."""
        self._waiting.append((source, spans))
        self._count += len(spans)
        if self._count > _LIMIT:
            self.flush()
        elif self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(_PAUSE, self._turn)

    def _turn(self) -> None:
        self._write(_AT_ONCE)
        self._handle = asyncio.get_running_loop().call_soon(self._turn) if self._waiting else None

    def flush(self) -> None:
        """Writes all that there are."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        while self._waiting:
            self._write(_LIMIT)

    def _write(self, most: int) -> None:
        found: list[Span] = []
        sinks: Sequence[Sink] = ()
        while self._waiting and len(found) < most:
            source, spans = self._waiting.popleft()
            if source.sinks is not sinks:
                self._write_to(sinks, found)
                found, sinks = [], source.sinks
            self._count -= len(spans)
            found += [source.span(made) for made in spans]
        self._write_to(sinks, found)

    def _write_to(self, sinks: Sequence[Sink], spans: list[Span]) -> None:
        for sink in sinks if spans else ():
            try:
                sink.write(spans)
            except Exception:  # noqa: BLE001 - a user's sink, or a user's span processor: its trouble is not the jobs'
                if sink not in self._failed:  # once: others will follow
                    self._failed.append(sink)
                    _log.exception("spans are lost, because %r raised; this is told once", sink)
