"""Large messages in parts: each travels in a packet of bounded size, and the receiver joins them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Annotated, Final, TypeVar

import msgspec

_MOST: Final = 4096
"""The largest number of parts of a packet: small ones take much more memory than their bytes."""

T = TypeVar("T", bound=Sized)


class TooLarge(ValueError):
    """A message is larger than the receiver accepts."""


class MessagePart(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """A message, or a part of one; ``more``: the next part belongs to the same message."""

    data: memoryview
    more: bool = False

    def __len__(self) -> int:
        return len(self.data)


Parts = Annotated[list[MessagePart], msgspec.Meta(max_length=_MOST)]
"""The parts in one packet."""


def split(message: bytes, most: int) -> Iterator[MessagePart]:
    """Cut a message into parts of ``most`` bytes and a last one of at most as many, without copying it."""
    data, end = memoryview(message), max(len(message), 1)
    for start in range(0, end, most):
        yield MessagePart(data[start : start + most], start + most < end)


class Reassembler:
    """Joins the parts of messages, which come in order.

    Args:
        largest: the size limit of a message, in bytes; None means any size.
        most: the size of parts: what the sender gives to :func:`split`.
    """

    def __init__(self, largest: int | None, most: int) -> None:
        self._largest = largest
        self._most = most
        self._joined = bytearray()
        """A copy of the parts so far: a view would keep the whole packet in memory."""

    def take(self, part: MessagePart) -> bytes | memoryview | None:
        """Take the next part; return the message if it is complete.

        Raises:
            TooLarge: the message exceeds the limit; its parts so far are dropped.
            ValueError: the part does not have the size of parts; those so far are dropped.
        """
        size = len(part)
        if self._largest is not None and len(self._joined) + size > self._largest:
            self._joined = bytearray()
            raise TooLarge(f"a message has more than {self._largest:,} bytes (max_message_bytes)")
        if size > self._most or (part.more and size < self._most):
            self._joined = bytearray()
            raise ValueError(f"a part of a message has {size:,} bytes instead of {self._most:,}")
        if not part.more and not self._joined:
            return part.data
        self._joined += part.data
        if part.more:
            return None
        message, self._joined = bytes(self._joined), bytearray()
        return message


def batches(parts: Iterable[T], most: int) -> Iterator[list[T]]:
    """Group parts, or whole messages, up to ``most`` bytes and the number of parts that a packet may have.

    A larger one is a group of its own.
    """
    group: list[T] = []
    size = 0
    for part in parts:
        if group and (size + len(part) > most or len(group) == _MOST):
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part)
    if group:
        yield group
