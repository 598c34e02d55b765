"""A site past one machine: seats the locations of jobs on its workers, and takes their messages to and from others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec

from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.runtime.faults import broken_record
from dfm_async.runtime.once import in_thread
from dfm_async.site.authorizing import Authorizer, Denied
from dfm_async.targets.coordinator import FOR_COORDINATOR
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.accounts import Account
from dfm_async.targets.flare.admission import Admission, User
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.crew import Crew
from dfm_async.targets.flare.crews import Crews, Installed
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.seats import Seat, Seats, stop_by_force
from dfm_async.targets.flare.site_log import SiteLog
from dfm_async.targets.flare.text import cleaned
from dfm_async.targets.flare.wanted import Wanted
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.site_worker import remember_net
from dfm_async.workers.start import choose_method
from dfm_async.workers.worker import ELSEWHERE

__all__ = ["BETWEEN_SITES", "FROM_HUB", "FROM_WORKERS", "SiteAgent"]

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
_FULL: Final = 64 * 1024 * 1024
"""From how many bytes on that wait to be sent the workers wait, too; they go on at half of it."""
_LONGEST_LINE: Final = 4096
_MOST_LINES: Final = 100


class Sender(Protocol):
    """What an agent needs of its node."""

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent."""
        ...

    def send(self, peer: str, message: Any) -> None:
        """Sends a message."""
        ...


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
        self.allow_code = settings.allow_code and user.brings_code
        """Whether code of the user runs here: the site allows it, and FLARE has allowed this user to bring it."""
        self._user = user
        self._installed = installed
        self._options = options
        self._audit = audit
        self._node: Sender | None = None
        self._admission = Admission(settings, user, installed.own_process, audit, authorizer)
        self._crews = Crews(
            settings,
            user.name,
            installed,
            options,
            audit,
            self.tell,
            self._from_worker,
            allow_code=self.allow_code,
        )
        self._seats = Seats(options.cancel_grace, lambda seat: self._crews.left(seat.request.offer, seat.crew))
        self._told_off: set[tuple[str, str]] = set()
        self._seating: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._paused = False
        self._log = SiteLog(self.site, self.tell)

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
            python=fm.PYTHON,
        )

    def attach(self, node: Sender) -> None:
        """Says where messages go."""
        self._node = node

    def tell(self, message: Any) -> None:
        """Tells the hub something."""
        if self._node is not None:
            self._node.send(HUB, message)

    async def __aenter__(self) -> SiteAgent:
        self._audit.write("opened", user=self._user.name, org=self._user.org, role=self._user.role)
        if choose_method(self._options.start_method) == "forkserver":
            self._crews.fork_server = ForkServer.acquire(self._options.preload)
            await in_thread(self._crews.fork_server.warm, "fork-server")
        self._log.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        seating = list(self._seating.values())
        for task in seating:
            task.cancel()
        if seating:
            await asyncio.wait(seating)
        for seat in self._seats:
            self._audit.note("left", well=False, reason="the site leaves", **seat.described)
        self._seats.clear()  # what becomes of them is not told any more
        await self._crews.shut_down()
        self._log.close()
        if self._crews.fork_server is not None:
            await in_thread(self._crews.fork_server.release, "fork-server")
        self._audit.note("closed")
        self._audit.close()

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
            seat = self._seats.find(message)
            if seat is not None and seat.announced and peer in seat.request.sites:
                self._to_worker(seat, message)
        elif peer != HUB:
            self._tell_off(peer, kind.__name__)
        elif kind in FROM_HUB:
            seat = self._seats.find(message)
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
            self._audit.note("not allowed", peer=peer, message=kind)

    def forged(self, peer: str, reason: str, count: int) -> None:
        """Record a packet that is not authentic; ``count``: how many there were."""
        self._audit.note("forged", peer=peer, reason=reason, count=count)

    def _to_worker(self, seat: Seat, message: Any) -> None:
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
        seats = self._seats.of(request.job)
        return tuple(
            seats[at].worker.address if site == self.site and at in seats else ELSEWHERE + site
            for at, site in enumerate(request.sites)
        )

    def _fits(self, seat: Seat, size: int) -> bool:
        account, request = seat.account, seat.request
        fits = account.fits(size)
        account.taken += size
        if not fits and account.told != request.job:
            account.told = request.job
            text = f"job {request.job_id} may send {account.allowed:,} bytes to site {self.site!r}, and has sent more"
            self._audit.note("too much", job=request.job_id, bytes=account.taken, allowed=account.allowed)
            self.tell(msg.JobBroken(request.job, request.at, broken_record(self.site, Denied(text))))
        return fits

    # seats

    def _seat(self, request: fm.Seat) -> None:
        key = (request.job, request.at)
        if key in self._seating or self._seats.leaving(request) or self._seats.find(request):
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
            here = len(self._seats.of(request.job)) + sum(job == request.job for job, _ in self._seating)
            wanted, account = await self._admission.admit(request, here)
            seat = await self._ready(request, wanted, account, self._crews.of(request.offer))
            try:
                self._audit.write("seated", sha256=wanted.digest, **about)
            except OSError:
                self._seats.let_go(seat, well=False)
                raise
            return fm.Seated(request.job, request.at, seat.worker.address)
        except Denied as error:
            self._audit.note("denied", reason=str(error), **about)
            return fm.SeatRefused(request.job, request.at, "denied", str(error))
        except WorkerLost as error:
            self._audit.note("lost", reason=str(error), **about)
            return _lost(request.job, request.at, error)
        except Exception as error:  # noqa: BLE001 - whatever starting a process or the site's own authorizer raises
            _log.debug("job %s cannot run here", request.job_id, exc_info=True)
            reason = _told(error)
            self._audit.note("failed", reason=reason, **about)
            if request.offer and "ModuleNotFoundError" in reason:
                reason += ". Modules travel by name: install it at the site, or define operations in the main script"
            return fm.SeatRefused(request.job, request.at, "failed", reason)

    async def _ready(self, request: fm.Seat, wanted: Wanted, account: Account, crew: Crew) -> Seat:
        """Seats a location on a worker that is ready."""
        while True:
            worker = crew.worker(request.location, request.lane)
            seat = Seat(self, request, wanted, account, crew, worker)
            self._seats.take(seat)
            try:
                await asyncio.shield(worker.ready)
            except BaseException:
                self._seats.release(seat, well=False)
                raise
            if not worker.ended.done():
                break
            self._seats.release(seat, well=False)  # it was ready, and has ended: nothing is lost yet, take another
        assert worker.channel is not None  # noqa: S101 - it is ready
        if (wanted.digest, request.at) not in worker.nets:
            remember_net(worker, wanted.digest, request.at)
            worker.channel.send(msg.SendNet(wanted.digest, request.at, request.net))
        worker.channel.send(msg.Announce(request.job, request.at, wanted.digest, list(wanted.calls)))
        seat.announced = True
        worker.launched()
        return seat

    def _unseat(self, message: fm.Unseat) -> None:
        task = self._seating.get((message.job, message.at))
        if task is not None:
            task.cancel()
        seat = self._seats.find(message)
        if seat is not None:
            self._seats.let_go(seat, well=message.well)
            self._audit.note("left", well=message.well, **seat.described)

    def seat_lost(self, seat: Seat, error: WorkerLost) -> None:
        """The worker of a seat has ended."""
        leaves = self._seats.leaving(seat.request) is seat
        if (
            self._seats.lost(seat) and not leaves and seat.key not in self._seating
        ):  # else who waits for the worker tells
            self._audit.note("lost", reason=str(error), **seat.described)
            self.tell(_lost(*seat.key, error))

    def _stop_seat(self, message: fm.StopSeat) -> None:
        """Ends what has not stopped within the grace, without harm to other jobs where that is possible."""
        seat = self._seats.find(message)
        if seat is None:
            self.tell(fm.Abandoned(message.job, message.at, "stopped"))
        elif message.seen and seat.worker.shared:
            seat.worker.abandon(*seat.key)
            self.tell(fm.Abandoned(message.job, message.at, "retired"))
        else:
            stop_by_force(seat)

    def _echo(self, message: fm.Echo) -> None:
        """Answers when everything that workers have said by now has been read and sent."""

        def answer() -> None:
            self._log.flush()
            self.tell(fm.Echoed(message.request))

        self._crews.when_read(answer)

    # messages from workers

    def _from_worker(self, message: Any) -> None:
        try:
            self._take_on(message)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("a message of a worker (%s) cannot be sent on", type(message).__name__)
            job = getattr(message, "job", -1)
            for at in list(self._seats.of(job))[:1]:  # the message may name another site's location, or none at all
                self.tell(msg.JobBroken(job, at, broken_record(self.site, error)))

    def _take_on(self, message: Any) -> None:
        if self._node is None:
            return
        kind = type(message)
        if kind in BETWEEN_SITES:
            # The sender is another location of the same job: every one of them knows the sites of all.
            seats = self._seats.of(message.job)
            if seats:
                sites = next(iter(seats.values())).request.sites
                if not 0 <= message.at < len(sites):
                    raise DfmError(f"job {message.job} has no location {message.at}")
                self._node.send(sites[message.at], message)
        elif kind in FROM_WORKERS:
            seat = self._seats.find(message)
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
        seat = self._seats.leaving(message)
        if seat is not None:
            if type(message) is msg.CancelSeen:
                seat.seen = True
            elif type(message) is msg.JobStopped:
                self._seats.release(seat, well=False)

    def has_room(self) -> None:
        """What waits to be sent has become less."""
        if self._paused and self._node is not None and self._node.backlog <= _FULL // 2:
            self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        self._paused = paused
        self._crews.pause(paused=paused)


