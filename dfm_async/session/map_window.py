"""Which inputs of a map may be pulled, and which of its values can be passed on. Pure: events in, values out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from dfm_async.errors import DfmError
from dfm_async.model.events import Event, Failure, FrameCompleted, Result

AHEAD: Final = 4
"""How many inputs may be ahead of the last value that was passed on, in multiples of the concurrency."""

Finished: TypeAlias = tuple[int, Any, DfmError | None]
"""The index of an input, its value, and its error, if it has one."""


class MapWindow:
    """Count the inputs of a map from the moment that they are pulled until their values are passed on.

    Inputs are sent in parameter sets, several in one. An input is done when its value or its failure has come; one
    whose value is a stream, when its set is completed.

    Args:
        concurrency: how many inputs may be in flight.
        ordered: whether values are passed on in the order of the inputs.
    """

    def __init__(self, concurrency: int, *, ordered: bool) -> None:
        self.ready: deque[Finished] = deque()
        """What can be passed on."""
        self.pulled = 0
        """The number of inputs that were pulled; the next gets this index."""
        self._concurrency = concurrency
        self._ordered = ordered
        self._in_flight: set[int] = set()
        self._broken = False
        self._sets: dict[int, range] = {}
        self._next_set = 0
        self._parts: dict[int, list[Result]] = {}
        self._set_errors: dict[int, DfmError] = {}
        self._held: dict[int, Finished] = {}
        self._next = 0

    @property
    def unfinished(self) -> bool:
        """Whether values are missing, or further ones may be."""
        return self._broken or bool(self._in_flight)

    @property
    def room(self) -> int:
        """The number of inputs that may be pulled now."""
        waiting = len(self.ready) + len(self._held)
        in_flight = len(self._in_flight)
        return min(self._concurrency - in_flight, AHEAD * self._concurrency - in_flight - waiting)

    def open(self, count: int) -> None:
        """Note that the next inputs were pulled, and are sent in one parameter set."""
        indices = self._sets[self._next_set] = range(self.pulled, self.pulled + count)
        self._next_set += 1
        self._in_flight.update(indices)
        self.pulled += count

    def reject(self, error: DfmError) -> None:
        """Note that the next input was pulled, and cannot be sent."""
        self.pulled += 1
        self._finish((self.pulled - 1, None, error))

    def take(self, events: Iterable[Event]) -> None:
        """Take events of the job."""
        for event in events:
            kind = type(event)
            if kind is Result:
                root, at, *rest = event.frame  # type: ignore[union-attr] # a result has one
                index = self._sets[root].start + at
                if rest:
                    self._parts.setdefault(index, []).append(event)  # type: ignore[arg-type] # a result
                elif index in self._in_flight:
                    self._in_flight.discard(index)
                    self._finish((index, event.value, None))  # type: ignore[union-attr]
            elif kind is FrameCompleted:
                self._complete(event.frame[0])  # type: ignore[union-attr]
            elif kind is Failure:
                self._fail(event)  # type: ignore[arg-type]

    def flush(self) -> None:
        """Note that the job has finished: what has no value is an empty stream."""
        for root in list(self._sets):
            self._complete(root)

    def _fail(self, failure: Failure) -> None:
        if not failure.frame:
            self._broken = True  # the job failed by itself
        if failure.place is None or not failure.frame:
            return
        root, *rest = failure.frame
        if not rest:
            self._set_errors[root] = failure.error
            return
        index = self._sets[root].start + rest[0]
        if index in self._in_flight:
            self._in_flight.discard(index)
            self._parts.pop(index, None)
            self._finish((index, None, failure.error))

    def _complete(self, root: int) -> None:
        indices, error = self._sets.pop(root), self._set_errors.pop(root, None)
        if not self._in_flight.isdisjoint(indices):
            for index in sorted(self._in_flight.intersection(indices)):
                self._in_flight.discard(index)
                parts = sorted(self._parts.pop(index, ()), key=lambda part: part.frame)
                self._finish((index, None if error is not None else [part.value for part in parts], error))

    def _finish(self, found: Finished) -> None:
        if not self._ordered:
            self.ready.append(found)
        elif found[0] != self._next:
            self._held[found[0]] = found
        else:
            self.ready.append(found)
            self._next += 1
            while self._held and self._next in self._held:
                self.ready.append(self._held.pop(self._next))
                self._next += 1
