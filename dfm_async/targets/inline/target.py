"""The inline target. Values still pass through the codec between sites: what works here works in processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dfm_async.federation.federation import Federation
from dfm_async.runtime.operations import OperationTable
from dfm_async.runtime.site import SiteRuntime
from dfm_async.targets.coordinator import Coordinator
from dfm_async.targets.hub import Hub
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

__all__ = ["InlineTarget"]


class InlineTarget:
    """Runs every site of a federation on the loop of the session."""

    def __init__(self, grace: float = 5.0) -> None:
        self._grace = grace
        self.codec = Codec(trusted=True)
        self._hub = Hub()
        self._sites: dict[str, SiteRuntime] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Keeps the sites up while the context is open."""
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            names = dict.fromkeys([*federation.sites, homesite])
            for name in names:
                site = federation.sites.get(name)
                runtime = SiteRuntime(
                    name,
                    OperationTable(name, site.adapters.values() if site else ()),
                    self.codec,
                    report=self._report,
                    send=self._send,
                    threads=site.threads if site else 8,
                    grace=self._grace,
                )
                self._sites[name] = await stack.enter_async_context(runtime)
            try:
                yield
            finally:
                self._sites.clear()

    def submit(self, coordinator: Coordinator) -> None:
        """Launches a job at once."""
        plan = coordinator.plan
        number = self._hub.register(coordinator)
        routes = tuple(location.partition("#")[0] for location in plan.locations)
        for at, net in enumerate(plan.nets):
            self._sites[routes[at]].add_program(plan.hash, at, net)
        # A synchronous operation that does not return cannot be killed here: its thread is left alone.
        coordinator.launch(number, routes, lambda at, message: self._send(routes[at], message), coordinator.abandon)

    def _send(self, address: str, message: msg.Message) -> None:
        assert self._loop is not None  # noqa: S101 - set while running
        self._loop.call_soon(self._deliver, address, message)

    def _deliver(self, address: str, message: msg.Message) -> None:
        runtime = self._sites.get(address)
        if runtime is not None:
            runtime.receive(message)

    def _report(self, message: msg.Message) -> None:
        assert self._loop is not None  # noqa: S101 - set while running
        self._loop.call_soon(self._hub.receive, message)
