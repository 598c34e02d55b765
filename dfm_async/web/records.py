"""The events of a job as clients get them: JSON with a name and an offset."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from dfm_async.errors import DfmError, OperationFailed
from dfm_async.model.events import (
    Event,
    Failure,
    FrameCompleted,
    Metrics,
    Progress,
    Result,
    StatusChanged,
    WorkerNotice,
)
from dfm_async.results.log import ResultLog
from dfm_async.web.limits import WebLimits
from dfm_async.web.values import JsonValues
from dfm_async.wire.codec import type_name

__all__ = ["NAMES", "LogRecords", "Records", "error_data", "sse_event"]

NAMES: Final[dict[type[Any], str]] = {
    Result: "result",
    Failure: "failure",
    Progress: "progress",
    Metrics: "metrics",
    StatusChanged: "status",
    FrameCompleted: "frame",
    WorkerNotice: "worker",
}
"""What each kind of event is called."""

_KEPT: Final = 8 * 1024 * 1024
"""How many bytes of records are kept for further readers."""
_SMALL: Final = 16 * 1024
"""Only records of at most so many bytes are kept."""
_DATA: Final = b"\ndata: "


def error_data(error: DfmError, debug: bool = False) -> dict[str, Any]:
    """What clients are told about an error. Tracebacks show code and paths: only those get them who may debug."""
    if isinstance(error, OperationFailed):
        data = {
            "type": error.type_name,
            "message": error.message,
            "operation": error.operation,
            "attempt": error.attempt,
        }
        return {**data, "traceback": error.remote_traceback} if debug and error.remote_traceback else data
    return {"type": type_name(type(error)), "message": str(error).split("\n", 1)[0]}


class Records:
    """Makes records of events. One that several readers get is made once."""

    def __init__(self, limits: WebLimits) -> None:
        self.values = JsonValues(limits)
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

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept.clear()

    def sse(self, event: Event) -> bytes:
        """Gives a record as a server-sent event, whose id is the offset and whose name is the event's."""
        found = self._kept.get(event.offset)
        if found is None:
            data = self._records.values.encode_whole(_data(event, self._records, self._debug))
            found = sse_event(NAMES[type(event)], data, event.offset)
            if len(found) <= _SMALL:
                self._records.keep(len(found))
                self._kept[event.offset] = found
        return found

    def batch(self, events: list[Event]) -> list[bytes]:
        """Gives several records as server-sent events. With many readers, most of them are there already."""
        kept = self._kept
        return [kept.get(event.offset) or self.sse(event) for event in events]

    def json(self, event: Event) -> bytes:
        """Gives a record as JSON in one line."""
        return self.sse(event).partition(_DATA)[2][:-2]


def sse_event(name: str, data: bytes, offset: int) -> bytes:
    """Writes a server-sent event; the data is JSON in one line. Nothing stands before offset 0, so it has no id."""
    head = b"id: %d\n" % offset if offset >= 0 else b""
    return b"%sevent: %s%s%s\n\n" % (head, name.encode(), _DATA, data)


def _data(event: Event, records: Records, debug: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"event": NAMES[type(event)], "offset": event.offset}
    match event:
        case Result():
            value = msgspec.Raw(records.values.encode(event.value))
            data.update(place=event.place, value=value, frame=event.frame, site=event.site, node=event.node)
        case Failure():
            error = error_data(event.error, debug)
            data.update(place=event.place, error=error, frame=event.frame, site=event.site, node=event.node)
        case StatusChanged():
            data.update(status=event.status.value, reason=event.reason)
        case _:
            data.update({name: getattr(event, name) for name in event.__struct_fields__ if name != "offset"})
    return data
