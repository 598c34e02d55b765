"""Readers of a state that changes all the time: they see the newest, and nothing waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Final

from dfm_async.model.activity import Activity, CallMade, NodeActivity
from dfm_async.model.ids import Frame

__all__ = ["ActivityReader", "Bell", "Bells", "ChangeReader", "JobActivity", "JobChanges", "check_interval"]

_CALLS: Final = 512
"""How many calls of a job are kept one by one."""


def check_interval(interval: float) -> float:
    """Gives back an interval between looks.

    Raises:
        ValueError: it is no number of seconds.
    """
    if not isinstance(interval, (int, float)) or not interval >= 0:
        raise ValueError(f"interval must be a number of seconds, 0 or more, not {interval!r}")
    return interval


class Bell:
    """Wakes one reader. What rings while it is busy, or within ``interval`` seconds of the last time, is joined."""

    def __init__(self, interval: float) -> None:
        self._interval = check_interval(interval)
        self._rung = asyncio.Event()
        self._ended = asyncio.Event()
        self._next = 0.0

    @property
    def closed(self) -> bool:
        """Whether nothing will change any more."""
        return self._ended.is_set()

    def ring(self) -> None:
        """Something has changed."""
        self._rung.set()

    def close(self) -> None:
        """Nothing will change any more."""
        self._ended.set()
        self._rung.set()

    async def wait(self) -> None:
        """Waits until it was rung or closed, and the interval is over; the last change is told without delay."""
        await self._rung.wait()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next):
                await self._ended.wait()
        self._rung.clear()
        self._next = loop.time() + self._interval


class Bells:
    """The bells of all who watch one thing."""

    def __init__(self) -> None:
        self._hung: set[Bell] = set()

    def hang(self, interval: float) -> Bell:
        """Hangs up a bell; it rings at once, since there is something to see."""
        bell = Bell(interval)
        bell.ring()
        self._hung.add(bell)
        return bell

    def take_down(self, bell: Bell) -> None:
        """Takes a bell down."""
        self._hung.discard(bell)

    def ring(self) -> None:
        """Something has changed."""
        for bell in self._hung:
            bell.ring()

    def close(self) -> None:
        """Nothing will change any more."""
        for bell in self._hung:
            bell.close()


class JobActivity:
    """What the operations of one job do: totals for each node, and the newest calls."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, str], _Counts] = {}
        self.calls: deque[CallMade] = deque(maxlen=_CALLS)
        self.told = 0
        """How many calls were told one by one, those included that are not kept any more."""
        self.left_out = 0
        self.version = 0
        self._bells: set[Bell] = set()
        self.closed = False

    def made(
        self,
        at: int,
        site: str,
        nodes: Iterable[tuple[str, int, int, int]],
        calls: Iterable[tuple[str, Frame, int, float, float, bool]],
        left_out: int,
    ) -> None:
        """A location tells of its calls; the counts are its totals."""
        self.version += 1
        for node, started, done, failed in nodes:
            counts = self._nodes.get((at, node))
            if counts is None:
                counts = self._nodes[at, node] = _Counts(node, site)
            counts.now = (started, done, failed)
            counts.version = self.version
        for node, frame, attempt, start, end, failed in calls:
            self.calls.append(CallMade(node, site, frame, attempt, start, end, failed))
            self.told += 1
        self.left_out += left_out
        for bell in self._bells:
            bell.ring()

    def restarted(self) -> None:
        """The locations begin to count anew. Calls that were under way have been lost, and are not counted."""
        self.version += 1
        for counts in self._nodes.values():
            counts.restart()
            counts.version = self.version
        for bell in self._bells:
            bell.ring()

    def close(self) -> None:
        """The job has ended, and with it what was under way; that is not counted."""
        self.closed = True
        cut_short = [counts for counts in self._nodes.values() if counts.total.running]
        self.version += bool(cut_short)
        for counts in cut_short:
            counts.restart()
            counts.version = self.version
        for bell in self._bells:
            bell.close()

    def reader(self, interval: float) -> ActivityReader:
        """Begins to look."""
        bell = Bell(interval)
        bell.ring()
        if self.closed:
            bell.close()
        self._bells.add(bell)
        return ActivityReader(self, bell)

    def leave(self, bell: Bell) -> None:
        """A reader looks no more."""
        self._bells.discard(bell)

    def since(self, version: int, told: int) -> Activity:
        """What has changed since a version, and since so many calls were told."""
        nodes = tuple(counts.total for counts in self._nodes.values() if counts.version > version)
        fresh = min(self.told - told, len(self.calls))
        calls = tuple(self.calls)[len(self.calls) - fresh :] if fresh else ()
        return Activity(nodes, calls, self.left_out)


