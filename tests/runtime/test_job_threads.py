"""Threads of jobs: objects that are closed in them, threads that cannot be started, results that cannot be handled."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Federation,
    JobAborted,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationContext,
    Session,
    current_context,
)
from dfm_async.base.signals import Outcome
from dfm_async.runtime.dispatch import OperationCost
from dfm_async.runtime.sources import ThreadSource
from dfm_async.runtime.threads import RemoteCall, ThreadCall, Threads
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value

fed = Federation("threads")
lab = fed.site("lab", threads=1)


@lab.operation
def hold(started: str, gate: str) -> int:
    os.close(os.open(started, os.O_WRONLY))
    os.close(os.open(gate, os.O_RDONLY))
    return 1


@lab.operation(name="closed_in_a_thread")
class Closed:
    async def body(self, path: str, gate: str) -> int:
        self.path, self.gate = path, gate
        return 2

    def close(self) -> None:
        if self.gate:
            os.close(os.open(self.gate, os.O_RDONLY))
        Path(self.path).touch()


@lab.operation
async def quick() -> int:
    return 3


@lab.operation
def plain(x: int) -> int:
    return x


@lab.operation
def steps(x: int) -> Iterator[int]:
    yield x


@lab.operation(deadline=0.2)
def stuck(gate: str) -> None:
    os.close(os.open(gate, os.O_RDONLY))


class Opaque:
    """A value that cannot even be asked for its class."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise self.error


@lab.operation
def opaque(kind: str) -> Any:
    return Opaque({"error": ValueError("no class"), "exit": SystemExit("no class")}[kind])


holds, closes = pipeline_of(hold, "started", "gate"), pipeline_of(Closed, "path", "gate")


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[dict[str, str]]:
    """FIFOs; opening one for reading waits until it is open for writing."""
    found = {name: str(tmp_path / name) for name in ("started", "gate", "closing")}
    for path in found.values():
        os.mkfifo(path)
    yield found
    opened = [os.open(path, os.O_RDWR) for path in found.values()]
    for thread in threading.enumerate():  # those that were abandoned in this process
        if thread.name.startswith("dfm-"):
            thread.join(10)
    for file in opened:
        os.close(file)


async def round_trip(session: Session) -> None:
    """Returns when the site has dealt with everything that was sent to it before."""
    await (await session.execute(pipeline_of(quick)))


async def begin(session: Session, gates: dict[str, str]) -> Any:
    """Starts a job that holds the only thread of the site."""
    job = await session.execute(holds, {"started": gates["started"], "gate": gates["gate"]})
    opened = await asyncio.to_thread(os.open, gates["started"], os.O_RDONLY)
    os.close(opened)
    return job


async def let_go(job_id: str) -> None:
    """Returns when no task of a job is left."""
    while any(job_id in task.get_name() for task in asyncio.all_tasks()):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)


# objects that are closed in threads


