"""In the application: the output of a worker becomes log records, or lines on standard error without handlers."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import os
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.wire.worker_output import Debugging, Heartbeat, LogRecord, Output, OutputSplitter

_AT_ONCE: Final = 64 * 1024
"""How much is read in one turn of the loop: a worker that floods must not keep the others from theirs."""
_KEPT: Final = 50
_CRASH: Final = "Fatal Python error:"


def site_logger(site: str) -> logging.Logger:
    """Return the logger for the output of a site."""
    return logging.getLogger(f"dfm_async.site.{site}")


def _unhandled(logger: logging.Logger, level: int) -> bool:
    """Return whether the program has configured neither a handler nor a level that decides about a record."""
    if logger.hasHandlers() or logger.manager.disable >= level:
        return False
    named: logging.Logger | None = logger
    while named is not None and named.parent is not None:  # the level of the root logger is Python's default
        if named.level:
            return level >= named.level
        named = named.parent
    return True


class OutputReader:
    """Reads the pipe of one worker on the loop, and logs its output.

    Lines that were printed go to standard error if the program has not configured logging: Python itself would not show
    them.

    Args:
        site: the worker's site.
        on_heartbeat: is called for every heartbeat.
        on_debugging: is called when a debugger in the worker uses the terminal, and when none does any longer.

    Attributes:
        pid: the worker, as soon as it is known.
        tail: its last lines.
    """

    def __init__(
        self, site: str, on_heartbeat: Callable[[Heartbeat], None], on_debugging: Callable[[Debugging], None]
    ) -> None:
        self.pid: int | None = None
        self.tail: deque[str] = deque(maxlen=_KEPT)
        self._site = site
        self._logger = site_logger(site)
        self._descriptor = -1
        self._on_heartbeat = on_heartbeat
        self._on_debugging = on_debugging
        self._splitter = OutputSplitter()
        self._loop = asyncio.get_running_loop()
        self._crashing = False
        self._open = False
        self._read = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def open(self, descriptor: int) -> None:
        """Begin to read a pipe; it is closed by :meth:`close`."""
        self._descriptor = descriptor
        self._open = True
        close_in_children(self)
        self._loop.add_reader(descriptor, self._readable)

    def close_in_child(self) -> None:
        """Disconnect the pipe, in a forked child."""
        if self._open:
            disconnect(self._descriptor)

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, _AT_ONCE)
        except BlockingIOError:
            return
        self._read += len(data)
        if data:
            self._take(self._splitter.feed(data))
        else:
            self.close()
        self._call_waiting()

    def _call_waiting(self) -> None:
        due = [entry for entry in self._waiting if not self._open or self._read >= entry[0]]
        for entry in due:
            self._waiting.remove(entry)
            entry[1]()

    def when_read(self, call: Callable[[], None]) -> None:
        """Call back when everything that is in the pipe by now has been read; at once if that is nothing.

        Does not wait for the end of the pipe: a program that the worker has started may keep it open.
        """
        pending = self._pending() if self._open else 0
        if pending:
            self._waiting.append((self._read + pending, call))
        else:
            call()

    def _pending(self) -> int:
        size = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, size)
        return size[0]

    def close(self) -> None:
        """End reading; output without a final newline is a line."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._take(self._splitter.finish())

    def _take(self, found: list[Output]) -> None:
        for item in found:
            try:
                if isinstance(item, Heartbeat):
                    self._on_heartbeat(item)
                elif isinstance(item, Debugging):
                    self._on_debugging(item)
                elif isinstance(item, LogRecord):
                    self._crashing = False
                    self._record(item)
                else:
                    self._line(item)
            except Exception as error:  # noqa: BLE001 - a handler or filter of the application: the next line may do
                context = {"message": f"cannot log the output of a worker of site {self._site!r}", "exception": error}
                self._loop.call_exception_handler(context)

    def _line(self, text: str) -> None:
        """A plain line. The report of a crash begins anywhere, and nothing but the rest of it can follow."""
        before, mark, rest = text.partition(_CRASH)
        if mark:
            if before:
                self._line(before)
            text = mark + rest
            self._crashing = True
        self.tail.append(text)
        level = logging.ERROR if self._crashing else logging.INFO
        if _unhandled(self._logger, level):
            self._print(text, None)
        elif self._logger.isEnabledFor(level):
            self._logger.handle(self._make(level, "", 0, text, None, {"origin": "output"}))

    def _record(self, sent: LogRecord) -> None:
        printed = sent.origin in ("stdout", "stderr")
        text = sent.message if printed else f"{logging.getLevelName(sent.level)} {sent.origin}: {sent.message}"
        self.tail.extend(text.split("\n"))
        if sent.traceback:
            self.tail.extend(sent.traceback.split("\n"))
        if printed and _unhandled(self._logger, sent.level):
            self._print(text, sent.operation)
            return
        if not self._logger.isEnabledFor(sent.level):
            return
        extra = {name: getattr(sent, name) for name in ("origin", "job", "frame", "node", "operation")}
        record = self._make(sent.level, sent.path, sent.line, sent.message, sent.function or None, extra)
        record.relativeCreated += (sent.created - record.created) * 1000
        record.created = sent.created
        record.msecs = (sent.created - int(sent.created)) * 1000
        record.threadName = sent.thread
        record.thread = None
        record.exc_text = sent.traceback or None
        record.stack_info = sent.stack or None
        self._logger.handle(record)

    def _print(self, text: str, operation: str | None) -> None:
        if sys.stderr is not None:
            sys.stderr.write(f"[{self._site}/{operation or self.pid}] {text}\n")
            sys.stderr.flush()

    def _make(
        self, level: int, path: str, line: int, text: str, function: str | None, extra: dict[str, Any]
    ) -> logging.LogRecord:
        place = {"job": None, "frame": None, "node": None, "operation": None, "site": self._site, "pid": self.pid}
        found = self._logger.makeRecord(
            self._logger.name, level, path, line, text, (), None, function, {**place, **extra}
        )
        found.process = self.pid
        found.processName = f"dfm-{self._site}"
        return found
