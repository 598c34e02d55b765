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
from dfm_async.runtime.faults import broken_record
from dfm_async.runtime.once import in_thread
from dfm_async.site.authorizing import Authorizer, Denied, PipelineRequest
from dfm_async.targets.coordinator import FOR_COORDINATOR
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.admission import MOST_SEATS, Account, Accounts, Wanted, read_request
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.crew import Crew
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.site_log import SiteLog
from dfm_async.targets.flare.text import cleaned
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of
from dfm_async.workers.site_worker import SiteWorker, remember_net
from dfm_async.workers.start import ForkServer, choose_method
from dfm_async.workers.worker import ELSEWHERE

__all__ = ["BETWEEN_SITES", "FROM_HUB", "FROM_WORKERS", "Installed", "SiteAgent", "User"]

_log = logging.getLogger(__name__)

BETWEEN_SITES: Final = frozenset(
    {msg.Tokens, msg.LoopEnded, msg.ElementDone, msg.StreamPull, msg.StreamItems, msg.StreamClose}
)
"""What sites say to each other; all of it is for one location of one job."""
FROM_HUB: Final = frozenset({msg.StartJob, msg.OpenFrames, msg.Credit, msg.CancelJob, msg.PlaceTaken, msg.SpansTaken})
"""What only the hub says to a location."""
FROM_WORKERS: Final = FOR_COORDINATOR | {msg.SendToPlace}
"""What a location says to the hub."""
_BRING_VALUES: Final = BETWEEN_SITES | {msg.StartJob, msg.OpenFrames}
"""What is not taken when a job has sent too much. The rest only steers it, and may be needed to end it."""
_REPORT_EVERY: Final = 0.5
_FULL: Final = 64 * 1024 * 1024
"""From how many bytes on that wait to be sent the workers wait, too; they go on at half of it."""
_AUTHORIZER: Final = 60.0
"""For how many seconds an authorizer may think."""
_MOST_OFFERS: Final = 64
"""How many versions of its code a user may have here."""
_LONGEST_LINE: Final = 4096
_MOST_LINES: Final = 100


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
    own_process: frozenset[str] = frozenset()
    """The operations that have a process of their own."""


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

    def __init__(
        self, agent: SiteAgent, request: fm.Seat, wanted: Wanted, account: Account, crew: Crew, worker: SiteWorker
    ) -> None:
        self.request = request
        self.wanted = wanted
        self.account = account
        self.crew = crew
        self.worker = worker
        self.announced = False
        """Whether its worker knows of it: one that is not ready yet must not be told anything."""
        self.started = False
        """Whether the job was told to begin."""
        self.stopped = False
        """Whether it was told to stop, and has."""
        self.seen = False
        """Whether it has seen that it is to stop: then the loop of its worker still answers."""
        self.patience: asyncio.TimerHandle | None = None
        """Ends it by force, if it does not leave."""
        self._agent = agent

    @property
    def key(self) -> tuple[int, int]:
        """The run of the job, and which of its locations this is."""
        return (self.request.job, self.request.at)

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
        self._leaving: dict[tuple[int, int], _Seat] = {}
        self._accounts = Accounts()
        self._told_off: set[tuple[str, str]] = set()
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

    def _note(self, event: str, **what: Any) -> None:
        """Records what happens in any case; where it must not without a record, the log itself is asked."""
        try:
            self._audit.write(event, **what)
        except OSError:
            _log.exception("the audit log of site %s cannot be written", self.site)

    async def __aenter__(self) -> SiteAgent:
        self._audit.write("opened", user=self._user.name, org=self._user.org, role=self._user.role)
        if choose_method(self._options.start_method) == "forkserver":
            self._fork_server = ForkServer.acquire(self._options.preload)
            await in_thread(self._fork_server.warm, "fork-server")
        self._log.open()
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
        for seat in [*self._leaving.values(), *(seat for seats in self._jobs.values() for seat in seats.values())]:
            if seat.patience is not None:
                seat.patience.cancel()
            if seat.key not in self._leaving:
                self._note("left", well=False, reason="the site leaves", **_described(seat))
        self._jobs.clear()  # what becomes of them is not told any more
        self._leaving.clear()
        await asyncio.gather(*(crew.shut_down(self._options.shutdown_grace) for crew in self._crews.values()))
        self._crews.clear()
        self._log.close()
        if self._fork_server is not None:
            await in_thread(self._fork_server.release, "fork-server")
        self._note("closed")
        self._audit.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # messages from others

    def receive(self, peer: str, message: Any) -> None:
        """Takes a message of the hub, or of another site. What goes wrong with it is an error of its job alone."""
        try:
            self._take(peer, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, other jobs go on
            _log.exception("a message of %s (%s) cannot be dealt with", peer, type(message).__name__)
            if isinstance(message, fm.Seat):
                self.tell(fm.SeatRefused(message.job, message.at, "failed", _told(error)))
            else:
                self._break(message, error)

    def _break(self, message: Any, error: Exception) -> None:
        """A message of a job has led to an error of ours: the job cannot go on."""
        job, at = getattr(message, "job", None), getattr(message, "at", None)
        if job is not None and at is not None:
            self.tell(msg.JobBroken(job, at, broken_record(self.site, error)))

    def _take(self, peer: str, message: Any) -> None:
        kind = type(message)
        if kind in BETWEEN_SITES:
            seat = self._find(message)
            if seat is not None and seat.announced and peer in seat.request.sites:
                self._to_worker(seat, message)
        elif peer != HUB:
            self._tell_off(peer, kind.__name__)
        elif kind in FROM_HUB:
            seat = self._find(message)
            if seat is not None and seat.announced:
                self._to_worker(seat, message)
            elif kind is msg.CancelJob:
                self.tell(msg.JobStopped(message.job, message.at))
            elif kind in (msg.StartJob, msg.OpenFrames):  # the hub has not heard yet, or never will
                self.tell(fm.SeatLost(message.job, message.at, None, "the job has no seat here", (), False))
        else:
            handler = _HANDLERS.get(kind)
            if handler is not None:
                handler(self, message)

    def _tell_off(self, peer: str, kind: str) -> None:
        """Another site says what only the hub may say; recorded once for each, so that it cannot fill the log."""
        if (peer, kind) not in self._told_off:
            self._told_off.add((peer, kind))
            _log.warning("site %s said %s, which only the hub may say", peer, kind)
            self._note("not allowed", peer=peer, message=kind)

    def _find(self, message: Any) -> _Seat | None:
        return self._jobs.get(message.job, {}).get(message.at)

    def _to_worker(self, seat: _Seat, message: Any) -> None:
        kind = type(message)
        if not self._fits(seat, _size(message)) and kind in _BRING_VALUES:
            return
        if kind is msg.StartJob:
            seat.started = True
            plan, routes = seat.wanted.digest, self._routes(seat.request)
            message = msgspec.structs.replace(message, job_id=seat.request.job_id, plan=plan, routes=routes)
        if seat.worker.channel is not None:
            seat.worker.channel.send(message)

    def _routes(self, request: fm.Seat) -> tuple[str, ...]:
        """Where the locations of a job are. Workers connect to addresses of their own site only, and we know those."""
        seats = self._jobs[request.job]
        return tuple(
            seats[at].worker.address if site == self.site and at in seats else ELSEWHERE + site
            for at, site in enumerate(request.sites)
        )

    def _fits(self, seat: _Seat, size: int) -> bool:
        account, request = seat.account, seat.request
        fits = account.fits(size)
        account.taken += size
        if not fits and account.told != request.job:
            account.told = request.job
            text = f"job {request.job_id} may send {account.allowed:,} bytes to site {self.site!r}, and has sent more"
            self._note("too much", job=request.job_id, bytes=account.taken, allowed=account.allowed)
            self.tell(msg.JobBroken(request.job, request.at, broken_record(self.site, Denied(text))))
        return fits

    # code

    def _offer(self, offer: fm.Offer) -> None:
        digest = hashlib.sha256(offer.shipped).hexdigest()
        reason = ""
        if not self.allow_code:
            reason = "this site does not run code that users bring"
        elif offer.site != self.site or offer.key != digest:
            reason = "it is not what it says it is"
        elif offer.key not in self._offers and len(self._offers) >= _MOST_OFFERS:
            reason = f"there are {_MOST_OFFERS} others"
        about = {"user": self._user.name, "sha256": digest, "bytes": len(offer.shipped)}
        if reason:
            _log.warning("code of user %s is refused: %s", self._user.name, reason)
            self._note("code refused", reason=reason, **about)
        else:
            self._audit.write("code", **about)
            self._offers[offer.key] = offer

    def _drop(self, message: fm.Drop) -> None:
        self._offers.pop(message.key, None)
        crew = self._crews.get(message.key)
        if crew is not None:
            crew.wanted = False
            self._check_crew(message.key, crew)

    def _check_crew(self, key: str, crew: Crew) -> None:
        if not crew.wanted and not crew.seats and self._crews.get(key) is crew:
            del self._crews[key]
            for location in crew.pools:
                self.tell(fm.SiteReport(key, location, (), 0, (0, 0)))  # nobody need keep what was told of it
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
            self._settings.environment,
            installed=not key,
        )
        return crew

    # seats

    def _seat(self, request: fm.Seat) -> None:
        key = (request.job, request.at)
        if key in self._seating or key in self._leaving or self._find(request) is not None:
            _log.warning("location %s of job %s is asked for twice", request.at, request.job_id)
            return
        task = asyncio.get_running_loop().create_task(self._take_seat(request), name=f"seat of {request.job_id}")
        self._seating[key] = task

    async def _take_seat(self, request: fm.Seat) -> None:
        try:
            answer = await self._answer(request)
        finally:
            # Before the answer is told: from then on the seat itself tells what becomes of it.
            self._seating.pop((request.job, request.at), None)
        self.tell(answer)

    async def _answer(self, request: fm.Seat) -> fm.Seated | fm.SeatRefused | fm.SeatLost:
        about = {"user": self._user.name, "job": request.job_id, "location": request.location}
        try:
            wanted, account = await self._authorize(request)
            crew = self._crew(request.offer)
            seat = await self._ready(request, wanted, account, crew)
            try:
                self._audit.write("seated", sha256=wanted.digest, **about)
            except OSError:
                self._let_go(seat, well=False)
                raise
            return fm.Seated(request.job, request.at, seat.worker.address)
        except Denied as error:
            self._note("denied", reason=str(error), **about)
            return fm.SeatRefused(request.job, request.at, "denied", str(error))
        except WorkerLost as error:
            self._note("lost", reason=str(error), **about)
            return _lost(request.job, request.at, error)
        except Exception as error:  # noqa: BLE001 - whatever starting a process or the site's own authorizer raises
            _log.debug("job %s cannot run here", request.job_id, exc_info=True)
            self._note("failed", reason=_told(error), **about)
            return fm.SeatRefused(request.job, request.at, "failed", _told(error))

    async def _authorize(self, request: fm.Seat) -> tuple[Wanted, Account]:
        here = len(self._jobs.get(request.job, ())) + sum(job == request.job for job, _ in self._seating)
        if here > MOST_SEATS:
            raise Denied(f"a job may have {MOST_SEATS} locations here")
        wanted = read_request(self.site, request, None if request.offer else self._installed.own_process)
        pipeline = PipelineRequest(
            user=self._user.name,
            org=self._user.org,
            role=self._user.role,
            job_id=request.job_id,
            pipeline=request.pipeline,
            operations=wanted.operations,
            sites=tuple(dict.fromkeys(request.sites)),
            bytes=request.size + len(request.net),
            brings_code=bool(request.offer),
        )
        self._audit.write(
            "asked",
            user=pipeline.user,
            job=pipeline.job_id,
            location=request.location,
            pipeline=pipeline.pipeline,
            operations=pipeline.operations,
            providers=wanted.providers,
            bytes=pipeline.bytes,
            brings_code=pipeline.brings_code,
            sha256=wanted.digest,
        )
        account = self._accounts.of(request.job_id)
        account.limit(self._settings.max_job_bytes)
        account.limit(await self._ask_authorizer(pipeline))
        if not account.fits(pipeline.bytes):
            text = f"job {request.job_id} may send {account.allowed:,} bytes to site {self.site!r}; this would be"
            raise Denied(f"{text} {account.taken + pipeline.bytes:,}")
        account.taken += len(request.net)  # what it begins with is counted when it comes
        return wanted, account

    async def _ask_authorizer(self, pipeline: PipelineRequest) -> int | None:
        if self._authorizer is None:
            return None
        try:
            async with asyncio.timeout(_AUTHORIZER):
                return await self._authorizer.authorize(pipeline)
        except Denied:
            raise
        except Exception as error:
            # What went wrong inside is for the site, not for those whom it has not let in.
            _log.exception("the authorizer of site %s has failed", self.site)
            self._note("authorizer failed", job=pipeline.job_id, error=f"{type(error).__name__}: {error}")
            raise DfmError(f"the authorizer of site {self.site!r} has failed") from error

    async def _ready(self, request: fm.Seat, wanted: Wanted, account: Account, crew: Crew) -> _Seat:
        """Seats a location on a worker that is ready."""
        while True:
            worker = crew.worker(request.location, request.lane)
            seat = _Seat(self, request, wanted, account, crew, worker)
            worker.seats[seat, request.at] = None
            crew.seats += 1
            account.seats += 1
            self._jobs.setdefault(request.job, {})[request.at] = seat
            try:
                await asyncio.shield(worker.ready)
            except BaseException:
                self._release(seat, well=False)
                raise
            if not worker.ended.done():
                break
            self._release(seat, well=False)  # it was ready, and has ended: nothing is lost yet, take another
        assert worker.channel is not None  # noqa: S101 - it is ready
        if (wanted.digest, request.at) not in worker.nets:
            remember_net(worker, wanted.digest, request.at)
            worker.channel.send(msg.SendNet(wanted.digest, request.at, request.net))
        worker.channel.send(msg.Announce(request.job, request.at, wanted.digest, list(wanted.calls)))
        seat.announced = True
        worker.launched()
        return seat

    def _release(self, seat: _Seat, *, well: bool) -> None:
        """A location has left its worker."""
        if self._take_out(seat):
            seat.worker.leave(seat, seat.request.at, well=well)
            self._check_crew(seat.request.offer, seat.crew)

    def _take_out(self, seat: _Seat) -> bool:
        """Forgets a seat; tells whether it was there."""
        if seat.patience is not None:
            seat.patience.cancel()
        found = self._leaving.pop(seat.key, None) is seat or self._unlist(seat)
        if found:
            seat.crew.seats -= 1
            seat.account.seats -= 1
        return found

    def _unlist(self, seat: _Seat) -> bool:
        job, at = seat.key
        seats = self._jobs.get(job, {})
        if seats.get(at) is not seat:
            return False
        del seats[at]
        if not seats:
            del self._jobs[job]
        return True

    def _let_go(self, seat: _Seat, *, well: bool) -> None:
        """A location leaves. One that still runs is stopped first: its worker is not free before."""
        if well or seat.stopped or not seat.started:
            if seat.announced and not seat.started and seat.worker.channel is not None:
                seat.worker.channel.send(msg.Withdraw(*seat.key))
            self._release(seat, well=well)
            return
        self._unlist(seat)
        self._leaving[seat.key] = seat
        grace = self._options.cancel_grace
        seat.patience = asyncio.get_running_loop().call_later(grace, self._overdue, seat)
        if seat.worker.channel is not None:
            seat.worker.channel.send(msg.CancelJob(*seat.key))

    def _overdue(self, seat: _Seat) -> None:
        """A location that was to leave is still there after the grace."""
        if seat.seen and seat.worker.shared:
            seat.worker.retire()
            self._release(seat, well=False)
        else:
            seat.worker.kill(f"a job on it ({seat.request.job_id}) was to stop, and did not within its grace")

    def _unseat(self, message: fm.Unseat) -> None:
        task = self._seating.get((message.job, message.at))
        if task is not None:
            task.cancel()
        seat = self._find(message)
        if seat is not None:
            self._let_go(seat, well=message.well)
            self._note("left", well=message.well, **_described(seat))

    def seat_lost(self, seat: _Seat, at: int, error: WorkerLost) -> None:
        """The worker of a seat has ended."""
        leaves = self._leaving.get(seat.key) is seat
        if self._take_out(seat):
            if not leaves and seat.key not in self._seating:  # else whoever waits for the worker tells
                self._note("lost", reason=str(error), **_described(seat))
                self.tell(_lost(seat.request.job, at, error))
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
        try:
            self._take_on(message)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("a message of a worker (%s) cannot be sent on", type(message).__name__)
            self._break(message, error)

    def _take_on(self, message: Any) -> None:
        if self._node is None:
            return
        kind = type(message)
        if kind in BETWEEN_SITES:
            # The sender is another location of the same job: every one of them knows the sites of all.
            seats = self._jobs.get(message.job)
            if seats:
                sites = next(iter(seats.values())).request.sites
                if not 0 <= message.at < len(sites):
                    raise DfmError(f"job {message.job} has no location {message.at}")
                self._node.send(sites[message.at], message)
        elif kind in FROM_WORKERS:
            seat = self._find(message)
            if seat is None:
                self._of_leaving(message)
                return
            if kind is msg.CancelSeen:
                seat.seen = True
            elif kind is msg.JobStopped:
                seat.stopped = True
            self._node.send(HUB, message)
        if not self._paused and self._node.backlog > _FULL:
            self._pause(paused=True)

    def _of_leaving(self, message: Any) -> None:
        """What a location says that was given up: nobody else wants to know it."""
        seat = self._leaving.get((message.job, message.at))
        if seat is not None:
            if type(message) is msg.CancelSeen:
                seat.seen = True
            elif type(message) is msg.JobStopped:
                self._release(seat, well=False)

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


