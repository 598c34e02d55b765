"""The events of a job in messages of FLARE. The values of results are opaque: the hub forwards them as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dfm_async.base.containers import BoundedDict
from dfm_async.errors import DfmError, EncodingError
from dfm_async.model.events import Event, Result
from dfm_async.planning.plan import Plan
from dfm_async.results.event_codec import EventBatch, decode_error, encode_error, events_of
from dfm_async.targets.flare.protocol import Events
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import Payload

_encode: Final = msgspec.msgpack.Encoder().encode
_KEPT: Final = 1000
"""The number of errors that each side recognizes: an error of several messages stays one."""


class EventPacker:
    """Puts the events of one job into messages."""

    def __init__(self, job_id: str, plan: Plan) -> None:
        self._job_id = job_id
        self._points = {point: index for index, point in enumerate(plan.points)}
        self._sites = {site: at for at, site in enumerate(plan.sites_at)}
        self._numbers: BoundedDict[int, tuple[int, DfmError]] = BoundedDict(_KEPT)
        self._last = 0

    def write(self, events: Sequence[Event], end: int) -> Events:
        """Make a message of events that follow each other; ``end``: the offset after the newest event of the log."""
        batch = EventBatch()
        for event in events:
            if type(event) is Result:
                batch.add(event, self._points[event.place, event.node], self._sites[event.site])
            else:
                batch.add(event)
        values = _encode(batch.values) if batch.values else b""
        errors = [(self._number(error), encode_error(error)) for error in batch.errors]
        size = len(values) + sum(len(data) for _, data in errors)
        return Events(
            job_id=self._job_id,
            first=events[0].offset,
            heads=batch.heads,
            values=values,
            errors=errors,
            end=end,
            size=size,
        )

    def _number(self, error: DfmError) -> int:
        found = self._numbers.get(id(error))
        if found is None:
            self._last += 1
            found = self._numbers[id(error)] = (self._last, error)
        return found[0]


class EventReader:
    """Rebuilds the events of one job. A value that cannot be rebuilt becomes a failure."""

    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._plan = plan
        self._codec = codec
        self._errors: BoundedDict[int, DfmError] = BoundedDict(_KEPT)

    def read(self, message: Events, end: int) -> list[Event]:
        """Return the events of a message; ``end``: the offset after those that were read before.

        Raises:
            EncodingError: their values cannot be read.
            ValueError: they do not fit the plan, or some before them are missing.
        """
        if message.first > end:
            raise ValueError(f"events {end} to {message.first - 1} are missing")
        values = self._codec.loads_batch(message.values) if message.values else ()
        errors = [self._error(number, data) for number, data in message.errors]
        return events_of(self._plan, message.first, message.heads, errors, values)

    def _error(self, number: int, data: bytes) -> DfmError:
        error = self._errors.get(number)
        if error is None:
            error = self._errors[number] = decode_error(data)
        return error


# opaque values

_batch: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_rows: Final = msgspec.msgpack.Decoder(list[dict[str, msgspec.Raw]])


class OpaqueValues:
    """Splits and joins batches of values without decoding them."""

    def payload(self, values: Any) -> bytes | Payload:
        """Turn opaque values into the payload of a message."""
        return _encode(values)

    def loads(self, data: bytes | memoryview | Payload) -> Any:
        """Return a value as it is."""
        return msgspec.Raw(_own(data))

    def loads_batch(self, data: bytes | memoryview | Payload) -> list[Any]:
        """Split a list into its values.

        Raises:
            EncodingError: it is not a list.
        """
        try:
            return _batch.decode(_own(data))
        except ValueError as error:
            raise EncodingError("value", "value", f"a batch was expected: {error}") from error


def _own(data: bytes | memoryview | Payload) -> bytes | memoryview:
    if isinstance(data, Payload):
        raise EncodingError("value", "value", "it is in memory of another machine")
    return data


def rows_of(data: bytes) -> list[dict[str, msgspec.Raw]]:
    """Return parameter sets, each a dict of opaque values.

    Raises:
        ValueError: it is not a list of them.
    """
    return _rows.decode(data) if data else []
