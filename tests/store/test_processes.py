"""Owners in several processes: death, fencing, following."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from dfm_async.errors import JobOwned, StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store import processes
from dfm_async.store.sqlite import SqliteStore
from tests.store.conftest import Opener, Starter
from tests.store.helpers import entry, found, new_job, sql

# death


async def test_an_owner_that_is_stopped_is_alive(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    child.process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
    job = await found(store)
    assert (job.status, job.owner.alive) == (JobStatus.SUBMITTED, True)
    with pytest.raises(JobOwned):
        await store.take_over("j")
    child.process.send_signal(signal.SIGCONT)
    assert await child.tell("append j 3") == "ok"


async def test_a_forked_child_does_not_keep_its_dead_parent_alive(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    grandchild = int(await child.tell("fork"))
    try:
        async with store.follow((await found(store)).owner.fence) as follower:
            child.kill()
            while await follower.changed():
                pass
        os.kill(grandchild, 0)
        assert (await found(store)).status is JobStatus.INTERRUPTED
    finally:
        os.kill(grandchild, signal.SIGKILL)


async def test_a_writer_without_a_pause_lets_others_write(start: Starter, opened: Opener) -> None:
    await start("write")
    store = await opened(busy_timeout=2.0)
    await store.create(new_job("mine"))
    for offset in range(20):
        store.append("mine", entry(offset))
        await store.flush()
    assert (await found(store, "mine")).end == 20


# following


async def test_commits_without_a_waiter_are_reported_once(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    async with store.follow((await found(store)).owner.fence) as follower:
        assert await follower.changed()
        for _ in range(10):
            await child.tell("append j 1")
        assert await follower.changed()
        waiting = asyncio.create_task(follower.changed())
        await found(store)
        assert not waiting.done()
        await child.tell("append j 1")
        assert await waiting


async def test_a_follower_that_does_not_read_is_not_waited_for(store: SqliteStore, opened: Opener) -> None:
    other = await opened()
    async with other.follow(store.fence) as follower:
        assert await follower.changed()
        assert store._followers is not None
        for _ in range(2000):  # more than the socket takes
            store._followers.notify()
        assert await follower.changed()
        await store.close()
        while await follower.changed():
            pass


async def test_a_follower_may_stop_waiting_and_leave(store: SqliteStore, opened: Opener) -> None:
    other = await opened()
    async with other.follow(store.fence) as follower:
        assert await follower.changed()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(follower.changed(), 0.01)
    assert store._followers is not None
    for _ in range(3):
        await asyncio.sleep(0)
    assert not store._followers._connections


async def test_store_that_is_closed_while_it_follows_raises(store: SqliteStore, opened: Opener) -> None:
    other = await opened()
    async with other.follow(store.fence) as follower:
        assert await follower.changed()
        await other.close()
        await store.close()
        with pytest.raises(StoreError, match="closed while it followed"):
            await follower.changed()


async def test_unreachable_owner_is_reported(path: Path, store: SqliteStore, opened: Opener) -> None:
    other = await opened()
    sql(path, "UPDATE owners SET address = ? WHERE fence = ?", b"\0nobody", store.fence)
    with pytest.raises(StoreError, match="alive but cannot be reached"):
        async with other.follow(store.fence):
            pass


async def test_owners_of_other_users_are_not_followed(
    store: SqliteStore, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await opened()
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with pytest.raises(StoreError, match="another user"):
        async with other.follow(store.fence):
            pass


async def test_followers_of_other_users_receive_nothing(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store._followers is not None
    assert store._followers.address is not None
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.setblocking(False)
        stranger.connect(store._followers.address)
        assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""


async def test_without_abstract_addresses_following_is_refused(
    store: SqliteStore, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ABSTRACT", False)
    other = await opened()
    with pytest.raises(StoreError, match="on this platform"):
        async with store.follow(other.fence):
            pass
