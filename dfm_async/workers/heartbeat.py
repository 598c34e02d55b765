"""Heartbeats of workers with jobs: sent by a thread of the worker, watched in the application.

A thread can report while the event loop is blocked; if it cannot either (the whole process is stopped, or a call into C
keeps all threads out), its silence shows that. A job that is over at once costs a flag: the thread is woken only if it
has been without jobs for an interval, and checks the flag at most once per interval.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from dfm_async.runtime.core_use import CoreUse
from dfm_async.wire.worker_output import Heartbeat

_BLOCKED: Final = 2
"""After how many heartbeats in a row without a turn of the loop deadlines are checked by the thread."""


def heartbeat_interval(unresponsive_after: float) -> float:
    """Return the seconds between two heartbeats, so that missing ones are noticed in time."""
    return min(1.0, unresponsive_after / 4)


class HeartbeatThread:
    """Measures the lag of the running loop, once per interval while there are jobs.

    Args:
        interval: the time between two heartbeats, in seconds.
        send: is called in the thread with each of them.
        counts: returns, in the thread, the number of values sent to other sites so far, and their bytes, and the number
            of calls that run, and that wait.
        core_use: notices, in the thread, jobs that compute on one core although they could use more.
        overdue: returns, in the thread, for how many seconds a deadline is over that the loop has not noticed.
    """

    def __init__(
        self,
        interval: float,
        send: Callable[[Heartbeat], None],
        counts: Callable[[], tuple[int, int, int, int]],
        core_use: CoreUse | None = None,
        overdue: Callable[[float], float] = lambda _now: 0.0,
    ) -> None:
        self._interval = interval
        self._send = send
        self._counts = counts
        self._core_use = core_use
        self._overdue = overdue
        self._blocked = 0
        """How many heartbeats in a row the loop has been blocked for."""
        self._last = 0.0
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._gate = threading.Semaphore(0)
        self._busy = False
        self._worked = False
        self._asleep = False
        self._stopped = False
        self._probed: float | None = None
        self._alive = 0.0
        self._lag = 0.0

    def busy(self, jobs: bool) -> None:
        """Set, on the loop, whether there are jobs."""
        self._busy = jobs
        if jobs:
            self._worked = True
            if self._thread is None:
                self._alive = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="dfm-heartbeat", daemon=True)
                self._thread.start()
            elif self._asleep:
                self._asleep = False
                self._alive = time.monotonic()
                self._gate.release()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._gate.release()

    def _run(self) -> None:
        while not self._stopped:
            if self._gate.acquire(timeout=self._interval):
                continue  # it was woken, or stopped, a moment ago
            now, probed = time.monotonic(), self._probed
            # After a longer pause of this thread, the whole process was stopped: that is no fault of the loop.
            self._blocked = 0 if probed is None or now - self._last > 3 * self._interval else self._blocked + 1
            self._last = now
            if probed is not None:
                self._lag = now - probed
            if self._busy or self._worked or probed is not None:
                self._worked = False
                self._report(self._lag, self._alive)
                self._probe(now)
            else:
                self._sleep(now)

    def _probe(self, now: float) -> None:
        if self._probed is None:
            self._probed = now
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._stopped = True

    def _answer(self) -> None:
        now = self._alive = time.monotonic()
        if self._probed is not None:
            self._lag = now - self._probed
            self._probed = None

    def _sleep(self, now: float) -> None:
        """Wait for the next job, for however long. The loop sets the flags in the order opposite to ours."""
        self._asleep = True
        if self._worked:
            self._asleep = False
            return
        self._report(0.0, now, idle=True)
        if self._core_use is not None:
            self._core_use.idle()
        self._gate.acquire()

    def _report(self, lag: float, alive: float, *, idle: bool = False) -> None:
        bound = None if idle or self._core_use is None else self._core_use.sample()
        overdue = self._overdue(time.monotonic()) if self._blocked >= _BLOCKED else 0.0
        tokens, token_bytes, running, waiting = self._counts()
        self._send(
            Heartbeat(
                lag=lag,
                alive=alive,
                idle=idle,
                sent=time.monotonic(),
                tokens=tokens,
                token_bytes=token_bytes,
                running=running,
                waiting=waiting,
                bound=bound,
                overdue=max(0.0, overdue),
            )
        )


class Watch:
    """Wait for the heartbeats of one worker while it has jobs. One timer then, none otherwise.

    Args:
        limit: how long the worker's loop may be silent, in seconds; infinite if nobody needs to know.
        when_read: calls back when the output that the worker has written by now has been read.
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
        self._suspended = False

    @property
    def silence(self) -> float:
        """For how long the worker's loop has not been seen to run, in seconds."""
        return time.monotonic() - self._seen

    def begin(self) -> None:
        """Note that a job is sent to the worker."""
        if self._limit == math.inf:
            return
        self._begun = time.monotonic()
        if not self._jobs:
            self._jobs = True
            if not self.unresponsive:
                self._seen = self._begun
        if self._timer is None and not self.unresponsive and not self._suspended:
            self._seen = self._begun
            self._arm(self._limit)

    def suspend(self, *, suspended: bool) -> None:
        """Do not wait for the worker, because a person debugs it, or wait for it again."""
        self._suspended = suspended
        self._disarm()
        if not suspended and self._jobs and not self.unresponsive:
            self._seen = time.monotonic()
            self._arm(self._limit)

    def end(self) -> None:
        """Note that the worker has no jobs any longer. The timer stays for the next one: jobs may be many and short."""
        self._jobs = False

    def close(self) -> None:
        """Note that the worker has ended."""
        self._jobs = False
        self._disarm()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take a heartbeat. All processes have the same monotonic clock, so one that was read late is no harm."""
        self.lag = heartbeat.lag
        self._seen = max(self._seen, heartbeat.alive)
        # It may have jobs here and none there: other workers still do their part. It is silent then, until the next.
        quiet = heartbeat.idle and heartbeat.alive >= self._begun
        if self.unresponsive and self.silence < self._limit:
            self.unresponsive = False
            self._on_back()
        if quiet:
            self._disarm()
        elif self._jobs and self._timer is None and not self.unresponsive and not self._suspended:
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
        interval = heartbeat_interval(self._limit)
        if now - self._due > interval:
            self._arm(2 * interval)  # we were away ourselves: perhaps the worker was, too
        else:
            self._when_read(lambda: self._judge(now) if self._timer is timer else None)

    def _judge(self, asked: float) -> None:
        """Note that the output that the worker had written by the timeout has been read."""
        self._timer = None
        if not self._jobs:
            return
        silent = asked - self._seen
        if silent < self._limit:
            self._arm(self._seen + self._limit - time.monotonic())
        else:
            self.unresponsive = True
            self._on_late(self.silence)
