"""In a worker: all output of its code goes into one pipe to the application, at once.

Writing is synchronous, from whatever thread speaks, so nothing is lost when the process ends a moment later, however it
ends. If the pipe is full, the speaker waits until the application has read some of it. The application's event loop
never waits for a worker, so that is no deadlock; but code that writes faster than the application reads waits.
"""

from __future__ import annotations

import codecs
import contextlib
import faulthandler
import fcntl
import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, BinaryIO, Final, TextIO, cast

from dfm_async.base.descriptors import disconnect
from dfm_async.base.redaction import LONGEST as LONGEST_SECRET
from dfm_async.base.redaction import hide
from dfm_async.runtime.context import OperationContext, current_context
from dfm_async.wire.worker_output import LONGEST, Debugging, Heartbeat, LogRecord, cut, encode_output

_PIPE_SIZE: Final = 1024 * 1024
_PARTIAL: Final = 64
"""How many unfinished lines a stream keeps; code that never ends its lines must not fill the memory."""


def open_pipe() -> tuple[int, OutputPipe]:
    """Make a pipe: the descriptor to read from, and the end for a worker."""
    here, there = os.pipe()
    os.set_blocking(here, False)
    resize = getattr(fcntl, "F_SETPIPE_SZ", None)
    if resize is not None:
        with contextlib.suppress(OSError):  # the number of large ones per user is limited
            fcntl.fcntl(there, resize, _PIPE_SIZE)
    return here, OutputPipe(there)


def _rebuild(descriptor: Any) -> OutputPipe:
    return OutputPipe(descriptor.detach())


class OutputPipe:
    """The end of the pipe that a worker writes to. Can be sent to a process that is being started."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._lock = threading.RLock()
        self._broken = False

    def __reduce__(self) -> tuple[Callable[[Any], OutputPipe], tuple[Any]]:
        return _rebuild, (reduction.DupFd(self.descriptor),)

    def keep(self) -> None:
        """Make the pipe this process's own: programs that it starts do not get it, and a fork finds it unlocked."""
        os.set_inheritable(self.descriptor, False)
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.RLock()

    def write(self, data: bytes) -> None:
        """Write all of it; wait if the pipe is full, and drop it if the reader is gone."""
        with self._lock:
            rest = memoryview(data)
            while rest and not self._broken:
                try:
                    rest = rest[os.write(self.descriptor, rest) :]
                except BlockingIOError:  # a program that shares our standard output made it so
                    self._wait()
                except OSError:
                    self._broken = True

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        poll.poll()

    def send(self, *items: LogRecord | Heartbeat | Debugging) -> None:
        """Write records."""
        self.write(b"".join(map(encode_output, items)))

    def close(self) -> None:
        """Close this end, in the process that has sent it to another."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close_in_child(self) -> None:
        """Disconnect this end, in a child that the application forks."""
        disconnect(self.descriptor)


def capture(pipe: OutputPipe, level: int, *, streams: bool) -> None:
    """Send log records from this level on through the pipe, and standard output and error if ``streams`` is true."""
    pipe.keep()
    faulthandler.enable(pipe.descriptor, all_threads=False)  # the others' stacks would hide the one that crashed
    _capture_logs(pipe, level)
    if streams:
        _capture_streams(pipe)


def _context() -> OperationContext | None:
    try:
        return current_context()
    except LookupError:
        return None


# logging


def _capture_logs(pipe: OutputPipe, level: int) -> None:
    root = logging.getLogger()
    standard = [stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) if stream is not None]
    # A module that was loaded before may have had records written to one of them: they would come twice.
    root.handlers[:] = [found for found in root.handlers if getattr(found, "stream", None) not in standard]
    root.addHandler(_PipeHandler(pipe))
    root.setLevel(level)


class _PipeHandler(logging.Handler):
    """Writes log records to the pipe."""

    def __init__(self, pipe: OutputPipe) -> None:
        super().__init__()
        self._pipe = pipe
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._pipe.send(self._convert(record))
        except Exception:  # noqa: BLE001 - as every handler: what cannot be logged must not stop who logs it
            self.handleError(record)

    def _convert(self, record: logging.LogRecord) -> LogRecord:
        traceback = record.exc_text or ""
        if record.exc_info and not traceback:
            traceback = self._formatter.formatException(record.exc_info)
        return LogRecord(
            level=record.levelno,
            message=cut(record.getMessage()),
            origin=record.name,
            created=record.created,
            thread=record.threadName or "",
            path=record.pathname,
            line=record.lineno,
            function=record.funcName or "",
            traceback=cut(traceback),
            stack=cut(record.stack_info or ""),
            **_place(record),
        )


def _place(record: logging.LogRecord) -> dict[str, Any]:
    """Return the job, frame, node and operation that a record belongs to.

    The fields of the record come first: that of a context's logger may have been made in another context.
    """
    place = _place_of(_context())
    for name in ("job", "frame", "node", "operation"):
        value = getattr(record, name, None)
        if value is None:
            continue
        if name != "frame":
            place[name] = str(value)
        else:
            is_frame = isinstance(value, tuple) and all(isinstance(index, int) for index in value)
            place[name] = value if is_frame else None
    return place


def _place_of(context: OperationContext | None) -> dict[str, Any]:
    if context is None:
        return {}
    return {"job": context.job_id, "frame": context.frame, "node": context.node, "operation": context.operation}


# print


def _capture_streams(pipe: OutputPipe) -> None:
    for old in (sys.stdout, sys.stderr):
        if isinstance(old, io.TextIOWrapper):
            old.flush()
            old.reconfigure(line_buffering=True)  # other code may hold it
    for number in (1, 2):
        os.dup2(pipe.descriptor, number)
    sys.stdout = cast("TextIO", _LineStream(pipe, 1, logging.INFO, "stdout"))
    sys.stderr = cast("TextIO", _LineStream(pipe, 2, logging.WARNING, "stderr"))


class _Partial:
    """A line that was not ended yet: what will be shown of it, and how much more there was."""

    __slots__ = ("missing", "parts", "room")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.room = LONGEST + 1 + LONGEST_SECRET  # more than is shown: a secret at its end must be seen whole
        self.missing = 0

    def add(self, text: str) -> None:
        """Go on with the line."""
        if self.room:
            self.parts.append(text[: self.room])
        self.missing += max(0, len(text) - self.room)
        self.room = max(0, self.room - len(text))

    @property
    def text(self) -> str:
        """The line without secrets, or as much of it as is shown."""
        text = hide("".join(self.parts).rstrip("\r"))
        if self.missing:  # what was left out may have begun inside a secret
            text, self.missing = text[:-LONGEST_SECRET], self.missing + LONGEST_SECRET
        return cut(text, self.missing)


class _Bytes(io.RawIOBase):
    """The ``buffer`` of a standard stream: what is written to it goes into the same pipe."""

    def __init__(self, stream: _LineStream) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: Any) -> int:
        found = bytes(data)
        self._stream.write(self._decoder.decode(found))
        return len(found)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Only flushes: others still use the stream."""
        self.flush()


