"""In a worker: a thread that tells how the event loop does, while there are jobs.

It is a thread, so that it can speak while the loop is blocked; what it cannot say (the whole process is stopped, or a
call into C keeps all threads out) is seen by its silence. A job that is over at once costs a flag: the thread is woken
only if it has been without jobs for an interval, and looks at the flag at most once per interval.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from dfm_async.wire.output import Pulse

__all__ = ["PulseThread", "pulse_interval"]


def pulse_interval(unresponsive_after: float) -> float:
    """How often a worker gives a sign of life, so that missing ones are noticed in time."""
    return min(1.0, unresponsive_after / 4)


class PulseThread:
    """Measures the lag of the running loop, once per interval while there are jobs.

    Args:
        interval: the time between two pulses, in seconds.
        send: is called in the thread with each of them.
        tokens: tells in the thread how many values were sent to other sites so far, and their bytes.
    """

    def __init__(self, interval: float, send: Callable[[Pulse], None], tokens: Callable[[], tuple[int, int]]) -> None:
        self._interval = interval
        self._send = send
        self._tokens = tokens
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._gate = threading.Semaphore(0)
        self._busy = False
        self._worked = False
        self._asleep = False
        self._stopped = False
        self._asked: float | None = None
        self._alive = 0.0
        self._lag = 0.0

    def busy(self, jobs: bool) -> None:
        """Says on the loop whether there are jobs."""
        self._busy = jobs
        if jobs:
            self._worked = True
            if self._thread is None:
                self._alive = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="dfm-pulse", daemon=True)
                self._thread.start()
            elif self._asleep:
                self._asleep = False
                self._alive = time.monotonic()
                self._gate.release()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._gate.release()

    def _run(self) -> None:
        while not self._stopped:
            if self._gate.acquire(timeout=self._interval):
                continue  # it was woken, or stopped, a moment ago
            now, asked = time.monotonic(), self._asked
            if asked is not None:
                self._lag = now - asked
            if self._busy or self._worked or asked is not None:
                self._worked = False
                self._tell(self._lag, self._alive)
                self._ask(now)
            else:
                self._sleep(now)

    def _ask(self, now: float) -> None:
        if self._asked is None:
            self._asked = now
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._stopped = True

    def _answer(self) -> None:
        now = self._alive = time.monotonic()
        if self._asked is not None:
            self._lag = now - self._asked
            self._asked = None

    def _sleep(self, now: float) -> None:
        """Waits for the next job, for however long. The loop sets the flags in the order opposite to ours."""
        self._asleep = True
        if self._worked:
            self._asleep = False
            return
        self._tell(0.0, now, idle=True)
        self._gate.acquire()

    def _tell(self, lag: float, alive: float, *, idle: bool = False) -> None:
        self._send(Pulse(lag, alive, idle, time.monotonic(), *self._tokens()))
