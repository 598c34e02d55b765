"""What a stock ``aiomultiprocess.Pool`` does wrong, and a site does not.

Each test runs for both. With the stock pool it has to fail, in the way that is known: this shows that it can.
"""

from __future__ import annotations

import asyncio
import multiprocessing.util
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Protocol

import aiomultiprocess
import psutil
import pytest
from aiomultiprocess.types import ProxyException

from dfm_async import Federation, Job, JobAborted, JobFailed, LocalOptions, Pipeline, PlaceParam, Result, Session, Yield
from dfm_async.workers.fork_server import ForkServer
from tests.regressions import calls

Code = Callable[..., Awaitable[Any]]


class Workers(Protocol):
    """One worker process that runs coroutines: what a site and a stock pool have in common."""

    patience: float
    """How many seconds to wait for what may never come."""

    async def begin(self, code: Code, *args: Any) -> Any:
        """Starts a call and gives a handle of it."""

    async def end(self, call: Any) -> Any:
        """Waits for a call's result."""

    async def cancel(self, call: Any) -> None:
        """Stops a call."""

    async def kept(self, cancelled: list[Any]) -> int:
        """How many results of cancelled calls are still there."""

    def pids(self) -> set[int]:
        """The process of the worker."""


async def call(workers: Workers, code: Code, *args: Any) -> Any:
    return await workers.end(await workers.begin(code, *args))


# a site with one worker

fed = Federation("a pool")
site = fed.site("site")
_NAMES: dict[Code, tuple[str, ...]] = {
    calls.nothing: (),
    calls.pid: (),
    calls.die: ("how",),
    calls.tear: ("where",),
    calls.work: ("name",),
    calls.open_gate: ("name",),
    calls.finished: (),
}


def _pipeline(code: Code, names: tuple[str, ...]) -> Pipeline:
    operation = site.operation(code)
    with Pipeline(operation.name) as pipeline:
        Yield(operation(*map(PlaceParam, names)))
    return pipeline


_PIPELINES = {code: _pipeline(code, names) for code, names in _NAMES.items()}


class Ours:
    patience = 20.0

    def __init__(self, session: Session) -> None:
        self.session = session

    async def begin(self, code: Code, *args: Any) -> Job:
        return await self.session.execute(_PIPELINES[code], dict(zip(_NAMES[code], args, strict=True)))

    async def end(self, call: Job) -> Any:
        return (await call.first()).value

    async def cancel(self, call: Job) -> None:
        assert (await call.cancel())["site"].startswith("stopped")

    async def kept(self, cancelled: list[Job]) -> int:
        return sum([isinstance(event, Result) for job in cancelled async for event in job.events()])

    def pids(self) -> set[int]:
        return {worker.pid for worker in self.session.stats().sites["site"].workers if worker.pid is not None}


class Stock:
    patience = 0.7

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    async def begin(self, code: Code, *args: Any) -> asyncio.Task[Any]:
        begun = asyncio.create_task(self.pool.apply(code, args))
        await asyncio.sleep(0)  # it is in the queue now, before the next one
        return begun

    async def end(self, call: asyncio.Task[Any]) -> Any:
        return await call

    async def cancel(self, call: asyncio.Task[Any]) -> None:
        call.cancel()
        await asyncio.wait([call])

    async def kept(self, cancelled: list[Any]) -> int:
        return len(self.pool._results)

    def pids(self) -> set[int]:
        return {process.pid for process in self.pool.processes}


async def _close_stock(pool: Any) -> None:
    """A stock pool leaves its queues, its manager and its processes' descriptors to the garbage collector."""
    processes = list(pool.processes)
    pool.terminate()
    await pool.join()
    for process in processes:
        process.close()
    for queues in pool.queues.values():
        for queue in queues:
            queue.close()
            queue.join_thread()


@pytest.fixture
def stock_manager() -> Iterator[None]:
    yield
    manager, aiomultiprocess.core._manager = aiomultiprocess.core._manager, None
    if manager is not None:
        manager.shutdown()


Open = Callable[[], Awaitable[Workers]]


def _stock(error: type[BaseException], *more: Any) -> Any:
    return pytest.param("stock", *more, marks=pytest.mark.xfail(raises=error, reason="as known of stock pools"))


def fails_with(error: type[BaseException]) -> pytest.MarkDecorator:
    """Runs a test for a site, and for a stock pool, where it has to fail with this error."""
    return pytest.mark.parametrize("kind", ["ours", _stock(error)])


@pytest.fixture
async def opened(kind: str, stock_manager: None) -> AsyncIterator[Open]:
    """Opens the workers in the test itself, for tests that watch it."""
    session = Session(fed, options=LocalOptions(lanes=1, shutdown_grace=1.0))
    pools: list[Any] = []

    async def open_() -> Workers:
        if kind == "ours":
            await session.connect()
            return Ours(session)
        pools.append(aiomultiprocess.Pool(1))
        return Stock(pools[0])

    yield open_
    await session.close()
    for pool in pools:
        await _close_stock(pool)


@pytest.fixture
async def workers(opened: Open) -> Workers:
    """Workers that are up."""
    found = await opened()
    await call(found, calls.nothing)
    return found