def _size(message: Any) -> int:
    """How many bytes a message has that has come from outside."""
    if type(message) in msg.CARRIERS:  # values can be large, and need not be copied for it
        return size_of(message.payload) + len(fm.encode(msgspec.structs.replace(message, payload=b"")))
    return len(fm.encode(message))


def _told(error: Exception) -> str:
    """What others are told of an error."""
    return str(error) if isinstance(error, DfmError) else f"{type(error).__name__}: {error}"


def _described(seat: _Seat) -> dict[str, Any]:
    """What the audit log says of a seat."""
    return {"job": seat.request.job_id, "location": seat.request.location, "bytes": seat.account.taken}


def _report_of(offer: str, location: str, stats: SiteStats) -> fm.SiteReport:
    workers = tuple(
        fm.WorkerReport(worker.pid, worker.jobs, worker.memory, worker.lag, worker.unresponsive, worker.retired)
        for worker in stats.workers
    )
    return fm.SiteReport(offer, location, workers, stats.restarts, (stats.tokens.count, stats.tokens.bytes))


def _lost(job: int, at: int, error: WorkerLost) -> fm.SeatLost:
    lines = tuple(cleaned(line, _LONGEST_LINE) for line in error.lines[-_MOST_LINES:])
    return fm.SeatLost(job, at, error.exit_code, cleaned(error.detail, _LONGEST_LINE), lines, error.out_of_memory)


_HANDLERS: Final[dict[type, Callable[[SiteAgent, Any], None]]] = {
    fm.Offer: SiteAgent._offer,  # noqa: SLF001 - same module
    fm.Drop: SiteAgent._drop,  # noqa: SLF001
    fm.Seat: SiteAgent._seat,  # noqa: SLF001
    fm.Unseat: SiteAgent._unseat,  # noqa: SLF001
    fm.StopSeat: SiteAgent._stop_seat,  # noqa: SLF001
    fm.Echo: SiteAgent._echo,  # noqa: SLF001
}
