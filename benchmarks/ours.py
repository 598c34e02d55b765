"""The federation that the benchmarks run, its pipelines, and the few lines that run a job."""

from __future__ import annotations

from typing import Any, Self

from benchmarks import operations
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.planning import Plan

SITES = ("a", "b", "c")


class Contender:
    """A session with three sites, each of which offers every operation.

    Args:
        workers: how many worker processes each site has.
        target: where the sites run.
        store: where jobs are written down.
    """

    def __init__(self, workers: int = 1, target: Any = "local", store: str | None = None) -> None:
        self.federation = Federation("benchmarks")
        first, *others = (self.federation.site(name, workers=workers) for name in SITES)
        self.echo: dict[bool, Any] = {
            False: first.operation(operations.echo),
            True: first.operation(operations.echo_async),
        }
        self.stage: dict[bool, Any] = {
            False: first.operation(operations.stage),
            True: first.operation(operations.stage_async),
        }
        self.streams: dict[tuple[str, bool], Any] = {
            ("ints", False): first.operation(operations.ints),
            ("dicts", False): first.operation(operations.dicts),
            ("ints", True): first.operation(operations.ints_async),
            ("dicts", True): first.operation(operations.dicts_async),
        }
        for site in others:
            for operation in (*self.echo.values(), *self.stage.values()):
                site.operation(operation)
        self.session = Session(self.federation, target=target, store=store)

    async def __aenter__(self) -> Self:
        await self.session.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    # pipelines

    async def one(self, is_async: bool) -> Plan:
        """One small operation at one site; parameter x."""
        with Pipeline("one") as pipeline:
            Yield(self.echo[is_async](PlaceParam("x"), site="a"))
        return await self.session.prepare(pipeline)

    async def stream(self, kind: str, is_async: bool) -> Plan:
        """A generator, each of whose elements is a result; parameter n."""
        with Pipeline("stream") as pipeline:
            Yield(self.streams[kind, is_async](PlaceParam("n"), site="a"))
        return await self.session.prepare(pipeline)

    def chain_of(self, sites: list[str], is_async: bool = False) -> Pipeline:
        """One stage at each of these sites, one after the other; parameter x."""
        with Pipeline("chain") as pipeline:
            value: Any = PlaceParam("x")
            for site in sites:
                value = self.stage[is_async](value, site=site)
            Yield(value)
        return pipeline

    def fan_of(self, sites: list[str], is_async: bool = False) -> Pipeline:
        """One independent operation at each of these sites; no parameter."""
        with Pipeline("fan") as pipeline:
            for i, site in enumerate(sites):
                Yield(self.echo[is_async](i, site=site))
        return pipeline

    async def chain(self, sites: list[str], is_async: bool = False) -> Plan:
        """The plan of :meth:`chain_of`."""
        return await self.session.prepare(self.chain_of(sites, is_async))

    async def fan(self, sites: list[str], is_async: bool = False) -> Plan:
        """The plan of :meth:`fan_of`."""
        return await self.session.prepare(self.fan_of(sites, is_async))

    # jobs

    async def run(self, plan: Plan, params: dict[str, Any] | list[dict[str, Any]], expected: int = 1) -> None:
        """Runs a job to its end and reads all results; there must be as many as expected."""
        job = await self.session.execute(plan, params)
        count = 0
        async for _ in job:
            count += 1
        await job
        if count != expected:
            raise RuntimeError(f"{count} of {expected} results came")
