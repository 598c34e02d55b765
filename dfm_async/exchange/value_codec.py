"""Values to bytes and back. Large parts are beside the message, so that they can be pulled in chunks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dfm_async.errors import EncodingError
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import Payload


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as bytes.

    Attributes:
        data: the value without its large parts.
        parts: the large parts, by number. They are not copies: the value must not be changed meanwhile.
    """

    data: bytes
    parts: Mapping[int, memoryview] = field(default_factory=dict)


class ValueCodec(Protocol):
    """How the data of tasks and results become bytes."""

    def encode(self, value: Any) -> Encoded:
        """Turn a value into bytes; raises if it cannot travel."""
        ...

    def decode(self, encoded: Encoded) -> Any:
        """Decode a value; raises if it cannot."""
        ...

    def encode_metrics(self, record: Mapping[str, Any]) -> bytes:
        """Turn metrics into bytes; raises if they cannot travel."""
        ...

    def decode_metrics(self, data: bytes) -> Mapping[str, Any]:
        """Decode metrics; raises if it cannot."""
        ...


class PlainCodec:
    """Plain values, dates, dataclasses, pydantic models and numpy arrays. Nothing is ever pickled.

    Arrays can be written to where they arrive: they are not shared.
    """

    def encode(self, value: Any) -> Encoded:
        """Turn a value into bytes.

        Raises:
            EncodingError: a part of it cannot travel; names its type and the path to it.
        """
        payload = _encoder.payload(_encoder.pack(value))
        if isinstance(payload, Payload):
            return Encoded(payload.data, {block.offset: block.buffer for block in payload.blocks})
        return Encoded(payload)

    def decode(self, encoded: Encoded) -> Any:
        """Decode a value.

        Raises:
            EncodingError: the bytes are not a value, or a part of it is of a class that is not loaded here.
        """
        parts = [_Part(number, buffer) for number, buffer in encoded.parts.items()]
        return _decoders.codec.loads(Payload(encoded.data, parts) if parts else encoded.data)

    def encode_metrics(self, record: Mapping[str, Any]) -> bytes:
        """Turn metrics into bytes.

        Raises:
            EncodingError: a part of them cannot travel.
            ValueError: they contain large arrays.
        """
        encoded = self.encode(dict(record))
        if encoded.parts:
            raise ValueError("metrics cannot have large arrays: submit these as a result")
        return encoded.data

    def decode_metrics(self, data: bytes) -> Mapping[str, Any]:
        """Decode metrics.

        Raises:
            EncodingError: the bytes are not metrics.
        """
        found = self.decode(Encoded(data))
        if not isinstance(found, dict):
            raise EncodingError(type(found).__name__, "metrics", "they must be names and numbers")
        return found


class _Part:
    """A large part of a value that is being encoded or decoded."""

    __slots__ = ("buffer", "offset")

    def __init__(self, offset: int, buffer: memoryview) -> None:
        self.offset = offset
        self.buffer = buffer

    @property
    def size(self) -> int:
        return len(self.buffer)

    def view(self) -> memoryview:
        return self.buffer


class _LargeParts:
    """Takes the large parts of values, as they are."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def allocate(self, size: int) -> _Part | None:
        return _Part(next(self._numbers), memoryview(bytearray(size)))

    def adopt(self, data: memoryview) -> _Part | None:
        return _Part(next(self._numbers), data.cast("B") if data.format != "B" else data)


_encoder = Codec.for_programs(_LargeParts())


class _Decoders(threading.local):
    """One per thread: a codec knows the parts of the value that it is rebuilding."""

    def __init__(self) -> None:
        self.codec = Codec.for_programs()


_decoders = _Decoders()
