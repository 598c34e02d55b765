"""How much a job's log may hold."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ResultLimits"]


class ResultLimits(BaseModel):
    """How much a job's log may hold, and what happens when it is full.

    The oldest events that every attached reader has seen make room for new ones. When there are none, ``block``
    makes the producing sites wait, and ``fail`` ends the job with an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_items: Annotated[int, Field(gt=0)] = 100_000
    """How many events the log keeps."""
    max_bytes: Annotated[int, Field(gt=0)] = 256 * 1024 * 1024
    """How many bytes of encoded values the log keeps."""
    window: Annotated[int, Field(gt=0)] = 256
    """How many results a site may send ahead of the log's consent."""
    window_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    """The same in bytes; a single larger value still passes."""
    overflow: Literal["block", "fail"] = "block"
    """What happens when the log is full."""
