"""Options of sessions on one machine, and of the logs of their jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from dfm_async.model.checks import Options, check_number
from dfm_async.model.pool_size import Workers, fewest_workers


class ResultLimits(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        items, size, window, window_size = self.max_items, self.max_bytes, self.window, self.window_bytes
        whole = type(items) is type(size) is type(window) is type(window_size) is int
        if not whole or items < 1 or size < 1 or window < 1 or window_size < 1:  # each job of a worker brings them
            self._refuse()
        if self.overflow not in ("block", "spill", "fail"):
            raise ValueError(f"overflow must be 'block', 'spill' or 'fail', not {self.overflow!r}")

    def _refuse(self) -> None:
        for name in ("max_items", "max_bytes", "window", "window_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")


# One object for each default: what is the same object as a default is not encoded with each job.
DEFAULT_LIMITS: Final = ResultLimits()
DEFAULT_GRACE: Final = 5.0


class LocalOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session runs on this machine. All defaults are good ones."""

    start_method: Literal["forkserver", "spawn"] | None = None
    """How worker processes start; None means forkserver where there is one, else spawn."""
    uvloop: bool = False
    """Whether workers use uvloop; it must be installed (extra ``uvloop``)."""
    results: ResultLimits = DEFAULT_LIMITS
    """What the logs of jobs may hold, unless ``execute(options=...)`` says otherwise."""
    lanes: int | None = None
    """How many jobs can run in processes of their own: each lane has one worker of every site. None means as many as
    the site with the most ``workers`` has (of two numbers, the first counts), else one."""
    max_workers: int | None = None
    """How many worker processes the sites have together before calls that compute start no further ones. Each site with
    jobs has at least one in any case. None: as many as keep all usable cores busy, or as ``workers`` of a site says."""
    jobs_per_lane: int = 256
    """How many jobs share the workers of a lane."""
    max_concurrent_jobs: int | None = None
    """How many jobs run at the same time; None means what the lanes hold. Further ones wait in a queue."""
    queue_limit: int = 10_000
    """How many jobs may wait."""
    queue_overflow: Literal["block", "fail"] = "block"
    """What ``execute`` does when the queue is full: wait for room, or raise ``QueueFull``."""
    keep_finished: int = 1000
    """How many ended jobs are kept with their logs; of older ones only a summary is kept."""
    keep_finished_for: float = 3600.0
    """For how many seconds the log of an ended job is kept."""
    keep_finished_bytes: int = 512 * 1024 * 1024
    """About how many bytes of memory the logs of all ended jobs may take together, read or not. The logs of the oldest
    jobs are dropped when they take more; reading them raises ``ResultsExpired``, unless there is a store."""
    keep_summaries: int = 10_000
    """Of how many further ended jobs a summary is kept; the oldest are forgotten first."""
    cancel_grace: float = DEFAULT_GRACE
    """How many seconds running operations get when a job fails, runs out of its deadline or loses a worker."""
    shutdown_grace: float = 5.0
    """How many seconds ``close()`` gives running operations before their processes are killed."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before workers start (forkserver only)."""
    output: Literal["log", "inherit"] = "log"
    """Where the standard output and standard error of workers go: to the logger ``dfm_async.site.<site>``, or to where
    those of the application go. Log records go to that logger in any case."""
    checkpoints: str | None = None
    """The folder for the values of completed calls, one file per site; None means beside the file of the store."""
    checkpoint_bytes: int = 10 * 1024**3
    """How many bytes the checkpoints of a site may take. A call whose value does not fit fails."""
    unresponsive_after: float | None = 10.0
    """After how many seconds without a heartbeat a worker with jobs is reported; None means never."""

    def lanes_for(self, workers: Iterable[Workers]) -> int:
        """Return the number of lanes for sites with this many workers."""
        return self.lanes or max((fewest_workers(chosen) or 1 for chosen in workers), default=1)

    def __post_init__(self) -> None:
        if self.start_method not in (None, "forkserver", "spawn"):
            raise ValueError(f"start_method must be 'forkserver' or 'spawn', not {self.start_method!r}")
        if not isinstance(self.results, ResultLimits):
            raise TypeError(f"results must be ResultLimits, not {self.results!r}")
        for name in ("keep_finished", "keep_finished_for", "keep_summaries", "cancel_grace", "shutdown_grace"):
            check_number(name, getattr(self, name))
        for name in (
            "lanes",
            "max_workers",
            "jobs_per_lane",
            "max_concurrent_jobs",
            "queue_limit",
            "keep_finished_bytes",
            "checkpoint_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        if self.queue_overflow not in ("block", "fail"):
            raise ValueError(f"queue_overflow must be 'block' or 'fail', not {self.queue_overflow!r}")
        if self.output not in ("log", "inherit"):
            raise ValueError(f"output must be 'log' or 'inherit', not {self.output!r}")
        if self.unresponsive_after is not None:
            check_number("unresponsive_after", self.unresponsive_after, positive=True)
