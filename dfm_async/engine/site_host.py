"""The workers of one site on this machine, and the locations of jobs that are assigned to them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from dfm_async.base.containers import BoundedDict
from dfm_async.base.cores import usable_cores
from dfm_async.base.tasks import OwnedTasks
from dfm_async.engine.machine import StopOutcome
from dfm_async.engine.run import Run
from dfm_async.errors import DfmError, SessionClosed, WorkerLost
from dfm_async.model.call_limits import SiteCapacity
from dfm_async.model.events import NoticeKind
from dfm_async.model.ids import Location
from dfm_async.model.options import LocalOptions
from dfm_async.model.pool_size import IDLE_AFTER, Workers, fewest_workers, most_workers
from dfm_async.model.stats import SiteStats
from dfm_async.planning.plan import Plan
from dfm_async.runtime.permits import SitePermits
from dfm_async.runtime.site_runtime import encode_net
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.wire.messages import Envelope
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.pool import SitePool
from dfm_async.workers.site_worker import SiteWorker, WorkerOptions

_log = logging.getLogger(__name__)

_NETS: Final = 256
_MOST_WORKERS: Final = 256
_MOST_THREADS: Final = 1024
_MOST_POOLS: Final = 64
"""How many pools there may be for one version of the code: one for the site, one for each operation with its own."""


class NetCache:
    """Encodes nets for workers, each once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._nets: BoundedDict[tuple[str, int], Callable[[], bytes]] = BoundedDict(_NETS)

    def net(self, plan: Plan, at: int) -> Callable[[], bytes]:
        """Return what encodes the net of a location."""
        key = (plan.hash, at)
        found = self._nets.get(key)
        if found is None:
            found = self._nets[key] = functools.cache(lambda: encode_net(plan.nets[at], self._codec))
        return found


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the code of a site's operations, and how it runs. Workers and threads have limits of their own."""

    shipped: bytes
    """The operations, ready for workers."""
    workers: Workers
    """How many processes it has; None means as many as there are lanes, or cores."""
    threads: int
    """How many synchronous calls run at the same time in each."""
    lanes: int
    """How many jobs can run in processes of their own."""
    known_only: bool = False
    """Whether values of others may only be of classes that the operations take and return."""
    idle_after: float = IDLE_AFTER
    """After how many seconds without calls a process ends that takes no jobs."""
    capacity: SiteCapacity = SiteCapacity()
    """What the site has for its calls."""


