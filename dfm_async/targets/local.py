"""The local target: the application's loop, a pool of worker processes per site, and lanes of them that run jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import completed, in_thread
from dfm_async.base.text import install_hint
from dfm_async.engine.coordinator import Coordinator
from dfm_async.engine.engine import TO_ENGINE, Jobs, starts_later
from dfm_async.engine.run import Host
from dfm_async.engine.target import LocalTarget
from dfm_async.errors import DfmError, QueueFull
from dfm_async.federation.federation import Federation
from dfm_async.model.ids import HOME, OperationKey
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import LaneStats, SiteStats, TargetStats, Traffic
from dfm_async.planning.prepare import check_left_out
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import Arena
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.module_loading import check_not_loading
from dfm_async.workers.start import choose_method

if TYPE_CHECKING:
    from dfm_async.engine.inline_host import InlineHost
    from dfm_async.engine.site_host import NetCache, SiteHost
    from dfm_async.workers.shipping import ShippedSite
    from dfm_async.workers.site_worker import SiteWorker


class FederationRunner(LocalTarget):
    """Runs every site of a federation in worker processes on this machine. Owns the workers, the lanes and the jobs.

    Jobs beyond what may run at the same time wait: the highest priority first, among equals the first that came.
    """

    def __init__(self, options: LocalOptions | None = None) -> None:
        self._arena = Arena()
        super().__init__(options or LocalOptions(), Codec.for_processes(self._arena))
        self._nets: NetCache | None = None
        self._scheduler = Jobs(1, 1, self.options.queue_limit)
        self._waiting: dict[Coordinator, Outcome[None]] = {}
        """The jobs whose submitters wait for room in the queue."""
        self._lanes: list[JobExecution] = []
        self._hosts: dict[str, SiteHost] = {}
        self._shipped: dict[str, ShippedSite] = {}
        self._left_out: dict[OperationKey, DfmError] = {}
        """The operations that workers do not have, because something is wrong with them."""
        self._home: InlineHost | None = None
        self._federation: Federation | None = None
        self._revision = -1
        self._fork_server: ForkServer | None = None

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Keep the workers while the context is open. They start when a job first needs them.

        Raises:
            ShippingError: the code of an operation cannot be sent to a worker.
            DfmError: this process is a worker that loads its operations.
        """
        check_not_loading()
        self._federation, self._revision = federation, federation.revision
        options = self.options
        if choose_method(options.start_method) == "forkserver":
            self._fork_server = ForkServer.acquire(options.preload)
        given = {
            "codec": self.codec,
            "report": self._from_home,
            "send": self._send_from_home,
            "on_limits": self.worker_changes.notify,
        }
        try:
            if self._fork_server is not None:
                await _warm(self._fork_server)
            from dfm_async.engine.inline_host import InlineHost, inline_runtime  # while the fork server loads the same

            self._make_hosts(federation, homesite)
            async with inline_runtime(federation, homesite, homesite, options, **given) as runtime:
                self._home = InlineHost(runtime)
                grace = options.shutdown_grace
                try:
                    yield
                except asyncio.CancelledError:  # closing was cancelled: end at once
                    grace = 0.0
                    raise
                finally:
                    try:
                        await asyncio.gather(*(host.shut_down(grace) for host in self._hosts.values()))
                    finally:
                        self._arena.close()
        finally:
            self._close()
            if self._fork_server is not None:
                await completed(_release(self._fork_server))

    def _make_hosts(self, federation: Federation, homesite: str) -> None:
        options, sites = self.options, federation.sites
        workers = [site.workers for site in sites.values()]
        lanes = options.lanes_for(workers)
        self._scheduler = Jobs(lanes, options.slots_for(workers), options.queue_limit)
        self._lanes = [JobExecution(index, self._scheduler, self._hosts.values()) for index in range(lanes)]
        self._ship(federation, homesite, None)

    def _ship(self, federation: Federation, homesite: str, left_out: dict[OperationKey, DfmError] | None) -> None:
        """Give the code that the federation has now to workers that start from now on.

        ``left_out`` gets operations that have to be left out; without it, the first of them raises its error.
        """
        from dfm_async.engine.site_host import Code, NetCache, SiteHost, may_start_another
        from dfm_async.runtime.permits import check_capacity
        from dfm_async.workers.shipping import ship_site

        if self._nets is None:
            self._nets = NetCache(self.codec)
        options, before = self.options, self._shipped
        sites = {name: site for name, site in federation.sites.items() if name != homesite}
        for name, site in sites.items():
            check_capacity(name, site.capacity, site.adapters.values(), left_out)
        self._shipped = {name: ship_site(site, homesite, left_out) for name, site in sites.items()}
        for name, site in sites.items():
            host, shipped = self._hosts.get(name), self._shipped[name]
            if host is None:
                host = self._hosts[name] = SiteHost(
                    name,
                    options,
                    self._receive,
                    self.worker_changes.notify,
                    fork_server=self._fork_server,
                    nets=self._nets,
                    loop_initializer=_uvloop() if options.uvloop else None,
                    may_start=lambda: may_start_another(self._hosts.values(), self.options),
                )
                code = Code(
                    shipped=shipped.data,
                    workers=site.workers,
                    threads=site.threads,
                    lanes=len(self._lanes),
                    idle_after=site.idle_after,
                    capacity=site.capacity,
                )
                host.add_code("", code)
            elif not shipped.same_as(before[name]):
                host.reload("", shipped.data)

    def _host(self, site: str) -> Host:
        host = self._hosts.get(site)
        if host is not None:
            return host
        assert self._home is not None  # noqa: S101 - set while running
        return self._home

    # jobs

    async def submit(self, coordinator: Coordinator) -> None:
        """Launch a job as soon as there is a slot and its workers are ready; at once if they are.

        Returns when the job runs or waits in the queue or for its time; waits while the queue is full.

        Raises:
            QueueFull: it is, and the options say not to wait; or too many jobs wait for their time.
            ShippingError: the code of an operation of the job was defined since, and cannot be sent to a worker.
        """
        federation = self._federation
        if federation is not None:
            if federation.revision != self._revision:
                self._update(federation)
            check_left_out(coordinator.plan, federation, self._left_out)
        scheduler = self._scheduler
        if starts_later(coordinator.spec):
            if scheduler.full_of_delayed:
                raise QueueFull(scheduler.delayed, later=True)
        elif self.options.queue_overflow == "fail" and scheduler.overflows:
            raise QueueFull(scheduler.waiting)
        self.jobs.add(coordinator)
        if not self._engine.submit(coordinator, scheduler):
            accepted = self._waiting[coordinator] = Outcome()
            await accepted

    def _accepted(self, coordinator: Coordinator) -> None:
        waiting = self._waiting.pop(coordinator, None)
        if waiting is not None:
            waiting.settle(None)

    def _update(self, federation: Federation) -> None:
        """Run the code that the federation has now in jobs that begin from now on; others go on as they are."""
        if self._home is not None:
            from dfm_async.engine.inline_host import operations_at

            revision, runtime = federation.revision, self._home.runtime
            self._ship_available(federation, runtime.site)
            home = federation.sites.get(runtime.site)
            config = home.config(runtime.site) if home else runtime.resources.config
            runtime.replace(operations_at(federation, runtime.site), config)
            self._revision = revision

    def reload(self, federation: Federation) -> None:
        """Run jobs with the code that the federation has now; those in worker processes go on as they are."""
        if self._home is not None:
            home = federation.sites.get(self._home.runtime.site)
            self._home.runtime.resources.table.replace(home.adapters.values() if home else ())
            self._ship_available(federation, self._home.runtime.site)

    def _ship_available(self, federation: Federation, homesite: str) -> None:
        """Give to workers what can be given to them: only jobs that use the rest fail."""
        left_out: dict[OperationKey, DfmError] = {}
        self._ship(federation, homesite, left_out)
        self._left_out = left_out

    # queries

    @property
    def _workers(self) -> Iterator[SiteWorker]:
        for host in self._hosts.values():
            yield from host.workers

    def workers(self, site: str) -> list[SiteWorker]:
        """Return the worker processes of a site that have not ended, also those of operations with one of their own."""
        return list(self._hosts[site].workers) if site in self._hosts else []

    def stats(self) -> TargetStats:
        """What runs, what waits, and how the workers are."""
        home = None if self._home is None else self._home.runtime.resources
        return TargetStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            lanes=tuple(LaneStats(jobs=lane.load, alive=lane.is_alive) for lane in self._lanes),
            sites=self._sites(),
            tokens=Traffic() if home is None else Traffic(home.tokens, home.token_bytes),
            lag=self._lag(),
            exhausted=(home.site,) if home is not None and home.exhausted else (),
        )

    def _sites(self) -> dict[str, SiteStats]:
        found = {str(at): stats for host in self._hosts.values() for _, at, stats in host.stats()}
        home = None if self._home is None else self._home.runtime.resources
        if home is not None and home.limits is not None and (limits := home.limits.stats()):
            found[home.site] = SiteStats(limits=limits)
        return found

    def _lag(self) -> float | None:
        """Return by how many seconds our loop was late to take the last heartbeat of a worker."""
        beats = [worker.last_heartbeat for worker in self._workers if worker.last_heartbeat is not None]
        return max(beats)[1] if beats else None

    # messages

    def _receive(self, message: msg.Message) -> None:
        """Take a message of a worker: for the engine, or for the homesite."""
        if type(message) in TO_ENGINE:
            self._engine.receive(message)
        elif self._home is not None:
            self._home.runtime.receive(message)

    def _from_home(self, message: msg.Message) -> None:
        asyncio.get_running_loop().call_soon(self._receive, message)

    def _send_from_home(self, address: str, message: msg.Message) -> None:
        if address == HOME:
            assert self._home is not None  # noqa: S101 - it has sent this
            self._home.receive(message)
        else:
            any(host.send(address, message) for host in self._hosts.values())


