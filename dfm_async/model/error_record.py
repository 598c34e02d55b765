"""An error as it travels between processes."""

from __future__ import annotations

import msgspec

from dfm_async.model.ids import Frame

__all__ = ["ErrorRecord"]


class ErrorRecord(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels. ``id`` is unique in its job; ``cause`` is the pickled exception, or empty."""

    id: str
    site: str
    operation: str
    node: str
    frame: Frame
    attempt: int
    type_name: str
    message: str
    traceback: str
    cause: bytes = b""