@fails_with(AssertionError)
async def test_a_call_does_not_wait_for_a_poll(workers: Workers) -> None:
    """Both ends of a stock pool look every 5 ms whether there is something to do."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        await call(workers, calls.nothing)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def _wake_ups(pid: int) -> int:
    """How often the threads of a process have waited for something."""
    texts = [status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return sum(int(line.split()[1]) for line in lines)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@fails_with(AssertionError)
async def test_nothing_wakes_up_while_nothing_happens(workers: Workers) -> None:
    """A stock pool uses the processor while it is idle, in the application and in each worker."""
    processes = {os.getpid(), *workers.pids()}
    assert len(processes) == 2
    before = sum(map(_wake_ups, processes))
    await asyncio.sleep(0.5)  # the time that is watched
    assert sum(map(_wake_ups, processes)) - before < 20


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "SystemExit", "an unpicklable result"])
@fails_with(TimeoutError)
async def test_whoever_waits_for_a_call_that_cannot_answer_is_told(workers: Workers, how: str) -> None:
    """A stock pool replaces a dead worker, but nobody tells the caller; nor that the result could not be sent."""
    with pytest.raises(JobAborted if how in ("SIGKILL", "os._exit") else JobFailed):
        async with asyncio.timeout(workers.patience):
            await call(workers, calls.die, how)
    assert await call(workers, calls.pid) in workers.pids()


@fails_with(AssertionError)
async def test_cancelling_a_call_stops_its_work(workers: Workers) -> None:
    """A stock pool goes on with it; only the caller is gone."""
    begun = await workers.begin(calls.work, "cancelled")
    await call(workers, calls.nothing)  # calls begin in their order: the first has begun
    await workers.cancel(begun)
    await call(workers, calls.open_gate, "cancelled")
    assert await call(workers, calls.finished) == []


@fails_with(AssertionError)
async def test_cancelling_a_call_frees_its_result(workers: Workers) -> None:
    """A stock pool keeps the result for ever for the caller that is gone."""
    begun = [await workers.begin(calls.work, "freed") for _ in range(5)]
    await call(workers, calls.nothing)
    for each in begun:
        await workers.cancel(each)
    await call(workers, calls.open_gate, "freed")
    await call(workers, calls.finished)
    assert await workers.kept(begun) == 0


@fails_with(ProxyException)
async def test_an_exception_keeps_its_type(workers: Workers) -> None:
    """A stock pool raises the same type for all, with a text."""
    try:
        await call(workers, calls.tear, "the edge")
    except JobFailed as failed:
        cause = failed.errors[0].__cause__
        assert type(cause) is calls.Torn
        assert cause.where == "the edge"
    else:
        pytest.fail("nothing was raised")


@fails_with(AssertionError)
async def test_there_is_no_process_besides_the_workers(opened: Open) -> None:
    """A stock pool starts a manager, for a namespace that it does not use. What starts our workers is no part of it."""
    resource_tracker.ensure_running()
    before = set(psutil.Process().children(recursive=True))
    workers = await opened()
    await call(workers, calls.nothing)
    found = {process.pid for process in psutil.Process().children(recursive=True) if process not in before}
    starters = {psutil.Process(pid).ppid() for pid in workers.pids()}
    assert workers.pids() <= found
    assert found - workers.pids() - starters == set()


@pytest.mark.parametrize(("kind", "method"), [("ours", "forkserver"), ("ours", "spawn"), _stock(AssertionError, None)])
async def test_the_loop_turns_while_a_worker_starts(
    kind: str, method: Any, stock_manager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock pool starts its processes on the loop, and waits there until its manager is up."""
    resource_tracker.ensure_running()
    loop = asyncio.get_running_loop()
    turned: list[bool] = []

    def watch(owner: Any, name: str) -> None:
        start = getattr(owner, name)

        def started(*args: Any) -> Any:
            seen = threading.Event()
            loop.call_soon_threadsafe(seen.set)
            turned.append(seen.wait(20 if kind == "ours" else 0.1))
            return start(*args)

        monkeypatch.setattr(owner, name, started)

    watch(multiprocessing.util, "spawnv_passfds")
    watch(ForkServer, "start")
    if kind == "ours":
        async with Session(fed, options=LocalOptions(lanes=1, start_method=method)) as session:
            await call(Ours(session), calls.nothing)
    else:
        await _close_stock(aiomultiprocess.Pool(1))
    assert turned
    assert all(turned), "the loop stood still"


def _survivors(processes: dict[int, int], seconds: float) -> list[int]:
    """Those whose descriptors do not tell their end within the time."""
    waiting = select.poll()
    for descriptor in processes:
        waiting.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    left = dict(processes)
    while left and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in waiting.poll(remaining * 1000):
            waiting.unregister(descriptor)
            del left[descriptor]
    return list(left)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs descriptors of processes")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@fails_with(AssertionError)
def test_no_process_outlives_an_application_that_is_killed(kind: str, how: signal.Signals) -> None:
    """The workers of a stock pool go on without it, and so does its manager."""
    command = [sys.executable, "-m", "tests.regressions.application", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as application:
        assert application.stdout is not None
        processes = {os.pidfd_open(int(pid)): int(pid) for pid in application.stdout.readline().split()}
        application.send_signal(how)
    try:
        survivors = _survivors(processes, 20 if kind == "ours" else 0.5)
        for descriptor in survivors:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        for descriptor in processes:
            os.close(descriptor)
    assert len(processes) >= 2
    assert not survivors, "they are still there"
