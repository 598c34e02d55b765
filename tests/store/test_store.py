"""What is written can be read; what cannot be written is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async.errors import JobNotFound, JobOwned, StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store import open_store
from dfm_async.store.base import Entry, Store, StoredJob
from dfm_async.store.liveness import OfdLocks
from dfm_async.store.reading import find_job
from dfm_async.store.schema import VERSION
from dfm_async.store.sqlite import SqliteStore
from tests.store.conftest import Opener
from tests.store.helpers import ROOT, entry, everything, found, new_job, row, sql

# URLs


@pytest.mark.parametrize(
    ("url", "path"),
    [("sqlite:///jobs.db", os.path.abspath("jobs.db")), ("sqlite:////var/lib/jobs.db", "/var/lib/jobs.db")],
)
def test_three_slashes_are_relative_and_four_absolute(url: str, path: str) -> None:
    store = open_store(url)
    assert isinstance(store, SqliteStore)
    assert store.path == path


@pytest.mark.parametrize(
    "url",
    ["jobs.db", "", "sqlite:", "sqlite://jobs.db", "sqlite:///", "sqlite:///:memory:", "postgres:///x", "SQLITE:///x",
     "sqlite:///jobs.db?mode=memory"],
)  # fmt: skip
def test_other_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(StoreError, match=r"sqlite:///jobs\.db"):
        open_store(url)


def test_making_no_store_does_not_load_the_database() -> None:
    code = "import sys, dfm_async.store.base, dfm_async.store; print({'sqlite3', 'aiosqlite'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_store_without_its_extra_says_what_to_install() -> None:
    code = """
import sys

sys.modules["aiosqlite"] = None
from dfm_async import Federation, Session, StoreError

try:
    Session(Federation("empty"), store="sqlite:///jobs.db")
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = "a store needs aiosqlite. pip install '.[sqlite]' in a checkout of dfm_async"
    assert done.stdout.strip() == f"store sqlite:///jobs.db: {expected}"


# opening and closing


async def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 100)
    with pytest.raises(StoreError, match="no SQLite database") as caught:
        await SqliteStore(path).open()
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"Dear diary, " * 100
    assert os.listdir(path.parent) == [path.name]


