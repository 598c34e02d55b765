"""The FLARE target: jobs run in the federation, in a FLARE job that carries those of one user."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import platform
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio

from dfm_async.errors import DfmError, EncodingError, FlareError, Problem, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import FlareOptions
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.stats import SiteStats, TargetStats, Traffic, WorkerStats
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import Bells
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.admin import Admin
from dfm_async.targets.flare.gateway_memory import GatewayMemory
from dfm_async.targets.flare.installed import operations_of
from dfm_async.targets.flare.job_folder import carrier_name, write_job
from dfm_async.targets.flare.line import CommandLine, GatewayLine, Line
from dfm_async.targets.flare.mirror import RemoteJob
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.site_log import replay
from dfm_async.targets.frames import Row
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.rules import JobRules
from dfm_async.version import VERSION
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.workers.shipping import ship_site

__all__ = ["FlareTarget"]

_log = logging.getLogger(__name__)

_LAST_WORDS: Final = 2.0
"""For how many seconds closing waits for what the sites have to say."""


class FlareTarget:
    """Runs jobs over the sites of a federation on NVIDIA FLARE.

    Args:
        options: where the federation is, and how it is reached.
    """

    def __init__(self, options: FlareOptions) -> None:
        self.options = options
        self.codec = Codec(trusted=False)
        self.jobs: JobTable[RemoteJob] = JobTable(options.local)
        self.worker_bells = Bells()
        self._admin = Admin(options.startup_kit, options.user)
        self._memory = GatewayMemory(Path(options.startup_kit), carrier_name(options))
        self._federation: Federation | None = None
        self._homesite = ""
        self._carrier = ""
        self._line: Line | None = None
        self._welcome: fm.Welcome | None = None
        self._changed: asyncio.Future[None] | None = None
        self._offers: dict[str, fm.Offer] = {}
        self._reports: dict[str, fm.SiteReport] = {}
        self._lost: DfmError | None = None
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._last_request = 0
        self._group: asyncio.TaskGroup | None = None

    # life

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Connects to the carrier of this user's jobs, or starts one, and stays connected.

        Raises:
            FlareError: the federation cannot be reached, or its sites do not start.
            ShippingError: the code of an operation cannot be sent to its site.
        """
        self._federation, self._homesite = federation, homesite
        if self.options.code == "travels":
            self._offers = self._ship(federation, homesite)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_shielded, self._close)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            await self._connect(federation, homesite)
            try:
                yield
            finally:
                self._group = None

    def _ship(self, federation: Federation, homesite: str) -> dict[str, fm.Offer]:
        lanes = self.options.local.lanes_for(site.workers for site in federation.sites.values())
        offers = {}
        sites = dict(federation.sites)
        if homesite not in sites:  # it offers nothing, but pipelines may do something without operations there
            sites[homesite] = Federation(federation.name).site(homesite)
        for name, site in sites.items():
            shipped = ship_site(site, homesite)
            key = hashlib.sha256(shipped).hexdigest()
            offers[name] = fm.Offer(key, name, shipped, site.workers, site.threads, lanes)
        return offers

    async def _connect(self, federation: Federation, homesite: str) -> None:
        try:
            async with asyncio.timeout(self.options.start_timeout):
                if await self._known_gateway(federation):
                    return
                await self._open_admin()
                clients = await self._admin.clients()
                wanted = {name for name in [homesite, *federation.sites] if name in clients} | {HUB}
                name = carrier_name(self.options)
                running = await self._admin.carriers(name)
                if not running or not await self._try_carrier(running[0], wanted):
                    with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
                        write_job(Path(folder) / "job", name, clients, self.options)
                        carrier = await self._admin.submit(Path(folder) / "job")
                    await self._try_carrier(carrier, wanted)
                await self._try_gateway()
        except TimeoutError:
            raise FlareError(self._what_is_missing(federation, homesite), "Ask 'dfm-async flare doctor'") from None

    async def _open_admin(self) -> None:
        if not self._admin.is_open:
            await self._admin.open(self.options.start_timeout)

    async def _known_gateway(self, federation: Federation) -> bool:
        """Goes through the gateway of an earlier session, if all sites are there; that takes no time."""
        address = self._memory.address() if self.options.gateway == "auto" else None
        if address is None:
            return False
        line = GatewayLine(self._receive, self._line_lost)
        try:
            await line.open(address)
        except OSError:
            self._memory.forget()
            return False
        await self._open_line(line)
        try:
            await self._welcomed_on(line)
        except FlareError:
            self._lost = None
        welcome = self._welcome
        if self._line is line and welcome is not None and all(name in welcome.sites for name in federation.sites):
            self._carrier = welcome.carrier
            return True
        await self._leave_line()
        return False

    async def _welcomed_on(self, line: Line) -> None:
        """Waits until the hub has answered on a line, or the line is lost."""
        while self._welcome is None and self._line is line:
            await self._wait_for_change()

    async def _leave_line(self) -> None:
        line, self._line, self._welcome = self._line, None, None
        if line is not None:
            line.send(fm.encode(fm.Leave()))
            await line.close()

    async def _try_carrier(self, carrier: str, wanted: set[str]) -> bool:
        """Connects to a carrier by commands; False if it was not sent to all sites that are wanted, or lost some."""
        self._carrier = carrier
        options = self.options
        line = CommandLine(self._admin, carrier, self._receive, self._line_lost, options.start_timeout)
        line.open()
        await self._open_line(line)
        while True:
            welcome = self._welcome
            if welcome is not None:
                if wanted - set(welcome.deployed) or wanted & welcome.gone.keys():
                    await self._leave_line()
                    return False
                if wanted <= welcome.sites.keys():
                    return True
            await self._wait_for_change()

    def _what_is_missing(self, federation: Federation, homesite: str) -> str:
        seconds = self.options.start_timeout
        if self._welcome is None:
            return f"the federation has not answered within {seconds:g} s"
        missing = [name for name in [homesite, *federation.sites] if name not in self._welcome.sites]
        return f"after {seconds:g} s these sites are not ready: {', '.join(dict.fromkeys(missing))}"

    async def _open_line(self, line: Line) -> None:
        self._line = line
        local = self.options.local
        lanes = self._lanes()
        slots = local.max_concurrent_jobs or lanes * local.jobs_per_lane
        self._send(
            fm.AppHello(
                fm.PROTOCOL,
                VERSION,
                self._homesite,
                lanes,
                slots,
                local.queue_limit,
                local.queue_overflow,
                self.options.linger,
            )
        )
        for offer in self._offers.values():
            self._send(offer)
        line.expect(busy=True)

    def _lanes(self) -> int:
        assert self._federation is not None  # noqa: S101 - set while running
        return self.options.local.lanes_for(site.workers for site in self._federation.sites.values())

    async def _try_gateway(self) -> None:
        """Goes on through the homesite's gateway, if that is on this machine."""
        assert self._welcome is not None  # noqa: S101 - the hub has said it
        host, address = self._welcome.gateway
        if not address or self.options.gateway == "never" or host != platform.node():
            self._expect()
            return
        line = GatewayLine(self._receive, self._line_lost)
        try:
            await line.open(address)
        except OSError as error:
            _log.info("the gateway of %s cannot be reached (%s): app commands are used", self._homesite, error)
            self._expect()
            return
        before, self._welcome = self._line, None
        await self._open_line(line)
        await self._welcomed_on(line)
        if before is not None:
            before.send(fm.encode(fm.Leave()))
            await before.close()
        self._memory.keep(address)

    def _line_lost(self, error: FlareError) -> None:
        line, group = self._line, self._group
        if group is None or line is None:
            return
        self._line = None
        self._change()
        group.create_task(self._mend(line, error), name="another way to the hub")

    async def _mend(self, line: Line, error: FlareError) -> None:
        """The way to the hub is lost: takes another one, or gives up all jobs."""
        try:
            await line.close()
            if line.kind == "commands":
                raise error
            async with asyncio.timeout(self.options.start_timeout):
                self._memory.forget()
                await self._open_admin()
                other = CommandLine(
                    self._admin, self._carrier, self._receive, self._line_lost, self.options.delivery_timeout
                )
                self._welcome = None
                other.open()
                await self._open_line(other)
                for job in self.jobs.coordinators:
                    job.again()
                await self._welcomed_on(other)
        except (FlareError, TimeoutError) as reason:
            self._give_up(FlareError(f"the federation cannot be reached any more: {reason}", ""))

    def _give_up(self, error: DfmError) -> None:
        self._lost = error
        for job in self.jobs.coordinators:
            job.lost(error)
        for future in self._requests.values():
            if not future.done():
                future.set_exception(error)
        self._change()

    async def _close(self) -> None:
        await self._leave_line()
        self.jobs.close()
        self.worker_bells.close()
        await self._admin.close()

    def _change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _wait_for_change(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    # messages

    def _send(self, message: Any) -> None:
        if self._line is not None:
            self._line.send(fm.encode(message))

    def _expect(self) -> None:
        """Tells the line whether the hub will have something to say."""
        if self._line is not None:
            self._line.expect(busy=bool(self.jobs.coordinators or self._requests))

    def _receive(self, data: bytes) -> None:
        message = fm.decode_hub(data)
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
        if message.protocol != fm.PROTOCOL:
            text = f"the federation has version {message.version} of dfm_async, and this application {VERSION}"
            self._give_up(FlareError(text, "Install one version"))
            return
        self._welcome = message
        self._change()

    def _found(self, message: fm.Found | fm.Listed | fm.Asked) -> None:
        future = self._requests.get(message.request)
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

    def _bye(self, message: fm.Bye) -> None:
        self._give_up(FlareError(f"the carrier has ended: {message.reason}", "Connect again"))

    async def _ask(self, make: Callable[[int], Any]) -> Any:
        if self._lost is not None:
            raise self._lost
        self._last_request += 1
        number = self._last_request
        future = self._requests[number] = asyncio.get_running_loop().create_future()
        self._send(make(number))
        self._expect()
        try:
            return await future
        finally:
            del self._requests[number]
            self._expect()

    # jobs

    def coordinate(self, record: JobRecord, rules: JobRules, pack_rows: Callable[[Any], list[Row]]) -> RemoteJob:
        """Makes what a session steers a new job by."""
        return RemoteJob(record, self.codec, rules, self._send, detach=self.options.on_close == "detach")

    def refusals(self, plan: Plan) -> list[Problem]:
        """What the federation cannot give."""
        welcome, problems = self._welcome, self._unsendable(plan)
        if welcome is None:
            return []
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
            FlareError: the federation cannot be reached any more.
        """
        if self._lost is not None:
            raise self._lost
        if self._line is None:
            raise SessionClosed("the session was closed")
        self.jobs.add(job)
        job.on_end(lambda _: self._expect())
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
        answer: fm.Found = await self._ask(lambda number: fm.Find(number, job_id))
        known = self.jobs.find(job_id)  # somebody else may have asked for it, too
        return known if known is not None or answer.known is None else self._adopt(answer.known)

    def _adopt(self, found: fm.Known) -> JobRecord:
        plan = Plan.from_json(found.plan)
        record = JobRecord(JobId(found.job_id), JobNumber(0), plan, found.limits, None, found.first)
        record.fingerprint, record.label, record.created = found.fingerprint, found.label, found.created
        rules = JobRules()
        job = RemoteJob(record, self.codec, rules, self._send, detach=True)
        job.frames.added = found.state.added
        record.open_frames.update(dict.fromkeys(found.open, 1))
        record.next_frame = found.state.added
        job.take_state(found.state)
        self.jobs.add(job)
        job.on_end(lambda _: self._expect())
        job.follow()
        self._expect()
        return record

    async def refresh(self) -> None:
        """Gets to know all jobs of this user that the federation knows."""
        answer: fm.Listed = await self._ask(fm.ListJobs)
        for job_id in answer.job_ids:
            await self.find(job_id)

    async def forget(self, job_id: str) -> None:
        """Has the federation forget a job that has ended."""
        self._send(fm.Forget(job_id))

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs that this application has started, or lets them go on; returns when they have ended."""
        running = self.jobs.coordinators
        for job in running:
            job.shut_down(reason, grace)
        for job in running:
            await job.record.completion_event.wait()
        try:  # what the sites have said before is told before the session ends, if they are still there
            async with asyncio.timeout(_LAST_WORDS):
                await self._ask(fm.Asked)
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
        way = None if self._line is None else self._line.kind
        return TargetStats(running=len(jobs) - waiting, waiting=waiting, sites=sites, way=way)


def _called(plan: Plan, site: str) -> list[str]:
    from dfm_async.net import spec

    found: dict[str, None] = {}
    for at, name in enumerate(plan.sites_at):
        if name == site:
            for transition in plan.nets[at].transitions:
                if isinstance(transition.action, spec.Call):
                    found[transition.action.operation] = None
    return list(found)


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
    fm.Bye: FlareTarget._bye,  # noqa: SLF001
}
