"""The events and times that the parameter sets of one job wait for: events in, effects out. No clock, no I/O.

Times are numbers of seconds since 1970, so that a wait which is written to a store ends when it would have ended.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.base.text import size_text
from dfm_async.errors import ParameterError
from dfm_async.model.events import EventSent, WaitBegan, WaitEnded
from dfm_async.model.ids import Frame
from dfm_async.model.info import WaitInfo
from dfm_async.model.json_data import read_json, write_json
from dfm_async.planning.plan import Plan

EVENTS_KEPT: Final = 1000
"""The largest number of events that are kept for a parameter set before a ``Wait`` takes them."""
KEPT_BYTES: Final = 64_000_000
"""The largest size of the events that are kept for all parameter sets of a job, taken or not."""
EVENT_BYTES: Final = 64_000
"""The largest size of the value of an event, as JSON."""


WAITS_SHOWN: Final = 100
"""The largest number of waits of a job that are listed."""


def check_event(plan: Plan, name: str) -> None:
    """Check that a pipeline waits for an event.

    Raises:
        ParameterError: it does not.
    """
    if name not in plan.events:
        known = ", ".join(map(repr, plan.events)) or "none"
        raise ParameterError([f"the pipeline waits for no event {name!r} (it waits for: {known})"])


def read_event(name: str, value: str) -> tuple[Any, str]:
    """Read the value of an event; return it, and its JSON.

    Raises:
        ParameterError: it is too large, or not JSON.
    """
    try:
        found = read_json(value)
        text = write_json(found)
    except (ValueError, RecursionError) as error:
        raise ParameterError([f"the value of event {name!r} is not JSON: {error}"]) from error
    if len(text.encode()) > EVENT_BYTES:
        raise ParameterError([f"the value of event {name!r} is larger than {size_text(EVENT_BYTES)} as JSON"])
    return found, text


class _WaitEffect(msgspec.Struct, frozen=True, gc=False):
    pass


class Begun(_WaitEffect, frozen=True):
    """Log that a statement waits for an event, or a time, for the first time. ``until``: when it stops, if it does."""

    at: int
    node: str
    frame: Frame
    event: str
    until: float | None


class Over(_WaitEffect, frozen=True):
    """Log that a wait is over. ``value``: that of its event, as JSON; None if the time was over before."""

    at: int
    node: str
    frame: Frame
    event: str
    value: str | None


class WaitReply(_WaitEffect, frozen=True):
    """Report the end of a wait to the location that asked, after it was logged."""

    at: int
    node: str
    frame: Frame
    value: str | None


WaitEvent: TypeAlias = WaitBegan | EventSent | WaitEnded
"""What a log has of waits."""
Effect: TypeAlias = Begun | Over | WaitReply
_Key: TypeAlias = tuple[str, Frame]


class _Wait(msgspec.Struct):
    """One execution of a ``Wait`` or a ``Sleep``."""

    node: str
    frame: Frame
    event: str
    until: float | None
    at: int | None = None
    """The location that waits for it in this run; None if the statement was not reached yet."""
    over: bool = False
    value: str | None = None


class _Set(msgspec.Struct):
    """One parameter set."""

    waits: dict[_Key, _Wait] = {}
    events: dict[str, deque[tuple[float, str]]] = {}
    """For each name the events that were not taken: when each was sent, and its value."""
    kept: int = 0
    size: int = 0
    """The number of bytes of the values that are kept, also of events that were taken."""


class WaitLedger:
    """Gives each execution of a ``Wait`` the next event of its parameter set, and ends those whose time is over.

    A set that runs again, or is resumed, gets what it had before: each execution the same event, or the end of the same
    time.

    Args:
        keep: whether what is over is kept until its set is done, because the set may have to run again.
    """

    __slots__ = ("_active", "_due", "_keep", "_sets", "_size")

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._size = 0
        self._sets: dict[int, _Set] = {}
        self._active: dict[tuple[int, str], dict[_Key, _Wait]] = {}
        """By parameter set and event, what waits in this run, in the order that it began."""
        self._due: list[tuple[float, str, Frame]] = []
        """When waits end, the earliest first; some are over already."""

    def __bool__(self) -> bool:
        return bool(self._sets)

    def waiting(self, most: int) -> tuple[WaitInfo, ...]:
        """Return what waits now, up to a number."""
        waits = itertools.chain.from_iterable(found.values() for found in self._active.values())
        return tuple(
            WaitInfo(name=wait.event, frame=wait.frame, node=wait.node, until=wait.until)
            for wait in itertools.islice(waits, most)
        )

    def due(self) -> float | None:
        """Return when :meth:`expire` has to be called next; None if nothing has a limit."""
        while self._due:
            until, node, frame = self._due[0]
            found = self._sets.get(frame[0])
            wait = None if found is None else found.waits.get((node, frame))
            if wait is not None and wait.at is not None and not wait.over and wait.until == until:
                return until
            heappop(self._due)
        return None

    # events

    def begin(
        self, at: int, node: str, frame: Frame, event: str, seconds: float | None, now: float
    ) -> Sequence[Effect]:
        """A statement of a location waits for an event, or only for a time if the name is empty."""
        found = self._sets.setdefault(frame[0], _Set())
        effects: list[Effect] = []
        wait = found.waits.get((node, frame))
        if wait is None:
            wait = _Wait(node, frame, event, None if seconds is None else now + seconds)
            found.waits[node, frame] = wait
            effects.append(Begun(at, node, frame, event, wait.until))
        wait.at = at
        if wait.over:
            effects.append(WaitReply(at, node, frame, wait.value))
            self._forget(found, wait)
            return effects
        sent = found.events.get(event)
        if sent and (wait.until is None or sent[0][0] <= wait.until):
            effects += self._end(found, wait, self._take(found, event))
        elif wait.until is not None and wait.until <= now:
            effects += self._end(found, wait, None)
        else:
            self._active.setdefault((frame[0], event), {})[node, frame] = wait
            if wait.until is not None:
                heappush(self._due, (wait.until, node, frame))
        return effects

    def send(self, index: int, event: str, value: str, now: float) -> Sequence[Effect]:
        """An event was sent to a parameter set. It is kept until something waits for it."""
        found = self._sets.setdefault(index, _Set())
        self._add(found, event, value, now)
        for wait in self._active.get((index, event), {}).values():
            if wait.until is None or now <= wait.until:
                return self._end(found, wait, self._take(found, event))
        return ()

    def limit(self, index: int, event: str) -> str | None:
        """Return why no further event can be kept for a parameter set; None if one can, or is taken at once."""
        found = self._sets.get(index)
        if not self._keep and self._active.get((index, event)):
            return None
        if found is not None and found.kept >= EVENTS_KEPT:
            return f"parameter set {index} has {EVENTS_KEPT:,} events that were not taken, which is the limit"
        if self._size >= KEPT_BYTES:
            return f"the events of all parameter sets take {size_text(KEPT_BYTES)}, which is the limit"
        return None

    def expire(self, now: float) -> Sequence[Effect]:
        """End what waits for a time that is over."""
        effects: list[Effect] = []
        while (due := self.due()) is not None and due <= now:
            _, node, frame = heappop(self._due)
            found = self._sets[frame[0]]
            effects += self._end(found, found.waits[node, frame], None)
        return effects

    def done(self, index: int) -> None:
        """Note that a parameter set is done: what was sent to it and not taken is dropped."""
        found = self._sets.pop(index, None)
        if found is not None:
            self._size -= found.size
            for event in {wait.event for wait in found.waits.values()}:
                self._active.pop((index, event), None)

    def restart(self) -> None:
        """Note that the sets in flight run again: nothing waits before it asks again."""
        self._active.clear()
        self._due.clear()
        for found in self._sets.values():
            for wait in found.waits.values():
                wait.at = None

    def clear(self) -> None:
        """Note that the job has ended."""
        self._sets.clear()
        self._size = 0
        self._active.clear()
        self._due.clear()

    # what the log has of an earlier run

    def logged(self, event: WaitEvent) -> None:
        """Take an event of the log of a set that runs again. They come in their order."""
        found = self._sets.setdefault(event.frame[0], _Set())
        if isinstance(event, EventSent):
            self._add(found, event.name, write_json(event.value), event.sent)
        elif isinstance(event, WaitBegan):
            found.waits[event.node, event.frame] = _Wait(event.node, event.frame, event.name, event.until)
        else:
            wait = found.waits.get((event.node, event.frame))
            if wait is not None and (event.by == "time" or wait.event in found.events):
                wait.value = None if event.by == "time" else self._take(found, wait.event)
                wait.over = True

    # the events of sets

    def _add(self, found: _Set, event: str, value: str, sent: float) -> None:
        found.events.setdefault(event, deque()).append((sent, value))
        found.kept += 1
        self._resize(found, sys.getsizeof(value))

    def _resize(self, found: _Set, size: int) -> None:
        found.size += size
        self._size += size

    @staticmethod
    def _take(found: _Set, event: str) -> str:
        events = found.events[event]
        _, value = events.popleft()
        found.kept -= 1
        if not events:
            del found.events[event]
        return value

    def _end(self, found: _Set, wait: _Wait, value: str | None) -> Sequence[Effect]:
        assert wait.at is not None  # noqa: S101 - only what waits in this run ends
        wait.over, wait.value = True, value
        key = wait.frame[0], wait.event
        active = self._active.get(key)
        if active is not None:
            active.pop((wait.node, wait.frame), None)
            if not active:
                del self._active[key]
        over = Over(wait.at, wait.node, wait.frame, wait.event, value)
        self._forget(found, wait)
        return over, WaitReply(wait.at, wait.node, wait.frame, value)

    def _forget(self, found: _Set, wait: _Wait) -> None:
        """Drop what is over, if its set does not run again."""
        if not self._keep:
            if wait.value is not None:
                self._resize(found, -sys.getsizeof(wait.value))
            found.waits.pop((wait.node, wait.frame), None)
            if not found.waits and not found.events:
                self._sets.pop(wait.frame[0], None)
