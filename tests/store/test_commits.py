"""Commits of a store: their order, their failures, and stores that have lost a job."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async.errors import StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, Store
from dfm_async.store.sqlite import SqliteStore
from tests.store.conftest import Opener
from tests.store.helpers import database, entry, everything, found, new_job, row, run_unclosed, sql
from tests.support.stores import locked

# commits


async def test_every_commit_is_reported_with_the_ends_of_its_jobs(store: SqliteStore) -> None:
    told: list[dict[str, int]] = []
    store.on_commit = told.append
    await store.create(new_job("j"))
    await store.create(new_job("k"))
    store.append("j", entry(0, 3))
    store.append("j", entry(3))
    store.update("k", status=JobStatus.RUNNING)
    assert store.backlog > 0
    await store.flush()
    assert store.backlog == 0
    assert told == [{"j": 0}, {"k": 0}, {"j": 4, "k": 0}]


async def test_what_is_queued_during_a_commit_goes_into_the_next_one(store: SqliteStore) -> None:
    ends: list[int] = []
    store.on_commit = lambda told: ends.append(told["j"])
    await store.create(new_job("j"))
    for offset in range(10_000):
        store.append("j", entry(offset))
        if offset % 100 == 0:
            await asyncio.sleep(0)
    await store.flush()
    assert ends == sorted(set(ends))
    assert ends[-1] == 10_000
    assert 1 < len(ends) < 1000


async def test_a_flush_with_nothing_to_do_returns(store: SqliteStore) -> None:
    await store.flush()


async def test_a_callback_that_raises_does_not_stop_the_store(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: dict[str, int]) -> None:
        raise ValueError("broken")

    store.on_commit = broken
    await store.create(new_job("j"))
    store.append("j", entry(0))
    await store.flush()
    assert (await found(store)).end == 1
    assert "a callback raised" in caplog.text


# fencing


async def test_fenced_owner_writes_no_more_of_its_job(path: Path, store: SqliteStore) -> None:
    fenced: list[str] = []
    ends: list[dict[str, int]] = []
    await store.create(new_job("lost"))
    await store.create(new_job("kept"))
    sql(path, "UPDATE jobs SET fence = 999 WHERE job_id = 'lost'")
    store.on_fenced, store.on_commit = fenced.append, ends.append
    for job_id in "lost", "kept":
        store.append(job_id, entry(0))
        store.add_params(job_id, 0, [row(0)])
        store.update(job_id, status=JobStatus.RUNNING)
    await store.flush()
    assert (fenced, ends) == (["lost"], [{"kept": 1}])
    lost, kept = await found(store, "lost"), await found(store, "kept")
    assert (lost.end, lost.frames, lost.owner.mine, lost.status) == (0, 0, False, JobStatus.INTERRUPTED)
    assert (kept.end, kept.frames, kept.status) == (1, 1, JobStatus.RUNNING)
    store.append("lost", entry(1))
    await store.flush()
    assert fenced == ["lost", "lost"]
    await store.take_over("lost")
    store.append("lost", entry(0))
    await store.flush()
    assert fenced == ["lost", "lost"]
    assert await everything(store, "lost") == [entry(0)]


async def test_writes_for_a_missing_job_are_reported(store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
    store.append("nothing", entry(0))
    await store.flush()
    assert "nothing" in caplog.text, "with nobody to be told, it is logged"


# errors


@pytest.fixture
def errors(store: SqliteStore) -> list[StoreError]:
    told: list[StoreError] = []
    store.on_error = told.append
    return told


_BREAK = "CREATE TRIGGER broken BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'no luck'); END"


async def test_failed_commit_is_reported_and_kept(path: Path, store: SqliteStore, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))
    sql(path, _BREAK)
    store.append("j", entry(0))
    store.add_params("j", 0, [row(0)])
    with pytest.raises(StoreError, match="no luck"):
        await store.flush()
    assert [str(path) in str(error) for error in errors] == [True]
    assert ((await found(store)).end, (await found(store)).frames) == (0, 0)
    backlog = store.backlog
    assert backlog > 0
    store.append("j", entry(1))
    store.add_params("j", 1, [row(1)])
    assert store.backlog > backlog
    sql(path, "DROP TRIGGER broken")
    await store.flush()
    assert (await everything(store), store.backlog) == ([entry(0), entry(1)], 0)
    assert await store.params("j", [0, 1]) == {0: row(0), 1: row(1)}


async def test_a_failed_commit_is_tried_again_when_much_more_is_queued(
    path: Path, store: SqliteStore, errors: list[StoreError]
) -> None:
    await store.create(new_job("j"))
    sql(path, _BREAK)
    done = asyncio.Event()
    for offset in range(1000):
        store.append("j", entry(offset))
        await asyncio.sleep(0)
    with pytest.raises(StoreError):
        await store.flush()
    assert 2 <= len(errors) < 30, "not for every write"
    sql(path, "DROP TRIGGER broken")
    store.on_commit = lambda _: done.set()
    for offset in range(1000, 3000):
        store.append("j", entry(offset))
    await done.wait()
    await store.flush()
    assert len(await everything(store)) == 3000


async def test_close_with_uncommitted_writes_raises(path: Path, store: SqliteStore, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))
    sql(path, _BREAK)
    store.append("j", entry(0))
    with pytest.raises(StoreError, match="bytes were committed"):
        await store.close()
    assert "no luck" in str(errors[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dfm-store")]
    sql(path, "DROP TRIGGER broken")


async def test_without_a_callback_errors_are_logged(
    path: Path, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.create(new_job("j"))
    sql(path, _BREAK)
    store.append("j", entry(0))
    with pytest.raises(StoreError):
        await store.flush()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    sql(path, "DROP TRIGGER broken")


@pytest.mark.parametrize("replaced", [False, True])
async def test_deleted_file_is_reported(
    path: Path, store: SqliteStore, errors: list[StoreError], replaced: bool
) -> None:
    await store.create(new_job("j"))
    moved = path.rename(path.with_suffix(".old"))
    if replaced:
        path.write_bytes(b"")
    store.append("j", entry(0))
    with pytest.raises(StoreError, match="deleted or replaced"):
        await store.flush()
    with pytest.raises(StoreError, match="deleted or replaced"):
        await store.create(new_job("k"))
    assert len(errors) == 2
    moved.rename(path)
    await store.flush()
    assert await everything(store) == [entry(0)]


async def test_locked_database_is_reported(path: Path, opened: Opener) -> None:
    store, errors = await opened(busy_timeout=0.05), list[StoreError]()
    store.on_error = errors.append
    await store.create(new_job("j"))
    with locked(path):
        store.append("j", entry(0))
        with pytest.raises(StoreError, match="locked"):
            await store.flush()
        assert len(errors) == 1
        assert (await found(store)).end == 0, "reading goes on"
    await store.flush()
    assert (await found(store)).end == 1


async def test_full_disk_is_reported(path: Path, store: SqliteStore, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))

    def limit(pages: str) -> Any:
        return database(store).run(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}"))

    await limit("20")
    for offset in range(100):
        store.append("j", Entry(offset, 1, 0, b"", bytes(4000)))
    with pytest.raises(StoreError, match="the disk is full"):
        await store.flush()
    assert errors
    await limit("100000")
    await store.flush()
    assert (await found(store)).end == 100


@pytest.mark.parametrize("first", [0, 2, 7])
async def test_events_with_gaps_are_reported_and_left_out(
    store: SqliteStore, errors: list[StoreError], first: int
) -> None:
    await store.create(new_job("j"))
    await store.create(new_job("other"))
    store.append("j", entry(0))
    await store.flush()
    store.append("j", entry(first))
    store.append("other", entry(0))
    with pytest.raises(StoreError, match=f"event {first} came where 1 is next"):
        await store.flush()
    assert len(errors) == 1
    assert [(await found(store, job_id)).end for job_id in ("j", "other")] == [1, 1]
    store.append("j", entry(1))
    await store.flush()
    assert await everything(store) == [entry(0), entry(1)]


async def test_gap_is_reported_to_its_job(store: SqliteStore, errors: list[StoreError]) -> None:
    gaps: list[str] = []
    store.on_gap = lambda job_id, _error: gaps.append(job_id)
    await store.create(new_job("j"))
    await store.create(new_job("other"))
    store.append("j", entry(5))
    store.append("other", entry(0))
    with pytest.raises(StoreError):
        await store.flush()
    assert (gaps, errors) == (["j"], [])


async def test_parameter_sets_with_gaps_are_reported_and_left_out(store: SqliteStore, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))
    store.add_params("j", 0, [row(0)])
    store.add_params("j", 2, [row(2)])
    with pytest.raises(StoreError, match="parameter set 2 came where 1 is next"):
        await store.flush()
    assert len(errors) == 1
    assert (await found(store)).frames == 0


async def test_a_value_that_no_row_can_hold_is_refused_at_once(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "largest", 100)
    with pytest.raises(StoreError, match="101 bytes of job j"):
        store.append("j", Entry(0, 1, 0, b"x", bytes(100)))
    with pytest.raises(StoreError, match="101 bytes of job j"):
        store.add_params("j", 0, [b"", bytes(101)])
    assert store.backlog == 0


@pytest.mark.parametrize("turns", range(4))
def test_a_loop_that_ends_commits_what_is_queued(path: Path, turns: int) -> None:
    last = f"store.append('j', entry(0)); [await asyncio.sleep(0) for _ in range({turns})]; store.append('j', entry(1))"
    assert run_unclosed(path, last).stderr == ""
    assert sql(path, 'SELECT "end" FROM jobs') == [(2,)]


def test_ending_loop_reports_what_it_could_not_commit(path: Path) -> None:
    await_nothing = f"sql({str(path)!r}, {_BREAK!r}); store.append('j', entry(0))"
    assert "no luck" in run_unclosed(path, await_nothing).stderr
    assert sql(path, 'SELECT "end" FROM jobs') == [(0,)]


# any interleaving

_steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("ab"), st.integers(1, 4)),
        st.tuples(st.just("params"), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(
            st.just("status"),
            st.sampled_from("ab"),
            st.tuples(st.sampled_from([s for s in JobStatus if s is not JobStatus.UNKNOWN]), st.text(max_size=5)),
        ),
        st.tuples(st.just("stopped"), st.sampled_from("ab"), st.booleans()),
        st.tuples(st.just("flush"), st.none(), st.none()),
        st.tuples(st.just("turn"), st.none(), st.none()),
        st.tuples(st.just("break"), st.none(), st.none()),
        st.tuples(st.just("mend"), st.none(), st.none()),
    ),
    max_size=40,
)


class Expected:
    """What a job must look like."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.params: list[bytes] = []
        self.changes: dict[str, Any] = {"status": JobStatus.SUBMITTED, "reason": None, "stopped": False}

    @property
    def end(self) -> int:
        return sum(item.count for item in self.entries)


