"""The events of a job as clients get them: JSON with a name and an offset."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

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

_KEPT: Final = 512
"""How many records are kept for further readers of the same job."""
_SMALL: Final = 8 * 1024
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
        self._kept: OrderedDict[tuple[str, int], tuple[Event, bytes]] = OrderedDict()

    def of(self, job_id: str, event: Event) -> bytes:
        """Gives the record of an event, as JSON in one line."""
        key = (job_id, event.offset)
        known = self._kept.get(key)
        if known is not None and known[0] is event:  # another one: the id was forgotten and used again
            return known[1]
        record = self._values.encode(self._data(event))
        if len(record) <= _SMALL:
            self._kept[key] = (event, record)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return record

    def forget(self) -> None:
        """Drops what is kept: nobody reads any more."""
        self._kept.clear()

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
