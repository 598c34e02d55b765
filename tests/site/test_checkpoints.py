"""The file of checkpoints of one site."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from dfm_async.errors import StoreError
from dfm_async.site.checkpoints import Checkpoints, copy, delete

LIMIT = 1 << 20


@pytest.fixture
async def checkpoints(tmp_path: Path) -> AsyncIterator[Checkpoints]:
    checkpoints = Checkpoints(str(tmp_path), "lab", LIMIT)
    yield checkpoints
    await checkpoints.close()


async def record(checkpoints: Checkpoints, job: str, node: str, frame: tuple[int, ...], data: bytes) -> None:
    """Record a value, and wait until it is committed."""
    found: asyncio.Future[bytes | StoreError | None] = asyncio.get_running_loop().create_future()
    checkpoints.of(job).record(node, frame, data, lambda error: None if found.done() else found.set_result(error))
    error = await found
    if isinstance(error, StoreError):
        raise error


async def test_a_request_in_the_turn_in_which_a_group_ends_is_carried_out(checkpoints: Checkpoints) -> None:
    ended: asyncio.Future[bytes | StoreError | None] = asyncio.get_running_loop().create_future()
    job = checkpoints.of("job")
    job.record("a", (0,), b"x", lambda _: job.record("b", (0,), b"y", ended.set_result))
    async with asyncio.timeout(30):
        assert await ended is None
        await record(checkpoints, "job", "c", (0,), b"z")
    assert [await job.find(node, (0,)) for node in "abc"] == [b"x", b"y", b"z"]


async def test_any_error_reaches_all_requests(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        requests = (record(checkpoints, "job", "a", (n,), b"x") for n in range(3))
        found = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30)
    assert [type(error) for error in found] == [StoreError] * 3
    assert "can't start new thread" in str(found[0])
    await record(checkpoints, "job", "a", (0,), b"x")


async def test_a_value_beyond_the_limit_fails_alone(checkpoints: Checkpoints) -> None:
    await record(checkpoints, "job", "a", (0,), b"x")
    sizes = [1, 1, 2 * LIMIT, 1]
    requests = [record(checkpoints, "job", "b", (n,), bytes(size)) for n, size in enumerate(sizes)]
    found = await asyncio.gather(*requests, checkpoints.of("job").find("a", (0,)), return_exceptions=True)
    assert isinstance(found[2], StoreError)
    assert [found[0], found[1], found[3], found[4]] == [None, None, None, b"x"]
    assert await checkpoints.of("job").find("b", (3,)) == b"\0"
    assert await checkpoints.of("job").find("b", (2,)) is None


async def test_what_was_recorded_first_is_not_replaced(checkpoints: Checkpoints, tmp_path: Path) -> None:
    await record(checkpoints, "job", "a", (0,), b"first")
    outcomes: list[asyncio.Future[bytes | StoreError | None]] = []
    for node, data in (("a", b"second"), ("a", b"first"), ("b", b"other")):
        outcomes.append(asyncio.get_running_loop().create_future())
        checkpoints.of("job").record(node, (0,), data, outcomes[-1].set_result)
    assert await asyncio.gather(*outcomes) == [b"first", None, None]
    assert await checkpoints.of("job").find("a", (0,)) == b"first"
    await record(checkpoints, "new", "a", (0,), b"third")
    await asyncio.to_thread(copy, str(tmp_path), "job", "new", {0: 0})
    assert [await checkpoints.of("new").find(node, (0,)) for node in "ab"] == [b"third", b"other"]


async def test_a_lock_of_another_process_is_waited_for(checkpoints: Checkpoints, tmp_path: Path) -> None:
    await record(checkpoints, "job", "a", (0,), b"x")
    with closing(sqlite3.connect(tmp_path / "lab.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        recording = asyncio.create_task(record(checkpoints, "job", "b", (0,), b"y"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(recording), 0.2)
        other.execute("ROLLBACK")
        await recording


async def test_closing_does_not_wait_for_a_lock_of_another_process(checkpoints: Checkpoints, tmp_path: Path) -> None:
    await record(checkpoints, "job", "a", (0,), b"x")
    with closing(sqlite3.connect(tmp_path / "lab.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        recording = asyncio.create_task(record(checkpoints, "job", "b", (0,), b"y"))
        await asyncio.sleep(0)
        await asyncio.wait_for(checkpoints.close(), 30)
        with pytest.raises(StoreError, match="another process keeps the checkpoints locked"):
            await recording


ROUNDS = 12


def _open_and_record(number: int, folder: str, barrier: threading.Barrier, results: multiprocessing.Queue[str]) -> None:
    async def record_one(round_: int) -> str:
        checkpoints = Checkpoints(f"{folder}/{round_}", "lab", LIMIT)
        try:
            await record(checkpoints, "job", "n", (number,), b"x")
        except StoreError as error:
            return str(error)
        finally:
            await checkpoints.close()
        return ""

    for round_ in range(ROUNDS):
        barrier.wait(60)
        results.put(asyncio.run(record_one(round_)))


def test_processes_that_create_the_file_at_the_same_time_all_record(tmp_path: Path) -> None:
    spawn, count = multiprocessing.get_context("spawn"), 4
    barrier, results = spawn.Barrier(count), spawn.Queue()
    children = [
        spawn.Process(target=_open_and_record, args=(number, str(tmp_path), barrier, results))
        for number in range(count)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=100) for _ in range(ROUNDS * count)]
    for child in children:
        child.join(30)
        child.close()
    results.close()
    results.join_thread()
    assert found == [""] * ROUNDS * count


async def test_values_of_some_parameter_sets_can_be_copied_to_another_job(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    frames = [(1,), (1, 2), (10,), (10, 0, 3), (2, 1)]
    for frame in frames:
        await record(checkpoints, "old", "n", frame, repr(frame).encode())
    copy(str(tmp_path), "old", "new", {1: 0, 10: 1})
    expected = {(0,): b"(1,)", (0, 2): b"(1, 2)", (1,): b"(10,)", (1, 0, 3): b"(10, 0, 3)"}
    assert {frame: await checkpoints.of("new").find("n", frame) for frame in expected} == expected
    assert await checkpoints.of("new").find("n", (2, 1)) is None
    delete(str(tmp_path), "old")
    assert [await checkpoints.of("old").find("n", frame) for frame in frames] == [None] * 5
    assert await checkpoints.of("new").find("n", (0,)) == b"(1,)"
