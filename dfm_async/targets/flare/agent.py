"""A site past one machine: seats the locations of jobs on its workers, and takes their messages to and from others."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec

from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import SiteStats
from dfm_async.net import spec
from dfm_async.runtime.faults import broken_record
from dfm_async.runtime.once import in_thread
from dfm_async.site.authorizing import Authorizer, Denied, PipelineRequest
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.crew import Crew
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.site_log import SiteLog
from dfm_async.wire import messages as msg
from dfm_async.workers.site_worker import SiteWorker, remember_net
from dfm_async.workers.start import ForkServer, choose_method

__all__ = ["BETWEEN_SITES", "FROM_HUB", "Installed", "SiteAgent", "User"]

_log = logging.getLogger(__name__)

BETWEEN_SITES: Final = frozenset(
    {msg.Tokens, msg.LoopEnded, msg.ElementDone, msg.StreamPull, msg.StreamItems, msg.StreamClose}
)
"""What sites say to each other; all of it is for one location of one job."""
FROM_HUB: Final = frozenset({msg.StartJob, msg.OpenFrames, msg.Credit, msg.CancelJob, msg.PlaceTaken, msg.SpansTaken})
"""What only the hub says to a location."""
_REPORT_EVERY: Final = 0.5
_FULL: Final = 64 * 1024 * 1024
"""From how many bytes on that wait to be sent the workers wait, too; they go on at half of it."""

_net: Final = msgspec.msgpack.Decoder(spec.Net)


class User(msgspec.Struct, frozen=True):
    """Whose jobs a carrier carries, as FLARE has authenticated them."""

    name: str
    org: str
    role: str
    brings_code: bool
    """Whether FLARE has allowed them to bring code to this site."""


class Installed(msgspec.Struct, frozen=True):
    """What is installed at a site: its operations, their fingerprints, and their code ready for workers."""

    operations: dict[str, str]
    shipped: bytes | None
    workers: int | None = None
    threads: int = 8
    problem: str = ""
    """Why nothing is offered, if something is wrong with it."""


class Sender(Protocol):
    """What an agent needs of its node."""

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent."""
        ...

    def send(self, peer: str, message: Any) -> None:
        """Sends a message."""
        ...


class _Seat:
    """One location of one job: what its worker's pool tells of the worker."""

    def __init__(self, agent: SiteAgent, request: fm.Seat, crew: Crew, worker: SiteWorker, allowed: int | None) -> None:
        self.request = request
        self.crew = crew
        self.worker = worker
        self.allowed = allowed
        self.taken = 0
        self._agent = agent

    def lost(self, at: int, error: WorkerLost) -> None:
        self._agent.seat_lost(self, at, error)

    def unresponsive(self, at: int, _site: str, seconds: float) -> None:
        self._agent.tell(fm.SeatSilent(self.request.job, at, seconds))

    def responsive(self, at: int, _site: str) -> None:
        self._agent.tell(fm.SeatResponds(self.request.job, at))


