"""The workers of one site: an aiomultiprocess pool whose members each run one coroutine, the site's runtime.

A stock pool polls queues and processes. This one keeps its shape (pool, workers, ``create_worker``, ``loop``, ``join``)
and replaces what waits: a worker is reached over a socket that it inherits, and its end is an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from aiomultiprocess import Pool

from dfm_async.base.completion import completed
from dfm_async.base.descriptors import occupy_standard_streams
from dfm_async.errors import WorkerLost
from dfm_async.model.stats import SiteStats, Traffic
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.site_worker import SiteWorker

__all__ = ["SitePool"]

_log = logging.getLogger(__name__)

_BACKOFF: Final = 0.1
"""How many seconds the third worker in a row waits that follows one that died; doubles with every further one."""
_LONGEST_BACKOFF: Final = 10.0


class SitePool(Pool):  # type: ignore[misc] # aiomultiprocess has no type information
    """The workers of one site, started when they are first needed and replaced when they die."""

    def __init__(
        self,
        site: str,
        *,
        workers: int,
        threads: int,
        shipped: bytes,
        fork_server: ForkServer | None,
        loop_initializer: Callable[[], asyncio.AbstractEventLoop] | None,
        on_message: Callable[[Any], None],
        on_change: Callable[[], None],
        output: Literal["log", "inherit"] = "log",
        unresponsive_after: float | None = None,
        apart: bool = False,
        environment: Mapping[str, str] | None = None,
        known_only: bool = False,
    ) -> None:
        self.site = site
        self._apart = apart
        self._environment = environment or {}
        self._known_only = known_only
        self._output: Literal["log", "inherit"] = output
        self._unresponsive_after = unresponsive_after
        self._threads = threads
        self._shipped = shipped
        self._fork_server = fork_server
        self._on_message = on_message
        self.worker_changed = on_change
        """Is called when a worker comes or goes, gets a job or loses one, gives a sign of life or misses one."""
        self._slots: list[SiteWorker | None] = [None] * workers
        self._deaths = [0] * workers
        self._needed = [False] * workers
        self.restarts = 0
        """How many workers were lost and replaced."""
        self._tokens = Traffic()
        self._opening: dict[SiteWorker, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()
        occupy_standard_streams()
        super().__init__(processes=workers, loop_initializer=loop_initializer)

    def init(self) -> None:
        """Starts nothing: workers start when they are needed."""

    async def loop(self) -> None:
        """Waits for the end of the pool, and then for the end of its workers. Nothing polls: their ends are events."""
        await self._closed.wait()
        for task in list(self._opening.values()):
            await asyncio.wait([task])
        while self.processes:
            await asyncio.wait([worker.ended for worker in self.processes])

    def create_worker(self, qid: int) -> SiteWorker:
        """Makes the worker of a slot. One that follows several which died waits a little before it starts."""
        deaths = self._deaths[qid]
        delay = 0.0 if deaths < 2 else min(_BACKOFF * 2 ** (deaths - 2), _LONGEST_BACKOFF)
        self._needed[qid] = True
        worker = SiteWorker(
            self.site,
            self._threads,
            self._shipped,
            self._fork_server,
            self.loop_initializer,
            self._on_message,
            self,
            delay,
            self._output,
            self._unresponsive_after,
            self._apart,
            self._environment,
            self._known_only,
        )
        self._slots[qid] = worker
        self.processes[worker] = qid
        task = asyncio.create_task(worker.open(), name=f"start worker {qid} of {self.site}")
        self._opening[worker] = task
        self.worker_changed()
        task.add_done_callback(lambda done: self._opened(worker, done))
        return worker

    def _opened(self, worker: SiteWorker, task: asyncio.Task[None]) -> None:
        self._opening.pop(worker, None)
        self.worker_changed()
        error = None if task.cancelled() else task.exception()
        if error is not None and not worker.ended.done() and worker.pid is None:
            # It never came to be: nobody else will tell.
            if not worker.ready.done():
                worker.ready.set_exception(error)
                worker.ready.exception()
            worker.ended.set_result(None)
            self.worker_ended(worker)

    async def pause(self, seconds: float) -> None:
        """Waits before a start, or until the pool is closed.

        Raises:
            WorkerLost: it was closed.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return
        raise WorkerLost(self.site, None, "the session was closed before it started")

    def worker_ended(self, worker: SiteWorker) -> None:
        """A worker has ended: frees its slot, tells its jobs, and starts another one if it had been of use."""
        self.worker_changed()
        qid = self.processes.pop(worker, None)
        self._tokens += worker.tokens
        was_ready = worker.ready.done() and worker.ready.exception() is None
        if qid is not None and self._slots[qid] is worker:
            self._slots[qid] = None
            self._deaths[qid] += 1
            if self.running and was_ready:
                self.restarts += 1
                self.create_worker(qid)
        code = worker.ended.result()
        if worker.seats and worker.refused is None:  # its jobs tell why a site does not start
            _log.warning("a worker of site %s ended with %s", self.site, code, extra={"site": self.site})
        for seat, at in list(worker.seats):
            seat.lost(at, worker.lost(code))
        worker.seats.clear()

    def worker_is_well(self, worker: SiteWorker) -> None:
        """A job has finished on a worker: deaths before it do not count any more."""
        qid = self.processes.get(worker)
        if qid is not None:
            self._deaths[qid] = 0

    def retire(self, worker: SiteWorker) -> None:
        """Gives the slot of a worker that takes no further job to another one."""
        qid = self.processes.get(worker)
        if qid is not None and self._slots[qid] is worker:
            self._slots[qid] = None
            if self.running:
                self.create_worker(qid)

    def reload(self, shipped: bytes, grace: float) -> None:
        """Replace all workers by others with this code: idle ones at once, others when their jobs have ended.

        A worker that is asked to end has the grace period, in seconds.
        """
        self._shipped = shipped
        for worker in [worker for worker in self._slots if worker is not None]:
            worker.outdate(grace)

    def worker_unresponsive(self, worker: SiteWorker, seconds: float) -> None:
        """A worker with jobs does not respond: tells them."""
        self.worker_changed()
        pid = worker.pid
        text = "worker %s of site %s has %d jobs and has not responded for %.1f s"
        _log.warning(text, pid, self.site, len(worker.seats), seconds, extra={"site": self.site})
        for seat, at in list(worker.seats):
            seat.unresponsive(at, self.site, seconds)

    def worker_responsive(self, worker: SiteWorker) -> None:
        """A worker responds again: tells its jobs."""
        self.worker_changed()
        _log.warning("worker %s of site %s responds again", worker.pid, self.site, extra={"site": self.site})
        for seat, at in list(worker.seats):
            seat.responsive(at, self.site)

    def worker_hangs(self, worker: SiteWorker, text: str) -> None:
        """A worker has calls that do not return, and was retired: tells its jobs."""
        self.restarts += 1
        log = "worker %s of site %s takes no further jobs and is replaced: %s"
        _log.warning(log, worker.pid, self.site, text, extra={"site": self.site})
        for seat, at in list(worker.seats):
            seat.retired(at, self.site, text)

    def worker(self, lane: int) -> SiteWorker:
        """Gives the worker of a lane, which may still be starting. Lanes beyond the site's workers share them."""
        slot = lane % len(self._slots)
        return self._slots[slot] or self.create_worker(slot)

    def needed(self, lane: int) -> bool:
        """Whether the worker of a lane was ever needed."""
        return self._needed[lane % len(self._slots)]

    def alive(self, lane: int) -> bool:
        """Whether there is a worker for a lane."""
        return self._slots[lane % len(self._slots)] is not None

    def stats(self) -> SiteStats:
        """How the workers are."""
        workers = tuple(worker.stats() for worker in self.processes)
        tokens = sum((worker.tokens for worker in self.processes), self._tokens)
        return SiteStats(workers=workers, restarts=self.restarts, tokens=tokens)

    def terminate(self) -> None:
        """Asks all workers to end."""
        self.running = False
        for worker in list(self.processes):
            worker.hang_up()
        self._closed.set()

    async def shut_down(self, grace: float) -> None:
        """End all workers: ask, wait the grace period, kill, and reap them all. Cancelling it kills them at once."""
        self.terminate()
        workers = list(self.processes)
        try:
            if workers:
                await asyncio.wait([worker.ended for worker in workers], timeout=grace)
        finally:
            if any(not worker.ended.done() for worker in workers):
                for worker in workers:
                    worker.kill(f"the session was closed, and the worker did not end within {grace:g} s")
            await completed(self.join())

    async def join(self) -> None:
        """Waits until the pool and all its workers have ended."""
        await self._loop
