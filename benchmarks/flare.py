"""The federation that the benchmarks of the FLARE target run: a real one on this machine, with two sites and a home.

The server, three clients and the processes of two FLARE jobs share the machine with the application: absolute figures
say little, ratios to what is measured in the same federation do.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from benchmarks import operations
from benchmarks.external import ROOT
from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield
from dfm_async.flare import LocalFlare
from dfm_async.model.flare import FlareOptions
from dfm_async.planning import Plan

SITES = ("a", "b")
KITS = ROOT / ".nox" / "federations" / "kits"
"""Startup kits are kept there: making them is not what is measured."""


@asynccontextmanager
async def up(sites: Sequence[str] = SITES) -> AsyncIterator[LocalFlare]:
    """Starts the federation, in a folder of its own."""
    folder = tempfile.mkdtemp(prefix="dfm-bench-")
    try:
        environment = {"PYTHONPATH": str(ROOT)}
        async with LocalFlare.up(
            sites, folder, allow_code=True, kits=KITS, environment=environment, journal=False
        ) as flare:
            yield flare
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Contender:
    """A session with it.

    Args:
        flare: the federation.
        gateway: whether results may come through the homesite's client.
        linger: for how many seconds the host job stays when no session needs it.
    """

    def __init__(self, flare: LocalFlare, gateway: Literal["auto", "never"] = "auto", linger: float = 60.0) -> None:
        self.federation = Federation("benchmarks")
        a, b = (self.federation.site(name, workers=1) for name in SITES)
        self.echo: Any = a.operation(operations.echo)
        self.stage: Any = a.operation(operations.stage)
        self.ints: Any = a.operation(operations.ints)
        self.arrays: Any = a.operation(operations.arrays)
        self.count: Any = b.operation(operations.count)
        self.count_arrays: Any = b.operation(operations.count_arrays)
        b.operation(self.stage)
        options = FlareOptions(
            startup_kit=flare.startup_kit, user=flare.user, code="travels", gateway=gateway, linger=linger
        )
        self.session = Session(self.federation, target="flare", options=options)

    async def __aenter__(self) -> Contender:
        await self.session.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    @property
    def way(self) -> str:
        """How results come."""
        return str(self.session.stats().transport)

    # pipelines

    async def one(self) -> Plan:
        """One small operation at one site; parameter x."""
        with Pipeline("one") as pipeline:
            Yield(self.echo(PlaceParam("x"), site="a"))
        return await self.session.prepare(pipeline)

    async def chain(self, sites: list[str]) -> Plan:
        """One stage at each of these sites, one after the other; parameter x."""
        with Pipeline("chain") as pipeline:
            value: Any = PlaceParam("x")
            for site in sites:
                value = self.stage(value, site=site)
            Yield(value)
        return await self.session.prepare(pipeline)

    async def stream(self) -> Plan:
        """A generator, each of whose elements is a result; parameter n."""
        with Pipeline("stream") as pipeline:
            Yield(self.ints(PlaceParam("n"), site="a"))
        return await self.session.prepare(pipeline)

    async def elements(self) -> Plan:
        """A generator at one site, whose elements another site reads; parameter n."""
        with Pipeline("elements") as pipeline:
            Yield(self.count(self.ints(PlaceParam("n"), site="a"), site="b"))
        return await self.session.prepare(pipeline)

    async def loop(self, sites: list[str]) -> Plan:
        """A loop over a list, with one stage at each of these sites per element; parameter values."""
        with Pipeline("loop") as pipeline, ForEach(PlaceParam("values")) as value:
            for site in sites:
                value = self.stage(value, site=site)
            Yield(value)
        return await self.session.prepare(pipeline)

    async def large(self) -> Plan:
        """Arrays from one site to another; parameters n and size."""
        with Pipeline("arrays") as pipeline:
            Yield(self.count_arrays(self.arrays(PlaceParam("n"), PlaceParam("size"), site="a"), site="b"))
        return await self.session.prepare(pipeline)

    # jobs

    async def run(self, plan: Plan, params: Any, expected: int = 1) -> Any:
        """Runs a job to its end and reads all results; there must be as many as expected. Gives the last one."""
        job = await self.session.execute(plan, params)
        count = 0
        value = None
        async for result in job:
            count += 1
            value = result.value
        await job
        if count != expected:
            raise RuntimeError(f"{count} of {expected} results came")
        return value
