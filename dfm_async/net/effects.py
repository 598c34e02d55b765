"""What a game asks its runtime to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net import spec
from dfm_async.net.tokens import StreamValue

if TYPE_CHECKING:
    from dfm_async.net.game import Activity, Control

__all__ = [
    "MANY",
    "Abandon",
    "CloseStream",
    "Effect",
    "EmitFailed",
    "EmitValue",
    "ExpectReaders",
    "FrameDone",
    "Invoke",
    "Keep",
    "LookUp",
    "Pull",
    "Report",
    "RunStream",
    "Send",
    "SendElementDone",
    "SendLoopEnd",
]

MANY: Final = 1 << 30
"""A number of readers that is not known beforehand."""


class _Effect(msgspec.Struct, frozen=True, gc=False):
    pass


class Invoke(_Effect, frozen=True):
    """Call an operation; answer with ``complete`` or ``fail``."""

    activity: Activity
    action: spec.Call
    args: dict[str, Any]
    streams: bool
    """Whether there are streams among the arguments."""


class EmitValue(_Effect, frozen=True):
    """Send a value, or the elements of a stream, to the application; answer with ``complete`` or ``fail``."""

    activity: Activity
    point: int
    frame: Frame
    value: Any


class EmitFailed(_Effect, frozen=True):
    """Tell the application that a yield will not come."""

    point: int
    frame: Frame
    error: ErrorRecord


class Report(_Effect, frozen=True):
    """Tell the application of an error that happened here."""

    error: ErrorRecord


class Send(_Effect, frozen=True):
    """Send a token to other locations. Each tells with ``stream_released`` when it is done with a stream."""

    place: int
    frame: Frame
    value: Any
    routes: tuple[int, ...]


class SendLoopEnd(_Effect, frozen=True):
    """Tell other locations how many elements a loop had. ``outcome``: None, SKIPPED or Failed."""

    loop: int
    frame: Frame
    total: int
    outcome: Any
    routes: tuple[int, ...]


class SendElementDone(_Effect, frozen=True):
    """Tell a loop's control that this location is done with an element."""

    loop: int
    frame: Frame
    control: int


class FrameDone(_Effect, frozen=True):
    """This location is done with a parameter set."""

    index: int


class Pull(_Effect, frozen=True):
    """Get further elements of a loop's source; answer with ``feed`` and ``feed_end``."""

    control: Control
    count: int


class LookUp(_Effect, frozen=True):
    """Ask the cache; answer with ``found`` or ``missed``. ``wait``: for another that computes the key's value."""

    activity: Activity
    key: Any
    wait: bool


class Keep(_Effect, frozen=True):
    """Give the cache the value for a ticket; answer with ``complete`` when it is kept. Its readers do not wait."""

    activity: Activity
    ticket: Any
    value: Any


class Abandon(_Effect, frozen=True):
    """Give a ticket back without a value."""

    ticket: Any


class CloseStream(_Effect, frozen=True):
    """Release a stream: no reader is left here. ``read``: one of them had begun to read."""

    stream: StreamValue
    read: bool


class RunStream(_Effect, frozen=True):
    """Run a generator to its end without a reader; answer with ``stream_ended``. ``unread``: none will come."""

    stream: StreamValue
    unread: bool = False


class ExpectReaders(_Effect, frozen=True):
    """More or fewer readers of a stream will come than were expected."""

    stream: StreamValue
    change: int


Effect: TypeAlias = (
    Invoke
    | EmitValue
    | EmitFailed
    | Report
    | Send
    | SendLoopEnd
    | SendElementDone
    | FrameDone
    | Pull
    | LookUp
    | Keep
    | Abandon
    | CloseStream
    | RunStream
    | ExpectReaders
)
