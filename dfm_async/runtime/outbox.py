"""What one job at one location has to send: results, errors, tokens. Gathered during a turn of the loop, then sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.net.tokens import SKIPPED, Failed
from dfm_async.telemetry.recorder import Recorder
from dfm_async.telemetry.spans import Origin
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Packed
from dfm_async.wire.memory import Payload, size_of

if TYPE_CHECKING:
    from dfm_async.runtime.site import SiteRuntime

__all__ = ["Outbox", "States", "error_data"]


class States:
    """What a token can be, on the wire."""

    VALUE: Final = 0
    SKIPPED: Final = 1
    FAILED: Final = 2
    OPEN: Final = 3
    STREAM: Final = 4


def error_data(error: ErrorRecord) -> list[Any]:
    """An error as the value of a token."""
    data = [getattr(error, name) for name in ErrorRecord.__struct_fields__]
    data[4] = list(data[4])
    return data


class _Tokens:
    """Tokens for one location that have gathered, and how many bytes the heavy ones have."""

    __slots__ = ("heads", "size", "values")

    def __init__(self) -> None:
        self.heads: list[tuple[int, Frame, int]] = []
        self.values: list[Any] = []
        self.size = 0


class Outbox:
    """Gathers what is to be sent, and counts what the application still takes.

    Results need credit: the application grants it as its log has room. Failures and metrics use it up, too, but do not
    wait for it; when they have used too much in advance, the job is :attr:`stalled`. Nothing else is held back.
    """

    __slots__ = (
        "_at",
        "_byte_credits",
        "_charged",
        "_credits",
        "_elements_done",
        "_frames_done",
        "_metrics",
        "_number",
        "_recorder",
        "_reported",
        "_routes",
        "_runs",
        "_runtime",
        "_tokens",
        "_values",
        "_waiters",
        "_window",
    )

    def __init__(self, runtime: SiteRuntime, start: msg.StartJob, recorder: Recorder | None = None) -> None:
        self._runtime = runtime
        self._recorder = recorder
        self._number = start.job
        self._at = start.at
        self._routes = start.routes
        self._credits = self._window = start.window
        self._byte_credits = start.window_bytes
        self._charged = 0  # for what has been added and not been sent
        self._runs: list[tuple[int, Frame, int, int]] = []
        self._values: list[Any] = []
        self._frames_done: list[int] = []
        self._metrics: list[tuple[str, Frame, dict[str, Scalar], int | None]] = []
        self._tokens: dict[int, _Tokens] = {}
        self._elements_done: dict[tuple[int, int], list[Frame]] = {}
        self._reported: dict[int, set[str]] = {}
        self._waiters: list[asyncio.Future[None]] = []

    # results

    @property
    def stalled(self) -> bool:
        """Whether so much was told without credit that nothing shall go on before the application has taken it."""
        return self._credits <= -self._window

    @property
    def open(self) -> bool:
        """Whether the application takes a further result."""
        return self._credits > 0 and self._byte_credits > 0

    def grant(self, items: int, size: int) -> None:
        """The application takes further results."""
        self._credits += items
        self._byte_credits += size

    def add_result(self, point: int, frame: Frame, packed: Any) -> None:
        """Adds one result."""
        self._credits -= 1
        if type(packed) is Packed:
            self._charge(packed.size)
        self._runs.append((point, frame, -1, 1))
        self._values.append(packed)
        self._send_full()

    def add_element(self, point: int, frame: Frame, index: int, packed: Any) -> None:
        """Adds one element of a yielded stream. Elements that follow each other share their head."""
        self._credits -= 1
        if type(packed) is Packed:
            self._charge(packed.size)
        self._values.append(packed)
        runs = self._runs
        if runs:
            last_point, last_frame, start, count = runs[-1]
            if last_point == point and start >= 0 and start + count == index and last_frame == frame:
                runs[-1] = (point, frame, start, count + 1)
                self._send_full()
                return
        runs.append((point, frame, index, 1))
        self._send_full()

    def _send_full(self) -> None:
        """Sends what has gathered if it is as much as one message shall have."""
        if self._charged >= msg.BATCH_BYTES:
            if self._metrics:
                self.send_metrics()
            self._send_results([])

    def _charge(self, size: int) -> None:
        """Counts a heavy value at once: many of them must not gather before they are sent, and counted exactly."""
        self._byte_credits -= size
        self._charged += size

    async def wait_open(self) -> None:
        """Waits for credit."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        await future

    def wake(self) -> None:
        """Lets those go on who wait for credit."""
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    @property
    def has_frames_done(self) -> bool:
        """Whether parameter sets are done, and the application was not told yet."""
        return bool(self._frames_done)

    def frame_done(self, index: int) -> None:
        """Tells the application that a parameter set is done here, after everything that was added before."""
        self._frames_done.append(index)
        if self._reported:
            self._reported.pop(index, None)

    # metrics

    def add_metrics(self, node: str, frame: Frame, values: dict[str, Scalar], step: int | None) -> int:
        """Adds a report of metrics; tells how many wait to be sent."""
        self._metrics.append((node, frame, values, step))
        return len(self._metrics)

    def send_metrics(self) -> bool:
        """Sends the metrics that wait, before anything that comes of the calls behind them; tells if there were any."""
        if not self._metrics:
            return False
        reports, self._metrics = self._metrics, []
        self._credits -= len(reports)
        self._runtime.report(msg.MetricsMade(self._number, self._at, reports))
        return True

    # errors

    def report(self, message: msg.Message) -> None:
        """Tells the application something, after everything that was added before."""
        if self._metrics:
            self.send_metrics()
        if self._values:
            self._send_results([])
        self._runtime.report(message)

    def report_error(self, error: ErrorRecord) -> None:
        """Tells the application of an error, once."""
        reported = self._reported.setdefault(error.frame[0] if error.frame else -1, set())
        if error.id not in reported:
            reported.add(error.id)
            self._credits -= 1
            self.report(msg.OperationError(self._number, self._at, error))

    def yield_failed(self, point: int, frame: Frame, error: ErrorRecord) -> None:
        """Tells the application that a yield will not come."""
        self.report_error(error)
        self._credits -= 1
        self.report(msg.YieldFailed(self._number, self._at, point, frame, error.id))

    # other locations

    def add_token(self, route: int, place: int, frame: Frame, state: int, packed: Any) -> None:
        """Adds a token for another location."""
        found = self._tokens.get(route)
        if found is None:
            found = self._tokens[route] = _Tokens()
        found.heads.append((place, frame, state))
        found.values.append(packed)
        if type(packed) is Packed:
            found.size += packed.size
            if found.size >= msg.BATCH_BYTES:
                self._send_tokens(route, self._tokens.pop(route))

    def element_done(self, control: int, loop: int, frame: Frame) -> None:
        """Tells the control of a loop that this location is done with an element."""
        self._elements_done.setdefault((control, loop), []).append(frame)

    def loop_ended(self, routes: tuple[int, ...], loop: int, frame: Frame, total: int, outcome: Any) -> None:
        """Tells other locations how many elements a loop had."""
        state = States.VALUE if outcome is None else States.SKIPPED if outcome is SKIPPED else States.FAILED
        error = outcome.error if isinstance(outcome, Failed) else None
        for route in routes:
            self.send(route, msg.LoopEnded(self._number, route, loop, frame, total, state, error))

    def send(self, route: int, message: msg.Message) -> None:
        """Sends a message to another location."""
        self._runtime.send(self._routes[route], message)

    def clear(self) -> None:
        """Drops everything that was not sent."""
        self._runs, self._values = [], []
        self._tokens.clear()

    # sending

    def origin(self) -> Origin | None:
        """What a message with values tells of where it comes from, if the job is traced."""
        return None if self._recorder is None else self._recorder.origin()

    def sending(self, count: int, payload: bytes | Payload) -> None:
        """Counts values that go to another location."""
        self._runtime.tokens += count
        self._runtime.token_bytes += size_of(payload)

    def flush(self) -> None:
        """Sends everything that has gathered."""
        number = self._number
        for route, tokens in self._tokens.items():
            self._send_tokens(route, tokens)
        self._tokens.clear()
        for (route, loop), frames in self._elements_done.items():
            self.send(route, msg.ElementDone(number, route, loop, frames))
        self._elements_done.clear()
        done, self._frames_done = self._frames_done, []
        if self._metrics and (done or self._values):
            self.send_metrics()
        if self._values:
            self._send_results(done)
        elif done:
            self._runtime.report(msg.FramesDone(number, self._at, done))

    def _send_tokens(self, route: int, tokens: _Tokens) -> None:
        payload = self._runtime.codec.payload(tokens.values)
        self.sending(len(tokens.heads), payload)
        self.send(route, msg.Tokens(self._number, route, tokens.heads, payload, self.origin()))

    def _send_results(self, frames: list[int]) -> None:
        payload = self._runtime.codec.payload(self._values)
        self._byte_credits += self._charged - size_of(payload)
        self._charged = 0
        self._runtime.report(msg.Results(self._number, self._at, self._runs, payload, frames, self.origin()))
        self._runs, self._values = [], []
