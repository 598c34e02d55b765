"""The events of a job as clients get them: JSON with a name and an offset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from dfm_async.model.events import Event
from dfm_async.results.event_codec import EVENT_NAMES, event_data
from dfm_async.results.log import ResultLog
from dfm_async.web.limits import WebLimits
from dfm_async.wire.json_values import JsonValues

_KEPT: Final = 8 * 1024 * 1024
"""The number of bytes of records that are kept for further readers."""
_SMALL: Final = 16 * 1024
"""The most bytes of a record that is kept."""
_CHUNK: Final = 64 * 1024
"""The approximate number of bytes that are written at once."""
_MESSAGE: Final = 256 * 1024
"""The most bytes that a message over a WebSocket has: a server buffers it as a whole."""
_DATA: Final = b"\ndata: "

Chunk: TypeAlias = tuple[bytes, int]
"""Some records one after the other, and the offset of the last one."""


class Records:
    """Makes records of events. One that several readers get is made once."""

    def __init__(self, limits: WebLimits) -> None:
        items, depth = limits.array_items, limits.json_depth
        self.values = JsonValues(array_items=items, record_bytes=limits.record_bytes, json_depth=depth)
        most = min(_MESSAGE, limits.record_bytes)
        self.short_values = JsonValues(array_items=items, record_bytes=most, json_depth=depth)
        """Writes the values of messages over a WebSocket."""
        # By log and not by job id, which may be used again; weakly, so that a log can go when nobody reads it. The
        # events themselves are not kept: their values may be much larger than their records.
        self._logs: WeakKeyDictionary[ResultLog, dict[bool, LogRecords]] = WeakKeyDictionary()
        self._size = 0

    def of(self, log: ResultLog, debug: bool = False) -> LogRecords:
        """Return the records of one log: those for clients who may debug, or those for others."""
        made = self._logs.setdefault(log, {})
        found = made.get(debug)
        if found is None:
            found = made[debug] = LogRecords(self, debug)
        return found

    def keep(self, size: int) -> None:
        """Make room for a record of this size."""
        if self._size + size > _KEPT:
            self.forget()
        self._size += size

    def forget(self) -> None:
        """Drop what is kept."""
        for made in self._logs.values():
            for found in made.values():
                found.forget()
        self._size = 0


class _Large:
    """A record that is too large to be kept; shared by connections that write it at the same time."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class LogRecords:
    """The records of one log, as JSON in one line, or as server-sent events."""

    def __init__(self, records: Records, debug: bool) -> None:
        self._records = records
        self._debug = debug
        self._kept: dict[int, bytes] = {}
        self._large: WeakValueDictionary[int, _Large] = WeakValueDictionary()
        self._chunks: dict[tuple[int, int], Chunk] = {}

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept.clear()
        self._chunks.clear()

    def _made(self, event: Event) -> bytes | _Large:
        found = self._kept.get(event.offset) or self._large.get(event.offset)
        if found is None:
            data = self._encode(event, self._records.values)
            if len(data) <= _SMALL:
                self._records.keep(len(data))
                found = self._kept[event.offset] = data
            else:
                found = self._large[event.offset] = _Large(data)
        return found

    def _encode(self, event: Event, values: JsonValues) -> bytes:
        data = values.encode_whole(event_data(event, values, tracebacks=self._debug))
        return sse_event(EVENT_NAMES[type(event)], data, event.offset)

    def sse(self, event: Event) -> bytes:
        """Return a record as a server-sent event, whose id is the offset and whose name is the event's."""
        return _data(self._made(event))

    def chunks(self, events: list[Event], shared: bool) -> Iterator[Chunk]:
        """Return the records of events that follow each other, as server-sent events, in pieces to be written at once.

        A piece is made when it is needed: a reader that stops costs one piece, however much there is to read. Pieces
        that are shared with other readers are kept.
        """
        key = events[0].offset, len(events)
        known = self._chunks.get(key)
        if known is not None:
            yield known
            return
        parts: list[bytes | _Large] = []  # held until they are written, so that others share them
        size, whole = 0, True
        for event in events:
            if size >= _CHUNK:
                yield _joined(parts), event.offset - 1
                parts, size, whole = [], 0, False
            made = self._made(event)
            if parts and size + len(_data(made)) > _CHUNK:
                yield _joined(parts), event.offset - 1
                parts, size, whole = [], 0, False
            parts.append(made)
            size += len(_data(made))
        chunk = _joined(parts), events[-1].offset
        if whole and shared and size <= _CHUNK:
            self._records.keep(size)
            self._chunks[key] = chunk
        yield chunk

    def json(self, event: Event) -> bytes:
        """Return a record as JSON in one line."""
        return _line(self.sse(event))

    def message(self, event: Event) -> bytes:
        """Return a record as JSON in one line, short enough for a message over a WebSocket."""
        found = self.json(event)
        return found if len(found) <= _MESSAGE else _line(self._encode(event, self._records.short_values))


def _data(made: bytes | _Large) -> bytes:
    return made.data if isinstance(made, _Large) else made


def _joined(parts: list[bytes | _Large]) -> bytes:
    return _data(parts[0]) if len(parts) == 1 else b"".join(map(_data, parts))


def _line(record: bytes) -> bytes:
    return record.partition(_DATA)[2][:-2]


def sse_event(name: str, data: bytes, offset: int) -> bytes:
    """Write a server-sent event; the data is JSON in one line. Without an offset it has no id."""
    head = b"id: %d\n" % offset if offset >= 0 else b""
    return b"%sevent: %s%s%s\n\n" % (head, name.encode(), _DATA, data)
