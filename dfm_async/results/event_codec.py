"""Events as bytes and as plain data, by one table: for the journal, for FLARE, for the web service and its clients.

As bytes, an event is a :class:`Head`; values and errors travel beside the heads, so that they can stay opaque to those
who only forward or scan events. As plain data, an event is an object with its name, its offset and its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from dfm_async import errors
from dfm_async.errors import DecodingError, DfmError, EncodingError, OperationFailed
from dfm_async.model.events import (
    Activity,
    Event,
    EventSent,
    Failure,
    FailureHandled,
    FrameCompleted,
    Metrics,
    Progress,
    Result,
    Scalar,
    StatusChanged,
    WaitBegan,
    WaitEnded,
    WorkerNotice,
)
from dfm_async.model.ids import Frame
from dfm_async.model.json_data import read_json, write_json
from dfm_async.planning.plan import Plan
from dfm_async.wire.codec import Broken, Codec, type_name
from dfm_async.wire.json_values import JsonValues


class Head(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An event without its value or error. New fields go to the end: journals of earlier versions lack them.

    Attributes:
        kind: the name of the kind, in the table below.
        point: of a result, or of a failed yield: the number of the yield.
        error: of a failure: the position of its error among those beside the heads.
        at: of a result: the number of the location.
    """

    kind: str
    frame: Frame = ()
    site: str = ""
    node: str = ""
    place: str | None = None
    point: int = -1
    error: int = -1
    text: str | None = None
    status: str = ""
    done: float = 0.0
    total: float | None = None
    values: dict[str, Scalar] | None = None
    step: int | None = None
    at: int = -1


class _Row(NamedTuple):
    name: str
    kind: type[Any]
    fields: dict[str, str]
    """The fields of the event, and the fields of the head that hold them."""


def _row(name: str, kind: type[Any], /, **renamed: str) -> _Row:
    fields = [field for field in kind.__struct_fields__ if field not in ("offset", "value", "error")]
    return _Row(name, kind, {field: renamed.get(field, field) for field in fields})


_ROWS: Final = (
    _row("result", Result),
    _row("failure", Failure),
    _row("progress", Progress, note="text"),
    _row("metrics", Metrics),
    _row("handled", FailureHandled, type_name="status", message="text", attempt="step"),
    _row("status", StatusChanged, reason="text"),
    _row("frame", FrameCompleted),
    _row("wait_began", WaitBegan, name="text", until="total"),
    _row("event_sent", EventSent, name="node", sent="done"),
    _row("wait_ended", WaitEnded, name="text", by="status"),
    _row("worker", WorkerNotice, kind="node", detail="text", seconds="done"),
)
"""One row for each kind of event. Names are part of the formats: never change one, only add."""
_BY_TYPE: Final = {row.kind: row for row in _ROWS}
_BY_NAME: Final = {row.name: row for row in _ROWS}
EVENT_NAMES: Final[dict[type[Any], str]] = {row.kind: row.name for row in _ROWS}
"""The name of each kind of event."""


# bytes


class EventBatch:
    """Collects the heads of events that follow each other, and beside them their values and errors."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.values: list[Any] = []
        self.errors: list[DfmError] = []
        """The errors of the failures, each once."""
        self._positions: dict[int, int] = {}

    def add(self, event: Event, point: int = -1, at: int = -1) -> None:
        """Add an event; ``point``: the yield that it is about, ``at``: of a result, the location."""
        if type(event) is Result:
            self.values.append(event.value)
            self.heads.append(Head(kind="result", frame=event.frame, point=point, at=at))
            return
        row = _BY_TYPE[type(event)]
        fields = {slot: getattr(event, field) for field, slot in row.fields.items()}
        error = self._position(event.error) if isinstance(event, Failure) else -1
        if isinstance(event, EventSent):
            fields["text"] = write_json(event.value)
        self.heads.append(Head(kind=row.name, point=point, error=error, **fields))

    def _position(self, error: DfmError) -> int:
        position = self._positions.setdefault(id(error), len(self.errors))
        if position == len(self.errors):
            self.errors.append(error)
        return position


def events_of(
    plan: Plan, first: int, heads: Iterable[Head], errors: Sequence[DfmError], values: Iterable[Any] = ()
) -> list[Event]:
    """Rebuild events from an offset on. A value that cannot be rebuilt becomes a failure.

    Raises:
        ValueError: the heads do not fit the plan, or their values and errors.
    """
    following = iter(values)
    found: list[Event] = []
    try:
        for offset, head in enumerate(heads, first):
            row = _BY_NAME[head.kind]
            if row.kind is Result:
                place, node = plan.points[_index(head.point)]
                site = plan.sites_at[_index(head.at)]
                value = next(following)
                make = _undecoded if type(value) is Broken else Result
                found.append(make(offset, place, value, head.frame, site, node))
                continue
            fields = {field: getattr(head, slot) for field, slot in row.fields.items()}
            if row.kind is Failure:
                found.append(Failure(offset=offset, error=errors[_index(head.error)], **fields))
            elif row.kind is EventSent:
                found.append(EventSent(offset=offset, value=read_json(head.text or ""), **fields))
            else:
                given = {field: value for field, value in fields.items() if value is not None}
                found.append(msgspec.convert({"offset": offset, **given}, row.kind))
    except (LookupError, StopIteration, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"event {first + len(found)} does not fit: {error!r}") from error
    return found


def _index(number: int) -> int:
    if number < 0:
        raise IndexError(number)
    return number


Run: TypeAlias = tuple[int, Frame, int, int]
"""Values that follow each other: the yield, its frame, the first element's number or -1, and the number of values."""