@settings(max_examples=30)
@given(_steps)
async def test_any_interleaving_of_writes_reads_back_the_same(steps: Sequence[tuple[str, Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"
        store, jobs, broken = SqliteStore(path, busy_timeout=5), {"a": Expected(), "b": Expected()}, False
        store.on_error = lambda _: None
        await store.open()
        try:
            for job_id in jobs:
                await store.create(new_job(job_id))
            for step, job_id, value in steps:
                job = jobs.get(job_id, Expected())
                if step == "append":
                    store.append(job_id, entry(job.end, value))
                    job.entries.append(entry(job.end, value))
                elif step == "params":
                    rows = [row(number) for number in range(len(job.params), len(job.params) + value)]
                    store.add_params(job_id, len(job.params), rows)
                    job.params += rows
                elif step == "status":
                    status, reason = value
                    store.update(job_id, status=status, reason=reason)
                    job.changes.update(status=status, reason=reason if status.ended else None)
                elif step == "stopped":
                    store.update(job_id, stopped=value)
                    job.changes["stopped"] = value
                elif step == "turn":
                    await asyncio.sleep(0)
                elif step == "flush":
                    try:
                        await store.flush()
                    except StoreError:
                        assert broken
                elif (step == "break") is not broken:
                    broken = not broken
                    trigger = "CREATE TRIGGER broken BEFORE UPDATE ON jobs BEGIN SELECT RAISE(ABORT, 'no luck'); END"
                    sql(path, trigger if broken else "DROP TRIGGER broken")
            if broken:
                sql(path, "DROP TRIGGER broken")
            await store.flush()
            for job_id, job in jobs.items():
                stored = await found(store, job_id)
                assert (stored.end, stored.frames) == (job.end, len(job.params))
                assert {name: getattr(stored, name) for name in job.changes} == job.changes
                assert await everything(store, job_id) == job.entries
                assert await store.params(job_id, range(99)) == dict(enumerate(job.params))
        finally:
            await store.close()


def test_it_is_a_store() -> None:
    """For the type checker."""
    store: Store = SqliteStore("jobs.db")
    assert store.backlog == 0


async def test_waiting_for_a_command_in_a_cancelled_scope_does_not_spin(store: SqliteStore) -> None:
    loop = asyncio.get_running_loop()
    begun, proceed = asyncio.Event(), threading.Event()
    selector = loop._selector  # type: ignore[attr-defined]
    turns, select = 0, selector.select

    def count(timeout: float | None = None) -> Any:
        nonlocal turns
        turns += 1
        return select(timeout)

    def run(_connection: sqlite3.Connection, _ends: dict[str, int]) -> bool:
        loop.call_soon_threadsafe(begun.set)
        return proceed.wait(30)

    undone = asyncio.Event()
    with anyio.CancelScope() as scope:  # noqa: TID251 - as the code of users may

        async def cancel() -> None:
            await begun.wait()
            scope.cancel()
            selector.select = count
            await asyncio.sleep(0.2)
            del selector.select
            proceed.set()

        cancelling = asyncio.create_task(cancel())
        await store._writer.command(run, lambda *_: loop.call_soon_threadsafe(undone.set))
    await cancelling
    assert scope.cancelled_caught
    assert turns < 100
    async with asyncio.timeout(30):
        await undone.wait()
