"""The FLARE target: jobs run in the federation, in a FLARE job that carries those of one user."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import anyio

from dfm_async.errors import DfmError, EncodingError, FlareError, PipelineError, Problem, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import FlareOptions
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.stats import SiteStats, TargetStats, Traffic, WorkerStats
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan, plan_from_json
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import Bells
from dfm_async.targets.flare import messages as fm
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
_LOOK_AGAIN: Final = 5.0
"""For how many seconds it is believed that a user has the carriers that were found."""
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
        self._connection: HubConnection | None = None
        """That which new jobs take."""
        self._older: list[HubConnection] = []
        """Those to other carriers, which have jobs of ours."""
        self._asked: list[HubConnection] = []
        """Those that are asked for jobs."""
        self._connecting: asyncio.Future[HubConnection] | None = None
        self._offers: dict[str, fm.Offer] = {}
        self._reports: dict[str, fm.SiteReport] = {}
        self._requests: dict[int, tuple[HubConnection, asyncio.Future[Any]]] = {}
        self._last_request = 0
        self._looking = asyncio.Lock()
        self._carriers: tuple[float, list[str]] = (-math.inf, [])
        """Until when it is believed which carriers this user has, and which these are."""
        self._group: asyncio.TaskGroup | None = None
        self._supervisions: list[asyncio.Task[None]] = []
        self._seen: set[str] = set()
        """The sites that were there: they may come back."""

    # life

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Connects to the carrier of this user's jobs, or starts one, and stays connected.

        Raises:
            FlareError: the federation cannot be reached, or its sites do not start.
            ShippingError: the code of an operation cannot be sent to its site.
        """
        self._federation, self._homesite = federation, homesite
        for site in federation.sites.values():
            for adapter in site.adapters.values():
                for hint in adapter.signature.named:
                    self._classes.add(hint)
        if self.options.code == "travels":
            self._offers = self._ship(federation, homesite)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_shielded, self._close)
            stack.enter_context(_one_error())
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.push_async_callback(self._end_supervision)
            await self._connected()
            yield

    def _ship(self, federation: Federation, homesite: str) -> dict[str, fm.Offer]:
        lanes = self._lanes()
        offers = {}
        sites = dict(federation.sites)
        if homesite not in sites:  # it offers nothing, but pipelines may do something without operations there
            sites[homesite] = Federation(federation.name).site(homesite)
        for name, site in sites.items():
            shipped = ship_site(site, homesite)
            key = hashlib.sha256(shipped).hexdigest()
            offers[name] = fm.Offer(key, name, shipped, site.workers, site.threads, lanes)
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

    async def _connected(self) -> HubConnection:
        """The connection; a new one if the former was lost, for the first who needs it and all others.

        Raises:
            FlareError: the federation cannot be reached.
            SessionClosed: it is too late.
        """
        connection = self._connection
        if connection is not None and connection.lost is None:
            return connection
        return await self._another()

    async def _another(self, needed: Collection[str] = ()) -> HubConnection:
        """Connects anew, for the first who needs it and all others."""
        if self._group is None:
            raise SessionClosed("the session was closed")
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_future()
            self._group.create_task(self._connect_for(self._connecting, needed), name="connection to the federation")
        return await asyncio.shield(self._connecting)

    async def _connect_for(self, waiting: asyncio.Future[HubConnection], needed: Collection[str]) -> None:
        """Connects for those who wait: a failure is theirs, and does not end the session."""
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # they may have gone
        try:
            waiting.set_result(await self._connect(needed))
        except (DfmError, OSError) as error:
            waiting.set_exception(error)
        finally:
            self._connecting = None
            waiting.cancel()

    async def _connect(self, needed: Collection[str]) -> HubConnection:
        assert self._federation is not None  # noqa: S101 - set while running
        connection = self._new_connection()
        try:
            await connection.open(self._federation.sites, self._homesite, needed)
        except BaseException:
            await _shielded(connection.close)
            raise
        former = self._connection
        if former is not None and former.lost is None and former.carrier == connection.carrier:
            await connection.close()
            return former
        self._connection = connection
        if former is not None:
            self._older.append(former)
            self._tidy()
        self._supervise(connection)
        return connection

    def _new_connection(self) -> HubConnection:
        greetings = list(self._offers.values())
        return HubConnection(self.options, self._hello(), greetings, self._receive, self._give_up)

    def _supervise(self, connection: HubConnection) -> None:
        assert self._group is not None  # noqa: S101 - it is ended only when nobody connects
        self._supervisions.append(self._group.create_task(connection.supervise(), name="ways to the hub"))
        self._expect()

    @property
    def _open_connections(self) -> list[HubConnection]:
        """Those to all carriers that we know, that for new jobs first."""
        return [found for found in (self._connection, *self._older) if found is not None and found.lost is None]

    @asynccontextmanager
    async def _kept(self, connections: list[HubConnection]) -> AsyncIterator[list[HubConnection]]:
        """Connections are kept while they are asked, also if no job needs them."""
        self._asked += connections
        try:
            yield connections
        finally:
            for connection in connections:
                self._asked.remove(connection)
            self._tidy()

    async def _others(self) -> list[HubConnection]:
        """Connects to the carriers of this user that we do not know yet: they can have jobs of an earlier session.

        A user has several when a site was lost and is back: a carrier that runs cannot have it again.

        Raises:
            FlareError: the federation cannot be reached.
        """
        loop = asyncio.get_running_loop()
        found: list[HubConnection] = []
        async with self._looking:
            if loop.time() > self._carriers[0]:
                self._carriers = (loop.time() + _LOOK_AGAIN, await (await self._connected()).carriers())
            for carrier in self._carriers[1]:
                if carrier not in {known.carrier for known in self._open_connections}:
                    found += await self._at(carrier)
        return found

    async def _at(self, carrier: str) -> list[HubConnection]:
        """Connects to a carrier, if it can be reached."""
        connection = self._new_connection()
        try:
            await connection.open_at(carrier)
        except FlareError as error:
            _log.warning("a carrier of jobs of %s cannot be reached: %s", self.options.user, error)
            await connection.close()
            return []
        except BaseException:
            await _shielded(connection.close)
            raise
        self._older.append(connection)
        self._supervise(connection)
        return [connection]

    def _tidy(self) -> None:
        """Closes connections that no job needs any more, and nobody has just opened to ask."""
        if self._looking.locked():
            return
        needed = {id(job.connection) for job in self.jobs.coordinators}
        needed |= {id(connection) for connection, _ in self._requests.values()}
        needed |= {id(connection) for connection in self._asked}
        for connection in [older for older in self._older if id(older) not in needed]:
            self._older.remove(connection)
            if self._group is not None:
                self._group.create_task(connection.close(), name="end of a connection")

    async def _end_supervision(self) -> None:
        self._group = None
        for task in self._supervisions:
            task.cancel()

    def _give_up(self, connection: HubConnection, error: FlareError) -> None:
        """A hub cannot be reached any more: nobody here can tell what becomes of its jobs."""
        for job in self.jobs.coordinators:
            if job.connection is connection:
                job.lost(error)
        for asked, future in self._requests.values():
            if asked is connection and not future.done():
                future.set_exception(error)
        self._reports.clear()
        self.worker_bells.ring()

    async def _close(self) -> None:
        connections = [*self._older, self._connection]
        self._connection = None
        for connection in connections:
            if connection is not None:
                await connection.close()
        self.jobs.close()
        self.worker_bells.close()

    # messages

    def _expect(self) -> None:
        """Tells the connections whether the hubs will have something to say."""
        busy = {id(job.connection) for job in self.jobs.coordinators}
        busy |= {id(connection) for connection, _ in self._requests.values()}
        for connection in (*self._older, self._connection):
            if connection is not None:
                connection.expect(busy=id(connection) in busy)

    def _receive(self, message: Any) -> None:
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message)

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

    def _found(self, message: fm.Found | fm.Listed | fm.Asked) -> None:
        _, future = self._requests.get(message.request, (None, None))
        if future is not None and not future.done():
            future.set_result(message)

    def _report(self, message: fm.SiteReport) -> None:
        self._reports[message.location] = message
        if not message.workers:
            del self._reports[message.location]
        self.worker_bells.ring()

    def _logged(self, message: fm.LogLines) -> None:
        for line in message.lines:
            replay(message.site, line)
        if message.left_out:
            _log.warning("%d log records of site %s found no room", message.left_out, message.site)

    async def _ask(self, connection: HubConnection, make: Callable[[int], Any]) -> Any:
        if connection.lost is not None:
            raise connection.lost
        self._last_request += 1
        number = self._last_request
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[number] = (connection, future)
        connection.send(make(number))
        self._expect()
        try:
            return await future
        finally:
            del self._requests[number]
            self._expect()

    # jobs

    def coordinate(self, record: JobRecord, rules: JobRules, pack_rows: Callable[[Any], list[Row]]) -> RemoteJob:
        """Makes what a session steers a new job by."""
        return RemoteJob(record, self.codec, rules, detach=self.options.on_close == "detach")

    async def refusals(self, plan: Plan) -> list[Problem]:
        """What the federation cannot give.

        Raises:
            FlareError: the federation cannot be reached.
        """
        connection, problems = await self._connected(), self._unsendable(plan)
        if not _has(connection, plan):  # a site that was lost may have come back since: another carrier can have it
            connection = await self._another(self._seen.intersection(plan.sites))
        welcome = connection.welcome
        assert welcome is not None  # noqa: S101 - it was welcomed when it was opened
        assert self._federation is not None  # noqa: S101 - set while running
        for site in plan.sites:
            found = welcome.sites.get(site)
            if found is None:
                why = welcome.gone.get(site, "no client of this name is connected to the federation")
                if site == self._homesite and site not in welcome.gone:
                    why = "it has no client in the federation, so that nothing can run there"
                problems.append(Problem(f"site {site}", why))
            elif self._offers:
                if not found.allow_code:
                    problems.append(Problem(f"site {site}", "it does not run code that applications bring"))
            elif found.problem:
                problems.append(Problem(f"site {site}", found.problem))
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
        connection = await self._connected()
        if not _has(connection, job.plan):  # a plan that was prepared when its sites were there
            problems = await self.refusals(job.plan)
            if problems:
                raise PipelineError(job.plan.pipeline, problems)
            connection = await self._connected()
        job.connection = connection
        self.jobs.add(job)
        job.on_end(self._job_ended)
        self._expect()
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
        await self._connected()
        return await self._find_in(self._open_connections, job_id) or await self._find_in(await self._others(), job_id)

    async def _find_in(self, connections: list[HubConnection], job_id: str) -> JobRecord | None:
        async with self._kept(connections):
            for connection in connections:
                if (known := await self._find_at(connection, job_id)) is not None:
                    return known
        return None

    async def _find_at(self, connection: HubConnection, job_id: str) -> JobRecord | None:
        answer: fm.Found = await self._ask(connection, lambda number: fm.Find(number, job_id))
        known = self.jobs.find(job_id)  # somebody else may have asked for it, too
        if known is not None or answer.known is None:
            return known
        return self._adopt(connection, answer.known)

    def _job_ended(self, _job: RemoteJob) -> None:
        self._expect()
        self._tidy()

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
        self.jobs.add(job)
        job.on_end(self._job_ended)
        job.follow()
        self._expect()
        return record

    def _constant(self, data: bytes) -> Any:
        """A constant of a plan that the federation has kept; one of a class that we do not know stays as it is."""
        try:
            return self.codec.loads(data)
        except EncodingError:
            return data

    async def refresh(self) -> None:
        """Gets to know all jobs of this user that the federation knows."""
        await self._others()
        async with self._kept(self._open_connections) as connections:
            for connection in connections:
                answer: fm.Listed = await self._ask(connection, fm.ListJobs)
                for job_id in answer.job_ids:
                    if self.jobs.find(job_id) is None:
                        await self._find_at(connection, job_id)

    async def forget(self, job_id: str) -> None:
        """Has the federation forget a job that has ended."""
        for connection in self._open_connections:
            connection.send(fm.Forget(job_id))

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs that this application has started, or lets them go on; returns when they have ended."""
        running = self.jobs.coordinators
        for job in running:
            job.shut_down(reason, grace)
        for job in running:
            await job.record.completion_event.wait()
        try:  # what the sites have said before is told before the session ends, if they are still there
            async with asyncio.timeout(_LAST_WORDS):
                for connection in self._open_connections:
                    await self._ask(connection, fm.Asked)
        except (FlareError, TimeoutError):
            _log.debug("the last log records of the sites may be missing")

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""
        jobs = self.jobs.coordinators
        waiting = sum(job.record.status is JobStatus.SUBMITTED for job in jobs)
        sites = {
            location: SiteStats(
                workers=tuple(
                    WorkerStats(
                        pid=worker.pid,
                        jobs=worker.jobs,
                        memory=worker.memory,
                        lag=worker.lag,
                        unresponsive=worker.unresponsive,
                        retired=worker.retired,
                    )
                    for worker in report.workers
                ),
                restarts=report.restarts,
                tokens=Traffic(*report.tokens),
            )
            for location, report in self._reports.items()
        }
        way = None if self._connection is None else self._connection.way
        return TargetStats(running=len(jobs) - waiting, waiting=waiting, sites=sites, way=way)


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


@contextmanager
def _one_error() -> Iterator[None]:
    """An error of a single task is told as it is."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


async def _shielded(work: Callable[[], Any]) -> None:
    with anyio.CancelScope(shield=True):
        await work()


_HANDLERS: Final[dict[type, Callable[[FlareTarget, Any], None]]] = {
    fm.Submitted: FlareTarget._submitted,  # noqa: SLF001 - same module
    fm.Events: FlareTarget._events,  # noqa: SLF001
    fm.Expired: FlareTarget._expired,  # noqa: SLF001
    fm.JobState: FlareTarget._state,  # noqa: SLF001
    fm.Relayed: FlareTarget._relayed,  # noqa: SLF001
    fm.Welcome: FlareTarget._welcomed,  # noqa: SLF001
    fm.Found: FlareTarget._found,  # noqa: SLF001
    fm.Listed: FlareTarget._found,  # noqa: SLF001
    fm.Asked: FlareTarget._found,  # noqa: SLF001
    fm.SiteReport: FlareTarget._report,  # noqa: SLF001
    fm.LogLines: FlareTarget._logged,  # noqa: SLF001
}
