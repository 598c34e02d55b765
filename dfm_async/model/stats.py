"""Statistics of sessions."""

from __future__ import annotations

import warnings
from typing import Literal

import msgspec


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process.

    Attributes:
        pid: its process id; None while it starts.
        jobs: how many jobs run on it.
        memory: how many bytes of memory it uses; None where that cannot be known.
        lag: by how many seconds its loop was late when it was last measured; None if it was not.
        running: how many calls run on it, as of its last heartbeat: about once per second while it has jobs. A worker
            without jobs, which may run calls for others, sends none.
        waiting: how many calls wait on it, as of its last heartbeat: for a thread, for another worker, or for a limit.
        unresponsive: whether it has not answered for too long.
        retired: whether it ends with the last of its jobs.
        abandoned: how many calls on it have exceeded their deadline, or belong to a cancelled job, and did not return.
        bound: why its jobs compute on one core although they could use more; empty if they do not.
    """

    pid: int | None
    jobs: int
    memory: int | None = None
    lag: float | None = None
    running: int = 0
    waiting: int = 0
    unresponsive: bool = False
    retired: bool = False
    abandoned: int = 0
    bound: tuple[str, ...] = ()


class Traffic(msgspec.Struct, frozen=True):
    """The values that were sent, since the start.

    Attributes:
        count: how many values.
        bytes: how many bytes they had.
    """

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.bytes + other.bytes)


class LimitStats(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of a site, and the calls that wait for it.

    Attributes:
        limit: what is limited: the ``cpus``, ``memory`` (in bytes) or ``gpus`` of the site, which all operations share;
            or, of one operation, the number of calls at the same time (``limit``), or how often they start (``rate``).
        operation: the operation; None for what all operations share.
        used: how much is in use; None for a rate.
        capacity: how much there is; of a rate, the number of calls per second. With a key, for each of its values.
        waiting: how many calls wait for it.
        key: the parameter whose values are counted each on their own.
    """

    limit: Literal["cpus", "memory", "gpus", "limit", "rate"]
    operation: str | None = None
    used: float | None
    capacity: float
    waiting: int
    key: str | None = None


class SiteStats(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a site, or of an operation with a process of its own.

    Attributes:
        workers: those that are there.
        restarts: how many were lost and replaced.
        tokens: the values that it has sent to other sites, as of the workers' last heartbeats: about once per second
            while they have jobs.
        limits: the limits of its operations that calls have met, for the site as a whole.
    """

    workers: tuple[WorkerStats, ...] = ()
    restarts: int = 0
    tokens: Traffic = Traffic()
    limits: tuple[LimitStats, ...] = ()

    @property
    def waiting(self) -> dict[str, int]:
        """How many calls wait for the limits of the site, by what they wait for, such as ``{"gpus": 3}``."""
        found: dict[str, int] = {}
        for limit in self.limits:
            if limit.waiting:
                found[limit.limit] = found.get(limit.limit, 0) + limit.waiting
        return found

    @property
    def ready(self) -> bool:
        """Whether some worker can serve: one that responds, or starts with the next job."""
        taking = [worker for worker in self.workers if not worker.retired]
        return not taking or not all(worker.unresponsive for worker in taking)

    @property
    def jobs(self) -> int:
        """How many jobs run on the workers."""
        return sum(worker.jobs for worker in self.workers)

    @property
    def memory(self) -> int:
        """How many bytes of memory the workers use."""
        return sum(worker.memory or 0 for worker in self.workers)

    @property
    def lag(self) -> float | None:
        """By how many seconds the slowest loop was late."""
        return max((worker.lag for worker in self.workers if worker.lag is not None), default=None)


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """One lane.

    Attributes:
        jobs: how many jobs run on it.
        alive: whether all its workers that were ever needed are there.
    """

    jobs: int
    alive: bool


class TargetStats(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a target.

    Attributes:
        running: how many jobs have a slot.
        waiting: how many jobs wait for one.
        lanes: the lanes.
        sites: the sites that have workers, and operations with a process of their own (``site:operation``).
        tokens: the values that sites in the application's own process have sent to others.
        lag: by how many seconds the application's loop was late; None if it was not measured.
        exhausted: the sites in the application's own process that serve no further synchronous calls, because too many
            have exceeded their deadline and do not return.
        transport: how results come from a federation on FLARE: through the homesite's gateway, or by app commands.
    """

    running: int
    waiting: int = 0
    lanes: tuple[LaneStats, ...] = ()
    sites: dict[str, SiteStats] = {}
    tokens: Traffic = Traffic()
    lag: float | None = None
    exhausted: tuple[str, ...] = ()
    transport: Literal["gateway", "commands"] | None = None


class SessionStats(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a session.

    Attributes:
        running: how many jobs have a slot.
        waiting: how many jobs wait for one.
        ended: how many jobs have ended, by status.
        remembered: how many jobs are known, ended ones included.
        lanes: the lanes.
        sites: the sites that have workers.
        memory: how many bytes of memory the application uses; None where that cannot be known.
        results: how many events the logs of all jobs hold.
        result_bytes: how many bytes of values they hold.
        yielded: the results that have come from the sites.
        tokens: the values that all sites have sent to each other.
        lag: by how many seconds the application's loop was late to take a worker's last heartbeat; None if there was
            none.
        unready: the sites that cannot serve at present: none of their workers responds, or too many calls in the
            application's own process do not return.
        transport: how results come from a federation on FLARE: through the homesite's gateway, or by app
            commands; None on one machine.
    """

    running: int
    waiting: int
    ended: dict[str, int]
    remembered: int
    lanes: tuple[LaneStats, ...]
    sites: dict[str, SiteStats]
    memory: int | None
    results: int
    result_bytes: int
    yielded: Traffic = Traffic()
    tokens: Traffic = Traffic()
    lag: float | None = None
    unready: tuple[str, ...] = ()
    transport: Literal["gateway", "commands"] | None = None

    @property
    def way(self) -> Literal["gateway", "commands"] | None:
        """The deprecated name of ``transport``."""
        warnings.warn("SessionStats.way is deprecated: use SessionStats.transport", DeprecationWarning, stacklevel=2)
        return self.transport
