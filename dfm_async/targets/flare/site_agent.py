"""A site of a federation on FLARE: admits locations of jobs, and connects its workers with the hub and other sites."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final

import msgspec

from dfm_async.base.signals import Throttle
from dfm_async.base.tasks import OwnedTasks, in_thread
from dfm_async.base.text import cleaned
from dfm_async.engine.machine import StopOutcome
from dfm_async.engine.site_host import PlacementRequest, SiteHost, WorkerAssignment, may_start_another
from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.events import NoticeKind
from dfm_async.model.flare import SiteSettings
from dfm_async.model.ids import JobId, Location
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import SiteStats
from dfm_async.runtime.operation_errors import broken_record
from dfm_async.site.authorizing import Denied, PipelineAuthorizer
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.admission import Admission, HostJobUser, JobTraffic, RequestedUse
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.node import HUB, HostNode
from dfm_async.targets.flare.protocol import BRING_VALUES, FROM_WORKERS, ROUTES, Route
from dfm_async.targets.flare.site_code import Installed, SiteCode
from dfm_async.targets.flare.site_log import SiteLog
from dfm_async.version import __version__
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of
from dfm_async.wire.messages import Envelope, kind_of
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.start import choose_method
from dfm_async.workers.worker import ELSEWHERE

_log = logging.getLogger(__name__)

_FULL: Final = 64 * 1024 * 1024
"""The backlog, in bytes, at which workers are paused; they go on at half of it."""
_LONGEST_LINE: Final = 4096
_MOST_LINES: Final = 100
_REPORT_INTERVAL: Final = 0.5


class _HostedLocation:
    """One location of a job at this site, from its request until it has left."""

    def __init__(self, agent: SiteAgent, request: fm.Assign) -> None:
        self.request = request
        self.use: RequestedUse | None = None
        """What it does here; None until it is admitted."""
        self.account: JobTraffic | None = None
        """How many bytes its job has sent."""
        self.assignment: WorkerAssignment | None = None
        self.announced = False
        """Whether its worker knows of it."""
        self.started = False
        """Whether the job was started."""
        self.stopped = False
        """Whether it was cancelled, and has stopped."""
        self.seen = False
        """Whether it has seen that it is cancelled: then the loop of its worker still responds."""
        self.leaving: asyncio.TimerHandle | None = None
        """Ends it by force, if it has to leave and does not."""
        self._agent = agent

    @property
    def key(self) -> tuple[int, int]:
        """The run of the job, and which of its locations this is."""
        return (self.request.job, self.request.at)

    @property
    def described(self) -> dict[str, Any]:
        """Its fields in the audit log."""
        taken = 0 if self.account is None else self.account.taken
        return {"job": self.request.job_id, "location": str(self.request.location), "bytes": taken}

    def send(self, message: msg.Message | Envelope) -> None:
        """Send a message to its worker."""
        if self.assignment is not None:
            self.assignment.send(message)

    @property
    def number(self) -> int:
        """The number of the run."""
        return self.request.job

    # what happens to its worker (AssignmentOwner)

    def assigned(self, at: int) -> None:
        if self.assignment is not None:
            self._agent.announce(self)

    def lost(self, at: int, error: WorkerLost) -> None:
        self._agent.location_lost(self, error)

    def refused(self, at: int, error: BaseException) -> None:
        self._agent.location_failed(self, error)

    def abandon(self, at: int, how: StopOutcome = StopOutcome.ABANDONED) -> None:
        """Stop waiting for a location that has not stopped."""
        if self.leaving is not None:
            self._agent.remove(self, succeeded=False)
        else:
            self._agent.notify(fm.Abandoned(*self.key, how))

    def notice(self, at: int, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        if kind == "unresponsive":
            self._agent.notify(fm.WorkerUnresponsive(*self.key, seconds))
        elif kind == "responsive":
            self._agent.notify(fm.WorkerResponsive(*self.key))
        elif kind == "bound":
            self._agent.notify(fm.WorkerBound(*self.key, why))
        else:
            self._agent.notify(fm.WorkerRetired(*self.key, why))


class _Locations:
    """The locations of jobs at a site, by run."""

    def __init__(self) -> None:
        self._runs: dict[int, dict[int, _HostedLocation]] = {}

    def __iter__(self) -> Iterator[_HostedLocation]:
        return iter([location for run in self._runs.values() for location in run.values()])

    def add(self, location: _HostedLocation) -> None:
        self._runs.setdefault(location.request.job, {})[location.request.at] = location

    def find(self, job: int, at: int) -> _HostedLocation | None:
        return self._runs.get(job, {}).get(at)

    def of(self, job: int) -> Mapping[int, _HostedLocation]:
        return self._runs.get(job, {})

    def remove(self, location: _HostedLocation) -> bool:
        job, at = location.key
        run = self._runs.get(job, {})
        if run.get(at) is not location:
            return False
        del run[at]
        if not run:
            del self._runs[job]
        return True


class SiteAgent(AbstractAsyncContextManager["SiteAgent"]):
    """Runs the parts of jobs that belong to one site.

    Args:
        settings: what the site decides for itself.
        user: whose jobs come.
        installed: what the site offers.
        options: how workers start, and the grace periods.
        audit: the site's record of what others did there.
        authorizer: decides about pipelines, beside FLARE.
    """

    def __init__(
        self,
        settings: SiteSettings,
        user: HostJobUser,
        installed: Installed,
        options: LocalOptions,
        audit: AuditLog,
        authorizer: PipelineAuthorizer | None,
    ) -> None:
        self.site = settings.site
        self.allow_code = settings.allow_code and user.brings_code
        """Whether code of the user runs here: the site allows it, and FLARE has allowed this user to bring it."""
        self._user = user
        self._installed = installed
        self._options = options
        self._audit = audit
        self._node: HostNode | None = None
        self._admission = Admission(settings, user, installed.own_process, audit, authorizer)
        self._code = SiteCode(settings, user.name, installed, options, audit, allow_code=self.allow_code)
        self._reports = Throttle(_REPORT_INTERVAL, self._report, delay=_REPORT_INTERVAL)
        self.host = SiteHost(
            self.site,
            options,
            self._from_worker,
            self._reports.request,
            apart=True,
            forwarded=FROM_WORKERS,
            environment=settings.environment,
            on_end=lambda key, location: self.notify(fm.SiteReport(key, location, (), 0, (0, 0))),
            may_start=lambda: may_start_another([self.host], options),
        )
        """The workers of the site."""
        self._locations = _Locations()
        self._tasks = OwnedTasks()
        self._admitting: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._paused = False
        self._log = SiteLog(self.site, self.notify)

    def hello(self, incarnation: str = "", gateway: str = "") -> fm.SiteHello:
        """Return what the site reports about itself."""
        return fm.SiteHello(
            site=self.site,
            protocol=fm.PROTOCOL,
            version=__version__,
            host=platform.node(),
            operations=self._installed.operations,
            allow_code=self.allow_code,
            gateway=gateway,
            problem=self._installed.problem,
            incarnation=incarnation,
            python=fm.PYTHON,
        )

    def attach(self, node: HostNode) -> None:
        """Send messages by a node from now on."""
        self._node = node

    def notify(self, message: Any) -> None:
        """Send a message to the hub."""
        if self._node is not None:
            self._node.send(HUB, message)

    async def __aenter__(self) -> SiteAgent:
        self._audit.write("opened", user=self._user.name, org=self._user.org, role=self._user.role)
        if choose_method(self._options.start_method) == "forkserver":
            server = self.host.fork_server = ForkServer.acquire(self._options.preload)
            await in_thread(server.warm, "fork-server")
        self._log.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._tasks.close()
        for location in self._locations:
            self._locations.remove(location)  # what becomes of it is not reported any longer
            if location.leaving is not None:
                location.leaving.cancel()
            else:
                self._audit.note("left", succeeded=False, reason="the site leaves", **location.described)
        self._reports.cancel()
        await self.host.shut_down(self._options.shutdown_grace)
        self._log.close()
        if self.host.fork_server is not None:
            await in_thread(self.host.fork_server.release, "fork-server")
        self._audit.note("closed")
        self._audit.close()

    def _report(self) -> None:
        for key, location, stats in self.host.stats():
            self.notify(_report_of(key, location, stats))

    # messages from others

    def receive(self, peer: str, message: Any) -> None:
        """Take a message of the hub, or of another site. What goes wrong with it is an error of its job alone."""
        try:
            self._take(peer, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, other jobs go on
            _log.exception("a message of %s (%s) cannot be processed", peer, kind_of(message).__name__)
            job, at = getattr(message, "job", None), getattr(message, "at", None)
            if isinstance(message, fm.Assign):
                self.notify(fm.AssignmentRefused(message.job, message.at, "failed", _text(error)))
            elif job is not None and at is not None:
                self.notify(msg.JobBroken(job, at, broken_record(self.site, error)))

    def _find(self, message: Any) -> _HostedLocation | None:
        """Find the location that a message is for, or about, unless it is leaving."""
        location = self._locations.find(message.job, message.at)
        return None if location is None or location.leaving is not None else location

    def _take(self, peer: str, message: Any) -> None:
        kind = kind_of(message)
        route = ROUTES.get(kind)
        if route is Route.BETWEEN_LOCATIONS:
            location = self._find(message)
            if location is not None and location.announced and peer in location.request.sites:
                self._to_worker(location, message)
        elif peer != HUB:
            self._warn_of(peer, kind.__name__)
        elif route is Route.HUB_TO_LOCATION:
            location = self._find(message)
            if location is not None and location.announced:
                self._to_worker(location, message)
            elif kind is msg.CancelJob:
                self.notify(msg.JobStopped(message.job, message.at))
            elif kind in (msg.StartJob, msg.OpenFrames):  # the hub has not been notified yet, or never will be
                self.notify(fm.AssignmentLost(message.job, message.at, None, "the job has no worker here", (), False))
        else:
            handler = _HANDLERS.get(kind)
            if handler is not None:
                handler(self, message)

    def _warn_of(self, peer: str, kind: str) -> None:
        """Record that another site sends what only the hub may send; once for each, so that it cannot fill the log."""
        if (peer, kind) not in self._warned:
            self._warned.add((peer, kind))
            _log.warning("site %s sent %s, which only the hub may send", peer, kind)
            self._audit.note("not allowed", peer=peer, message=kind)

    def forged(self, peer: str, reason: str, count: int) -> None:
        """Record a packet that is not authentic; ``count``: how many there were."""
        self._audit.note("forged", peer=peer, reason=reason, count=count)

    def _to_worker(self, location: _HostedLocation, message: Any) -> None:
        kind = kind_of(message)
        if not self._fits(location, _size(message)) and kind in BRING_VALUES:
            return
        if kind is msg.StartJob:
            assert location.use is not None  # noqa: S101 - it was announced
            location.started = True
            spec = msgspec.structs.replace(message.spec, job_id=JobId(location.request.job_id))
            plan, routes = location.use.digest, self._routes(location.request)
            message = msgspec.structs.replace(message, spec=spec, plan=plan, routes=routes)
        location.send(message)

    def _routes(self, request: fm.Assign) -> tuple[str, ...]:
        """Return the addresses of the locations of a job. Workers connect only to those of their own site."""
        here = {at: found.assignment for at, found in self._locations.of(request.job).items() if found.leaving is None}
        return tuple(
            found.address if site == self.site and (found := here.get(at)) is not None else ELSEWHERE + site
            for at, site in enumerate(request.sites)
        )

    def _fits(self, location: _HostedLocation, size: int) -> bool:
        account, request = location.account, location.request
        assert account is not None  # noqa: S101 - it was admitted
        fits = account.fits(size)
        account.taken += size
        if not fits and account.reported != request.job:
            account.reported = request.job
            text = f"job {request.job_id} may send {account.allowed:,} bytes to site {self.site!r}, and has sent more"
            self._audit.note("too much", job=request.job_id, bytes=account.taken, allowed=account.allowed)
            self.notify(msg.JobBroken(request.job, request.at, broken_record(self.site, Denied(text))))
        return fits

    # locations

    def _assign(self, request: fm.Assign) -> None:
        key = (request.job, request.at)
        if key in self._admitting or self._locations.find(*key) is not None:
            _log.warning("location %s of job %s is requested twice", request.at, request.job_id)
            return
        location = _HostedLocation(self, request)
        self._admitting[key] = self._tasks.spawn(self._admit(location), f"admission of {request.job_id}")

    def _about(self, request: fm.Assign) -> dict[str, str]:
        return {"user": self._user.name, "job": request.job_id, "location": str(request.location)}

    async def _admit(self, location: _HostedLocation) -> None:
        request = location.request
        try:
            here = len(self._locations.of(request.job)) + sum(job == request.job for job, _ in self._admitting)
            use, account = await self._admission.admit(request, here)
            location.use, location.account = use, account
            if not self.host.has_code(request.offer):
                self.host.add_code(request.offer, self._code.find(request.offer))
            account.locations += 1
            self._locations.add(location)
            placement = PlacementRequest(
                job=request.job,
                at=request.at,
                location=request.location,
                lane=request.lane,
                job_id=request.job_id,
                plan=use.digest,
                net=lambda: request.net,
                code=request.offer,
            )
            assignment = location.assignment = self.host.place(location, placement)
            if assignment.ready:
                self.announce(location)
        except Denied as error:
            self._audit.note("denied", reason=str(error), **self._about(request))
            self.notify(fm.AssignmentRefused(*location.key, "denied", str(error)))
        except Exception as error:  # noqa: BLE001 - whatever starting a process or the site's own authorizer raises
            self.location_failed(location, error)
        finally:
            self._admitting.pop(location.key, None)

    def announce(self, location: _HostedLocation) -> None:
        """Make a location known to its worker, which is ready, and report that to the hub."""
        use, assignment = location.use, location.assignment
        assert use is not None and assignment is not None  # noqa: S101, PT018 - it was admitted and placed
        try:
            self._audit.write("assigned", sha256=use.digest, **self._about(location.request))
        except OSError as error:
            self.location_failed(location, error)
            return
        assignment.prepare()
        location.send(msg.Announce(*location.key, use.digest, list(use.calls)))
        location.announced = True
        assignment.launched()
        self.notify(fm.Assigned(*location.key))

    def location_lost(self, location: _HostedLocation, error: WorkerLost) -> None:
        """Report that the worker of a location has ended, or did not start."""
        if self.remove(location, succeeded=False) and location.leaving is None:
            self._audit.note("lost", reason=str(error), **location.described)
            lines = tuple(cleaned(line, _LONGEST_LINE) for line in error.lines[-_MOST_LINES:])
            detail = cleaned(error.detail, _LONGEST_LINE)
            self.notify(fm.AssignmentLost(*location.key, error.exit_code, detail, lines, error.out_of_memory))

    def location_failed(self, location: _HostedLocation, error: BaseException) -> None:
        """Report that a location gets no worker."""
        request, reason = location.request, _text(error)
        self.remove(location, succeeded=False)
        _log.debug("job %s cannot run here: %s", request.job_id, reason)
        self._audit.note("failed", reason=reason, **self._about(request))
        if request.offer and "ModuleNotFoundError" in reason:
            reason += ". Modules travel by name: install it at the site, or define operations in the main script"
        self.notify(fm.AssignmentRefused(*location.key, "failed", reason))

    def remove(self, location: _HostedLocation, *, succeeded: bool) -> bool:
        """Release a location; return whether it was here."""
        if not self._locations.remove(location):
            return False
        if location.leaving is not None:
            location.leaving.cancel()
        if location.account is not None:
            location.account.locations -= 1
        if location.assignment is not None:
            location.assignment.release(succeeded=succeeded)
        return True

    def _unassign(self, message: fm.Unassign) -> None:
        task = self._admitting.pop((message.job, message.at), None)
        if task is not None:
            task.cancel()
        location = self._find(message)
        if location is None:
            return
        if message.succeeded or location.stopped or not location.started:
            if location.announced and not location.started:
                location.send(msg.Withdraw(*location.key))
            self.remove(location, succeeded=message.succeeded)
        else:  # it still runs: it is stopped first, and its worker is not free before
            grace = self._options.cancel_grace
            location.leaving = asyncio.get_running_loop().call_later(grace, self._overdue, location)
            location.send(msg.CancelJob(*location.key))
        self._audit.note("left", succeeded=message.succeeded, **location.described)

    def _overdue(self, location: _HostedLocation) -> None:
        """Note that a location that has to leave has not left after the grace period."""
        if location.assignment is not None:
            location.assignment.stop_by_force(seen=location.seen)

    def _stop_by_force(self, message: fm.StopByForce) -> None:
        """End what has not stopped within its grace period, without harm to other jobs where that is possible."""
        location = self._find(message)
        if location is None or location.assignment is None:
            self.notify(fm.Abandoned(message.job, message.at, StopOutcome.STOPPED))
        else:
            location.assignment.stop_by_force(seen=message.seen)

    def _drop(self, message: fm.Drop) -> None:
        self._code.drop(message.key)
        self.host.drop_code(message.key)

    def _echo(self, message: fm.Echo) -> None:
        """Answer when everything that workers have printed and logged by now has been read and sent."""

        def answer() -> None:
            self._log.flush()
            self.notify(fm.Echoed(message.request))

        self.host.when_read(answer)

    # messages from workers

    def _from_worker(self, message: Any) -> None:
        try:
            self._forward(message)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("a message of a worker (%s) cannot be forwarded", kind_of(message).__name__)
            job = getattr(message, "job", -1)
            for at in list(self._locations.of(job))[:1]:  # the message may name another site's location, or none
                self.notify(msg.JobBroken(job, at, broken_record(self.site, error)))

    def _forward(self, message: Any) -> None:
        if self._node is None:
            return
        kind = kind_of(message)
        route = ROUTES.get(kind)
        if route is Route.BETWEEN_LOCATIONS:
            # The sender is another location of the same job: every one of them knows the sites of all.
            locations = self._locations.of(message.job)
            if locations:
                sites = next(iter(locations.values())).request.sites
                if not 0 <= message.at < len(sites):
                    raise DfmError(f"job {message.job} has no location {message.at}")
                self._node.send(sites[message.at], message)
        elif route is Route.LOCATION_TO_HUB:
            location = self._locations.find(message.job, message.at)
            if location is None:
                return
            if kind is msg.CancelSeen:
                location.seen = True
            elif kind is msg.JobStopped:
                location.stopped = True
            if location.leaving is None:
                self._node.send(HUB, message)
            elif location.stopped:  # nobody else waits for it
                self.remove(location, succeeded=False)
        if not self._paused and self._node.backlog > _FULL:
            self._pause(paused=True)

    def has_room(self) -> None:
        """Note that the backlog has become smaller."""
        if self._paused and self._node is not None and self._node.backlog <= _FULL // 2:
            self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        self._paused = paused
        self.host.pause(paused=paused)


def _report_of(offer: str, location: Location, stats: SiteStats) -> fm.SiteReport:
    tokens = (stats.tokens.count, stats.tokens.bytes)
    return fm.SiteReport(offer, location, stats.workers, stats.restarts, tokens, stats.limits)


def _size(message: Any) -> int:
    """Return how many bytes a message has that has come from outside."""
    if type(message) is Envelope:
        return len(message.data)
    if type(message) in msg.WITH_PAYLOAD:  # values can be large, and need not be copied for it
        return size_of(message.payload) + len(fm.encode(msgspec.structs.replace(message, payload=b"")))
    return len(fm.encode(message))


def _text(error: BaseException) -> str:
    """Return what others learn of an error."""
    return str(error) if isinstance(error, DfmError) else f"{type(error).__name__}: {error}"


_HANDLERS: Final[dict[type, Callable[[SiteAgent, Any], None]]] = {
    fm.Offer: lambda agent, offer: agent._code.offer(offer),  # noqa: SLF001 - same module
    fm.Drop: SiteAgent._drop,  # noqa: SLF001
    fm.Assign: SiteAgent._assign,  # noqa: SLF001
    fm.Unassign: SiteAgent._unassign,  # noqa: SLF001
    fm.StopByForce: SiteAgent._stop_by_force,  # noqa: SLF001
    fm.Echo: SiteAgent._echo,  # noqa: SLF001
}
