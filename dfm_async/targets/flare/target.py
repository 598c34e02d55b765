"""The FLARE target: jobs run in the federation, in a FLARE job that carries those of one user."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

from dfm_async.errors import EncodingError, FlareError, PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import FlareOptions
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.stats import SiteStats, TargetStats, Traffic, WorkerStats
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan, plan_from_json
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import Bells
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.carriers import Carriers
from dfm_async.targets.flare.connection import HubConnection
from dfm_async.targets.flare.installed import operations_of
from dfm_async.targets.flare.mirror import RemoteJob
from dfm_async.targets.flare.site_log import replay
from dfm_async.targets.frames import Row
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.rules import JobRules
from dfm_async.version import __version__
from dfm_async.wire import messages as msg
from dfm_async.wire.classes import KnownClasses
from dfm_async.wire.codec import Codec
from dfm_async.workers.shipping import ship_site

__all__ = ["FlareTarget"]

_log = logging.getLogger(__name__)

_MORE_PATIENCE: Final = 15.0
"""For how many seconds longer than the application tries the hub keeps what is for it."""
_LAST_WORDS: Final = 2.0
"""For how many seconds closing waits for what the sites have to say."""
_REMEMBERED: Final = 1000
_REPORTED: Final = 128
"""After how many ended jobs the federation is told which results were read, at the latest when the session ends."""
_UNKNOWN_CLASS: Final = "no operation of the federation names it in its signature, and FlareOptions.classes does not"


class FlareTarget:
    """Runs jobs over the sites of a federation on NVIDIA FLARE.

    Args:
        options: where the federation is, and how it is reached.
    """

    def __init__(self, options: FlareOptions) -> None:
        self.options = options
        self._classes = KnownClasses(options.classes, _UNKNOWN_CLASS)
        self.codec = Codec(trusted=False, known=self._classes)
        self.jobs: JobTable[RemoteJob] = JobTable(options.local)
        self.worker_bells = Bells()
        self._federation: Federation | None = None
        self._homesite = ""
        self._revision = -1
        self._carriers = Carriers(self._new_connection, self._in_use)
        self._offers: dict[str, fm.Offer] = {}
        self._reports: dict[tuple[HubConnection, str], fm.SiteReport] = {}
        """What is known of workers, by the connection that told it and by location."""
        self._elsewhere: OrderedDict[str, str] = OrderedDict()
        """The carriers of the last ended jobs that were not in that for new ones."""
        self._seen: set[str] = set()
        """The sites that were there: they may come back."""
        self._ended: list[RemoteJob] = []
        """Ended jobs, of whose results the federation does not know that they were read."""

    # life

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Connects to the carrier of this user's jobs, or starts one, and stays connected.

        Raises:
            FlareError: the federation cannot be reached, or its sites do not start.
            ShippingError: the code of an operation cannot be sent to its site.
        """
        self._federation, self._homesite = federation, homesite
        self._update()
        try:
            async with self._carriers.running(federation.sites, homesite):
                yield
        finally:
            self.jobs.close()
            self.worker_bells.close()

    def _update(self) -> None:
        """Has jobs that are submitted from now on run the code that the federation object has now, if it travels.

        Raises:
            ShippingError: the code of an operation cannot be sent to its site.
        """
        federation = self._federation
        assert federation is not None  # noqa: S101 - set while running
        if federation.revision == self._revision:
            return
        revision = federation.revision
        for site in federation.sites.values():
            for adapter in site.adapters.values():
                for hint in adapter.signature.named:
                    self._classes.add(hint)
        if self.options.code == "travels":
            self._offers = self._ship(federation, self._homesite)
        self._revision = revision

    def _ship(self, federation: Federation, homesite: str) -> dict[str, fm.Offer]:
        lanes = self._lanes()
        offers = {}
        sites = dict(federation.sites)
        if homesite not in sites:  # it offers nothing, but pipelines may do something without operations there
            sites[homesite] = Federation(federation.name).site(homesite)
        for name, site in sites.items():
            shipped = ship_site(site, homesite).data
            key = hashlib.sha256(shipped).hexdigest()
            offers[name] = fm.Offer(key, name, shipped, site.workers, site.threads, lanes, fm.PYTHON)
        return offers

    def _lanes(self) -> int:
        assert self._federation is not None  # noqa: S101 - set while running
        return self.options.local.lanes_for(site.workers for site in self._federation.sites.values())

    def _hello(self) -> fm.AppHello:
        options, local, lanes = self.options, self.options.local, self._lanes()
        return fm.AppHello(
            fm.PROTOCOL,
            __version__,
            self._homesite,
            lanes,
            local.max_concurrent_jobs or lanes * local.jobs_per_lane,
            local.queue_limit,
            local.queue_overflow,
            options.linger,
            options.start_timeout,
            options.keep_unread,
            2 * options.delivery_timeout + _MORE_PATIENCE,
        )

    def _new_connection(self) -> HubConnection:
        offers = list(self._offers.values())
        return HubConnection(self.options, self._hello(), offers, self._receive, self._give_up)

    def _in_use(self) -> Iterator[HubConnection]:
        return (job.connection for job in self.jobs.coordinators if job.connection is not None)

    def _give_up(self, connection: HubConnection, error: FlareError) -> None:
        """A hub cannot be reached any more: nobody here can tell what becomes of its jobs."""
        for job in self.jobs.coordinators:
            if job.connection is connection:
                job.lost(error)
        self._carriers.lost(connection, error)
        self.worker_bells.ring()

    # messages

    def _receive(self, connection: HubConnection, message: Any) -> None:
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message)
        elif type(message) is fm.SiteReport:
            self._report(connection, message)

    def _to_job(self, message: Any) -> RemoteJob | None:
        return self.jobs.coordinator(message.job_id)

    def _submitted(self, message: fm.Submitted) -> None:
        job = self._to_job(message)
        if job is not None:
            job.answered(message)

    def _events(self, message: fm.Events) -> None:
        job = self._to_job(message)
        if job is not None:
            job.take_events(message)

    def _expired(self, message: fm.Expired) -> None:
        job = self._to_job(message)
        if job is not None:
            job.take_expired(message)

    def _state(self, message: fm.JobState) -> None:
        job = self._to_job(message)
        if job is not None:
            job.take_state(message)

    def _relayed(self, message: fm.Relayed) -> None:
        job = self._to_job(message)
        if job is not None:
            job.take_relayed(msg.decoder.decode(message.message))

    def _welcomed(self, message: fm.Welcome) -> None:
        self._seen.update(message.sites)

    def _answered(self, message: fm.Found | fm.Listed | fm.Asked) -> None:
        self._carriers.answer(message)

    def _report(self, connection: HubConnection, message: fm.SiteReport) -> None:
        known = self._carriers.all  # what left connections have told is not true any more
        self._reports = {key: report for key, report in self._reports.items() if key[0] in known}
        if message.workers:
            self._reports[connection, message.location] = message
        else:
            self._reports.pop((connection, message.location), None)
        self.worker_bells.ring()

    def _logged(self, message: fm.LogLines) -> None:
        for line in message.lines:
            replay(message.site, line)
        if message.left_out:
            _log.warning("%d log records of site %s found no room", message.left_out, message.site)

    # jobs

    def coordinate(self, record: JobRecord, rules: JobRules, pack_rows: Callable[[Any], list[Row]]) -> RemoteJob:
        """Makes what a session steers a new job by."""
        return RemoteJob(record, self.codec, rules, detach=self.options.on_close == "detach")

    async def refusals(self, plan: Plan) -> list[Problem]:
        """What the federation cannot give.

        Raises:
            FlareError: the federation cannot be reached.
        """
        connection, problems = await self._connected(plan), self._unsendable(plan)
        await connection.arrived(plan.sites)
        if not _has(connection, plan):  # a site that was lost may have come back since: another carrier can have it
            connection = await self._carriers.another(self._lost_of(connection, plan))
            await connection.arrived(plan.sites)
        welcome = connection.welcome
        assert welcome is not None  # noqa: S101 - it was welcomed when it was opened
        assert self._federation is not None  # noqa: S101 - set while running
        for site in plan.sites:
            found = welcome.sites.get(site)
            if found is None:
                problems.append(Problem(f"site {site}", self._why_missing(connection, welcome, site)))
            elif self._offers:
                if not found.allow_code:
                    problems.append(Problem(f"site {site}", "it does not run code that applications bring"))
                elif found.python != fm.PYTHON:
                    text = f"code does not travel between versions of Python: the site has {found.python}"
                    problems.append(Problem(f"site {site}", f"{text}, and this program {fm.PYTHON}"))
            elif found.problem:
                hint = '; it takes code that applications bring: code="travels"' if found.allow_code else ""
                problems.append(Problem(f"site {site}", f"{found.problem}{hint}"))
            else:
                known = self._federation.sites[site].adapters.values() if site in self._federation.sites else ()
                ours = operations_of(known)
                for name in _called(plan, site):
                    if name not in found.operations:
                        problems.append(Problem(name, f"site {site!r} does not offer it"))
                    elif name in ours and ours[name] != found.operations[name]:
                        text = f"it takes other arguments at site {site!r}: the federation there is another one"
                        problems.append(Problem(name, text))
        return problems

    async def _connected(self, plan: Plan) -> HubConnection:
        """The connection for new jobs. A new one waits for the sites that a plan needs, if they were there before."""
        return await self._carriers.connected(
            dict.fromkeys(self._seen.intersection([*plan.sites, self._homesite]), 0.0)
        )

    def _lost_of(self, connection: HubConnection, plan: Plan) -> dict[str, float]:
        """The sites of a plan that were there before and are not now, and since when."""
        welcome = connection.welcome
        if welcome is None:
            return dict.fromkeys(self._seen.intersection(plan.sites), 0.0)
        missing = self._seen.intersection(plan.sites) - welcome.sites.keys()
        return {site: welcome.since.get(site, welcome.began) for site in missing}

    def _why_missing(self, connection: HubConnection, welcome: fm.Welcome, site: str) -> str:
        if site in welcome.gone:
            return welcome.gone[site]
        if site in welcome.deployed:
            return f"it has not become ready within {self.options.start_timeout:g} s"
        if site in connection.clients:
            return "its client is registered with the server, but FLARE could not start the carrier there"
        if site == self._homesite:
            return "it has no client in the federation, so that nothing can run there"
        return "no client of this name is connected to the federation"

    def _unsendable(self, plan: Plan) -> list[Problem]:
        """What of a plan only pickle could send, and so nobody may."""
        try:
            for net in plan.nets:
                for value in net.literals:
                    self.codec.pack(value)
        except EncodingError as error:
            return [Problem("a constant", f"cannot be sent to other organisations: {error}")]
        return []

    async def submit(self, job: RemoteJob, priority: int = 0) -> None:
        """Gives a job to the federation; returns when the hub has it.

        Raises:
            PipelineError: the federation cannot give what the plan needs any more.
            FlareError: the federation cannot be reached any more.
        """
        self._update()
        connection = await self._connected(job.plan)
        if not _has(connection, job.plan):  # a plan that was prepared when its sites were there
            problems = await self.refusals(job.plan)
            if problems:
                raise PipelineError(job.plan.pipeline, problems)
            connection = await self._connected(job.plan)
        connection.offer(list(self._offers.values()))
        job.connection = connection
        self.jobs.add(job)
        job.on_end(self._job_ended)
        self._carriers.expect()
        offers = {site: offer.key for site, offer in self._offers.items()}
        try:
            await job.submit(priority, offers)
        except BaseException:
            self.jobs.forget(job.record.job_id)
            raise

    async def find(self, job_id: str) -> JobRecord | None:
        """Finds a job, also one that another application has started, and follows it."""
        known = self.jobs.find(job_id)
        if known is not None:
            return known
        await self._carriers.connected()
        asked = self._carriers.reachable
        found = await self._find_in(asked, job_id)
        if found is None:
            await self._carriers.look()
            others = [other for other in self._carriers.reachable if other not in asked]
            found = self.jobs.find(job_id) or await self._find_in(others, job_id)
        return found

    async def _find_in(self, connections: list[HubConnection], job_id: str) -> JobRecord | None:
        with self._carriers.kept(connections):
            for connection in connections:
                if (known := await self._find_at(connection, job_id)) is not None:
                    return known
        return None

    async def _find_at(self, connection: HubConnection, job_id: str) -> JobRecord | None:
        answer: fm.Found | None = await self._carriers.ask_other(connection, lambda number: fm.Find(number, job_id))
        known = self.jobs.find(job_id)  # somebody else may have asked for it, too
        if known is not None or answer is None or answer.known is None:
            return known
        return self._adopt(connection, answer.known)

    def _job_ended(self, job: RemoteJob) -> None:
        self._note_carrier(job)
        self._ended.append(job)
        if len(self._ended) >= _REPORTED:
            self._report_read()
        self._carriers.expect()
        self._carriers.tidy()

    def _report_read(self) -> None:
        """Reports how far the results of ended jobs were read: the federation need not keep these."""
        reachable, ended = self._carriers.reachable, self._ended
        for job in ended:
            if job.connection in reachable and job.record.log.seen:
                job.connection.send(fm.Read(job.record.job_id, job.record.log.seen))
        unread = [job for job in ended if job.record.log.seen < job.record.log.end]
        self._ended = unread[-_REPORTED // 2 :]

    def _note_carrier(self, job: RemoteJob) -> None:
        """Remembers where a job is that has ended, if that is not where new ones go."""
        if job.connection is not None and job.connection is not self._carriers.current:
            self._elsewhere[job.record.job_id] = job.connection.carrier
            if len(self._elsewhere) > _REMEMBERED:
                self._elsewhere.popitem(last=False)

    def _adopt(self, connection: HubConnection, found: fm.Known) -> JobRecord:
        plan = plan_from_json(found.plan, self._constant)
        record = JobRecord(JobId(found.job_id), JobNumber(0), plan, found.limits, None, found.first)
        record.fingerprint, record.label, record.created = found.fingerprint, found.label, found.created
        rules = JobRules()
        job = RemoteJob(record, self.codec, rules, detach=True)
        job.connection = connection
        job.frames.added = found.state.added
        record.open_frames.update(dict.fromkeys(found.open, 1))
        record.next_frame = found.state.added
        job.take_state(found.state)
        if not record.status.ended and JobStatus(found.state.status) is not JobStatus.SUBMITTED:
            record.adopt(JobStatus.RUNNING, None, None)  # what became of it is told by its last event
        self.jobs.add(job)
        self._note_carrier(job)
        job.on_end(self._job_ended)
        job.follow()
        self._carriers.expect()
        return record

    def _constant(self, data: bytes) -> Any:
        """A constant of a plan that the federation has kept; one of a class that we do not know stays as it is."""
        try:
            return self.codec.loads(data)
        except EncodingError:
            return data

    async def refresh(self) -> None:
        """Gets to know all jobs of this user that the federation knows."""
        await self._carriers.connected()
        await self._carriers.look()
        with self._carriers.kept(self._carriers.reachable) as connections:
            for connection in connections:
                answer: fm.Listed | None = await self._carriers.ask_other(connection, fm.ListJobs)
                for job_id in () if answer is None else answer.job_ids:
                    if self.jobs.find(job_id) is None:
                        await self._find_at(connection, job_id)

    async def forget(self, job_id: str) -> None:
        """Has the federation forget a job that has ended."""
        carrier = self._elsewhere.pop(job_id, None)
        connection = self._carriers.current if carrier is None else await self._carriers.at(carrier)
        if connection is not None:
            connection.send(fm.Forget(job_id))
            self._carriers.tidy()  # one that is closed for it says this first

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs that this application has started, or lets them go on; returns when they have ended."""
        running = self.jobs.coordinators
        for job in running:
            job.shut_down(reason, grace)
        for job in running:
            await job.record.completion_event.wait()
        self._report_read()
        try:  # what the sites have said before is told before the session ends, if they are still there
            async with asyncio.timeout(_LAST_WORDS):
                for connection in self._carriers.reachable:
                    await self._carriers.ask_other(connection, fm.Asked)
        except (FlareError, TimeoutError):
            _log.debug("the last log records of the sites may be missing")

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""
        jobs = self.jobs.coordinators
        waiting = sum(job.record.status is JobStatus.SUBMITTED for job in jobs)
        sites: dict[str, SiteStats] = {}
        for (connection, location), report in self._reports.items():
            if connection in self._carriers.reachable:
                sites[location] = _stats(report, sites.get(location, SiteStats()))
        current = self._carriers.current
        way = None if current is None else current.way
        return TargetStats(running=len(jobs) - waiting, waiting=waiting, sites=sites, way=way)


def _stats(report: fm.SiteReport, others: SiteStats) -> SiteStats:
    """What is known of the workers of a location; ``others``: of those that it has for another carrier."""
    workers = (
        WorkerStats(
            pid=worker.pid,
            jobs=worker.jobs,
            memory=worker.memory,
            lag=worker.lag,
            unresponsive=worker.unresponsive,
            retired=worker.retired,
            abandoned=worker.abandoned,
        )
        for worker in report.workers
    )
    return SiteStats(
        workers=(*others.workers, *workers),
        restarts=others.restarts + report.restarts,
        tokens=others.tokens + Traffic(*report.tokens),
    )


def _has(connection: HubConnection, plan: Plan) -> bool:
    """Whether all sites of a plan are there."""
    return connection.welcome is not None and set(plan.sites) <= connection.welcome.sites.keys()


def _called(plan: Plan, site: str) -> list[str]:
    from dfm_async.net import spec

    found: dict[str, None] = {}
    for at, name in enumerate(plan.sites_at):
        if name == site:
            for transition in plan.nets[at].transitions:
                if isinstance(transition.action, spec.Call):
                    found[transition.action.operation] = None
    return list(found)


_HANDLERS: Final[dict[type, Callable[[FlareTarget, Any], None]]] = {
    fm.Submitted: FlareTarget._submitted,  # noqa: SLF001 - same module
    fm.Events: FlareTarget._events,  # noqa: SLF001
    fm.Expired: FlareTarget._expired,  # noqa: SLF001
    fm.JobState: FlareTarget._state,  # noqa: SLF001
    fm.Relayed: FlareTarget._relayed,  # noqa: SLF001
    fm.Welcome: FlareTarget._welcomed,  # noqa: SLF001
    fm.Found: FlareTarget._answered,  # noqa: SLF001
    fm.Listed: FlareTarget._answered,  # noqa: SLF001
    fm.Asked: FlareTarget._answered,  # noqa: SLF001
    fm.LogLines: FlareTarget._logged,  # noqa: SLF001
}
