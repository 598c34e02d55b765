"""Which span the running code belongs to. Libraries that use OpenTelemetry see it as their parent, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import msgspec

__all__ = ["Position", "current_position", "enter_position", "resumable"]


class Position(msgspec.Struct, frozen=True, gc=False):
    """A place in a trace: what begins here is a part of this span.

    Attributes:
        trace_id: the trace, 32 hexadecimal digits.
        span: the id of the span.
        call: the id of the operation's span that it is, or lies in; 0 outside of operations.
    """

    trace_id: str
    span: int
    call: int = 0


_current: Final[ContextVar[Position | None]] = ContextVar("dfm_async_span", default=None)


def current_position() -> Position | None:
    """Where the running code is, if it is traced."""
    return _current.get()


def enter_position(position: Position) -> Callable[[], None]:
    """Makes a place the current one; the function that it gives back undoes that.

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
    """For code that runs in pieces, such as generators: each piece goes on where the last one has stopped."""
    at = position

    def enter() -> Callable[[], None]:
        undo = enter_position(at)

        def leave() -> None:
            nonlocal at
            at = _current.get() or position
            undo()

        return leave

    return enter


def _enter_foreign(position: Position) -> Callable[[], None] | None:
    """Tells OpenTelemetry, if somebody has loaded it in this process: others do not pay for it."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from dfm_async.telemetry.otel import enter_span  # loads OpenTelemetry

    found: Any = enter_span(position.trace_id, position.span)
    return found  # type: ignore[no-any-return] # a function of ours
