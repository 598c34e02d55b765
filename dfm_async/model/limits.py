"""How much a job's log may hold."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["ResultLimits"]


class ResultLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a job's log may hold, and what happens when it is full.

    The oldest events that every attached reader has seen make room for new ones. When there are none, ``block``
    makes the producing sites wait, and ``fail`` ends the job with an error. ``spill`` drops what is safe in the
    session's store, read or not: readers that come late read it from there.
    """

    max_items: int = 100_000
    """How many events the log keeps."""
    max_bytes: int = 128 * 1024 * 1024
    """How many bytes of encoded values the log keeps."""
    window: int = 256
    """How many results a site may send ahead of the log's consent."""
    window_bytes: int = 32 * 1024 * 1024
    """The same in bytes; a single larger value still passes."""
    overflow: Literal["block", "spill", "fail"] = "block"
    """What happens when the log is full."""

    def __post_init__(self) -> None:
        for name in ("max_items", "max_bytes", "window", "window_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        if self.overflow not in ("block", "spill", "fail"):
            raise ValueError(f"overflow must be 'block', 'spill' or 'fail', not {self.overflow!r}")
