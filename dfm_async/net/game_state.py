"""The state of a game: executions of scopes, loops, streams, and transitions that are not resolved yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import Frame
from dfm_async.net import spec
from dfm_async.net.compiled_net import PlaceCode, ScopeCode, TransitionCode
from dfm_async.net.tokens import ABSENT, StreamValue


class Instance:
    """One execution of a scope."""

    __slots__ = (
        "early",
        "frame",
        "loops",
        "missing",
        "over",
        "parent",
        "remaining",
        "scope",
        "settled",
        "slots",
        "waiters",
    )

    def __init__(self, scope: ScopeCode, frame: Frame, parent: Instance | None) -> None:
        self.scope = scope
        self.frame = frame
        self.parent = parent
        self.slots: list[Any] = [ABSENT] * scope.slots
        self.missing = scope.missing.copy()
        self.remaining = len(scope.transitions) + len(scope.members) + scope.awaited + (parent is None)
        self.waiters: dict[int, list[tuple[Instance, TransitionCode]]] | None = None
        self.loops: dict[int, LoopRecord] = {}
        self.early: dict[int, int] | None = None
        """For slots without a token: how many of the loops that read them are done already."""
        self.settled: dict[int, dict[int, Any]] | None = None
        """For other locations that were lost: what was decided for the outputs of their calls."""
        self.over: set[int] | None = None
        """The loops that are done, of those that such locations take part in."""


class LoopRecord(msgspec.Struct, eq=False):
    """The state of one loop inside an instance."""

    loop: spec.Loop
    owner: Instance
    gathered: list[dict[int, Any]]
    children: dict[int, Instance] = {}
    finished: int = 0
    total: int | None = None
    outcome: Any = None
    control: Control | None = None


class PendingActivity(msgspec.Struct, eq=False):
    """A transition that has fired and is not resolved yet. ``streams``: those that it reads."""

    instance: Instance
    transition: TransitionCode
    streams: Sequence[StreamValue] = ()

    @property
    def frame(self) -> Frame:
        """The frame it belongs to."""
        return self.instance.frame

    @property
    def label(self) -> str:
        """The node that it belongs to."""
        return self.transition.label


class StreamRecord(msgspec.Struct, eq=False):
    """The state of one stream: its possible readers here, and the call that made it."""

    instance: Instance
    place: PlaceCode | None
    left: int
    """The number of transitions, loops and other locations that may still read it."""
    activity: PendingActivity | None
    """The call that made it; None if it comes from another location."""
    read: bool = False
    """Whether one of its readers, here or elsewhere, has begun."""
    ended: bool = False
    """Whether its generator has ended; known only where it runs."""
    error: ErrorRecord | None = None


class Control(msgspec.Struct, eq=False):
    """Drives one loop: admits elements as far as the limit allows."""

    activity: PendingActivity
    loop: spec.Loop
    record: LoopRecord
    source: Any
    next_index: int = 0
    requested: int = 0
    in_flight: dict[int, int] = {}
    exhausted: bool = False
    last: tuple[Any, bool] | None = None
    """For a repeat: what the current iteration passes on, and whether it is the last."""
    owed: dict[int, set[int]] = {}
    """The elements that locations whose loss can be contained are not done with."""
    done_here: set[int] = set()
    """Those of the elements in flight that this location is done with, if there are such locations."""
