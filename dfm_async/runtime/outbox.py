"""What one job at one location sends: results, errors, tokens, reports. Collected during a turn of the loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from dfm_async.base.signals import Signal, Throttle
from dfm_async.model.events import ErrorRecord, OperationEvent
from dfm_async.model.ids import Frame
from dfm_async.net import effects as fx
from dfm_async.net.tokens import SKIPPED, Failed
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.telemetry.recorder import Recorder
from dfm_async.telemetry.spans import Origin
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Packed
from dfm_async.wire.memory import Payload, size_of

_REPORT_INTERVAL: Final = 0.05
"""The number of seconds between reports of progress and events."""
_EVENTS_BATCH: Final = 1_000
"""The number of events that are sent without waiting for the interval."""
_NONE: Final[Mapping[int, int]] = {}


class States:
    """The kinds of tokens in messages."""

    VALUE: Final = 0
    SKIPPED: Final = 1
    FAILED: Final = 2
    OPEN: Final = 3
    STREAM: Final = 4


def error_data(error: ErrorRecord) -> list[Any]:
    """Return an error as the value of a token."""
    data = [getattr(error, name) for name in ErrorRecord.__struct_fields__]
    data[4] = list(data[4])
    return data


class _Tokens(msgspec.Struct):
    """Tokens for one location that wait to be sent, and the number of bytes of the large ones."""

    heads: list[tuple[int, Frame, int]] = []
    values: list[Any] = []
    size: int = 0


class Outbox:
    """Collect what is to be sent, and count what the application still accepts.

    Results need credit: the application grants it as its log has room. Failures and events use credit, too, but do not
    wait for it; when they have used too much in advance, the job is :attr:`stalled`. Nothing else is held back.

    Of each call's progress only the last report counts; of events, such as metrics, all do. Both are sent at the end of
    the turn of the loop, or when the interval since the last reports is over.
    """

    __slots__ = (
        "_absent",
        "_at",
        "_byte_credits",
        "_charged",
        "_credit_granted",
        "_credits",
        "_elements_done",
        "_events",
        "_frames_done",
        "_incarnation",
        "_incarnations",
        "_number",
        "_progress",
        "_recorder",
        "_reported",
        "_resources",
        "_routes",
        "_runs",
        "_tokens",
        "_values",
        "_window",
        "reporting",
    )

    def __init__(self, resources: SiteResources, start: msg.StartJob, recorder: Recorder | None = None) -> None:
        self._resources = resources
        self._recorder = recorder
        self._number = start.job
        self._at = start.at
        self._routes = list(start.routes)
        self._incarnation = start.incarnation
        self._incarnations: Mapping[int, int] = _NONE
        self._absent: Collection[int] = ()
        """Locations that were lost: nothing is sent there."""
        self._credits = self._window = start.spec.limits.window
        self._byte_credits = start.spec.limits.window_bytes
        self._charged = 0  # for what has been added and not been sent
        self._runs: list[tuple[int, Frame, int, int]] = []
        self._values: list[Any] = []
        self._frames_done: list[int] | None = None
        self._events: list[OperationEvent] | None = None
        self._tokens: dict[int, _Tokens] = {}
        self._elements_done: dict[tuple[int, int], list[Frame]] | None = None
        self._reported: dict[int, set[str]] | None = None
        self._progress: dict[tuple[str, Frame], tuple[str, Frame, float, float | None, str]] | None = None
        self.reporting: Throttle | None = None
        """Sends progress and events, if there were any."""
        self._credit_granted: Signal | None = None

    # results

    @property
    def stalled(self) -> bool:
        """Whether so much was sent without credit that the job must wait for the application."""
        return self._credits <= -self._window

    @property
    def open(self) -> bool:
        """Whether the application accepts a further result."""
        return self._credits > 0 and self._byte_credits > 0

    def grant(self, items: int, size: int) -> None:
        """Note that the application accepts further results."""
        self._credits += items
        self._byte_credits += size

    def add_result(self, point: int, frame: Frame, packed: Any) -> None:
        """Add one result."""
        self._credits -= 1
        self._runs.append((point, frame, -1, 1))
        self._values.append(packed)
        if type(packed) is Packed:
            self._charge(packed.size)

    def add_element(self, point: int, frame: Frame, index: int, packed: Any) -> None:
        """Add one element of a yielded stream."""
        self._credits -= 1
        self._values.append(packed)
        self._add_run(point, frame, index, 1)
        if type(packed) is Packed:
            self._charge(packed.size)

    def add_elements(self, point: int, frame: Frame, index: int, packed: list[Any]) -> int:
        """Add elements of a yielded stream, as far as there is credit and up to a large one; return their number."""
        room, size = min(len(packed), self._credits), 0
        for count, value in enumerate(packed[:room], 1):
            if type(value) is Packed:
                room, size = count, value.size
                break
        self._credits -= room
        self._values.extend(packed[:room])
        self._add_run(point, frame, index, room)
        if size:
            self._charge(size)
        return room

    def _add_run(self, point: int, frame: Frame, index: int, count: int) -> None:
        """Add the head of elements; consecutive ones share it."""
        if self._runs:
            last_point, last_frame, start, before = self._runs[-1]
            if last_point == point and start >= 0 and start + before == index and last_frame == frame:
                self._runs[-1] = (point, frame, start, before + count)
                return
        self._runs.append((point, frame, index, count))

    def _charge(self, size: int) -> None:
        """Count a large value at once, and send the results when they are as many bytes as one message should have.

        Many large values must not wait before they are sent and counted exactly.
        """
        self._byte_credits -= size
        self._charged += size
        if self._charged >= msg.BATCH_BYTES:
            if self._events:
                self.send_events()
            self._send_results([])

    async def wait_open(self) -> None:
        """Wait for credit."""
        if self._credit_granted is None:
            self._credit_granted = Signal()
        await self._credit_granted.wait()

    def wake(self) -> None:
        """Wake the tasks that wait for credit."""
        if self._credit_granted is not None:
            self._credit_granted.notify()

    @property
    def pending(self) -> bool:
        """Whether there is something to send at the end of this turn of the loop."""
        return bool(self._values or self._frames_done or self._tokens or self._elements_done)

    @property
    def has_frames_done(self) -> bool:
        """Whether parameter sets are done, and the application was not notified yet."""
        return self._frames_done is not None

    def frame_done(self, index: int) -> None:
        """Notify the application that a parameter set is done here, after everything that was added before."""
        if self._frames_done is None:
            self._frames_done = []
        self._frames_done.append(index)
        if self._reported:
            self._reported.pop(index, None)

    # progress and events

    def add_progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Add a report of how far a call is."""
        if self._progress is None:
            self._progress = {}
        self._progress[node, frame] = (node, frame, done, total, note)
        self._report_soon()

    def add_event(self, event: OperationEvent) -> None:
        """Add an event of an operation."""
        if self._events is None:
            self._events = []
        self._events.append(event)
        if len(self._events) >= _EVENTS_BATCH:
            self.send_events()
        else:
            self._report_soon()

    def _report_soon(self) -> None:
        if self.reporting is None:
            self.reporting = Throttle(_REPORT_INTERVAL, self._send_reports)
        self.reporting.request()

    def send_reports(self) -> None:
        """Send progress and events now: something ends that they must not follow."""
        if self.reporting is not None:
            self.reporting.flush()

    def drop_progress(self) -> None:
        """Send the events now, but no progress: the job was cancelled."""
        self._progress = None
        self.send_reports()

    def _send_reports(self) -> bool:
        sent = self.send_events()
        if self._progress:
            reports, self._progress = list(self._progress.values()), None
            self._resources.report(msg.ProgressMade(self._number, self._at, reports))
            sent = True
        return sent

    def send_events(self) -> bool:
        """Send the events, before any results of the calls that made them. Return whether there were any."""
        if not self._events:
            return False
        events, self._events = self._events, None
        self._credits -= len(events)
        self._resources.report(msg.EventsMade(self._number, self._at, events))
        return True

    # errors

    def report(self, message: msg.Message) -> None:
        """Send a message to the application, after everything that was added before."""
        if self._events:
            self.send_events()
        if self._values:
            self._send_results([])
        self._resources.report(message)

    def report_error(self, error: ErrorRecord) -> None:
        """Report an error to the application, once."""
        if self._reported is None:
            self._reported = {}
        reported = self._reported.setdefault(error.frame[0] if error.frame else -1, set())
        if error.id not in reported:
            reported.add(error.id)
            self._credits -= 1
            self.report(msg.OperationError(self._number, self._at, error))

    def wait(self, node: str, frame: Frame, event: str, seconds: float | None) -> None:
        """Ask for an event, or for the end of a time."""
        self._credits -= 1
        self.report(msg.WaitRequest(self._number, self._at, node, frame, event, seconds))

    def yield_failed(self, point: int, frame: Frame, error: ErrorRecord) -> None:
        """Notify the application that a yield has failed."""
        self.report_error(error)
        self._credits -= 1
        self.report(msg.YieldFailed(self._number, self._at, point, frame, error.id))

    # other locations

    def add_token(self, route: int, place: int, frame: Frame, state: int, packed: Any) -> None:
        """Add a token for another location."""
        if route in self._absent:
            return
        found = self._tokens.get(route)
        if found is None:
            found = self._tokens[route] = _Tokens()
        found.heads.append((place, frame, state))
        found.values.append(packed)
        if type(packed) is Packed:
            found.size += packed.size
            if found.size >= msg.BATCH_BYTES:
                self._send_tokens(route, self._tokens.pop(route))

    def element_done(self, effect: fx.SendElementDone) -> None:
        """Notify the control of a loop that this location is done with an element."""
        if self._elements_done is None:
            self._elements_done = {}
        self._elements_done.setdefault((effect.control, effect.loop), []).append(effect.frame)

    def loop_ended(self, effect: fx.SendLoopEnd) -> None:
        """Notify other locations of the number of elements of a loop."""
        outcome, error = effect.outcome, None
        state = States.VALUE
        if outcome is SKIPPED:
            state = States.SKIPPED
        elif isinstance(outcome, Failed):
            state, error = States.FAILED, outcome.error
        for route in effect.routes:
            heads = (effect.loop, effect.frame, effect.total, state, error)
            self.send(route, msg.LoopEnded(self._number, route, *heads, *self._sender(route)))

    def send(self, route: int, message: msg.Message) -> None:
        """Send a message to another location."""
        if route not in self._absent:
            self._resources.send(self._routes[route], message)

    # other locations that can be lost

    def _sender(self, route: int) -> tuple[int, int]:
        """Return what a message to another location reports about its sender."""
        return self._at, self.incarnation(route)

    def incarnation(self, other: int) -> int:
        """Return how often the worker of another location was lost, or that of this one if only this one can be."""
        return self._incarnations.get(other, self._incarnation)

    def location_lost(self, location: int, incarnation: int) -> None:
        """Send nothing to a location any longer."""
        self._absent = {*self._absent, location}
        self._incarnations = {**self._incarnations, location: incarnation}
        self._tokens.pop(location, None)

    def location_back(self, location: int, address: str) -> None:
        """Send to the new worker of a location from now on."""
        self._routes[location] = address
        self._absent = {*self._absent} - {location}

    def restore(self, effect: fx.RestoreLocation) -> None:
        """Describe to the new worker of a location where to begin."""
        to = effect.location
        self.send(to, msg.RestoreJob(self._number, to, effect.done, effect.instances, *self._sender(to)))

    def clear(self) -> None:
        """Drop everything that was not sent."""
        self._runs, self._values = [], []
        self._tokens.clear()

    # sending

    def origin(self) -> Origin | None:
        """Return the origin of a message with values, if the job is traced."""
        return None if self._recorder is None else self._recorder.origin()

    def sending(self, count: int, payload: bytes | Payload) -> None:
        """Count values that are sent to another location."""
        self._resources.tokens += count
        self._resources.token_bytes += size_of(payload)

    def flush(self) -> None:
        """Send everything that was added."""
        number = self._number
        if self._tokens:
            for route, tokens in self._tokens.items():
                self._send_tokens(route, tokens)
            self._tokens.clear()
        if self._elements_done:
            for (route, loop), frames in self._elements_done.items():
                self.send(route, msg.ElementDone(number, route, loop, frames, *self._sender(route)))
            self._elements_done.clear()
        done, self._frames_done = self._frames_done, None
        if self._events and (done or self._values):
            self.send_events()
        if self._values:
            self._send_results(done or [])
        elif done:
            self._resources.report(msg.FramesDone(number, self._at, done))

    def _send_tokens(self, route: int, tokens: _Tokens) -> None:
        payload = self._resources.codec.payload(tokens.values)
        self.sending(len(tokens.heads), payload)
        sender = self._sender(route)
        self.send(route, msg.Tokens(self._number, route, tokens.heads, payload, self.origin(), *sender))

    def _send_results(self, frames: list[int]) -> None:
        payload = self._resources.codec.payload(self._values)
        self._byte_credits += self._charged - (len(payload) if type(payload) is bytes else size_of(payload))
        self._charged = 0
        origin = None if self._recorder is None else self._recorder.origin()
        self._resources.report(msg.ResultBatch(self._number, self._at, self._runs, payload, frames, origin))
        self._runs, self._values = [], []