async def test_a_database_of_somebody_else_is_refused_and_left_alone(path: Path) -> None:
    sql(path, "CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="no store of jobs"):
        await SqliteStore(path).open()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(("version", "advice"), [(VERSION + 1, "newer"), (VERSION - 1, "that wrote it")])
async def test_a_store_of_another_version_is_refused(path: Path, opened: Opener, version: int, advice: str) -> None:
    await (await opened()).close()
    sql(path, "UPDATE meta SET version = ?", version)
    with pytest.raises(StoreError, match=f"version {version}.*{advice}"):
        await SqliteStore(path).open()


async def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*folder exists"):
        await SqliteStore(tmp_path / "nowhere" / "jobs.db").open()


async def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        await SqliteStore(tmp_path).open()


async def test_an_empty_file_becomes_a_store(path: Path, opened: Opener) -> None:
    path.touch()
    assert await (await opened()).create(new_job("j"))


async def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b?c#d%20é.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    assert path.exists()


async def test_only_the_user_can_read_the_files(path: Path, store: SqliteStore) -> None:
    await store.create(new_job("j"))
    modes = {name: os.stat(path.parent / name).st_mode & 0o777 for name in os.listdir(path.parent)}
    assert modes == dict.fromkeys(["jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db-lock"], 0o600)


def _descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


async def test_closing_leaves_nothing_behind(path: Path) -> None:
    descriptors, threads, tasks = _descriptors(), threading.active_count(), asyncio.all_tasks()
    store = SqliteStore(path)
    await store.open()
    await store.create(new_job("j"))
    async with store.follow(store.fence) as follower:
        assert await follower.changed()
        store.append("j", entry(0))
    await store.close()
    await store.close()
    assert _descriptors() == descriptors
    assert threading.active_count() == threads
    assert asyncio.all_tasks() == tasks
    assert sorted(os.listdir(path.parent)) == ["jobs.db", "jobs.db-lock"]


async def test_an_opening_that_fails_leaves_nothing_behind(path: Path) -> None:
    path.write_bytes(b"no database" * 100)
    descriptors, threads, tasks = _descriptors(), threading.active_count(), asyncio.all_tasks()
    with pytest.raises(StoreError):
        await SqliteStore(path).open()
    gc.collect()
    assert _descriptors() == descriptors
    assert threading.active_count() == threads
    assert asyncio.all_tasks() == tasks


async def test_closing_commits_what_is_queued(opened: Opener) -> None:
    store = await opened()
    await store.create(new_job("j"))
    for offset in range(100):
        store.append("j", entry(offset))
    await store.close()
    assert await everything(await opened()) == [entry(offset) for offset in range(100)]


async def test_two_that_close_at_the_same_time_both_see_it_closed(store: SqliteStore) -> None:
    await asyncio.gather(store.close(), store.close())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dfm-store")]


async def test_a_closed_store_says_so(store: SqliteStore) -> None:
    await store.close()
    with pytest.raises(StoreError, match="not open"):
        store.append("j", entry(0))
    with pytest.raises(StoreError, match="not open"):
        store.add_params("j", 0, [])
    with pytest.raises(StoreError, match="not open"):
        store.update("j")
    for wait in (store.flush, store.jobs, lambda: store.find("j"), lambda: store.create(new_job("j"))):
        with pytest.raises(StoreError, match="not open"):
            await wait()


async def test_a_store_can_be_opened_again(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    first = store.fence
    await store.close()
    await store.open()
    assert store.fence > first
    assert (await found(store)).status is JobStatus.INTERRUPTED


def _run_unclosed(path: Path, last: str) -> subprocess.CompletedProcess[str]:
    code = f"""
import asyncio
from dfm_async.store.sqlite import SqliteStore
from tests.store.helpers import entry, new_job, sql
store = SqliteStore({str(path)!r})
async def main():
    await store.open()
    await store.create(new_job("j"))
    {last}
asyncio.run(main())
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)


def test_a_store_that_nobody_closes_does_not_keep_the_interpreter(path: Path) -> None:
    assert _run_unclosed(path, "await store.flush()").stderr == ""


# writing and reading


async def test_a_new_job_is_there_as_it_was_given(path: Path, store: SqliteStore) -> None:
    assert await store.create(new_job("j"))
    job = await found(store)
    assert job == StoredJob(
        "j", b"plan", "fingerprint", b"options", 12.5, None, JobStatus.SUBMITTED, None, 0, 0, False, 0, 0, job.owner
    )
    assert (job.owner.fence, job.owner.pid, job.owner.alive, job.owner.mine) == (store.fence, os.getpid(), True, True)
    assert sql(path, "SELECT job_id FROM jobs") == [("j",)], "it is committed when create returns"


async def test_an_id_that_is_taken(store: SqliteStore) -> None:
    outcomes = await asyncio.gather(*(store.create(new_job("j", b"%d" % number)) for number in range(5)))
    assert outcomes == [True, False, False, False, False]
    assert (await found(store)).plan == b"0"


async def test_jobs_come_in_the_order_of_their_creation(store: SqliteStore) -> None:
    for job_id in "zebra", "ant", "mole":
        await store.create(new_job(job_id))
    await store.delete("ant")
    await store.create(new_job("ant"))
    assert [job.job_id for job in await store.jobs()] == ["zebra", "mole", "ant"]


async def test_what_is_not_there(store: SqliteStore) -> None:
    assert await store.find("j") is None
    assert await store.jobs() == []
    assert await store.read("j", 0) == []
    assert [e async for e in store.heads("j")] == []
    assert await store.params("j", [0, 1]) == {}
    for refused in store.take_over, store.delete:
        with pytest.raises(JobNotFound):
            await refused("j")


async def test_changes_keep_what_they_do_not_name(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    store.update("j", status=JobStatus.RUNNING)
    store.update("j", stopped=True)
    await store.flush()
    store.update("j", status=JobStatus.ABORTED, reason="why", finished=99.0)
    await store.flush()
    store.update("j")
    await store.flush()
    job = await found(store)
    assert (job.status, job.stopped, job.reason, job.finished) == (JobStatus.ABORTED, True, "why", 99.0)


async def test_reading_begins_with_the_entry_that_holds_the_offset(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    entries = [entry(0, 3), entry(3, 1), entry(4, 10), entry(14, 2)]
    for item in entries:
        store.append("j", item)
    await store.flush()
    for start, expected in [(0, 0), (2, 0), (3, 1), (4, 2), (13, 2), (14, 3), (15, 3), (16, 4), (99, 4)]:
        assert await store.read("j", start) == entries[expected:]


async def test_reading_gives_about_as_much_as_was_asked_for_but_at_least_one(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    for offset in range(10):
        store.append("j", Entry(offset, 1, 0, b"", bytes(100)))
    await store.flush()
    assert len(await store.read("j", 0, max_bytes=350)) == 3
    assert len(await store.read("j", 0, max_bytes=1)) == 1
    assert len(await store.read("j", 0)) == 10


async def test_heads_come_without_payloads_over_many_pages(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    for offset in range(0, 5002, 2):
        store.append("j", entry(offset, 2))
    await store.flush()
    heads = [item async for item in store.heads("j")]
    assert heads == [Entry(first, 2, first % 7, b"head %d" % first, b"") for first in range(0, 5002, 2)]
    assert [item.first async for item in store.heads("j", 4997)] == [4998, 5000]


async def test_more_parameter_sets_than_a_statement_has_variables(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    store.add_params("j", 0, [row(number) for number in range(40_000)])
    await store.flush()
    assert (await found(store)).frames == 40_000
    rows = await store.params("j", range(-5, 40_005))
    assert rows == {number: row(number) for number in range(40_000)}


async def test_a_deleted_job_is_gone_with_all_it_had(path: Path, store: SqliteStore) -> None:
    for job_id in "j", "k":
        await store.create(new_job(job_id))
        store.append(job_id, entry(0))
        store.add_params(job_id, 0, [row(0)])
    await store.delete("j")
    assert [job.job_id for job in await store.jobs()] == ["k"]
    for table in "jobs", "plans", "params", "entries":
        assert sql(path, f"SELECT count(*) FROM {table}") == [(1,)]
    assert await everything(store, "k") == [entry(0)]


async def test_two_stores_in_one_process_are_two_owners(store: SqliteStore, opened: Opener) -> None:
    await store.create(new_job("j"))
    store.update("j", status=JobStatus.RUNNING)
    await store.flush()
    other = await opened()
    job = await found(other)
    assert (job.owner.mine, job.owner.alive, job.status) == (False, True, JobStatus.RUNNING)
    for refused in other.take_over, other.delete:
        with pytest.raises(JobOwned) as caught:
            await refused("j")
        assert caught.value.pid == os.getpid()
    await store.close()
    assert (await found(other)).status is JobStatus.INTERRUPTED
    taken = await other.take_over("j")
    assert (taken.owner.mine, taken.status) == (True, JobStatus.SUBMITTED)


async def test_a_job_of_ours_can_be_taken_over_with_what_is_queued(store: SqliteStore) -> None:
    await store.create(new_job("j"))
    store.append("j", entry(0, 5))
    assert (await store.take_over("j")).end == 5


async def test_a_job_that_ends_while_it_is_looked_at_is_not_interrupted(path: Path, store: SqliteStore) -> None:
    """Its owner commits the end and dies after the job was read, and before its lock is looked at."""
    await store.create(new_job("j"))

    class Ending(OfdLocks):
        def held(self, byte: int) -> bool:
            sql(path, "UPDATE jobs SET status = 'finished'")
            return False

    locks = Ending(f"{path}-lock")
    try:
        job = await store._reader.run(lambda connection: find_job(connection, locks, 99, "j"))
    finally:
        locks.close()
    assert job is not None
    assert job.status is JobStatus.FINISHED


async def test_owners_that_own_nothing_are_forgotten(path: Path, opened: Opener) -> None:
    for _ in range(3):
        await (await opened()).close()
    store = await opened()
    await store.create(new_job("j"))
    await store.close()
    last = await opened()
    assert [fence for (fence,) in sql(path, "SELECT fence FROM owners")] == [store.fence, last.fence]
    assert last.fence == 5


async def test_a_new_database_next_to_an_old_companion_file(path: Path, store: SqliteStore, opened: Opener) -> None:
    """The counter begins again, the locks do not."""
    for name in "jobs.db", "jobs.db-wal", "jobs.db-shm":
        (path.parent / name).unlink()
    other = await opened()
    assert other.fence != store.fence
    await other.create(new_job("j"))
    assert (await found(other)).status is JobStatus.SUBMITTED


# commits


async def test_every_commit_is_told_with_the_ends_of_its_jobs(store: SqliteStore) -> None:
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


async def test_whoever_lost_a_job_writes_no_more_of_it(path: Path, store: SqliteStore) -> None:
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


async def test_writes_for_a_job_that_is_not_there_are_told(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_what_cannot_be_committed_is_told_and_kept(
    path: Path, store: SqliteStore, errors: list[StoreError]
) -> None:
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
    await asyncio.wait_for(done.wait(), 10)
    await store.flush()
    assert len(await everything(store)) == 3000


async def test_a_store_that_is_closed_with_uncommitted_writes_says_so(
    path: Path, store: SqliteStore, errors: list[StoreError]
) -> None:
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
async def test_a_file_that_was_deleted_is_told(
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


async def test_a_database_that_stays_locked_is_told(path: Path, opened: Opener) -> None:
    store, errors = await opened(busy_timeout=0.05), list[StoreError]()
    store.on_error = errors.append
    await store.create(new_job("j"))
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        store.append("j", entry(0))
        with pytest.raises(StoreError, match="locked"):
            await store.flush()
        assert len(errors) == 1
        assert (await found(store)).end == 0, "reading goes on"
        other.execute("COMMIT")
    finally:
        other.close()
    await store.flush()
    assert (await found(store)).end == 1


async def test_a_full_disk_is_told(path: Path, store: SqliteStore, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))

    def limit(pages: str) -> Any:
        return store._writer.database.run(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}"))

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
async def test_events_with_gaps_are_told_and_left_out(store: SqliteStore, errors: list[StoreError], first: int) -> None:
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


async def test_a_gap_can_be_told_to_the_job_that_has_it(store: SqliteStore, errors: list[StoreError]) -> None:
    gaps: list[str] = []
    store.on_gap = lambda job_id, _error: gaps.append(job_id)
    await store.create(new_job("j"))
    await store.create(new_job("other"))
    store.append("j", entry(5))
    store.append("other", entry(0))
    with pytest.raises(StoreError):
        await store.flush()
    assert (gaps, errors) == (["j"], [])


async def test_parameter_sets_with_gaps_are_told_and_left_out(store: SqliteStore, errors: list[StoreError]) -> None:
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
    monkeypatch.setattr("dfm_async.store.sqlite._LARGEST", 100)
    with pytest.raises(StoreError, match="101 bytes of job j"):
        store.append("j", Entry(0, 1, 0, b"x", bytes(100)))
    with pytest.raises(StoreError, match="101 bytes of job j"):
        store.add_params("j", 0, [b"", bytes(101)])
    assert store.backlog == 0


@pytest.mark.parametrize("turns", range(4))
def test_a_loop_that_ends_commits_what_is_queued(path: Path, turns: int) -> None:
    last = f"store.append('j', entry(0)); [await asyncio.sleep(0) for _ in range({turns})]; store.append('j', entry(1))"
    assert _run_unclosed(path, last).stderr == ""
    assert sql(path, 'SELECT "end" FROM jobs') == [(2,)]


def test_a_loop_that_ends_tells_what_it_could_not_commit(path: Path) -> None:
    await_nothing = f"sql({str(path)!r}, {_BREAK!r}); store.append('j', entry(0))"
    assert "no luck" in _run_unclosed(path, await_nothing).stderr
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
