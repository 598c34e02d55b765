"""The jobs that a target knows: how those in flight are steered, and how long those that have ended are kept."""

from __future__ import annotations

import asyncio
import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final, Generic, Protocol, TypeVar

from dfm_async.engine.frames import Row
from dfm_async.engine.intake import LoggedErrors
from dfm_async.engine.waits import WaitEvent
from dfm_async.errors import DfmError
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import Traffic
from dfm_async.model.status import JobStatus
from dfm_async.model.waiting import JobWait
from dfm_async.planning.plan import Plan
from dfm_async.results.log import Backing
from dfm_async.results.record import JobRecord, JobSummary
from dfm_async.results.retention import Retention
from dfm_async.results.seen import Seen
from dfm_async.results.watching import JobChanges
from dfm_async.telemetry.traces import JobTrace

_EARLIEST: Final = 1.0
"""Logs that are too old are dropped at most once in that many seconds."""
_COMPACT: Final = 1024
"""The number of entries of jobs that are no longer known, beyond which they are removed from the order of jobs."""


class FrameCounts(Protocol):
    """How far the parameter sets of a job are."""

    stopped: bool
    """Whether all have come."""
    added: int
    """The number of sets that have come."""
    opened: int
    """The number of sets that were opened."""

    @property
    def open(self) -> Sized:
        """Those that are in flight."""


class JobControl(Protocol):
    """One job that has not ended."""

    record: JobRecord
    plan: Plan
    spec: JobSpec

    @property
    def outcomes(self) -> dict[str, str]:
        """How each location stopped, if the job was stopped."""

    @property
    def trace(self) -> Any:
        """The job's spans, if it is traced."""

    @trace.setter
    def trace(self, trace: JobTrace | None) -> None: ...

    @property
    def frames(self) -> FrameCounts:
        """Its parameter sets."""

    @property
    def yielded(self) -> Traffic:
        """The results that have come."""

    @property
    def state(self) -> str:
        """A description of the job's progress."""

    def waiting(self) -> JobWait:
        """Return what is known about what the job waits for."""

    @property
    def accepts(self) -> bool:
        """Whether further parameter sets may come."""

    def add(self, rows: Sequence[Row], *, last: bool = False) -> None:
        """Add parameter sets; ``last``: no further ones will come."""

    def stop(self) -> None:
        """Note that no further parameter set will come."""

    async def room(self) -> None:
        """Wait until there is room for a further parameter set, or the job takes none any longer."""

    def refusal(self, problem: str) -> DfmError:
        """Return the error for what the job no longer takes: that it is interrupted, or else the problem."""

    async def send_event(self, name: str, value: str, frame: int | None) -> None:
        """Send an event, with a value as JSON, to a parameter set; None: to the only one."""

    def resume(
        self, rows: Mapping[int, Row], added: int, seen: Seen, failed: LoggedErrors, waits: Iterable[WaitEvent] = ()
    ) -> None:
        """Begin where an earlier run has ended."""

    def on_end(self, call: Callable[[Any], None]) -> None:
        """Call back when the job has ended."""

    def watch_deadline(self, began: float) -> None:
        """Abort the job at its deadline, if it has one; ``began``: when the job began, by the loop's clock."""

    def halt(self, status: JobStatus, reason: str, grace: float) -> None:
        """Stop the job; it ends with this status."""

    def shorten(self, grace: float) -> None:
        """Kill what has not stopped after a further grace."""

    def shut_down(self, reason: str, grace: float) -> None:
        """Stop the job because the session is closed."""

    def fail(self, error: Any) -> None:
        """End the job with an error of its own."""

    def abandon(self, at: int) -> None:
        """Do not wait any longer for a location."""


C = TypeVar("C", bound=JobControl)