class _LineStream(io.TextIOBase):
    """A standard stream: every line becomes a record, with the job of the code that wrote it."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True

    def __init__(self, pipe: OutputPipe, number: int, level: int, name: str) -> None:
        self.mode = "w"
        self.name = f"<{name}>"
        self.buffer: BinaryIO = cast("BinaryIO", _Bytes(self))
        self._pipe = pipe
        self._number = number
        self._level = level
        self._origin = name
        self._lock = threading.RLock()
        self._partial: dict[tuple[int, OperationContext | None], _Partial] = {}
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._partial.clear()  # these are the parent's

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        context = _context()
        key = (threading.get_ident(), context)
        begun, newline, rest = text.rpartition("\n")
        if newline:
            first, *others = begun.split("\n")
            partial = self._take(key) or _Partial()
            partial.add(first)
            self._send([partial.text, *(cut(hide(line.rstrip("\r"))) for line in others)], context)
        if rest:
            self._keep(key, rest)
        return len(text)

    def _keep(self, key: tuple[int, OperationContext | None], text: str) -> None:
        with self._lock:
            self._partial.setdefault(key, _Partial()).add(text)
            oldest = next(iter(self._partial)) if len(self._partial) > _PARTIAL else None
        if oldest is not None:
            self._end(oldest)

    def _take(self, key: tuple[int, OperationContext | None]) -> _Partial | None:
        if not self._partial:
            return None
        with self._lock:
            return self._partial.pop(key, None)

    def _end(self, key: tuple[int, OperationContext | None]) -> None:
        partial = self._take(key)
        if partial is not None:
            self._send([partial.text], key[1])

    def _send(self, lines: list[str], context: OperationContext | None) -> None:
        now, thread = time.time(), hide(threading.current_thread().name)
        place: dict[str, Any] = {"level": self._level, "origin": self._origin, "created": now, "thread": thread}
        place |= _place_of(context)
        self._pipe.send(*(LogRecord(message=line, **place) for line in lines))

    def flush(self) -> None:
        """End the line of the code that calls it; all lines, if that is no operation's, as at the process's end."""
        context = _context()
        if context is None and threading.current_thread() is threading.main_thread():
            for key in list(self._partial):
                self._end(key)
        else:
            self._end((threading.get_ident(), context))

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Only flushes: others still use the stream."""
        self.flush()

    def reconfigure(self, **_options: Any) -> None:
        """Does nothing: there is nothing to choose."""
