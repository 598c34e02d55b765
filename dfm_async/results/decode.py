"""Results as they travel and are stored, and as events of a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from dfm_async.errors import DecodingError
from dfm_async.model.events import Event, Failure, Result
from dfm_async.model.ids import Frame
from dfm_async.planner.plan import Plan
from dfm_async.wire.codec import Broken

__all__ = ["Run", "result_events"]

Run: TypeAlias = tuple[int, Frame, int, int]
"""Values that follow each other: the yield, its frame, the first element's number or -1, and how many they are."""


def result_events(plan: Plan, at: int, runs: Sequence[Run], values: Sequence[Any], offset: int) -> list[Event]:
    """Makes events of yielded values. One that could not be rebuilt is a failure."""
    site, points = plan.sites_at[at], plan.points
    events: list[Event] = []
    position = 0
    for point, frame, start, count in runs:
        place, node = points[point]
        for index in range(count):
            value = values[position]
            position += 1
            full = frame if start < 0 else (*frame, start + index)
            if type(value) is Broken:
                broken = DecodingError(node, str(value.error))
                broken.__cause__ = value.error
                events.append(Failure(offset, place, broken, full, site, node))
            else:
                events.append(Result(offset, place, value, full, site, node))
            offset += 1
    return events
