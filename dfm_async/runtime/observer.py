"""Watches the calls of one job at one location: counts them, or records their spans, or both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from dfm_async.errors import EncodingError
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.runtime.paced import Paced
from dfm_async.telemetry.recorder import Failure, Recorder, TracedCall
from dfm_async.telemetry.user_spans import failure_of
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of

if TYPE_CHECKING:
    from dfm_async.net.game import Activity
    from dfm_async.runtime.job import SiteJob

__all__ = ["CallObserver", "Observation"]

_PAUSE: Final = 0.1
"""How many seconds lie between reports."""
_SAMPLE: Final = 64
"""How many calls a report tells one by one; the others are only counted."""


class Observation:
    """One attempt of a call, while it waits or runs. ``trace``: its span, if the job is traced."""

    __slots__ = ("attempt", "frame", "node", "start", "trace")

    def __init__(self, node: str, frame: Frame, attempt: int, trace: TracedCall | None) -> None:
        self.node = node
        self.frame = frame
        self.attempt = attempt
        self.start = time.time()
        self.trace = trace

    def started(self) -> None:
        """The call has got what it waited for, such as a thread. May be called from any thread."""
        self.start = time.time()
        if self.trace is not None:
            self.trace.started()


class CallObserver:
    """Sees calls begin and end.

    Args:
        job: the job.
        counted: whether its calls are counted.
        recorder: where spans go, if it is traced.
        measured: whether spans tell the sizes of what is passed and returned.
    """

    __slots__ = ("_codec", "_counter", "_recorder")

    def __init__(self, job: SiteJob, counted: bool, recorder: Recorder | None, *, measured: bool = False) -> None:
        self._codec = job.runtime.codec if measured else None
        self._counter = _CallCounter(job) if counted else None
        self._recorder = recorder

    def began(self, activity: Activity, operation: str, attempt: int) -> Observation:
        """An attempt begins."""
        node, frame, trace = activity.label, activity.frame, None
        if self._recorder is not None:
            trace = self._recorder.begin_call(operation, node, frame, attempt)
        if self._counter is not None:
            self._counter.began(node)
        return Observation(node, frame, attempt, trace)

    def given(self, seen: Observation, provider: str | None, args: Mapping[str, Any] | None) -> None:
        """What it was called with; None if streams are among that."""
        if self._codec is not None and seen.trace is not None:
            seen.trace.given(provider, None if args is None else self._size(dict(args)))

    def returned(self, seen: Observation, value: Any) -> None:
        """It has returned a value, and ends."""
        if self._codec is not None and seen.trace is not None:
            seen.trace.returned(lambda: self._size(value))
        self.ended(seen, None)

    def _size(self, value: Any) -> int | None:
        """How many bytes a value has when it is sent; None if it cannot be."""
        assert self._codec is not None  # noqa: S101 - the callers have seen it
        try:
            return size_of(self._codec.payload(self._codec.pack(value)))
        except EncodingError:
            return None

    def ended(self, seen: Observation, error: BaseException | ErrorRecord | None) -> None:
        """An attempt has returned or raised."""
        if seen.trace is not None:
            seen.trace.end(None if error is None else _failure(error))
        if self._counter is not None:
            self._counter.ended(seen, error is not None)

    def flush(self) -> None:
        """Tells the application what was counted."""
        if self._counter is not None:
            self._counter.paced.now()


def _failure(error: BaseException | ErrorRecord) -> Failure:
    if isinstance(error, ErrorRecord):
        return error.type_name, error.message, error.traceback
    return failure_of(error)


class _CallCounter:
    """Counts the calls of each node, keeps a sample of those that have ended, and tells of them now and then."""

    __slots__ = ("_calls", "_changed", "_counts", "_job", "_left_out", "paced")

    def __init__(self, job: SiteJob) -> None:
        self._job = job
        self._counts: dict[str, list[int]] = {}
        self._changed: set[str] = set()
        self._calls: list[tuple[str, Frame, int, float, float, bool]] = []
        self._left_out = 0
        self.paced = Paced(_PAUSE, self._send)

    def began(self, node: str) -> None:
        """An attempt begins."""
        counts = self._counts.get(node)
        if counts is None:
            counts = self._counts[node] = [0, 0, 0]
        counts[0] += 1
        self._changed.add(node)
        self.paced.soon()

    def ended(self, seen: Observation, failed: bool) -> None:
        """An attempt has returned or raised."""
        node = seen.node
        self._counts[node][2 if failed else 1] += 1
        self._changed.add(node)
        if len(self._calls) < _SAMPLE:
            self._calls.append((node, seen.frame, seen.attempt, seen.start, time.time(), failed))
        else:
            self._left_out += 1
        self.paced.soon()

    def _send(self) -> bool:
        if not self._changed:
            return False
        changed, self._changed = self._changed, set()
        calls, self._calls = self._calls, []
        left_out, self._left_out = self._left_out, 0
        job = self._job
        nodes = [(node, started, done, failed) for node in changed for started, done, failed in [self._counts[node]]]
        job.runtime.report(msg.CallsMade(job.number, job.at, nodes, calls, left_out))
        return True