async def test_a_close_that_waits_for_a_thread_survives_a_cancellation(
    connect: Connect, gates: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "closed"
    async with connect(fed, options=LocalOptions(jobs_per_lane=8)) as session, asyncio.timeout(30):
        holding = await begin(session, gates)
        job = await session.execute(closes, {"path": str(path), "gate": ""})
        assert (await job.first()).value == 2
        await round_trip(session)
        cancelling = asyncio.create_task(job.cancel(grace=60))
        await asyncio.sleep(0)
        await round_trip(session)
        assert not path.exists()
        opened = await asyncio.to_thread(os.open, gates["gate"], os.O_WRONLY)
        assert (await cancelling)["lab"] in ("stopped", "stopped after grace")
        os.close(opened)
        assert path.exists()
        assert await holding is JobStatus.FINISHED


@pytest.mark.parametrize("target", ["inline"])
async def test_a_close_that_hangs_does_not_keep_its_job(
    connect: Connect, gates: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(fed) as session, asyncio.timeout(30):
        for _ in range(2):
            job = await session.execute(closes, {"path": str(tmp_path / "closed"), "gate": gates["closing"]})
            assert (await job.first()).value == 2
            await round_trip(session)
            assert await job.cancel(grace=0.05) == {"lab": "abandoned"}
            await let_go(job.job_id)
        assert await (await session.execute(pipeline_of(plain, "x"), {"x": 1})) is JobStatus.FINISHED
    assert "closing Closed of job" in caplog.text
    assert "(2 such calls)" in caplog.text


@pytest.mark.parametrize("target", ["inline"])
async def test_a_close_that_only_waits_for_a_thread_is_no_hanging_call(
    connect: Connect, gates: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(fed) as session, asyncio.timeout(30):
        holding = await begin(session, gates)
        job = await session.execute(closes, {"path": str(tmp_path / "closed"), "gate": ""})
        assert (await job.first()).value == 2
        await round_trip(session)
        assert await job.cancel(grace=0.05) == {"lab": "abandoned"}
        await let_go(job.job_id)
        opened = await asyncio.to_thread(os.open, gates["gate"], os.O_WRONLY)
        assert await holding is JobStatus.FINISHED
        os.close(opened)
        assert await (await session.execute(pipeline_of(plain, "x"), {"x": 1})) is JobStatus.FINISHED
    assert "no thread was free before the grace period" in caplog.text
    assert "does not return" not in caplog.text


# threads that cannot be started


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is set, the site gets no further threads."""
    refused, start = threading.Event(), threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if refused.is_set() and thread.name.startswith("dfm-lab"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    yield refused
    refused.clear()


@pytest.mark.parametrize("operation", [plain, steps], ids=lambda found: found.name)
async def test_a_call_without_a_thread_fails_with_the_reason(no_threads: threading.Event, operation: Any) -> None:
    pipeline = pipeline_of(operation, "x")
    async with Session(fed, target="inline") as session, asyncio.timeout(30):
        no_threads.set()
        job = await session.execute(pipeline, [{"x": 1}, {"x": 2}])
        with pytest.raises(JobFailed, match="can't start new thread"):
            await job
        no_threads.clear()
        assert await (await session.execute(pipeline, {"x": 1})) is JobStatus.FINISHED


async def test_calls_wait_for_the_threads_that_exist(no_threads: threading.Event) -> None:
    threads, found = Threads(2, "lab"), list[Any]()
    gate, both = threading.Event(), asyncio.Event()

    def done(value: Any, error: BaseException | None) -> None:
        found.append(value if error is None else error)
        if len(found) == 2:
            both.set()

    threads.run(contextvars.Context(), gate.wait, done)
    no_threads.set()
    threads.run(contextvars.Context(), lambda: "second", done)
    gate.set()
    await both.wait()
    assert found == [True, "second"]
    threads.close()


async def test_a_deadline_is_reported_when_no_other_thread_can_be_started(
    no_threads: threading.Event, gates: dict[str, str]
) -> None:
    async with Session(fed, target="inline") as session, asyncio.timeout(30):
        job = await session.execute(pipeline_of(stuck, "gate"), [{"gate": gates["gate"]}] * 2)
        await round_trip(session)
        no_threads.set()
        with pytest.raises(JobFailed) as caught:
            await job
        names = {getattr(error, "type_name", "") for error in caught.value.errors}
        assert names == {"TimeoutError", "RuntimeError"}
        no_threads.clear()
        assert await (await session.execute(pipeline_of(plain, "x"), {"x": 1})) is JobStatus.FINISHED


async def test_an_iterator_without_a_thread_does_not_run(no_threads: threading.Event) -> None:
    source = ThreadSource(Threads(1, "lab"), iter([1]), contextvars.Context(), "made")
    no_threads.set()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await source.get(1)
    assert not source.running


# quick calls: one thread runs several of them before it wakes the loop


class Stays:
    """Takes no call: all run here."""

    def take(self, _call: ThreadCall, _remote: RemoteCall) -> bool:
        return False

    def watch(self, _seconds: float = 0.0) -> None:
        pass

    def ended_here(self, *_: Any, **__: Any) -> None:
        pass


class Quick:
    operation, bound = "quick", ""

    def __init__(self) -> None:
        self.cost = OperationCost()
        self.cost.measured(1e-6, 1e-6)


@pytest.fixture
async def quick_threads() -> AsyncIterator[Threads]:
    threads: Any = Threads(2, "lab")
    threads.spread, threads.batching = Stays(), True
    yield threads
    threads.close()


def run_all(threads: Threads, remote: Any, *works: Callable[[], Any], expected: float = 0.0) -> list[Outcome[Any]]:
    """Run calls, and return their outcomes. ``expected``: those of another worker, and how long they should take."""
    cost = OperationCost.expected(expected)
    outcomes: list[Outcome[Any]] = [Outcome() for _ in works]
    for work, outcome in zip(works, outcomes, strict=True):

        def done(value: Any, _error: BaseException | None, found: Outcome[Any] = outcome) -> None:
            found.settle(value)

        threads.run(contextvars.Context(), work, done, None, remote, cost=cost)
    return outcomes


async def test_one_thread_runs_the_quick_calls_that_wait(quick_threads: Threads) -> None:
    for _ in range(3):
        gate = threading.Event()  # so that the thread does not find the queue empty before all calls are in it
        first, *others = run_all(quick_threads, Quick(), gate.wait, *[threading.get_ident] * 40)
        gate.set()
        assert await first
        assert len({await outcome for outcome in others}) == 1


async def test_calls_that_are_not_quick_run_beside_quick_ones(quick_threads: Threads) -> None:
    slow, gate = Quick(), threading.Event()
    slow.cost.measured(1.0, 0.0)
    (blocked,) = run_all(quick_threads, slow, gate.wait)
    assert await run_all(quick_threads, Quick(), lambda: "quick")[0] == "quick"
    gate.set()
    assert await blocked


async def test_a_quick_call_that_takes_long_holds_up_no_others_for_long(quick_threads: Threads) -> None:
    begun, gate = threading.Event(), threading.Event()

    def takes_long() -> bool:
        begun.set()
        return gate.wait()

    before, long, behind = run_all(quick_threads, Quick(), lambda: "before", takes_long, lambda: "behind")
    await asyncio.to_thread(begun.wait)
    quick_threads.catch_up()
    assert await before == "before"
    assert await behind == "behind"
    assert not long.done()
    gate.set()
    assert await long


async def test_calls_of_other_workers_that_compute_take_turns(quick_threads: Threads) -> None:
    running: list[int] = []

    def compute() -> None:
        running.append(1)
        time.sleep(0.001)  # lets other threads go on
        running.append(-1)

    sent: deque[Outcome[Any]] = deque()
    settled = 0
    for number in range(100):  # as a worker gets them: the next one when one has ended
        sent += run_all(quick_threads, None, compute, expected=0.001)
        if number == 30:
            quick_threads.catch_up()  # one has taken long: those behind it run in other threads
        if number == 60:
            settled = len(running)
        if len(sent) > 2:
            await sent.popleft()
    await asyncio.gather(*sent)
    depth = list(itertools.accumulate(running))
    assert max(depth[:50]) == max(depth[settled:]) == 1


async def test_an_outcome_does_not_wait_for_a_call_that_is_expected_to_take_long(quick_threads: Threads) -> None:
    ready, gate = threading.Event(), threading.Event()
    _, before = run_all(quick_threads, None, ready.wait, lambda: "before", expected=0.001)
    (long,) = run_all(quick_threads, None, gate.wait, expected=0.09)
    ready.set()
    assert await before == "before"
    gate.set()
    assert await long


# results that cannot be handled


@pytest.mark.parametrize("target", ["inline", "local"])
@pytest.mark.parametrize("kind", ["error", "exit"])
async def test_a_result_that_cannot_be_handled_breaks_its_job_alone(connect: Connect, kind: str) -> None:
    async with connect(fed) as session, asyncio.timeout(30):
        job = await session.execute(pipeline_of(opaque, "kind"), {"kind": kind})
        with pytest.raises((JobAborted, JobFailed), match="no class"):
            await job
        assert await (await session.execute(pipeline_of(plain, "x"), {"x": 1})) is JobStatus.FINISHED


def test_results_behind_an_interrupt_are_delivered() -> None:
    delivered: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def post() -> None:
        threads = Threads(1, "lab")
        threads.post(interrupt)
        threads.post(lambda: delivered.append(1))
        await asyncio.sleep(0)

    async def wait() -> None:
        while not delivered:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(post())
    loop.run_until_complete(wait())
    loop.close()
    assert delivered == [1]


@lab.operation
def waits_behind_others(context: OperationContext) -> str:
    async def node() -> str:
        return current_context().node

    contextvars.Context().run(context.progress, 1)  # wakes the loop in another context, before the call waits
    return context.wait(node())


async def test_a_coroutine_that_a_thread_waits_for_runs_in_the_context_of_its_call(connect: Connect) -> None:
    async with connect(fed) as session:
        assert await first_value(session, pipeline_of(waits_behind_others)) == "waits_behind_others#0"


async def test_a_thread_that_outlives_its_site_does_not_wait_for_the_loop() -> None:
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []
    lasting = Federation("lasting")

    @lasting.site("lab").operation
    def late(context: OperationContext) -> None:
        begun.set()
        gate.wait()
        try:
            context.wait(asyncio.sleep(0))
        except RuntimeError as error:
            errors.append(error)
        ended.set()

    async with Session(lasting, target="inline") as session:
        job = await session.execute(pipeline_of(late))
        await asyncio.to_thread(begun.wait)
        await job.cancel(grace=0.0)
    gate.set()
    assert await asyncio.to_thread(ended.wait, 30)
    assert [str(error) for error in errors] == ["the job was cancelled"]


def test_what_threads_pass_to_the_loop_runs_before_the_site_has_ended() -> None:
    async def end() -> tuple[list[int], bool]:
        threads, found = Threads(1, "lab"), list[int]()
        threads.post(lambda: found.append(1))
        threads.close()
        return found, threads.post(lambda: found.append(2))

    assert asyncio.run(end()) == ([1], False)
