"""In the application: spans on their way to those who want them.

Whoever waits for a job comes first. So spans are put aside as they came, and are made and handed on when some have
gathered, which costs less than one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from dfm_async.model.events import Scalar
from dfm_async.telemetry.sinks import Sink
from dfm_async.telemetry.spans import Made, Span, decode_made, span_text

if TYPE_CHECKING:
    from dfm_async.telemetry.otel import Bridge

__all__ = ["SpanOwner", "SpanQueue", "SpanSource"]

_log = logging.getLogger(__name__)

_PAUSE: Final = 0.1
"""How many seconds spans wait for others."""
_AT_ONCE: Final = 64
"""How many spans are handed on in one turn of the loop, so that others get theirs."""
_LIMIT: Final = 16_384
"""How many spans wait at most; all are handed on at once then."""


class SpanSource:
    """What spans that come from one place have in common.

    Args:
        trace_id: their trace.
        parent: the parent of those that have no other; 0 for the first of a trace.
        process: the site, or ``application``.
        attributes: what all of them have.
    """

    __slots__ = ("_attributes", "_parent", "_process", "trace_id")

    def __init__(self, trace_id: str, parent: int, process: str, attributes: dict[str, Scalar]) -> None:
        self.trace_id = trace_id
        self._parent = parent
        self._process = process
        self._attributes = attributes

    def span(self, made: Made) -> Span:
        """Makes a span of what was put aside."""
        name, span, parent, start, end, attributes, error = made
        parent = parent or self._parent
        return Span(
            name=name,
            trace_id=self.trace_id,
            span_id=span_text(span),
            parent_id=span_text(parent) if parent else None,
            start=start,
            end=end,
            process=self._process,
            attributes={**attributes, **self._attributes},
            status="ok" if error is None else "error",
            message=error or "",
        )


class SpanOwner(Protocol):
    """Whoever puts spans aside."""

    @property
    def bridge(self) -> Bridge | None:
        """The SDK that gets its spans, if one does."""
        ...

    def source(self, at: int) -> SpanSource:
        """What its spans from one place have in common; ``at``: a location, or -1 for the application."""
        ...


class SpanQueue:
    """Keeps spans for a moment. All is done on the loop that it is used on.

    Attributes:
        sinks: who gets all of them.
    """

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self._waiting: deque[tuple[SpanOwner, int, Sequence[Made] | bytes, int]] = deque()
        self._count = 0
        self._handle: asyncio.Handle | None = None
        self._failed: set[int] = set()

    def add(self, owner: SpanOwner, at: int, spans: Sequence[Made] | bytes, count: int = 1) -> None:
        """Takes spans of a location, or of the application (-1); those of sites are still encoded."""
        self._waiting.append((owner, at, spans, count))
        self._count += count
        if self._count > _LIMIT:
            self.flush()
        elif self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(_PAUSE, self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._hand_on(_AT_ONCE)
        self._handle = loop.call_soon(self._turn, loop) if self._waiting else None

    def flush(self) -> None:
        """Hands on all that there are."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._hand_on(_LIMIT + _AT_ONCE)

    def _hand_on(self, most: int) -> None:
        found: list[Span] = []
        while self._waiting and most > 0:
            owner, at, spans, count = self._waiting.popleft()
            self._count -= count
            most -= count
            made, source = decode_made(spans), owner.source(at)
            if owner.bridge is not None:
                try:
                    owner.bridge.end(source, made)
                except Exception:  # noqa: BLE001 - a user's span processor: its trouble is not the jobs'
                    self._tell(owner.bridge)
            if self.sinks:
                found.extend(map(source.span, made))
        for sink in list(self.sinks) if found else ():
            try:
                sink.write(found)
            except Exception:  # noqa: BLE001 - a user's: its trouble is not the jobs'
                self._tell(sink)

    def _tell(self, culprit: Sink | Bridge) -> None:
        if id(culprit) not in self._failed:  # once: others will follow
            self._failed.add(id(culprit))
            _log.exception("spans are lost, because %r raised; this is told once", culprit)
