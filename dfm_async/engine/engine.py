"""Runs the jobs of a session, or of a federation: slots, runs, messages from sites, messages between jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from dfm_async.base.wall_clock import WallTimer, moment_text, wall_time
from dfm_async.engine.coordinator import FROM_LOCATIONS, Coordinator
from dfm_async.engine.intake import PayloadCodec
from dfm_async.engine.job_table import JobTable
from dfm_async.engine.machine import Phase
from dfm_async.engine.run import Host, Run
from dfm_async.engine.scheduler import Scheduler
from dfm_async.errors import EncodingError
from dfm_async.model.ids import JobNumber
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.wire import messages as msg

Jobs: TypeAlias = Scheduler[Coordinator]
"""The jobs that share slots."""

TO_ENGINE: Final = FROM_LOCATIONS | {msg.SendToPlace}
"""What locations send to the engine that runs their job."""


def starts_later(spec: JobSpec) -> bool:
    """Return whether the time has not come at which a job starts."""
    return spec.start_at is not None and spec.start_at > wall_time()


class Engine:
    """Run jobs at hosts.

    Args:
        jobs: the known jobs.
        codec: encodes values.
        host: finds the host of a site.
        on_accepted: is called with a job whose submitter need not wait any longer.
        on_requeue: is called with a job that has lost a worker and will run again.
    """

    def __init__(
        self,
        jobs: JobTable[Coordinator],
        codec: PayloadCodec,
        host: Callable[[str], Host],
        on_accepted: Callable[[Coordinator], None],
        on_requeue: Callable[[Coordinator], None] | None = None,
    ) -> None:
        self.jobs = jobs
        self._codec = codec
        self._host = host
        self._on_accepted = on_accepted
        self._on_requeue = on_requeue
        self._schedulers: dict[Coordinator, Jobs] = {}
        self._runs: dict[int, Run] = {}
        self._run_of: dict[Coordinator, Run] = {}
        self._last_number = 0
        self._admitting: set[Jobs] = set()
        self._later: dict[Jobs, None] = {}
        """Those with jobs whose time to start has not come."""
        self._clock = WallTimer(self._time_came)

    # jobs

    def submit(self, coordinator: Coordinator, scheduler: Jobs) -> bool:
        """Run a job of the table as soon as there is a slot and its workers are ready; at once if they are.

        Returns:
            whether its submitter may go on; else ``on_accepted`` is called when it may.
        """
        self._schedulers[coordinator] = scheduler
        coordinator.owner = self
        spec = coordinator.spec
        if spec.start_at is not None and starts_later(spec):
            scheduler.delay(coordinator, spec.priority, spec.start_at)
            coordinator.machine.waiting_for = f"its start at {moment_text(spec.start_at)}"
            self._later[scheduler] = None
            self._set_clock()
            return True
        if spec.start_at is not None:
            coordinator.watch_deadline(asyncio.get_running_loop().time())
        lane = scheduler.start(coordinator)
        if lane is not None:
            self._begin(coordinator, lane)
            return True
        accepted = scheduler.put(coordinator, spec.priority)
        self._wait_for_slot(coordinator, scheduler)
        self._admit(scheduler)
        return accepted or not scheduler.waits(coordinator)

    @staticmethod
    def _wait_for_slot(coordinator: Coordinator, scheduler: Jobs) -> None:
        running = scheduler.running
        coordinator.machine.waiting_for = f"a free slot ({running} job{'s' * (running != 1)} running)"

    def _set_clock(self) -> None:
        """Set the timer to the time of the next job that starts later."""
        due = {scheduler: scheduler.due for scheduler in self._later}
        self._later = {scheduler: None for scheduler, moment in due.items() if moment is not None}
        self._clock.set(min((moment for moment in due.values() if moment is not None), default=None))

    def _time_came(self, now: float) -> None:
        """Let the jobs wait for slots whose time has come."""
        for scheduler in list(self._later):
            for coordinator in scheduler.advance(now):
                self._wait_for_slot(coordinator, scheduler)
                coordinator.watch_deadline(asyncio.get_running_loop().time())
            self._admit(scheduler)
        self._set_clock()

    def queue(self, coordinator: Coordinator) -> tuple[int, int | None]:
        """Return how many jobs have a slot, and how many get one before this job, if it waits for one."""
        scheduler = self._schedulers.get(coordinator)
        return (0, None) if scheduler is None else (scheduler.running, scheduler.ahead(coordinator))

    def _admit(self, scheduler: Jobs) -> None:
        """Give free slots to jobs that wait. A job that ends at once frees its slot again, so this is a loop."""
        if scheduler.empty or scheduler in self._admitting:
            return
        self._admitting.add(scheduler)
        try:
            while (found := scheduler.take()) is not None:
                self._begin(*found)
        finally:
            self._admitting.discard(scheduler)
        for accepted in scheduler.take_accepted():
            self._on_accepted(accepted)

    def _begin(self, coordinator: Coordinator, lane: int, restarts: int = 0) -> None:
        run = self._run_of[coordinator] = Run(self, coordinator, lane, restarts)
        run.begin(self._host)

    def register(self, run: Run) -> JobNumber:
        """Return a number for a run, which is larger than all before."""
        self._last_number += 1
        self._runs[self._last_number] = run
        return JobNumber(self._last_number)

    def restart(self, run: Run) -> None:
        """Begin another run in the place of one that has not started."""
        self._end_run(run.coordinator, succeeded=False)
        if run.coordinator.phase is Phase.WAITING:
            self._begin(run.coordinator, run.lane, run.restarts + 1)

    def _end_run(self, coordinator: Coordinator, *, succeeded: bool) -> None:
        """Leave the workers of a job. Nothing that still comes from them is for it."""
        run = self._run_of.pop(coordinator, None)
        if run is not None:
            run.release(succeeded=succeeded)
            self._runs.pop(run.number, None)

    def requeue(self, coordinator: Coordinator) -> None:
        """Note that a job has lost a worker and may run again: it is the first of its priority to get a slot."""
        self._end_run(coordinator, succeeded=False)
        scheduler = self._schedulers[coordinator]
        scheduler.put_back(coordinator, coordinator.spec.priority)
        self._wait_for_slot(coordinator, scheduler)
        if self._on_requeue is not None:
            self._on_requeue(coordinator)
        self._admit(scheduler)

    def replace(self, coordinator: Coordinator, at: int) -> None:
        """Give a location of a job another worker."""
        run = self._run_of.get(coordinator)
        if run is not None:
            run.replace(at, self._host)

    def job_ended(self, coordinator: Coordinator) -> None:
        """Leave the workers of a job that has ended, and give its slot to another."""
        self._end_run(coordinator, succeeded=coordinator.record.decided is JobStatus.FINISHED)
        scheduler = self._schedulers.pop(coordinator)
        scheduler.release(coordinator)
        if scheduler in self._later:
            self._set_clock()
        self._admit(scheduler)

    async def shut_down(self, reason: str, grace: float) -> None:
        """End all jobs, those that wait and those that run, and return when they have."""
        unended = self.jobs.coordinators
        for coordinator in sorted(unended, key=lambda job: job.phase is not Phase.WAITING):  # none of them shall start
            coordinator.shut_down(reason, grace)
        for coordinator in unended:
            await coordinator.record.completion_event.wait()

    # runs

    def run(self, number: int) -> Run | None:
        """Return the run with a number, if it goes on."""
        return self._runs.get(number)

    def runs_at(self, *sites: str) -> list[Run]:
        """Return the runs with locations at all of these sites."""
        return [run for run in self._runs.values() if all(site in run.coordinator.plan.sites_at for site in sites)]

    # messages

    def receive(self, message: Any) -> None:
        """Take a message of a location: one of :data:`TO_ENGINE`."""
        run = self._runs.get(message.job)
        if run is None:
            return  # it is late: the run has ended
        if type(message) is msg.SendToPlace:
            self._deliver(run.coordinator, message)
        else:
            run.coordinator.receive(message)

    def _deliver(self, sender: Coordinator, message: msg.SendToPlace) -> None:
        """Hand a token to the job that it is for, and report to the sender what became of it."""
        at, request, number = message.at, message.request, message.job

        def answer(error: str) -> None:
            sender.answer(at, msg.PlaceTaken(number, at, request, error))

        target = self.jobs.coordinator(message.target)
        if target is None:
            known = self.jobs.find(message.target)
            state = "is not known" if known is None else f"has ended ({known.status.value})"
            answer(f"job {message.target} {state}")
        elif target.record.decided is JobStatus.SUBMITTED and self._schedulers[target].waits(target):
            answer(f"job {message.target} does not run: it waits for {target.machine.waiting_for}")
        else:
            try:
                value = self._codec.loads(message.payload)
            except EncodingError as error:
                answer(str(error))
                return
            target.offer(message.place, message.key, value, answer)
