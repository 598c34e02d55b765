"""Delays that grow from attempt to attempt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_DOUBLINGS: Final = 64
"""More of them would overflow before the longest delay is applied."""


def delay_after(attempt: int, first: float, longest: float) -> float:
    """Return the number of seconds to wait after the given attempt: ``first`` after attempt 1, then doubled."""
    return float(min(first * 2.0 ** min(attempt - 1, _DOUBLINGS), longest))


def delays(first: float, longest: float) -> Iterator[float]:
    """Yield the delays after attempts 1, 2, 3, ... without end."""
    delay = min(first, longest)
    while True:
        yield delay
        delay = min(delay * 2, longest)
