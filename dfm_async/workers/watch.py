"""In the application: notices that a worker with jobs does not respond, and that it does again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dfm_async.wire.output import Pulse
from dfm_async.workers.pulse import pulse_interval

__all__ = ["Watch"]


class Watch:
    """Waits for the pulses of one worker while it has jobs. One timer then, none otherwise.

    Args:
        limit: how long the worker's loop may be silent, in seconds.
        when_read: calls back when everything that the worker has said by now has been read.
        on_late: is called once, with the seconds, when the worker has been silent for longer.
        on_back: is called when it responds again.

    Attributes:
        lag: how long the worker's loop took for a turn, as far as is known.
        unresponsive: whether it is silent for longer than the limit.
    """

    def __init__(
        self,
        limit: float,
        when_read: Callable[[Callable[[], None]], None],
        on_late: Callable[[float], None],
        on_back: Callable[[], None],
    ) -> None:
        self.lag: float | None = None
        self.unresponsive = False
        self._limit = limit
        self._when_read = when_read
        self._on_late = on_late
        self._on_back = on_back
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._jobs = False
        self._begun = 0.0
        self._seen = 0.0

    @property
    def silence(self) -> float:
        """For how long the worker's loop has not been seen to run, in seconds."""
        return time.monotonic() - self._seen

    def begin(self) -> None:
        """A job is sent to the worker."""
        self._begun = time.monotonic()
        if not self._jobs:
            self._jobs = True
            if not self.unresponsive:
                self._seen = self._begun
        if self._timer is None and not self.unresponsive:
            self._seen = self._begun
            self._arm(self._limit)

    def end(self) -> None:
        """The worker has no jobs any more. The timer stays for the next one: jobs come and go by the thousand."""
        self._jobs = False

    def close(self) -> None:
        """The worker has ended."""
        self._jobs = False
        self._disarm()

    def pulse(self, pulse: Pulse) -> None:
        """Takes a sign of life. All processes have the same monotonic clock, so one that was read late is no harm."""
        self.lag = pulse.lag
        self._seen = max(self._seen, pulse.alive)
        # It may have jobs here and none there: other workers still do their part. It is silent then, until the next.
        quiet = pulse.idle and pulse.alive >= self._begun
        if self.unresponsive and self.silence < self._limit:
            self.unresponsive = False
            self._on_back()
        if quiet:
            self._disarm()
        elif self._jobs and self._timer is None and not self.unresponsive:
            self._arm(self._limit - self.silence)

    def _arm(self, seconds: float) -> None:
        seconds = max(seconds, 0.001)
        self._due = time.monotonic() + seconds
        self._timer = self._loop.call_later(seconds, self._check)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if not self._jobs:
            self._timer = None
            return
        now, timer = time.monotonic(), self._timer
        interval = pulse_interval(self._limit)
        if now - self._due > interval:
            self._arm(2 * interval)  # we were away ourselves: perhaps the worker was, too
        else:
            self._when_read(lambda: self._judge(now) if self._timer is timer else None)

    def _judge(self, asked: float) -> None:
        """Everything that the worker had said when the time was over has been read."""
        self._timer = None
        if not self._jobs:
            return
        silent = asked - self._seen
        if silent < self._limit:
            self._arm(self._seen + self._limit - time.monotonic())
        else:
            self.unresponsive = True
            self._on_late(self.silence)
