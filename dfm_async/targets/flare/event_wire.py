"""The events of a job on their way to an application."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dfm_async.errors import DecodingError, DfmError
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
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.error_values import decode_error, encode_error
from dfm_async.targets.flare.messages import EventHead, Events
from dfm_async.wire.codec import Broken, Codec

__all__ = ["EventReader", "EventWriter"]

_encode: Final = msgspec.msgpack.Encoder().encode
_REMEMBERED: Final = 1000


class EventWriter:
    """Puts the events of one job into messages. Their results are sealed values."""

    def __init__(self, job_id: str, plan: Plan) -> None:
        self._job_id = job_id
        self._points = {point: index for index, point in enumerate(plan.points)}
        self._sites = {site: at for at, site in enumerate(plan.sites_at)}
        self._numbers = _Errors()

    def write(self, events: Sequence[Event], end: int) -> Events:
        """Makes a message of events that follow each other; ``end``: the offset behind the newest that there is."""
        heads: list[EventHead] = []
        values: list[Any] = []
        errors: list[tuple[int, bytes]] = []
        for event in events:
            if type(event) is Result:
                values.append(event.value)
                point = self._points[event.place, event.node]
                heads.append(EventHead("r", event.frame, point, self._sites[event.site]))
            else:
                if isinstance(event, Failure):
                    errors.append((self._numbers.number(event.error), encode_error(event.error)))
                heads.append(_head(event))
        packed = _encode(values) if values else b""
        size = len(packed) + sum(len(error) for _, error in errors)
        return Events(self._job_id, events[0].offset, heads, packed, errors, end, size)


class _Errors:
    """Numbers for errors: one that is told of several times stays one. Knows the last thousand."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, tuple[int, DfmError]] = OrderedDict()
        self._last = 0

    def number(self, error: DfmError) -> int:
        found = self._by_id.get(id(error))
        if found is None:
            self._last += 1
            found = self._by_id[id(error)] = (self._last, error)
            if len(self._by_id) > _REMEMBERED:
                self._by_id.popitem(last=False)
        return found[0]


def _head(event: Event) -> EventHead:
    match event:
        case Failure():
            return EventHead("f", event.frame, node=event.node, place=event.place, site=event.site)
        case FrameCompleted():
            return EventHead("d", event.frame)
        case StatusChanged():
            return EventHead("s", node=event.status.value, text=event.reason)
        case Progress():
            return EventHead(
                "p", event.frame, node=event.node, text=event.note, done=event.done, total=event.total, site=event.site
            )
        case Metrics():
            return EventHead("m", event.frame, node=event.node, values=event.values, step=event.step, site=event.site)
        case WorkerNotice():
            return EventHead("w", node=event.kind, text=event.detail, done=event.seconds, site=event.site)
        case _:
            raise TypeError(f"{type(event).__name__} is not sent as an event")


class EventReader:
    """Rebuilds the events of one job. A value that cannot be rebuilt is a failure."""

    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._points = plan.points
        self._sites = plan.sites_at
        self._codec = codec
        self._errors: OrderedDict[int, DfmError] = OrderedDict()

    def _error(self, number: int, data: bytes) -> DfmError:
        error = self._errors.get(number)
        if error is None:
            error = self._errors[number] = decode_error(data)
            if len(self._errors) > _REMEMBERED:
                self._errors.popitem(last=False)
        return error

    def read(self, message: Events, end: int) -> list[Event]:
        """Gives the events of a message; ``end``: the offset behind those that were read before.

        Raises:
            EncodingError: their values cannot be read.
            ValueError: they do not fit the plan, or some before them are missing.
        """
        if message.first > end:
            raise ValueError(f"events {end} to {message.first - 1} are missing")
        values = iter(self._codec.loads_batch(message.values) if message.values else ())
        errors = iter(message.errors)
        found: list[Event] = []
        try:
            for offset, head in enumerate(message.heads, message.first):
                if head.kind == "r":
                    place, node = self._points[head.point]
                    site, value = self._sites[head.at], next(values)
                    if type(value) is Broken:
                        broken = DecodingError(node, str(value.error))
                        broken.__cause__ = value.error
                        found.append(Failure(offset, place, broken, head.frame, site, node))
                    else:
                        found.append(Result(offset, place, value, head.frame, site, node))
                elif head.kind == "f":
                    error = self._error(*next(errors))
                    found.append(Failure(offset, head.place, error, head.frame, head.site, head.node))
                else:
                    found.append(_OTHERS[head.kind](offset, head))
        except (IndexError, StopIteration, TypeError) as error:
            raise ValueError(f"events of job {message.job_id} do not fit its plan: {error}") from error
        return found


_OTHERS: Final[dict[str, Any]] = {
    "d": lambda offset, head: FrameCompleted(offset, head.frame),
    "s": lambda offset, head: StatusChanged(offset, JobStatus(head.node), head.text),
    "p": lambda offset, head: Progress(
        offset, head.frame, head.site, head.node, head.done, head.total, head.text or ""
    ),
    "m": lambda offset, head: Metrics(offset, head.frame, head.site, head.node, head.values or {}, head.step),
    "w": lambda offset, head: WorkerNotice(offset, head.site, head.node, head.done, head.text or ""),
}
