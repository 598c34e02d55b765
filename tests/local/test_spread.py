"""Calls of one job run in all workers of a site."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfm_async import (
    Federation,
    ForEach,
    Job,
    JobAborted,
    JobFailed,
    LocalOptions,
    OperationContext,
    Pipeline,
    PlaceParam,
    Progress,
    Result,
    RetryPolicy,
    Session,
    Yield,
    collect,
    current_context,
)
from dfm_async.events import Metrics
from dfm_async.stats import SiteStats
from dfm_async.telemetry import read_trace
from dfm_async.workers import pool as pool_module
from tests.support.pipelines import pipeline_of
from tests.support.waiting import PROMPT, running, until

fed = Federation("spread")
lab = fed.site("lab")


@lab.operation
def items(n: int) -> list[int]:
    return list(range(n))


@lab.operation
def where(x: int) -> int:
    time.sleep(0.02)
    return os.getpid()


@lab.operation
def reports(x: int, context: OperationContext) -> tuple[int, str, int]:
    context.progress(x, 10)
    context.metrics({"x": x}, step=x)
    with context.span("part", x=x):
        time.sleep(0.02)
    assert current_context().node == context.node
    return os.getpid(), context.job_id, context.attempt


@lab.operation
def fails(x: int) -> int:
    time.sleep(0.02)
    raise LookupError(f"{x} is missing in {os.getpid()}")


@lab.operation(retry=RetryPolicy(attempts=3, backoff=0.0, on=(ConnectionError,)))
def flaky(x: int, context: OperationContext) -> int:
    time.sleep(0.02)
    if context.attempt < 3:
        raise ConnectionError("once more")
    return context.attempt


@lab.operation
def dies_away_from(home: int, x: int, folder: str) -> int:
    time.sleep(0.02)
    if os.getpid() != home:
        try:
            Path(folder, f"died-{x}").touch(exist_ok=False)
        except FileExistsError:
            return -x
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@lab.operation
def dies_now_and_then_away_from(home: int, x: int, folder: str) -> int:
    time.sleep(0.05 if os.getpid() == home else 0.005)
    if os.getpid() != home:
        with Path(folder, f"ran-{os.getpid()}").open("a") as ran:
            ran.write(".")
            count = ran.tell()
        if count > 5:
            os.kill(os.getpid(), signal.SIGKILL)
    return x


def _hang_away_from(home: int, x: int, folder: str) -> int:
    time.sleep(0.02)
    if os.getpid() != home:
        Path(folder, str(os.getpid())).touch()
        threading.Event().wait()
    return x


hangs_away_from = lab.operation(name="hangs_away_from", deadline=0.3)(_hang_away_from)
hangs_for_ever_away_from = lab.operation(name="hangs_for_ever_away_from")(_hang_away_from)


@lab.operation
def waits_for_cancel(x: int, folder: str, context: OperationContext) -> int:
    Path(folder, f"{os.getpid()}-{x}").touch()
    while not context.cancelled:
        time.sleep(0.01)
    Path(folder, f"stopped-{os.getpid()}-{x}").touch()
    return x


@lab.operation
def iterates(x: int) -> Any:
    time.sleep(0.02)
    return iter([os.getpid(), x])


@lab.operation
async def here() -> int:
    return os.getpid()


@lab.operation
def burn(x: int) -> int:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    return os.getpid()


@lab.operation
def gets_expensive(x: int, cheap: int, folder: str) -> int:
    """Return at once at first, and then compute until such calls have begun in two processes."""
    if x >= cheap:
        Path(folder, str(os.getpid())).touch()
        end = time.monotonic() + 20
        while len(names(Path(folder))) < 2 and time.monotonic() < end:
            sum(range(10_000))
    return os.getpid()


@lab.operation
def first_waits_for_the_last(x: int, waits: int, folder: str) -> int:
    """Return at once, except the first one, which waits for the last."""
    if x == waits - 1:
        Path(folder, "last").touch()
    while waits and x == 0 and not Path(folder, "last").exists():
        time.sleep(0.001)
    return x


def each(operation: Any, **args: Any) -> Pipeline:
    """Return a pipeline that calls an operation for 0, 1, 2 and so on."""
    with Pipeline(operation.name) as pipeline, ForEach(items(PlaceParam("n"))) as x:
        Yield(operation(x=x, **{name: PlaceParam(name) for name in args}))
    return pipeline


@pytest.fixture
async def session(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Session]:
    monkeypatch.setenv("DFM_SPREAD", "always")
    async with Session(fed, options=LocalOptions(max_workers=3)) as connected:
        await spread(connected)
        yield connected


async def spread(session: Session) -> None:
    """Return when there is more than one worker."""
    while len(set(await values(await session.execute(each(where), {"n": 30})))) < 2:
        pass  # a machine that is busy with other things takes longer to start another worker


async def home_of(session: Session) -> int:
    """Return the process that runs the nets."""
    (found,) = await (await session.execute(pipeline_of(here))).collect()
    return int(found.value)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def workers(session: Session) -> set[int]:
    site = session.stats().sites.get("lab", SiteStats())
    return {worker.pid for worker in site.workers if worker.pid is not None}


async def values(job: Job) -> list[Any]:
    return [result.value for result in await job.collect()]


async def test_calls_of_one_job_run_in_all_workers(session: Session) -> None:
    with Pipeline("everything") as pipeline:
        with ForEach(items(PlaceParam("n"))) as x:
            pid = where(x)
        Yield(collect(pid))
    (pids,) = await values(await session.execute(pipeline, {"n": 60}))
    assert len(pids) == 60
    assert set(pids) <= workers(session)
    assert len(set(pids)) > 1


async def test_parameter_sets_of_one_job_run_in_all_workers(session: Session) -> None:
    job = await session.execute(pipeline_of(where, "x"), [{"x": x} for x in range(60)])
    assert len(set(await values(job))) > 1


async def test_work_that_computes_spreads_by_itself() -> None:
    async with Session(fed, options=LocalOptions(max_workers=2)) as session:
        pids: set[int] = set()
        while len(pids) < 2:
            pids |= set(await values(await session.execute(each(burn), {"n": 40})))
        assert pids <= workers(session)


async def test_calls_that_wait_spread_when_their_operation_gets_expensive(tmp_path: Path) -> None:
    async with Session(fed, options=LocalOptions(max_workers=2)) as session:
        params = {"n": 120, "cheap": 100, "folder": str(tmp_path)}
        pids = await values(await session.execute(each(gets_expensive, cheap=0, folder=""), params))
        assert len(pids) == 120
        assert len(set(pids)) > 1


async def test_a_quick_call_that_hangs_does_not_hold_up_others(tmp_path: Path) -> None:
    async with Session(fed, options=LocalOptions(max_workers=1)) as session:
        pipeline = each(first_waits_for_the_last, waits=0, folder="")
        for waits in (0, 200):  # they are known to be quick when the first of the second job waits for the last
            params = {"n": 200, "waits": waits, "folder": str(tmp_path)}
            assert sorted(await values(await session.execute(pipeline, params))) == list(range(200))


async def test_work_that_does_not_compute_stays_in_one_process() -> None:
    async with Session(fed, options=LocalOptions(max_workers=2)) as session:
        assert len(set(await values(await session.execute(each(where), {"n": 60})))) == 1
        assert len(workers(session)) == 1


async def test_sites_have_no_more_workers_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    async with Session(fed, options=LocalOptions(max_workers=1)) as session:
        assert len(set(await values(await session.execute(each(where), {"n": 20})))) == 1


@pytest.mark.parametrize(("chosen", "kept"), [(None, 1), ((1, 3), 1), ((2, 3), 2)])
async def test_idle_workers_above_the_kept_ones_end(monkeypatch: Any, chosen: Any, kept: int) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    monkeypatch.setattr(lab, "workers", chosen)
    monkeypatch.setattr(lab, "idle_after", 0.1)
    async with Session(fed, options=LocalOptions(max_workers=3)) as session:
        while len(workers(session)) <= kept:
            await values(await session.execute(each(where), {"n": 30}))
        await until(lambda: len(workers(session)) <= kept)
        home = await home_of(session)
        await spread(session)
        assert home in workers(session)


async def test_workers_are_started_up_to_the_larger_number(monkeypatch: Any) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    monkeypatch.setattr(lab, "workers", (1, 3))
    async with Session(fed) as session:
        assert len(session.stats().lanes) == 1
        assert workers(session) == set()
        await home_of(session)
        assert len(workers(session)) == 1
        pids: set[int] = set()
        while len(workers(session)) < 3 or len(pids) < 2:  # a worker that was started may not be ready yet
            pids.update(await values(await session.execute(each(where), {"n": 60})))


async def test_use_of_a_worker_restarts_its_idle_time(monkeypatch: Any) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    monkeypatch.setattr(lab, "workers", (1, 2))
    monkeypatch.setattr(lab, "idle_after", 1.5)
    async with Session(fed) as session:
        await spread(session)
        both = workers(session)
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            await values(await session.execute(each(where), {"n": 30}))
        assert workers(session) == both


async def test_calls_report_and_trace_the_same_wherever_they_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    path = tmp_path / "trace.jsonl"
    async with Session(fed, options=LocalOptions(max_workers=3), trace=path) as session:
        await spread(session)
        job = await session.execute(each(reports), {"n": 40}, watch=True)
        events = [event async for event in job.events()]
        found = await values(job)
    pids = {pid for pid, _, _ in found}
    assert len(pids) > 1
    assert {job_id for _, job_id, _ in found} == {job.job_id}
    metrics = sorted(event.values["x"] for event in events if isinstance(event, Metrics))
    assert metrics == list(range(40))
    assert all(event.node == "reports#2" for event in events if isinstance(event, Progress))
    spans = read_trace(path)
    calls = {span.span_id: span for span in spans if span.attributes.get("dfm.operation") == "reports"}
    assert len(calls) == 40
    assert {span.attributes.get("dfm.worker") for span in calls.values()} - {None} <= pids
    parts = [span for span in spans if span.name == "part"]
    assert Counter(part.parent_id for part in parts) == Counter(calls.keys())


async def test_errors_are_the_same_wherever_they_are_raised(session: Session) -> None:
    job = await session.execute(each(fails), {"n": 30})
    with pytest.raises(JobFailed) as caught:
        await job
    errors: list[Any] = list(caught.value.errors)
    assert len(errors) == 30
    assert len({error.id for error in errors if hasattr(error, "id")}) in (0, 30)
    for error in errors:
        assert error.type_name == "LookupError"
        assert error.node == "fails#2"
        assert "in fails" in error.remote_traceback
        assert isinstance(error.__cause__, LookupError)
    assert len({str(error).rpartition(" ")[2] for error in errors}) > 1


async def test_calls_are_tried_again_wherever_they_run(session: Session) -> None:
    assert await values(await session.execute(each(flaky), {"n": 20})) == [3] * 20


async def test_a_lost_worker_costs_its_call_only(session: Session, tmp_path: Path) -> None:
    home = await home_of(session)
    job = await session.execute(
        each(dies_away_from, home=0, folder=""), {"n": 30, "home": home, "folder": str(tmp_path)}
    )
    with pytest.raises(JobFailed) as caught:
        await job
    errors: list[Any] = list(caught.value.errors)
    assert errors
    assert {error.type_name.rpartition(".")[2] for error in errors} == {"WorkerLost"}
    assert all("SIGKILL" in error.message for error in errors)
    results = [result async for result in job.results(errors="yield") if isinstance(result, Result)]
    assert len(results) + len(errors) == 30
    assert await home_of(session) == home


async def test_a_lost_call_runs_again_if_its_policy_allows_it(session: Session, tmp_path: Path) -> None:
    home = await home_of(session)
    params = {"n": 30, "home": home, "folder": str(tmp_path)}
    pipeline = each(dies_away_from, home=0, folder="")
    job = await session.execute(pipeline, params, retry=RetryPolicy(on_worker_lost=50))
    assert sorted(map(abs, await values(job))) == list(range(30))
    assert names(tmp_path)  # some have died
    assert await home_of(session) == home  # which is not restarted


async def test_workers_that_were_of_use_are_replaced_without_a_pause(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []

    def paused(deaths: int, *_: float) -> float:
        pauses.append(deaths)
        return 0.0

    monkeypatch.setattr(pool_module, "delay_after", paused)
    home = await home_of(session)
    params = {"n": 40, "home": home, "folder": str(tmp_path)}
    retry = RetryPolicy(on_worker_lost=9)
    while len(names(tmp_path)) <= 5:
        job = await session.execute(each(dies_now_and_then_away_from, home=1, folder=""), params, retry=retry)
        assert sorted(await values(job)) == list(range(40))
    assert not pauses


async def test_a_call_that_hangs_elsewhere_fails_at_its_deadline_and_its_worker_is_replaced(
    session: Session, tmp_path: Path
) -> None:
    home = await home_of(session)
    pipeline = each(hangs_away_from, home=0, folder="")
    job = await session.execute(pipeline, {"n": 8, "home": home, "folder": str(tmp_path)})
    with pytest.raises(JobFailed) as caught:
        await job
    errors: list[Any] = list(caught.value.errors)
    assert {error.type_name for error in errors} == {"TimeoutError"}
    assert "deadline of 0.3 s" in errors[0].message
    hanging = {int(name) for name in names(tmp_path)}  # those that replace them go on
    assert hanging
    await until(lambda: not any(map(psutil.pid_exists, hanging)))
    await spread(session)


async def test_a_cancelled_job_stops_its_calls_in_all_workers(session: Session, tmp_path: Path) -> None:
    job = await session.execute(each(waits_for_cancel, folder=""), {"n": 8, "folder": str(tmp_path)})
    await running(job)
    await until(lambda: len({name.partition("-")[0] for name in names(tmp_path)}) > 1)
    assert set((await job.cancel(grace=10)).values()) <= {"stopped", "stopped after grace"}
    begun = {name for name in names(tmp_path) if not name.startswith("stopped-")}
    assert names(tmp_path) == begun | {f"stopped-{name}" for name in begun}
    await spread(session)


async def test_calls_that_hang_elsewhere_do_not_keep_a_cancelled_job(session: Session, tmp_path: Path) -> None:
    home = await home_of(session)
    params = {"n": 8, "home": home, "folder": str(tmp_path)}
    job = await session.execute(each(hangs_for_ever_away_from, home=0, folder=""), params)
    await until(lambda: names(tmp_path))
    hanging = {int(name) for name in names(tmp_path)}
    await job.cancel(grace=0.1)
    await until(lambda: not any(map(psutil.pid_exists, hanging)))
    await spread(session)


async def test_workers_do_not_outlive_the_one_whose_calls_they_run(session: Session, tmp_path: Path) -> None:
    home = await home_of(session)
    params = {"n": 8, "home": home, "folder": str(tmp_path)}
    job = await session.execute(each(hangs_for_ever_away_from, home=0, folder=""), params)
    await until(lambda: names(tmp_path))
    hanging = {int(name) for name in names(tmp_path)}
    os.kill(home, signal.SIGKILL)
    with pytest.raises(JobAborted, match="SIGKILL"):
        await job
    await until(lambda: not any(map(psutil.pid_exists, hanging)))
    await spread(session)


async def test_iterators_that_calls_return_elsewhere_are_streams(session: Session) -> None:
    found = await values(await session.execute(each(iterates), {"n": 20}))
    assert len(found) == 40
    assert len([value for value in found if value < 20]) == 20


async def test_arguments_that_cannot_be_sent_keep_their_call_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFM_SPREAD", "always")
    unsendable = Federation("unsendable")
    site = unsendable.site("lab")

    @site.operation
    def make(x: int) -> Any:
        time.sleep(0.01)
        return threading.Lock(), os.getpid()

    @site.operation
    def use(made: Any) -> bool:
        time.sleep(0.01)
        return bool(made[1] == os.getpid())

    @site.operation
    def numbers(n: int) -> list[int]:
        return list(range(n))

    with Pipeline("locks") as pipeline, ForEach(numbers(PlaceParam("n"))) as x:
        Yield(use(make(x)))
    async with Session(unsendable, options=LocalOptions(max_workers=2)) as session:
        job = await session.execute(pipeline, {"n": 10})
        results = [item async for item in job.results(errors="yield")]
    assert len(results) == 10


async def test_asynchronous_operations_go_on_while_workers_compute(session: Session) -> None:
    busy = await session.execute(each(burn), {"n": 40})
    await running(busy)
    async with asyncio.timeout(PROMPT):
        for _ in range(20):
            await home_of(session)
    await busy.cancel()
