"""Errors of jobs as values that can be stored and sent: the name of a class of ours, and its arguments."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dfm_async import errors
from dfm_async.errors import DfmError, EncodingError
from dfm_async.wire.codec import Codec

__all__ = ["decode_error", "encode_error", "pack_error", "unpack_error"]

_codec = Codec(trusted=False, stored=True)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[str, list[Any]]).decode
_PLAIN: Final = frozenset({type(None), bool, int, float, str})


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
            error = kind(*args)
            str(error)  # it must be possible to tell it
        except Exception:  # noqa: BLE001 - its arguments come from outside, and can be anything
            return DfmError(f"{name}: {args}")
        return error
    return DfmError(f"{name}: {args}")


def encode_error(error: DfmError) -> bytes:
    """Encodes an error for another organisation: what it holds if these are plain values, else its words."""
    try:
        return _encode((type(error).__name__, _plain(error.args)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _encode(("DfmError", [str(error).encode(errors="backslashreplace").decode()]))


def decode_error(data: bytes) -> DfmError:
    """Rebuilds an error that another organisation has encoded; what cannot be rebuilt becomes text."""
    try:
        name, args = _decode(data)
        return unpack_error((name, _plain(args)))
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        return DfmError(f"an error was told that cannot be read: {error}")


def _plain(value: Any) -> Any:
    """Texts, numbers, and tuples of them.

    Raises:
        TypeError: it is something else.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))
    raise TypeError(f"errors cannot hold a value of type {type(value).__name__}")
