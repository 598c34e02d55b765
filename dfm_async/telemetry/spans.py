"""Spans: what ran when, where and because of what; and files of them, with one JSON object per line."""

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

APPLICATION: Final = "application"
"""The process of a span that was made in the application itself, and not at a site."""

_LONGEST: Final = 1 << 26
"""The most bytes that a line of a file may have."""
_STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

Made: TypeAlias = tuple[str, int, int, int, int, dict[str, Scalar], str | None]
"""A span in transit from a site: name, id, parent, start, end, attributes, and the error if there was one."""


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The origin of a message with values; only messages of traced jobs have one.

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
    """Work that took time.

    Attributes:
        name: the kind of work, such as ``dfm.operation``.
        trace_id: the trace that it belongs to, 32 hexadecimal digits.
        span_id: its own id, 16 hexadecimal digits.
        parent_id: the id of the span that it is a part of, or follows from; None for the first of a trace.
        start: when it began, in nanoseconds since 1970.
        end: when it ended.
        process: the site, or ``application``.
        attributes: further attributes.
        status: whether it succeeded.
        message: the error.
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
    """A sequence of ids with a random start. Each process has its own, also after a fork."""

    def __init__(self) -> None:
        self.restart()
        os.register_at_fork(after_in_child=self.restart)

    def restart(self) -> None:
        # Not the random module: a program that seeds it in each of its processes must not make their ids equal.
        self._base = secrets.randbits(64)
        self._count = itertools.count()

    def take(self) -> int:
        return (self._base + next(self._count) * _STEP) & _MASK or 1


new_span_id: Final = _Ids().take
"""Return a unique id, which is not 0. Any thread may call it."""


def new_trace_id() -> str:
    """Make the id of a new trace."""
    return secrets.token_hex(16)


def span_text(span: int) -> str:
    """Return the id of a span as it is written."""
    return f"{span:016x}"


def frame_text(frame: Frame) -> str:
    """Return a frame as it is written in attributes."""
    return ".".join(map(str, frame))


def failure_attributes(kind: str, message: str, traceback: str) -> dict[str, Scalar]:
    """Return what an error adds to the attributes of its span; names as OpenTelemetry has them."""
    return {"exception.type": kind, "exception.message": message, "exception.stacktrace": traceback}


def hop_attributes(origin: Origin, to: str, tokens: int, size: int) -> dict[str, Scalar]:
    """Return the attributes of the span of values on their way from one process to another."""
    return {"dfm.from": origin.process, "dfm.to": to, "dfm.tokens": tokens, "dfm.bytes": size}


# in transit from a site

encode_made: Final = msgspec.msgpack.Encoder().encode
"""Encode a list of spans, to be sent."""
_made_decoder: Final = msgspec.msgpack.Decoder(list[Made])


def decode_made(spans: Sequence[Made] | bytes) -> Sequence[Made]:
    """Return the spans that a site has sent; those that were not encoded are returned as they are."""
    return _made_decoder.decode(spans) if isinstance(spans, bytes) else spans


# in a file

encode_spans: Final = msgspec.json.Encoder().encode_lines
"""Write a list of spans as lines."""
_decoder: Final = msgspec.json.Decoder(Span)


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    """Return the spans of a file, in the order of the file, which is arbitrary.

    An incomplete line, whose writer was killed or is still writing, is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of spans; names the invalid line.
    """
    return list(iter_trace(path))


def iter_trace(path: str | os.PathLike[str]) -> Iterator[Span]:
    """Read the spans of a file one by one, as :func:`read_trace` does, without keeping them."""
    with Path(path).open("rb") as file:
        yield from _spans(file, os.fspath(path))


def _spans(file: BinaryIO, path: Any) -> Iterator[Span]:
    found, torn = False, 0
    for number in itertools.count(1):
        line = file.readline(_LONGEST)
        if not line:
            break
        if len(line) == _LONGEST and not line.endswith(b"\n"):
            raise ValueError(f"{path}, line {number}: longer than {_LONGEST:,} bytes; not a file of spans")
        if not line.strip():
            continue
        try:
            span = _decoder.decode(line)
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}; not a file of spans") from error
        except ValueError:
            torn = torn or number
            continue
        found = True
        yield span
    if torn and not found:
        raise ValueError(f"{path}, line {torn}: not JSON; not a file of spans")
