"""Calls whose values were recorded are not repeated when a job runs again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import sqlite3
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

from dfm_async import (
    DfmError,
    Federation,
    ForEach,
    Job,
    JobFailed,
    JobStatus,
    LocalOptions,
    Pipeline,
    PipelineError,
    PlaceParam,
    Progress,
    Repeat,
    Result,
    RetryPolicy,
    Session,
    Yield,
    collect,
    current_context,
)
from dfm_async.federation.fingerprints import fingerprint
from dfm_async.federation.operation import Adapter
from dfm_async.site.checkpoints import JobCheckpoints
from dfm_async.store.batching import Batch
from dfm_async.store.sqlite import SqliteStore
from tests.support.sessions import SHORT
from tests.support.waiting import file_created, first_event
from tests.wire.shapes import SAMPLES, same

Target: TypeAlias = Literal["inline", "local"]

fed = Federation("checkpoints")
lab, desk = fed.site("lab"), fed.site("desk")


def note(folder: str, text: str) -> None:
    with (Path(folder) / "calls").open("a") as file:
        file.write(f"{text}\n")


def calls(folder: Path) -> Counter[str]:
    path = folder / "calls"
    return Counter(path.read_text().split()) if path.exists() else Counter()


@lab.operation(checkpoint=True)
def double(folder: str, value: int) -> int:
    note(folder, f"double-{value}")
    return 2 * value


@desk.operation
async def gate(folder: str, value: int) -> int:
    """Return at once for small values; report and wait for a file with others."""
    note(folder, f"gate-{value}")
    if value >= 8:
        current_context().progress(1)
        await file_created(f"{folder}/open")
    return value


@lab.operation(checkpoint=True)
def total(folder: str, values: list[int]) -> int:
    note(folder, "total")
    return sum(values)


@lab.operation
def numbers(count: int) -> Any:
    yield from range(count)


@lab.operation(checkpoint=True)
def unsendable(folder: str) -> Any:
    note(folder, "unsendable")
    return lambda: None


@lab.operation(checkpoint=True)
def large(size: int) -> bytes:
    return bytes(size)


@lab.operation
def die_once(folder: str, value: int) -> int:
    """Kill the worker in the first call."""
    if not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


@lab.operation(checkpoint=True)
async def key() -> str:
    return current_context().idempotency_key


def rounds() -> Pipeline:
    with Pipeline("rounds") as pipeline:
        folder = PlaceParam("folder")
        with Repeat(1, times=5) as current:
            current.next(gate(folder, double(folder, current)))
        Yield(current)
    return pipeline


def elements() -> Pipeline:
    with Pipeline("elements") as pipeline:
        folder = PlaceParam("folder")
        with ForEach(numbers(6), concurrency=1) as number:
            value = gate(folder, double(folder, number))
        Yield(total(folder, collect(value)))
    return pipeline


async def interrupted(pipeline: Pipeline, folder: Path, target: Target, **options: Any) -> str:
    """Close the session while a call waits at the gate; return the id of the job, which is interrupted."""
    async with Session(fed, target=target, store=f"sqlite:///{folder}/jobs.db", options=SHORT) as session:
        job = await session.execute(pipeline, {"folder": str(folder)}, **options)
        await first_event(job, Progress)
    assert job.status is JobStatus.INTERRUPTED
    (folder / "open").touch()
    return job.job_id


async def resumed(job_id: str, folder: Path, target: Target) -> Any:
    async with Session(fed, target=target, store=f"sqlite:///{folder}/jobs.db", options=SHORT) as session:
        job = await session.resume(job_id)
        return (await job.first()).value


@pytest.mark.parametrize("target", ["inline", "local"])
@pytest.mark.parametrize(("pipeline", "value"), [(rounds, 32), (elements, 30)])
async def test_recorded_calls_are_not_repeated_by_a_resumed_job(
    pipeline: Callable[[], Pipeline], value: int, target: Target, tmp_path: Path
) -> None:
    job_id = await interrupted(pipeline(), tmp_path, target)
    before = calls(tmp_path)
    assert before["double-1"] == 1
    assert await resumed(job_id, tmp_path, target) == value
    after = calls(tmp_path)
    assert {name: count for name, count in after.items() if name.startswith("double") and count > 1} == {}
    assert after["gate-8"] == 2, "what was in flight runs again"
    assert after["gate-2"] == 2, "what is not recorded runs again"


async def test_a_value_that_another_process_has_recorded_first_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process that was stopped, and has gone on while its job was resumed elsewhere."""
    record, first = JobCheckpoints.record, list[bytes]()

    def second(self: JobCheckpoints, node: str, frame: tuple[int, ...], data: bytes, done: Any) -> None:
        if not node.startswith("double#"):
            record(self, node, frame, data, done)
            return
        first.append(data)
        record(self, node, frame, first[0], lambda _: record(self, node, frame, data, done))

    monkeypatch.setattr(JobCheckpoints, "record", second)
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        with Pipeline() as pipeline:
            folder = PlaceParam("folder")
            with ForEach(numbers(4), concurrency=1) as number:
                value = double(folder, number)
            Yield(total(folder, collect(value)))
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        assert (await job.first()).value == 0, "the value of the first element is recorded for all"


