"""The workers of one site: an aiomultiprocess pool whose members each run one coroutine, the site's runtime.

A stock pool polls queues and processes. This one keeps its shape (pool, workers, ``create_worker``, ``loop``, ``join``)
and replaces what waits: a worker is reached over a socket that it inherits, and its end is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiomultiprocess import Pool

from dfm_async.base.backoff import delay_after
from dfm_async.base.cores import usable_cores
from dfm_async.base.descriptors import occupy_standard_streams
from dfm_async.base.tasks import completed
from dfm_async.errors import WorkerLost
from dfm_async.errors.root import exit_text
from dfm_async.model.pool_size import IDLE_AFTER
from dfm_async.model.stats import SiteStats, Traffic
from dfm_async.runtime.permits import SitePermits
from dfm_async.wire import messages as msg
from dfm_async.workers.gpu_workers import VISIBLE, GpuWorkers, visible_devices
from dfm_async.workers.leases import LeaseEffect, Lend, Recall, WorkerLeases
from dfm_async.workers.site_worker import SiteWorker, WorkerOptions

_log = logging.getLogger(__name__)

_BACKOFF: Final = 0.1
"""How many seconds the third worker in a row waits that follows one that died; doubles with every further one."""
_LONGEST_BACKOFF: Final = 10.0
_NO_SLOT: Final = -1
"""The slot of workers that are bound to GPUs."""
_BOUND: Final = 3.0
"""After how many seconds jobs are notified that their calls wait for a core although others are free."""


def _send(worker: SiteWorker, message: msg.Message) -> None:
    if worker.channel is not None:
        worker.channel.send(message)


class SitePool(Pool):  # type: ignore[misc] # aiomultiprocess has no type information
    """The workers of one site, started when they are first needed and replaced when they die.

    Args:
        options: how workers start and run.
        workers: the largest number of workers.
        on_message: receives their messages.
        on_change: is called when a worker starts or ends, gets a job or loses one, sends a heartbeat or misses one.
        homes: how many of the workers take jobs; all of them run calls for others.
        may_start: returns whether a further worker may start for calls of others.
        permits: lets calls of operations with limits start.
        idle_after: after how many seconds without calls a worker ends that takes no jobs.
        single: which option allows only one worker although there are more cores; empty if there may be more.
    """

    def __init__(
        self,
        options: WorkerOptions,
        workers: int,
        on_message: Callable[[Any], None],
        on_change: Callable[[], None],
        *,
        homes: int,
        may_start: Callable[[], bool],
        permits: SitePermits,
        idle_after: float = IDLE_AFTER,
        single: str = "",
    ) -> None:
        self.site = options.site
        self._homes = homes
        self._may_start = may_start
        self._idle_after = idle_after
        self._single = single
        self._checking: asyncio.TimerHandle | None = None
        self._idle_timers: dict[SiteWorker, asyncio.TimerHandle] = {}
        self._leases: WorkerLeases[SiteWorker] = WorkerLeases()
        self._permits = permits
        self._gpus = GpuWorkers(self._create_for_gpus, idle_after)
        self._options = options
        self._on_message = on_message
        self.worker_changed = on_change
        self._slots: list[SiteWorker | None] = [None] * workers
        self._deaths = [0] * workers
        self.restarts = 0
        """How many workers were lost and replaced."""
        self._tokens = Traffic()
        self._opening: dict[SiteWorker, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()
        occupy_standard_streams()
        super().__init__(processes=workers, loop_initializer=options.loop_initializer)

    def init(self) -> None:
        """Start nothing: workers start when they are needed."""

    async def loop(self) -> None:
        """Wait for the end of the pool, and then for the end of its workers. Nothing polls: their ends are events."""
        await self._closed.wait()
        for task in list(self._opening.values()):
            await asyncio.wait([task])
        while self.processes:
            await asyncio.wait([worker.ended for worker in self.processes])

    def create_worker(self, qid: int) -> SiteWorker:
        """Make the worker of a slot. One that follows several which died waits a little before it starts."""
        worker = SiteWorker(self._options, self._on_message, self)
        self._slots[qid] = worker
        self.processes[worker] = qid
        task = asyncio.create_task(self._open(worker, self._deaths[qid]), name=f"start worker {qid} of {self.site}")
        self._opening[worker] = task
        self.worker_changed()
        task.add_done_callback(lambda done: self._opened(worker, done))
        return worker

    def _create_for_gpus(self, gpus: tuple[int, ...], after: list[SiteWorker]) -> SiteWorker:
        """Make a worker that sees only some GPUs, and starts when others have ended. It has no slot."""
        environment = {**self._options.environment, VISIBLE: visible_devices(gpus)}
        worker = SiteWorker(dataclasses.replace(self._options, environment=environment), self._on_message, self)
        self.processes[worker] = _NO_SLOT
        task = asyncio.create_task(self._open_after(worker, after), name=f"start a worker of {self.site} for GPUs")
        self._opening[worker] = task
        self.worker_changed()
        task.add_done_callback(lambda done: self._opened(worker, done))
        return worker

    async def _open_after(self, worker: SiteWorker, after: list[SiteWorker]) -> None:
        for other in after:
            await asyncio.wait([other.ended])
        if self._closed.is_set():
            raise WorkerLost(self.site, None, "the session was closed before it started")
        await worker.open()

    async def _open(self, worker: SiteWorker, deaths: int) -> None:
        if deaths >= 2:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_after(deaths - 1, _BACKOFF, _LONGEST_BACKOFF)):
                    await self._closed.wait()
            if self._closed.is_set():
                raise WorkerLost(self.site, None, "the session was closed before it started")
        await worker.open()

    def _opened(self, worker: SiteWorker, task: asyncio.Task[None]) -> None:
        self._opening.pop(worker, None)
        self.worker_changed()
        error = None if task.cancelled() else task.exception()
        if error is not None and not worker.ended.done() and worker.pid is None:
            # It never started: nothing else will report it.
            worker.ready.fail(error)
            worker.ended.settle(None)
            self.worker_ended(worker)

    def worker_ended(self, worker: SiteWorker) -> None:
        """Free the slot of a worker that has ended, notify its jobs, and replace it if it had been of use."""
        self.worker_changed()
        qid = self.processes.pop(worker, None)
        self._stop_idle_timer(worker)
        self._tokens += worker.tokens
        was_ready = worker.ready.done() and worker.ready.exception() is None
        if qid is not None and qid != _NO_SLOT and self._slots[qid] is worker:
            self._slots[qid] = None
            self._deaths[qid] = 1 if worker.succeeded else self._deaths[qid] + 1
            if self.running and was_ready and not worker.retired:
                self.restarts += 1
                if qid < self._homes:
                    self.create_worker(qid)
        code = worker.ended.result()
        self._leave(worker, code)
        if worker.assignments and worker.refused is None:  # its jobs report why a site does not start
            _log.warning("a worker of site %s ended with %s", self.site, exit_text(code), extra={"site": self.site})
        for assigned in list(worker.assignments):
            assigned.lost(worker.lost(code))
        worker.assignments.clear()

    def retire(self, worker: SiteWorker, *, lost: bool) -> None:
        """Replace a worker that takes no further job; ``lost``: because calls on it do not return."""
        self.restarts += lost
        qid = self.processes.get(worker)
        if qid is not None and qid != _NO_SLOT and self._slots[qid] is worker:
            self._slots[qid] = None
            if worker.succeeded:
                self._deaths[qid] = 0
            if self.running and qid < self._homes:
                self.create_worker(qid)
        self._carry_out(self._leases.retired(worker))

    # workers that run calls of others

    def worker_ready(self, worker: SiteWorker) -> None:
        """Let a worker run calls of others."""
        if not worker.retired and worker not in self._gpus:
            self._carry_out(self._leases.ready(worker))
            self._end_when_idle(worker)

    def workers_wanted(self, worker: SiteWorker, count: int) -> None:
        """Lend further workers to one, and start some, as far as there may be more."""
        self._carry_out(self._leases.wants(worker, count))

    def worker_returned(self, worker: SiteWorker, address: str, stuck: str) -> None:
        """Take back a worker that was lent to another one; ``stuck``: which call there does not return."""
        found = next((worker for worker in self.processes if worker.address == address), None)
        if found is None:
            return
        if found in self._gpus:
            self._gpus.stuck(found)
            return
        found.lent = False
        if stuck:
            text = "worker %s of site %s is replaced: %s"
            _log.warning(text, found.pid, self.site, stuck, extra={"site": self.site})
            found.retire(lost=True)
        found.end_if_retired()
        self._carry_out(self._leases.returned(found, worker))
        self._end_when_idle(found)

    # limits

    def permit_wanted(self, worker: SiteWorker, message: msg.PermitWanted) -> None:
        """Let a call of a worker start as soon as the limits of the site allow it."""

        def granted(answer: msg.PermitGranted) -> None:
            if answer.gpus and message.elsewhere:
                self._gpus.place(worker, answer)
            else:
                _send(worker, answer)

        self._permits.want(worker, message, granted)

    def permit_returned(self, worker: SiteWorker, message: msg.PermitReturned) -> None:
        """Take back the permit of a call that has ended."""
        self._gpus.left(worker, message.number)
        self._permits.returned(worker, message.number)

    def _carry_out(self, effects: Iterable[LeaseEffect[SiteWorker]]) -> None:
        for effect in effects:
            if isinstance(effect, Lend):
                effect.worker.lent = True
                _send(effect.to, msg.WorkerLent(effect.worker.address))
            elif isinstance(effect, Recall):
                _send(effect.lent_to, msg.WorkerRecalled(effect.worker.address))
            else:
                self._start_another()

    def _start_another(self) -> None:
        free = [qid for qid, worker in enumerate(self._slots) if worker is None]
        if free and self.running and self._may_start():
            self.create_worker(free[-1])
        else:
            self._leases.not_started()
            if self._single and self._checking is None:
                self._checking = asyncio.get_running_loop().call_later(_BOUND, self._check_bound)

    def _check_bound(self) -> None:
        """Report to jobs whose calls still wait that there may be only one worker."""
        self._checking = None
        for worker in self._leases.wanting:
            why = f"calls wait for each other, because {self._single} allows one worker, and {usable_cores()} cores"
            worker.report_bound(None, f"{why} are usable")

    def _leave(self, worker: SiteWorker, code: int | None) -> None:
        """Take a worker that has ended from those that it was lent to, and give back those that it had."""
        if worker in self._gpus:
            self._gpus.gone(worker, code)
            return
        self._gpus.user_gone(worker)
        self._permits.gone(worker)
        holder = self._leases.holder(worker)
        if holder is not None:
            _send(holder, msg.WorkerGone(worker.address, worker.lost(code).detail, code))
        if not worker.address:
            self._leases.not_started()
        for lent in self._leases.held_by(worker):
            lent.lent = False
            if not lent.assignments:  # it may still run calls that nobody waits for
                lent.kill("the worker whose calls it ran has ended")
                self._leases.gone(lent)
        self._carry_out(self._leases.gone(worker))

    def _end_when_idle(self, worker: SiteWorker) -> None:
        """End a worker that takes no jobs when it has had no calls for a while."""
        self._stop_idle_timer(worker)
        if self.processes.get(worker, 0) >= self._homes:
            loop = asyncio.get_running_loop()
            self._idle_timers[worker] = loop.call_later(self._idle_after, self._end_idle, worker)

    def _stop_idle_timer(self, worker: SiteWorker) -> None:
        timer = self._idle_timers.pop(worker, None)
        if timer is not None:
            timer.cancel()

    def _end_idle(self, worker: SiteWorker) -> None:
        self._idle_timers.pop(worker, None)
        if worker in self.processes and not worker.retired and worker in self._leases.idle:
            worker.outdated = True  # it ends by itself, and is not killed
            worker.retire()
            worker.end_if_retired()

    def reload(self, shipped: bytes, grace: float) -> None:
        """Replace all workers by others with this code: idle ones at once, others when their jobs have ended.

        A worker that is asked to end has the grace period, in seconds.
        """
        self._options = dataclasses.replace(self._options, shipped=shipped)
        for worker in [worker for worker in self._slots if worker is not None]:
            worker.outdate(grace)
        self._gpus.outdate(grace)

    def worker(self, lane: int) -> SiteWorker:
        """Return the worker of a lane, which may still be starting. Lanes beyond the site's workers share them."""
        slot = lane % self._homes
        return self._slots[slot] or self.create_worker(slot)

    def lacks(self, lane: int) -> bool:
        """Return whether the worker of a lane has ended, and was not replaced yet."""
        slot = lane % self._homes
        return self._deaths[slot] > 0 and self._slots[slot] is None

    def stats(self) -> SiteStats:
        """How the workers are."""
        workers = tuple(worker.stats() for worker in self.processes)
        tokens = sum((worker.tokens for worker in self.processes), self._tokens)
        return SiteStats(workers=workers, restarts=self.restarts, tokens=tokens)

    def terminate(self) -> None:
        """Ask all workers to end."""
        self.running = False
        if self._checking is not None:
            self._checking.cancel()
        for worker in list(self.processes):
            worker.disconnect()
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
        """Wait until the pool and all its workers have ended."""
        await self._loop
