"""Options of a session."""

from __future__ import annotations

from typing import Literal

import msgspec

from dfm_async.model.limits import ResultLimits

__all__ = ["LocalOptions"]


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session runs on this machine. All defaults are good ones."""

    start_method: Literal["forkserver", "spawn"] | None = None
    """How worker processes start; None means forkserver where there is one, else spawn."""
    uvloop: bool = False
    """Whether workers use uvloop; it must be installed (extra ``uvloop``)."""
    results: ResultLimits = ResultLimits()
    """What the logs of jobs may hold, unless ``execute(options=...)`` says otherwise."""
    keep_finished: int = 1000
    """How many ended jobs the session remembers; the oldest are forgotten first."""
    shutdown_grace: float = 5.0
    """How many seconds ``close()`` gives running operations before their processes are killed."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before workers start (forkserver only)."""
    output: Literal["log", "inherit"] = "log"
    """Where the standard output and standard error of workers go: to the logger ``dfm_async.site.<site>``, or to where
    those of the application go. Log records go to that logger in any case."""
    unresponsive_after: float | None = 10.0
    """After how many seconds without a sign of life a worker with jobs is reported; None means never."""

    def __post_init__(self) -> None:
        if self.start_method not in (None, "forkserver", "spawn"):
            raise ValueError(f"start_method must be 'forkserver' or 'spawn', not {self.start_method!r}")
        if not isinstance(self.results, ResultLimits):
            raise TypeError(f"results must be ResultLimits, not {self.results!r}")
        if self.keep_finished < 0 or self.shutdown_grace < 0:
            raise ValueError("keep_finished and shutdown_grace must not be negative")
        if self.output not in ("log", "inherit"):
            raise ValueError(f"output must be 'log' or 'inherit', not {self.output!r}")
        if self.unresponsive_after is not None and not self.unresponsive_after > 0:
            raise ValueError(f"unresponsive_after must be positive or None, not {self.unresponsive_after!r}")
