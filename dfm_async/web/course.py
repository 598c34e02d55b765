"""How a stream goes on, and why it ends."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

__all__ = ["Course", "Phase"]


class Phase(IntEnum):
    """Where a stream is. A later one stands above all before it: whoever is gone is not told that all was given."""

    GOING_ON = 0
    DRAINING = 1
    """The service wants it to end, or it cannot go on here; the client may come back."""
    ENDED = 2
    """There is nothing more to come, and everything was given."""
    GONE = 3
    """The client has left."""
    STALLED = 4
    """The client takes nothing any more, and was left."""


class Course:
    """The course of one stream. It only goes forward.

    Args:
        wake: lets whoever waits for something to give look at the reasons to end.
    """

    __slots__ = ("_wake", "phase")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.phase = Phase.GOING_ON

    def reach(self, phase: Phase) -> None:
        """Enters a phase, unless it is past that."""
        if phase > self.phase:
            self.phase = phase
            self._wake()

    @property
    def going_on(self) -> bool:
        """Whether further events may be given."""
        return self.phase is Phase.GOING_ON

    @property
    def gone(self) -> bool:
        """Whether nobody is there any more to write to."""
        return self.phase >= Phase.GONE
