"""Observe the calls of one job at one location: count them, or record their spans, or both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dfm_async.base.signals import Throttle
from dfm_async.errors import EncodingError
from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net.game_state import PendingActivity
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.telemetry.recorder import Failure, Recorder, TracedCall, failure_of
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of

_INTERVAL: Final = 0.1
"""The number of seconds between reports."""
_SAMPLE: Final = 64
"""The number of calls that a report lists; the others are only counted."""


class Observation(msgspec.Struct, eq=False):
    """One attempt of a call, while it waits or runs. ``trace``: its span, if the job is traced."""

    node: str
    frame: Frame
    attempt: int
    trace: TracedCall | None
    start: float = msgspec.field(default_factory=time.time)
    waited: float = 0.0
    """For how many seconds it has waited for what it needs."""

    def started(self) -> None:
        """Note that the call has what it waited for, such as a thread. May be called from any thread."""
        self._starts(time.time())
        if self.trace is not None:
            self.trace.started()

    def granted(self, waited_for: str) -> None:
        """Note that the limits of the site let the call start; ``waited_for``: the limit that it had to wait for."""
        self.start = time.time()
        if self.trace is not None:
            self.trace.granted(waited_for)

    def stopped(self) -> None:
        """Note that a synchronous call leaves its code. Called from its thread."""

    def ran(self, start: float, seconds: float, worker: int, stacks: str) -> None:
        """Note when a call ran in another worker: since when, for how many seconds, in which process; its samples."""
        self._starts(start)
        if self.trace is not None:
            self.trace.ran(start, seconds, worker, stacks)

    def _starts(self, now: float) -> None:
        self.start, self.waited = now, max(0.0, now - self.start)


class CallObserver:
    """Is notified when calls begin and end."""

    def __init__(self, resources: SiteResources, start: msg.StartJob, recorder: Recorder | None) -> None:
        self._codec = resources.codec if start.spec.measured else None
        self._counter = _CallCounter(resources, start.job, start.at) if start.spec.watch else None
        self._recorder = recorder

    def began(self, activity: PendingActivity, operation: str, attempt: int) -> Observation:
        """Note that an attempt begins."""
        node, frame, trace = activity.label, activity.frame, None
        if self._recorder is not None:
            trace = self._recorder.begin_call(operation, node, frame, attempt)
        if self._counter is not None:
            self._counter.began(node)
        return Observation(node, frame, attempt, trace)

    def given(self, seen: Observation, provider: str | None, args: Mapping[str, Any] | None) -> None:
        """Note the arguments of a call; None if streams are among them."""
        if self._codec is not None and seen.trace is not None:
            seen.trace.given(provider, None if args is None else self._size(dict(args)))

    def returned(self, seen: Observation, value: Any) -> None:
        """Note that an attempt has returned a value."""
        if self._codec is not None and seen.trace is not None:
            seen.trace.returned(lambda: self._size(value))
        self.ended(seen, None)

    def _size(self, value: Any) -> int | None:
        """Return the number of bytes of an encoded value; None if it cannot be encoded."""
        assert self._codec is not None  # noqa: S101 - the callers have checked it
        try:
            return size_of(self._codec.payload(self._codec.pack(value)))
        except EncodingError:
            return None

    def ended(self, seen: Observation, error: BaseException | ErrorRecord | None) -> None:
        """Note that an attempt has returned or raised."""
        if seen.trace is not None:
            seen.trace.end(None if error is None else _failure(error))
        if self._counter is not None:
            self._counter.ended(seen, error is not None)

    def flush(self) -> None:
        """Report the counts to the application now."""
        if self._counter is not None:
            self._counter.reports.flush()


def _failure(error: BaseException | ErrorRecord) -> Failure:
    if isinstance(error, ErrorRecord):
        return error.type_name, error.message, error.traceback
    return failure_of(error)


class _CallCounter:
    """Count the calls of each node, keep a sample of those that have ended, and report them at intervals."""

    def __init__(self, resources: SiteResources, number: int, at: int) -> None:
        self._resources = resources
        self._number = number
        self._at = at
        self._counts: dict[str, list[int]] = {}
        self._changed: set[str] = set()
        self._calls: list[tuple[str, Frame, int, float, float, bool, float]] = []
        self._left_out = 0
        self.reports = Throttle(_INTERVAL, self._send)

    def began(self, node: str) -> None:
        """Note that an attempt begins."""
        counts = self._counts.get(node)
        if counts is None:
            counts = self._counts[node] = [0, 0, 0]
        counts[0] += 1
        self._changed.add(node)
        self.reports.request()

    def ended(self, seen: Observation, failed: bool) -> None:
        """Note that an attempt has returned or raised."""
        node = seen.node
        self._counts[node][2 if failed else 1] += 1
        self._changed.add(node)
        if len(self._calls) < _SAMPLE:
            self._calls.append((node, seen.frame, seen.attempt, seen.start, time.time(), failed, seen.waited))
        else:
            self._left_out += 1
        self.reports.request()

    def _send(self) -> bool:
        if not self._changed:
            return False
        changed, self._changed = self._changed, set()
        calls, self._calls = self._calls, []
        left_out, self._left_out = self._left_out, 0
        nodes = [(node, started, done, failed) for node in changed for started, done, failed in [self._counts[node]]]
        self._resources.report(msg.CallsMade(self._number, self._at, nodes, calls, left_out))
        return True
