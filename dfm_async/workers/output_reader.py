"""In the application: what a worker says becomes log records."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import os
import termios
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from dfm_async.base.descriptors import close_in_children, disconnect
from dfm_async.wire.output import LogRecord, Output, OutputSplitter, Pulse

__all__ = ["OutputReader", "site_logger"]

_AT_ONCE: Final = 64 * 1024
"""How much is read in one turn of the loop: a worker that floods must not keep the others from theirs."""
_KEPT: Final = 50
_CRASH: Final = "Fatal Python error:"


def site_logger(site: str) -> logging.Logger:
    """The logger that has everything that is said at a site."""
    return logging.getLogger(f"dfm_async.site.{site}")


class OutputReader:
    """Reads the pipe of one worker on the loop, and logs what it says.

    Args:
        site: the worker's site.
        on_pulse: is called for every sign of life.

    Attributes:
        pid: the worker, as soon as it is known.
        tail: its last lines.
    """

    def __init__(self, site: str, on_pulse: Callable[[Pulse], None]) -> None:
        self.pid: int | None = None
        self.tail: deque[str] = deque(maxlen=_KEPT)
        self._site = site
        self._logger = site_logger(site)
        self._descriptor = -1
        self._on_pulse = on_pulse
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
        """Calls back when everything that is in the pipe by now has been read; at once if that is nothing.

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
        """Ends reading; what was said without the end of a line is a line."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._take(self._splitter.finish())

    def _take(self, found: list[Output]) -> None:
        for item in found:
            try:
                if isinstance(item, Pulse):
                    self._on_pulse(item)
                elif isinstance(item, LogRecord):
                    self._crashing = False
                    self._record(item)
                else:
                    self._line(item)
            except Exception as error:  # noqa: BLE001 - a handler or filter of the application: the next line may do
                context = {"message": f"cannot log what a worker of site {self._site!r} says", "exception": error}
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
        if self._logger.isEnabledFor(level):
            self._emit(self._make(level, "", 0, text, None, {"origin": "output"}))

    def _record(self, said: LogRecord) -> None:
        printed = said.origin in ("stdout", "stderr")
        text = said.message if printed else f"{logging.getLevelName(said.level)} {said.origin}: {said.message}"
        self.tail.extend(text.split("\n"))
        if said.traceback:
            self.tail.extend(said.traceback.split("\n"))
        if not self._logger.isEnabledFor(said.level):
            return
        extra = {
            "origin": said.origin,
            "job": said.job,
            "frame": said.frame,
            "node": said.node,
            "operation": said.operation,
        }
        record = self._make(said.level, said.path, said.line, said.message, said.function or None, extra)
        record.relativeCreated += (said.created - record.created) * 1000
        record.created = said.created
        record.msecs = (said.created - int(said.created)) * 1000
        record.threadName = said.thread
        record.thread = None
        record.exc_text = said.traceback or None
        record.stack_info = said.stack or None
        self._emit(record)

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

    def _emit(self, record: logging.LogRecord) -> None:
        self._logger.handle(record)
