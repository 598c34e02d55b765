"""Commits of a store: their order, their failures, and stores that have lost a job."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from dfm_async.errors import StoreError
from dfm_async.store.base import Entry, Store
from dfm_async.store.sqlite import SqliteStore
from tests.store.conftest import Opener
from tests.store.helpers import database, entry, everything, found, new_job, run_unclosed, sql
from tests.support.stores import locked

# commits


# fencing


# errors


@pytest.fixture
def errors(store: SqliteStore) -> list[StoreError]:
    told: list[StoreError] = []
    store.on_error = told.append
    return told


_BREAK = "CREATE TRIGGER broken BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'no luck'); END"


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
        await store._writer.command(run, lambda _: lambda *_: loop.call_soon_threadsafe(undone.set))
    await cancelling
    assert scope.cancelled_caught
    assert turns < 100
    async with asyncio.timeout(30):
        await undone.wait()
