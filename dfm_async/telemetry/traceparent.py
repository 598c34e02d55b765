"""The ``traceparent`` header of W3C Trace Context: which trace a request belongs to."""

from __future__ import annotations

import re
from typing import Final

from dfm_async.telemetry.current import Position

__all__ = ["read_traceparent"]

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_LONGEST: Final = 512


def read_traceparent(text: str | None) -> Position | None:
    """Reads the header; None if there is none, or it is not right. Comes from outside: only its ids are taken."""
    if text is None or len(text) > _LONGEST:
        return None
    found = _HEADER.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, parent, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):  # later versions may tell more
        return None
    if not int(trace_id, 16) or not int(parent, 16):
        return None
    return Position(trace_id, int(parent, 16))
