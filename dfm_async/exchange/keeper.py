"""Ends programs when their launcher dies in a way that leaves it no time: a small process that outlives it.

One keeper per process that launches. It reads process groups from a pipe; when the pipe ends, it ends those that are
left: by SIGTERM, and after a while by SIGKILL.

A keeper that is killed is replaced at once. So what can outlive us is: a program that was started in the same instant
in which we were killed, before its keeper knew it; programs whose keeper was killed together with us, unless they end
by themselves because their connection has ended; and what has left the group of its program, by a session of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Final

from dfm_async.base.descriptors import no_fork
from dfm_async.exchange.exits import process_exit

__all__ = ["Keeper", "keeper"]

_GRACE: Final = 2.0
"""How long programs get between SIGTERM and SIGKILL when their launcher has died, in seconds."""
_SHORT_LIFE: Final = 1.0
"""A keeper that ends sooner than that may be one that cannot live here, in seconds."""
_SHORT_LIVES: Final = 5
"""So many of them in a row, and it is certain."""

# Only what every interpreter has, and nothing that would have to be found: it must start fast, and run anywhere.
_SCRIPT: Final = f"""
import os, select, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
groups = {{}}
def kill(number):
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            pass
for line in sys.stdin:
    if line[0] == "+":
        group = int(line[1:])
        try:
            groups[group] = os.pidfd_open(group)
        except (OSError, AttributeError):
            groups[group] = None
    else:
        handle = groups.pop(int(line[1:]), None)
        if handle is not None:
            os.close(handle)
if groups:
    kill(signal.SIGTERM)
    kill(signal.SIGCONT)
    leaders = {{handle for handle in groups.values() if handle is not None}}
    end = time.monotonic() + {_GRACE}
    poll = select.poll()
    for handle in leaders:
        poll.register(handle, select.POLLIN)
    while leaders and time.monotonic() < end:
        for handle, _ in poll.poll(max(0, (end - time.monotonic()) * 1000)):
            poll.unregister(handle)
            leaders.discard(handle)
    kill(signal.SIGKILL)
"""


class Keeper:
    """Tells a keeper process which groups there are. It lives as long as somebody needs it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._short_lives = 0
        self._groups: set[int] = set()
        self._users = 0
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Starts the keeper, so that it is there when a program is."""
        with self._lock:
            self._users += 1
            self._start()

    async def release(self) -> None:
        """Ends the keeper, if nobody else needs it."""
        with self._lock:
            self._users -= 1
            process = self._process
            if self._users or process is None:
                return
            self._process = None
        assert process.stdin is not None  # noqa: S101 - it was made with one
        process.stdin.close()
        await process_exit(process.pid)
        process.wait()

    async def guard(self) -> None:
        """Replaces the keeper whenever somebody kills it. Whoever has acquired it runs this, and cancels it."""
        while (process := self._process) is not None:
            await process_exit(process.pid)
            with self._lock:
                if self._process is process:
                    self._replace(process)

    def watch(self, group: int) -> None:
        """From now on, this group ends when this process does."""
        with self._lock:
            self._groups.add(group)
            self._start()
            self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has ended."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._tell(f"-{group}\n")

    def _start(self) -> None:
        if self._process is None:
            self._started = time.monotonic()
            # -I and -S: nothing of the environment, no site-packages; it starts in a few milliseconds.
            with no_fork():
                self._process = subprocess.Popen(  # noqa: S603 - our own script
                    [sys.executable, "-I", "-S", "-c", _SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # what ends our group must not end it
                    bufsize=0,
                    cwd="/",
                )

    def _tell(self, line: str) -> None:
        process = self._process
        assert process is not None  # noqa: S101 - started before
        assert process.stdin is not None  # noqa: S101 - it was made with one
        try:
            os.write(process.stdin.fileno(), line.encode())
        except OSError:
            self._replace(process)

    def _replace(self, process: subprocess.Popen[bytes]) -> None:
        """Somebody killed the keeper. A new one takes over."""
        assert process.stdin is not None  # noqa: S101 - it was made with one
        process.stdin.close()
        process.wait()
        self._process = None
        self._short_lives = self._short_lives + 1 if time.monotonic() - self._started < _SHORT_LIFE else 0
        if self._short_lives >= _SHORT_LIVES:
            raise RuntimeError(f"the process that ends programs after us cannot run: {sys.executable} ended at once")
        self._start()
        for group in self._groups:
            self._tell(f"+{group}\n")

    def after_fork(self) -> None:
        """In a child that was forked: the keeper belongs to the parent, and must see its end."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.returncode = 0  # it is not a child of this process: there is nothing to wait for
        self._groups = set()
        self._users = 0
        self._lock = threading.Lock()


keeper: Final = Keeper()
"""The one of this process."""
os.register_at_fork(after_in_child=keeper.after_fork)