class _Counts:
    """The calls of one node: those of this run of the job, and of runs that a lost worker has ended."""

    __slots__ = ("before", "node", "now", "site", "version")

    def __init__(self, node: str, site: str) -> None:
        self.node = node
        self.site = site
        self.before = (0, 0)
        self.now = (0, 0, 0)
        self.version = 0

    def restart(self) -> None:
        _, done, failed = self.now
        self.before = (self.before[0] + done, self.before[1] + failed)
        self.now = (0, 0, 0)

    @property
    def total(self) -> NodeActivity:
        (done, failed), now = self.before, self.now
        return NodeActivity(self.node, self.site, done + failed + now[0], done + now[1], failed + now[2])


class ActivityReader:
    """Looks at the activity of a job, whenever it has changed. A closable iterator; ends with the job."""

    def __init__(self, activity: JobActivity, bell: Bell) -> None:
        self._activity = activity
        self._bell = bell
        self._version = -1
        self._told = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to see."""
        return self._ended

    def __aiter__(self) -> ActivityReader:
        return self

    async def __anext__(self) -> Activity:
        while not self._ended:
            await self._bell.wait()
            activity = self._activity
            if self._bell.closed:
                await self.aclose()
            if activity.version > self._version:
                found = activity.since(self._version, self._told)
                self._version, self._told = activity.version, activity.told
                return found
        raise StopAsyncIteration

    async def __aenter__(self) -> ActivityReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Looks no more. Whoever waits for the next item gets the end."""
        self._ended = True
        self._bell.close()
        self._activity.leave(self._bell)


class JobChanges:
    """Tells readers which jobs have changed."""

    def __init__(self) -> None:
        self._readers: set[ChangeReader] = set()

    def mark(self, job_id: str) -> None:
        """A job has changed, or is new."""
        for reader in self._readers:
            reader.mark(job_id)

    def reader(self, interval: float) -> ChangeReader:
        """Begins to look."""
        reader = ChangeReader(self, interval)
        self._readers.add(reader)
        return reader

    def leave(self, reader: ChangeReader) -> None:
        """A reader looks no more."""
        self._readers.discard(reader)

    def close(self) -> None:
        """Nothing will change any more; readers still get what they have not seen."""
        for reader in self._readers:
            reader.end()


class ChangeReader:
    """The ids of jobs that have changed since they were last given. Holds no more than one entry per job."""

    def __init__(self, changes: JobChanges, interval: float) -> None:
        self._changes = changes
        self._bell = Bell(interval)
        self._changed: dict[str, None] = {}

    def mark(self, job_id: str) -> None:
        """A job has changed."""
        self._changed[job_id] = None
        self._bell.ring()

    async def next(self) -> list[str]:
        """Waits for changes; an empty list is the end."""
        while not self._bell.closed:
            await self._bell.wait()
            if self._changed:
                break
        changed, self._changed = list(self._changed), {}
        return changed

    def end(self) -> None:
        """Nothing will change any more."""
        self._bell.close()

    def close(self) -> None:
        """Looks no more. Whoever waits gets the end."""
        self._changed.clear()
        self._bell.close()
        self._changes.leave(self)
