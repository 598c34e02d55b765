"""The FLARE target: jobs run in the federation, in a FLARE job that carries those of one user."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import msgspec

from dfm_async.base.backoff import delays
from dfm_async.base.containers import BoundedDict
from dfm_async.base.signals import Notifier
from dfm_async.base.text import cleaned
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobTable
from dfm_async.errors import DfmError, EncodingError, FlareError, PipelineError, Problem, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import FlareOptions
from dfm_async.model.ids import Location, OperationKey
from dfm_async.model.pool_size import Workers
from dfm_async.model.stats import SiteStats, TargetStats, Traffic
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan, plan_from_json
from dfm_async.planning.prepare import check_left_out
from dfm_async.results.record import JobRecord
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.host_jobs import HostJobs
from dfm_async.targets.flare.hub_connection import HubConnection
from dfm_async.targets.flare.message_parts import TooLarge
from dfm_async.targets.flare.remote_job import RemoteJob
from dfm_async.targets.flare.site_code import operations_of
from dfm_async.targets.flare.site_log import replay
from dfm_async.version import __version__
from dfm_async.wire.codec import Codec, KnownClasses
from dfm_async.workers.shipping import ship_site

_log = logging.getLogger(__name__)

_MORE_TIME: Final = 15.0
"""The number of seconds that the hub keeps messages longer than the application retries."""
_LAST_WORDS: Final = 2.0
"""The number of seconds for which closing waits for the last messages of the sites."""
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 2.0
"""The number of seconds between two attempts to find the hub that goes on with jobs, at first and at most."""
_REMEMBERED: Final = 1000
_REPORTED: Final = 128
"""The number of ended jobs after which their read offsets are reported; at the latest when the session ends."""
_UNKNOWN_CLASS: Final = "no operation of the federation names it in its signature, and FlareOptions.classes does not"


class FlareTarget:
    """Runs jobs over the sites of a federation on NVIDIA FLARE.

    Args:
        options: where the federation is, and how it is reached.
    """

    def __init__(self, options: FlareOptions) -> None:
        self.options = options
        self._classes = KnownClasses(options.classes, _UNKNOWN_CLASS)
        self.codec = Codec.for_untrusted(self._classes)
        self.jobs: JobTable[RemoteJob] = JobTable(options.local)
        self.worker_changes = Notifier()
        self._federation: Federation | None = None
        self._homesite = ""
        self._revision = -1
        self._host_jobs = HostJobs(self._new_connection, self._in_use)
        self._offers: dict[str, fm.Offer] = {}
        self._left_out: dict[OperationKey, DfmError] = {}
        """The operations whose code cannot be sent."""
        self._reports: dict[tuple[HubConnection, Location], fm.SiteReport] = {}
        """The reports about workers, by connection and by location."""
        self._elsewhere: BoundedDict[str, str] = BoundedDict(_REMEMBERED)
        """The host jobs of the last ended jobs that were not in that for new ones."""
        self._seen: set[str] = set()
        """The sites that were present once: they may come back."""
        self._ended: list[RemoteJob] = []
        """Ended jobs whose read offsets were not reported to the federation yet."""

    # lifecycle

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Stay connected to the host job of this user's jobs; start one if there is none.

        Raises:
            FlareError: the federation cannot be reached, or its sites do not start.
            ShippingError: the code of an operation cannot be sent to its site.
        """
        self._federation, self._homesite = federation, homesite
        self._update(None)
        try:
            async with self._host_jobs.running(federation.sites, homesite):
                yield
        finally:
            self.jobs.close()
            self.worker_changes.close()

    def _update(self, left_out: dict[OperationKey, DfmError] | None) -> None:
        """Run the code that the federation object has now in jobs that are submitted from now on, if it travels.

        ``left_out`` gets operations whose code cannot be sent; without it, the first of them raises its error.

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
            self._offers = self._ship(federation, self._homesite, left_out)
        self._left_out = left_out or {}
        self._revision = revision

    def _ship(
        self, federation: Federation, homesite: str, left_out: dict[OperationKey, DfmError] | None
    ) -> dict[str, fm.Offer]:
        lanes = self.options.local.lanes_for(self._workers)
        offers = {}
        sites = dict(federation.sites)
        if homesite not in sites:  # it offers nothing, but pipelines may do something without operations there
            sites[homesite] = Federation(federation.name).site(homesite)
        for name, site in sites.items():
            shipped = ship_site(site, homesite, left_out).data
            key = hashlib.sha256(shipped).hexdigest()
            offers[name] = fm.Offer(
                key=key,
                site=name,
                shipped=shipped,
                workers=site.workers,
                threads=site.threads,
                lanes=lanes,
                python=fm.PYTHON,
                idle_after=site.idle_after,
                capacity=site.capacity,
            )
        return offers

    @property
    def _workers(self) -> list[Workers]:
        assert self._federation is not None  # noqa: S101 - set while running
        return [site.workers for site in self._federation.sites.values()]

    def _hello(self) -> fm.AppHello:
        options, local, workers = self.options, self.options.local, self._workers
        return fm.AppHello(
            protocol=fm.PROTOCOL,
            version=__version__,
            homesite=self._homesite,
            lanes=local.lanes_for(workers),
            slots=local.slots_for(workers),
            queue_limit=local.queue_limit,
            overflow=local.queue_overflow,
            linger=options.linger,
            start=options.start_timeout,
            keep=options.keep_unread,
            timeout=2 * options.delivery_timeout + _MORE_TIME,
        )

    def _new_connection(self) -> HubConnection:
        offers = list(self._offers.values())
        return HubConnection(self.options, self._hello(), offers, self._receive, self._hub_lost)

    def _in_use(self) -> Iterator[HubConnection]:
        return (job.connection for job in self.jobs.coordinators if job.connection is not None)

    def _hub_lost(self, connection: HubConnection, error: FlareError) -> None:
        """Note that a hub cannot be reached any longer: the outcome of its jobs is unknown, unless it has a journal."""
        lost = [job for job in self.jobs.coordinators if job.connection is connection]
        suspended = [job for job in lost if job.recoverable]
        for job in lost:
            if job in suspended:
                job.suspend()
            else:
                job.lost(error)
        self._host_jobs.lost(connection, error)
        if suspended:
            with suppress(SessionClosed):  # then they are interrupted
                self._host_jobs.spawn(self._recover(suspended, error), "recovery of jobs")
        self.worker_changes.notify()

    async def _recover(self, jobs: list[RemoteJob], error: FlareError) -> None:
        """Find the hub that goes on with jobs, or start one; they are interrupted if that takes too long."""
        loop = asyncio.get_running_loop()
        _log.info("%d jobs wait for the federation, which cannot be reached: %s", len(jobs), error)
        deadline, pauses = loop.time() + self.options.start_timeout, delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while jobs := [job for job in jobs if job.suspended]:
            try:
                await self._recover_at(jobs, error)
            except SessionClosed:
                return
            except FlareError as reason:
                error = reason
            except (DfmError, OSError, TooLarge) as reason:
                error = FlareError(f"jobs cannot go on: {reason}", "Open a new session")
            jobs = [job for job in jobs if job.suspended]
            if jobs and loop.time() >= deadline:
                for job in jobs:
                    job.not_found(error)
            elif jobs:
                await asyncio.sleep(next(pauses))  # the former hub may be about to end

    async def _recover_at(self, jobs: list[RemoteJob], error: FlareError) -> None:
        """Go on with jobs at the hub for new jobs, or at another one that has them.

        Raises:
            FlareError: the federation cannot be reached.
            SessionClosed: it is too late.
        """
        needed = {site for job in jobs for site in job.plan.sites}
        await self._host_jobs.connected(dict.fromkeys(self._seen.intersection({*needed, self._homesite}), 0.0))
        missing: set[str] = set()
        for job in jobs:
            with self._host_jobs.kept(self._host_jobs.reachable) as connections:
                elsewhere = False
                for connection in connections:
                    if job.submitting and connection is self._host_jobs.current:
                        connection.offer(list(self._offers.values()))
                        job.submit_again(connection)
                        break
                    job_id = job.record.job_id
                    answer: fm.FoundJob | None = await self._host_jobs.ask(connection, partial(_find, job_id))
                    if not job.suspended:
                        break
                    if answer is not None and answer.known is not None:
                        job.recover(connection, answer.known)
                        _log.info("job %s goes on in host job %s", job_id, connection.host_job)
                        break
                    elsewhere = elsewhere or answer is None or answer.elsewhere or bool(answer.missing)
                    missing.update(() if answer is None else answer.missing)
                else:
                    if not elsewhere:
                        job.lost(error)
        self._host_jobs.expect()
        if missing:
            await self._host_jobs.another(dict.fromkeys(missing, 0.0))
            raise _absent(missing)  # unless the new one has them
        if any(job.suspended for job in jobs):
            await self._host_jobs.discover()

    # messages

    def _receive(self, connection: HubConnection, message: Any) -> None:
        handler = _OF_JOBS.get(type(message))
        if handler is None:
            _HANDLERS[type(message)](self, connection, message)
        elif (job := self.jobs.coordinator(message.job_id)) is not None:
            handler(job, message)

    def _welcomed(self, _connection: HubConnection, message: fm.Welcome) -> None:
        self._seen.update(message.sites)

    def _answered(self, _connection: HubConnection, message: fm.FoundJob | fm.Listed | fm.Asked) -> None:
        self._host_jobs.answer(message)

    def _report(self, connection: HubConnection, message: fm.SiteReport) -> None:
        known = self._host_jobs.all  # reports of closed connections are outdated
        self._reports = {key: report for key, report in self._reports.items() if key[0] in known}
        if message.workers:
            self._reports[connection, message.location] = message
        else:
            self._reports.pop((connection, message.location), None)
        self.worker_changes.notify()

    def _logged(self, _connection: HubConnection, message: fm.LogLines) -> None:
        for line in message.lines:
            replay(message.site, line)
        if message.left_out:
            _log.warning("%d log records of site %s were dropped: too many at once", message.left_out, message.site)

    # jobs

    def coordinate(self, record: JobRecord, pack_rows: Callable[[Plan, Any], list[Row]]) -> RemoteJob:
        """Return the control of a new job."""
        return RemoteJob(record, self.codec, detach=self.options.on_close == "detach")

    async def refusals(self, plan: Plan) -> list[Problem]:
        """Return what the federation cannot give to a plan, and why.

        Raises:
            FlareError: the federation cannot be reached.
        """
        connection, problems = await self._connected(plan), self._unsendable(plan)
        await connection.arrived(plan.sites)
        if not _has(connection, plan):  # a site that was lost may have come back since: another host job can have it
            connection = await self._host_jobs.another(self._lost_of(connection, plan))
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
        """Return the connection for new jobs. A new one waits for sites that a plan needs and that were lost."""
        return await self._host_jobs.connected(
            dict.fromkeys(self._seen.intersection([*plan.sites, self._homesite]), 0.0)
        )

    def _lost_of(self, connection: HubConnection, plan: Plan) -> dict[str, float]:
        """Return the sites of a plan that were lost, and since when."""
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
            return "its client is registered with the server, but FLARE could not start the host job there"
        if site == self._homesite:
            return "it has no client in the federation, so that nothing can run there"
        return "no client of this name is connected to the federation"

    def _unsendable(self, plan: Plan) -> list[Problem]:
        """Return the constants of a plan that only pickle could send."""
        try:
            for values in (*(net.literals for net in plan.nets), plan.defaults.values()):
                for value in values:
                    self.codec.pack(value)
        except EncodingError as error:
            return [Problem("a constant", f"cannot be sent to other organisations: {error}")]
        return []

    async def submit(self, job: RemoteJob) -> None:
        """Submit a job to the federation; return when the hub has it.

        Raises:
            PipelineError: the federation cannot give what the plan needs any longer.
            ShippingError: the code of an operation of the job was defined since, and cannot be sent to its site.
            FlareError: the federation cannot be reached any longer.
        """
        self._update({})
        if self._federation is not None:
            check_left_out(job.plan, self._federation, self._left_out)
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
        self._host_jobs.expect()
        offers = {site: offer.key for site, offer in self._offers.items()}
        try:
            await job.submit(offers)
        except BaseException:
            self.jobs.forget(job.record.job_id)
            raise

    async def find(self, job_id: str) -> JobRecord | None:
        """Find a job, also one that another application has started, and follow it."""
        known = self._known(job_id)
        if known is not None:
            return known
        await self._host_jobs.connected()
        asked = self._host_jobs.reachable
        missing: set[str] = set()
        found = await self._find_in(asked, job_id, missing)
        if found is None:
            await self._host_jobs.discover()
            others = [other for other in self._host_jobs.reachable if other not in asked]
            found = self._known(job_id) or await self._find_in(others, job_id, missing)
        if found is None and missing:
            another = await self._host_jobs.another(dict.fromkeys(missing, 0.0))
            found = self._known(job_id) or await self._find_in([another], job_id, set())
            if found is None:
                raise _absent(missing)
        return found or self.jobs.find(job_id)

    async def _find_in(self, connections: list[HubConnection], job_id: str, missing: set[str]) -> JobRecord | None:
        with self._host_jobs.kept(connections):
            for connection in connections:
                if (known := await self._find_at(connection, job_id, missing)) is not None:
                    return known
        return None

    async def _find_at(self, connection: HubConnection, job_id: str, missing: set[str]) -> JobRecord | None:
        """Look for a job at one hub; ``missing`` gets sites that the hub lacks to go on with it."""
        answer: fm.FoundJob | None = await self._host_jobs.ask(connection, partial(_find, job_id))
        known = self._known(job_id)  # another caller may have requested it, too
        if known is not None or answer is None or answer.known is None:
            missing.update(() if answer is None else answer.missing)
            return known
        return self._adopt(connection, answer.known)

    def _known(self, job_id: str) -> JobRecord | None:
        """Return a job that is known here, unless it is interrupted here: it may go on in the federation."""
        known = self.jobs.find(job_id)
        return None if known is None or known.status is JobStatus.INTERRUPTED else known

    def _job_ended(self, job: RemoteJob) -> None:
        self._note_host_job(job)
        self._ended.append(job)
        if len(self._ended) >= _REPORTED:
            self._report_read()
        self._host_jobs.expect()
        self._host_jobs.tidy()

    def _report_read(self) -> None:
        """Report how far the results of ended jobs were read: the federation need not keep these."""
        reachable, ended = self._host_jobs.reachable, self._ended
        for job in ended:
            if job.connection in reachable and job.record.log.seen:
                job.connection.send(fm.Read(job.record.job_id, job.record.log.seen))
        unread = [job for job in ended if job.record.log.seen < job.record.log.end]
        self._ended = unread[-_REPORTED // 2 :]

    def _note_host_job(self, job: RemoteJob) -> None:
        """Remember where a job is that has ended, if that is not where new ones go."""
        if job.connection is not None and job.connection is not self._host_jobs.current:
            self._elsewhere[job.record.job_id] = job.connection.host_job

    def _adopt(self, connection: HubConnection, found: fm.Known) -> JobRecord:
        plan = plan_from_json(found.plan, self._constant)
        record = JobRecord(found.spec, plan, None, found.first)
        job = RemoteJob(record, self.codec, detach=True)
        job.connection = connection
        job.frames.added = found.state.added
        record.open_frames.update(dict.fromkeys(found.open, 1))
        record.next_frame = found.state.added
        job.take_state(found.state)
        if not record.status.ended and found.state.status is not JobStatus.SUBMITTED:
            record.adopt(JobStatus.RUNNING, None, None)  # its last event has the outcome
        self.jobs.add(job)
        self._note_host_job(job)
        job.on_end(self._job_ended)
        job.follow()
        self._host_jobs.expect()
        return record

    def _constant(self, data: bytes) -> Any:
        """Decode a constant of a plan that the federation has kept; one of an unknown class stays as it is."""
        try:
            return self.codec.loads(data)
        except EncodingError:
            return data

    async def refresh(self) -> None:
        """Look up all jobs of this user in the federation."""
        await self._host_jobs.connected()
        await self._host_jobs.discover()
        if missing := await self._refresh(self._host_jobs.reachable):
            another = await self._host_jobs.another(dict.fromkeys(missing, 0.0))
            if missing := await self._refresh([another]):
                _log.warning("jobs that need %s wait for it in the journal", ", ".join(sorted(missing)))

    async def _refresh(self, connections: list[HubConnection]) -> set[str]:
        """Look up all jobs at some hubs; return sites that these lack to go on with jobs."""
        missing: set[str] = set()
        with self._host_jobs.kept(connections):
            for connection in connections:
                answer: fm.Listed | None = await self._host_jobs.ask(connection, fm.ListJobs)
                for job_id in () if answer is None else answer.job_ids:
                    if self._known(job_id) is None:
                        await self._find_at(connection, job_id, missing)
        return missing

    async def forget(self, job_id: str) -> None:
        """Have the federation forget a job that has ended."""
        host_job = self._elsewhere.pop(job_id, None)
        connection = self._host_jobs.current if host_job is None else await self._host_jobs.at(host_job)
        if connection is not None:
            connection.send(fm.Forget(job_id))
            self._host_jobs.tidy()  # one that is closed for it sends this first

    async def shutdown(self, reason: str, grace: float) -> None:
        """End all jobs that this application has started, or let them go on; return when they have ended."""
        running = self.jobs.coordinators
        for job in running:
            job.shut_down(reason, grace)
        for job in running:
            await job.record.completion_event.wait()
        self._report_read()
        try:  # the last reports of the sites arrive before the session ends, if they are present
            async with asyncio.timeout(_LAST_WORDS):
                for connection in self._host_jobs.reachable:
                    await self._host_jobs.ask(connection, fm.Asked)
        except (FlareError, TimeoutError):
            _log.debug("the last log records of the sites may be missing")

    def stats(self) -> TargetStats:
        """Return what runs, what waits, and how the workers are."""
        jobs = self.jobs.coordinators
        waiting = sum(job.record.status is JobStatus.SUBMITTED for job in jobs)
        sites: dict[str, SiteStats] = {}
        for (connection, location), report in self._reports.items():
            if connection in self._host_jobs.reachable:
                name = str(location)
                sites[name] = _stats(report, sites.get(name, SiteStats()))
        current = self._host_jobs.current
        transport = None if current is None else current.transport
        return TargetStats(running=len(jobs) - waiting, waiting=waiting, sites=sites, transport=transport)


def _stats(report: fm.SiteReport, others: SiteStats) -> SiteStats:
    """Return the statistics of a location; ``others``: those of its workers for another host job."""
    workers = (
        msgspec.structs.replace(worker, bound=tuple(cleaned(why, 1000) for why in worker.bound))
        for worker in report.workers
    )
    return SiteStats(
        workers=(*others.workers, *workers),
        restarts=others.restarts + report.restarts,
        tokens=others.tokens + Traffic(*report.tokens),
        limits=(*others.limits, *report.limits),
    )


def _absent(sites: set[str]) -> FlareError:
    names = ", ".join(map(repr, sorted(sites)))
    advice = "The job goes on when they are back: find it again with session.reattach"
    return FlareError(f"the job waits for sites whose clients are not connected: {names}", advice)


def _find(job_id: str, number: int) -> fm.Find:
    return fm.Find(number, job_id)


def _has(connection: HubConnection, plan: Plan) -> bool:
    """Return whether all sites of a plan are present."""
    return connection.welcome is not None and set(plan.sites) <= connection.welcome.sites.keys()


def _called(plan: Plan, site: str) -> list[str]:
    """Return the operations that a plan calls at a site; advice that it asks for says itself what is not offered."""
    at_site = [at for at, name in enumerate(plan.sites_at) if name == site]
    return list(dict.fromkeys(name for at in at_site for name in plan.operations_at(at)))


_OF_JOBS: Final[dict[type, Callable[[RemoteJob, Any], None]]] = {
    fm.Submitted: RemoteJob.answered,
    fm.RowsStored: RemoteJob.take_stored,
    fm.Events: RemoteJob.take_events,
    fm.Expired: RemoteJob.take_expired,
    fm.JobState: RemoteJob.take_state,
    fm.Relayed: RemoteJob.take_relayed,
    fm.EventTaken: RemoteJob.take_answer,
}
"""What the hub sends about jobs; ignored if the job is not known, or has ended."""
_HANDLERS: Final[dict[type, Callable[[FlareTarget, HubConnection, Any], None]]] = {
    fm.Welcome: FlareTarget._welcomed,  # noqa: SLF001 - same module
    fm.FoundJob: FlareTarget._answered,  # noqa: SLF001
    fm.Listed: FlareTarget._answered,  # noqa: SLF001
    fm.Asked: FlareTarget._answered,  # noqa: SLF001
    fm.SiteReport: FlareTarget._report,  # noqa: SLF001
    fm.LogLines: FlareTarget._logged,  # noqa: SLF001
}
