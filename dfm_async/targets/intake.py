"""What the locations of a job send goes to its log: in order, and each result and error once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dfm_async.errors import DfmError
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.events import Failure, FrameCompleted, Metrics, Progress
from dfm_async.model.ids import Frame
from dfm_async.results.decode import Run, result_events
from dfm_async.results.record import JobRecord
from dfm_async.results.seen import Seen
from dfm_async.targets.failures import FailureBook, Told
from dfm_async.targets.values import Values
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of

__all__ = ["Intake"]

_PROGRESS: Final = 1_000
"""Of how many calls the last report is kept while the log is full."""


class Intake:
    """Writes the log of one job.

    Args:
        record: the job.
        codec: how values travel.
        reruns: whether parameter sets may run again, so that what the log has of them must be known.
    """

    __slots__ = ("_codec", "_failures", "_progress", "_record", "_seen")

    def __init__(self, record: JobRecord, codec: Values, reruns: bool) -> None:
        self._record = record
        self._codec = codec
        self._seen = Seen() if reruns else None
        self._failures = FailureBook({} if reruns else None)
        self._progress: dict[tuple[str, Frame], Progress] | None = None

    def resume(self, seen: Seen, told: Told) -> None:
        """Begins with what the log has of parameter sets that run again."""
        self._seen, self._failures = seen, FailureBook(told)

    def results(self, message: msg.Results) -> tuple[int, int]:
        """Adds results; tells how many values came, and how many bytes.

        Raises:
            EncodingError: they cannot be read.
        """
        record, log = self._record, self._record.log
        values = self._codec.loads_batch(message.payload)
        size = size_of(message.payload)
        runs, fresh = message.runs, values
        if self._seen is not None:
            runs, fresh = _only_new(self._seen, message.runs, values)
        if fresh:
            first = log.end
            events = result_events(record.plan, message.at, runs, fresh, first)
            broken = [event.error for event in events if type(event) is Failure]
            for error in broken:
                record.add_error(error)
            if record.journal is not None:
                whole = message.payload if len(fresh) == len(values) and type(message.payload) is bytes else b""
                record.journal.results(first, message.at, runs, fresh, whole, len(broken))
            log.extend(events, size // max(1, len(values)))  # last: it may fail the job, which adds further events
            log.wake()
        return len(values), size

    def error(self, found: ErrorRecord) -> DfmError | None:
        """Adds an error; gives it if it is new."""
        error = self._failures.add(found)
        if error is not None:
            record, log = self._record, self._record.log
            record.add_error(error)
            record.add(Failure(log.end, None, error, found.frame, found.site, found.node), len(found.traceback))
            log.wake()
        return error

    def failed_yield(self, message: msg.YieldFailed) -> None:
        """Adds that a yield will not come."""
        if self._seen is not None and not self._seen.add(message.point, message.frame, -1, 1):
            return
        record, log = self._record, self._record.log
        place, node = record.plan.points[message.point]
        error = self._failures.find(message.frame[0], message.error)
        site = record.plan.sites_at[message.at]
        record.add(Failure(log.end, place, error, message.frame, site, node), 0, message.point)
        log.wake()

    def progress(self, message: msg.ProgressMade) -> None:
        """Adds how far calls are. While the log is full the last report of each waits."""
        site, log = self._record.plan.sites_at[message.at], self._record.log
        for node, frame, done, total, note in message.reports:
            progress = Progress(log.end, frame, site, node, done, total, note)
            if log.full:
                self._hold(progress)
            else:
                self._record.add(progress)
        log.wake()

    def _hold(self, progress: Progress) -> None:
        if self._progress is None:
            self._progress = {}
        self._progress.pop((progress.node, progress.frame), None)
        self._progress[progress.node, progress.frame] = progress
        if len(self._progress) > _PROGRESS:
            del self._progress[next(iter(self._progress))]

    def release_progress(self) -> None:
        """Adds the reports that have waited: there is room, or the job ends."""
        if self._progress is None:
            return
        held, self._progress = self._progress, None
        for found in held.values():
            offset = self._record.log.end
            self._record.add(Progress(offset, found.frame, found.site, found.node, found.done, found.total, found.note))

    def metrics(self, message: msg.MetricsMade) -> None:
        """Adds metrics, also while the log is full: like errors they use up credit, so that their site holds back."""
        record, log = self._record, self._record.log
        site = record.plan.sites_at[message.at]
        for node, frame, values, step in message.reports:
            text = sum(len(value) for value in values.values() if type(value) is str)
            record.add(Metrics(log.end, frame, site, node, values, step), text)
        log.wake()

    def frame_done(self, index: int) -> None:
        """Adds that a parameter set is done: nothing of it will come again."""
        self._failures.forget(index)
        if self._seen is not None:
            self._seen.forget(index)
        self._record.add(FrameCompleted(self._record.log.end, (index,)))


def _only_new(seen: Seen, runs: Sequence[Run], values: Sequence[Any]) -> tuple[list[Run], list[Any]]:
    """Leaves out what an earlier run of the parameter set has yielded."""
    new_runs: list[Run] = []
    new_values: list[Any] = []
    position = 0
    for point, frame, start, count in runs:
        for part in seen.add(point, frame, start, count):
            new_runs.append((point, frame, -1 if start < 0 else start + part.start, len(part)))
            new_values.extend(values[position + part.start : position + part.stop])
        position += count
    return new_runs, new_values
