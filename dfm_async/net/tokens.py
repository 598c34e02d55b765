"""What a place can hold besides a value."""

from __future__ import annotations

from typing import Any, Final

from dfm_async.model.error_record import ErrorRecord

__all__ = ["ABSENT", "OPEN", "RELEASED", "SKIPPED", "Failed", "Foreign", "Found", "Miss", "StreamValue"]


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


class Failed:
    """Stands for a value that will not come, because of an error."""

    __slots__ = ("error",)

    def __init__(self, error: ErrorRecord) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"Failed({self.error.id})"


class Found:
    """The answer of a cache that has the key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Miss:
    """The answer of a cache that has not; ``ticket`` is what the cache wants back with the value."""

    __slots__ = ("ticket",)

    def __init__(self, ticket: Any) -> None:
        self.ticket = ticket


class StreamValue:
    """Marks a value that is consumed element by element. The runtime derives its streams from it."""

    __slots__ = ()


class Foreign:
    """Wraps an iterator of a user that the runtime, not the game, goes through: its elements may block."""

    __slots__ = ("iterator",)

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
