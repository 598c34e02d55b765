"""Spans: what ran when, where and because of what; and how they stand in a file, one JSON object per line."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeAlias

import msgspec

from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame

__all__ = [
    "APPLICATION",
    "Made",
    "Origin",
    "Span",
    "decode_made",
    "encode_made",
    "encode_spans",
    "failure_attributes",
    "frame_text",
    "iter_trace",
    "new_span_id",
    "new_trace_id",
    "read_trace",
    "span_text",
]

APPLICATION: Final = "application"
"""The process of a span that was made in the application itself, and not at a site."""

_LONGEST: Final = 1 << 26
"""How many bytes a line of a file may have."""
_STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

Made: TypeAlias = tuple[str, int, int, int, int, dict[str, Scalar], str | None]
"""A span on its way from a site: name, id, parent, start, end, attributes, and what went wrong if something did."""


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a message with values comes from; only messages of traced jobs tell it.

    Attributes:
        span: the id of the sender's span.
        sent: when it was sent, in nanoseconds since 1970.
        process: the sender's site, or ``application``.
    """

    span: int
    sent: int
    process: str


_Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A time. The bounds hold for what is read: a file may come from anywhere."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took time.

    Attributes:
        name: what it was, such as ``dfm.operation``.
        trace_id: the trace that it belongs to, 32 hexadecimal digits.
        span_id: its own id, 16 hexadecimal digits.
        parent_id: the id of the span that it is a part of, or follows from; None for the first of a trace.
        start: when it began, in nanoseconds since 1970.
        end: when it ended.
        process: the site, or ``application``.
        attributes: what else is known of it.
        status: whether it went well.
        message: what went wrong.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: _Nanoseconds
    end: _Nanoseconds
    process: str
    attributes: dict[str, Scalar] = {}
    status: Literal["ok", "error"] = "ok"
    message: str = ""


class _Ids:
    """A sequence of ids that begins anywhere. Each process has its own, also one that was forked."""

    def __init__(self) -> None:
        self.restart()
        os.register_at_fork(after_in_child=self.restart)

    def restart(self) -> None:
        # Not the random module: what a program seeds in each of its processes must not make their ids equal.
        self._base = secrets.randbits(64)
        self._count = itertools.count()

    def take(self) -> int:
        return (self._base + next(self._count) * _STEP) & _MASK or 1


new_span_id: Final = _Ids().take
"""Gives an id that nobody else gives, and that is not 0. Any thread may call it."""


def new_trace_id() -> str:
    """Makes the id of a new trace."""
    return secrets.token_hex(16)


def span_text(span: int) -> str:
    """The id of a span as it is written."""
    return f"{span:016x}"


def frame_text(frame: Frame) -> str:
    """A frame as it is written in attributes."""
    return ".".join(map(str, frame))


def failure_attributes(kind: str, message: str, traceback: str) -> dict[str, Scalar]:
    """What an error adds to the attributes of its span; names as OpenTelemetry has them."""
    return {"exception.type": kind, "exception.message": message, "exception.stacktrace": traceback}


# on their way from a site

encode_made: Final = msgspec.msgpack.Encoder().encode
"""Makes a list of spans ready to be sent."""
_made_decoder: Final = msgspec.msgpack.Decoder(list[Made])


def decode_made(spans: Sequence[Made] | bytes) -> Sequence[Made]:
    """The spans that a site has sent; those that were not encoded are given back."""
    return _made_decoder.decode(spans) if isinstance(spans, bytes) else spans


# in a file

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Span)


def encode_spans(spans: list[Span]) -> bytes:
    """Writes spans as lines."""
    return _encoder.encode_lines(spans)


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    """Reads the spans of a file, in the order that they stand there, which is none in particular.

    A line that was cut off, because its writer was killed or is about to go on, is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: this is no file of spans; names the line that is wrong.
    """
    return list(iter_trace(path))


def iter_trace(path: str | os.PathLike[str]) -> Iterator[Span]:
    """Reads the spans of a file one by one, as :func:`read_trace` does, without keeping them."""
    with Path(path).open("rb") as file:
        yield from _spans(file, os.fspath(path))


def _spans(file: BinaryIO, path: Any) -> Iterator[Span]:
    found, torn = False, 0
    for number in itertools.count(1):
        line = file.readline(_LONGEST)
        if not line:
            break
        if len(line) == _LONGEST and not line.endswith(b"\n"):
            raise ValueError(f"{path}, line {number}: longer than {_LONGEST:,} bytes; this is no file of spans")
        if not line.strip():
            continue
        try:
            span = _decoder.decode(line)
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}; this is no file of spans") from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            torn = torn or number
            continue
        found = True
        yield span
    if torn and not found:
        raise ValueError(f"{path}, line {torn}: no JSON; this is no file of spans")
