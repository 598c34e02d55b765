"""When to give a sign of life, and when to give up on the other side. Pure: the time is given."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Check", "Liveness"]


@dataclass(frozen=True, slots=True)
class Check:
    """What there is to do.

    Attributes:
        beat: whether a sign of life is due.
        gone: whether the other side has been silent for too long.
        wake: when to look again.
    """

    beat: bool
    gone: bool
    wake: float


class Liveness:
    """Keeps the times of what was said and heard.

    Any message counts as a sign of life, in both directions. While a payload moves, or is decoded, there is no
    verdict: the time counts from its end.

    Args:
        interval: how long this side may say nothing, in seconds.
        timeout: how long the other side may say nothing, in seconds; 0 means for ever.
        now: the time, on a monotonic clock.
    """

    __slots__ = ("_heard", "_interval", "_moving", "_said", "_timeout")

    def __init__(self, interval: float, timeout: float, now: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._heard = now
        self._said = now
        self._moving = 0

    def heard(self, now: float) -> None:
        """The other side said something."""
        self._heard = now

    def said(self, now: float) -> None:
        """This side said something."""
        self._said = now

    def payload_begins(self) -> None:
        """A payload begins to move or to be decoded."""
        self._moving += 1

    def payload_ends(self, now: float) -> None:
        """It has ended."""
        self._moving -= 1
        self._heard = now

    def silence(self, now: float) -> float:
        """For how long the other side has said nothing, in seconds."""
        return now - self._heard

    def check(self, now: float) -> Check:
        """Tells what is due, and when to look again. After a beat, say :meth:`said`."""
        # Compared as the times to wake at are computed: rounding must not make one early, and look again at once.
        beat = now >= self._said + self._interval
        wake = (now if beat else self._said) + self._interval
        if not self._timeout:
            return Check(beat, False, wake)
        if self._moving:
            return Check(beat, False, min(wake, now + self._timeout))
        gone = now >= self._heard + self._timeout
        return Check(beat, gone, wake if gone else min(wake, self._heard + self._timeout))
