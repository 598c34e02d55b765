"""Opening, closing, writing and reading a store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import re
import threading
from pathlib import Path

import pytest

from dfm_async.errors import StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store import GroupCommitStore, Store, open_store
from dfm_async.store.processes import OfdLocks
from dfm_async.store.queries import find_job
from dfm_async.store.sqlite import SqliteStore
from tests.store.conftest import Opener
from tests.store.helpers import entry, found, new_job, row, run_unclosed, sql
from tests.support.processes import ROOT, run_python

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
    ["jobs.db", "", "sqlite:", "sqlite://jobs.db", "sqlite:///", "sqlite:///:memory:", "mysql:///x", "SQLITE:///x",
     "sqlite:///jobs.db?mode=memory"],
)  # fmt: skip
def test_other_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(StoreError, match=r"sqlite:///jobs\.db"):
        open_store(url)


def test_guide_names_what_a_store_for_another_database_implements() -> None:
    page = (ROOT / "docs" / "durable-jobs.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Stores for other databases")
    named = set(re.findall(r"`(\w+)`", "".join(line for line in section.splitlines() if line.startswith("| `"))))
    left = set()
    for name, method in vars(Store).items():
        ours = getattr(GroupCommitStore, name, None)
        if inspect.isfunction(method) and not name.startswith("_"):
            left |= {name} if ours is None or "raise NotImplementedError" in inspect.getsource(ours) else set()
    assert named == left | {"_notify_followers"}


def test_making_no_store_does_not_load_the_database() -> None:
    code = "import sys, dfm_async.store.base, dfm_async.store; print({'sqlite3', 'aiosqlite'} & set(sys.modules))"
    done = run_python("-c", code, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_store_without_its_extra_names_what_to_install() -> None:
    code = """
import sys

sys.modules["aiosqlite"] = None
from dfm_async import Federation, Session
from dfm_async.errors import StoreError

try:
    Session(Federation("empty"), store="sqlite:///jobs.db")
except StoreError as error:
    print(error)
"""
    done = run_python("-c", code, cwd=ROOT)
    expected = "a store needs aiosqlite. pip install '.[sqlite]' in a checkout of dfm_async"
    assert done.stdout.strip() == f"store sqlite:///jobs.db: {expected}"


# opening and closing


async def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 100)
    with pytest.raises(StoreError, match="not an SQLite database") as caught:
        await SqliteStore(path).open()
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"Dear diary, " * 100
    assert os.listdir(path.parent) == [path.name]


async def test_a_database_of_somebody_else_is_refused_and_left_alone(path: Path) -> None:
    sql(path, "CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a store of jobs"):
        await SqliteStore(path).open()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


async def test_missing_folder_of_a_store_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*folder exists"):
        await SqliteStore(tmp_path / "nowhere" / "jobs.db").open()


async def test_folder_in_place_of_the_file_is_reported(tmp_path: Path) -> None:
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


async def test_two_that_close_at_the_same_time_both_see_it_closed(store: SqliteStore) -> None:
    await asyncio.gather(store.close(), store.close())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dfm-store")]


def test_a_store_that_nobody_closes_does_not_keep_the_interpreter(path: Path) -> None:
    assert run_unclosed(path, "await store.flush()").stderr == ""


# writing and reading


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


async def test_a_large_job_is_deleted_while_others_commit(path: Path, store: SqliteStore) -> None:
    await store.create(new_job("large"))
    await store.create(new_job("other"))
    store.add_params("large", 0, [row(number) for number in range(20_000)])
    store.update("large", status=JobStatus.FINISHED, finished=1.0)
    await store.flush()
    ends: list[dict[str, int]] = []
    store.on_commit = ends.append
    pruning = asyncio.create_task(store.prune(2.0))
    for offset in range(10):
        store.append("other", entry(offset))
        await store.flush()
    assert not pruning.done()
    assert [job.job_id for job in await pruning] == ["large"]
    assert ends == [{"other": offset} for offset in range(1, 11)]
    assert sql(path, "SELECT (SELECT count(*) FROM params), (SELECT count(*) FROM garbage)") == [(0, 0)]


async def test_what_is_left_of_a_deleted_job_after_a_crash_is_deleted_later(path: Path, store: SqliteStore) -> None:
    await store.create(new_job("j"))
    store.add_params("j", 0, [row(0)])
    await store.flush()
    sql(path, "INSERT INTO garbage SELECT job FROM jobs")
    sql(path, "DELETE FROM jobs")
    assert await store.prune(0.0) == []
    assert sql(path, "SELECT (SELECT count(*) FROM params), (SELECT count(*) FROM garbage)") == [(0, 0)]