async def _warm(server: ForkServer) -> None:
    with contextlib.suppress(RuntimeError):  # no more threads: the first worker reports it
        await in_thread(server.warm, "fork-server")


async def _release(server: ForkServer) -> None:
    try:
        await in_thread(server.release, "fork-server")
    except RuntimeError:  # no more threads
        server.release()


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError as error:
        raise DfmError(f"LocalOptions(uvloop=True) needs uvloop: {install_hint('uvloop')}") from error
    return uvloop.new_event_loop


class JobExecution:
    """What runs on one worker of each site. Workers start with the first job that needs them.

    Args:
        index: which lane this is.
        scheduler: the jobs of all lanes.
        hosts: the workers of all lanes.
    """

    def __init__(self, index: int, scheduler: Jobs, hosts: Iterable[SiteHost]) -> None:
        self.index = index
        self._scheduler = scheduler
        self._hosts = hosts

    @property
    def job_ids(self) -> list[str]:
        """The jobs on this lane."""
        return [coordinator.record.job_id for coordinator in self._scheduler.lane(self.index)]

    @property
    def load(self) -> int:
        """The number of jobs on this lane."""
        return len(self._scheduler.lane(self.index))

    @property
    def dead_sites(self) -> list[str]:
        """The sites whose worker on this lane has ended and was not replaced yet."""
        pools = [pool for host in self._hosts for _, _, pool in host.pools]
        return sorted({pool.site for pool in pools if pool.lacks(self.index)})

    @property
    def is_alive(self) -> bool:
        """Whether all workers of the lane that were ever needed are there."""
        return not self.dead_sites
