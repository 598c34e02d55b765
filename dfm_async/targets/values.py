"""How whoever runs a job handles values: as themselves, or as bytes that it cannot read."""

from __future__ import annotations

from typing import Any, Protocol

from dfm_async.wire.memory import Payload

__all__ = ["Values"]


class Values(Protocol):
    """What running a job needs of a codec."""

    def payload(self, values: Any) -> bytes | Payload:
        """Turns packed values into the payload of a message."""
        ...

    def loads(self, data: bytes | memoryview | Payload) -> Any:
        """Rebuilds one value.

        Raises:
            EncodingError: the bytes are not a value, or it cannot be rebuilt here.
        """
        ...

    def loads_batch(self, data: bytes | memoryview | Payload) -> list[Any]:
        """Rebuilds a list of values.

        Raises:
            EncodingError: the bytes are not a list of values.
        """
        ...
