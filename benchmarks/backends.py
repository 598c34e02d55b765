"""The peers: each gives sites that run one function call, and a way to stream many small values out of one.

``pool`` is asyncio with ``concurrent.futures.ProcessPoolExecutor``, the least that one could write by hand. The others
are used when they are installed. This module imports only the standard library at its top, because it also runs in
environments that have nothing but one peer.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar, Self

from benchmarks import operations

Function = Callable[[Any], Any]


class Backend(abc.ABC):
    """Sites, each with some worker processes, warm as soon as :meth:`warm` has run."""

    cost: ClassVar[float] = 1.0
    """Roughly how much longer than ``pool`` one call takes; loops are shortened by it."""

    def __init__(self, sites: int = 1, workers: int = 1) -> None:
        self.sites = sites
        self.workers = workers
        self.stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    @abc.abstractmethod
    async def start(self) -> None:
        """Makes the sites; workers may start later."""

    @abc.abstractmethod
    def call(self, site: int, function: Function, argument: Any) -> Awaitable[Any]:
        """Runs a function at a site."""

    async def each(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        """Calls a function at the first site for each argument, all at once."""
        return await asyncio.gather(*(self.call(0, function, argument) for argument in arguments))

    async def through(self, value: int, stages: Sequence[int]) -> int:
        """Sends a value through one stage at each of these sites."""
        for site in stages:
            value = await self.call(site, operations.stage, value)
        return value

    async def pass_on(self, make: Function, take: Function, argument: Any) -> Any:
        """Calls a function at the first site, and another one with its value at the second."""
        return await self.call(1, take, await self.call(0, make, argument))

    async def stream(self, kind: str, n: int) -> AsyncIterator[Any]:
        """Gives n small values from the first site."""
        element = operations.ELEMENTS[kind]
        for call in [asyncio.ensure_future(self.call(0, element, i)) for i in range(n)]:
            yield await call

    async def warm(self) -> None:
        """Waits until every site has answered."""
        await asyncio.gather(
            *(self.call(s, operations.echo, 0) for s in range(self.sites) for _ in range(self.workers))
        )

    def loops(self, n: int) -> int:
        """How many of n calls to make."""
        return max(int(n / self.cost), 10)


class PoolBackend(Backend):
    """asyncio and one ``ProcessPoolExecutor`` (spawn) per site."""

    async def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.loop = asyncio.get_running_loop()
        self.pools = [
            self.stack.enter_context(ProcessPoolExecutor(self.workers, mp_context=spawn)) for _ in range(self.sites)
        ]

    def call(self, site: int, function: Function, argument: Any) -> Awaitable[Any]:
        return self.loop.run_in_executor(self.pools[site], function, argument)


class AiomultiprocessBackend(Backend):
    """One stock ``aiomultiprocess.Pool`` per site."""

    cost = 50.0

    async def start(self) -> None:
        from aiomultiprocess import Pool

        self.pools = [await self.stack.enter_async_context(Pool(processes=self.workers)) for _ in range(self.sites)]

    def call(self, site: int, function: Function, argument: Any) -> Awaitable[Any]:
        found: Awaitable[Any] = self.pools[site].apply(operations.ASYNC[function], (argument,))
        return found

    async def stream(self, kind: str, n: int) -> AsyncIterator[Any]:
        for value in await self.pools[0].map(operations.ASYNC[operations.ELEMENTS[kind]], range(n)):
            yield value


def _log_events(topic: str, kind: str, n: int) -> int:
    from distributed import get_worker  # type: ignore[import-not-found]

    worker = get_worker()
    for value in operations.GENERATORS[kind](n):
        worker.log_event(topic, value)
    return n


class DaskBackend(Backend):
    """A ``distributed.LocalCluster``, with the workers as sites."""

    cost = 40.0

    async def start(self) -> None:
        from distributed import Client, LocalCluster

        count = self.sites * self.workers
        cluster = await self.stack.enter_async_context(
            LocalCluster(
                n_workers=count, threads_per_worker=1, processes=True, asynchronous=True, dashboard_address=None
            )
        )
        self.client = await self.stack.enter_async_context(Client(cluster, asynchronous=True))
        await self.client.wait_for_workers(count)
        self.addresses = [worker.worker_address for worker in cluster.workers.values()]
        self.topics = itertools.count()

    def _submit(self, site: int, function: Function, argument: Any) -> Any:
        pinned = {"workers": [self.addresses[site]]} if self.sites > 1 else {}
        return self.client.submit(function, argument, pure=False, **pinned)

    def call(self, site: int, function: Function, argument: Any) -> Awaitable[Any]:
        found: Awaitable[Any] = self.client.gather(self._submit(site, function, argument))
        return found

    async def each(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        found: list[Any] = await self.client.gather(self.client.map(function, arguments, pure=False))
        return found

    async def through(self, value: int, stages: Sequence[int]) -> int:
        last: Any = value
        for site in stages:
            last = self._submit(site, operations.stage, last)
        return int(await last)

    async def stream(self, kind: str, n: int) -> AsyncIterator[Any]:
        topic = f"stream{next(self.topics)}"
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.client.subscribe_topic(topic, lambda event: arrived.put_nowait(event[1]))
        work = self.client.submit(_log_events, topic, kind, n, pure=False)
        for _ in range(n):
            yield await arrived.get()
        await work
        self.client.unsubscribe_topic(topic)


class _RayActor:
    def echo(self, x: int) -> dict[str, int]:
        return operations.echo(x)

    def stage(self, v: int) -> int:
        return operations.stage(v)

    def frame(self, size: int) -> Any:
        return operations.frame(size)

    def rows(self, found: Any) -> int:
        return operations.rows(found)

    def stream(self, kind: str, n: int) -> Any:
        yield from operations.GENERATORS[kind](n)


class RayBackend(Backend):
    """Ray, with one actor per worker; many calls of one function are tasks."""

    cost = 6.0

    async def start(self) -> None:
        import logging

        import ray  # type: ignore[import-not-found]

        cores = self.sites * self.workers
        ray.init(num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        self.stack.callback(ray.shutdown)
        self.remote = ray.remote
        actor = ray.remote(_RayActor).options(num_cpus=0)
        self.actors = [[actor.remote() for _ in range(self.workers)] for _ in range(self.sites)]
        self.turns = [itertools.cycle(actors) for actors in self.actors]

    def _submit(self, site: int, function: Function, argument: Any) -> Any:
        return getattr(next(self.turns[site]), function.__name__).remote(argument)

    async def call(self, site: int, function: Function, argument: Any) -> Any:
        return await self._submit(site, function, argument)

    async def each(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        task = self.remote(lambda argument: function(argument))  # Ray takes no partial functions
        return await asyncio.gather(*(task.remote(argument) for argument in arguments))

    async def through(self, value: int, stages: Sequence[int]) -> int:
        last: Any = value
        for site in stages:
            last = self._submit(site, operations.stage, last)
        return int(await last)

    async def pass_on(self, make: Function, take: Function, argument: Any) -> Any:
        return await self._submit(1, take, self._submit(0, make, argument))

    async def stream(self, kind: str, n: int) -> AsyncIterator[Any]:
        async for reference in self.actors[0][0].stream.options(num_returns="streaming").remote(kind, n):
            yield await reference


BACKENDS: dict[str, type[Backend]] = {
    "pool": PoolBackend,
    "aiomultiprocess": AiomultiprocessBackend,
    "dask": DaskBackend,
    "ray": RayBackend,
}