class AssignmentOwner(Protocol):
    """Who is notified of what happens to the worker of a location: a run, here or elsewhere."""

    @property
    def number(self) -> int:
        """The number of the run, once it has started."""

    def assigned(self, at: int) -> None:
        """Note that the worker is ready."""

    def lost(self, at: int, error: WorkerLost) -> None:
        """Note that the worker has ended, or did not start."""

    def refused(self, at: int, error: BaseException) -> None:
        """Note that the worker cannot be started, or cannot load its operations."""

    def abandon(self, at: int, how: StopOutcome = ...) -> None:
        """Note that the location has not stopped, and nobody waits for it any longer."""

    def notice(self, at: int, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        """Note that the worker does not respond, responds again, or takes no further jobs (and why)."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is to be placed on a worker: one location of one run of a job."""

    job: Hashable
    """The run, which may have locations on the same worker."""
    at: int
    location: Location
    lane: int
    job_id: str
    plan: str
    """Names the net, together with ``at``."""
    net: Callable[[], bytes]
    """Encodes the net, for a worker that does not have it."""
    code: str = ""
    """Which version of the code."""


class WorkerAssignment:
    """One location of a run on a worker process. The owner is notified of what happens to the worker."""

    replaceable = True

    __slots__ = (
        "_group",
        "_owner",
        "job",
        "job_id",
        "placement",
        "ready",
        "released",
        "worker",
    )

    def __init__(self, owner: AssignmentOwner, placement: PlacementRequest, group: _WorkerGroup) -> None:
        self.placement = placement
        self.job = placement.job
        self.job_id = placement.job_id
        self.ready = False
        """Whether the worker is ready, and so may get messages."""
        self.released = False
        self._owner = owner
        self._group = group
        group.assignments += 1
        self.worker: SiteWorker = self._attach()

    @property
    def address(self) -> str:
        """Where other locations reach the worker."""
        return self.worker.address

    def _attach(self) -> SiteWorker:
        worker = self._group.worker(self.placement.location, self.placement.lane)
        worker.assignments[self] = None
        return worker

    def begin(self) -> None:
        """Notify the owner when the worker is ready; at once if it is."""
        ready = self.worker.ready
        if ready.done() and not self.worker.ended.done():
            self._check(ready)
        else:
            ready.add_done_callback(self._check)

    def _check(self, ready: asyncio.Future[None]) -> None:
        if self.released:
            return
        at, error = self.placement.at, ready.exception()
        if error is None and self.worker.ended.done():
            # It was ready, and has ended before we noticed: nothing is lost, take another.
            self.worker.assignments.pop(self, None)
            try:
                self.worker = self._attach()
            except SessionClosed:
                self._owner.lost(at, WorkerLost(self.worker.site, None, "the session was closed before it was needed"))
            else:
                self.begin()
        elif error is None:
            self.ready = True
            self._owner.assigned(at)
        elif isinstance(error, WorkerLost):
            self._owner.lost(at, error)
        else:
            self._owner.refused(at, error)

    def prepare(self) -> None:
        """Make the net known to the worker."""
        placement = self.placement
        self.worker.teach(placement.plan, placement.at, placement.net)

    def launched(self) -> None:
        """Note that the job was started."""
        self.worker.launched(self)

    def send(self, message: msg.Message | Envelope) -> None:
        """Send a message to the location."""
        if self.worker.channel is not None:
            self.worker.channel.send(message)

    def stop_by_force(self, *, seen: bool) -> None:
        """End what has not stopped within its grace period, without harm to other jobs where that is possible."""
        placement = self.placement
        if seen and self.worker.shared:
            self.worker.abandon(self._owner.number, placement.at)
            self._owner.abandon(placement.at, StopOutcome.RETIRED)
        else:
            self.worker.kill(f"a job on it ({placement.job_id}) was to stop, and did not within its grace period")

    def release(self, *, succeeded: bool) -> None:
        """Leave the worker; ``succeeded``: the job has finished, so the worker is in order."""
        if not self.released:
            self.released = True
            self.worker.leave(self, succeeded=succeeded)
            self._group.left()

    # what the worker's pool reports

    def lost(self, error: WorkerLost) -> None:
        """Note that the worker has ended."""
        if self.ready and not self.released:  # else its waiters get the reason
            self._owner.lost(self.placement.at, error)

    def notice(self, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        """Note that the worker does not respond, responds again, or takes no further jobs (and why)."""
        self._owner.notice(self.placement.at, kind, seconds, why)


class _WorkerGroup:
    """The pools for one version of a site's code: one for the site, and one for each operation with its own."""

    def __init__(
        self, code: Code, make_pool: Callable[[Code], SitePool], on_left: Callable[[_WorkerGroup], None]
    ) -> None:
        self.code = code
        self.pools: dict[Location, SitePool] = {}
        self.assignments = 0
        """How many locations of jobs are here."""
        self.dropped = False
        """Whether no further job may come."""
        self._closed = False
        self._make_pool = make_pool
        self._on_left = on_left

    def worker(self, location: Location, lane: int) -> SiteWorker:
        """Return the worker of a location in a lane, which may still be starting.

        Raises:
            SessionClosed: the workers are being ended: nothing would end another one.
            DfmError: there are too many pools.
        """
        if self._closed:
            raise SessionClosed("the session was closed")
        if location.cache:  # the lanes share it: it is kept by the first worker of the site
            location, lane = Location(location.site), 0
        pool = self.pools.get(location)
        if pool is None:
            if len(self.pools) >= _MOST_POOLS:
                raise DfmError(f"site {location.site!r} has {_MOST_POOLS} pools of workers, and starts no further one")
            pool = self.pools[location] = self._make_pool(self.code)
        return pool.worker(lane)

    def left(self) -> None:
        """Note that a location has left."""
        self.assignments -= 1
        if self.dropped:
            self._on_left(self)

    async def shut_down(self, grace: float) -> None:
        """End all workers: ask, wait the grace period, kill, and reap them all."""
        self._closed = True
        await asyncio.gather(*(pool.shut_down(grace) for pool in self.pools.values()))
        self.pools.clear()


def may_start_another(hosts: Iterable[SiteHost], options: LocalOptions) -> bool:
    """Return whether a further worker may start for calls that compute: some cores of the machine are idle."""
    counts = [len(list(host.workers)) for host in hosts]
    if options.max_workers is not None:
        return sum(counts) < options.max_workers
    # One of each site has little to do.
    return usable_cores() > 1 and sum(count - 1 for count in counts if count) < usable_cores()


class SiteHost:
    """The workers of one site: started when they are needed, for each version of its code.

    Args:
        on_message: receives the messages of workers.
        on_change: is called when something about a worker has changed.
        nets: the nets of plans, encoded; needed for runs on this machine.
        apart: whether other sites and the application are on other machines.
        forwarded: the kinds of messages of workers that are not decoded here.
        environment: further environment variables of the workers.
        on_end: is called with the code and the location of a pool that ends because nobody needs its code.
        may_start: returns whether a further worker may start for calls of others.
    """

    def __init__(
        self,
        site: str,
        options: LocalOptions,
        on_message: Callable[[Any], None],
        on_change: Callable[[], None],
        *,
        fork_server: ForkServer | None = None,
        nets: NetCache | None = None,
        loop_initializer: Callable[[], asyncio.AbstractEventLoop] | None = None,
        apart: bool = False,
        forwarded: frozenset[type] = frozenset(),
        environment: Mapping[str, str] | None = None,
        on_end: Callable[[str, Location], None] | None = None,
        may_start: Callable[[], bool] | None = None,
    ) -> None:
        self.site = site
        self.fork_server = fork_server
        self._options = options
        self._on_message = on_message
        self._on_change = on_change
        self._nets = nets
        self._loop_initializer = loop_initializer
        self._apart = apart
        self._forwarded = forwarded
        self._environment = environment
        self._on_end = on_end
        self._may_start = may_start or _always
        self._permits = SitePermits(on_change)
        self._groups: dict[str, _WorkerGroup] = {}
        self._ending = OwnedTasks()
        self._closed = False

    # code

    def has_code(self, key: str) -> bool:
        """Return whether there are workers, or may be, for a version of the code."""
        return key in self._groups

    def add_code(self, key: str, code: Code) -> None:
        """Make a version of the code known; workers for it start when a job needs them."""
        self._permits.add_capacity(code.capacity)
        self._groups[key] = _WorkerGroup(code, self._pool, lambda group: self._left(key, group))

    def reload(self, key: str, shipped: bytes) -> None:
        """Replace workers by others with newer code: idle ones at once, others when their jobs have ended."""
        group = self._groups[key]
        group.code = msgspec.structs.replace(group.code, shipped=shipped)
        for pool in group.pools.values():
            pool.reload(shipped, self._options.shutdown_grace)

    def drop_code(self, key: str) -> None:
        """Forget a version of the code; its workers end with the last of their jobs."""
        group = self._groups.get(key)
        if group is not None:
            group.dropped = True
            self._left(key, group)

    def _left(self, key: str, group: _WorkerGroup) -> None:
        if group.dropped and not group.assignments and self._groups.get(key) is group:
            del self._groups[key]
            if self._on_end is not None:
                for location in group.pools:
                    self._on_end(key, location)
            self._ending.spawn(group.shut_down(self._options.shutdown_grace), f"end of workers of {self.site}")

    def _pool(self, code: Code) -> SitePool:
        options = WorkerOptions(
            site=self.site,
            threads=_within(code.threads, _MOST_THREADS),
            shipped=code.shipped,
            fork_server=self.fork_server,
            loop_initializer=self._loop_initializer,
            output=self._options.output,
            unresponsive_after=self._options.unresponsive_after,
            apart=self._apart,
            checkpoints=(self._options.checkpoints, self._options.checkpoint_bytes),
            known_only=code.known_only,
            environment=self._environment or {},
            forwarded=self._forwarded,
            enough_workers=usable_cores() if code.workers is None else None,
        )
        homes = _within(min(fewest_workers(code.workers) or code.lanes, code.lanes), _MOST_WORKERS)
        most = most_workers(code.workers) or usable_cores()
        spare = code.workers is None and usable_cores() > 1  # it moves tokens while the others compute
        workers = _within(max(most + spare, homes), _MOST_WORKERS)
        # A number that was chosen for a site counts more than a default for all.
        chosen = code.workers is not None and self._options.max_workers is None
        may_start = _always if chosen else self._may_start
        return SitePool(
            options,
            workers,
            self._on_message,
            self._on_change,
            homes=homes,
            may_start=may_start,
            permits=self._permits,
            idle_after=code.idle_after,
            single=self._single(workers),
        )

    def _single(self, workers: int) -> str:
        """Return the option that allows only one worker although there are more cores, if any."""
        if usable_cores() < 2:
            return ""
        if workers == 1:
            return "fed.site(workers=1)"
        return "LocalOptions(max_workers=1)" if self._options.max_workers == 1 else ""

    # assignments

    def assign(self, run: Run, at: int) -> WorkerAssignment:
        """Find a worker for a location of a run on this machine."""
        plan, nets = run.coordinator.plan, self._nets
        assert nets is not None  # noqa: S101 - only runs elsewhere bring their nets with them
        placement = PlacementRequest(
            job=run,
            at=at,
            location=plan.locations[at],
            lane=run.lane,
            job_id=run.coordinator.record.job_id,
            plan=plan.hash,
            net=nets.net(plan, at),
        )
        return self.place(run, placement)

    def place(self, owner: AssignmentOwner, placement: PlacementRequest) -> WorkerAssignment:
        """Find a worker for a location. The owner is notified when it is ready, maybe at once.

        Raises:
            DfmError: there are too many pools, or all workers were ended.
        """
        if self._closed:
            raise SessionClosed("the session was closed")
        assignment = WorkerAssignment(owner, placement, self._groups[placement.code])
        assignment.begin()
        return assignment

    # workers

    @property
    def workers(self) -> Iterator[SiteWorker]:
        """All workers that have not ended."""
        for group in self._groups.values():
            for pool in group.pools.values():
                yield from pool.processes

    @property
    def pools(self) -> Iterator[tuple[str, Location, SitePool]]:
        """The pools that were needed so far, with their code and location."""
        for key, group in self._groups.items():
            for location, pool in group.pools.items():
                yield key, location, pool

    def stats(self) -> Iterator[tuple[str, Location, SiteStats]]:
        """Return how the workers of each pool are. The limits of the site are with the pool of the site itself."""
        limits, site = self._permits.stats(), Location(self.site)
        for key, location, pool in self.pools:
            found = pool.stats()
            if limits and location == site:
                found, limits = msgspec.structs.replace(found, limits=limits), ()
            yield key, location, found
        if limits:  # only operations with pools of their own run
            yield "", site, SiteStats(limits=limits)

    def send(self, address: str, message: msg.Message) -> bool:
        """Send a message to the worker with this address; return whether it is here."""
        for worker in self.workers:
            if worker.address == address and worker.channel is not None:
                worker.channel.send(message)
                return True
        return False

    def pause(self, *, paused: bool) -> None:
        """Hold back what workers send, or let it come."""
        for worker in self.workers:
            if worker.channel is not None:
                worker.channel.pause(paused=paused)

    def when_read(self, call: Callable[[], None]) -> None:
        """Call back when everything that workers have printed and logged by now has been read."""
        for worker in list(self.workers):
            call = functools.partial(worker.when_read, call)  # one after the other
        call()

    async def shut_down(self, grace: float) -> None:
        """End all workers: ask, wait the grace period, kill, and reap them all."""
        self._closed = True
        self._permits.close()
        groups = [group.shut_down(grace) for group in self._groups.values()]
        try:
            for failed in await asyncio.gather(*groups, return_exceptions=True):
                if isinstance(failed, BaseException):
                    _log.error("workers of site %s did not end as they should", self.site, exc_info=failed)
        finally:
            await self._ending.wait()
            self._groups.clear()


def _within(number: int, most: int) -> int:
    return max(1, min(number, most))


def _always() -> bool:
    return True
