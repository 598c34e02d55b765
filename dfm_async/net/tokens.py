"""What a place can hold besides a value."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dfm_async.model.events import ErrorRecord


class _Mark:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


ABSENT: Final = _Mark("ABSENT")
"""No token yet."""

SKIPPED: Final = _Mark("SKIPPED")
"""There is no value in this frame, because a branch did not run."""

OPEN: Final = _Mark("OPEN")
"""The token of an open gate, and of a loop's ``enter`` place."""


RELEASED: Final = _Mark("RELEASED")
"""Where a stream was that has no readers left."""


class Failed(msgspec.Struct, frozen=True, eq=False):
    """Stands for a value that will not come, because of an error."""

    error: ErrorRecord


class CacheHit(msgspec.Struct, frozen=True, eq=False):
    """The answer of a cache that has the key."""

    value: Any


class CacheMiss(msgspec.Struct, frozen=True, eq=False):
    """The answer of a cache that does not have a key; ``ticket`` is returned to the cache with the value."""

    ticket: Any


class Foreign(msgspec.Struct, frozen=True, eq=False):
    """Wraps an iterator of a user that the runtime, not the game, goes through: its elements may block."""

    iterator: Any


class StreamValue:
    """Marks a value that is consumed element by element. The runtime derives its streams from it."""

    __slots__ = ()
