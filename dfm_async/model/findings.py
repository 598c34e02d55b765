"""What a check of a machine or of a site finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found.

    Attributes:
        name: what was checked.
        state: whether it passed.
        detail: what was found.
        advice: what to do, if something is to be done.
    """

    name: str
    state: State
    detail: str
    advice: str = ""
