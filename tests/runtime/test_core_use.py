"""Jobs that compute on one core although they could use more are noticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dfm_async import Federation, ForEach, LocalOptions, Pipeline, Session, Yield
from dfm_async.base.cores import usable_cores
from dfm_async.events import WorkerNotice
from dfm_async.runtime import core_use
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.core_use import CoreUse, stay_reason
from tests.support.waiting import until

fed = Federation("cores")
lab = fed.site("lab", threads=4)
held = threading.Event()
entered: list[int] = []


def hold(x: int) -> int:
    entered.append(x)
    held.wait(30)
    return x


@lab.operation
async def awaited(x: int) -> int:
    return hold(x)


@lab.operation
def plain(x: int) -> int:
    return hold(x)


@lab.operation
class Stateful:
    def body(self, x: int) -> int:
        return hold(x)


@lab.operation(spread=False)
def pinned(x: int) -> Iterator[int]:
    yield hold(x)


@lab.operation
async def asynchronous(x: int) -> AsyncIterator[int]:
    yield x


class Clock:
    """In the place of the module ``time``: a core is used as much as a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_loop = 0.0
        self.cores = 1.0
        self.loop_part = 0.0

    def pthread_getcpuclockid(self, _thread: int) -> int:
        return 0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def process_time(self) -> float:
        return self.now * self.cores

    def clock_gettime(self, _clock: int) -> float:
        return self.now * self.loop_part


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.delenv("DFM_SPREAD", raising=False)
    monkeypatch.setattr(core_use, "time", found)
    monkeypatch.setattr(core_use, "usable_cores", lambda: 8)
    held.clear()
    entered.clear()
    yield found
    held.set()


async def sampled(operation: Any, calls: int, *, in_flight: int) -> list[str | None]:
    """Call an operation several times, and return what is noticed in eight samples meanwhile."""
    with Pipeline("calls") as pipeline, ForEach(list(range(calls))) as x:
        Yield(operation(x=x))
    found: list[tuple[str, str] | None] = []
    async with Session(fed, target="inline") as session:
        job = await session.execute(pipeline)
        use = CoreUse(lambda: session._target._hosts["lab"].runtime.jobs)  # type: ignore[attr-defined]

        def sample() -> None:
            while len(entered) < in_flight:
                pass
            found.extend(use.sample() for _ in range(8))
            held.set()

        thread = threading.Thread(target=sample)
        thread.start()
        await job.collect()
        await asyncio.to_thread(thread.join)
        found.extend(use.sample() for _ in range(2))
    assert {item[0] for item in found if item is not None} <= {job.job_id}
    return [None if item is None else item[1] for item in found]


@pytest.mark.parametrize(
    ("operation", "loop_part", "in_flight", "why"),
    [
        (awaited, 1.0, 1, "'awaited' uses one of 8 cores, because it is an async def"),
        (Stateful, 0.0, 4, "'Stateful' uses one of 8 cores, because it is a class"),
        (pinned, 0.0, 3, "'pinned' uses one of 8 cores, because spread=False keeps its calls in one process"),
        (plain, 0.0, 4, "'plain' uses one of 8 cores, because the calls of a job run in one process"),
    ],
)
async def test_reason_is_reported_once(
    clock: Clock, operation: Any, loop_part: float, in_flight: int, why: str
) -> None:
    clock.loop_part = loop_part
    found = [item for item in await sampled(operation, 6, in_flight=in_flight) if item is not None]
    assert len(found) == 1
    assert found[0].startswith(why)


@pytest.mark.parametrize(
    ("operation", "calls", "cores", "loop_part"),
    [
        pytest.param(awaited, 6, 0.3, 0.3, id="it waits"),
        pytest.param(Stateful, 6, 0.3, 0.0, id="threads wait"),
        pytest.param(Stateful, 1, 1.0, 0.0, id="one call only"),
        pytest.param(awaited, 1, 1.0, 1.0, id="one asynchronous call only"),
        pytest.param(Stateful, 6, 4.0, 0.0, id="threads use several cores"),
    ],
)
async def test_nothing_is_reported_where_one_core_is_enough(
    clock: Clock, operation: Any, calls: int, cores: float, loop_part: float
) -> None:
    clock.cores, clock.loop_part = cores, loop_part
    assert set(await sampled(operation, calls, in_flight=1)) == {None}


async def test_nothing_is_reported_on_a_machine_with_one_core(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_use, "usable_cores", lambda: 1)
    assert set(await sampled(Stateful, 6, in_flight=4)) == {None}


def test_operations_that_run_in_all_workers_have_no_reason_to_stay() -> None:
    reasons = {name: stay_reason(Callee(adapter)) for (name, _), adapter in lab.adapters.items()}
    assert [name for name, reason in reasons.items() if not reason] == ["plain"]


# in worker processes

busy = Federation("busy")
desk = busy.site("desk")


def compute(seconds: float) -> float:
    import time

    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return seconds


@desk.operation
async def computes_on_the_loop(x: int) -> float:
    return compute(0.2)


@desk.operation
def computes(x: int) -> float:
    return compute(0.2)


async def notice_of(session: Session, operation: Any) -> WorkerNotice | None:
    """Call an operation until there is a notice, and return it; None if there is none, as on a single core."""
    with Pipeline("busy") as pipeline, ForEach(list(range(1000 if usable_cores() > 1 else 25))) as x:
        Yield(operation(x=x))
    async with asyncio.timeout(120):
        job = await session.execute(pipeline)
        async for event in job.events():
            if isinstance(event, WorkerNotice) and event.kind == "bound":
                (worker,) = session.stats().sites["desk"].workers
                assert len(worker.bound) == 1
                assert worker.bound[0] in event.detail
                await job.cancel()
                return event
    return None


async def test_job_receives_a_notice_while_its_loop_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    async with Session(busy, options=LocalOptions(unresponsive_after=2.0)) as session:
        notice = await notice_of(session, computes_on_the_loop)
        assert (notice is None) == (usable_cores() == 1)
        if notice is None:
            return
        assert (notice.site, notice.kind) == ("desk", "bound")
        assert "the worker of 'desk' computes on one core: 'computes_on_the_loop' uses one of" in notice.detail
        await until(lambda: session.stats().sites["desk"].workers[0].bound == ())


@pytest.mark.parametrize("options", [{"max_workers": 1}, {}])
async def test_job_receives_a_notice_if_one_worker_is_allowed(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not options:
        monkeypatch.setattr(desk, "workers", 1)
    async with Session(busy, options=LocalOptions(**options)) as session:
        notice = await notice_of(session, computes)
        assert (notice is None) == (usable_cores() == 1)
        option = "LocalOptions(max_workers=1)" if options else "fed.site(workers=1)"
        if notice is not None:
            assert f"calls wait for each other, because {option} allows one worker" in notice.detail