def result_events(plan: Plan, at: int, runs: Sequence[Run], values: Sequence[Any], offset: int) -> list[Event]:
    """Make events of yielded values. A value that could not be rebuilt becomes a failure."""
    site, points = plan.sites_at[at], plan.points
    events: list[Event] = []
    position = 0
    for point, frame, start, count in runs:
        place, node = points[point]
        for index in range(count):
            full = frame if start < 0 else (*frame, start + index)
            value = values[position]
            if type(value) is Broken:
                events.append(_undecoded(offset + position, place, value, full, site, node))
            else:
                events.append(Result(offset + position, place, value, full, site, node))
            position += 1
    return events


def _undecoded(offset: int, place: str, value: Broken, frame: Frame, site: str, node: str) -> Failure:
    broken = DecodingError(node, str(value.error))
    broken.__cause__ = value.error
    return Failure(offset, place, broken, frame, site, node)


# errors: the name of a class of ours, and its arguments

_codec = Codec.for_store()
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[str, list[Any]]).decode
_PLAIN: Final = frozenset({type(None), bool, int, float, str})


def pack_error(error: DfmError) -> Any:
    """Take a snapshot of an error for a store; of one whose data cannot be stored, of its message."""
    try:
        return _codec.pack([type(error).__name__, list(error.args)])
    except EncodingError:
        return _codec.pack(["DfmError", [str(error)]])


def unpack_error(found: Any) -> DfmError:
    """Rebuild an error of ours from untrusted data; anything else becomes text."""
    name, args = found
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(kind, DfmError):
        try:
            error = kind(*args)
            str(error)  # its message must be printable
        except Exception:  # noqa: BLE001 - its arguments are untrusted, and can be anything
            return DfmError(f"{name}: {args}")
        return error
    return DfmError(f"{name}: {args}")


def encode_error(error: DfmError) -> bytes:
    """Encode an error for another organisation: its data if these are plain values, else its message."""
    try:
        return _encode((type(error).__name__, _plain(error.args)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _encode(("DfmError", [str(error).encode(errors="backslashreplace").decode()]))


def decode_error(data: bytes) -> DfmError:
    """Rebuild an error that another organisation has encoded; one that cannot be rebuilt becomes text."""
    try:
        name, args = _decode(data)
        return unpack_error((name, _plain(args)))
    except (ValueError, TypeError, RecursionError) as error:
        return DfmError(f"an error was reported that cannot be read: {error}")


def _plain(value: Any) -> Any:
    """Return texts, numbers, and tuples of them.

    Raises:
        TypeError: it is something else.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))
    raise TypeError(f"errors cannot hold a value of type {type(value).__name__}")


# plain data, for JSON


def error_data(error: DfmError, *, tracebacks: bool = False) -> dict[str, Any]:
    """Return an error as plain data. Tracebacks show code and paths: not every client may see them."""
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
    """Return an event as plain data."""
    data: dict[str, Any] = {"event": EVENT_NAMES[type(event)]}
    data.update({name: getattr(event, name) for name in event.__struct_fields__})
    if isinstance(event, Result):
        data["value"] = msgspec.Raw(values.encode(event.value))
    elif isinstance(event, Failure):
        # The failure itself has the traceback: yields that depend on it do not repeat it.
        data["error"] = error_data(event.error, tracebacks=tracebacks and event.place is None)
    return data


def event_from_data(name: Any, data: Any) -> Event | Activity | None:
    """Return the event that plain data of an untrusted service describes; None if the name is unknown.

    Raises:
        msgspec.ValidationError, KeyError, TypeError: the data does not describe such an event.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an event must be a string, not {name!r}")
    kind = Activity if name == "activity" else _BY_NAME[name].kind if name in _BY_NAME else None
    if kind is not Failure:
        found: Event | Activity | None = None if kind is None else msgspec.convert(data, kind)
        return found
    error, frame = data["error"], tuple(data["frame"])
    cause: DfmError
    if "operation" in error:
        cause = OperationFailed(
            site=data["site"],
            operation=error["operation"],
            node=data["node"],
            frame=frame,
            attempt=error["attempt"],
            type_name=error["type"],
            message=error["message"],
            remote_traceback=error.get("traceback") or "",
        )
    else:
        cause = DfmError(f"{error['type']}: {error['message']}")
    return Failure(data["offset"], data["place"], cause, frame, data["site"], data["node"])
