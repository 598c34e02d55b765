"""A lane: one worker of every site, on which jobs run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.status import JobStatus
from dfm_async.targets.coordinator import Coordinator, Phase
from dfm_async.targets.hub import Hub
from dfm_async.targets.local.sites import SitePools
from dfm_async.targets.offers import Answer
from dfm_async.wire import messages as msg
from dfm_async.workers.site_worker import SiteWorker
from dfm_async.workers.worker import HOME

__all__ = ["JobExecution"]

_Seats = list[SiteWorker | None]


class JobExecution:
    """Runs jobs on one worker of each site that they need. Workers start with the first job that needs them.

    Args:
        index: which lane this is.
        sites: where the workers come from.
        hub: where messages to the jobs arrive.
        spawn: starts a task that somebody else owns.
    """

    def __init__(
        self,
        index: int,
        sites: SitePools,
        hub: Hub,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.index = index
        self._sites = sites
        self._hub = hub
        self._spawn = spawn
        self._jobs: dict[Coordinator, _Seats] = {}

    @property
    def job_ids(self) -> list[str]:
        """The jobs on this lane."""
        return [coordinator.record.job_id for coordinator in self._jobs]

    @property
    def load(self) -> int:
        """How many jobs are on this lane."""
        return len(self._jobs)

    @property
    def dead_sites(self) -> list[str]:
        """The sites whose worker on this lane has ended and was not replaced yet."""
        pools = self._sites.pools.items()
        return sorted({pool.site for _, pool in pools if pool.needed(self.index) and not pool.alive(self.index)})

    @property
    def is_alive(self) -> bool:
        """Whether all workers of the lane that were ever needed are there."""
        return not self.dead_sites

    def submit(self, coordinator: Coordinator) -> None:
        """Launches a job as soon as its workers are ready; at once if they are."""
        workers = self._jobs[coordinator] = []
        for at in range(len(coordinator.plan.locations)):
            workers.append(None)
            self._seat(coordinator, at)
        if all(worker is None or worker.address for worker in workers):
            self._launch(coordinator)
        else:
            coordinator.waiting_for = "its workers to start"
            self._spawn(self._launch_later(coordinator))

    def _seat(self, coordinator: Coordinator, at: int) -> None:
        worker = self._sites.worker(coordinator.plan.locations[at], self.index)
        self._jobs[coordinator][at] = worker
        if worker is not None:
            worker.seats[coordinator, at] = None

    def release(self, coordinator: Coordinator) -> None:
        """Takes a job off the lane: it has ended, or looks for another one."""
        for at, worker in enumerate(self._jobs.pop(coordinator, ())):
            if worker is not None:
                worker.leave(coordinator, at, well=coordinator.record.decided is JobStatus.FINISHED)

    async def _launch_later(self, coordinator: Coordinator) -> None:
        waiting = [at for at, worker in enumerate(self._jobs.get(coordinator, ())) if worker is not None]
        while waiting and coordinator in self._jobs:
            worker = self._jobs[coordinator][waiting.pop()]
            assert worker is not None  # noqa: S101 - only those are waited for
            try:
                await asyncio.shield(worker.ready)
            except WorkerLost as error:
                coordinator.lost_before_start(error)
                return
            except DfmError as error:
                coordinator.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - whatever starting a process raises: it ends this job, not others
                coordinator.record.cause = error
                coordinator.halt(JobStatus.ABORTED, f"a worker of site {worker.site!r} cannot start: {error}", 0)
                return
            # One that was ready may have ended while we waited for the others: nothing was lost, take another.
            for at, seated in enumerate(self._jobs.get(coordinator, ())):
                if seated is not None and seated.ready.done() and seated.ended.done():
                    self._seat(coordinator, at)
                    waiting.append(at)
        if coordinator in self._jobs:
            self._launch(coordinator)

    def _launch(self, coordinator: Coordinator) -> None:
        if coordinator.phase is not Phase.WAITING:
            return  # cancelled in the meantime
        plan = coordinator.plan
        workers = self._jobs[coordinator]
        try:
            for at, worker in enumerate(workers):
                if worker is None:
                    assert self._hub.home is not None  # noqa: S101 - set while the target runs
                    self._hub.home.add_program(plan.hash, at, plan.nets[at])
                else:
                    self._sites.teach(worker, plan, at)
        except Exception as error:  # noqa: BLE001 - a plan that nobody can run ends its own job, not others
            coordinator.fail(DfmError(f"the plan cannot be given to the sites: {type(error).__name__}: {error}"))
            return
        number = self._hub.register(coordinator)

        def send(at: int, message: msg.Message) -> None:
            worker = workers[at]
            if worker is None:
                asyncio.get_running_loop().call_soon(self._hub.to_home, message)
            elif worker.channel is not None:
                worker.channel.send(message)

        routes = tuple(HOME if worker is None else worker.address for worker in workers)
        for worker in workers:
            if worker is not None:
                worker.launched()
        coordinator.launch(
            number, routes, send, lambda at: _stop_by_force(coordinator, workers[at], at, self._hub.to_home)
        )
        for at, worker in enumerate(workers):
            if worker is not None and worker.unresponsive:
                coordinator.unresponsive(at, worker.site, worker.silence)
            if worker is not None and worker.channel is not None and len(worker.seats) == 1:
                worker.channel.flush()  # it is idle: let it begin while we go on; several jobs are sent together

    def abort_job(self, job_id: str, reason: str, grace: float) -> None:
        """Stops one job of the lane; what has not stopped after the grace is killed."""
        for coordinator in list(self._jobs):
            if coordinator.record.job_id == job_id:
                coordinator.halt(JobStatus.ABORTED, reason, grace)
                coordinator.shorten(grace)

    def receive_inter_job_token(
        self, coordinator: Coordinator, place: str, key: str, value: Any, answer: Answer
    ) -> None:
        """Takes a token of another job for a job of this lane; ``answer`` is told "" or why not."""
        coordinator.offer(place, key, value, answer)

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends the jobs of the lane, and returns when all have."""
        running = list(self._jobs)
        for coordinator in running:
            coordinator.shut_down(reason, grace)
        for coordinator in running:
            await coordinator.record.completion_event.wait()


def _stop_by_force(
    coordinator: Coordinator, worker: SiteWorker | None, at: int, home: Callable[[msg.Message], None]
) -> None:
    """Ends what has not stopped within the grace, without harm to other jobs where that is possible."""
    if worker is None:
        home(msg.AbandonJob(coordinator.record.number, at))  # our own process: threads cannot be killed
        coordinator.abandon(at)
    elif coordinator.has_seen_cancel(at) and worker.shared:
        worker.abandon(coordinator.record.number, at)
        coordinator.abandon(at, "retired")
    else:
        worker.kill(f"a job on it ({coordinator.record.job_id}) was to stop, and did not within its grace")
