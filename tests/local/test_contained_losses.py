"""Workers that die in calls whose failures a pipeline handles: the calls fail, and the job goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dfm_async import (
    FailureInfo,
    Federation,
    ForEach,
    JobAborted,
    JobStatus,
    Pipeline,
    PlaceParam,
    Repeat,
    Reply,
    RetryPolicy,
    Session,
    WorkerLost,
    Yield,
    collect,
    gather,
)
from dfm_async.events import FailureHandled, WorkerNotice
from dfm_async.runtime.context import current_context
from tests.local.test_lost_workers import note, once
from tests.support.waiting import file_created, first_event, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]

fed = Federation("clinics")
hub, north, south = fed.site("hub"), fed.site("north"), fed.site("south")

AGAIN = RetryPolicy(attempts=1, on_worker_lost=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session() -> AsyncIterator[Session]:
    async with Session(fed) as found:
        yield found


@north.operation
@south.operation
def train(folder: str, model: int, victim: int = -1) -> int:
    site = current_context().site
    note(folder, f"{site} {model}")
    if model == victim and site == "north" and once(folder, "died"):
        os.kill(os.getpid(), signal.SIGKILL)
    return model + 1


@north.operation
@south.operation
async def wait(folder: str, model: int) -> int:
    site = current_context().site
    note(folder, f"{site} {model}")
    if site == "north":
        await file_created(Path(folder) / f"go-{model}")
    return model


@north.operation
def load(folder: str) -> int:
    note(folder, "load")
    return 100


@hub.operation
def largest(replies: list[Reply[int]]) -> int:
    return max(reply.value for reply in replies)


@hub.operation
async def numbers(n: int) -> list[int]:
    return list(range(n))


@hub.operation
def describe(values: list[Any]) -> list[Any]:
    return [value.type_name if isinstance(value, FailureInfo) else value for value in values]


@hub.operation
def count(n: int) -> Iterator[int]:
    yield from range(n)


@north.operation
def add_up(folder: str, values: Iterator[int]) -> int:
    found = sum(values)
    if once(folder, "died"):
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def training(times: int, **options: Any) -> Pipeline:
    with Pipeline("training") as pipeline:
        folder = PlaceParam("folder")
        with Repeat(0, times=times) as model:
            calls = [train(folder, model, PlaceParam("victim"), site=site, **options) for site in (north, south)]
            replies = gather(calls, at_least=1, within=60)
            Yield([replies, replies.failures], place="round")
            model.next(largest(replies))
        Yield(model, place="final")
    return pipeline


async def results(session: Session, pipeline: Pipeline, folder: Path, **given: Any) -> dict[str, Any]:
    options = {"retry": given.pop("retry")} if "retry" in given else {}
    async with asyncio.timeout(60):
        job = await session.execute(pipeline, {"folder": str(folder), **given}, **options)
        found: dict[str, Any] = {}
        for result in await job.collect():
            found.setdefault(result.place, {})[result.frame] = result.value
        assert await job is JobStatus.FINISHED
    found["events"] = [event async for event in job.events()]
    return found


async def test_a_round_goes_on_without_a_lost_site_and_the_next_has_it_again(session: Session, tmp_path: Path) -> None:
    found = await results(session, training(4), tmp_path, victim=2)
    sites = {frame[1]: [reply.site for reply in replies] for frame, (replies, _) in found["round"].items()}
    assert sites == {0: ["north", "south"], 1: ["north", "south"], 2: ["south"], 3: ["north", "south"]}
    ((failure,),) = [failures for _, failures in found["round"].values() if failures]
    assert (failure.site, failure.operation, failure.frame) == ("north", "train", (0, 2))
    assert failure.type_name.endswith("WorkerLost")
    assert "SIGKILL" in failure.message
    assert found["final"] == {(0,): 4}
    (handled,) = [event for event in found["events"] if isinstance(event, FailureHandled)]
    assert (handled.site, handled.node, handled.frame) == ("north", "train#1", (0, 2))
    (notice,) = [event for event in found["events"] if isinstance(event, WorkerNotice)]
    assert (notice.site, notice.kind) == ("north", "lost")


@pytest.mark.parametrize("where", ["call", "job"])
async def test_only_the_lost_call_is_made_again_if_it_may_be(session: Session, tmp_path: Path, where: str) -> None:
    pipeline = training(3, **({"retry": AGAIN} if where == "call" else {}))
    found = await results(session, pipeline, tmp_path, victim=1, **({"retry": AGAIN} if where == "job" else {}))
    assert all(len(replies) == 2 for replies, _ in found["round"].values())
    runs = (tmp_path / "runs").read_text().split("\n")
    assert sorted(filter(None, runs)) == sorted(
        [f"{s} {n}" for s in ("north", "south") for n in range(3)] + ["north 1"]
    )


async def test_a_fallback_is_the_value_of_a_call_whose_worker_dies(session: Session, tmp_path: Path) -> None:
    with Pipeline("fallback") as pipeline:
        with ForEach(numbers(3)) as n:
            Yield(describe([train(PlaceParam("folder"), n, 1, site=north, fallback=-1)]), place="value")
    values = (await results(session, pipeline, tmp_path))["value"].values()
    assert [-1] in values
    assert all(value in ([-1], [1], [2], [3]) for value in values)


async def test_elements_that_a_worker_has_lost_are_collected_as_failures(session: Session, tmp_path: Path) -> None:
    with Pipeline("collect") as pipeline:
        with ForEach(numbers(4), concurrency=1) as n:
            value = train(PlaceParam("folder"), n, 2, site=north)
        Yield(describe(collect(value, errors="keep")), place="kept")
    assert (await results(session, pipeline, tmp_path))["kept"] == {(0,): [1, 2, "dfm_async.errors.WorkerLost", 4]}


@pytest.mark.parametrize("again", [False, True])
async def test_what_a_site_keeps_for_later_calls_is_lost_or_made_again(
    session: Session, tmp_path: Path, again: bool
) -> None:
    with Pipeline("kept") as pipeline:
        folder = PlaceParam("folder")
        data = load(folder, **({"retry": AGAIN} if again else {}))
        with Repeat(0, times=4) as model:
            calls = [
                train(folder, model, 1, site=north),
                train(folder, data, site=north),
                train(folder, model, site=south),
            ]
            replies = gather(calls)
            Yield(describe([replies, replies.failures]), place="round")
            Yield(replies.failures, place="failures")
            model.next(largest(gather(calls[2:])))
    found = await results(session, pipeline, tmp_path)
    failed = {frame[1]: sorted(f.operation for f in failures) for frame, failures in found["failures"].items()}
    assert failed[0] == []
    assert "train" in failed[1]
    assert failed[2] == failed[3] == ([] if again else ["load"])
    assert (tmp_path / "runs").read_text().count("load") == 1 + again


async def test_a_worker_that_is_killed_while_calls_wait_costs_only_these(session: Session, tmp_path: Path) -> None:
    with Pipeline("waits") as pipeline:
        folder = PlaceParam("folder")
        with ForEach(numbers(2)) as n:
            replies = gather([wait(folder, n, site=site) for site in (north, south)])
            Yield(replies, place="round")
    async with asyncio.timeout(60):
        job = await session.execute(pipeline, [{"folder": str(tmp_path)}] * 2)
        await file_created(tmp_path / "runs")
        await until(lambda: (tmp_path / "runs").read_text().count("north") == 4)
        (pid,) = [worker.pid for worker in session.stats().sites["north"].workers]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        values = [result.value for result in await job.collect()]
        assert await job is JobStatus.FINISHED
    assert [[reply.site for reply in replies] for replies in values] == [["south"]] * 4


async def test_a_job_can_be_cancelled_while_a_location_has_no_worker(session: Session, tmp_path: Path) -> None:
    with Pipeline("cancelled") as pipeline:
        calls = [wait(PlaceParam("folder"), 1, site=site, retry=AGAIN) for site in (north, south)]
        Yield(gather(calls, at_least=2))
    async with asyncio.timeout(60):
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        await file_created(tmp_path / "runs")
        await until(lambda: "north" in (tmp_path / "runs").read_text())
        (pid,) = [worker.pid for worker in session.stats().sites["north"].workers]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await first_event(job, WorkerNotice)
        await job.cancel()
    assert job.status is JobStatus.ABORTED


def streams() -> None:
    Yield(gather([add_up(PlaceParam("folder"), count(3)), train(PlaceParam("folder"), 1, site=south)]))


def has_another_use() -> None:
    call = train(PlaceParam("folder"), 1, 1, site=north)
    Yield(gather([call, train(PlaceParam("folder"), 1, site=south)]))
    Yield(call, place="call")


@pytest.mark.parametrize("write", [streams, has_another_use])
async def test_a_loss_that_cannot_be_contained_costs_the_job(session: Session, tmp_path: Path, write: Any) -> None:
    with Pipeline(write.__name__) as pipeline:
        write()
    async with asyncio.timeout(60):
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        with pytest.raises(JobAborted) as caught:
            await job
    assert isinstance(caught.value.__cause__, WorkerLost)
