"""The local target: the application's loop, and a pool of worker processes per site."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dfm_async.errors import DfmError, WorkerLost
from dfm_async.federation.federation import Federation
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.runtime.once import in_thread
from dfm_async.runtime.operations import OperationTable
from dfm_async.runtime.site import SiteRuntime, encode_net
from dfm_async.targets.coordinator import Coordinator, Phase
from dfm_async.targets.hub import Hub
from dfm_async.targets.local.pool import SitePool, SiteWorker, remember_net
from dfm_async.targets.local.shipping import ship_site
from dfm_async.targets.local.start import ForkServer, choose_method
from dfm_async.targets.local.worker import HOME
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

__all__ = ["LocalTarget"]

_NETS: Final = 256
_CACHE: Final = "#cache"


class LocalTarget:
    """Runs every site of a federation in worker processes on this machine."""

    def __init__(self, options: LocalOptions | None = None) -> None:
        self.options = options or LocalOptions()
        self.codec = Codec(trusted=True)
        self._hub = Hub()
        self._pools: dict[str, SitePool] = {}
        self._shipped: dict[str, bytes] = {}
        self._federation: Federation | None = None
        self._homesite = HOME
        self._fork_server: ForkServer | None = None
        self._group: asyncio.TaskGroup | None = None
        self._nets: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Keeps the pools while the context is open. Workers start when a job first needs them.

        Raises:
            ShippingError: the code of an operation cannot be sent to a worker.
        """
        self._federation, self._homesite = federation, homesite
        self._shipped = {name: ship_site(site) for name, site in federation.sites.items() if name != homesite}
        if choose_method(self.options.start_method) == "forkserver":
            self._fork_server = ForkServer.acquire(self.options.preload)
        try:
            home = federation.sites.get(homesite)
            async with (
                asyncio.TaskGroup() as group,
                SiteRuntime(
                    homesite,
                    OperationTable(homesite, home.adapters.values() if home else ()),
                    self.codec,
                    report=self._from_home,
                    send=self._send_from_home,
                    threads=home.threads if home else 8,
                    grace=self.options.shutdown_grace,
                ) as runtime,
            ):
                self._group = group
                self._hub.home = runtime
                if self._fork_server is not None:
                    group.create_task(in_thread(self._fork_server.warm, "fork-server"))
                try:
                    yield
                finally:
                    self._group = None
                    with anyio.CancelScope(shield=True):
                        await self._shut_down()
        finally:
            if self._fork_server is not None:
                with anyio.CancelScope(shield=True):
                    await in_thread(self._fork_server.release, "fork-server")

    async def _shut_down(self) -> None:
        grace = self.options.shutdown_grace
        pools = list(self._pools.values())
        await asyncio.gather(*(pool.shut_down(grace) for pool in pools))
        self._pools.clear()

    # jobs

    def submit(self, coordinator: Coordinator) -> None:
        """Launches a job as soon as its workers are ready; at once if they are."""
        workers = [self._choose(location) for location in coordinator.plan.locations]
        for at, worker in enumerate(workers):
            if worker is not None:
                worker.seats[coordinator, at] = None
        coordinator.on_end(lambda _: _leave(coordinator, workers))
        if all(worker is None or worker.address for worker in workers):
            self._launch(coordinator, workers)
        else:
            assert self._group is not None  # noqa: S101 - the session submits only while we run
            self._group.create_task(self._launch_later(coordinator, workers))

    def _choose(self, location: str) -> SiteWorker | None:
        """The worker for a location; None for the homesite, which runs in this process."""
        site, _, part = location.partition("#")
        if site == self._homesite:
            return None
        if part == _CACHE:
            return self._pool(site, site).worker(0)
        return self._pool(location, site).worker()

    def _pool(self, key: str, site: str) -> SitePool:
        pool = self._pools.get(key)
        if pool is None:
            assert self._federation is not None  # noqa: S101 - set while running
            found = self._federation.sites[site]
            pool = self._pools[key] = SitePool(
                site,
                workers=found.workers if key == site else 1,
                threads=found.threads,
                shipped=self._shipped[site],
                fork_server=self._fork_server,
                loop_initializer=_uvloop() if self.options.uvloop else None,
                on_message=self._hub.receive,
                output=self.options.output,
                unresponsive_after=self.options.unresponsive_after,
            )
        return pool

    async def _launch_later(self, coordinator: Coordinator, workers: list[SiteWorker | None]) -> None:
        waiting = [at for at, worker in enumerate(workers) if worker is not None]
        while waiting:
            at = waiting.pop()
            worker = workers[at]
            assert worker is not None  # noqa: S101 - only those are waited for
            try:
                await asyncio.shield(worker.ready)
            except WorkerLost as error:
                coordinator.record.cause = error
                coordinator.halt(JobStatus.ABORTED, str(error), 0)
                return
            except DfmError as error:
                coordinator.fail(error)
                return
            except OSError as error:
                coordinator.record.cause = error
                coordinator.halt(JobStatus.ABORTED, f"a worker of site {worker.site!r} cannot start: {error}", 0)
                return
            # One that was ready may have ended while we waited for the others: nothing was lost, take another.
            for other, seated in enumerate(workers):
                if seated is not None and seated.ready.done() and seated.ended.done():
                    found = workers[other] = self._choose(coordinator.plan.locations[other])
                    if found is not None:
                        found.seats[coordinator, other] = None
                    waiting.append(other)
        self._launch(coordinator, workers)

    def _launch(self, coordinator: Coordinator, workers: list[SiteWorker | None]) -> None:
        if coordinator.phase is not Phase.WAITING:
            return  # cancelled in the meantime
        plan = coordinator.plan
        number = self._hub.register(coordinator)
        routes = tuple(HOME if worker is None else worker.address for worker in workers)
        for at, worker in enumerate(workers):
            if worker is None:
                assert self._hub.home is not None  # noqa: S101 - set while running
                self._hub.home.add_program(plan.hash, at, plan.nets[at])
            elif not remember_net(worker, plan.hash, at):
                assert worker.channel is not None  # noqa: S101 - it is ready
                worker.channel.send(msg.SendNet(plan.hash, at, self._encoded(plan, at)))

        def send(at: int, message: msg.Message) -> None:
            worker = workers[at]
            if worker is None:
                asyncio.get_running_loop().call_soon(self._to_home, message)
            elif worker.channel is not None:
                worker.channel.send(message)

        def kill(at: int) -> None:
            worker = workers[at]
            if worker is None:
                coordinator.abandon(at)  # our own process: a thread that does not return is left alone
            else:
                worker.kill(f"a job on it ({coordinator.record.job_id}) was to stop, and did not within its grace")

        for worker in workers:
            if worker is not None:
                worker.launched()
        coordinator.launch(number, routes, send, kill)
        for at, worker in enumerate(workers):
            if worker is not None and worker.unresponsive:
                coordinator.unresponsive(at, worker.site, worker.silence)
            if worker is not None and worker.channel is not None and len(worker.seats) == 1:
                worker.channel.flush()  # it is idle: let it begin while we go on; several jobs are sent together

    def _encoded(self, plan: Plan, at: int) -> bytes:
        key = (plan.hash, at)
        if key not in self._nets:
            self._nets[key] = encode_net(plan.nets[at], self.codec)
            if len(self._nets) > _NETS:
                self._nets.popitem(last=False)
        return self._nets[key]

    # messages

    def _to_home(self, message: msg.Message) -> None:
        if self._hub.home is not None:
            self._hub.home.receive(message)

    def _from_home(self, message: msg.Message) -> None:
        asyncio.get_running_loop().call_soon(self._hub.receive, message)

    def _send_from_home(self, address: str, message: msg.Message) -> None:
        if address == HOME:
            asyncio.get_running_loop().call_soon(self._to_home, message)
            return
        for pool in self._pools.values():
            for worker in pool.processes:
                if worker.address == address and worker.channel is not None:
                    worker.channel.send(message)
                    return


def _leave(coordinator: Coordinator, workers: list[SiteWorker | None]) -> None:
    for at, worker in enumerate(workers):
        if worker is not None:
            worker.seats.pop((coordinator, at), None)
            worker.left()


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError as error:
        raise DfmError("LocalOptions(uvloop=True) needs uvloop: pip install 'dfm-async[uvloop]'") from error
    return uvloop.new_event_loop
