"""A worker that is killed is noticed at once, and the next job finds another one.

A job waits in an operation; its worker is killed with SIGKILL. Measured from the kill: until whoever waits for the job
is told, and until the next job has given its result. The pool says ``BrokenProcessPool``, and has to be made anew.
Claimed: told within 10 ms, the next result within 60 ms.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from benchmarks import operations
from benchmarks.common import Figure, Options, Target, main
from dfm_async import Federation, JobAborted, Pipeline, Session, Yield

Times = tuple[float, float]


class _Ours:
    def __init__(self) -> None:
        federation = Federation("lost")
        site = federation.site("a")
        with Pipeline("hold") as self._hold:
            Yield(site.operation(operations.hold)(3600.0))
        with Pipeline("pid") as self._pid:
            Yield(site.operation(operations.process)(0))
        self.session = Session(federation)

    async def once(self) -> Times:
        """Kills the worker of a job that waits."""
        pid = (await (await self.session.execute(self._pid)).first()).value
        job = await self.session.execute(self._hold)
        await (await self.session.execute(self._pid))  # the one before has begun by now
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            await job
        except JobAborted:
            told = time.perf_counter() - start
        await (await self.session.execute(self._pid)).first()
        return told, time.perf_counter() - start


class _Pool:
    def __init__(self) -> None:
        self._make()

    def _make(self) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    async def once(self) -> Times:
        """The same with a pool."""
        loop = asyncio.get_running_loop()
        pid = await loop.run_in_executor(self.pool, operations.process, 0)
        call = loop.run_in_executor(self.pool, operations.hold_sync, 3600.0)
        await asyncio.sleep(0.05)  # there is no way to see that it has begun
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            await call
        except BrokenProcessPool:
            told = time.perf_counter() - start
        self.pool.shutdown(wait=False)
        self._make()
        await loop.run_in_executor(self.pool, operations.process, 0)
        return told, time.perf_counter() - start


async def _medians(once: Callable[[], Awaitable[Times]], rounds: int) -> Times:
    found = [await once() for _ in range(rounds + 1)][1:]
    return statistics.median(told for told, _ in found) * 1e3, statistics.median(after for _, after in found) * 1e3


async def run(options: Options) -> list[Figure]:
    logging.getLogger("dfm_async").setLevel(logging.ERROR)  # that a worker is lost is no news here
    rounds = 10 if options.quick else 50
    ours, pool = _Ours(), _Pool()
    async with ours.session:
        told, after = await _medians(ours.once, rounds)
    peer_told, peer_after = await _medians(pool.once, max(rounds // 5, 3))
    pool.pool.shutdown()
    return [
        Figure("told after SIGKILL", "ms", told, {"pool": peer_told}, Target(10)),
        Figure("result of the next job after SIGKILL", "ms", after, {"pool": peer_after}, Target(60)),
    ]


if __name__ == "__main__":
    main("worker_lost", __doc__, run)
