"""What a worker says, as bytes: records of what Python says, and plain lines of everything else, in one pipe.

Records are JSON text sequences (RFC 7464): a record separator, JSON, a line feed. The JSON contains neither of the two,
so a record that was torn apart by other output costs only itself: it is read as plain text.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.model.ids import Frame

__all__ = ["LONGEST", "LogRecord", "Output", "OutputSplitter", "Pulse", "cut", "encode_output"]

_SEPARATOR: Final = b"\x1e"
LONGEST: Final = 64 * 1024
"""How many characters of a message or a line are sent."""
_BUFFERED: Final = 4 * 1024 * 1024
"""What is longer than this is no record: those have at most three texts of the longest length."""


class LogRecord(msgspec.Struct, frozen=True, tag="log", omit_defaults=True):
    """Something that Python code said: a log record, or a line that was printed.

    Attributes:
        level: how serious it is.
        message: the text.
        origin: the name of the logger, or ``stdout`` or ``stderr``.
        created: when it was said, in seconds since the epoch.
        thread: the name of the thread.
        path: the file of the code that said it.
        line: the line in that file.
        function: the function in that file.
        traceback: the traceback of an exception, as text.
        stack: the stack, as text, if the code asked for it.
        job: the job that the code worked for.
        frame: the execution that it worked for.
        node: the label of the node that it worked for.
        operation: the operation that it was.
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


class Pulse(msgspec.Struct, frozen=True, tag="pulse", omit_defaults=True):
    """A sign of life.

    Attributes:
        lag: how long the event loop took for its last turn, or takes by now, in seconds.
        alive: when the event loop was last known to run, on the monotonic clock that all processes share.
        idle: whether this is the last pulse because there are no jobs.
        sent: when it was sent, on the same clock.
        tokens: how many values the worker has sent to other sites so far.
        token_bytes: how many bytes they had.
    """

    lag: float
    alive: float
    idle: bool = False
    sent: float = 0.0
    tokens: int = 0
    token_bytes: int = 0


Output: TypeAlias = LogRecord | Pulse | str
"""A record, a pulse, or a plain line."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[LogRecord | Pulse] = msgspec.json.Decoder(LogRecord | Pulse)


def cut(text: str, missing: int = 0) -> str:
    """Shortens a text that is very long, and says so; ``missing`` tells how much of it was left out before."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} [... cut: {len(text) - LONGEST + missing:,} more characters]"


def encode_output(item: LogRecord | Pulse) -> bytes:
    """Makes a record ready to be written."""
    try:
        return b"\x1e%b\n" % _encoder.encode(item)
    except (UnicodeEncodeError, TypeError):  # half a character, or a string of a class of its own
        plain: dict[str, Any] = {
            name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
            for name, value in msgspec.structs.asdict(item).items()
        }
        return b"\x1e%b\n" % _encoder.encode(type(item)(**plain))


class OutputSplitter:
    """Takes apart what comes out of the pipe, however it was cut into pieces on its way."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[Output]:
        """Gives what is complete now."""
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
        """Gives the rest; nothing will follow."""
        found: list[Output] = []
        if self._rest:
            _take(self._rest, found)
            self._rest = b""
        return found


def _take(line: bytes, found: list[Output]) -> None:
    """Takes one line: a plain one, a record, or a plain one with a record behind it."""
    if _SEPARATOR not in line:
        found.append(_plain(line))
        return
    *torn, last = line.split(_SEPARATOR)
    found.extend(_plain(part) for part in torn if part)
    try:
        found.append(_decoder.decode(last))
    except msgspec.MsgspecError:
        if last:
            found.append(_plain(last))


def _plain(line: bytes) -> str:
    return cut(line.decode("utf-8", "replace").rstrip("\r"))