class SiteAgent(AbstractAsyncContextManager["SiteAgent"]):
    """Runs the parts of jobs that belong to one site.

    Args:
        settings: what the site decides for itself.
        user: whose jobs come.
        installed: what the site offers.
        options: how workers start, and the graces.
        audit: where it is recorded what others did.
        authorizer: who decides about pipelines, beside FLARE.
    """

    def __init__(
        self,
        settings: SiteSettings,
        user: User,
        installed: Installed,
        options: LocalOptions,
        audit: AuditLog,
        authorizer: Authorizer | None,
    ) -> None:
        self.site = settings.site
        self._settings = settings
        self._user = user
        self._installed = installed
        self._options = options
        self._audit = audit
        self._authorizer = authorizer
        self._node: Sender | None = None
        self._fork_server: ForkServer | None = None
        self._offers: dict[str, fm.Offer] = {}
        self._crews: dict[str, Crew] = {}
        self._jobs: dict[int, dict[int, _Seat]] = {}
        self._seating: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._report_timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._log = SiteLog(self.site, self.tell)

    @property
    def allow_code(self) -> bool:
        """Whether code of the user runs here: the site allows it, and FLARE has allowed this user to bring it."""
        return self._settings.allow_code and self._user.brings_code

    def hello(self, version: str, host: str, gateway: str = "") -> fm.SiteHello:
        """What the site tells of itself."""
        return fm.SiteHello(
            self.site,
            fm.PROTOCOL,
            version,
            host,
            self._installed.operations,
            self.allow_code,
            gateway,
            self._installed.problem,
        )

    def attach(self, node: Sender) -> None:
        """Says where messages go."""
        self._node = node

    def tell(self, message: Any) -> None:
        """Tells the hub something."""
        if self._node is not None:
            self._node.send(HUB, message)

    async def __aenter__(self) -> SiteAgent:
        if choose_method(self._options.start_method) == "forkserver":
            self._fork_server = ForkServer.acquire(self._options.preload)
            await in_thread(self._fork_server.warm, "fork-server")
        self._log.open()
        self._audit.write("opened", user=self._user.name, org=self._user.org, role=self._user.role)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
        tasks = [*self._tasks, *self._seating.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(crew.shut_down(self._options.shutdown_grace) for crew in self._crews.values()))
        self._crews.clear()
        self._log.close()
        if self._fork_server is not None:
            await in_thread(self._fork_server.release, "fork-server")
        self._audit.write("closed")
        self._audit.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # messages from others

    def receive(self, peer: str, message: Any) -> None:
        """Takes a message of the hub, or of another site."""
        kind = type(message)
        if kind in BETWEEN_SITES:
            seat = self._find(message)
            if seat is not None and peer in seat.request.sites:
                self._to_worker(seat, message)
        elif peer != HUB:
            _log.warning("site %s said %s, which only the hub may say", peer, kind.__name__)
        elif kind in FROM_HUB:
            seat = self._find(message)
            if seat is not None:
                self._to_worker(seat, message)
            elif kind is msg.CancelJob:
                self.tell(msg.JobStopped(message.job, message.at))
        else:
            handler = _HANDLERS.get(kind)
            if handler is not None:
                handler(self, message)

    def _find(self, message: Any) -> _Seat | None:
        return self._jobs.get(message.job, {}).get(message.at)

    def _to_worker(self, seat: _Seat, message: Any) -> None:
        if type(message) in msg.CARRIERS and not self._fits(seat, len(message.payload)):
            return
        if seat.worker.channel is not None:
            seat.worker.channel.send(message)

    def _fits(self, seat: _Seat, size: int) -> bool:
        seat.taken += size
        if seat.allowed is None or seat.taken <= seat.allowed:
            return True
        request = seat.request
        if seat.taken - size <= seat.allowed:  # told once
            text = f"job {request.job_id} may send {seat.allowed:,} bytes to site {self.site!r}, and has sent more"
            self._audit.write("too much", job=request.job_id, bytes=seat.taken, allowed=seat.allowed)
            self.tell(msg.JobBroken(request.job, request.at, broken_record(self.site, Denied(text))))
        return False

    # code

    def _offer(self, offer: fm.Offer) -> None:
        digest = hashlib.sha256(offer.shipped).hexdigest()
        if not self.allow_code:
            _log.warning("user %s offers code, which this site does not allow", self._user.name)
        elif offer.site == self.site and offer.key == digest:
            self._offers[offer.key] = offer
            self._audit.write("code", user=self._user.name, sha256=digest, bytes=len(offer.shipped))

    def _drop(self, message: fm.Drop) -> None:
        self._offers.pop(message.key, None)
        crew = self._crews.get(message.key)
        if crew is not None:
            crew.wanted = False
            self._check_crew(message.key, crew)

    def _check_crew(self, key: str, crew: Crew) -> None:
        if not crew.wanted and not crew.seats and self._crews.get(key) is crew:
            del self._crews[key]
            self._spawn(crew.shut_down(self._options.shutdown_grace))

    def _crew(self, key: str) -> Crew:
        """The crew for some code; empty means what is installed.

        Raises:
            DfmError: there is no such code here, and why.
        """
        crew = self._crews.get(key)
        if crew is not None:
            return crew
        installed = self._installed
        shipped, workers, threads, lanes = installed.shipped, installed.workers, installed.threads, 0
        if key:
            offer = self._offers.get(key)
            if offer is None:
                raise DfmError(f"site {self.site!r} does not run code that users bring (allow_code in its settings)")
            shipped, workers, threads, lanes = offer.shipped, offer.workers, offer.threads, offer.lanes
        if shipped is None:
            raise DfmError(f"site {self.site!r} offers nothing: {installed.problem or 'no federation is installed'}")
        crew = self._crews[key] = Crew(
            self.site,
            shipped,
            workers,
            threads,
            lanes or self._options.lanes_for([workers]),
            self._options,
            self._fork_server,
            self._from_worker,
            self._changed,
        )
        return crew

    # seats

    def _seat(self, request: fm.Seat) -> None:
        key = (request.job, request.at)
        task = asyncio.get_running_loop().create_task(self._take_seat(request), name=f"seat of {request.job_id}")
        self._seating[key] = task
        task.add_done_callback(lambda _: self._seating.pop(key, None))

    async def _take_seat(self, request: fm.Seat) -> None:
        try:
            allowed = await self._authorize(request)
            crew = self._crew(request.offer)
            worker = await self._ready(request, crew, allowed)
        except Denied as error:
            self._audit.write("denied", user=self._user.name, job=request.job_id, reason=str(error))
            self.tell(fm.SeatRefused(request.job, request.at, "denied", str(error)))
        except WorkerLost as error:
            self.tell(_lost(request.job, request.at, error))
        except Exception as error:  # noqa: BLE001 - whatever starting a process or the site's own authorizer raises
            _log.debug("job %s cannot run here", request.job_id, exc_info=True)
            text = str(error) if isinstance(error, DfmError) else f"{type(error).__name__}: {error}"
            self.tell(fm.SeatRefused(request.job, request.at, "failed", text))
        else:
            self._audit.write("seated", user=self._user.name, job=request.job_id, location=request.location)
            self.tell(fm.Seated(request.job, request.at, worker.address))

    async def _authorize(self, request: fm.Seat) -> int | None:
        operations = _operations(request.net)
        wanted = PipelineRequest(
            user=self._user.name,
            org=self._user.org,
            role=self._user.role,
            job_id=request.job_id,
            pipeline=request.pipeline,
            operations=operations,
            sites=tuple(dict.fromkeys(request.sites)),
            bytes=request.size,
            brings_code=bool(request.offer),
        )
        self._audit.write(
            "asked",
            user=wanted.user,
            job=wanted.job_id,
            pipeline=wanted.pipeline,
            operations=operations,
            bytes=wanted.bytes,
            brings_code=wanted.brings_code,
        )
        allowed = None if self._authorizer is None else await self._authorizer.authorize(wanted)
        limits = [limit for limit in (allowed, self._settings.max_job_bytes) if limit is not None]
        return min(limits, default=None)

    async def _ready(self, request: fm.Seat, crew: Crew, allowed: int | None) -> SiteWorker:
        """Seats a location on a worker that is ready."""
        key = (request.job, request.at)
        while True:
            worker = crew.worker(request.location, request.lane)
            seat = _Seat(self, request, crew, worker, allowed)
            worker.seats[seat, request.at] = None
            crew.seats += 1
            self._jobs.setdefault(request.job, {})[request.at] = seat
            try:
                await asyncio.shield(worker.ready)
            except BaseException:
                self._release(key, well=False)
                raise
            if not worker.ended.done():
                break
            self._release(key, well=False)  # it was ready, and has ended: nothing is lost yet, take another
        if (request.plan, request.at) not in worker.nets:
            remember_net(worker, request.plan, request.at)
            assert worker.channel is not None  # noqa: S101 - it is ready
            worker.channel.send(msg.SendNet(request.plan, request.at, request.net))
        worker.launched()
        return worker

    def _release(self, key: tuple[int, int], *, well: bool) -> None:
        seat = self._take_out(key)
        if seat is not None:
            seat.worker.leave(seat, key[1], well=well)
            self._check_crew(seat.request.offer, seat.crew)

    def _take_out(self, key: tuple[int, int]) -> _Seat | None:
        seats = self._jobs.get(key[0], {})
        seat = seats.pop(key[1], None)
        if seat is not None:
            seat.crew.seats -= 1
            if not seats:
                del self._jobs[key[0]]
        return seat

    def _unseat(self, message: fm.Unseat) -> None:
        key = (message.job, message.at)
        task = self._seating.get(key)
        if task is not None:
            task.cancel()
        seat = self._find(message)
        if seat is not None:
            self._audit.write("left", job=seat.request.job_id, location=seat.request.location, bytes=seat.taken)
        self._release(key, well=message.well)

    def seat_lost(self, seat: _Seat, at: int, error: WorkerLost) -> None:
        """The worker of a seat has ended."""
        key = (seat.request.job, at)
        if self._jobs.get(key[0], {}).get(at) is seat:
            self._take_out(key)
            if key not in self._seating:  # else whoever waits for the worker tells
                self.tell(_lost(*key, error))
            self._check_crew(seat.request.offer, seat.crew)

    def _stop_seat(self, message: fm.StopSeat) -> None:
        """Ends what has not stopped within the grace, without harm to other jobs where that is possible."""
        seat = self._find(message)
        if seat is None:
            self.tell(fm.Abandoned(message.job, message.at, "stopped"))
        elif message.seen and seat.worker.shared:
            seat.worker.retire()
            self.tell(fm.Abandoned(message.job, message.at, "retired"))
        else:
            seat.worker.kill(f"a job on it ({message.job_id}) was to stop, and did not within its grace")

    def _echo(self, message: fm.Echo) -> None:
        """Answers when everything that workers have said by now has been read and sent."""
        workers = [worker for crew in self._crews.values() for pool in crew.pools.values() for worker in pool.processes]
        left = len(workers)

        def read() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._log.flush()
                self.tell(fm.Echoed(message.request))

        if not workers:
            read()
        for worker in workers:
            worker.when_read(read)

    # messages from workers

    def _from_worker(self, message: Any) -> None:
        if self._node is None:
            return
        kind = type(message)
        if kind in BETWEEN_SITES:
            # The sender is another location of the same job: every one of them knows the sites of all.
            seats = self._jobs.get(message.job)
            if seats:
                sites = next(iter(seats.values())).request.sites
                self._node.send(sites[message.at], message)
        else:
            self._node.send(HUB, message)
        if not self._paused and self._node.backlog > _FULL:
            self._pause(paused=True)

    def has_room(self) -> None:
        """What waits to be sent has become less."""
        if self._paused and self._node is not None and self._node.backlog <= _FULL // 2:
            self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        self._paused = paused
        for crew in self._crews.values():
            crew.pause(paused=paused)

    # reports

    def _changed(self) -> None:
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(_REPORT_EVERY, self._report)

    def _report(self) -> None:
        self._report_timer = None
        for key, crew in self._crews.items():
            for location, pool in crew.pools.items():
                self.tell(_report_of(key, location, pool.stats()))


