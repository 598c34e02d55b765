"""What a game asks its runtime to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net import spec
from dfm_async.net.game_state import Control, PendingActivity
from dfm_async.net.tokens import StreamValue

MANY: Final = 1 << 30
"""A number of readers that is not known beforehand."""


class Effect(msgspec.Struct, frozen=True, gc=False):
    """The base of all effects."""


class Invoke(Effect, frozen=True):
    """Call an operation; answer with ``complete`` or ``fail``."""

    activity: PendingActivity
    action: spec.Call
    args: dict[str, Any]
    values: Sequence[Any]
    """The inputs that the arguments were made of."""


class EmitValue(Effect, frozen=True):
    """Send a value, or the elements of a stream, to the application; answer with ``complete`` or ``fail``."""

    activity: PendingActivity
    point: int
    frame: Frame
    value: Any


class EmitFailed(Effect, frozen=True):
    """Notify the application that a yield will not come."""

    point: int
    frame: Frame
    error: ErrorRecord


class ReportError(Effect, frozen=True):
    """Report an error that happened here to the application. ``handled``: it is not an error of the job."""

    error: ErrorRecord
    handled: bool = False


class SendToken(Effect, frozen=True):
    """Send a token to other locations. Each reports with ``stream_released`` when it is done with a stream."""

    place: int
    frame: Frame
    value: Any
    routes: tuple[int, ...]


class SendLoopEnd(Effect, frozen=True):
    """Notify other locations of the number of elements of a loop. ``outcome``: None, SKIPPED or Failed."""

    loop: int
    frame: Frame
    total: int
    outcome: Any
    routes: tuple[int, ...]


class SendElementDone(Effect, frozen=True):
    """Notify a loop's control that this location is done with an element."""

    loop: int
    frame: Frame
    control: int


class FrameDone(Effect, frozen=True):
    """This location is done with a parameter set."""

    index: int


class Pull(Effect, frozen=True):
    """Get further elements of a loop's source; answer with ``feed`` and ``feed_end``."""

    control: Control
    count: int


class LookUp(Effect, frozen=True):
    """Query the cache; answer with ``found`` or ``missed``. ``wait``: for another that computes the key's value."""

    activity: PendingActivity
    key: Any
    wait: bool


class Keep(Effect, frozen=True):
    """Give the cache the value for a ticket; answer with ``complete`` when it is kept. Its readers do not wait."""

    activity: PendingActivity
    ticket: Any
    value: Any


class WaitForEvent(Effect, frozen=True):
    """Wait for an event, or at most some seconds; answer with ``complete`` or ``fail``."""

    activity: PendingActivity
    action: spec.Await
    seconds: float | None


class Abandon(Effect, frozen=True):
    """Give a ticket back without a value."""

    ticket: Any


class CloseStream(Effect, frozen=True):
    """Release a stream: no reader is left here. ``read``: one of them had begun to read."""

    stream: StreamValue
    read: bool


class RunStream(Effect, frozen=True):
    """Run a generator to its end without a reader; answer with ``stream_ended``. ``unread``: none will come."""

    stream: StreamValue
    unread: bool = False


class ExpectReaders(Effect, frozen=True):
    """More or fewer readers of a stream will come than were expected."""

    stream: StreamValue
    change: int


# About another location whose loss can be contained.


class StartClock(Effect, frozen=True):
    """Report :meth:`~dfm_async.net.containment.ContainingGame.late` after some seconds: a call waits for a worker."""

    location: int
    frame: Frame
    output: int
    seconds: float


class NotContained(Effect, frozen=True):
    """The job cannot go on without a location that was lost."""

    location: int


class RestoreLocation(Effect, frozen=True):
    """Let the new worker of a location begin where the lost one has ended; tokens follow.

    ``done``: the parameter sets that it has nothing to do for. ``instances``: the others, and elements of loops: frame,
    scope, outputs of the calls that are resolved, and how many elements of loops are done.
    """

    location: int
    done: list[int]
    instances: list[tuple[Frame, int, list[int], list[tuple[int, int]]]]
