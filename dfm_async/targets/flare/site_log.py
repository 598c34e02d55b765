"""What a site's workers say, on its way to the applications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from dfm_async.targets.flare.messages import LogLine, LogLines
from dfm_async.workers.output_reader import site_logger

__all__ = ["SiteLog", "replay"]

_MOST: Final = 1000
"""How many records wait to be sent; further ones are counted."""
_LONGEST: Final = 64 * 1024


class SiteLog(logging.Handler):
    """Gathers the records of the site's logger, and sends those of one turn of the loop together.

    Args:
        site: the site.
        send: takes them to the hub.
    """

    def __init__(self, site: str, send: Callable[[LogLines], None]) -> None:
        super().__init__()
        self._site = site
        self._tell = send
        self._logger = site_logger(site)
        self._lines: list[LogLine] = []
        self._left_out = 0
        self._handle: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begins to listen."""
        self._loop = asyncio.get_running_loop()
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def close(self) -> None:
        """Sends what is left, and ends it."""
        self._logger.removeHandler(self)
        self.flush()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record; the logger is only used on the loop."""
        if len(self._lines) >= _MOST:
            self._left_out += 1
            return
        self._lines.append(_line_of(record))
        if self._handle is None and self._loop is not None:
            self._handle = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends what was gathered."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        lines, self._lines = self._lines, []
        left_out, self._left_out = self._left_out, 0
        if lines:
            self._tell(LogLines(self._site, lines, left_out))


def _line_of(record: logging.LogRecord) -> LogLine:
    found = record.__dict__
    return LogLine(
        record.levelno,
        record.getMessage()[:_LONGEST],
        record.pathname,
        record.lineno,
        record.funcName,
        record.created,
        record.threadName,
        record.exc_text,
        record.stack_info,
        found.get("pid"),
        found.get("origin", ""),
        found.get("job"),
        found.get("frame"),
        found.get("node"),
        found.get("operation"),
    )


def replay(site: str, line: LogLine) -> None:
    """Gives a record of a site to the logger that has it on one machine, too."""
    logger = site_logger(site)
    if not logger.isEnabledFor(line.level):
        return
    extra: dict[str, Any] = {
        "site": site,
        "pid": line.pid,
        "origin": line.origin,
        "job": line.job,
        "frame": line.frame,
        "node": line.node,
        "operation": line.operation,
    }
    record = logger.makeRecord(logger.name, line.level, line.path, line.line, line.text, (), None, line.function, extra)
    record.relativeCreated += (line.created - record.created) * 1000
    record.created = line.created
    record.msecs = (line.created - int(line.created)) * 1000
    record.threadName, record.thread = line.thread, None
    record.process, record.processName = line.pid, f"dfm-{site}"
    record.exc_text, record.stack_info = line.traceback, line.stack
    logger.handle(record)
