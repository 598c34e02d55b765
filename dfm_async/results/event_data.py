"""Events as JSON tells them: a name, an offset, and what they hold."""

from __future__ import annotations

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
from dfm_async.wire.codec import type_name
from dfm_async.wire.json_values import JsonValues

__all__ = ["NAMES", "error_data", "event_data"]

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


def error_data(error: DfmError, *, tracebacks: bool = False) -> dict[str, Any]:
    """What clients are told about an error. Tracebacks show code and paths: not everybody may see them."""
    if isinstance(error, OperationFailed):
        data: dict[str, Any] = {
            "type": error.type_name,
            "message": error.message,
            "operation": error.operation,
            "attempt": error.attempt,
        }
        return {**data, "traceback": error.remote_traceback} if tracebacks and error.remote_traceback else data
    return {"type": type_name(type(error)), "message": str(error).split("\n", 1)[0]}


def event_data(event: Event, values: JsonValues, *, tracebacks: bool = False) -> dict[str, Any]:
    """What JSON tells about an event."""
    data: dict[str, Any] = {"event": NAMES[type(event)], "offset": event.offset}
    match event:
        case Result():
            value = msgspec.Raw(values.encode(event.value))
            data.update(place=event.place, value=value, frame=event.frame, site=event.site, node=event.node)
        case Failure():
            error = error_data(event.error, tracebacks=tracebacks)
            data.update(place=event.place, error=error, frame=event.frame, site=event.site, node=event.node)
        case StatusChanged():
            data.update(status=event.status.value, reason=event.reason)
        case _:
            data.update({name: getattr(event, name) for name in event.__struct_fields__ if name != "offset"})
    return data
