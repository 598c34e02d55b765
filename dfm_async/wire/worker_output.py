"""The output of a worker as bytes: records of Python code, and plain lines of everything else, in one pipe.

Records are JSON text sequences (RFC 7464): a record separator, JSON, a line feed. The JSON contains neither of the two,
so a record that was torn apart by other output costs only itself: it is read as plain text.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.model.ids import Frame

_SEPARATOR: Final = b"\x1e"
LONGEST: Final = 64 * 1024
"""The number of characters of a message or a line that are sent."""
_BUFFERED: Final = 4 * 1024 * 1024
"""Anything longer than this is not a record: those have at most three texts of the longest length."""


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, tag="log", omit_defaults=True):
    """Output of Python code: a log record, or a line that was printed.

    Attributes:
        level: how serious it is.
        message: the text.
        origin: the name of the logger, or ``stdout`` or ``stderr``.
        created: when it was written, in seconds since the epoch.
        thread: the name of the thread.
        path: the file of the code that wrote it.
        line: the line in that file.
        function: the function in that file.
        traceback: the traceback of an exception, as text.
        stack: the stack, as text, if the code asked for it.
        job: the job that the code worked for.
        frame: the execution that it worked for.
        node: the label of the node that it worked for.
        operation: the operation.
    """

    level: int
    message: str
    origin: str
    created: float
    thread: str = ""
    path: str = ""
    line: int = 0
    function: str = ""
    traceback: str = ""
    stack: str = ""
    job: str | None = None
    frame: Frame | None = None
    node: str | None = None
    operation: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat", omit_defaults=True):
    """A heartbeat.

    Attributes:
        lag: how long the event loop took for its last turn, or takes by now, in seconds.
        alive: when the event loop was last known to run, on the monotonic clock that all processes share.
        idle: whether this is the last heartbeat because there are no jobs.
        sent: when it was sent, on the same clock.
        tokens: the number of values that the worker has sent to other sites so far.
        token_bytes: the number of their bytes.
        running: the number of calls that run in the worker.
        waiting: the number of calls that wait for a thread, for another worker, or for a limit.
        bound: a job, and why it computes on one core although it could use more; None if nothing is new.
        overdue: for how many seconds the deadline of a call is over that the event loop, which is blocked, has not
            noticed.
    """

    lag: float
    alive: float
    idle: bool = False
    sent: float = 0.0
    tokens: int = 0
    token_bytes: int = 0
    running: int = 0
    waiting: int = 0
    bound: tuple[str, str] | None = None
    overdue: float = 0.0


class Debugging(msgspec.Struct, frozen=True, tag="debugging"):
    """A debugger begins to use the terminal of the application, or to wait for it, or leaves it."""

    active: bool


Output: TypeAlias = LogRecord | Heartbeat | Debugging | str
"""A record, a heartbeat, a report of a debugger, or a plain line."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[LogRecord | Heartbeat | Debugging] = msgspec.json.Decoder(
    LogRecord | Heartbeat | Debugging
)


def cut(text: str, missing: int = 0) -> str:
    """Shorten a very long text, with a note; ``missing``: the number of characters that were left out before."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} [... cut: {len(text) - LONGEST + missing:,} more characters]"


def encode_output(item: LogRecord | Heartbeat | Debugging) -> bytes:
    """Encode a record."""
    try:
        return b"\x1e%b\n" % _encoder.encode(item)
    except (UnicodeEncodeError, TypeError):  # half a character, or a string of a class of its own
        plain: dict[str, Any] = {
            name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
            for name, value in msgspec.structs.asdict(item).items()
        }
        return b"\x1e%b\n" % _encoder.encode(type(item)(**plain))


class OutputSplitter:
    """Splits the data of the pipe into records and lines, whatever the pieces that it arrives in."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[Output]:
        """Add data; return the output that is complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[Output] = []
        if lines and self._skipping:
            del lines[0]
            self._skipping = False
        for line in lines:
            _take(line, found)
        if self._skipping:
            self._rest = b""
        elif len(self._rest) > _BUFFERED:
            _take(self._rest, found)
            self._rest = b""
            self._skipping = True
        return found

    def finish(self) -> list[Output]:
        """Return the rest at the end of the data."""
        found: list[Output] = []
        if self._rest:
            _take(self._rest, found)
            self._rest = b""
        return found


def _take(line: bytes, found: list[Output]) -> None:
    """Add one line: a plain one, a record, or a plain one with a record after it."""
    if _SEPARATOR not in line:
        found.append(_plain(line))
        return
    *torn, last = line.split(_SEPARATOR)
    found.extend(_plain(part) for part in torn if part)
    try:
        found.append(_decoder.decode(last))
    except ValueError:
        if last:
            found.append(_plain(last))


def _plain(line: bytes) -> str:
    return cut(line.decode("utf-8", "replace").rstrip("\r"))
