"""How jobs get to their sites: each location asks for a seat, and no token leaves before all have one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dfm_async.errors import DfmError, PipelineDenied, WorkerLost
from dfm_async.model.ids import JobNumber
from dfm_async.model.status import JobStatus
from dfm_async.targets.coordinator import Phase
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.hub_job import HubJob, Run
from dfm_async.targets.flare.roster import Roster
from dfm_async.targets.flare.text import cleaned
from dfm_async.wire import messages as msg
from dfm_async.workers.worker import ELSEWHERE

__all__ = ["OF_SEATS", "Seating"]

_log = logging.getLogger(__name__)

_LONGEST_LINE: Final = 4096
_MOST_LINES: Final = 100
_ANEW: Final = 3
"""How often a job that has not begun asks for seats again because a site has started again."""


class Seating:
    """The runs of jobs at sites.

    Args:
        roster: which sites are there.
        send: sends a message to a site.
    """

    def __init__(self, roster: Roster, send: Callable[[str, Any], None]) -> None:
        self.patience = 60.0
        """For how many seconds a job waits for a site that is not there."""
        self._roster = roster
        self._send = send
        self._runs: dict[int, HubJob] = {}
        self._last_number = 0

    # who is where

    def of_run(self, number: int) -> HubJob | None:
        """The job that has a run of this number."""
        return self._runs.get(number)

    def find(self, peer: str, message: Any) -> HubJob | None:
        """The job that a message is about, if it comes from the site that it speaks for, and is not late.

        Any site of a job may report that another location cannot be reached.
        """
        job = self._runs.get(message.job)
        if job is None:
            return None
        sites = job.plan.sites_at
        heard = sites if isinstance(message, fm.Undeliverable) else sites[message.at : message.at + 1]
        if not 0 <= message.at < len(sites) or peer not in heard:
            _log.warning("site %s speaks for a location of job %s that is not its own", peer, job.job_id)
            return None
        return job

    def _with(self, *sites: str) -> list[HubJob]:
        return [job for job in self._runs.values() if all(site in job.plan.sites_at for site in sites)]

    # seats

    def seat(self, job: HubJob, lane: int) -> None:
        """Asks all sites of a job for a seat, or waits for one that is not there. All have one: it is launched."""
        plan = job.plan
        self._last_number += 1
        run = job.run = Run(self._last_number, len(plan.locations), lane)
        self._runs[run.number] = job
        job.coordinator.waiting_for = "its workers to start"
        for site in plan.sites:
            if site not in self._roster.sites:
                job.coordinator.waiting_for = f"site {site!r}"
                job.wait_for_site(self.patience, lambda: self._site_missing(job))
                return
        for at, location in enumerate(plan.locations):
            site = plan.sites_at[at]
            request = fm.Seat(
                run.number,
                at,
                job.job_id,
                plan.pipeline or "",
                location,
                tuple(plan.sites_at),
                job.submit.offers.get(site, ""),
                plan.hash,
                job.submit.nets[at],
                lane,
                job.first_bytes[at],
            )
            self._send(site, request)

    def _site_missing(self, job: HubJob) -> None:
        missing = [site for site in job.plan.sites if site not in self._roster.sites]
        if missing and job.coordinator.phase is Phase.WAITING:
            why = self._roster.gone.get(missing[0], "it has not come")
            job.coordinator.halt(JobStatus.ABORTED, f"site {missing[0]!r} is not there: {why}", 0)
        elif not missing:
            self.seat_anew(self._taken([job]))

    def leave(self, job: HubJob, *, well: bool) -> None:
        """A job has ended, or runs again: it has no seats any more."""
        run, job.run = job.run, None
        job.stop_waiting_for_site()
        if run is not None:
            self._runs.pop(run.number, None)
            self._unseat(job, run, well=well)

    def _unseat(self, job: HubJob, run: Run, *, well: bool) -> None:
        for at, site in enumerate(job.plan.sites_at):
            if site in self._roster.sites:
                self._send(site, fm.Unseat(run.number, at, well))

    def seated(self, job: HubJob, message: fm.Seated) -> None:
        """A location has a seat."""
        run = job.run
        if run is None or run.number != message.job:
            return
        run.addresses[message.at] = message.address
        run.missing.discard(message.at)
        if not run.missing:
            self._launch(job, run)

    def _launch(self, job: HubJob, run: Run) -> None:
        plan, coordinator = job.plan, job.coordinator
        sites = plan.sites_at
        routes_from: dict[str, tuple[str, ...]] = {}
        for here in plan.sites:
            pairs = zip(sites, run.addresses, strict=True)
            routes_from[here] = tuple(addr if site == here else ELSEWHERE + site for site, addr in pairs)

        def send(at: int, message: msg.Message) -> None:
            if isinstance(message, msg.StartJob):
                message = msgspec.structs.replace(message, routes=routes_from[sites[at]])
            self._send(sites[at], message)

        def kill(at: int) -> None:
            self._send(sites[at], fm.StopSeat(run.number, at, job.job_id, coordinator.has_seen_cancel(at)))

        coordinator.launch(JobNumber(run.number), (), send, kill)

    # what becomes of them

    def refused(self, job: HubJob, message: fm.SeatRefused) -> None:
        """A location gets no seat."""
        site = job.plan.sites_at[message.at]
        if message.kind == "denied":
            job.coordinator.fail(PipelineDenied(site, message.reason))
        else:
            job.coordinator.fail(DfmError(f"site {site!r} cannot run the job: {message.reason}"))

    def lost(self, job: HubJob, message: fm.SeatLost) -> None:
        """The worker of a location has ended."""
        site = job.plan.sites_at[message.at]
        lines = tuple(cleaned(line, _LONGEST_LINE) for line in message.lines[-_MOST_LINES:])
        detail = cleaned(message.detail, _LONGEST_LINE)
        error = WorkerLost(site, message.exit_code, detail, lines, message.out_of_memory)
        if job.coordinator.phase is Phase.WAITING:
            job.coordinator.lost_before_start(error)
        else:
            job.coordinator.lost(message.at, error)

    def silent(self, job: HubJob, message: fm.SeatSilent) -> None:
        """The worker of a location does not answer."""
        job.coordinator.unresponsive(message.at, job.plan.sites_at[message.at], message.seconds)

    def responds(self, job: HubJob, message: fm.SeatResponds) -> None:
        """The worker of a location answers again."""
        job.coordinator.responsive(message.at, job.plan.sites_at[message.at])

    def retired(self, job: HubJob, message: fm.SeatRetired) -> None:
        """The worker of a location takes no further jobs."""
        why = cleaned(message.why, _LONGEST_LINE)
        job.coordinator.retired(message.at, job.plan.sites_at[message.at], why)

    def abandoned(self, job: HubJob, message: fm.Abandoned) -> None:
        """A location that was to stop has been ended."""
        job.coordinator.abandon(message.at, message.how)

    def undeliverable(self, job: HubJob, message: fm.Undeliverable) -> None:
        """What is sent to a location cannot arrive, now or later."""
        site, reason = job.plan.sites_at[message.at], cleaned(message.reason, _LONGEST_LINE)
        job.coordinator.fail(DfmError(f"a message to site {site!r} cannot be delivered: {reason}"))

    # what becomes of sites

    def take_waiting(self, site: str) -> list[tuple[HubJob, Run]]:
        """The jobs that wait for a site, with the runs that they had; they have none any more."""
        return self._taken([job for job in self._with(site) if job.waits_for_site])

    def take_not_begun(self, site: str) -> list[tuple[HubJob, Run]]:
        """The same for jobs that have asked a site for a seat, and have not begun.

        One that this has happened to several times stays: it shares the fate of the site.
        """
        found = [job for job in self._with(site) if job.coordinator.phase is Phase.WAITING]
        found = [job for job in found if job.waits_for_site or job.seated_anew < _ANEW]
        for job in found:
            job.seated_anew += not job.waits_for_site
        return self._taken(found)

    def _taken(self, jobs: list[HubJob]) -> list[tuple[HubJob, Run]]:
        found = [(job, job.run) for job in jobs if job.run is not None]
        for job, _ in found:
            self.leave(job, well=False)
        return found

    def seat_anew(self, taken: list[tuple[HubJob, Run]]) -> None:
        """Has jobs ask for seats again. What they have asked for before may have reached whom it was not meant for."""
        for job, run in taken:
            self._unseat(job, run, well=False)
            if job.coordinator.phase is Phase.WAITING:
                self.seat(job, run.lane)

    def lose_site(self, site: str, reason: str) -> None:
        """A site was lost: jobs that it takes part in cannot go on."""
        for job in self._with(site):
            self._lose(job, site, f"the site was lost: {reason}")

    def cut(self, site: str, other: str, reason: str) -> None:
        """Two sites do not reach each other any more: jobs that need both cannot go on."""
        for job in self._with(site, other):
            self._lose(job, site, f"it cannot reach site {other!r} any more: {reason}")

    def _lose(self, job: HubJob, site: str, reason: str) -> None:
        error = WorkerLost(site, None, reason)
        run = job.run
        if job.coordinator.phase is Phase.WAITING:
            job.coordinator.lost_before_start(error)
            return
        for at, name in enumerate(job.plan.sites_at):
            if name == site and job.run is run:
                job.coordinator.lost(at, error)


OF_SEATS: Final[dict[type, Callable[[Seating, HubJob, Any], None]]] = {
    fm.Seated: Seating.seated,
    fm.SeatRefused: Seating.refused,
    fm.SeatLost: Seating.lost,
    fm.SeatSilent: Seating.silent,
    fm.SeatResponds: Seating.responds,
    fm.SeatRetired: Seating.retired,
    fm.Abandoned: Seating.abandoned,
    fm.Undeliverable: Seating.undeliverable,
}
"""Who takes what sites say of seats."""
