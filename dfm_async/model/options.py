"""Options of sessions on one machine, and of the logs of their jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from dfm_async.model.checks import Options, check_number, whole
from dfm_async.model.pool_size import Workers, fewest_workers


class ResultLimits(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a job's log, and what happens when they are reached.

    A full log evicts its oldest events that every attached reader has read. If there are none, ``block`` makes the
    producing sites wait, and ``fail`` ends the job with an error. ``spill`` evicts events that are in the session's
    store, read or not: later readers get them from the store.
    """

    max_items: int = 100_000
    """The maximum number of events in the log."""
    max_bytes: int = 128 * 1024 * 1024
    """The maximum size of the encoded values in the log, in bytes."""
    window: int = 256
    """The number of results that a site may send before the log grants further credit."""
    window_bytes: int = 32 * 1024 * 1024
    """The same limit in bytes; a single larger value is still sent."""
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
            whole(name, getattr(self, name))


# One object for each default: what is the same object as a default is not encoded with each job.
DEFAULT_LIMITS: Final = ResultLimits()
DEFAULT_GRACE: Final = 5.0


class LocalOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a session on this machine. The defaults suit most programs."""

    start_method: Literal["forkserver", "spawn"] | None = None
    """The start method of worker processes; None means forkserver if the platform has it, otherwise spawn."""
    uvloop: bool = False
    """Whether workers use uvloop; it must be installed (extra ``uvloop``)."""
    results: ResultLimits = DEFAULT_LIMITS
    """The limits of the logs of jobs, unless ``execute(options=...)`` sets others."""
    lanes: int | None = None
    """The number of lanes. Each lane has one worker of every site, so jobs on different lanes run in different
    processes. None means the largest ``workers`` of any site (of a pair, the first number), or one."""
    max_workers: int | None = None
    """The number of worker processes of all sites together up to which CPU-bound calls start further ones. Each site
    with jobs has at least one in any case. None means as many as keep all usable cores busy, or as ``workers`` of a
    site sets."""
    jobs_per_lane: int = 256
    """The maximum number of jobs that share the workers of a lane."""
    max_concurrent_jobs: int | None = None
    """The maximum number of jobs that run at the same time; None means as many as fit on the lanes. Further jobs wait
    in a queue."""
    queue_limit: int = 10_000
    """The maximum number of waiting jobs."""
    queue_overflow: Literal["block", "fail"] = "block"
    """What ``execute`` does when the queue is full: wait for room, or raise ``QueueFull``."""
    keep_finished: int = 1000
    """The maximum number of ended jobs that are kept with their logs; of older jobs, only a summary is kept."""
    keep_finished_for: float = 3600.0
    """The number of seconds for which the log of an ended job is kept."""
    keep_stored_for: float | None = None
    """The number of seconds after which an ended job is deleted from the store, with its log; None means never."""
    keep_finished_bytes: int = 512 * 1024 * 1024
    """The approximate maximum of memory for the logs of all ended jobs, in bytes, read or not. Beyond it, the logs of
    the oldest jobs are dropped; reading them raises ``ResultsExpired``, unless there is a store."""
    keep_summaries: int = 10_000
    """The maximum number of further ended jobs of which a summary is kept; the oldest are forgotten first."""
    cancel_grace: float = DEFAULT_GRACE
    """The grace period of running operations when a job fails, exceeds its deadline or loses a worker, in seconds."""
    shutdown_grace: float = 5.0
    """The grace period of running operations in ``close()``, in seconds; then their processes are killed."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before workers start (forkserver only). If one raises, all workers fail with it;
    one that does not exist is ignored."""
    output: Literal["log", "inherit"] = "log"
    """The destination of standard output and standard error of workers: the logger ``dfm_async.site.<site>``, or those
    of the application. Log records go to that logger in any case."""
    checkpoints: str | None = None
    """The folder for the values of completed calls, one file per site; None means beside the file of the store."""
    checkpoint_bytes: int = 10 * 1024**3
    """The maximum size of the checkpoints of a site, in bytes. A call whose value does not fit fails."""
    unresponsive_after: float | None = 10.0
    """The number of seconds without a heartbeat after which a worker with jobs is reported as unresponsive; None means
    never."""

    def lanes_for(self, workers: Iterable[Workers]) -> int:
        """Return the number of lanes for sites with this many workers."""
        return self.lanes or max((fewest_workers(chosen) or 1 for chosen in workers), default=1)

    def slots_for(self, workers: Iterable[Workers]) -> int:
        """Return the number of jobs that can run at the same time, for sites with this many workers."""
        slots = self.lanes_for(workers) * self.jobs_per_lane
        return min(self.max_concurrent_jobs or slots, slots)

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
            if value is not None:
                whole(name, value)
        if self.queue_overflow not in ("block", "fail"):
            raise ValueError(f"queue_overflow must be 'block' or 'fail', not {self.queue_overflow!r}")
        if self.output not in ("log", "inherit"):
            raise ValueError(f"output must be 'log' or 'inherit', not {self.output!r}")
        if self.keep_stored_for is not None:
            check_number("keep_stored_for", self.keep_stored_for)
        if self.unresponsive_after is not None:
            check_number("unresponsive_after", self.unresponsive_after, positive=True)