class JobTable(Generic[C]):
    """Records by id. Ended jobs lose first their log, then everything; the options decide when."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._records: OrderedDict[str, JobRecord] = OrderedDict()
        self._running: dict[str, C] = {}
        self._ended: deque[JobRecord] = deque()
        self._summaries: OrderedDict[str, JobSummary] = OrderedDict()
        self._order: dict[str | None, list[tuple[float, str]]] = {None: []}
        """When jobs were created, and their ids, in order: of those with each label, and of all.

        Entries of jobs that are no longer known are removed when there are many of them.
        """
        self._retention = Retention(unread_limit=options.keep_finished_bytes)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.backing: Callable[[str, Plan], Backing] | None = None
        """Finds the logs of jobs that are not kept here any longer."""
        self.totals: dict[JobStatus, int] = {}
        """How many jobs have ended, by their status."""
        self._yielded = Traffic()
        self.changes = JobChanges()
        """Notifies watchers of all jobs of changes."""
        self._on_end = self._job_ended  # one for all jobs

    def add(self, coordinator: C) -> None:
        """Make a job known, from its submission on."""
        record = coordinator.record
        self._retention.tidy()
        self._add(record)
        self._running[record.job_id] = coordinator
        coordinator.on_end(self._on_end)

    def remember(self, record: JobRecord) -> None:
        """Make a job known that does not run here, or not yet."""
        self._add(record)
        self.ended_elsewhere(record)

    def _add(self, record: JobRecord) -> None:
        self._summaries.pop(record.job_id, None)
        self._records[record.job_id] = record
        self._put_in_order(None, record)
        if record.label is not None:
            self._put_in_order(record.label, record)
        record.changes = self.changes
        record.changed()

    def _put_in_order(self, label: str | None, record: JobRecord) -> None:
        entry, order = (record.created, record.job_id), self._order.setdefault(label, [])
        if not order or order[-1] < entry:
            order.append(entry)  # the usual case
        else:
            bisect.insort(order, entry)
        if label is None and len(order) > 2 * len(self) + _COMPACT:
            found = {label: [entry for entry in order if self._at(entry)] for label, order in self._order.items()}
            self._order = {label: order for label, order in found.items() if order or label is None}

    def _at(self, entry: tuple[float, str]) -> JobRecord | JobSummary | None:
        """Return the job that an entry of the order is about, if it is still known."""
        created, job_id = entry
        found = self._records.get(job_id) or self._summaries.get(job_id)
        return found if found is not None and found.created == created else None

    def ended_elsewhere(self, record: JobRecord) -> None:
        """Note that a job that does not run here has ended: it is remembered as long as others that have."""
        if record.status.terminal and self._records.get(record.job_id) is record:
            self._remember_ended(record)

    def forget(self, job_id: str) -> None:
        """Drop a job that never came to be, or is not wanted any longer."""
        self._running.pop(job_id, None)
        found = self._records.pop(job_id, None)
        if found is not None and found.decided.ended:
            found.expire()
            self._retention.forget(found.log)
        self._summaries.pop(job_id, None)

    def find(self, job_id: str) -> JobRecord | None:
        """Find a job that runs, or ended not too long ago."""
        found = self._records.get(job_id)
        if found is None and job_id in self._summaries:
            return self._from_summary(self._summaries[job_id])
        return found

    def _from_summary(self, summary: JobSummary) -> JobRecord:
        backing = None if self.backing is None else self.backing(summary.job_id, summary.plan)
        return JobRecord.from_summary(summary, backing)

    def coordinator(self, job_id: str) -> C | None:
        """Find a job that has not ended."""
        return self._running.get(job_id)

    @property
    def records(self) -> list[JobRecord]:
        """All jobs that are known: first those of which only a summary is left, then in order of submission."""
        summaries = [self._from_summary(found) for found in self._summaries.values()]
        return [*summaries, *self._records.values()]

    @property
    def kept(self) -> Iterable[JobRecord]:
        """The jobs of which more than a summary is left, in order of submission."""
        return self._records.values()

    @property
    def summaries(self) -> Iterable[JobSummary]:
        """The jobs of which only a summary is left."""
        return self._summaries.values()

    @property
    def held(self) -> tuple[int, int]:
        """How many events the logs of all jobs hold, and how many bytes of values."""
        logs = [record.log for record in self._records.values()]
        return sum(log.held for log in logs), sum(log.size for log in logs)

    @property
    def yielded(self) -> Traffic:
        """The results that have come from the sites, of all jobs that ran here."""
        return sum((coordinator.yielded for coordinator in self._running.values()), self._yielded)

    @property
    def coordinators(self) -> list[C]:
        """The jobs that have not ended."""
        return list(self._running.values())

    def __len__(self) -> int:
        return len(self._records) + len(self._summaries)

    def _job_ended(self, coordinator: C) -> None:
        record = coordinator.record
        self._running.pop(record.job_id, None)
        self._yielded += coordinator.yielded
        if self._records.get(record.job_id) is not record:
            return
        self.totals[record.decided] = self.totals.get(record.decided, 0) + 1
        self._remember_ended(record)

    def _remember_ended(self, record: JobRecord) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        record.ended_at = self._loop.time()
        self._ended.append(record)
        self._retention.ended(record.log, record.label)
        while len(self._ended) > self._options.keep_finished:
            self._summarise(self._ended.popleft())
        if self._timer is None and self._ended:
            self._timer = self._loop.call_at(self._due(), self._drop_old)

    def _summarise(self, record: JobRecord) -> None:
        summary = record.expire()
        self._retention.forget(record.log)
        if self._records.get(record.job_id) is not record:
            return
        del self._records[record.job_id]
        self._summaries[record.job_id] = summary
        while len(self._summaries) > self._options.keep_summaries:
            self._summaries.popitem(last=False)

    def newest(
        self, before: tuple[float, str] | None = None, label: str | None = None
    ) -> Iterator[JobRecord | JobSummary]:
        """Yield the known jobs, the newest first; the table may change between two of them.

        Only jobs older than ``before`` are yielded: the time when a job was created, and its id. With a label, only
        those that have it are yielded, and no others are read.
        """
        key = before
        while order := self._order.get(label):
            at = len(order) if key is None else bisect.bisect_left(order, key)
            if at == 0:
                return
            key = order[at - 1]
            found = self._at(key)
            if found is not None and (label is None or found.spec.label == label):
                yield found

    def _due(self) -> float:
        return self._ended[0].ended_at + self._options.keep_finished_for

    def _drop_old(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._ended and self._due() <= loop.time():
            self._summarise(self._ended.popleft())
        if self._ended:
            self._timer = loop.call_at(max(self._due(), loop.time() + _EARLIEST), self._drop_old)

    def close(self) -> None:
        """Stop expiring old logs, and end the watchers."""
        self.changes.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
