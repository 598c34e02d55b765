"""Spans that users' code opens with ``context.span(...)``."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol

from dfm_async.model.events import Scalar
from dfm_async.model.scalars import plain_text, plain_values
from dfm_async.telemetry.current import Position, current_position, enter_position
from dfm_async.telemetry.recorder import Failure, TracedCall
from dfm_async.telemetry.spans import new_span_id

__all__ = ["NO_SPAN", "RecordedSpan", "UserSpan", "failure_of"]

_LONGEST: Final = 4096
"""How many characters of a text are kept."""
_LONGEST_TRACEBACK: Final = 16 * 1024


class UserSpan(Protocol):
    """What ``context.span(...)`` gives. It lasts as long as its ``with`` block."""

    def set(self, **attributes: Any) -> None:
        """Adds attributes, such as those that are known only at the end.

        Raises:
            TypeError: a value is no number, string or truth value.
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
        call: the call that it lies in.
        name: what it is.
        attributes: what else is known of it.
    """

    __slots__ = ("_attributes", "_call", "_leave", "_name", "_parent", "_span", "_start")

    def __init__(self, call: TracedCall, name: str, attributes: Mapping[str, Any]) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a span must be a text that is not empty, not {name!r}")
        self._call = call
        self._name = _short(name)
        self._attributes = _written(attributes)
        self._span = self._parent = self._start = 0
        self._leave: Callable[[], None] | None = None

    def set(self, **attributes: Any) -> None:
        """Adds attributes."""
        self._attributes.update(_written(attributes))

    def __enter__(self) -> RecordedSpan:
        if self._span:
            raise RuntimeError(f"the span {self._name!r} was opened before; call context.span(...) for each")
        call, at = self._call, current_position()
        # A thread that was started by hand, or code that another call drives, does not know where we are.
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
        # A generator that nobody reads to its end has not failed.
        self.end(None if error is None or isinstance(error, GeneratorExit) else failure_of(error))

    def end(self, failure: Failure | None) -> None:
        """Notes its end: when it is left, or before that when the job has ended."""
        recorder = self._call.recorder
        if recorder.open.pop(self._span, None) is not None:
            recorder.add(self._name, self._span, self._parent, self._start, self._attributes, failure)


class _NoSpan:
    __slots__ = ()

    def set(self, **attributes: Any) -> None:
        """Does nothing."""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""


NO_SPAN: Final[UserSpan] = _NoSpan()
"""What ``context.span(...)`` gives in a job that is not traced."""


def failure_of(error: BaseException) -> Failure:
    """Describes an error for a span."""
    try:
        message, text = str(error), "".join(traceback.format_exception(error))
    except Exception as problem:  # noqa: BLE001 - exceptions of users can do anything when they are asked for their text
        message, text = f"(its text cannot be had: {type(problem).__name__})", ""
    return type(error).__qualname__, _short(message), plain_text(text)[-_LONGEST_TRACEBACK:]


def _written(attributes: Mapping[str, Any]) -> dict[str, Scalar]:
    """Attributes that can stand in JSON, and are not too long."""
    found = plain_values(attributes, "attribute")
    for name, value in found.items():
        if type(value) is str:
            found[name] = _short(value)
        elif type(value) is float and not math.isfinite(value):
            found[name] = str(value)
    return found


def _short(text: str) -> str:
    return plain_text(text)[:_LONGEST]  # cut last: half a secret is one, too
