"""Readers of a state that changes all the time: they get the newest state, and nothing waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from dfm_async.base.signals import Notifier, ThrottledSignal
from dfm_async.model.events import Activity, CallMade, NodeActivity
from dfm_async.model.ids import Frame

_CALLS: Final = 512
"""The number of calls of a job that are kept one by one."""


class JobActivity:
    """What the operations of one job do: totals for each node, and the newest calls."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, str], _Counts] = {}
        self.calls: deque[CallMade] = deque(maxlen=_CALLS)
        self.reported = 0
        """The number of calls that were reported one by one, those included that are not kept any longer."""
        self.left_out = 0
        self.version = 0
        self._notifier = Notifier()

    def made(
        self,
        at: int,
        site: str,
        nodes: Iterable[tuple[str, int, int, int]],
        calls: Iterable[tuple[str, Frame, int, float, float, bool, float]],
        left_out: int,
    ) -> None:
        """Add the report of a location; the counts are its totals."""
        self.version += 1
        for node, started, done, failed in nodes:
            counts = self._nodes.get((at, node))
            if counts is None:
                counts = self._nodes[at, node] = _Counts(node, site)
            counts.now = (started, done, failed)
            counts.version = self.version
        for node, frame, attempt, start, end, failed, waited in calls:
            self.calls.append(CallMade(node, site, frame, attempt, start, end, failed, waited))
            self.reported += 1
        self.left_out += left_out
        self._notifier.notify()

    def restarted(self, at: int | None = None) -> None:
        """Let one location count anew, or all. Calls that were running have been lost, and are not counted."""
        self.version += 1
        for (location, _), counts in self._nodes.items():
            if at in (None, location):
                counts.restart()
                counts.version = self.version
        self._notifier.notify()

    def close(self) -> None:
        """End with the job. Calls that were running are not counted."""
        running = [counts for counts in self._nodes.values() if counts.total.running]
        self.version += bool(running)
        for counts in running:
            counts.restart()
            counts.version = self.version
        self._notifier.close()

    def reader(self, interval: float) -> ActivityReader:
        """Return a reader, which gets the state at most once per interval."""
        return ActivityReader(self, self._notifier, interval)

    def since(self, version: int, reported: int) -> Activity:
        """Return what has changed since a version, and since a number of calls had been reported."""
        nodes = tuple(counts.total for counts in self._nodes.values() if counts.version > version)
        fresh = min(self.reported - reported, len(self.calls))
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
    """Reads the activity of a job whenever it has changed. A closable iterator; ends with the job."""

    def __init__(self, activity: JobActivity, notifier: Notifier, interval: float) -> None:
        self._activity = activity
        self._notifier = notifier
        self._signal = notifier.subscribe(interval)
        self._version = -1
        self._reported = 0
        self.ended: bool = False
        """Whether there is nothing more to read."""

    def __aiter__(self) -> ActivityReader:
        return self

    async def __anext__(self) -> Activity:
        while not self.ended:
            await self._signal.wait()
            activity = self._activity
            if self._signal.closed:
                await self.aclose()
            if activity.version > self._version:
                found = activity.since(self._version, self._reported)
                self._version, self._reported = activity.version, activity.reported
                return found
        raise StopAsyncIteration

    async def __aenter__(self) -> ActivityReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading. A task that waits for the next item gets the end."""
        self.ended = True
        self._signal.close()
        self._notifier.unsubscribe(self._signal)


class JobChanges:
    """Notifies readers of the jobs that have changed."""

    def __init__(self) -> None:
        self.readers: set[ChangeReader] = set()

    def mark(self, job_id: str) -> None:
        """Report that a job has changed, or is new."""
        for reader in self.readers:
            reader.mark(job_id)

    def reader(self, interval: float) -> ChangeReader:
        """Return a reader, which gets changes at most once per interval."""
        reader = ChangeReader(self, interval)
        self.readers.add(reader)
        return reader

    def leave(self, reader: ChangeReader) -> None:
        """Remove a reader."""
        self.readers.discard(reader)

    def close(self) -> None:
        """End, when nothing will change any longer; readers still get the changes that they have not read."""
        for reader in self.readers:
            reader.end()


class ChangeReader:
    """The ids of jobs that have changed since they were last returned. Holds at most one entry per job."""

    def __init__(self, changes: JobChanges, interval: float) -> None:
        self._changes = changes
        self._signal = ThrottledSignal(interval)
        self._changed: dict[str, None] = {}

    def mark(self, job_id: str) -> None:
        """Add a job that has changed."""
        self._changed[job_id] = None
        self._signal.notify()

    async def next(self) -> list[str]:
        """Wait for changes; an empty list is the end."""
        while not self._signal.closed:
            await self._signal.wait()
            if self._changed:
                break
        changed, self._changed = list(self._changed), {}
        return changed

    def end(self) -> None:
        """End after the changes that are pending."""
        self._signal.close()

    def close(self) -> None:
        """Stop reading. A task that waits gets the end."""
        self._changed.clear()
        self._signal.close()
        self._changes.leave(self)
