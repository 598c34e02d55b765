"""The hub of a carrier: runs the coordinators of all jobs, at the server, for applications that come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgspec

from dfm_async.errors import PipelineError, ResultsExpired
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.results.error_values import decode_error
from dfm_async.targets.coordinator import FOR_COORDINATOR, Coordinator, Phase
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.application import Application
from dfm_async.targets.flare.hub_job import HubJob, read_plan
from dfm_async.targets.flare.roster import Roster
from dfm_async.targets.flare.sealed import SealedValues
from dfm_async.targets.flare.seating import OF_SEATS, Seating
from dfm_async.targets.flare.slots import Slots
from dfm_async.targets.flare.text import cleaned
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.post import deliver
from dfm_async.wire import messages as msg

__all__ = ["FOR_HUB", "Hub"]

_log = logging.getLogger(__name__)

FOR_HUB: Final = (
    FOR_COORDINATOR
    | OF_SEATS.keys()
    | {
        fm.SiteHello,
        fm.SiteReport,
        fm.LogLines,
        fm.PeerLost,
        fm.Echoed,
        fm.Pulse,
        msg.SendToPlace,
    }
)
"""What sites say to the hub."""
_LONGEST_LINE: Final = 4096
_LONGEST_ERROR: Final = 256 * 1024
_FIRST: Final = 60.0
"""For how many seconds the hub waits for its first application, at least."""
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
        largest: how many bytes one message to it may have.
    """

    def __init__(
        self, carrier: str, version: str, deployed: list[str], options: LocalOptions, linger: float, largest: int
    ) -> None:
        self.carrier = carrier
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the carrier ends, when it does."""
        self._version = version
        self._node: Sender | None = None
        self._on_site_lost: Callable[[str], None] = _nothing
        self._values = SealedValues()
        self._table: JobTable[Coordinator] = JobTable(options)
        self._jobs: dict[str, HubJob] = {}
        self._roster = Roster(deployed)
        self._seating = Seating(self._roster, self._send)
        self._apps: dict[str, Application] = {}
        self._offers: dict[str, fm.Offer] = {}
        self._reports: dict[tuple[str, str, str], fm.SiteReport] = {}
        self._echoes: dict[int, tuple[Application, fm.Asked, set[str]]] = {}
        self._last_echo = 0
        self._dirty: dict[HubJob, None] = {}
        self._state_timer: asyncio.TimerHandle | None = None
        self._linger = linger
        self._largest = largest
        self._keep = 3600.0
        self._idle: asyncio.TimerHandle | None = None
        self._used = False
        """Whether an application has come."""
        self._rest()

    @property
    def sites(self) -> Iterable[str]:
        """The sites that are there."""
        return self._roster.sites

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
        if not self._used:  # whoever had it started is about to come
            seconds = max(seconds, _FIRST)
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
        for site in self._roster.sites:
            self._send(site, fm.Bye(reason))

    # sites

    def receive(self, peer: str, message: Any) -> None:
        """Takes a message of a site."""
        kind = type(message)
        if not self._roster.expects(peer):
            return
        if peer in self._roster.gone and kind is not fm.SiteHello:
            # It was taken for lost: what it says belongs to jobs that have ended.
            told = self._roster.given_up(peer)
            if told is not None:
                self._send(peer, told)
            return
        if kind in FOR_COORDINATOR:
            job = self._seating.find(peer, message)
            if job is not None and job.may_say(message):
                job.coordinator.receive(_as_text(message))
            elif job is not None:
                _log.warning("site %s says something of job %s that is not its own: ignored", peer, job.job_id)
        elif kind in OF_SEATS:
            job = self._seating.find(peer, message)
            if job is not None:
                OF_SEATS[kind](self._seating, job, message)
        elif kind is msg.SendToPlace:
            job = self._seating.find(peer, message)
            if job is not None:
                deliver(self._table, self._values, job.coordinator, message, Coordinator.offer)
        elif kind is fm.SiteHello:
            self._site_came(peer, message)
        elif kind is fm.SiteReport:
            self._site_reports(peer, message)
        elif kind is fm.LogLines:
            if message.site == peer:
                self._tell_apps(message)
        elif kind is fm.PeerLost:
            if self._roster.has(message.site, message.life):  # else it is known already that it was lost
                self._seating.cut(peer, message.site, message.reason)
        elif kind is fm.Echoed:
            self._echoed(peer, message.request)

    def refused(self, peer: str, message: Any, reason: str) -> None:
        """A site does not take a message, and never will."""
        job = self._seating.of_run(getattr(message, "job", -1))
        if job is None:
            _log.warning("site %s does not take %s: %s", peer, type(message).__name__, reason)
        else:
            self._seating.undeliverable(job, fm.Undeliverable(message.job, message.at, reason))

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

    def _site_came(self, peer: str, hello: fm.SiteHello) -> None:
        if hello.site != peer:
            _log.warning("site %s calls itself %s, and is not taken", peer, hello.site)
            return
        roster, seating = self._roster, self._seating
        if hello.protocol != fm.PROTOCOL:
            text = f"it speaks another protocol ({hello.protocol}, not {fm.PROTOCOL}): install one version"
            roster.unfit(peer, text)
        else:
            begun_anew = peer in roster.sites  # before we saw that it was lost
            not_begun = seating.take_not_begun(peer) if begun_anew else []  # these have lost nothing
            if begun_anew:
                self.lost_site(peer, "it has started again")
            if self._node is not None:
                self._node.drop(peer)
            roster.came(hello)
            for offer in self._offers.values():
                if offer.site == peer:
                    self._send(peer, offer)
            seating.seat_anew([*not_begun, *seating.take_waiting(peer)])
        self._welcome_all()

    def lost_site(self, site: str, reason: str, life: str = "") -> None:
        """A site cannot be reached any more, or has ended; ``life``: which life of it, if that is known."""
        if not self._roster.lost(site, reason, life):
            return
        _log.warning("site %s was lost: %s", site, reason)
        for key in [key for key in self._reports if key[0] == site]:
            self._site_reports(site, msgspec.structs.replace(self._reports[key], workers=()))
        for request in list(self._echoes):
            self._echoed(site, request)
        for other in self._roster.sites:
            self._send(other, fm.SiteLost(site))
        self._seating.lose_site(site, reason)
        self._on_site_lost(site)
        self._welcome_all()

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
            self._used = True
            app = self._apps[attach.session] = Application(attach, self._app_said, self._app_has_room, self._largest)
            hello = attach.hello
            self._linger, self._keep, self._seating.patience = hello.linger, hello.keep, hello.start
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

    def _app_said(self, app: Application, data: bytes | memoryview) -> None:
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
        roster = self._roster
        home = roster.sites.get(app.hello.homesite)
        sites = {
            name: fm.SiteInfo(hello.operations, hello.allow_code, hello.problem, hello.python)
            for name, hello in roster.sites.items()
        }
        gateway = ("", "") if home is None else (home.host, home.gateway)
        gone, largest = dict(roster.gone), self._largest
        return fm.Welcome(
            fm.PROTOCOL,
            self._version,
            self.carrier,
            sites,
            roster.deployed,
            gone,
            gateway,
            largest,
            roster.began,
            dict(roster.since),
        )

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
        # An application whose code has changed needs the former only for jobs that have it.
        app.offers = {other for other in app.offers if not other.startswith(f"{offer.site}:")} | {key}
        if key not in self._offers:
            self._offers[key] = offer
            if offer.site in self._roster.sites:
                self._send(offer.site, offer)
        self._drop_offers()

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
                self._seating.seat(job, lane)
        finally:
            slots.admitting = False
        for app in self._apps.values():
            if app.slots is slots:
                self._answer_pending(app)

    def _answer_pending(self, app: Application) -> None:
        """Tells the application that jobs are in the queue, as far as the queue has room."""
        while app.pending and app.slots.waiting - len(app.pending) < app.hello.queue_limit:
            app.send(fm.Submitted(app.pending.popleft(), "new"))

    def _run_again(self, job: HubJob) -> None:
        self._seating.leave(job, well=False)
        job.runs_again()
        job.slots.release(job)
        job.slots.put(job, job.submit.priority, front=True)
        self._admit(job.slots)

    def _job_ended(self, job: HubJob) -> None:
        self._seating.leave(job, well=job.record.decided is JobStatus.FINISHED)
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
        sites = set(self._roster.sites)
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

    def _read(self, _app: Application, message: fm.Read) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None:
            job.ever_read = max(job.ever_read, message.position)

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


def _as_text(message: Any) -> Any:
    """An error of another organisation is text that can be shown: nothing of it is unpickled."""
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
    fm.Read: Hub._read,  # noqa: SLF001
    fm.Leave: Hub._leave,  # noqa: SLF001
}
