"""The terminal of the application: lent to debuggers in worker processes, one at a time.

A worker leads a process group of its own, so it may read from the terminal only while that group is in the foreground.
Workers wait for each other by a lock on the terminal, which the kernel releases if one of them dies; the application
takes the terminal back then.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import socket
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_CONTROLS: Final = 6
"""The index of the control characters among the attributes of a terminal."""
_KEPT: Final = 1.0
"""How many seconds code may run between two prompts before others can have the terminal."""
INTERRUPT: Final = b"\x03"
"""Ctrl-C."""
_DISABLED: Final = b"\x00"


@dataclass(frozen=True, slots=True)
class TerminalAccess:
    """How a worker gets the terminal of the application.

    Attributes:
        path: its device.
        group: the process group of the application.
        granted: receives a byte when the application is ready to lend it.
    """

    path: str
    group: int
    granted: socket.socket


def _no_terminal(why: str) -> RuntimeError:
    return RuntimeError(
        f"a debugger in a worker process needs a terminal, but {why}. Run the program in the foreground of a "
        'terminal (pytest: with -s), or debug with Session(..., target="inline")'
    )


@functools.cache
def _attributes() -> list[Any]:
    """Return the attributes of the terminal as they were before it was first lent."""
    return termios.tcgetattr(0)


def own_terminal() -> str | None:
    """Return the device of the terminal that standard input of this process is, if it is one."""
    try:
        if os.isatty(0):
            _attributes()
            return os.ttyname(0)
    except OSError:  # it has no name here, as in some containers, or has just been closed
        return None
    return None


def take_back(group: int) -> None:
    """Take back the terminal from the process group of a worker that has ended, in the application."""
    with contextlib.suppress(OSError, termios.error), _in_background():
        if os.tcgetpgrp(0) == group:
            os.tcsetpgrp(0, os.getpgrp())
            termios.tcsetattr(0, termios.TCSANOW, _attributes())


@contextlib.contextmanager
def _in_background() -> Iterator[None]:
    """Let this thread change the terminal although its process is not in the foreground."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LentTerminal:
    """The terminal in a worker: threads that debug take it in turns, and workers do.

    Args:
        access: how to get it; None if there is none.
        on_use: is called with True before the first thread waits for the terminal, and with False when the last one
            has left it. It has to notify the application.
    """

    def __init__(self, access: TerminalAccess | None, on_use: Callable[[bool], None]) -> None:
        self._access = access
        self._on_use = on_use
        self._turn = threading.Lock()
        """Is held by the thread that has the terminal, and released by any."""
        self._lock = threading.RLock()
        """Protects what follows."""
        self._owner: int | None = None
        self._users = 0
        self._granted = False
        """Whether the application lends the terminal. Is set by the thread whose turn it is."""
        self._descriptor = -1
        self._before: list[Any] = []
        self._timer: threading.Timer | None = None

    def check(self) -> None:
        """Raise an error if there is no terminal.

        Raises:
            RuntimeError: there is none.
        """
        if self._access is None:
            raise _no_terminal("standard input of the application is not a terminal")

    def enter(self) -> bool:
        """Wait for the terminal, and keep it until :meth:`leave`; return whether this thread did not have it already.

        Raises:
            RuntimeError: there is none, or the application is not in its foreground.
        """
        self.check()
        with self._lock:
            if self._owner == threading.get_ident():
                self._stop_timer()
                return False
            self._use(1)
        self._turn.acquire()
        try:
            if not self._granted:  # other output of the application would destroy ours
                assert self._access is not None  # noqa: S101 - checked before
                self._access.granted.recv(1)
                self._granted = True
            self._open()
        except BaseException as error:
            self._turn.release()
            with self._lock:
                self._use(-1)
            if isinstance(error, (OSError, termios.error)):
                raise _no_terminal(f"that of the application cannot be used ({error})") from error
            raise
        self._owner = threading.get_ident()
        return True

    def _use(self, number: int) -> None:
        self._users += number
        if self._users == (number > 0):
            self._granted = False
            self._on_use(number > 0)

    def _open(self) -> None:
        access = self._access
        assert access is not None  # noqa: S101 - checked before
        descriptor = os.open(access.path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _check_foreground(descriptor, access.group)
            with _in_background():
                os.tcsetpgrp(descriptor, os.getpgrp())
                self._before = termios.tcgetattr(descriptor)
                # A key that interrupts or stops would do so to this worker: Ctrl-C ends the line instead.
                changed = [*self._before[:_CONTROLS], list(self._before[_CONTROLS])]
                changed[_CONTROLS][termios.VINTR] = changed[_CONTROLS][termios.VSUSP] = _DISABLED
                changed[_CONTROLS][termios.VEOL] = INTERRUPT
                termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def pause(self) -> None:
        """Keep the terminal for a moment: the thread will need it again, if its code does not run for long."""
        with self._lock:
            if self._owner == threading.get_ident():
                self._stop_timer()
                self._timer = timer = threading.Timer(_KEPT, lambda: self._expire(timer))
                timer.daemon = True
                timer.start()

    def _expire(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:
                self._leave()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """Give the terminal back, if this thread has it."""
        with self._lock:
            if self._owner == threading.get_ident():
                self._leave()

    def _leave(self) -> None:
        self._stop_timer()
        access, descriptor = self._access, self._descriptor
        assert access is not None  # noqa: S101 - it was opened
        with contextlib.suppress(OSError, termios.error), _in_background():  # it was closed, or its session has ended
            termios.tcsetattr(descriptor, termios.TCSADRAIN, self._before)
            os.tcsetpgrp(descriptor, access.group)
        self._owner, self._descriptor = None, -1
        os.close(descriptor)
        self._turn.release()
        self._use(-1)

    def read(self) -> bytes:
        """Wait for a line, of the thread that has the terminal; empty at the end."""
        try:
            return os.read(self._descriptor, 64 * 1024)
        except OSError:  # it was closed
            return b""

    def write(self, data: bytes) -> None:
        """Write to the terminal."""
        rest = memoryview(data)
        with contextlib.suppress(OSError):  # it was closed: reading shows that
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


def _check_foreground(descriptor: int, group: int) -> None:
    """Check that the application is in the foreground; the group of a worker that died may still be there instead."""
    shown = os.tcgetpgrp(descriptor)
    if shown == group:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shown, 0)
        raise _no_terminal("the application runs in the background")
