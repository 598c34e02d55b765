"""Large messages in parts: each travels in a packet of bounded size, and the receiver joins them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

import msgspec

__all__ = ["Joiner", "Part", "TooLarge", "cut", "together"]


T = TypeVar("T", bound=Sized)


class TooLarge(ValueError):
    """A message is larger than the receiver accepts."""


class Part(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A message, or a part of one; ``more``: the next part belongs to the same message."""

    data: memoryview
    more: bool = False

    def __len__(self) -> int:
        return len(self.data)


def cut(message: bytes, most: int) -> Iterator[Part]:
    """Cut a message into parts of at most so many bytes, without copying it."""
    data, end = memoryview(message), max(len(message), 1)
    for start in range(0, end, most):
        yield Part(data[start : start + most], start + most < end)


class Joiner:
    """Joins the parts of messages, which come in order.

    Args:
        largest: the size limit of a message, in bytes; None means any size.
    """

    def __init__(self, largest: int | None) -> None:
        self._largest = largest
        self._parts: list[memoryview] = []
        self._size = 0

    def take(self, part: Part) -> bytes | memoryview | None:
        """Take the next part; return the message if it is complete.

        Raises:
            TooLarge: the message exceeds the limit; its parts so far are dropped.
        """
        size = self._size + len(part.data)
        if self._largest is not None and size > self._largest:
            self._parts, self._size = [], 0
            raise TooLarge(f"a message has more than {self._largest:,} bytes (max_message_bytes)")
        if not part.more and not self._parts:
            return part.data
        self._parts.append(part.data)
        self._size = size
        if part.more:
            return None
        parts, self._parts, self._size = self._parts, [], 0
        return b"".join(parts)


def together(parts: Iterable[T], most: int) -> Iterator[list[T]]:
    """Group parts, or whole messages, up to so many bytes; a larger one is a group of its own."""
    group: list[T] = []
    size = 0
    for part in parts:
        if group and size + len(part) > most:
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part)
    if group:
        yield group
