"""``breakpoint()`` and ``pdb`` in a worker: the debugger uses the terminal of the application."""

from __future__ import annotations

import asyncio
import bdb
import dis
import inspect
import os
import pdb
import sys
import threading
from types import FrameType
from typing import Any, Final

from dfm_async.base.suspension import suspension
from dfm_async.runtime.context import current_context
from dfm_async.wire.worker_output import Debugging
from dfm_async.workers.lent_terminal import INTERRUPT, LentTerminal, TerminalAccess
from dfm_async.workers.output import OutputPipe

_SKIPPED: Final = ("dfm_async.*", "asyncio.*", "threading")
"""The modules that a debugger does not step into: those that call operations."""
_YIELDS: Final = frozenset({"YIELD_VALUE", "RESUME"})
"""The instructions that a suspended frame is at; the second one since Python 3.13."""
_COROUTINE: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def install(site: str, access: TerminalAccess | None, output: OutputPipe) -> None:
    """Let debuggers in this process use the terminal of the application. Called on the event loop.

    While one is open, or waits for the terminal, deadlines are suspended, and the application is notified.
    """
    loop, main, suspended = asyncio.get_running_loop(), threading.get_ident(), suspension()

    def use(used: bool) -> None:
        output.send(Debugging(used))
        change = suspended.hold if used else suspended.release
        if threading.get_ident() == main:
            change()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(change)

    WorkerPdb.site, WorkerPdb.terminal = site, LentTerminal(access, use)
    pdb.Pdb = WorkerPdb  # type: ignore[misc] # so that pdb.set_trace() and breakpoint() use it


class _TerminalStream:
    """Standard input and output of a debugger. Each access takes the terminal, if others have it."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, debugger: WorkerPdb) -> None:
        self._debugger = debugger

    def readline(self) -> str:
        """Read a line; Ctrl-C quits the debugger."""
        terminal = self._debugger.enter()
        line = terminal.read()
        if not line.endswith(INTERRUPT):
            return line.decode(self.encoding, self.errors)
        terminal.write(b"\n")
        return "quit\n"

    def write(self, text: str) -> int:
        """Write text."""
        self._debugger.enter().write(text.encode(self.encoding, self.errors))
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is kept."""

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return True


class WorkerPdb(pdb.Pdb):
    """The debugger of the standard library on the terminal of the application.

    It ends with the call that it was started in: the code that called the operation is not for users to debug. One that
    was given streams uses those.
    """

    site = ""
    terminal: LentTerminal
    _last_pdb_instance: pdb.Pdb | None = None

    def __init__(
        self,
        completekey: str = "tab",
        stdin: Any = None,
        stdout: Any = None,
        skip: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        self._lent = stdin is None and stdout is None
        self._root: FrameType | None = None
        self._stays = True
        if self._lent:
            stdin = stdout = _TerminalStream(self)
            skip = [*(skip or ()), *_SKIPPED]
        super().__init__(completekey, stdin, stdout, skip, *args, **options)
        if self._lent:
            self.nosigint = True  # signals are not for this thread

    def enter(self) -> LentTerminal:
        """Take the terminal, and say whose turn it is."""
        if self.terminal.enter():
            self.terminal.write(f"--- {self._title()}\n".encode())
        return self.terminal

    def _title(self) -> str:
        worker = f"worker {os.getpid()} of site {self.site}"
        try:
            context = current_context()
        except LookupError:
            return worker
        return f"{context.operation} in {worker}, job {context.job_id}, frame {context.frame}"

    def set_trace(self, frame: FrameType | None = None, *args: Any, **options: Any) -> None:
        """Debug from a frame on.

        Raises:
            RuntimeError: there is no terminal.
        """
        frame = frame or sys._getframe().f_back  # noqa: SLF001 - as the standard library does
        if self._lent:
            self.terminal.check()
            self._root = _root(frame)
            if self._root is not None and self._root.f_code.co_flags & _COROUTINE:
                task = asyncio.current_task()
                if task is not None:
                    task.add_done_callback(lambda _task: self._end())
        super().set_trace(frame, *args, **options)
        if self._lent:
            # Since Python 3.14, pdb.set_trace() uses this one again, but it belongs to one call, in one thread.
            WorkerPdb._last_pdb_instance = None

    def interaction(self, *args: Any, **options: Any) -> None:
        """Let the user give commands."""
        self._stays = True
        try:
            super().interaction(*args, **options)
        finally:
            if self._lent and self._stays:
                self.terminal.pause()
            elif self._lent:
                self.terminal.leave()

    def set_continue(self) -> None:
        """Go on to the next breakpoint."""
        self._stays = False
        super().set_continue()

    def set_quit(self) -> None:
        """End the call."""
        self._stays = False
        super().set_quit()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle an event of the code that is debugged."""
        try:
            found = super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            raise bdb.BdbQuit("the call was ended in the debugger") from None
        if event == "return" and frame is self._root and not _suspends(frame):
            self._end()
            return None
        return found

    def _end(self) -> None:
        """Stop tracing: the call has ended."""
        self._root = None
        if getattr(sys.gettrace(), "__self__", None) is self:
            sys.settrace(None)
        self.terminal.leave()


def _root(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame that is not of this library."""
    while frame is not None and frame.f_back is not None:
        if str(frame.f_back.f_globals.get("__name__", "")).startswith("dfm_async."):
            break
        frame = frame.f_back
    return frame


def _suspends(frame: FrameType) -> bool:
    """Return whether a frame that returns is a generator or a coroutine that will go on."""
    return frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _YIELDS
