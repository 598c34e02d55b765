"""Messages in a stream of bytes: each has its size before it, in eight bytes, little-endian. Does no I/O."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

HEAD: Final = struct.Struct("<Q")
"""What precedes each message: its size in bytes."""


class FrameTooLarge(ValueError):
    """A peer announces a message that is larger than the limit."""


class Unframer:
    """Find the messages in the parts of a stream.

    Args:
        largest: the largest size of a message, in bytes.
    """

    __slots__ = ("_rest", "largest")

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._rest = bytearray()

    def feed(self, data: bytes | bytearray | memoryview, take: Callable[[memoryview], object]) -> None:
        """Add a part of the stream, and pass on each message that is complete.

        Args:
            data: the next bytes.
            take: is called for each message. Its argument is valid during the call only. What it raises is raised
                here; the stream cannot be continued then.

        Raises:
            FrameTooLarge: a size exceeds the limit; the stream cannot be continued.
        """
        rest = self._rest
        if rest:
            rest += data
            data = rest
        position, end = 0, len(data)
        view = memoryview(data)
        try:
            while end - position >= 8:
                (size,) = HEAD.unpack_from(view, position)
                if size > self.largest:
                    raise FrameTooLarge(f"a message of {size} bytes exceeds the limit of {self.largest} bytes")
                begin = position + 8
                if end - begin < size:
                    break
                position = begin + size
                with view[begin:position] as message:
                    take(message)
            if data is not rest and position < end:
                rest += view[position:]
        finally:
            view.release()
        if data is rest:
            del rest[:position]
