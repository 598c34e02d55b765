"""The inline target. Values still pass through the codec between sites: what works here works in processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from dfm_async.errors import DfmError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.model.options import LocalOptions
from dfm_async.model.resources import SiteConfig
from dfm_async.model.stats import TargetStats, Traffic
from dfm_async.planner.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import Bells
from dfm_async.runtime.operations import OperationTable
from dfm_async.runtime.site import SiteRuntime
from dfm_async.targets.coordinator import Coordinator
from dfm_async.targets.frames import Row
from dfm_async.targets.hub import Hub
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.post import deliver
from dfm_async.targets.rules import JobRules
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

__all__ = ["InlineTarget"]


class InlineTarget:
    """Runs every site of a federation on the loop of the session. All jobs run at once: there are no lanes."""

    def __init__(self, options: LocalOptions | None = None) -> None:
        self.options = options or LocalOptions()
        self.codec = Codec(trusted=True)
        self.jobs: JobTable[Coordinator] = JobTable(self.options)
        self.worker_bells = Bells()
        self._hub = Hub(self._post)
        self._sites: dict[str, SiteRuntime] = {}
        self._federation: Federation | None = None
        self._homesite = ""
        self._revision = -1
        self._stack: AsyncExitStack | None = None
        self._updating = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def running(self, federation: Federation, homesite: str) -> AsyncIterator[None]:
        """Keeps the sites up while the context is open."""
        self._loop = asyncio.get_running_loop()
        self._federation, self._homesite = federation, homesite
        async with AsyncExitStack() as stack:
            self._stack = stack
            await self._update()
            try:
                yield
            finally:
                self._stack = None
                self.jobs.close()
                self.worker_bells.close()
                self._sites.clear()

    async def _update(self) -> None:
        """Has jobs that begin from now on run the code that the federation has now."""
        federation, homesite = self._federation, self._homesite
        assert federation is not None and self._loop is not None  # noqa: S101, PT018 - set while running
        if federation.revision == self._revision:
            return
        async with self._updating:
            revision = federation.revision
            for name in dict.fromkeys([*federation.sites, homesite]):
                site = federation.sites.get(name)
                table = OperationTable(name, site.adapters.values() if site else ())
                runtime = self._sites.get(name)
                if runtime is not None:
                    # In turn with the messages: jobs that were submitted before begin with the code that was there.
                    config = site.config(homesite) if site else runtime.config
                    self._loop.call_soon(_replace, runtime, table, config)
                elif self._stack is not None:
                    runtime = SiteRuntime(
                        name,
                        table,
                        self.codec,
                        report=self._report,
                        send=self._send,
                        threads=site.threads if site else 8,
                        grace=self.options.shutdown_grace,
                        config=site.config(homesite) if site else None,
                    )
                    self._sites[name] = await self._stack.enter_async_context(runtime)
            self._revision = revision

    async def submit(self, coordinator: Coordinator, priority: int = 0) -> None:
        """Launches a job at once."""
        coordinator.priority = priority
        self.jobs.add(coordinator)  # first: nobody may submit a second job with its id meanwhile
        await self._update()
        if coordinator.record.status.ended:  # it was cancelled meanwhile
            return
        coordinator.on_end(self._hub.forget)
        plan = coordinator.plan
        routes = tuple(location.partition("#")[0] for location in plan.locations)
        try:
            for at, net in enumerate(plan.nets):
                self._sites[routes[at]].add_program(plan.hash, at, net)
        except Exception as error:  # noqa: BLE001 - a plan that nobody can run ends its own job, not others
            coordinator.fail(DfmError(f"the plan cannot be given to the sites: {type(error).__name__}: {error}"))
            return
        number = self._hub.register(coordinator)

        def send(at: int, message: msg.Message) -> None:
            self._send(routes[at], message)

        def abandon(at: int) -> None:
            """A synchronous operation that does not return cannot be killed here: its thread is abandoned."""
            send(at, msg.AbandonJob(number, at))
            coordinator.abandon(at)

        coordinator.launch(number, routes, send, abandon)

    def coordinate(self, record: JobRecord, rules: JobRules, pack_rows: Callable[[Any], list[Row]]) -> Coordinator:
        """Makes what a session steers a new job by."""
        return Coordinator(record, self.codec, rules, pack_rows)

    async def refusals(self, plan: Plan) -> list[Problem]:
        """What this target cannot give."""
        return []

    async def find(self, job_id: str) -> JobRecord | None:
        """Finds a job that runs, or ended not too long ago."""
        return self.jobs.find(job_id)

    async def refresh(self) -> None:
        """Has nothing to do: all jobs are known here."""

    async def forget(self, job_id: str) -> None:
        """Has nothing to do: nobody else knows a job."""

    async def shutdown(self, reason: str, grace: float) -> None:
        """Ends all jobs, and returns when they have."""
        running = self.jobs.coordinators
        for coordinator in running:
            coordinator.shut_down(reason, grace)
        for coordinator in running:
            await coordinator.record.completion_event.wait()

    def reload(self, federation: Federation) -> None:
        """Calls the code that the federation has now: also for jobs that run."""
        for name, runtime in self._sites.items():
            site = federation.sites.get(name)
            runtime.table.replace(site.adapters.values() if site else ())

    def stats(self) -> TargetStats:
        """What runs."""
        sites = self._sites.values()
        tokens = Traffic(sum(site.tokens for site in sites), sum(site.token_bytes for site in sites))
        exhausted = tuple(site.site for site in sites if site.exhausted)
        return TargetStats(running=len(self.jobs.coordinators), tokens=tokens, exhausted=exhausted)

    def _post(self, sender: Coordinator, message: msg.SendToPlace) -> None:
        deliver(self.jobs, self.codec, sender, message, Coordinator.offer)

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


def _replace(runtime: SiteRuntime, table: OperationTable, config: SiteConfig) -> None:
    runtime.table, runtime.config = table, config
