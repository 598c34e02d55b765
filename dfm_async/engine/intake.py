"""What the locations of a job send goes to its log: in order, and each result and error once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from dfm_async.base.containers import BoundedDict
from dfm_async.errors import DfmError, OperationFailed
from dfm_async.model.events import ErrorRecord, Failure, FailureHandled, FrameCompleted, Progress
from dfm_async.model.ids import Frame
from dfm_async.results.event_codec import Run, result_events
from dfm_async.results.record import JobRecord
from dfm_async.results.seen import Seen
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Broken
from dfm_async.wire.memory import Payload, size_of

_PROGRESS: Final = 1_000
"""The largest number of calls whose last report is kept while the log is full."""


class Intake:
    """Write the log of one job.

    ``reruns``: whether parameter sets may run again, so that what the log has of them must be known.
    """

    __slots__ = ("_codec", "_errors", "_logged", "_progress", "_record", "_seen")

    def __init__(self, record: JobRecord, codec: PayloadCodec, reruns: bool) -> None:
        self._record = record
        self._codec = codec
        self._seen = Seen() if reruns else None
        self._errors: dict[int, dict[str, DfmError]] = {}
        """The errors of the parameter sets in flight, by set, and there by their ids."""
        self._logged: LoggedErrors | None = {} if reruns else None
        """What the log has of parameter sets that may run again; None if none may."""
        self._progress: BoundedDict[tuple[str, Frame], Progress] | None = None

    def resume(self, seen: Seen, logged: LoggedErrors) -> None:
        """Begin with what the log has of parameter sets that run again."""
        self._seen, self._logged = seen, logged

    def results(self, message: msg.ResultBatch) -> tuple[int, int]:
        """Add results; return the number of values and of bytes.

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
            broken = [event.error for event in events if type(event) is Failure] if Broken in map(type, fresh) else ()
            for error in broken:
                record.add_error(error)
            if broken and record.log.unfinished is not None:
                for event in events:
                    record.note(event)
            if record.journal is not None:
                whole = message.payload if len(fresh) == len(values) and type(message.payload) is bytes else b""
                record.journal.results(first, message.at, runs, fresh, whole, len(broken))
            log.extend(events, size // max(1, len(values)))  # last: it may fail the job, which adds further events
            log.changed.notify()
        return len(values), size

    def error(self, found: ErrorRecord) -> DfmError | None:
        """Add an error; return it if it is new. It may have been reported in an earlier run of its parameter set."""
        root = found.frame[0] if found.frame else -1
        known = self._errors.setdefault(root, {})
        if found.id in known:
            return None
        logged = {} if self._logged is None else self._logged.setdefault(root, {})
        earlier = logged.get((found.node, found.frame))
        if earlier is not None:
            known[found.id] = earlier
            return None
        error = known[found.id] = logged[found.node, found.frame] = rebuild(found)
        record, log = self._record, self._record.log
        record.add_error(error)
        record.add(Failure(log.end, None, error, found.frame, found.site, found.node), len(found.traceback))
        log.changed.notify()
        return error

    def failed_yield(self, message: msg.YieldFailed) -> None:
        """Add that a yield will not come."""
        if self._seen is not None and not self._seen.add(message.point, message.frame, -1, 1):
            return
        record, log = self._record, self._record.log
        place, node = record.plan.points[message.point]
        found = [self._errors.get(root, {}).get(message.error) for root in (message.frame[0], -1)]
        error = found[0] or found[1] or DfmError(f"error {message.error}")
        site = record.plan.sites_at[message.at]
        record.add(Failure(log.end, place, error, message.frame, site, node), 0, message.point)
        log.changed.notify()

    def progress(self, message: msg.ProgressMade) -> None:
        """Add how far calls are. While the log is full the last report of each waits."""
        site, log = self._record.plan.sites_at[message.at], self._record.log
        for node, frame, done, total, note in message.reports:
            progress = Progress(offset=log.end, frame=frame, site=site, node=node, done=done, total=total, note=note)
            if not log.full:
                self._record.add(progress)
                continue
            if self._progress is None:
                self._progress = BoundedDict(_PROGRESS)
            self._progress.pop((node, frame), None)  # so that it becomes the newest
            self._progress[node, frame] = progress
        log.changed.notify()

    def release_progress(self) -> None:
        """Add the reports that have waited: there is room, or the job ends."""
        if self._progress is None:
            return
        held, self._progress = self._progress, None
        for found in held.values():
            self._record.add(msgspec.structs.replace(found, offset=self._record.log.end))

    def events(self, message: msg.EventsMade) -> None:
        """Add events, also while the log is full: like errors they use up credit, so that their site holds back."""
        record, log = self._record, self._record.log
        sites = record.plan.sites_at
        called = {sites[at] for at, caller in record.plan.contained.items() if caller == message.at}
        for event in message.events:
            # A caller reports what it has decided about the calls of a site that was lost.
            site = event.site if type(event) is FailureHandled and event.site in called else sites[message.at]
            _, _, _, _, *values = msgspec.structs.astuple(event)
            record.add(msgspec.structs.replace(event, offset=log.end, site=site), sum(map(_text_size, values)))
        log.changed.notify()

    def frame_done(self, index: int) -> None:
        """Add that a parameter set is done: nothing of it will come again."""
        self._errors.pop(index, None)
        if self._logged is not None:
            self._logged.pop(index, None)
        if self._seen is not None:
            self._seen.forget(index)
        self._record.add(FrameCompleted(self._record.log.end, (index,)))


def _text_size(value: Any) -> int:
    """Return the number of characters of a text, or of those of a dict."""
    if type(value) is dict:
        return sum(map(_text_size, value.values()))
    return len(value) if type(value) is str else 0


def _only_new(seen: Seen, runs: Sequence[Run], values: Sequence[Any]) -> tuple[list[Run], list[Any]]:
    """Leave out what an earlier run of the parameter set has yielded."""
    new_runs: list[Run] = []
    new_values: list[Any] = []
    position = 0
    for point, frame, start, count in runs:
        for part in seen.add(point, frame, start, count):
            new_runs.append((point, frame, -1 if start < 0 else start + part.start, len(part)))
            new_values.extend(values[position + part.start : position + part.stop])
        position += count
    return new_runs, new_values


class PayloadCodec(Protocol):
    """What running a job needs of a codec."""

    def payload(self, values: Any) -> bytes | Payload:
        """Turn packed values into the payload of a message."""

    def loads(self, data: bytes | memoryview | Payload) -> Any:
        """Rebuild one value.

        Raises:
            EncodingError: the bytes are not a value, or it cannot be rebuilt here.
        """

    def loads_batch(self, data: bytes | memoryview | Payload) -> list[Any]:
        """Rebuild a list of values.

        Raises:
            EncodingError: the bytes are not a list of values.
        """


LoggedErrors = dict[int, dict[tuple[str, Frame], DfmError]]
"""The errors that the log has, by parameter set, and there by node and frame."""


def rebuild(found: ErrorRecord) -> OperationFailed:
    """Make an exception of an error that has travelled, with its cause if that can be rebuilt."""
    error = OperationFailed(
        found.site,
        found.operation,
        found.node,
        found.frame,
        found.attempt,
        found.type_name,
        found.message,
        found.traceback,
    )
    if found.cause:
        try:
            cause = pickle.loads(found.cause)  # noqa: S301 - from a process of our own tree
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a class that is not known here, or raises: the text must do
            cause = None
        if isinstance(cause, BaseException):
            error.__cause__ = cause
    return error
