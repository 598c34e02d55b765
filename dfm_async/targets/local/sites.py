"""The worker pools of all sites of a federation."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dfm_async.base.installation import install_hint
from dfm_async.errors import DfmError, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.model.options import LocalOptions
from dfm_async.planner.plan import Plan
from dfm_async.runtime.site import encode_net
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.workers.fork_server import ForkServer
from dfm_async.workers.pool import SitePool
from dfm_async.workers.shipping import ShippedSite, ship_site
from dfm_async.workers.site_worker import SiteWorker, remember_net

__all__ = ["SitePools"]

_NETS: Final = 256
_CACHE: Final = "#cache"


class SitePools:
    """Makes the pool of a site, or of an operation with a process of its own, when it is first needed.

    Raises:
        ShippingError: the code of an operation cannot be sent to a worker.
    """

    def __init__(
        self,
        federation: Federation,
        homesite: str,
        options: LocalOptions,
        codec: Codec,
        fork_server: ForkServer | None,
        on_message: Callable[[Any], None],
        on_change: Callable[[], None],
    ) -> None:
        self._federation = federation
        self._homesite = homesite
        self._options = options
        self._codec = codec
        self._fork_server = fork_server
        self._on_message = on_message
        self._on_change = on_change
        self._shipped = self._ship()
        self._pools: dict[str, SitePool] = {}
        self._closed = False
        self._nets: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self.lanes = options.lanes_for(site.workers for site in federation.sites.values())
        """How many lanes there are."""

    def _ship(self) -> dict[str, ShippedSite]:
        home = self._homesite
        return {name: ship_site(site, home) for name, site in self._federation.sites.items() if name != home}

    def reload(self) -> None:
        """Sends the code that the federation has now to workers that start from now on; others get no further job.

        Raises:
            ShippingError: the code of an operation cannot be sent to a worker.
        """
        before, self._shipped = self._shipped, self._ship()
        for pool in self._pools.values():
            shipped = self._shipped.get(pool.site)
            if shipped is not None and not shipped.same_as(before[pool.site]):
                pool.reload(shipped.data, self._options.shutdown_grace)

    @property
    def pools(self) -> Mapping[str, SitePool]:
        """The pools that were needed so far, by location."""
        return self._pools

    @property
    def workers(self) -> Iterator[SiteWorker]:
        """All workers that have not ended."""
        for pool in self._pools.values():
            yield from pool.processes

    def worker(self, location: str, lane: int) -> SiteWorker | None:
        """The worker of a location in a lane, which may still be starting; None for the homesite, which has none.

        Raises:
            SessionClosed: all workers were ended.
        """
        if self._closed:
            raise SessionClosed("the session was closed")
        site, _, part = location.partition("#")
        if site == self._homesite:
            return None
        if part == _CACHE:  # the lanes share it: it is kept by the first worker of the site
            return self._pool(site, site).worker(0)
        return self._pool(location, site).worker(lane)

    def _pool(self, key: str, site: str) -> SitePool:
        pool = self._pools.get(key)
        if pool is None:
            found = self._federation.sites[site]
            pool = self._pools[key] = SitePool(
                site,
                workers=min(found.workers or self.lanes, self.lanes),
                threads=found.threads,
                shipped=self._shipped[site].data,
                fork_server=self._fork_server,
                loop_initializer=_uvloop() if self._options.uvloop else None,
                on_message=self._on_message,
                on_change=self._on_change,
                output=self._options.output,
                unresponsive_after=self._options.unresponsive_after,
            )
        return pool

    def teach(self, worker: SiteWorker, plan: Plan, at: int) -> None:
        """Sends a net to a worker that does not know it yet."""
        if (plan.hash, at) not in worker.nets:
            net = self._encoded(plan, at)  # first: what cannot be encoded is not known to the worker
            remember_net(worker, plan.hash, at)
            assert worker.channel is not None  # noqa: S101 - it is ready
            worker.channel.send(msg.SendNet(plan.hash, at, net))

    def _encoded(self, plan: Plan, at: int) -> bytes:
        key = (plan.hash, at)
        if key not in self._nets:
            self._nets[key] = encode_net(plan.nets[at], self._codec)
            if len(self._nets) > _NETS:
                self._nets.popitem(last=False)
        return self._nets[key]

    def send(self, address: str, message: msg.Message) -> None:
        """Sends a message to the worker with this address, if it is still there."""
        for worker in self.workers:
            if worker.address == address and worker.channel is not None:
                worker.channel.send(message)
                return

    async def shut_down(self, grace: float) -> None:
        """Ends all workers: asks, waits the grace, kills; returns when all are reaped."""
        self._closed = True
        await asyncio.gather(*(pool.shut_down(grace) for pool in self._pools.values()))
        self._pools.clear()


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError as error:
        raise DfmError(f"LocalOptions(uvloop=True) needs uvloop: {install_hint('uvloop')}") from error
    return uvloop.new_event_loop
