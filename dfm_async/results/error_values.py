"""Errors of jobs as values that can be stored and sent: the name of a class of ours, and its arguments."""

from __future__ import annotations

from typing import Any

from dfm_async import errors
from dfm_async.errors import DfmError, EncodingError
from dfm_async.wire.codec import Codec

__all__ = ["pack_error", "unpack_error"]

_codec = Codec(trusted=False, stored=True)


def pack_error(error: DfmError) -> Any:
    """Makes an error ready to be encoded."""
    try:
        return _codec.pack([type(error).__name__, list(error.args)])
    except EncodingError:  # its data cannot be stored: its words can
        return _codec.pack(["DfmError", [str(error)]])


def unpack_error(found: Any) -> DfmError:
    """Rebuilds an error of ours; whatever else comes from outside becomes text."""
    name, args = found
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(kind, DfmError):
        try:
            return kind(*args)
        except TypeError:
            return DfmError(f"{name}: {args}")
    return DfmError(f"{name}: {args}")
