"""Spans and calls of a job at the hub: they are not kept there, but told to the applications that follow the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from dfm_async.model.ids import Frame
from dfm_async.targets.flare.messages import Traced
from dfm_async.telemetry.spans import APPLICATION, Origin
from dfm_async.wire import messages as msg

__all__ = ["RelayedActivity", "RelayedTrace"]


class RelayedActivity:
    """Passes on what locations tell of their calls."""

    def __init__(self, relay: Callable[[Any], None]) -> None:
        self._relay = relay

    def made(
        self,
        at: int,
        site: str,
        nodes: Iterable[tuple[str, int, int, int]],
        calls: Iterable[tuple[str, Frame, int, float, float, bool]],
        left_out: int,
    ) -> None:
        """A location tells of its calls."""
        self._relay(msg.CallsMade(-1, at, list(nodes), list(calls), left_out))

    def restarted(self) -> None:
        """The locations begin to count anew."""
        self._relay(msg.CallsMade(-2, -1, [], [], 0))

    def close(self) -> None:
        """The job has ended; applications see that by its status."""


class RelayedTrace:
    """Gives the locations their spans, and passes on those that they have made."""

    def __init__(self, traced: Traced, relay: Callable[[Any], None]) -> None:
        self._traced = traced
        self._relay = relay
        self._runs = 0

    def launch(self) -> list[tuple[str, int, int]]:
        """The job runs, for the first time or again; gives what each location has to know."""
        self._runs += 1
        return [(self._traced.trace_id, span, self._runs) for span in self._traced.spans]

    def origin(self) -> Origin:
        """What a message tells that is sent now."""
        return Origin(self._traced.span, time.time_ns(), APPLICATION)

    def arrived(self, origin: Origin, tokens: int, size: int) -> None:
        """Values have come; the application tells when they have come to it."""

    def take(self, at: int, spans: bytes, count: int, *, last: bool) -> None:
        """A location has sent spans."""
        self._relay(msg.SpansMade(-1, at, count, spans, last))

    def lost(self, at: int, why: str) -> None:
        """The worker of a location has ended; the application sees that by the job's events."""

    def end(self, status: str, error: str | None) -> None:
        """The job has ended; the application's own span tells how."""
