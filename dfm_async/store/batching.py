"""What is queued between two commits, and what one transaction has to write of it. Does no I/O: for every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from dfm_async.errors import StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry

_WRITE: Final = 64
"""About the number of bytes that a queued write takes besides its data."""


class JobBeforeCommit(NamedTuple):
    """What a database holds of a job before a commit.

    Attributes:
        key: identifies the job in the database.
        fence: the number of its owner.
        end: the offset of its next event.
        frames: the number of its parameter sets.
    """

    key: Any
    fence: int
    end: int
    frames: int


class JobWrites(msgspec.Struct, kw_only=True):
    """What is queued for one job."""

    size: int = 0
    errors: int = 0
    done: int = 0
    entries: list[Entry] = []
    params: list[tuple[int, bytes]] = []
    status: JobStatus | None = None
    reason: str | None = None
    finished: float | None = None
    stopped: bool | None = None
    answers: list[tuple[int, bytes]] = []

    def merge(self, later: JobWrites) -> None:
        """Add what was queued later."""
        self.entries += later.entries
        self.params += later.params
        self.answers += later.answers
        self.size += later.size
        self.errors += later.errors
        self.done += later.done
        if later.status is not None:
            self.status, self.reason, self.finished = later.status, later.reason, later.finished
        self.stopped = later.stopped if later.stopped is not None else self.stopped

    def gap_after(self, state: JobBeforeCommit) -> tuple[str, int, int] | None:
        """Return the first write that does not follow what is stored: its kind, its number, the expected one."""
        end, frames = state.end, state.frames
        if not (type(end) is type(frames) is int):  # a damaged row
            return "event", self.entries[0].first if self.entries else 0, end
        for entry in self.entries:
            if entry.first != end or entry.count < 1:
                return "event", entry.first, end
            end += entry.count
        for number, _ in self.params:
            if number != frames:
                return "parameter set", number, frames
            frames += 1
        return None


class JobChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a transaction has to write of one job.

    Attributes:
        key: identifies the job in the database.
        writes: its new events and parameter sets; the numbers to add; status, reason and end if the status is not None;
            whether it is stopped, if not None.
        end: the offset that its next event will get.
        frames: the number of its parameter sets afterwards.
    """

    key: Any
    writes: JobWrites
    end: int
    frames: int


class Committed(msgspec.Struct):
    """The outcome of a commit: the ends of the jobs that it changed, and the jobs that it left out."""

    ends: dict[str, int]
    fenced: list[str]
    gaps: list[tuple[str, StoreError]]


class Batch(msgspec.Struct):
    """Writes by job, and commands, which run behind them in the same transaction."""

    writes: dict[str, JobWrites] = {}
    commands: list[Any] = []
    size: int = 0
    """About the number of bytes of the writes."""
    committed: Committed | None = None
    """The outcome, once the transaction is committed."""

    def __bool__(self) -> bool:
        return bool(self.writes or self.commands)

    def _of(self, job_id: str, size: int) -> JobWrites:
        """Return what is queued for a job; ``size`` bytes are about to be added."""
        writes = self.writes.get(job_id)
        if writes is None:
            writes = self.writes[job_id] = JobWrites()
        writes.size += size
        self.size += size
        return writes

    def append(self, job_id: str, entry: Entry, errors: int, done: int) -> None:
        """Add events."""
        writes = self._of(job_id, len(entry.head) + len(entry.payload) + _WRITE)
        writes.entries.append(entry)
        writes.errors += errors
        writes.done += done

    def add_params(self, job_id: str, first: int, rows: Sequence[bytes]) -> None:
        """Add parameter sets."""
        writes = self._of(job_id, sum(map(len, rows)) + _WRITE * len(rows))
        writes.params += enumerate(rows, first)

    def update(
        self, job_id: str, status: JobStatus | None, reason: str | None, finished: float | None, stopped: bool | None
    ) -> None:
        """Change a job."""
        writes = self._of(job_id, _WRITE)
        if status is not None:
            writes.status, writes.reason, writes.finished = status, reason, finished
        if stopped is not None:
            writes.stopped = stopped

    def answer(self, job_id: str, number: int, data: bytes) -> None:
        """Answer a request."""
        self._of(job_id, len(data) + _WRITE).answers.append((number, data))

    def discard(self, job_id: str) -> bool:
        """Drop what is queued for a job. Return whether there was anything."""
        writes = self.writes.pop(job_id, None)
        if writes is not None:
            self.size -= writes.size
        return writes is not None

    def merge(self, later: Batch) -> None:
        """Add what was queued later."""
        for job_id, writes in later.writes.items():
            mine = self.writes.get(job_id)
            if mine is None:
                self.writes[job_id] = writes
            else:
                mine.merge(writes)
        self.commands += later.commands
        self.size += later.size

    def changes(
        self, load: Callable[[str], JobBeforeCommit | None], fence: int, path: str, committed: Committed
    ) -> Iterator[JobChange]:
        """Yield what a transaction has to write, job by job.

        ``load`` returns what the database holds of a job, inside the transaction. Writes for jobs with another fence
        are left out. ``committed`` gets the ends of the jobs, and those that are left out.
        """
        for job_id, writes in self.writes.items():
            state = load(job_id)
            if state is None or state.fence != fence:
                committed.fenced.append(job_id)
                continue
            gap = writes.gap_after(state)
            if gap is not None:
                committed.gaps.append((job_id, _gap(path, job_id, *gap)))
                continue
            end = committed.ends[job_id] = state.end + sum(entry.count for entry in writes.entries)
            yield JobChange(key=state.key, writes=writes, end=end, frames=state.frames + len(writes.params))


def _gap(path: str, job_id: str, what: str, first: int, expected: int) -> StoreError:
    return StoreError(
        path,
        f"job {job_id}: {what} {first} came where {expected} is next, and what came with it was left out",
        "Write the numbers of a job without gaps; take the job over to get its present numbers",
    )
