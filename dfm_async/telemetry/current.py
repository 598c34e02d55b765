"""The span that the running code belongs to. Libraries that use OpenTelemetry see it as their parent, too."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

import msgspec

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_LONGEST_HEADER: Final = 512


class Position(msgspec.Struct, frozen=True, gc=False):
    """A position in a trace: work that begins here is a part of this span.

    Attributes:
        trace_id: the trace, 32 hexadecimal digits.
        span: the id of the span.
        call: the id of the enclosing span of an operation; 0 outside of operations.
    """

    trace_id: str
    span: int
    call: int = 0


_current: Final[ContextVar[Position | None]] = ContextVar("dfm_async_span", default=None)


def current_position() -> Position | None:
    """Return the position of the running code, if it is traced."""
    return _current.get()


def enter_position(position: Position) -> Callable[[], None]:
    """Make a position the current one; return a function that restores the previous one.

    Nothing is reset by a token: a generator can be entered in one task and left in another.
    """
    before = _current.get()
    _current.set(position)
    leave = _enter_foreign(position)

    def undo() -> None:
        _current.set(before)
        if leave is not None:
            leave()

    return undo


def resumable(position: Position) -> Callable[[], Callable[[], None]]:
    """Return a function that enters the position of code that runs in pieces, such as generators.

    Each piece goes on at the position where the last one has stopped.
    """
    at = position

    def enter() -> Callable[[], None]:
        undo = enter_position(at)

        def leave() -> None:
            nonlocal at
            at = _current.get() or position
            undo()

        return leave

    return enter


def _enter_foreign(position: Position) -> Callable[[], object] | None:
    """Enter the position in OpenTelemetry, if it is loaded in this process."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from dfm_async.telemetry.otel import enter_span  # loads OpenTelemetry

    return enter_span(position.trace_id, position.span)


def read_traceparent(text: str | None) -> Position | None:
    """Return the position in the ``traceparent`` header of W3C Trace Context; None if it is missing or invalid.

    The header is untrusted input: only its ids are used.
    """
    if text is None or len(text) > _LONGEST_HEADER:
        return None
    found = _HEADER.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, parent, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):  # later versions may have more fields
        return None
    if not int(trace_id, 16) or not int(parent, 16):
        return None
    return Position(trace_id, int(parent, 16))
