"""The limits of a site hold over all jobs and workers, for every kind of code."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, ForEach, JobFailed, Pipeline, PlaceParam, RetryPolicy, Yield, collect
from dfm_async.telemetry import read_trace
from tests.conftest import Connect, TargetName
from tests.support.pipelines import pipeline_of
from tests.support.waiting import until

fed = Federation("limits")
lab = fed.site("lab", gpus=2, memory="1GiB", workers=2)


class Trace:
    """Notes in files when calls begin and end, whichever process they run in."""

    def __init__(self, folder: str, x: Any) -> None:
        self._path = Path(folder, f"{x}-{os.getpid()}-{uuid.uuid4().hex}")

    def __enter__(self) -> None:
        self._path.with_suffix(".begin").write_text(repr(time.time()))

    def __exit__(self, *_: object) -> None:
        self._path.with_suffix(".end").write_text(repr(time.time()))


def spans(folder: Path, prefix: str = "") -> list[tuple[float, float]]:
    """When calls began and ended."""
    found = []
    for begin in folder.glob(f"{prefix}*.begin"):
        end = begin.with_suffix(".end")
        found.append((float(begin.read_text()), float(end.read_text()) if end.exists() else time.time()))
    return sorted(found)


def overlap(folder: Path, prefix: str = "") -> int:
    """How many calls ran at the same time, at most."""
    found = spans(folder, prefix)
    return max(sum(begin <= start < end for begin, end in found) for start, _ in found)


def ended(folder: Path) -> int:
    """How many calls have ended."""
    return len(list(folder.glob("*.end")))


@lab.operation
def items(n: int) -> list[int]:
    return list(range(n))


@lab.operation(limit=2)
def plain(x: int, folder: str) -> int:
    with Trace(folder, x):
        time.sleep(0.02)
    return x


@lab.operation(limit=2)
async def waits(x: int, folder: str) -> int:
    with Trace(folder, x):
        await asyncio.sleep(0.02)
    return x


@lab.operation(limit=2)
def generator(x: int, folder: str) -> Iterator[int]:
    with Trace(folder, x):
        for n in range(3):
            time.sleep(0.01)
            yield n


@lab.operation(limit=2)
async def async_generator(x: int, folder: str) -> AsyncIterator[int]:
    with Trace(folder, x):
        for n in range(3):
            await asyncio.sleep(0.01)
            yield n


@lab.operation(limit=2)
class Counted:
    def body(self, x: int, folder: str) -> int:
        with Trace(folder, x):
            time.sleep(0.02)
        return x


@lab.operation(limit=2, in_process=True)
def apart(x: int, folder: str) -> int:
    with Trace(folder, x):
        time.sleep(0.02)
    return x


@lab.operation(cpus=2)
def whole_machine(x: int, folder: str) -> int:
    with Trace(folder, x):
        time.sleep(0.02)
    return x


@lab.operation(memory="600MiB")
async def large(x: int, folder: str) -> int:
    with Trace(folder, x):
        await asyncio.sleep(0.02)
    return x


@lab.operation(gpus=1)
def device(x: int) -> str | None:
    time.sleep(0.05)
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@lab.operation(limit=1, key="customer")
async def per_customer(customer: Any, folder: str) -> Any:
    with Trace(folder, customer):
        await asyncio.sleep(0.03)
    return customer


@lab.operation(rate="20/s")
async def often(x: int, folder: str) -> int:
    with Trace(folder, x):
        return x


@lab.operation(limit=1, retry=RetryPolicy(attempts=3, backoff=0.3))
async def fails_first(x: int, folder: str) -> int:
    tried = len(spans(Path(folder), f"{x}-"))
    with Trace(folder, x):
        if x == 0 and tried < 1:
            raise ConnectionError("once more")
    return x


@lab.operation(limit=1, deadline=1.5)
def slow(x: int, folder: str) -> int:
    with Trace(folder, x):
        time.sleep(0.55)
    return x


@lab.operation(limit=1)
async def holds(x: int, folder: str) -> int:
    with Trace(folder, x):
        await asyncio.Event().wait()
    return x


@lab.operation(limit=1)
async def next_one(x: int, folder: str) -> int:
    with Trace(folder, x):
        await asyncio.sleep(0.005)
    return x


KINDS = [plain, waits, generator, async_generator, Counted, apart]


@pytest.mark.parametrize("operation", KINDS, ids=lambda found: found.name)
async def test_a_limit_holds_for_every_kind_of_code(connect: Connect, operation: Any, tmp_path: Path) -> None:
    with Pipeline() as looping:
        folder = PlaceParam("folder")
        with ForEach(items(8)) as x:
            found = operation(x, folder)
            if operation in (generator, async_generator):
                with ForEach(found) as element:
                    Yield(element)
            else:
                Yield(found)
    async with connect(fed) as session:
        jobs = [await session.execute(looping, {"folder": str(tmp_path)}) for _ in range(2)]
        for job in jobs:
            await job
    assert len(spans(tmp_path)) == 16
    assert overlap(tmp_path) == 2


@pytest.mark.parametrize("operation", [whole_machine, large], ids=lambda found: found.name)
async def test_calls_share_what_the_site_has(connect: Connect, operation: Any, tmp_path: Path) -> None:
    async with connect(fed) as session:
        await (await session.execute(pipeline_of(operation, "x", "folder"), _rows(6, tmp_path)))
    assert len(spans(tmp_path)) == 6
    assert overlap(tmp_path) == 1


def _rows(count: int, folder: Path) -> list[dict[str, Any]]:
    return [{"x": x, "folder": str(folder)} for x in range(count)]


async def test_calls_with_gpus_see_only_these(connect: Connect, target: TargetName) -> None:
    async with connect(fed) as session:
        job = await session.execute(pipeline_of(device, "x"), [{"x": x} for x in range(6)])
        found = {result.value for result in await job.collect()}
    assert found == ({None} if target == "inline" else {"0", "1"})


async def test_a_key_limits_each_value_on_its_own(connect: Connect, tmp_path: Path) -> None:
    rows = [{"customer": "ab"[n % 2], "folder": str(tmp_path)} for n in range(8)]
    async with connect(fed) as session:
        await (await session.execute(pipeline_of(per_customer, "customer", "folder"), rows))
    assert overlap(tmp_path, "a") == overlap(tmp_path, "b") == 1
    assert overlap(tmp_path) == 2


async def test_a_key_needs_a_value_that_can_be_compared(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        job = await session.execute(pipeline_of(per_customer, "customer", "folder"), {"customer": [1], "folder": "."})
        with pytest.raises(JobFailed, match="limited per value of 'customer', which must be text"):
            await job


async def test_a_rate_limits_how_often_calls_start(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        await (await session.execute(pipeline_of(often, "x", "folder"), _rows(40, tmp_path)))
    starts = [begin for begin, _ in spans(tmp_path)]
    assert len(starts) == 40
    # Twenty at once, and twenty others in a second; the first may be late by half of that.
    assert starts[-1] - starts[0] > 0.5
    assert len([start for start in starts if start - starts[0] < 0.25]) <= 35


async def test_a_retry_waits_anew_and_holds_nothing_while_it_pauses(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        await (await session.execute(pipeline_of(fails_first, "x", "folder"), _rows(4, tmp_path)))
    first, again = spans(tmp_path, "0-")
    others = [begin for x in (1, 2, 3) for begin, _ in spans(tmp_path, f"{x}-")]
    assert len(others) == 3
    assert any(first[1] <= begin <= again[0] for begin in others), "nothing ran in the pause"


async def test_the_deadline_does_not_run_while_a_call_waits(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        await (await session.execute(pipeline_of(slow, "x", "folder"), _rows(4, tmp_path)))
    assert overlap(tmp_path) == 1


async def test_cancel_removes_waiting_calls_and_frees_what_others_hold(connect: Connect, tmp_path: Path) -> None:
    pipeline = pipeline_of(holds, "x", "folder")
    async with connect(fed) as session:
        first = await session.execute(pipeline, _rows(3, tmp_path))
        await until(lambda: len(spans(tmp_path)) == 1)
        second = await session.execute(pipeline, {"x": 7, "folder": str(tmp_path)})
        third = await session.execute(pipeline, {"x": 8, "folder": str(tmp_path)})
        await second.cancel()
        await first.cancel()
        await until(lambda: len(spans(tmp_path)) == 2)
        assert len(spans(tmp_path, "8-")) == 1
        await third.cancel()


async def test_a_small_job_does_not_wait_for_a_batch(connect: Connect, tmp_path: Path) -> None:
    count = 2000
    batch_folder, small_folder = tmp_path / "batch", tmp_path / "small"
    for folder in (batch_folder, small_folder):
        os.mkdir(folder)
    pipeline = pipeline_of(next_one, "x", "folder")
    async with connect(fed) as session:
        batch = await session.execute(pipeline, _rows(count, batch_folder))
        await until(lambda: ended(batch_folder) >= 10)
        await (await session.execute(pipeline, _rows(5, small_folder)))
        assert batch.status.value == "running", "the small job has ended first"
        assert ended(batch_folder) < count
        await batch.cancel()


async def test_stats_show_what_waits_and_for_what(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        job = await session.execute(pipeline_of(holds, "x", "folder"), _rows(4, tmp_path))

        def waiting() -> dict[str, int]:
            site = session.stats().sites.get("lab")
            return {} if site is None else site.waiting

        await until(lambda: waiting() == {"limit": 3})
        (limit,) = [found for found in session.stats().sites["lab"].limits if found.operation == "holds"]
        assert (limit.limit, limit.used, limit.capacity, limit.waiting) == ("limit", 1, 1, 3)
        await job.cancel()
        await until(lambda: waiting() == {})


async def test_spans_tell_what_a_call_waited_for(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with connect(fed, trace=str(path)) as session:
        await (await session.execute(pipeline_of(slow, "x", "folder"), _rows(2, tmp_path)))
    calls = [span.attributes for span in read_trace(path) if span.name == "dfm.operation"]
    reasons = Counter(call.get("dfm.wait.for") for call in calls)
    assert reasons == {None: 1, "limit": 1}
    assert max(float(call.get("dfm.waited", 0)) for call in calls) > 0.3


async def test_an_operation_that_needs_more_than_the_site_has_is_refused(connect: Connect, target: TargetName) -> None:
    federation = Federation("greedy")
    site = federation.site("lab")

    @site.operation(cpus=10_000)
    def act(x: int) -> int:
        return x

    with pytest.raises(Exception, match="needs cpus=10000, and the site has"):
        async with connect(federation) as session:
            await (await session.execute(pipeline_of(act, "x"), {"x": 1}))


async def test_a_value_of_another_generator_can_wait_for_its_turn(connect: Connect, tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        with ForEach(generator(1, PlaceParam("folder", multiuse=True))) as x:
            y = waits(x, PlaceParam("folder", multiuse=True))
        Yield(collect(y))
    async with connect(fed) as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        assert (await job.first()).value == [0, 1, 2]
