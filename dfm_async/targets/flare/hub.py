"""The hub of a host job: runs the coordinators of all jobs, at the server, for applications that come and go."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec

from dfm_async.base.signals import Throttle
from dfm_async.base.tasks import OwnedTasks, completed
from dfm_async.base.text import cleaned
from dfm_async.base.wall_clock import wall_time
from dfm_async.engine.coordinator import Coordinator
from dfm_async.engine.durable_jobs import LeftOver, runs_elsewhere
from dfm_async.engine.engine import Engine, Jobs, starts_later
from dfm_async.engine.job_table import JobTable
from dfm_async.engine.machine import Phase
from dfm_async.engine.run import Run
from dfm_async.errors import (
    DfmError,
    EventsFull,
    JobInterrupted,
    JobOwned,
    ParameterError,
    PipelineDenied,
    PipelineError,
    ResultsExpired,
    StoreError,
    WorkerLost,
)
from dfm_async.model.ids import Location
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.results.event_codec import decode_error
from dfm_async.results.record import JobRecord
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.event_messages import OpaqueValues, rows_of
from dfm_async.targets.flare.hub_job import Application, HubJob, read_plan
from dfm_async.targets.flare.hub_journal import HubJournal, JournalPlace, KeptSubmission
from dfm_async.targets.flare.node import HostNode
from dfm_async.targets.flare.protocol import ROUTES, Route
from dfm_async.targets.flare.remote_hosts import Membership, RemoteHosts
from dfm_async.wire import messages as msg

_log = logging.getLogger(__name__)

_LONGEST_LINE: Final = 4096
_MOST_LINES: Final = 100
_LONGEST_ERROR: Final = 256 * 1024
_FIRST: Final = 60.0
"""For how many seconds the hub waits for its first application, at least."""
_TEND: Final = 10.0
"""The number of seconds between two looks for jobs without a hub, and for old ones."""
_NOT_FOUND: Final = fm.FoundJob(0, None)
_ELSEWHERE: Final = fm.FoundJob(0, None, elsewhere=True)
_STATE_INTERVAL: Final = 0.01
"""The number of seconds between two reports to applications of how far a job is."""


class Hub:
    """Takes jobs from applications and runs them at the sites. Runs as long as somebody needs it.

    Args:
        host_job: the id of the FLARE job.
        version: our version.
        deployed: the sites that the FLARE job was sent to.
        options: for how long ended jobs are kept.
        linger: for how many seconds it stays when nobody needs it.
        largest: how many bytes one message to it may have.
        place: where the jobs of the user are kept; None: they end with the hub.
    """

    def __init__(
        self,
        host_job: str,
        version: str,
        deployed: list[str],
        options: LocalOptions,
        linger: float,
        largest: int,
        place: JournalPlace | None = None,
    ) -> None:
        self.host_job = host_job
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the host job ends, when it does."""
        self._version = version
        self._node: HostNode | None = None
        self._on_site_lost: Callable[[str], None] | None = None
        self._table: JobTable[Coordinator] = JobTable(options)
        self._jobs: dict[str, HubJob] = {}
        self._members = Membership(deployed)
        self._hosts = RemoteHosts(self._members, self._send, self._request)
        self._engine = Engine(self._table, OpaqueValues(), lambda _: self._hosts, self._accepted, self._requeued)
        self._apps: dict[str, Application] = {}
        self._offers: dict[str, fm.Offer] = {}
        self._reports: dict[tuple[str, str, Location], fm.SiteReport] = {}
        self._echoes: dict[int, tuple[Application, fm.Asked, set[str]]] = {}
        self._last_echo = 0
        self._pending: dict[str, Application] = {}
        """Jobs whose submission is answered when the queue has room for them."""
        self._dirty: dict[HubJob, None] = {}
        self._states = Throttle(_STATE_INTERVAL, self._push_states, delay=_STATE_INTERVAL)
        self._linger = linger
        self._largest = largest
        self._keep = 3600.0
        self._idle: asyncio.TimerHandle | None = None
        self._used = False
        """Whether an application has come."""
        self._tasks = OwnedTasks()
        self._journal = None if place is None else HubJournal(place, self._table, self._spawn, self._written)
        self._opened = AsyncExitStack()
        """Closes the journal."""
        self._held: dict[str, list[tuple[Application, Any]]] = {}
        """Messages about jobs that are just being written to the journal, or read from it."""
        self._earlier: dict[tuple[int, int], Jobs] = {}
        """The slots of jobs of earlier hubs, by the lanes and the slots of their applications."""
        self._schedule_end()

    @property
    def sites(self) -> Iterable[str]:
        """The sites that are present."""
        return self._members.sites

    def attach_node(self, node: HostNode, on_site_lost: Callable[[str], None]) -> None:
        """Send messages by a node from now on; ``on_site_lost``: is called with each site that is lost."""
        self._node = node
        self._on_site_lost = on_site_lost

    def _send(self, site: str, message: Any) -> None:
        if self._node is not None:
            self._node.send(site, message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn(work, "dfm-hub")

    # lifecycle

    async def open(self) -> None:
        """Open the journal, if there is one, and go on with the jobs of earlier hubs of the user.

        Raises:
            StoreError: the journal cannot be opened.
        """
        if self._journal is not None:
            await self._opened.enter_async_context(self._journal.opened())
            self._spawn(self._tend(self._journal))

    def _schedule_end(self) -> None:
        """End the host job after the linger time, unless it is needed now or before."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._apps or self._held or any(not job.record.status.ended for job in self._jobs.values()):
            return
        unread = any(job.unread for job in self._jobs.values())
        seconds = max(self._linger, self._keep) if unread else self._linger
        if not self._used:  # the application that has started it is about to come
            seconds = max(seconds, _FIRST)
        self._idle = asyncio.get_running_loop().call_later(seconds, self.end, "nobody needs it any longer")

    def end(self, reason: str) -> None:
        """End the host job."""
        if not self.ended.done():
            self.ended.set_result(reason)

    async def close(self, reason: str) -> None:
        """End all jobs, and notify the applications of the end of the host job. With a journal, another one goes on."""
        await self._tasks.close()
        if self._journal is not None:
            for job in self._jobs.values():
                job.close()  # applications follow the next hub
        status = JobStatus.ABORTED if self._journal is None else JobStatus.INTERRUPTED
        for job in list(self._jobs.values()):
            if job.coordinator.phase is not Phase.ENDED:
                job.coordinator.halt(status, reason, 0)
                for at in range(len(job.plan.locations)):
                    job.coordinator.abandon(at)
        await asyncio.sleep(0)  # followers get the last events
        for job in self._jobs.values():
            job.close()
        try:
            await self._opened.aclose()
        except StoreError as error:
            _log.warning("the last events of jobs are not in the journal: %s", error)
        if self._idle is not None:
            self._idle.cancel()
        self._states.cancel()
        for app in self._apps.values():
            app.end_absence()
            app.send(fm.Bye(reason))
        self._table.close()

    def release_sites(self, reason: str) -> None:
        """Let the sites leave. This comes last: applications may be connected to the gateway of one."""
        for site in self._members.sites:
            self._send(site, fm.Bye(reason))

    # sites

    def receive(self, peer: str, message: Any) -> None:
        """Take a message of a site."""
        if not self._members.expects(peer):
            return
        if peer in self._members.gone and type(message) is not fm.SiteHello:
            # It was taken for lost: what it sends belongs to jobs that have ended.
            eviction = self._members.eviction(peer)
            if eviction is not None:
                self._send(peer, eviction)
            return
        route = ROUTES.get(type(message))
        if route is Route.LOCATION_TO_HUB:
            run = self._run(peer, message)
            job = None if run is None else self._jobs.get(run.coordinator.record.job_id)
            if job is not None and job.may_send(message):
                self._engine.receive(_as_text(message))
            elif job is not None:
                _log.warning(
                    "site %s reports results or ends of job %s that are not its own: ignored", peer, job.job_id
                )
        elif route is Route.ASSIGNMENT_TO_HUB:
            run = self._run(peer, message)
            if run is not None:
                _ASSIGNMENTS[type(message)](run, message)
        elif route is Route.SITE_TO_HUB:
            _SITES[type(message)](self, peer, message)

    def _run(self, peer: str, message: Any) -> Run | None:
        """Find the run that a message is about, if it comes from the site of its location, and is not late.

        Any site of a job may report that another location cannot be reached.
        """
        run = self._engine.run(message.job)
        if run is None:
            return None
        sites = run.coordinator.plan.sites_at
        senders = sites if isinstance(message, fm.Undeliverable) else sites[message.at : message.at + 1]
        if not 0 <= message.at < len(sites) or peer not in senders:
            job_id = run.coordinator.record.job_id
            _log.warning("site %s sends a message about a location of job %s that is not its own", peer, job_id)
            return None
        return run

    def _request(self, run: Run, at: int) -> fm.Assign:
        return self._jobs[run.coordinator.record.job_id].request(run.number, at, run.lane)

    def refused(self, peer: str, message: Any, reason: str) -> None:
        """Note that a site does not take a message, and never will."""
        run = self._engine.run(getattr(message, "job", -1))
        if run is None:
            _log.warning("site %s does not take %s: %s", peer, type(message).__name__, reason)
        else:
            _undeliverable(run, fm.Undeliverable(message.job, message.at, reason))

    def _site_logs(self, peer: str, message: fm.LogLines) -> None:
        if message.site == peer:
            for app in self._apps.values():
                app.notify(message)

    def _peer_lost(self, peer: str, message: fm.PeerLost) -> None:
        """Two sites do not reach each other any longer: jobs that need both cannot go on."""
        if self._members.has(message.site, message.incarnation):  # else it is known already that it was lost
            reason = f"it cannot reach site {message.site!r} any longer: {message.reason}"
            for run in self._engine.runs_at(peer, message.site):
                self._lose(run, peer, reason)

    def _lose(self, run: Run, site: str, reason: str) -> None:
        error = WorkerLost(site, None, reason)
        if not run.started and run.may_restart:
            self._engine.restart(run)
            return
        for at, name in enumerate(run.coordinator.plan.sites_at):
            if name == site and self._engine.run(run.number) is run:
                run.coordinator.lost(at, error)

    def _site_reports(self, peer: str, report: fm.SiteReport) -> None:
        """Report workers to the applications whose code they run."""
        if report.location.site != peer:
            return
        key = (peer, report.offer, report.location)
        if report.workers:
            self._reports[key] = report
        else:
            self._reports.pop(key, None)
        for app in self._apps.values():
            if not report.offer or f"{peer}:{report.offer}" in app.offers:
                app.notify(report)

    def _site_came(self, peer: str, hello: fm.SiteHello) -> None:
        if hello.site != peer:
            _log.warning("site %s is refused: it reports the name %s", peer, hello.site)
            return
        members = self._members
        if hello.protocol != fm.PROTOCOL:
            text = f"it has version {hello.protocol} of the protocol, not {fm.PROTOCOL}: install one version"
            members.unfit(peer, text)
        else:
            if peer in members.sites:  # before its loss was detected
                self.lost_site(peer, "it has started again")
            if self._node is not None:
                self._node.drop(peer)
            members.came(hello)
            for offer in self._offers.values():
                if offer.site == peer:
                    self._send(peer, offer)
            self._hosts.site_came(peer)
        self._welcome_all()

    def lost_site(self, site: str, reason: str, incarnation: str = "") -> None:
        """Note that a site is lost; ``incarnation``: the one that is lost, if it is known."""
        if not self._members.lost(site, reason, incarnation):
            return
        _log.warning("site %s was lost: %s", site, reason)
        for key in [key for key in self._reports if key[0] == site]:
            self._site_reports(site, msgspec.structs.replace(self._reports[key], workers=()))
        for request in list(self._echoes):
            self._answer_echo(site, request)
        for other in self._members.sites:
            self._send(other, fm.SiteLost(site))
        for run in self._engine.runs_at(site):
            self._lose(run, site, f"the site was lost: {reason}")
        if self._on_site_lost is not None:
            self._on_site_lost(site)
        self._welcome_all()

    # applications

    def application(self, session: str) -> Application | None:
        """Find an application by its session."""
        return self._apps.get(session)

    def attach(self, attach: fm.Attach) -> fm.Attached:
        """Take an application that connects, or reconnects. The caller attaches the transport to its stream."""
        app = self._apps.get(attach.session)
        if attach.hello.protocol != fm.PROTOCOL:
            theirs = attach.hello.version
            return fm.Attached(0, f"the federation has version {self._version} of dfm_async, the application {theirs}")
        if self.ended.done():
            return fm.Attached(0, f"the host job has ended: {self.ended.result()}")
        if app is None and not attach.new:
            return fm.Attached(0, "the hub does not know this application any longer")
        if app is None:
            self._used = True
            app = self._apps[attach.session] = Application(attach, self._from_app, self._app_has_room, self._largest)
            hello = attach.hello
            self._linger, self._keep, self._hosts.start_timeout = hello.linger, hello.keep, hello.start
            app.send(self._welcome(app))
            for report in self._reports.values():
                if not report.offer:
                    app.notify(report)
        app.end_absence()
        self._schedule_end()
        return fm.Attached(app.stream.have)

    def begin_absence(self, app: Application) -> None:
        """Start the absence timeout of an application that is connected only while it sends commands."""
        app.end_absence()
        app.absence = asyncio.get_running_loop().call_later(app.hello.timeout, self._app_left, app)

    def detach(self, app: Application, connection: str) -> None:
        """Note that a connection of an application has ended. It may reconnect by another transport."""
        if app.connection == connection and self._apps.get(app.name) is app:
            app.connection = ""
            app.stream.detach()
            self.begin_absence(app)

    def _from_app(self, app: Application, data: bytes | memoryview) -> None:
        try:
            message = fm.decode_app(data)
            if self._journal is None:
                self._process(app, message)
            else:
                self._process_in_turn(self._journal, app, message)
        except Exception:  # noqa: BLE001 - a message of one application must not harm the others
            _log.exception("cannot process a message of application %s", app.name)

    def _process(self, app: Application, message: Any) -> None:
        handler = _APPS.get(type(message))
        if handler is not None:
            handler(self, app, message)
        elif (job := self._jobs.get(message.job_id)) is not None:
            _JOBS[type(message)](self, app, job, message)

    def _process_in_turn(self, journal: HubJournal, app: Application, message: Any) -> None:
        """Process a message behind the reading and the writing of the job that it is about."""
        job_id: str = message.spec.job_id if type(message) is fm.Submit else getattr(message, "job_id", "")
        if job_id in self._held:
            self._held[job_id].append((app, message))
        elif type(message) in _READ_FIRST and not self._has(job_id):
            self._held[job_id] = [(app, message)]
            self._spawn(self._load(journal, job_id))
        else:
            self._process(app, message)

    def _has(self, job_id: str) -> bool:
        """Return whether a job is known here, and was not interrupted because it could not be written."""
        job = self._jobs.get(job_id)
        return job is not None and job.record.status is not JobStatus.INTERRUPTED

    def _app_has_room(self, app: Application) -> None:
        if app.held_up and not app.full:
            app.held_up = False
            for job in self._jobs.values():
                if app.name in job.followers:
                    job.record.log.changed.notify()

    def _welcome(self, app: Application) -> fm.Welcome:
        members = self._members
        home = members.sites.get(app.hello.homesite)
        sites = {
            name: fm.SiteInfo(hello.operations, hello.allow_code, hello.problem, hello.python)
            for name, hello in members.sites.items()
        }
        return fm.Welcome(
            protocol=fm.PROTOCOL,
            version=self._version,
            host_job=self.host_job,
            sites=sites,
            deployed=members.deployed,
            gone=dict(members.gone),
            gateway=("", "") if home is None else (home.host, home.gateway),
            largest=self._largest,
            began=members.began,
            since=dict(members.since),
            journal=self._journal is not None,
        )

    def _welcome_all(self) -> None:
        for app in self._apps.values():
            app.send(self._welcome(app))

    def _app_left(self, app: Application, _message: fm.Leave | None = None) -> None:
        """Note that an application has left, or is gone. Its jobs go on."""
        app.end_absence()
        if self._apps.pop(app.name, None) is not None:
            app.stream.detach()
            for job in self._jobs.values():
                self._end_following(job, app)
            self._drop_offers()
            self._schedule_end()

    def _end_following(self, job: HubJob, app: Application) -> None:
        job.unfollow(app.name)
        if not job.followers and not job.record.status.ended:
            job.wait_for_follower(self._keep)

    def _offer(self, app: Application, offer: fm.Offer) -> None:
        key = f"{offer.site}:{offer.key}"
        # An application whose code has changed needs the former only for jobs that have it.
        app.offers = {other for other in app.offers if not other.startswith(f"{offer.site}:")} | {key}
        if key not in self._offers:
            self._take_offer(offer)
        self._drop_offers()

    def _take_offer(self, offer: fm.Offer) -> None:
        self._offers[f"{offer.site}:{offer.key}"] = offer
        if offer.site in self._members.sites:
            self._send(offer.site, offer)

    def _drop_offers(self) -> None:
        """Have the sites forget code that neither an application nor a job needs any longer."""
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
        job_id = message.spec.job_id
        known = self._jobs.get(job_id)
        if known is not None:
            self._submitted_before(app, message, known.record.fingerprint, known.submit.token)
            return
        scheduler, later = app.scheduler, starts_later(message.spec)
        crowded = not later and scheduler.overflows
        if (app.hello.overflow == "fail" and crowded) or (later and scheduler.full_of_delayed):
            app.send(fm.Submitted(job_id, "full", str(scheduler.delayed if later else scheduler.waiting)))
            return
        try:
            job = HubJob(message, read_plan(message))
        except (PipelineError, ValueError) as error:
            app.send(fm.Submitted(job_id, "other", str(error) or type(error).__name__))
            return
        if self._journal is None:
            self._begin(app, job, message)
        else:
            self._held[job_id] = []
            self._spawn(self._keep_job(self._journal, app, job, message))

    def _submitted_before(self, app: Application, message: fm.Submit, fingerprint: str | None, token: str) -> None:
        """Answer the submission of a job whose id is in use."""
        job_id = message.spec.job_id
        if token and token == message.token:  # by the same submission, whose answer was lost with an earlier hub
            app.send(fm.Submitted(job_id, "new"))
            self._jobs[job_id].follow(app, 0)
            self._jobs[job_id].followers[app.name].taken(fm.EventsTaken(job_id, 0, message.until, 0))
            app.send(self._jobs[job_id].state())
            return
        same = message.spec.fingerprint is not None and fingerprint == message.spec.fingerprint
        app.send(fm.Submitted(job_id, "same" if same else "other"))

    def _begin(self, app: Application, job: HubJob, message: fm.Submit) -> None:
        """Run a new job as soon as it gets a slot and workers."""
        scheduler, later = app.scheduler, starts_later(message.spec)
        if message.spec.start_at is None:
            job.coordinator.watch_deadline(asyncio.get_running_loop().time() - message.elapsed)
        self._add(job)
        if not later and scheduler.overflows:
            self._pending[job.job_id] = app
        else:
            app.send(fm.Submitted(job.job_id, "new"))
        if self._apps.get(app.name) is app:
            job.follow(app, 0)
            job.followers[app.name].taken(fm.EventsTaken(job.job_id, 0, message.until, 0))
        else:  # it has left meanwhile
            job.wait_for_follower(self._keep)
        self._engine.submit(job.coordinator, scheduler)
        if later:
            app.send(job.state())  # what it waits for
        self._schedule_end()

    def _add(self, job: HubJob) -> None:
        self._jobs[job.job_id] = job
        self._table.add(job.coordinator)
        job.coordinator.on_end(lambda _: self._job_ended(job))

    def _accepted(self, coordinator: Coordinator) -> None:
        """Report to an application that the queue has room for its job."""
        app = self._pending.pop(coordinator.record.job_id, None)
        if app is not None:
            app.send(fm.Submitted(coordinator.record.job_id, "new"))

    def _requeued(self, coordinator: Coordinator) -> None:
        self._jobs[coordinator.record.job_id].runs_again()

    def _job_ended(self, job: HubJob) -> None:
        job.ended()
        self._push(job)  # before its last events: waiters for the end then know its cause
        self._dirty.pop(job, None)
        self._forget_old()
        self._drop_offers()
        self._schedule_end()

    def _forget_old(self) -> None:
        """Forget jobs whose records the table has dropped."""
        kept = {record.job_id for record in self._table.kept}
        for job_id in [job_id for job_id, job in self._jobs.items() if job_id not in kept and not job.followers]:
            self._jobs.pop(job_id).close()

    # the journal

    async def _keep_job(self, journal: HubJournal, app: Application, job: HubJob, message: fm.Submit) -> None:
        """Write a new job to the journal, and then begin it."""
        job_id, hello = job.job_id, app.hello
        began = wall_time() - message.elapsed
        kept = KeptSubmission(
            message.plan, message.nets, message.offers, message.token, hello.lanes, hello.slots, began
        )
        keys = [f"{site}:{key}" for site, key in message.offers.items()]
        offers = [self._offers[key] for key in keys if key in self._offers]
        created, problem = False, ""
        try:
            async with journal.lock:
                created = await journal.keep(job.record, rows_of(message.rows), kept, offers, stopped=message.stopped)
            if not created:
                await self._recall(journal, job_id)
        except DfmError as error:
            problem = str(error)
        if created:
            self._begin(app, job, message)
        elif problem:
            app.send(fm.Submitted(job_id, "other", problem))
        elif (known := self._jobs.get(job_id)) is not None:
            self._submitted_before(app, message, known.record.fingerprint, known.submit.token)
        else:
            stored = await journal.store.find(job_id)
            self._submitted_before(app, message, None if stored is None else stored.fingerprint, "")
        self._go_on(job_id)

    def _go_on(self, job_id: str, found: fm.FoundJob | None = None) -> None:
        """Process the messages that have waited for the journal; ``found``: why it does not go on here."""
        for app, message in self._held.pop(job_id, ()):
            if type(message) is fm.Find and job_id not in self._jobs:
                app.send(msgspec.structs.replace(found or _NOT_FOUND, request=message.request))
            elif job_id in self._held:
                self._held[job_id].append((app, message))
            else:
                self._process(app, message)
        self._schedule_end()

    async def _load(self, journal: HubJournal, job_id: str) -> None:
        found = None
        try:
            found = await self._recall(journal, job_id)
        except DfmError as error:
            _log.warning("job %s of the journal cannot be read: %s", job_id, error)
        finally:
            self._go_on(job_id, found)

    async def _recall(self, journal: HubJournal, job_id: str) -> fm.FoundJob | None:
        """Know a job of the journal, and go on with it if it has not ended. Return why not, if that is so.

        Raises:
            DfmError: it cannot be read or written.
        """
        async with journal.lock:
            stored = await journal.store.find(job_id)
            if stored is None or self._has(job_id):
                return None
            kept = journal.submission(stored)
            if stored.status.terminal:
                record = journal.job_of(stored)
                job = HubJob(_submit_of(record, kept), record.plan, record)
                job.coordinator.ended_before()
                job.ended()
                self._jobs[job_id] = job
                return None
            if runs_elsewhere(stored):
                return _ELSEWHERE
            if missing := journal.missing(stored, self._members.deployed):
                return fm.FoundJob(0, None, missing=missing)
            try:
                left = await completed(journal.take_over(job_id, more=True), journal.give_back, asyncio.Task.cancel)
            except JobOwned:  # its hub is about to end
                return _ELSEWHERE
        await self._resume(journal, left, kept)
        return None

    async def _resume(self, journal: HubJournal, left: LeftOver, kept: KeptSubmission) -> None:
        """Go on with a job of an earlier hub."""
        record = left.record
        former = self._jobs.pop(record.job_id, None)
        if former is not None:
            former.close()
        submit = _submit_of(record, kept)
        job = HubJob(submit, read_plan(submit), record)
        job.resume(left)
        self._add(job)
        job.wait_for_follower(self._keep)
        for site, key in kept.offers.items():
            if f"{site}:{key}" not in self._offers:
                offer = await journal.code(site, key)
                if offer is None:
                    problem = f"the code that the application has brought for site {site!r} is not kept any longer"
                    job.coordinator.fail(DfmError(f"{problem}: execute the job again"))
                    return
                self._take_offer(offer)
        if record.spec.start_at is None:
            elapsed = max(0.0, wall_time() - kept.began)
            job.coordinator.watch_deadline(asyncio.get_running_loop().time() - elapsed)
        sharing = (kept.lanes, kept.slots)
        scheduler = self._earlier.setdefault(sharing, Jobs(*sharing, sys.maxsize))
        _log.info("job %s goes on after the end of an earlier host job", record.job_id)
        self._engine.submit(job.coordinator, scheduler)

    async def _tend(self, journal: HubJournal) -> None:
        """Go on with jobs whose hubs have ended, and delete old ones, until this is cancelled."""
        while True:
            try:
                async for stored in journal.unfinished():
                    job_id = stored.job_id
                    if job_id in self._jobs or job_id in self._held or runs_elsewhere(stored):
                        continue
                    if not journal.missing(stored, self._members.deployed):
                        self._held[job_id] = []
                        await self._load(journal, job_id)
                await journal.tidy()
            except DfmError as error:
                _log.warning("the journal cannot be tended: %s", error)
            await asyncio.sleep(_TEND)

    def _written(self, jobs: Iterable[str]) -> None:
        for job_id in jobs:
            self._job_changed(job_id)

    # what applications do with jobs

    def _add_rows(self, app: Application, job: HubJob, message: fm.AddRows) -> None:
        coordinator, journal = job.coordinator, job.record.journal
        first, rows = coordinator.frames.added, rows_of(message.rows)
        coordinator.add(rows)
        self._job_changed(job.job_id)
        if journal is not None and coordinator.frames.added > first:  # the application keeps them until then
            stored = fm.RowsStored(job.job_id, first, len(rows))
            journal.when_written(lambda: app.send(stored))

    def _stop(self, _app: Application, job: HubJob, _message: fm.StopFrames) -> None:
        job.coordinator.stop()
        self._job_changed(job.job_id)

    def _send_event(self, app: Application, job: HubJob, message: fm.SendEvent) -> None:
        taken = fm.EventTaken(job.job_id, message.request)
        try:
            job.coordinator.take_event(message.name, message.value, message.frame)
        except ParameterError as error:
            full = isinstance(error, EventsFull)
            taken = fm.EventTaken(job.job_id, message.request, tuple(error.problems), full)
        except JobInterrupted as error:
            taken = fm.EventTaken(job.job_id, message.request, (str(error),))
        journal = job.record.journal
        if journal is None or taken.problems:
            app.send(taken)
        else:
            journal.flush()
            journal.when_written(lambda: app.send(taken))

    def _halt(self, _app: Application, job: HubJob, message: fm.Halt) -> None:
        if message.token in ("", job.submit.token):
            job.coordinator.halt(JobStatus(message.status), message.reason, message.grace)
            job.coordinator.shorten(message.grace)

    def _fail(self, _app: Application, job: HubJob, message: fm.Fail) -> None:
        if message.token in ("", job.submit.token):
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

    def _unfollow(self, app: Application, job: HubJob, _message: fm.Unfollow) -> None:
        self._end_following(job, app)
        self._forget_old()
        self._schedule_end()

    def _taken(self, app: Application, job: HubJob, message: fm.EventsTaken) -> None:
        follower = job.followers.get(app.name)
        if follower is not None:
            follower.taken(message)
            self._schedule_end()

    def _find(self, app: Application, message: fm.Find) -> None:
        job = self._jobs.get(message.job_id)
        app.send(fm.FoundJob(message.request, None if job is None else job.known()))

    def _list(self, app: Application, message: fm.ListJobs) -> None:
        if self._journal is None:
            app.send(fm.Listed(message.request, list(self._jobs)))
        else:
            self._spawn(self._list_journal(self._journal, app, message))

    async def _list_journal(self, journal: HubJournal, app: Application, message: fm.ListJobs) -> None:
        found = dict.fromkeys(self._jobs)
        try:
            found = dict.fromkeys(await journal.ended()) | dict.fromkeys(
                [job.job_id async for job in journal.unfinished()]
            )
        except StoreError as error:
            _log.warning("the jobs of the journal cannot be listed: %s", error)
        app.send(fm.Listed(message.request, [*found, *(job_id for job_id in self._jobs if job_id not in found)]))

    def _asked(self, app: Application, message: fm.Asked) -> None:
        """Answer when all sites have sent what they have queued by now."""
        self._last_echo += 1
        sites = set(self._members.sites)
        if not sites:
            app.send(message)
            return
        self._echoes[self._last_echo] = (app, message, sites)
        for site in sites:
            self._send(site, fm.Echo(self._last_echo))

    def _answer_echo(self, peer: str, request: int) -> None:
        app, message, sites = self._echoes.get(request, (None, None, set()))
        sites.discard(peer)
        if app is not None and not sites:
            del self._echoes[request]
            app.send(message)

    def _forget(self, _app: Application, job: HubJob, message: fm.Forget) -> None:
        if job.record.status.ended:
            job.close()
            del self._jobs[message.job_id]
            self._table.forget(message.job_id)
            if self._journal is not None:
                self._held[message.job_id] = []
                self._spawn(self._delete(self._journal, message.job_id))
            self._schedule_end()

    async def _delete(self, journal: HubJournal, job_id: str) -> None:
        try:
            await journal.delete(job_id)
        except DfmError as error:
            _log.warning("job %s cannot be deleted from the journal: %s", job_id, error)
        finally:
            self._go_on(job_id)

    def _read(self, _app: Application, job: HubJob, message: fm.Read) -> None:
        job.ever_read = max(job.ever_read, message.position)

    def _job_changed(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is not None and job.followers:
            self._dirty[job] = None
            self._states.request()

    def _push_states(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for job in dirty:
            self._push(job)

    def _push(self, job: HubJob) -> None:
        if job.followers:
            state = job.state()
            for follower in job.followers.values():
                follower.app.send(state)


def _submit_of(record: JobRecord, kept: KeptSubmission) -> fm.Submit:
    """Return what was submitted, as far as it is kept: parameter sets are read on their own."""
    return fm.Submit(
        spec=record.spec,
        plan=kept.plan,
        nets=kept.nets,
        offers=kept.offers,
        rows=b"",
        stopped=False,
        elapsed=0.0,
        trace=None,
        token=kept.token,
        until=0,
    )


def _as_text(message: Any) -> Any:
    """Make an error of another organisation text that can be shown: nothing of it is unpickled."""
    if type(message) not in (msg.OperationError, msg.JobBroken):
        return message
    error = message.error
    error = msgspec.structs.replace(
        error,
        operation=cleaned(error.operation, _LONGEST_LINE),
        node=cleaned(error.node, _LONGEST_LINE),
        type_name=cleaned(error.type_name, _LONGEST_LINE),
        message=cleaned(error.message, _LONGEST_ERROR),
        traceback=cleaned(error.traceback, _LONGEST_ERROR),
        cause=b"",
    )
    return msgspec.structs.replace(message, error=error)


def _assignment_refused(run: Run, message: fm.AssignmentRefused) -> None:
    site = run.locations[message.at].site
    if message.kind == "denied":
        run.refused(message.at, PipelineDenied(site, message.reason))
    else:
        run.refused(message.at, DfmError(f"site {site!r} cannot run the job: {message.reason}"))


def _assignment_lost(run: Run, message: fm.AssignmentLost) -> None:
    lines = tuple(cleaned(line, _LONGEST_LINE) for line in message.lines[-_MOST_LINES:])
    detail = cleaned(message.detail, _LONGEST_LINE)
    site = run.locations[message.at].site
    run.lost(message.at, WorkerLost(site, message.exit_code, detail, lines, message.out_of_memory))


def _undeliverable(run: Run, message: fm.Undeliverable) -> None:
    site, reason = run.locations[message.at].site, cleaned(message.reason, _LONGEST_LINE)
    run.coordinator.fail(DfmError(f"a message to site {site!r} cannot be delivered: {reason}"))


_ASSIGNMENTS: Final[dict[type, Callable[[Run, Any], None]]] = {
    fm.Assigned: lambda run, message: run.assigned(message.at),
    fm.AssignmentRefused: _assignment_refused,
    fm.AssignmentLost: _assignment_lost,
    fm.WorkerUnresponsive: lambda run, message: run.notice(message.at, "unresponsive", message.seconds),
    fm.WorkerResponsive: lambda run, message: run.notice(message.at, "responsive"),
    fm.WorkerRetired: lambda run, message: run.notice(message.at, "retired", why=cleaned(message.why, _LONGEST_LINE)),
    fm.WorkerBound: lambda run, message: run.notice(message.at, "bound", why=cleaned(message.why, _LONGEST_LINE)),
    fm.Abandoned: lambda run, message: run.abandon(message.at, message.how),
    fm.Undeliverable: _undeliverable,
}
_SITES: Final[dict[type, Callable[[Hub, str, Any], None]]] = {
    fm.SiteHello: Hub._site_came,  # noqa: SLF001 - same module
    fm.SiteReport: Hub._site_reports,  # noqa: SLF001
    fm.LogLines: Hub._site_logs,  # noqa: SLF001
    fm.PeerLost: Hub._peer_lost,  # noqa: SLF001
    fm.Echoed: lambda hub, peer, message: hub._answer_echo(peer, message.request),  # noqa: SLF001
}
_APPS: Final[dict[type, Callable[[Hub, Application, Any], None]]] = {
    fm.Offer: Hub._offer,  # noqa: SLF001 - same module
    fm.Submit: Hub._submit,  # noqa: SLF001
    fm.Follow: Hub._follow,  # noqa: SLF001
    fm.Find: Hub._find,  # noqa: SLF001
    fm.ListJobs: Hub._list,  # noqa: SLF001
    fm.Asked: Hub._asked,  # noqa: SLF001
    fm.Leave: Hub._app_left,  # noqa: SLF001
}
_JOBS: Final[dict[type, Callable[[Hub, Application, HubJob, Any], None]]] = {
    fm.AddRows: Hub._add_rows,  # noqa: SLF001 - same module
    fm.StopFrames: Hub._stop,  # noqa: SLF001
    fm.SendEvent: Hub._send_event,  # noqa: SLF001
    fm.Halt: Hub._halt,  # noqa: SLF001
    fm.Fail: Hub._fail,  # noqa: SLF001
    fm.Unfollow: Hub._unfollow,  # noqa: SLF001
    fm.EventsTaken: Hub._taken,  # noqa: SLF001
    fm.Forget: Hub._forget,  # noqa: SLF001
    fm.Read: Hub._read,  # noqa: SLF001
}
"""What applications send about jobs; ignored if the job is not known."""
_READ_FIRST: Final = frozenset({fm.Find, fm.Follow, fm.Forget})
"""What applications send about jobs that the hub may have in its journal only."""
