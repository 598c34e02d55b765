"""What a job does when something goes wrong."""

from __future__ import annotations

from typing import Literal

import msgspec

from dfm_async.targets.frames import FRAME_WINDOW

__all__ = ["JobRules"]


class JobRules(msgspec.Struct, frozen=True, gc=False):
    """What a job does when something goes wrong, and how much of it runs at a time."""

    on_error: Literal["continue", "stop"] = "continue"
    reruns: int = 0
    """How often a parameter set runs again after a worker was lost."""
    window: int = FRAME_WINDOW
    """How many parameter sets are under way at the same time."""
    grace: float = 5.0
    """How many seconds running operations get when the job has to stop."""