def _operations(net: bytes) -> tuple[str, ...]:
    """The operations that a net calls; what cannot be read calls none that could be allowed.

    Raises:
        Denied: it is no net.
    """
    try:
        found = _net.decode(net)
    except msgspec.DecodeError as error:
        raise Denied(f"what it would run cannot be read: {error}") from error
    called = (transition.action for transition in found.transitions)
    return tuple(dict.fromkeys(action.operation for action in called if isinstance(action, spec.Call)))


def _report_of(offer: str, location: str, stats: SiteStats) -> fm.SiteReport:
    workers = tuple(
        fm.WorkerReport(worker.pid, worker.jobs, worker.memory, worker.lag, worker.unresponsive, worker.retired)
        for worker in stats.workers
    )
    return fm.SiteReport(offer, location, workers, stats.restarts, (stats.tokens.count, stats.tokens.bytes))


def _lost(job: int, at: int, error: WorkerLost) -> fm.SeatLost:
    return fm.SeatLost(job, at, error.exit_code, error.detail, error.lines, error.out_of_memory)


_HANDLERS: Final[dict[type, Callable[[SiteAgent, Any], None]]] = {
    fm.Offer: SiteAgent._offer,  # noqa: SLF001 - same module
    fm.Drop: SiteAgent._drop,  # noqa: SLF001
    fm.Seat: SiteAgent._seat,  # noqa: SLF001
    fm.Unseat: SiteAgent._unseat,  # noqa: SLF001
    fm.StopSeat: SiteAgent._stop_seat,  # noqa: SLF001
    fm.Echo: SiteAgent._echo,  # noqa: SLF001
}