def _size(message: Any) -> int:
    """How many bytes a message has that has come from outside."""
    if type(message) in msg.CARRIERS:  # values can be large, and need not be copied for it
        return size_of(message.payload) + len(fm.encode(msgspec.structs.replace(message, payload=b"")))
    return len(fm.encode(message))


def _told(error: Exception) -> str:
    """What others are told of an error."""
    return str(error) if isinstance(error, DfmError) else f"{type(error).__name__}: {error}"


def _lost(job: int, at: int, error: WorkerLost) -> fm.SeatLost:
    lines = tuple(cleaned(line, _LONGEST_LINE) for line in error.lines[-_MOST_LINES:])
    return fm.SeatLost(job, at, error.exit_code, cleaned(error.detail, _LONGEST_LINE), lines, error.out_of_memory)


_HANDLERS: Final[dict[type, Callable[[SiteAgent, Any], None]]] = {
    fm.Offer: lambda agent, offer: agent._crews.offer(offer),  # noqa: SLF001 - same module
    fm.Drop: lambda agent, message: agent._crews.drop(message),  # noqa: SLF001
    fm.Seat: SiteAgent._seat,  # noqa: SLF001
    fm.Unseat: SiteAgent._unseat,  # noqa: SLF001
    fm.StopSeat: SiteAgent._stop_seat,  # noqa: SLF001
    fm.Echo: SiteAgent._echo,  # noqa: SLF001
}
