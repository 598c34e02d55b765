"""Options of a session."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dfm_async.model.limits import ResultLimits

__all__ = ["LocalOptions"]


class LocalOptions(BaseModel):
    """How a session runs on this machine. All defaults are good ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_method: Literal["forkserver", "spawn"] | None = None
    """How worker processes start; None means forkserver where there is one, else spawn."""
    uvloop: bool = False
    """Whether workers use uvloop; it must be installed (extra ``uvloop``)."""
    results: ResultLimits = ResultLimits()
    """What the logs of jobs may hold, unless ``execute(options=...)`` says otherwise."""
    keep_finished: Annotated[int, Field(ge=0)] = 1000
    """How many ended jobs the session remembers; the oldest are forgotten first."""
    shutdown_grace: Annotated[float, Field(ge=0)] = 5.0
    """How many seconds ``close()`` gives running operations before their processes are killed."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before workers start (forkserver only)."""
