"""Server-sent events in a stream of bytes, as the WHATWG HTML standard defines them. Does no I/O."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_LINE_END: Final = re.compile(rb"\r\n?|\n")
_DIGITS: Final = 18
"""The most digits of a reconnection time: more would be no time, and is ignored."""


class EventTooLarge(ValueError):
    """A service sends an event that is larger than the limit."""


class SentEvent(NamedTuple):
    """A server-sent event."""

    name: str
    data: str
    id: str


class EventParser:
    """Find the events in the parts of a stream.

    Args:
        largest: the largest size of an event with its comments, in bytes.
    """

    __slots__ = ("_after_cr", "_data", "_first", "_id", "_largest", "_line", "_name", "_size", "retry")

    def __init__(self, largest: int) -> None:
        self.retry: int | None = None
        """The time after which the service asks to reconnect, in milliseconds."""
        self._largest = largest
        self._line = bytearray()  # the beginning of a line whose end is missing
        self._first = True  # no line has ended
        self._after_cr = False  # a line feed that follows belongs to the same line end
        self._size = 0  # of the lines since the last blank one
        self._name = b""
        self._data = bytearray()
        self._id = ""

    def feed(self, data: bytes) -> Iterator[SentEvent]:
        """Add a part of the stream, and yield each event that is complete. Iterate to the end before the next part.

        Raises:
            EventTooLarge: an event exceeds the limit; the stream cannot be continued.
        """
        start = 1 if self._after_cr and data.startswith(b"\n") else 0
        if data:
            self._after_cr = data.endswith(b"\r")
        for end in _LINE_END.finditer(data, start):
            line = data[start : end.start()]
            start = end.end()
            if self._line:
                self._line += line
                line, self._line = bytes(self._line), bytearray()
            self._check(len(line) + 1)
            self._size += len(line) + 1
            if self._first:
                self._first = False
                line = line.removeprefix(codecs.BOM_UTF8)
            if line:
                self._take(line)
            else:
                self._size = 0
                yield from self._complete()
        self._line += data[start:]
        self._check(len(self._line))

    def _check(self, more: int) -> None:
        if self._size + more > self._largest:
            raise EventTooLarge(f"the service sends more than {self._largest:,} bytes at once")

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match field:
            case b"event":
                self._name = value
            case b"data":
                self._data += value
                self._data += b"\n"
            case b"id" if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
            case b"retry" if value.isdigit() and len(value) <= _DIGITS:
                self.retry = int(value)

    def _complete(self) -> Iterator[SentEvent]:
        name, data = self._name, self._data
        self._name, self._data = b"", bytearray()
        if data:
            text = data[:-1].decode("utf-8", "replace")
            yield SentEvent(name.decode("utf-8", "replace") or "message", text, self._id)
