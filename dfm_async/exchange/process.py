"""Processes with everything that they started: their groups, their output, their end.

A launcher may die in a way that leaves it no time. So each process that launches has a small one that outlives it, the
orphan reaper. It reads process groups from a pipe; when the pipe ends, it ends those that are left: by SIGTERM, and
after a grace period by SIGKILL.

A reaper that is killed is replaced at once. So these can outlive us: a program that was started in the same instant in
which we were killed, before its reaper knew it; programs whose reaper was killed together with us, unless they end by
themselves because their connection has ended; and processes that have left the group of their program.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dfm_async.base.descriptors import close_in_children, no_fork
from dfm_async.base.exits import kill_group, process_exit
from dfm_async.wire.worker_output import LogRecord, Output, OutputSplitter

_log = logging.getLogger(__name__)

LINES_KEPT: Final = 50
"""How many of its last lines are kept."""
_KILLED: Final = 10.0
"""How long the kernel may take to end processes that were killed, in seconds."""
_DRAIN: Final = 0.25
"""How long output is read after the process has ended, if something that it started keeps the pipe open, in seconds."""
_GRACE: Final = 2.0
"""How long programs get between SIGTERM and SIGKILL when their launcher has died, in seconds."""
_SHORT_RUN: Final = 1.0
"""A reaper that ends sooner may be one that cannot run here, in seconds."""
_SHORT_RUNS: Final = 5
"""The number of them in a row that makes it certain."""


class Process:
    """A process that was started, the leader of a group of its own.

    Args:
        argv: the program and its arguments.
        cwd: the folder to start it in.
        environment: its whole environment.
        on_output: is called for every line or record that it writes, with "stdout" or "stderr".
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        environment: Mapping[str, str],
        on_output: Callable[[Output, str], None],
    ) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - what the user wants to run, without a shell
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        try:
            orphan_reaper.watch(self._popen.pid)  # at once, so that nothing can orphan it
        except BaseException:
            self._popen.kill()
            self._popen.communicate()
            raise
        self._released = False
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._on_output = on_output
        self._readers: list[_PipeReader] = []
        self.exit_code: int | None = None
        self.exited = asyncio.get_running_loop().create_task(self._watch(), name=f"exit of process {self.pid}")
        """Is done when it has ended, and the rest of its output was read."""

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        return tuple(self._lines)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for stream, name in ((self._popen.stdout, "stdout"), (self._popen.stderr, "stderr")):
            reader = _PipeReader(lambda item, origin=name: self._take(item, origin))  # type: ignore[misc]
            self._readers.append(reader)
            await loop.connect_read_pipe(lambda reader=reader: reader, stream)  # type: ignore[misc]
        code = await process_exit(self.pid)
        await asyncio.wait({reader.ended for reader in self._readers}, timeout=_DRAIN)
        for reader in self._readers:
            reader.close()
        self.exit_code = code

    def _take(self, item: Output, origin: str) -> None:
        if isinstance(item, str):
            self._lines.append(item)
        elif isinstance(item, LogRecord):
            self._lines.append(item.message)
        try:
            self._on_output(item, origin)
        except Exception:  # noqa: BLE001 - what the user's function raises must not hide the rest, or the end
            _log.exception("output of process %d could not be handled", self.pid)

    async def ended(self) -> int:
        """Wait for its end, and for the rest of its output."""
        await asyncio.shield(self.exited)
        assert self.exit_code is not None  # noqa: S101 - the watch has ended
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the process and to everything in its group."""
        if not self._released:  # until then, the number of the group cannot be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def release(self) -> None:
        """After its exit, end what is left of its group, and release it when all of it has ended."""
        await self.ended()
        if not self._released:
            self.signal(signal.SIGKILL)
            try:
                async with asyncio.timeout(_KILLED):
                    await kill_group(self.pid, signal.SIGKILL)
            except TimeoutError:
                _log.warning("what process %d started does not end although it was killed; it is abandoned", self.pid)
            self._released = True
            orphan_reaper.forget(self.pid)
            self._popen.wait()


class _PipeReader(asyncio.Protocol):
    """Takes apart what comes out of one pipe."""

    def __init__(self, take: Callable[[Output], None]) -> None:
        self._take = take
        self._splitter = OutputSplitter()
        self._transport: asyncio.BaseTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for item in self._splitter.feed(data):
            self._take(item)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._finish()

    def close(self) -> None:
        self._finish()
        if self._transport is not None:
            self._transport.close()

    def _finish(self) -> None:
        if not self.ended.done():
            for item in self._splitter.finish():
                self._take(item)
            self.ended.set_result(None)


# the orphan reaper

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


def start_watchdog(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a small process that outlives this one: its standard input ends when this process does."""
    # -I and -S: nothing of the environment, no site-packages; it starts in a few milliseconds.
    with no_fork():
        process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal for our group must not end it
            bufsize=0,
            cwd="/",
        )
        assert process.stdin is not None  # noqa: S101 - it was made with one
        close_in_children(process.stdin)
    return process


async def end_watchdog(process: subprocess.Popen[bytes]) -> None:
    """End the standard input of such a process, and wait until it has done its work."""
    assert process.stdin is not None  # noqa: S101 - it was made with one
    process.stdin.close()
    await process_exit(process.pid)
    process.wait()


class OrphanReaper:
    """Starts and informs the reaper process, which runs as long as it has users."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._short_runs = 0
        self._groups: set[int] = set()
        self._users = 0
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Start the reaper, so that it runs before a program does."""
        with self._lock:
            self._users += 1
            self._start()

    async def release(self) -> None:
        """End the reaper, if it has no other users."""
        with self._lock:
            self._users -= 1
            process = self._process
            if self._users or process is None:
                return
            self._process = None
        await end_watchdog(process)

    async def guard(self) -> None:
        """Replace the reaper whenever it is killed. Its users run this, and cancel it."""
        while (process := self._process) is not None:
            await process_exit(process.pid)
            with self._lock:
                if self._process is process:
                    self._replace(process)

    def watch(self, group: int) -> None:
        """Add a group: from now on, it ends when this process does."""
        with self._lock:
            self._groups.add(group)
            self._start()
            self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Remove a group that has ended."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._write(f"-{group}\n")

    def _start(self) -> None:
        if self._process is None:
            self._started = time.monotonic()
            self._process = start_watchdog(_SCRIPT)

    def _write(self, line: str) -> None:
        process = self._process
        assert process is not None  # noqa: S101 - started before
        assert process.stdin is not None  # noqa: S101 - it was made with one
        try:
            os.write(process.stdin.fileno(), line.encode())
        except OSError:
            self._replace(process)

    def _replace(self, process: subprocess.Popen[bytes]) -> None:
        """Start a new reaper for one that was killed."""
        assert process.stdin is not None  # noqa: S101 - it was made with one
        process.stdin.close()
        process.wait()
        self._process = None
        self._short_runs = self._short_runs + 1 if time.monotonic() - self._started < _SHORT_RUN else 0
        if self._short_runs >= _SHORT_RUNS:
            raise RuntimeError(f"the process that ends programs after us cannot run: {sys.executable} ended at once")
        self._start()
        for group in self._groups:
            self._write(f"+{group}\n")

    def after_fork(self) -> None:
        """Forget the reaper, in a forked child: it belongs to the parent, and must see the end of the parent."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.returncode = 0  # it is not a child of this process: there is nothing to wait for
        self._groups = set()
        self._users = 0
        self._lock = threading.Lock()


orphan_reaper: Final = OrphanReaper()
"""The one of this process."""
os.register_at_fork(after_in_child=orphan_reaper.after_fork)
