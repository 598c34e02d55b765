"""Values that are carried and not read: the hub has neither the code nor the right to look into them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dfm_async.errors import EncodingError
from dfm_async.wire.memory import Payload

__all__ = ["SealedValues", "rows_of"]

_encode: Final = msgspec.msgpack.Encoder().encode
_batch: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_rows: Final = msgspec.msgpack.Decoder(list[dict[str, msgspec.Raw]])


class SealedValues:
    """Takes batches apart and puts them together, without a look at what is in them."""

    def payload(self, values: Any) -> bytes | Payload:
        """Turns sealed values into the payload of a message."""
        return _encode(values)

    def loads(self, data: bytes | memoryview | Payload) -> Any:
        """Gives a value as it is."""
        if isinstance(data, Payload):
            raise EncodingError("value", "value", "it is in memory of another machine")
        return msgspec.Raw(data)

    def loads_batch(self, data: bytes | memoryview | Payload) -> list[Any]:
        """Takes a list of values apart.

        Raises:
            EncodingError: it is none.
        """
        if isinstance(data, Payload):
            raise EncodingError("value", "value", "it is in memory of another machine")
        try:
            return _batch.decode(data)
        except msgspec.DecodeError as error:
            raise EncodingError("value", "value", f"a batch was expected: {error}") from error


def rows_of(data: bytes) -> list[dict[str, msgspec.Raw]]:
    """Parameter sets, each a dict of sealed values.

    Raises:
        ValueError: it is no list of them.
    """
    return _rows.decode(data) if data else []
