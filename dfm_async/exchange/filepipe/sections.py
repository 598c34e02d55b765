"""The outer form of a message: a body, and behind it the large values that the body refers to.

Every section begins with a marker, since NVFLARE 2.7 a kind, and a size; those of large values go on with an id.
"""

from __future__ import annotations

import enum
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from dfm_async.errors import FobsError

__all__ = ["Buffer", "Datum", "Dialect", "join_old_section", "join_sections", "split_sections"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_BODY: Final = 100
_TEXT: Final = 101
_BYTES: Final = 102
_FILE: Final = 103
_ID_SIZE: Final = 16


class Dialect(enum.Enum):
    """Which versions of NVFLARE a message is for. All are read; what is written must fit the peer.

    Attributes:
        V2_5: for 2.5.
        V2_6: for 2.6. Most messages are the same as for 2.5.
        V2_7: for 2.7 and 2.8.
    """

    V2_5 = "2.5"
    V2_6 = "2.6"
    V2_7 = "2.7"


_HEADER: Final = struct.Struct(">BBQ")
_OLD_HEADER: Final = struct.Struct(">BQ")


@dataclass(frozen=True, slots=True)
class Datum:
    """A large value that has a section of its own.

    Attributes:
        id: what the body calls it.
        is_text: whether it is text, in UTF-8, or bytes.
        pieces: its content.
    """

    id: uuid.UUID
    is_text: bool
    pieces: Sequence[Buffer]


def join_sections(body: bytes, datums: Sequence[Datum]) -> list[Buffer]:
    """Puts a message for NVFLARE 2.7 and later together."""
    buffers: list[Buffer] = [_HEADER.pack(_BODY, 0, len(body)), body]
    for datum in datums:
        size = _ID_SIZE + sum(len(piece) for piece in datum.pieces)
        buffers.append(_HEADER.pack(_TEXT if datum.is_text else _BYTES, 0, size) + datum.id.bytes)
        buffers += datum.pieces
    return buffers


def join_old_section(body: bytes) -> list[Buffer]:
    """Puts a message for NVFLARE 2.5 and 2.6 together. They do not agree on how a body refers to large values."""
    return [_OLD_HEADER.pack(_BODY, len(body)), body]


def split_sections(message: memoryview) -> tuple[Dialect, memoryview, list[Datum]]:
    """Takes a message of any version apart. Nothing is copied. Of 2.5 and 2.6, which look the same, it names 2.6.

    Raises:
        FobsError: it is cut off, has something behind its end, or a section that only NVFLARE can read.
    """
    try:
        return Dialect.V2_7, *_split(message, _HEADER)
    except _Misfit as misfit:
        try:
            return Dialect.V2_6, *_split(message, _OLD_HEADER)
        except _Misfit:
            raise FobsError(str(misfit)) from None


class _Misfit(Exception):
    """The sections do not fill the message in this dialect."""


def _split(message: memoryview, header: struct.Struct) -> tuple[memoryview, list[Datum]]:
    body: memoryview | None = None
    found: list[tuple[int, int, memoryview]] = []
    position = 0
    while body is None or position < len(message):
        if len(message) - position < header.size:
            raise _Misfit("it is cut off in the header of a section")
        marker, *kind, size = header.unpack_from(message, position)
        position += header.size
        content = message[position : position + size]
        position += size
        if len(content) < size:
            raise _Misfit("it is cut off in a section")
        if body is None:
            if marker != _BODY or any(kind):
                raise _Misfit("it does not begin with a body")
            body = content
        elif marker not in (_TEXT, _BYTES, _FILE) or size < _ID_SIZE:
            raise _Misfit("it has a section that is none")
        else:
            found.append((marker, kind[0] if kind else 0, content))
    return body, [_datum(*section) for section in found]


def _datum(marker: int, kind: int, content: memoryview) -> Datum:
    if marker == _FILE:
        raise FobsError("it contains a file")
    if kind:
        raise FobsError(f"it refers to something of kind {kind} that must be fetched over NVFLARE's network")
    return Datum(uuid.UUID(bytes=bytes(content[:_ID_SIZE])), marker == _TEXT, [content[_ID_SIZE:]])
