"""The local target: the application's loop, a pool of worker processes per site, and lanes of them that run jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from dfm_async.base.completion import completed
from dfm_async.errors import JobNotFound, Problem, QueueFull
from dfm_async.federation.federation import Federation
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import LaneStats, SiteStats, TargetStats, Traffic
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.log import LogReader
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import Bells
from dfm_async.runtime.once import in_thread
from dfm_async.runtime.operations import OperationTable
from dfm_async.runtime.site import SiteRuntime
from dfm_async.targets.coordinator import Coordinator
from dfm_async.targets.frames import Row
from dfm_async.targets.hub import Hub
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.local.execution import JobExecution
from dfm_async.targets.local.queue import JobQueue
from dfm_async.targets.local.sites import SitePools
from dfm_async.targets.offers import Answer
from dfm_async.targets.post import deliver
from dfm_async.targets.rules import JobRules
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import Arena
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.site_worker import SiteWorker
from dfm_async.workers.start import choose_method
from dfm_async.workers.worker import HOME

__all__ = ["FederationRunner"]


class FederationRunner:
    """Runs every site of a federation in worker processes on this machine. Owns the pools, the lanes and the jobs.

    Jobs beyond what may run at the same time wait: the highest priority first, among equals the first that came.
    """

    def __init__(self, options: LocalOptions | None = None) -> None:
        self.options = options or LocalOptions()
        self._arena = Arena()
        self.codec = Codec(trusted=True, arena=self._arena)
        self.jobs: JobTable[Coordinator] = JobTable(self.options)
        self.worker_bells = Bells()
        self._hub = Hub(self.send_token_package)
        self._queue = JobQueue()
        self._crowd: dict[Coordinator, asyncio.Future[None]] = {}
        self._lanes: list[JobExecution] = []
        self._lane_of: dict[Coordinator, JobExecution] = {}
        self._priorities: dict[Coordinator, int] = {}
        self._limit = 0
        self._pools: SitePools | None = None
        self._federation: Federation | None = None
        self._revision = -1
        self._fork_server: ForkServer | None = None
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Keeps the pools while the context is open. Workers start when a job first needs them.

        Raises:
            ShippingError: the code of an operation cannot be sent to a worker.
        """
        self._federation, self._revision = federation, federation.revision
        if choose_method(self.options.start_method) == "forkserver":
            self._fork_server = ForkServer.acquire(self.options.preload)
        try:
            pools = self._pools = SitePools(
                federation,
                homesite,
                self.options,
                self.codec,
                self._fork_server,
                self._hub.receive,
                self.worker_bells.ring,
            )
            home = federation.sites.get(homesite)
            async with (
                asyncio.TaskGroup() as group,
                SiteRuntime(
                    homesite,
                    OperationTable(homesite, home.adapters.values() if home else ()),
                    self.codec,
                    report=self._from_home,
                    send=self._send_from_home,
                    threads=home.threads if home else 8,
                    grace=self.options.shutdown_grace,
                    config=home.config(homesite) if home else None,
                ) as runtime,
            ):
                self._group = group
                self._hub.home = runtime
                self._lanes = [JobExecution(i, pools, self._hub, self._spawn) for i in range(pools.lanes)]
                self._limit = self.options.max_concurrent_jobs or pools.lanes * self.options.jobs_per_lane
                if self._fork_server is not None:
                    group.create_task(_warm(self._fork_server))
                grace = self.options.shutdown_grace
                try:
                    yield
                except asyncio.CancelledError:  # closing was cancelled: end at once
                    grace = 0.0
                    raise
                finally:
                    self._group = None
                    try:
                        await pools.shut_down(grace)
                    finally:
                        self._arena.close()
        finally:
            self.jobs.close()
            self.worker_bells.close()
            if self._fork_server is not None:
                await completed(_release(self._fork_server))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None  # noqa: S101 - the session submits only while we run
        return self._group.create_task(work)

    # admission

    async def submit(self, coordinator: Coordinator, priority: int = 0) -> None:
        """Launches a job as soon as there is a slot and its workers are ready; at once if they are.

        Returns when the job runs or waits in the queue; waits while the queue is full.

        Raises:
            QueueFull: it is, and the options say not to wait.
            ShippingError: the code of an operation that was defined since cannot be sent to a worker.
        """
        if self._federation is not None and self._federation.revision != self._revision:
            self._update(self._federation)
        coordinator.priority = priority
        lane = None if self._queue else self._free_lane()
        limit = self.options.queue_limit
        if lane is None and len(self._queue) >= limit and self.options.queue_overflow == "fail":
            raise QueueFull(len(self._queue))
        self.jobs.add(coordinator)
        coordinator.resubmit = self._run_again
        coordinator.on_end(self._job_ended)
        if lane is not None:
            self._run_on(lane, coordinator, priority)
            return
        self._enqueue(coordinator, priority)
        if len(self._queue) > limit:
            future = self._crowd[coordinator] = asyncio.get_running_loop().create_future()
            await future

    def _enqueue(self, coordinator: Coordinator, priority: int, *, front: bool = False) -> None:
        running = len(self._lane_of)
        coordinator.waiting_for = f"a free slot ({running} job{'s' * (running != 1)} running)"
        self._priorities[coordinator] = priority
        self._queue.put(coordinator, priority, front=front)

    def _free_lane(self) -> JobExecution | None:
        """The lane with the fewest jobs, if a further job may run at all."""
        if len(self._lane_of) >= self._limit:
            return None
        lane = min(self._lanes, key=_load)
        return lane if lane.load < self.options.jobs_per_lane else None

    def _run_on(self, lane: JobExecution, coordinator: Coordinator, priority: int) -> None:
        self._lane_of[coordinator] = lane
        if priority:
            self._priorities[coordinator] = priority
        lane.submit(coordinator)

    def _admit(self) -> None:
        while self._queue and (lane := self._free_lane()) is not None:
            coordinator = self._queue.take()
            if coordinator is None:
                return
            self._left_queue(coordinator)
            self._run_on(lane, coordinator, self._priorities.pop(coordinator, 0))

    def _left_queue(self, coordinator: Coordinator) -> None:
        """The queue is shorter by one: whoever waits to get in goes on."""
        future = self._crowd.pop(coordinator, None)
        if future is None and self._crowd:
            future = self._crowd.pop(next(iter(self._crowd)))
        if future is not None and not future.done():
            future.set_result(None)

    def release_execution(self, coordinator: Coordinator) -> None:
        """Frees the slot of a job, for the next that waits."""
        self._hub.forget(coordinator)
        lane = self._lane_of.pop(coordinator, None)
        if lane is not None:
            lane.release(coordinator)

    def _job_ended(self, coordinator: Coordinator) -> None:
        if self._queue.discard(coordinator):
            self._left_queue(coordinator)
        self.release_execution(coordinator)
        self._priorities.pop(coordinator, None)
        if self._queue:
            self._admit()

    def _run_again(self, coordinator: Coordinator) -> None:
        """A job has lost a worker and may run again: it is the first of its priority to get a slot."""
        priority = self._priorities.pop(coordinator, 0)
        self.release_execution(coordinator)
        self._enqueue(coordinator, priority, front=True)
        self._admit()

    # jobs by their ids

    def is_known_job_id(self, job_id: str) -> bool:
        """Whether a job runs, or ended not too long ago."""
        return self.jobs.find(job_id) is not None

    def get_job_status(self, job_id: str) -> JobStatus:
        """The status of a job; UNKNOWN if it is not known."""
        record = self.jobs.find(job_id)
        return JobStatus.UNKNOWN if record is None else record.status

    def find_job_handle(self, job_id: str) -> Coordinator | None:
        """Finds a job that has not ended."""
        return self.jobs.coordinator(job_id)

    def get_job_handle_any(self, job_id: str) -> JobRecord | None:
        """Finds what is known of a job, also of one that has ended."""
        return self.jobs.find(job_id)

    def _record(self, job_id: str) -> JobRecord:
        record = self.jobs.find(job_id)
        if record is None:
            raise JobNotFound(job_id)
        return record

    async def wait_until_finished(self, job_id: str) -> JobStatus:
        """Waits for the end of a job.

        Raises:
            JobNotFound: it is not known.
        """
        record = self._record(job_id)
        await record.completion_event.wait()
        return record.status

    async def cancel_job(self, job_id: str, reason: str = "cancelled", grace: float = 5.0) -> dict[str, str]:
        """Stops a job, and returns when every site has confirmed; see :meth:`dfm_async.Job.cancel`.

        Raises:
            JobNotFound: it is not known.
        """
        record = self._record(job_id)
        coordinator = self.jobs.coordinator(job_id)
        if coordinator is None:
            return {}
        lane = self._lane_of.get(coordinator)
        if lane is None:
            coordinator.halt(JobStatus.ABORTED, reason, grace)
        else:
            lane.abort_job(job_id, reason, grace)
        await record.completion_event.wait()
        return dict(coordinator.outcomes)

    def attach_client(self, job_id: str, after: int | None = None) -> LogReader:
        """Attaches a reader to the log of a job, behind an offset.

        Raises:
            JobNotFound: it is not known.
            ResultsExpired: events that the reader wants are gone.
        """
        return self._record(job_id).log.reader(after)

    def detach_client(self, reader: LogReader) -> None:
        """Detaches a reader: it keeps no event from being dropped any more."""
        reader.close()

    # tokens between jobs

    def send_token_package(self, sender: Coordinator, message: msg.SendToPlace) -> None:
        """Hands a token of one job to another that runs on any lane; the sender is told what became of it."""
        deliver(self.jobs, self.codec, sender, message, self._offer)

    def _offer(self, target: Coordinator, place: str, key: str, value: Any, answer: Answer) -> None:
        lane = self._lane_of.get(target)
        if lane is not None:
            lane.receive_inter_job_token(target, place, key, value, answer)
        elif target.record.decided is JobStatus.RUNNING:  # it has lost a worker, and will run again
            target.offer(place, key, value, answer)
        else:
            answer(f"job {target.record.job_id} does not run: it waits for {target.waiting_for}")

    # the end

    def coordinate(self, record: JobRecord, rules: JobRules, pack_rows: Callable[[Any], list[Row]]) -> Coordinator:
        """Makes what a session steers a new job by."""
        return Coordinator(record, self.codec, rules, pack_rows)

    async def refusals(self, plan: Plan) -> list[Problem]:
        """What this target cannot give."""
        return []

    async def find(self, job_id: str) -> JobRecord | None:
        """Finds a job that runs, or ended not too long ago."""
        return self.jobs.find(job_id)

    async def refresh(self) -> None:
        """Has nothing to do: all jobs are known here."""

    async def forget(self, job_id: str) -> None:
        """Has nothing to do: nobody else knows a job."""

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs, those that wait and those that run, and returns when they have."""
        while (coordinator := self._queue.take()) is not None:
            self._left_queue(coordinator)
            coordinator.shut_down(reason, grace)
        await asyncio.gather(*(lane.shutdown(reason, grace) for lane in self._lanes))

    def _update(self, federation: Federation) -> None:
        """Has jobs that begin from now on run the code that the federation has now; others go on as they are."""
        if self._pools is not None and (runtime := self._hub.home) is not None:
            revision = federation.revision
            self._pools.reload()
            home = federation.sites.get(runtime.site)
            runtime.table = OperationTable(runtime.site, home.adapters.values() if home else ())
            runtime.config = home.config(runtime.site) if home else runtime.config
            self._revision = revision

    def reload(self, federation: Federation) -> None:
        """Runs jobs with the code that the federation has now; those in worker processes go on as they are."""
        if self._pools is not None and self._hub.home is not None:
            home = federation.sites.get(self._hub.home.site)
            self._hub.home.table.replace(home.adapters.values() if home else ())
            self._pools.reload()

    def workers(self, site: str) -> list[SiteWorker]:
        """The worker processes of a site that have not ended, also those of operations with one of their own."""
        return [] if self._pools is None else [worker for worker in self._pools.workers if worker.site == site]

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""
        sites: dict[str, SiteStats] = {}
        if self._pools is not None:
            for location, pool in self._pools.pools.items():
                sites[location] = pool.stats()
        home = self._hub.home
        return TargetStats(
            running=len(self._lane_of),
            waiting=len(self._queue),
            lanes=tuple(LaneStats(jobs=lane.load, alive=lane.is_alive) for lane in self._lanes),
            sites=sites,
            tokens=Traffic() if home is None else Traffic(home.tokens, home.token_bytes),
            lag=self._lag(),
            exhausted=(home.site,) if home is not None and home.exhausted else (),
        )

    def _lag(self) -> float | None:
        """By how many seconds our loop was late to take the last sign of life of a worker."""
        workers = () if self._pools is None else self._pools.workers
        last = max((worker.heard for worker in workers if worker.heard is not None), default=None)
        return None if last is None else last[1]

    # messages

    def _from_home(self, message: msg.Message) -> None:
        asyncio.get_running_loop().call_soon(self._hub.receive, message)

    def _send_from_home(self, address: str, message: msg.Message) -> None:
        if address == HOME:
            asyncio.get_running_loop().call_soon(self._hub.to_home, message)
        elif self._pools is not None:
            self._pools.send(address, message)


async def _warm(server: ForkServer) -> None:
    with contextlib.suppress(RuntimeError):  # no more threads: the first worker reports it
        await in_thread(server.warm, "fork-server")


async def _release(server: ForkServer) -> None:
    try:
        await in_thread(server.release, "fork-server")
    except RuntimeError:  # no more threads
        server.release()


def _load(lane: JobExecution) -> int:
    return lane.load
