"""The hub of a carrier: runs the coordinators of all jobs, at the server, for applications that come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgspec

from dfm_async.errors import DfmError, PipelineDenied, PipelineError, ResultsExpired, WorkerLost
from dfm_async.model.ids import JobNumber
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.results.error_values import decode_error
from dfm_async.targets.coordinator import FOR_COORDINATOR, Coordinator, Phase
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.application import Application
from dfm_async.targets.flare.hub_job import HubJob, Run, read_plan
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.sealed import SealedValues
from dfm_async.targets.flare.slots import Slots
from dfm_async.targets.flare.text import cleaned
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.post import deliver
from dfm_async.wire import messages as msg
from dfm_async.workers.worker import ELSEWHERE

__all__ = ["FOR_HUB", "Hub"]

_log = logging.getLogger(__name__)

_OF_SEATS: Final = frozenset(
    {
        fm.Seated,
        fm.SeatRefused,
        fm.SeatLost,
        fm.SeatSilent,
        fm.SeatResponds,
        fm.Abandoned,
        fm.Undeliverable,
        msg.SendToPlace,
    }
)
FOR_HUB: Final = (
    FOR_COORDINATOR
    | _OF_SEATS
    | {
        fm.SiteHello,
        fm.SiteReport,
        fm.LogLines,
        fm.PeerLost,
        fm.Echoed,
        fm.Pulse,
    }
)
"""What sites say to the hub."""
_LONGEST_LINE: Final = 4096
_STATE_EVERY: Final = 0.01
"""Applications are told at most so often how far a job is."""


class Sender(Protocol):
    """What the hub needs of its node."""

    def send(self, peer: str, message: Any) -> None:
        """Sends a message."""
        ...

    def drop(self, peer: str) -> None:
        """The peer is another process now."""
        ...


class Hub:
    """Takes jobs from applications and runs them at the sites. Lives as long as somebody needs it.

    Args:
        carrier: the id of the FLARE job.
        version: our version.
        deployed: the sites that the FLARE job was sent to.
        options: for how long ended jobs are kept.
        linger: for how many seconds it stays when nobody needs it.
    """

    def __init__(self, carrier: str, version: str, deployed: list[str], options: LocalOptions, linger: float) -> None:
        self.carrier = carrier
        self._deployed = deployed
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the carrier ends, when it does."""
        self._version = version
        self._node: Sender | None = None
        self._on_site_lost: Callable[[str], None] = _nothing
        self._values = SealedValues()
        self._table: JobTable[Coordinator] = JobTable(options)
        self._jobs: dict[str, HubJob] = {}
        self._by_number: dict[int, HubJob] = {}
        self._last_number = 0
        self._sites: dict[str, fm.SiteHello] = {}
        self._gone: dict[str, str] = {}
        self._lives: dict[str, str] = {}
        """The last life of each site that was there."""
        self._strangers: set[str] = set()
        """Those of them that were told so."""
        self._apps: dict[str, Application] = {}
        self._offers: dict[str, fm.Offer] = {}
        self._reports: dict[tuple[str, str, str], fm.SiteReport] = {}
        self._echoes: dict[int, tuple[Application, fm.Asked, set[str]]] = {}
        self._last_echo = 0
        self._dirty: dict[HubJob, None] = {}
        self._state_timer: asyncio.TimerHandle | None = None
        self._linger = linger
        self._keep = 3600.0
        self._patience = 60.0
        self._idle: asyncio.TimerHandle | None = None
        self._rest()

    @property
    def sites(self) -> Iterable[str]:
        """The sites that are there."""
        return self._sites

    def attach_node(self, node: Sender, on_site_lost: Callable[[str], None]) -> None:
        """Says where messages go, and who else wants to know that a site was lost."""
        self._node = node
        self._on_site_lost = on_site_lost

    def _send(self, site: str, message: Any) -> None:
        if self._node is not None:
            self._node.send(site, message)

    # life

    def _rest(self) -> None:
        """Ends the carrier after a while, unless somebody needs it before."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._apps or any(not job.record.status.ended for job in self._jobs.values()):
            return
        unread = any(job.unread for job in self._jobs.values())
        seconds = max(self._linger, self._keep) if unread else self._linger
        self._idle = asyncio.get_running_loop().call_later(seconds, self.end, "nobody needs it any more")

    def end(self, reason: str) -> None:
        """Ends the carrier."""
        if not self.ended.done():
            self.ended.set_result(reason)

    async def close(self, reason: str) -> None:
        """Ends all jobs, and tells the applications that the carrier ends."""
        for job in list(self._jobs.values()):
            if job.coordinator.phase is not Phase.ENDED:
                job.coordinator.halt(JobStatus.ABORTED, reason, 0)
                for at in range(len(job.plan.locations)):
                    job.coordinator.abandon(at)
        await asyncio.sleep(0)  # followers get the last events
        for job in self._jobs.values():
            job.close()
        for timer in (self._idle, self._state_timer):
            if timer is not None:
                timer.cancel()
        for app in self._apps.values():
            app.here()
            app.send(fm.Bye(reason))
        self._table.close()

    def say_bye(self, reason: str) -> None:
        """Lets the sites go; said last, because applications may be at the gateway of one."""
        for site in self._sites:
            self._send(site, fm.Bye(reason))

    # sites

    def receive(self, peer: str, message: Any) -> None:
        """Takes a message of a site."""
        kind = type(message)
        if peer in self._gone and kind is not fm.SiteHello:
            self._tell_given_up(peer)
            return
        if kind in FOR_COORDINATOR:
            job = self._job_of(peer, message)
            if job is not None and job.may_say(message):
                job.coordinator.receive(_without_cause(message))
            elif job is not None:
                _log.warning("site %s says something of job %s that is not its own: ignored", peer, job.job_id)
        elif kind in _OF_SEATS:
            job = self._job_of(peer, message)
            if job is not None:
                _SEATS[kind](self, job, message)
        elif kind is fm.SiteHello:
            self._site_came(peer, message)
        elif kind is fm.SiteReport:
            self._site_reports(peer, message)
        elif kind is fm.LogLines:
            if message.site == peer:
                self._tell_apps(message)
        elif kind is fm.PeerLost:
            self._cut(peer, message)
        elif kind is fm.Echoed:
            self._echoed(peer, message.request)

    def _tell_given_up(self, peer: str) -> None:
        """A site speaks that was taken for lost: what it says belongs to jobs that have ended."""
        if peer not in self._strangers and peer in self._deployed:
            self._strangers.add(peer)
            self._send(peer, fm.GivenUp(self._lives.get(peer, "")))

    def refused(self, peer: str, message: Any, reason: str) -> None:
        """A site does not take a message, and never will."""
        job = self._by_number.get(getattr(message, "job", -1))
        if job is None:
            _log.warning("site %s does not take %s: %s", peer, type(message).__name__, reason)
        else:
            job.coordinator.fail(DfmError(f"site {peer!r} does not take what it is sent: {reason}"))

    def _site_reports(self, peer: str, report: fm.SiteReport) -> None:
        """Tells those applications of workers whose code they run."""
        if report.location.partition("#")[0] != peer:
            return
        key = (peer, report.offer, report.location)
        if report.workers:
            self._reports[key] = report
        else:
            self._reports.pop(key, None)
        for app in self._apps.values():
            if not report.offer or f"{peer}:{report.offer}" in app.offers:
                app.tell(report)

    def _job_of(self, peer: str, message: Any) -> HubJob | None:
        """The job that a message is about, if it comes from the site that it speaks for, and is not late."""
        job = self._by_number.get(message.job)
        if job is None:
            return None
        sites = job.plan.sites_at
        if not 0 <= message.at < len(sites) or sites[message.at] != peer:
            _log.warning("site %s speaks for a location of job %s that is not its own", peer, job.job_id)
            return None
        return job

    def _site_came(self, peer: str, hello: fm.SiteHello) -> None:
        if hello.site != peer:
            _log.warning("site %s calls itself %s, and is not taken", peer, hello.site)
            return
        if hello.protocol != fm.PROTOCOL:
            self._gone[peer] = f"it speaks another protocol ({hello.protocol}, not {fm.PROTOCOL}): install one version"
        else:
            if peer in self._sites:  # it has begun anew, before we saw that it was lost
                self.lost_site(peer, "it has started again")
            if self._node is not None:
                self._node.drop(peer)
            self._sites[peer] = hello
            self._lives[peer] = hello.life
            self._gone.pop(peer, None)
            self._strangers.discard(peer)
            for offer in self._offers.values():
                if offer.site == peer:
                    self._send(peer, offer)
            self._seat_those_that_wait(peer)
        self._welcome_all()

    def lost_site(self, site: str, reason: str, life: str = "") -> None:
        """A site cannot be reached any more, or has ended; ``life``: which life of it, if that is known."""
        self._strangers.discard(site)
        if life and life != self._lives.get(site):
            return  # it has begun anew since
        if site in self._gone or (site not in self._sites and site != HUB):
            return
        _log.warning("site %s was lost: %s", site, reason)
        self._sites.pop(site, None)
        self._gone[site] = reason
        for key in [key for key in self._reports if key[0] == site]:
            self._site_reports(site, msgspec.structs.replace(self._reports[key], workers=()))
        for request in list(self._echoes):
            self._echoed(site, request)
        for other in self._sites:
            self._send(other, fm.SiteLost(site))
        for job in list(self._by_number.values()):
            if site in job.plan.sites_at:
                self._lose(job, site, f"the site was lost: {reason}")
        self._on_site_lost(site)
        self._welcome_all()

    def _cut(self, peer: str, message: fm.PeerLost) -> None:
        """Two sites do not reach each other any more: jobs that need both cannot go on."""
        if message.site not in self._sites or (message.life and message.life != self._lives.get(message.site)):
            return  # that it was lost is known already
        for job in list(self._by_number.values()):
            sites = job.plan.sites_at
            if peer in sites and message.site in sites:
                self._lose(job, peer, f"it cannot reach site {message.site!r} any more: {message.reason}")

    def _lose(self, job: HubJob, site: str, reason: str) -> None:
        error = WorkerLost(site, None, reason)
        run = job.run
        if job.coordinator.phase is Phase.WAITING:
            job.coordinator.lost_before_start(error)
            return
        for at, name in enumerate(job.plan.sites_at):
            if name == site and job.run is run:
                job.coordinator.lost(at, error)

    # applications

    def application(self, session: str) -> Application | None:
        """Finds an application by its session."""
        return self._apps.get(session)

    def attach(self, attach: fm.Attach) -> fm.Attached:
        """An application comes, or comes again another way. Whoever asks gives its duplex that way."""
        app = self._apps.get(attach.session)
        if attach.hello.protocol != fm.PROTOCOL:
            text = (
                f"the federation has version {self._version} of dfm_async, and the application {attach.hello.version}"
            )
            return fm.Attached(0, text)
        if self.ended.done():
            return fm.Attached(0, f"the carrier has ended: {self.ended.result()}")
        if app is None and not attach.new:
            return fm.Attached(0, "the hub does not know this application any more")
        if app is None:
            app = self._apps[attach.session] = Application(attach, self._app_said, self._app_has_room)
            hello = attach.hello
            self._linger, self._keep, self._patience = hello.linger, hello.keep, hello.start
            app.send(self._welcome(app))
            for report in self._reports.values():
                if not report.offer:
                    app.tell(report)
        app.here()
        self._rest()
        return fm.Attached(app.duplex.have)

    def absent(self, app: Application) -> None:
        """The application is there only when it asks: it is gone if it does not for a while."""
        app.here()
        app.absence = asyncio.get_running_loop().call_later(app.hello.patience, self._app_left, app)

    def detach(self, app: Application, connection: str) -> None:
        """A connection of an application has ended. It may come again, another way."""
        if app.connection == connection and self._apps.get(app.name) is app:
            app.connection = ""
            app.duplex.detach()
            self.absent(app)

    def _app_said(self, app: Application, data: bytes) -> None:
        try:
            message = fm.decode_app(data)
            _APPS[type(message)](self, app, message)
        except Exception:  # noqa: BLE001 - what one application says must not harm the others
            _log.exception("what application %s said cannot be done", app.name)

    def _app_has_room(self, app: Application) -> None:
        if app.held_up and not app.full:
            app.held_up = False
            for job in self._jobs.values():
                if app.name in job.followers:
                    job.record.log.wake()

    def _welcome(self, app: Application) -> fm.Welcome:
        home = self._sites.get(app.hello.homesite)
        sites = {
            name: fm.SiteInfo(hello.operations, hello.allow_code, hello.problem) for name, hello in self._sites.items()
        }
        gateway = ("", "") if home is None else (home.host, home.gateway)
        return fm.Welcome(fm.PROTOCOL, self._version, self.carrier, sites, self._deployed, dict(self._gone), gateway)

    def _welcome_all(self) -> None:
        for app in self._apps.values():
            app.send(self._welcome(app))

    def _tell_apps(self, message: Any) -> None:
        for app in self._apps.values():
            app.tell(message)

    def _app_left(self, app: Application) -> None:
        """An application has left, or is gone. Its jobs go on."""
        app.here()
        if self._apps.pop(app.name, None) is not None:
            app.duplex.detach()
            for job in self._jobs.values():
                self._no_longer_followed(job, app)
            self._drop_offers()
            self._rest()

    def _no_longer_followed(self, job: HubJob, app: Application) -> None:
        job.unfollow(app.name)
        if not job.followers and not job.record.status.ended:
            job.wait_for_somebody(self._keep)

    def _leave(self, app: Application, _message: fm.Leave) -> None:
        self._app_left(app)

    def _offer(self, app: Application, offer: fm.Offer) -> None:
        key = f"{offer.site}:{offer.key}"
        app.offers.add(key)
        if key not in self._offers:
            self._offers[key] = offer
            if offer.site in self._sites:
                self._send(offer.site, offer)

    def _drop_offers(self) -> None:
        """Has the sites forget code that neither an application nor a job needs any more."""
        needed = {key for app in self._apps.values() for key in app.offers}
        if self._offers.keys() <= needed:
            return
        for job in self._jobs.values():
            if not job.record.status.ended:
                needed |= {f"{site}:{key}" for site, key in job.submit.offers.items()}
        for key in self._offers.keys() - needed:
            offer = self._offers.pop(key)
            self._send(offer.site, fm.Drop(offer.key))

    # jobs

    def _submit(self, app: Application, message: fm.Submit) -> None:
        known = self._jobs.get(message.job_id)
        if known is not None:
            same = message.fingerprint is not None and known.record.fingerprint == message.fingerprint
            app.send(fm.Submitted(message.job_id, "same" if same else "other"))
            return
        crowded = app.slots.full and app.slots.waiting >= app.hello.queue_limit
        if app.hello.overflow == "fail" and crowded:
            app.send(fm.Submitted(message.job_id, "full", str(app.slots.waiting)))
            return
        try:
            job = HubJob(message, read_plan(message), self._job_changed, app.slots)
        except (PipelineError, ValueError) as error:
            app.send(fm.Submitted(message.job_id, "other", str(error) or type(error).__name__))
            return
        coordinator = job.coordinator
        self._jobs[job.job_id] = job
        self._table.add(coordinator)
        job.watch_changes()
        coordinator.resubmit = lambda _: self._run_again(job)
        coordinator.on_end(lambda _: self._job_ended(job))
        if message.deadline is not None:
            seconds, over = message.deadline
            coordinator.deadline(seconds, asyncio.get_running_loop().time() - over)
        if crowded:
            app.pending.append(job.job_id)
        else:
            app.send(fm.Submitted(job.job_id, "new"))
        job.follow(app, 0)
        job.followers[app.name].taken(fm.Taken(job.job_id, 0, message.until, 0))
        coordinator.waiting_for = f"a free slot (at most {app.hello.slots} of this application's jobs run at once)"
        app.slots.put(job, message.priority)
        self._admit(app.slots)
        self._rest()

    def _admit(self, slots: Slots) -> None:
        """Gives free slots to jobs that wait. A job that ends at once makes the next one free, so this is a loop."""
        if slots.admitting:
            return
        slots.admitting = True
        try:
            while (found := slots.take()) is not None:
                job, lane = found
                self._seat(job, lane)
        finally:
            slots.admitting = False
        for app in self._apps.values():
            if app.slots is slots:
                self._answer_pending(app)

    def _answer_pending(self, app: Application) -> None:
        """Tells the application that jobs are in the queue, as far as the queue has room."""
        while app.pending and app.slots.waiting - len(app.pending) < app.hello.queue_limit:
            app.send(fm.Submitted(app.pending.popleft(), "new"))

    def _seat(self, job: HubJob, lane: int) -> None:
        """Asks all sites of a job for a seat. It is launched when all have one: no token leaves before that."""
        plan = job.plan
        self._last_number += 1
        run = job.run = Run(self._last_number, len(plan.locations), lane)
        self._by_number[run.number] = job
        job.coordinator.waiting_for = "its workers to start"
        for site in plan.sites:
            if site not in self._sites:
                job.coordinator.waiting_for = f"site {site!r}"
                job.wait_for_site(self._patience, lambda: self._site_missing(job))
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
        for site in job.plan.sites:
            if site not in self._sites and job.coordinator.phase is Phase.WAITING:
                why = self._gone.get(site, "it has not come")
                job.coordinator.halt(JobStatus.ABORTED, f"site {site!r} is not there: {why}", 0)

    def _seat_those_that_wait(self, site: str) -> None:
        for job in list(self._by_number.values()):
            if job.waits_for_site and site in job.plan.sites and job.run is not None:
                lane = job.run.lane
                self._by_number.pop(job.run.number, None)
                job.stop_waiting_for_site()
                self._seat(job, lane)

    def _seated(self, job: HubJob, message: fm.Seated) -> None:
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

    def _refused(self, job: HubJob, message: fm.SeatRefused) -> None:
        site = job.plan.sites_at[message.at]
        if message.kind == "denied":
            job.coordinator.fail(PipelineDenied(site, message.reason))
        else:
            job.coordinator.fail(DfmError(f"site {site!r} cannot run the job: {message.reason}"))

    def _seat_lost(self, job: HubJob, message: fm.SeatLost) -> None:
        site = job.plan.sites_at[message.at]
        lines = tuple(cleaned(line, _LONGEST_LINE) for line in message.lines)
        detail = cleaned(message.detail, _LONGEST_LINE)
        error = WorkerLost(site, message.exit_code, detail, lines, message.out_of_memory)
        if job.coordinator.phase is Phase.WAITING:
            job.coordinator.lost_before_start(error)
        else:
            job.coordinator.lost(message.at, error)

    def _silent(self, job: HubJob, message: fm.SeatSilent) -> None:
        job.coordinator.unresponsive(message.at, job.plan.sites_at[message.at], message.seconds)

    def _responds(self, job: HubJob, message: fm.SeatResponds) -> None:
        job.coordinator.responsive(message.at, job.plan.sites_at[message.at])

    def _abandoned(self, job: HubJob, message: fm.Abandoned) -> None:
        job.coordinator.abandon(message.at, message.how)

    def _undeliverable(self, job: HubJob, message: fm.Undeliverable) -> None:
        job.coordinator.fail(DfmError(f"site {job.plan.sites_at[message.at]!r}: {message.reason}"))

    def _post(self, job: HubJob, message: msg.SendToPlace) -> None:
        deliver(self._table, self._values, job.coordinator, message, Coordinator.offer)

    def _leave_seats(self, job: HubJob, *, well: bool) -> None:
        run, job.run = job.run, None
        if run is not None:
            self._by_number.pop(run.number, None)
            for at, site in enumerate(job.plan.sites_at):
                if site in self._sites:
                    self._send(site, fm.Unseat(run.number, at, well))

    def _run_again(self, job: HubJob) -> None:
        self._leave_seats(job, well=False)
        job.runs_again()
        job.slots.release(job)
        job.slots.put(job, job.submit.priority, front=True)
        self._admit(job.slots)

    def _job_ended(self, job: HubJob) -> None:
        self._leave_seats(job, well=job.record.decided is JobStatus.FINISHED)
        job.slots.release(job)
        job.ended()
        self._push(job)  # before its last events: whoever waits for the end then knows how it came
        self._dirty.pop(job, None)
        for app in self._apps.values():
            if job.job_id in app.pending:
                app.pending.remove(job.job_id)
                app.send(fm.Submitted(job.job_id, "new"))
        self._admit(job.slots)
        self._forget_old()
        self._drop_offers()
        self._rest()

    def _forget_old(self) -> None:
        """Forgets jobs whose records the table has dropped."""
        kept = {record.job_id for record in self._table.kept}
        for job_id in [job_id for job_id, job in self._jobs.items() if job_id not in kept and not job.followers]:
            self._jobs.pop(job_id).close()

    # what applications do with jobs

    def _add_rows(self, _app: Application, message: fm.AddRows) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None:
            job.add_rows(message)
            self._job_changed(job)

    def _stop(self, _app: Application, message: fm.StopFrames) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None:
            job.coordinator.stop()
            self._job_changed(job)

    def _steered(self, message: fm.Halt | fm.Fail) -> HubJob | None:
        job = self._jobs.get(message.job_id)
        return job if job is not None and message.token in ("", job.submit.token) else None

    def _halt(self, _app: Application, message: fm.Halt) -> None:
        job = self._steered(message)
        if job is not None:
            job.coordinator.halt(JobStatus(message.status), message.reason, message.grace)
            job.coordinator.shorten(message.grace)

    def _fail(self, _app: Application, message: fm.Fail) -> None:
        job = self._steered(message)
        if job is not None:
            job.coordinator.fail(decode_error(message.error))

    def _follow(self, app: Application, message: fm.Follow) -> None:
        job = self._jobs.get(message.job_id)
        if job is None:
            app.send(fm.Expired(message.job_id, None))
            return
        try:
            job.follow(app, message.start)
        except ResultsExpired as error:
            app.send(fm.Expired(job.job_id, error.first))
        app.send(job.state())

    def _unfollow(self, app: Application, message: fm.Unfollow) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None:
            self._no_longer_followed(job, app)
            self._forget_old()
            self._rest()

    def _taken(self, app: Application, message: fm.Taken) -> None:
        job = self._jobs.get(message.job_id)
        follower = None if job is None else job.followers.get(app.name)
        if follower is not None:
            follower.taken(message)
            self._rest()

    def _find(self, app: Application, message: fm.Find) -> None:
        job = self._jobs.get(message.job_id)
        app.send(fm.Found(message.request, None if job is None else job.known()))

    def _list(self, app: Application, message: fm.ListJobs) -> None:
        app.send(fm.Listed(message.request, list(self._jobs)))

    def _asked(self, app: Application, message: fm.Asked) -> None:
        """Answers when all sites have sent what they have to say by now."""
        self._last_echo += 1
        sites = set(self._sites)
        if not sites:
            app.send(message)
            return
        self._echoes[self._last_echo] = (app, message, sites)
        for site in sites:
            self._send(site, fm.Echo(self._last_echo))

    def _echoed(self, peer: str, request: int) -> None:
        app, message, sites = self._echoes.get(request, (None, None, set()))
        sites.discard(peer)
        if app is not None and not sites:
            del self._echoes[request]
            app.send(message)

    def _forget(self, _app: Application, message: fm.Forget) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None and job.record.status.ended:
            job.close()
            del self._jobs[message.job_id]
            self._table.forget(message.job_id)
            self._rest()

    def _job_changed(self, job: HubJob) -> None:
        if job.followers:
            self._dirty[job] = None
            if self._state_timer is None:
                self._state_timer = asyncio.get_running_loop().call_later(_STATE_EVERY, self._push_states)

    def _push_states(self) -> None:
        self._state_timer = None
        dirty, self._dirty = self._dirty, {}
        for job in dirty:
            self._push(job)

    def _push(self, job: HubJob) -> None:
        if job.followers:
            state = job.state()
            for follower in job.followers.values():
                follower.app.send(state)


def _nothing(_site: str) -> None:
    """Nobody else wants to know."""


def _without_cause(message: Any) -> Any:
    """An error of another organisation is text: nothing of it is unpickled."""
    if type(message) in (msg.OperationError, msg.JobBroken) and message.error.cause:
        return msgspec.structs.replace(message, error=msgspec.structs.replace(message.error, cause=b""))
    return message


_SEATS: Final[dict[type, Callable[[Hub, HubJob, Any], None]]] = {
    fm.Seated: Hub._seated,  # noqa: SLF001 - same module
    fm.SeatRefused: Hub._refused,  # noqa: SLF001
    fm.SeatLost: Hub._seat_lost,  # noqa: SLF001
    fm.SeatSilent: Hub._silent,  # noqa: SLF001
    fm.SeatResponds: Hub._responds,  # noqa: SLF001
    fm.Abandoned: Hub._abandoned,  # noqa: SLF001
    fm.Undeliverable: Hub._undeliverable,  # noqa: SLF001
    msg.SendToPlace: Hub._post,  # noqa: SLF001
}
_APPS: Final[dict[type, Callable[[Hub, Application, Any], None]]] = {
    fm.Offer: Hub._offer,  # noqa: SLF001 - same module
    fm.Submit: Hub._submit,  # noqa: SLF001
    fm.AddRows: Hub._add_rows,  # noqa: SLF001
    fm.StopFrames: Hub._stop,  # noqa: SLF001
    fm.Halt: Hub._halt,  # noqa: SLF001
    fm.Fail: Hub._fail,  # noqa: SLF001
    fm.Follow: Hub._follow,  # noqa: SLF001
    fm.Unfollow: Hub._unfollow,  # noqa: SLF001
    fm.Taken: Hub._taken,  # noqa: SLF001
    fm.Find: Hub._find,  # noqa: SLF001
    fm.ListJobs: Hub._list,  # noqa: SLF001
    fm.Asked: Hub._asked,  # noqa: SLF001
    fm.Forget: Hub._forget,  # noqa: SLF001
    fm.Leave: Hub._leave,  # noqa: SLF001
}
