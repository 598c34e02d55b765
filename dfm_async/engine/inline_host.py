"""A site whose worker is the loop of the application."""

from __future__ import annotations

import asyncio

from dfm_async.engine.run import Run
from dfm_async.federation.federation import Federation
from dfm_async.model.call_limits import SiteCapacity
from dfm_async.model.ids import HOME
from dfm_async.model.options import LocalOptions
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.permits import check_capacity
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.site_runtime import SiteRuntime
from dfm_async.wire import messages as msg


class InlineHost:
    """Runs locations of jobs in a runtime on this loop."""

    def __init__(self, runtime: SiteRuntime, address: str = HOME) -> None:
        self.runtime = runtime
        self.address = address
        self._loop = asyncio.get_running_loop()

    def assign(self, run: Run, at: int) -> _InlineAssignment:
        """Use the loop for a location; it is always ready."""
        run.assigned(at)
        return _InlineAssignment(self, run, at)

    def receive(self, message: msg.Message) -> None:
        """Hand a message to the runtime, in a turn of the loop of its own."""
        self._loop.call_soon(self.runtime.receive, message)


class _InlineAssignment:
    """One location of a run on this loop."""

    replaceable = False  # it ends with the application
    __slots__ = ("_at", "_host", "_run", "address", "send")

    def __init__(self, host: InlineHost, run: Run, at: int) -> None:
        self._host = host
        self._run = run
        self._at = at
        self.address = host.address
        self.send = host.receive

    def prepare(self) -> None:
        """Make the net known to the runtime."""
        plan = self._run.coordinator.plan
        self._host.runtime.add_program(plan.hash, self._at, plan.nets[self._at])

    def launched(self) -> None:
        """Do nothing: the own loop is not watched."""

    def stop_by_force(self, *, seen: bool) -> None:
        """Abandon what has not stopped: threads of the own process cannot be killed."""
        self.send(msg.AbandonJob(self._run.number, self._at))
        self._run.abandon(self._at)

    def release(self, *, succeeded: bool) -> None:
        """Do nothing: the loop stays."""


def operations_at(federation: Federation, site: str) -> OperationTable:
    """Return the operations that a federation has at a site now; a site that it does not name has none."""
    found = federation.sites.get(site)
    return OperationTable(site, found.adapters.values() if found else ())


def inline_runtime(
    federation: Federation,
    site: str,
    homesite: str,
    options: LocalOptions,
    **given: object,
) -> SiteRuntime:
    """Make the runtime of a site on this loop; ``given``: further arguments of :class:`SiteResources`."""
    found = federation.sites.get(site)
    if found is not None:
        check_capacity(site, found.capacity, found.adapters.values())
    resources = SiteResources(
        site,
        operations_at(federation, site),
        threads=found.threads if found else 8,
        grace=options.shutdown_grace,
        config=found.config(homesite) if found else None,
        capacity=found.capacity if found else SiteCapacity(),
        checkpoints=(options.checkpoints, options.checkpoint_bytes),
        **given,  # type: ignore[arg-type] # codec, report and send
    )
    return SiteRuntime(resources)
