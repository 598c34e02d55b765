"""Forward the log records of a site's workers to the applications."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from dfm_async.base.text import cleaned
from dfm_async.targets.flare.protocol import LogLine, LogLines
from dfm_async.workers.output_reader import site_logger

_MOST: Final = 1000
"""The largest number of records that wait to be sent; further ones are counted."""
_MOST_BYTES: Final = 4 * 1024 * 1024
"""The largest number of bytes of their text; the same holds for what is left out."""
_LONGEST: Final = 64 * 1024
"""The largest number of bytes of a text that are sent."""
_NAME: Final = 1024
"""The same for names of files, functions and the like."""

_LATEST: Final = 253402300800.0
"""The year 10000: no clock shows it, and formatters fail for it."""


class SiteLog(logging.Handler):
    """Gathers the records of the site's logger, and sends those of one turn of the loop together.

    Args:
        site: the site.
        send: takes them to the hub.
    """

    def __init__(self, site: str, send: Callable[[LogLines], None]) -> None:
        super().__init__()
        self._site = site
        self._notify = send
        self._logger = site_logger(site)
        self._lines: list[LogLine] = []
        self._bytes = 0
        self._left_out = 0
        self._handle: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def close(self) -> None:
        """Send what is left, and end it."""
        self._logger.removeHandler(self)
        self.flush()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; the logger is only used on the loop."""
        if len(self._lines) >= _MOST or self._bytes >= _MOST_BYTES:
            self._left_out += 1
            return
        line = _line_of(record)
        self._bytes += len(line.text) + len(line.traceback or "") + len(line.stack or "")
        self._lines.append(line)
        if self._handle is None and self._loop is not None:
            self._handle = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the records that were collected."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        lines, self._lines = self._lines, []
        left_out, self._left_out = self._left_out, 0
        self._bytes = 0
        if lines:
            self._notify(LogLines(self._site, lines, left_out))


def _line_of(record: logging.LogRecord) -> LogLine:
    found = record.__dict__
    return LogLine(
        level=record.levelno,
        text=cleaned(record.getMessage(), _LONGEST),
        path=cleaned(record.pathname, _NAME),
        line=record.lineno,
        function=_clean(record.funcName, _NAME),
        created=record.created,
        thread=_clean(record.threadName, _NAME),
        traceback=_clean(record.exc_text, _LONGEST),
        stack=_clean(record.stack_info, _LONGEST),
        pid=found.get("pid"),
        origin=cleaned(found.get("origin", ""), _NAME),
        job=_clean(found.get("job"), _NAME),
        frame=found.get("frame"),
        node=_clean(found.get("node"), _NAME),
        operation=_clean(found.get("operation"), _NAME),
    )


def _clean(text: str | None, longest: int) -> str | None:
    return None if text is None else cleaned(text, longest)


def replay(site: str, line: LogLine) -> None:
    """Log a record of a site as on one machine. It is untrusted input."""
    logger = site_logger(site)
    if not logger.isEnabledFor(line.level):
        return
    extra: dict[str, Any] = {
        "site": site,
        "pid": line.pid,
        "origin": cleaned(line.origin, _NAME),
        "job": _clean(line.job, _NAME),
        "frame": line.frame,
        "node": _clean(line.node, _NAME),
        "operation": _clean(line.operation, _NAME),
    }
    text, path, function = cleaned(line.text, _LONGEST), cleaned(line.path, _NAME), _clean(line.function, _NAME)
    record = logger.makeRecord(logger.name, line.level, path, line.line, text, (), None, function, extra)
    created = line.created if 0 <= line.created < _LATEST else time.time()  # also what is no number
    record.relativeCreated += (created - record.created) * 1000
    record.created = created
    record.msecs = (created - int(created)) * 1000
    record.threadName, record.thread = _clean(line.thread, _NAME), None
    record.process, record.processName = line.pid, f"dfm-{site}"
    record.exc_text, record.stack_info = _clean(line.traceback, _LONGEST), _clean(line.stack, _LONGEST)
    logger.handle(record)
