"""The inline target. Values still pass through the codec between sites: what works here works in processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dfm_async.engine.coordinator import Coordinator
from dfm_async.engine.engine import Jobs
from dfm_async.engine.inline_host import InlineHost, inline_runtime, operations_at
from dfm_async.engine.target import LocalTarget
from dfm_async.federation.federation import Federation
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import SiteStats, TargetStats, Traffic
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec


class InlineTarget(LocalTarget):
    """Runs every site of a federation on the loop of the session. All jobs run at once: there are no lanes."""

    def __init__(self, options: LocalOptions | None = None) -> None:
        super().__init__(options or LocalOptions(), Codec.for_processes())
        self._scheduler = Jobs(1, sys.maxsize, sys.maxsize)
        self._hosts: dict[str, InlineHost] = {}
        self._federation: Federation | None = None
        self._homesite = ""
        self._revision = -1
        self._stack: AsyncExitStack | None = None
        self._updating = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Keep the sites up while the context is open."""
        self._loop = asyncio.get_running_loop()
        self._federation, self._homesite = federation, homesite
        async with AsyncExitStack() as stack:
            self._stack = stack
            await self._update()
            try:
                yield
            finally:
                self._stack = None
                self._close()
                self._hosts.clear()

    def _host(self, site: str) -> InlineHost:
        return self._hosts[site]

    async def _update(self) -> None:
        """Run the code that the federation has now in jobs that begin from now on."""
        federation, homesite = self._federation, self._homesite
        assert federation is not None and self._loop is not None  # noqa: S101, PT018 - set while running
        if federation.revision == self._revision:
            return
        async with self._updating:
            revision = federation.revision
            for name in dict.fromkeys([*federation.sites, homesite]):
                host = self._hosts.get(name)
                if host is not None:
                    # In turn with the messages: jobs that were submitted before begin with the code that was there.
                    site, runtime = federation.sites.get(name), host.runtime
                    config = site.config(homesite) if site else runtime.resources.config
                    self._loop.call_soon(runtime.replace, operations_at(federation, name), config)
                elif self._stack is not None:
                    given = {
                        "codec": self.codec,
                        "report": self._report,
                        "send": self._send,
                        "on_limits": self.worker_changes.notify,
                    }
                    runtime = inline_runtime(federation, name, homesite, self.options, **given)
                    self._hosts[name] = InlineHost(await self._stack.enter_async_context(runtime), name)
            self._revision = revision

    async def submit(self, coordinator: Coordinator) -> None:
        """Launch a job at once."""
        self.jobs.add(coordinator)  # first: nobody may submit a second job with its id meanwhile
        await self._update()
        if not coordinator.record.status.ended:  # else it was cancelled meanwhile
            self._engine.submit(coordinator, self._scheduler)

    def reload(self, federation: Federation) -> None:
        """Call the code that the federation has now: also for jobs that run."""
        for name, host in self._hosts.items():
            site = federation.sites.get(name)
            host.runtime.resources.table.replace(site.adapters.values() if site else ())

    def stats(self) -> TargetStats:
        """What runs."""
        sites = [host.runtime.resources for host in self._hosts.values()]
        tokens = Traffic(sum(site.tokens for site in sites), sum(site.token_bytes for site in sites))
        exhausted = tuple(site.site for site in sites if site.exhausted)
        limited = {site.site: site.limits.stats() for site in sites if site.limits is not None}
        return TargetStats(
            running=len(self.jobs.coordinators) - self._scheduler.delayed,
            sites={name: SiteStats(limits=limits) for name, limits in limited.items() if limits},
            tokens=tokens,
            exhausted=exhausted,
        )

    def _send(self, address: str, message: msg.Message) -> None:
        host = self._hosts.get(address)
        if host is not None:
            host.receive(message)

    def _report(self, message: msg.Message) -> None:
        assert self._loop is not None  # noqa: S101 - set while running
        self._loop.call_soon(self._engine.receive, message)
