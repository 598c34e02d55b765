"""The worker pools of one site for one version of its code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from dfm_async.errors import DfmError
from dfm_async.model.options import LocalOptions
from dfm_async.targets.flare.wanted import CACHE
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.pool import SitePool
from dfm_async.workers.site_worker import SiteWorker

__all__ = ["Crew"]

_MOST_WORKERS: Final = 256
_MOST_THREADS: Final = 1024
_MOST_POOLS: Final = 64
"""How many pools there may be: one for the site, and one for each operation with a process of its own."""


class Crew:
    """Makes the pool of the site, or of an operation with a process of its own, when it is first needed.

    Args:
        site: the site.
        shipped: the code of its operations, ready for workers.
        workers: how many processes it has at most; None means as many as there are lanes.
        threads: how many synchronous calls run at the same time in each.
        lanes: how many jobs can run in processes of their own.
        options: how workers start.
        fork_server: what starts them.
        on_message: takes what workers say.
        on_change: is told when something about a worker has changed.
        environment: further environment variables of the workers.
        installed: whether the site itself has installed the code. Values of others are then only of classes that its
            operations take and return; users who bring code may use any of its classes.

    Users who bring code choose how many workers and threads it has, within limits.
    """

    def __init__(
        self,
        site: str,
        shipped: bytes,
        workers: int | None,
        threads: int,
        lanes: int,
        options: LocalOptions,
        fork_server: ForkServer | None,
        on_message: Callable[[Any], None],
        on_change: Callable[[], None],
        environment: Mapping[str, str] | None = None,
        *,
        installed: bool = False,
    ) -> None:
        self.site = site
        self.pools: dict[str, SitePool] = {}
        """The pools that were needed so far, by location."""
        self.seats = 0
        """How many locations of jobs are here."""
        self.wanted = True
        """Whether further jobs may come."""
        self._shipped = shipped
        self._workers = _within(min(workers or lanes, lanes), _MOST_WORKERS)
        self._threads = _within(threads, _MOST_THREADS)
        self._environment = environment
        self._installed = installed
        self._options = options
        self._fork_server = fork_server
        self._on_message = on_message
        self._on_change = on_change

    def worker(self, location: str, lane: int) -> SiteWorker:
        """The worker of a location in a lane, which may still be starting.

        Raises:
            DfmError: there are too many locations.
        """
        if location == f"{self.site}#{CACHE}":  # the lanes share it: it is kept by the first worker of the site
            location, lane = self.site, 0
        pool = self.pools.get(location)
        if pool is None:
            if len(self.pools) >= _MOST_POOLS:
                raise DfmError(f"site {self.site!r} has {_MOST_POOLS} pools of workers, and starts no further one")
            pool = self.pools[location] = SitePool(
                self.site,
                workers=self._workers,
                threads=self._threads,
                shipped=self._shipped,
                fork_server=self._fork_server,
                loop_initializer=None,
                on_message=self._on_message,
                on_change=self._on_change,
                output="log",
                unresponsive_after=self._options.unresponsive_after,
                apart=True,
                environment=self._environment,
                known_only=self._installed,
            )
        return pool.worker(lane)

    def pause(self, *, paused: bool) -> None:
        """Has the workers wait with what they send, or go on."""
        for pool in self.pools.values():
            for worker in pool.processes:
                if worker.channel is not None:
                    worker.channel.pause(paused=paused)

    async def shut_down(self, grace: float) -> None:
        """Ends all workers: asks, waits the grace, kills; returns when all are reaped."""
        await asyncio.gather(*(pool.shut_down(grace) for pool in self.pools.values()))
        self.pools.clear()


def _within(number: int, most: int) -> int:
    return max(1, min(number, most))
