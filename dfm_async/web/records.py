"""The events of a job as clients get them: JSON with a name and an offset."""

from __future__ import annotations

from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

from dfm_async.model.events import Event
from dfm_async.results.event_data import NAMES, event_data
from dfm_async.results.log import ResultLog
from dfm_async.web.limits import WebLimits
from dfm_async.wire.json_values import JsonValues

__all__ = ["Chunk", "LogRecords", "Records", "sse_event"]

_KEPT: Final = 8 * 1024 * 1024
"""How many bytes of records are kept for further readers."""
_SMALL: Final = 16 * 1024
"""Only records of at most so many bytes are kept."""
_CHUNK: Final = 64 * 1024
"""About how many bytes are written at once."""
_DATA: Final = b"\ndata: "

Chunk: TypeAlias = tuple[bytes, int]
"""Some records one after the other, and the offset of the last one."""


class Records:
    """Makes records of events. One that several readers get is made once."""

    def __init__(self, limits: WebLimits) -> None:
        self.values = JsonValues(
            array_items=limits.array_items, record_bytes=limits.record_bytes, json_depth=limits.json_depth
        )
        # By log and not by job id, which may be used again; weakly, so that a log can go when nobody reads it. The
        # events themselves are not kept: their values may be much larger than their records.
        self._logs: WeakKeyDictionary[ResultLog, dict[bool, LogRecords]] = WeakKeyDictionary()
        self._size = 0

    def of(self, log: ResultLog, debug: bool = False) -> LogRecords:
        """Gives the records of one log: those for clients who may debug, or those for others."""
        made = self._logs.setdefault(log, {})
        found = made.get(debug)
        if found is None:
            found = made[debug] = LogRecords(self, debug)
        return found

    def keep(self, size: int) -> None:
        """Makes room for a record of so many bytes."""
        if self._size + size > _KEPT:
            self.forget()
        self._size += size

    def forget(self) -> None:
        """Drops what is kept."""
        for made in self._logs.values():
            for found in made.values():
                found.forget()
        self._size = 0


class LogRecords:
    """The records of one log, as JSON in one line, or as server-sent events."""

    def __init__(self, records: Records, debug: bool) -> None:
        self._records = records
        self._debug = debug
        self._kept: dict[int, bytes] = {}
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept.clear()
        self._chunks.clear()

    def sse(self, event: Event) -> bytes:
        """Gives a record as a server-sent event, whose id is the offset and whose name is the event's."""
        found = self._kept.get(event.offset)
        if found is None:
            values = self._records.values
            data = values.encode_whole(event_data(event, values, tracebacks=self._debug))
            found = sse_event(NAMES[type(event)], data, event.offset)
            if len(found) <= _SMALL:
                self._records.keep(len(found))
                self._kept[event.offset] = found
        return found

    def chunks(self, events: list[Event], shared: bool) -> list[Chunk]:
        """Gives the records of events that follow each other, as server-sent events, in pieces to be written at once.

        Args:
            events: the events, at least one.
            shared: whether other readers will want the same ones.
        """
        key = events[0].offset, len(events)
        found = self._chunks.get(key)
        if found is None:
            found = _chunks([self.sse(event) for event in events], events[0].offset)
            size = sum(len(data) for data, _ in found)
            if shared and size <= _CHUNK:
                self._records.keep(size)
                self._chunks[key] = found
        return found

    def json(self, event: Event) -> bytes:
        """Gives a record as JSON in one line."""
        return self.sse(event).partition(_DATA)[2][:-2]


def _chunks(parts: list[bytes], offset: int) -> list[Chunk]:
    """Joins records while they fit; each piece has at least one."""
    found: list[Chunk] = []
    start = size = 0
    for at, part in enumerate(parts):
        if size + len(part) > _CHUNK and at > start:
            found.append((b"".join(parts[start:at]), offset + at - 1))
            start, size = at, 0
        size += len(part)
    found.append((b"".join(parts[start:]), offset + len(parts) - 1))
    return found


def sse_event(name: str, data: bytes, offset: int) -> bytes:
    """Writes a server-sent event; the data is JSON in one line. Nothing stands before offset 0, so it has no id."""
    head = b"id: %d\n" % offset if offset >= 0 else b""
    return b"%sevent: %s%s%s\n\n" % (head, name.encode(), _DATA, data)