async def test_all_calls_can_be_recorded(tmp_path: Path) -> None:
    job_id = await interrupted(rounds(), tmp_path, "inline", checkpoint="calls")
    assert await resumed(job_id, tmp_path, "inline") == 32
    repeated = {name: count for name, count in calls(tmp_path).items() if count > 1}
    assert repeated == {"gate-8": 2}


async def test_a_set_that_lost_its_worker_uses_recorded_values(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        folder = PlaceParam("folder")
        Yield(die_once(folder, double(folder, 3)))
    options = LocalOptions(lanes=1)
    async with Session(fed, store=f"sqlite:///{tmp_path}/jobs.db", options=options) as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)}, retry=RetryPolicy(on_worker_lost=2))
        assert (await job.first()).value == 6
    assert calls(tmp_path) == {"double-3": 1}


async def test_checkpoints_are_deleted_with_their_job(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        Yield(double(PlaceParam("folder"), 1))
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Session(fed, target="inline", store=url) as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        await job
        path = tmp_path / "jobs.db-checkpoints" / "lab.sqlite"
        assert path.stat().st_mode & 0o077 == 0
        assert recorded(path) == [(name_of(job), "double#0", "0")]
        await session.forget(job.job_id)
        assert recorded(path) == []


def recorded(path: Path) -> list[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT job, node, frame FROM checkpoints").fetchall()


def name_of(job: Job) -> str:
    return job._known().spec.checkpoints


async def test_a_value_that_cannot_be_recorded_fails_its_call(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        Yield(unsendable(PlaceParam("folder")))
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        with pytest.raises(JobFailed, match="function"):
            await job


@lab.operation(checkpoint=True)
async def sample(folder: str, number: int) -> Any:
    note(folder, "sample")
    return SAMPLES[number]


@lab.operation
async def waiting(folder: str, value: Any) -> Any:
    if not (Path(folder) / "open").exists():
        current_context().progress(1)
        await asyncio.Event().wait()
    return value


async def test_all_values_that_can_be_stored_can_be_recorded(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        folder = PlaceParam("folder")
        Yield(waiting(folder, sample(folder, PlaceParam("number"))))
    store = f"sqlite:///{tmp_path}/jobs.db"
    sets = [{"folder": str(tmp_path), "number": number} for number in range(len(SAMPLES))]
    async with Session(fed, target="inline", store=store, options=SHORT) as session:
        job = await session.execute(pipeline, sets, concurrency=len(sets))
        async with contextlib.aclosing(job.events()) as events:
            reported = 0
            async for event in events:
                reported += isinstance(event, Progress)
                if reported == len(sets):
                    break
    (tmp_path / "open").touch()
    async with Session(fed, target="inline", store=store, options=SHORT) as session:
        found = {result.frame[0]: result.value async for result in await session.resume(job.job_id)}
    assert [value for number, value in enumerate(SAMPLES) if not same(value, found[number])] == []
    assert calls(tmp_path)["sample"] == len(sets)


async def test_checkpoints_have_a_limit(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        Yield(large(PlaceParam("size")))
    options = LocalOptions(checkpoint_bytes=100_000, checkpoints=str(tmp_path / "elsewhere"))
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db", options=options) as session:
        small = await session.execute(pipeline, {"size": 10_000})
        assert len((await small.first()).value) == 10_000
        job = await session.execute(pipeline, {"size": 100_000})
        with pytest.raises(JobFailed, match=r"more than the limit of .*checkpoint_bytes"):
            await job
    assert (tmp_path / "elsewhere" / "lab.sqlite").exists()


@lab.operation(checkpoint=True)
def large_elements(size: int) -> Iterator[bytes]:
    for _ in range(20):
        yield bytes(size)


async def test_elements_beyond_the_limit_fail_their_generator(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        Yield(large_elements(PlaceParam("size")))
    options = LocalOptions(checkpoint_bytes=200_000)
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db", options=options) as session:
        job = await session.execute(pipeline, {"size": 20_000})
        with pytest.raises(JobFailed, match=r"large_elements.*more than the limit of .*checkpoint_bytes"):
            await job
        assert 1 <= len(await job.collect(errors="skip")) < 20
        assert len(await (await session.execute(pipeline, {"size": 20})).collect()) == 20


async def test_calls_have_a_key_that_stays_the_same(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        Yield(key())
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline, job_id="order-17")
        assert (await job.first()).value == "order-17/key#0/0"


@lab.operation
def fail_once(folder: str, value: int) -> int:
    """Raise until the folder has the file ``open``."""
    if value >= 8 and not (Path(folder) / "open").exists():
        raise ValueError("closed")
    return value


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_retried_parameter_sets_use_recorded_values(target: Target, tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        folder = PlaceParam("folder")
        Yield(fail_once(folder, double(folder, PlaceParam("value"))))
    store = f"sqlite:///{tmp_path}/jobs.db"
    async with Session(fed, target=target, store=store, options=SHORT) as session:
        job = await session.execute(pipeline, [{"folder": str(tmp_path), "value": n} for n in range(3, 7)])
        with pytest.raises(JobFailed):
            await job
        assert [failed.index for failed in await job.failures()] == [1, 2, 3]
    (tmp_path / "open").touch()
    async with Session(fed, target=target, store=store, options=SHORT) as session:
        again = await (await session.reattach(job.job_id)).retry_failed()
        assert sorted([result.value async for result in again]) == [8, 10, 12]
        assert calls(tmp_path) == {f"double-{n}": 1 for n in range(3, 7)}
        await session.forget(job.job_id)
        assert {name for name, *_ in recorded(tmp_path / "jobs.db-checkpoints" / "lab.sqlite")} == {name_of(again)}


async def test_a_fork_uses_values_that_workers_have_recorded(tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    async with Session(fed, target="local", store=f"sqlite:///{tmp_path}/jobs.db", options=SHORT) as session:
        job = await session.execute(rounds(), {"folder": str(tmp_path)})
        assert (await job.first()).value == 32
        fork = await job.fork("double", frame=(0, 3))
        assert (await fork.first()).value == 32
        await fork
    doubled = {name: count for name, count in calls(tmp_path).items() if name.startswith("double")}
    assert doubled == {"double-1": 1, "double-2": 1, "double-4": 1, "double-8": 2, "double-16": 2}


async def test_a_job_does_not_use_values_of_an_earlier_job_with_its_id(tmp_path: Path) -> None:
    await interrupted(rounds(), tmp_path, "inline", job_id="nightly")
    for name in ("jobs.db", "jobs.db-lock", "open"):  # the folder of the checkpoints stays
        (tmp_path / name).unlink()
    await interrupted(rounds(), tmp_path, "inline", job_id="nightly")
    assert calls(tmp_path)["double-1"] == 2
    assert await resumed("nightly", tmp_path, "inline") == 32


async def test_checkpoints_need_a_store() -> None:
    with Pipeline() as pipeline:
        Yield(key())
    async with Session(fed, target="inline") as session:
        with pytest.raises(ValueError, match="needs a store"):
            await session.execute(pipeline, checkpoint="calls")


# generators


@lab.operation(checkpoint=True)
def pages(folder: str, count: int, resume_from: int = 0) -> Iterator[str]:
    """Yield a new text for each number; begin anywhere."""
    note(folder, f"pages-from-{resume_from}")
    for number in range(resume_from, count):
        note(folder, f"produced-{number}")
        yield f"{number}:{uuid.uuid4()}"


@lab.operation(checkpoint=True)
def lines(folder: str, count: int) -> Iterator[str]:
    """Do the same, from the first one on."""
    note(folder, "lines-from-0")
    for number in range(count):
        note(folder, f"produced-{number}")
        yield f"{number}:{uuid.uuid4()}"


@lab.operation(checkpoint=True)
async def pages_async(folder: str, count: int, resume_from: int = 0) -> AsyncIterator[str]:
    note(folder, f"pages_async-from-{resume_from}")
    for number in range(resume_from, count):
        note(folder, f"produced-{number}")
        yield f"{number}:{uuid.uuid4()}"


@lab.operation(checkpoint=True)
def upper(folder: str, texts: Iterator[str], resume_from: int = 0) -> Iterator[str]:
    """Transform another stream; its elements come again from the first one on."""
    note(folder, f"upper-from-{resume_from}")
    for text in itertools.islice(texts, resume_from, None):
        yield text.upper()


@desk.operation
async def read_page(folder: str, text: str) -> str:
    note(folder, f"read-{text}")
    if int(text.partition(":")[0]) >= 8:
        current_context().progress(1)
        await file_created(f"{folder}/open")
    return text


def of_a_loop(source: Any) -> Pipeline:
    """Read the elements of a generator one by one."""
    with Pipeline(f"loop over {source.name}") as pipeline:
        folder = PlaceParam("folder")
        with ForEach(source(folder, 12), concurrency=1) as text:
            Yield(read_page(folder, text))
    return pipeline


def of_two_generators(source: Any) -> Pipeline:
    with Pipeline(f"upper {source.name}") as pipeline:
        folder = PlaceParam("folder")
        with ForEach(upper(folder, source(folder, 12)), concurrency=1) as text:
            Yield(read_page(folder, text))
    return pipeline


def recorded_elements(folder: Path, node: str) -> tuple[int, bool]:
    """Return how many elements of a node are recorded, and whether its end is."""
    with contextlib.closing(sqlite3.connect(folder / "jobs.db-checkpoints" / "lab.sqlite")) as connection:
        found = connection.execute("SELECT count FROM elements WHERE node = ?", (node,)).fetchall()
    return sum(count for (count,) in found), (0,) in found


@pytest.mark.parametrize("target", ["inline", "local"])
@pytest.mark.parametrize(
    ("source", "pipeline"),
    [(pages, of_a_loop), (lines, of_a_loop), (pages_async, of_a_loop), (pages, of_two_generators)],
    ids=["resumes", "runs again", "async", "two"],
)
async def test_a_generator_does_not_repeat_elements_that_were_read(
    source: Any, pipeline: Callable[[Any], Pipeline], target: Target, tmp_path: Path
) -> None:
    job_id = await interrupted(pipeline(source), tmp_path, target)
    count, ended = recorded_elements(tmp_path, f"{source.name}#0")
    assert count >= 9
    async with Session(fed, target=target, store=f"sqlite:///{tmp_path}/jobs.db", options=SHORT) as session:
        values = [result.value async for result in await session.resume(job_id)]
    assert sorted(int(value.partition(":")[0]) for value in values) == list(range(12))
    found = calls(tmp_path)
    read = {name.lower() for name in found if name.startswith("read-")}
    assert len(read) == 12, "elements that were read have changed"
    produced = {number: found[f"produced-{number}"] for number in range(count)}
    if source is lines:
        assert set(produced.values()) == {1 if ended else 2}
    else:
        assert set(produced.values()) == {1}
        assert found[f"{source.name}-from-0"] == 1
        assert found[f"{source.name}-from-{count}"] == (not ended)


@pytest.mark.parametrize("checkpoint", ["marked", "calls"])
async def test_elements_that_a_generator_yields_as_results_are_recorded(
    checkpoint: Literal["marked", "calls"], tmp_path: Path
) -> None:
    with Pipeline() as pipeline:
        folder = PlaceParam("folder")
        texts = pages(folder, 1000)
        Yield(texts, place="texts")
        Yield(read_page(folder, "9", after=texts), place="end")
    job_id = await interrupted(pipeline, tmp_path, "inline", checkpoint=checkpoint)
    assert recorded_elements(tmp_path, "pages#0") == (1000, True)
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db", options=SHORT) as session:
        job = await session.resume(job_id)
        values = [result.value async for result in job.results("texts", ordered=True)]
    assert [int(value.partition(":")[0]) for value in values] == list(range(1000))
    assert calls(tmp_path)["pages-from-0"] == 1
    assert calls(tmp_path)["produced-999"] == 1


@lab.operation(checkpoint=True)
def reused(folder: str, count: int) -> Iterator[list[int]]:
    """Yield the same list, changed."""
    note(folder, "reused")
    found = [0]
    for number in range(count):
        found[0] = number
        yield found


@lab.operation(checkpoint=True)
def some_unsendable(count: int) -> Iterator[Any]:
    yield from range(count)
    yield lambda: None


async def test_an_element_is_recorded_as_it_was_when_it_was_yielded(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        folder = PlaceParam("folder")
        values = reused(folder, 500)
        Yield(values, place="values")
        Yield(fail_once(folder, 9, after=values))
    expected = [[number] for number in range(500)]
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        with pytest.raises(JobFailed, match="closed"):
            await job
        (tmp_path / "open").touch()
        for found in (job, await job.retry_failed()):
            items = [item async for item in found.results("values", errors="yield")]
            assert [item.value for item in items if isinstance(item, Result)] == expected
    assert calls(tmp_path) == {"reused": 1}


async def test_an_element_that_cannot_be_recorded_fails_its_generator(tmp_path: Path) -> None:
    with Pipeline() as pipeline, ForEach(some_unsendable(3)) as value:
        Yield(gate(str(tmp_path), value))
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline)
        with pytest.raises(JobFailed, match="function"):
            await job
        assert [found.value for found in await job.collect(errors="skip")] == [0, 1, 2]


@lab.operation(checkpoint=True)
def fails_once(folder: str, count: int, resume_from: int = 0) -> Iterator[int]:
    note(folder, f"from-{resume_from}")
    for number in range(resume_from, count):
        if number == 5 and not (Path(folder) / "open").exists():
            raise OSError("the connection was closed")
        yield number


async def test_a_generator_that_failed_goes_on_when_its_set_is_retried(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        Yield(fails_once(PlaceParam("folder"), 10))
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        with pytest.raises(JobFailed):
            await job
        (tmp_path / "open").touch()
        again = await job.retry_failed()
        assert [result.value for result in await again.collect()] == list(range(10))
    assert calls(tmp_path) == {"from-0": 1, "from-5": 1}


@lab.operation(checkpoint=True)
def partly(folder: str, values: Iterator[str]) -> list[str]:
    """Read some elements of a stream."""
    return list(itertools.islice(values, 3))


async def test_a_generator_that_was_closed_early_has_not_ended(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        folder = PlaceParam("folder")
        Yield(partly(folder, pages(folder, 5000)))
    async with Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        assert len((await job.first()).value) == 3
        await job
    count, ended = recorded_elements(tmp_path, "pages#0")
    assert 3 <= count < 5000
    assert not ended


# versions of the code


def offered(factor: int) -> tuple[Federation, Pipeline]:
    """Return a federation whose code differs with the factor."""
    federation = Federation("versions")
    site = federation.site("lab")

    if factor == 2:

        @site.operation
        async def scale(value: int) -> int:
            current_context().progress(1)
            await file_created("/never")
            return 2 * value

    else:

        @site.operation(retry=RetryPolicy(attempts=2))
        async def scale(value: int) -> int:
            return 3 * value

    with Pipeline("scaling") as pipeline:
        Yield(scale(PlaceParam("value")))
    return federation, pipeline


async def test_a_job_is_not_resumed_with_other_code_unless_that_is_accepted(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    before, pipeline = offered(2)
    async with Session(before, target="inline", store=store, options=SHORT) as session:
        job = await session.execute(pipeline, {"value": 7})
        await first_event(job, Progress)
    after, _ = offered(3)
    async with Session(after, target="inline", store=store) as session:
        with pytest.raises(
            PipelineError,
            match=r"(?s)the code of 'scale' at site 'lab' has changed.*"
            rf"session\.resume\('{job.job_id}', accept_changes=True\)",
        ) as caught:
            await session.resume(job.job_id)
        assert len(caught.value.problems) == 1
        assert (await session.reattach(job.job_id)).status is JobStatus.INTERRUPTED
        resumed = await session.resume(job.job_id, accept_changes=True)
        assert (await resumed.first()).value == 21
        await resumed
    changed, _ = offered(2)
    async with Session(changed, target="inline", store=store) as session:
        with pytest.raises(DfmError, match="is finished: only interrupted jobs can be resumed"):
            await session.resume(job.job_id)


async def test_all_operations_whose_code_has_changed_are_listed(tmp_path: Path) -> None:
    def versions(change: int) -> tuple[Federation, Pipeline]:
        federation = Federation("versions")
        site, other = federation.site("lab"), federation.site("desk")
        code = "def {0}(x: int) -> int:\n    return x + {1}"
        space: dict[str, Any] = {}
        for name, number in (("first", change), ("second", change), ("third", 0)):
            exec(code.format(name, number), space)
        first, second = site.operation(space["first"]), other.operation(space["second"])
        third = other.operation(space["third"])
        held = other.operation(waiting)
        with Pipeline("three") as pipeline:
            Yield(held(PlaceParam("folder"), third(second(first(1)))))
        return federation, pipeline

    store = f"sqlite:///{tmp_path}/jobs.db"
    before, pipeline = versions(1)
    async with Session(before, target="inline", store=store, options=SHORT) as session:
        job = await session.execute(pipeline, {"folder": str(tmp_path)})
        await first_event(job, Progress)
    async with Session(versions(2)[0], target="inline", store=store) as session:
        with pytest.raises(PipelineError) as caught:
            await session.resume(job.job_id)
    problems = [str(problem) for problem in caught.value.problems]
    assert [problem.partition(";")[0] for problem in problems] == [
        "the code of 'first' at site 'lab' has changed since the job was submitted",
        "the code of 'second' at site 'desk' has changed since the job was submitted",
    ]
    assert all(problem in str(caught.value) for problem in problems)


def test_fingerprints_ignore_layout_comments_and_decorators() -> None:
    def same(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
        found = {fingerprint(Adapter(operation="f", code=code)) for code in (first, second)}
        return len(found) == 1

    space: dict[str, Any] = {}
    exec("def f(x):\n    return x + 1\ndef g(x):\n    return x + 2", space)
    other: dict[str, Any] = {}
    exec("def f(x):\n\n    return x + 1", other)
    assert same(space["f"], other["f"])
    assert not same(space["f"], space["g"])

    def one() -> Callable[..., Any]:
        def f(x: int) -> int:
            return x + 1

        return f

    def two() -> Callable[..., Any]:
        @functools.lru_cache
        def f(x: int) -> int:
            # a comment

            return x + 1

        return f

    assert same(one(), two())
    assert not same(one(), space["f"]), "types count"


async def test_parameter_sets_run_when_they_are_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that gets lost leaves its number, and what was recorded of its calls, to another one."""
    order: list[str] = []
    write, here = SqliteStore._commit, Federation("here")

    async def slow(store: SqliteStore, batch: Batch, wait: bool) -> None:
        for _ in range(100):  # a call that did not wait would have begun
            await asyncio.sleep(0)
        await write(store, batch, wait)
        order.append("commit")

    @here.site("lab").operation(checkpoint=True)
    async def mark(value: int) -> int:
        order.append(f"run {value}")
        return value

    monkeypatch.setattr(SqliteStore, "_commit", slow)
    with Pipeline("marks") as marks:
        Yield(mark(PlaceParam("value")))
    async with Session(here, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(marks, {"value": 1}, autostop=False)
        results = aiter(job)
        assert (await anext(results)).value == 1
        order.clear()
        await job.send_input_params([{"value": 2}, {"value": 3}])
        assert {(await anext(results)).value, (await anext(results)).value} == {2, 3}
        assert order[0] == "commit"
