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

__all__ = ["NAMES", "Records", "error_data"]

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


def error_data(error: DfmError) -> dict[str, Any]:
    """What clients are told about an error. Tracebacks stay here: they show code and paths."""
    if isinstance(error, OperationFailed):
        return {
            "type": error.type_name,
            "message": error.message,
            "operation": error.operation,
            "attempt": error.attempt,
        }
    return {"type": type_name(type(error)), "message": str(error).split("\n", 1)[0]}


class Records:
    """Makes records of events. One that several readers get is made once."""

    def __init__(self, limits: WebLimits) -> None:
        self._values = JsonValues(limits)
        # By log and not by job id, which may be used again; weakly, so that a log can go when nobody reads it. The
        # events themselves are not kept: their values may be much larger than their records.
        self._kept: WeakKeyDictionary[ResultLog, dict[int, bytes]] = WeakKeyDictionary()
        self._size = 0

    def of(self, log: ResultLog, event: Event) -> bytes:
        """Gives the record of an event of a log, as JSON in one line."""
        kept = self._kept.get(log)
        if kept is None:
            kept = self._kept[log] = {}
        record = kept.get(event.offset)
        if record is None:
            record = self._values.encode(self._data(event))
            if len(record) <= _SMALL:
                if self._size + len(record) > _KEPT:
                    self.forget()
                    kept = self._kept[log] = {}
                kept[event.offset] = record
                self._size += len(record)
        return record

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept.clear()
        self._size = 0

    def _data(self, event: Event) -> dict[str, Any]:
        data: dict[str, Any] = {"event": NAMES[type(event)], "offset": event.offset}
        match event:
            case Result():
                value = msgspec.Raw(self._values.encode(event.value))
                data.update(place=event.place, value=value, frame=event.frame, site=event.site, node=event.node)
            case Failure():
                error = error_data(event.error)
                data.update(place=event.place, error=error, frame=event.frame, site=event.site, node=event.node)
            case StatusChanged():
                data.update(status=event.status.value, reason=event.reason)
            case _:
                data.update({name: getattr(event, name) for name in event.__struct_fields__ if name != "offset"})
        return data
