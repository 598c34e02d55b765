"""Owners in several processes: death, fencing, following."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from pathlib import Path

import pytest

from dfm_async.errors import JobOwned, StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store import processes
from dfm_async.store.sqlite import SqliteStore
from tests.store.conftest import Opener, Starter
from tests.store.helpers import entry, everything, found, new_job, row, sql

# death


@pytest.mark.parametrize("seed", range(5))
async def test_an_owner_that_is_killed_leaves_a_consistent_job(
    path: Path, start: Starter, opened: Opener, seed: int
) -> None:
    child = await start("write")
    store = await opened()
    async with store.follow((await found(store)).owner.fence) as follower:
        for _ in range(random.Random(seed).randrange(1, 40)):
            assert await follower.changed()
        child.kill()
        while await follower.changed():
            pass
    job = await found(store)
    assert job.status is JobStatus.INTERRUPTED
    entries = await everything(store)
    assert entries
    position = 0
    for item in entries:
        assert item == entry(position, item.count)
        position += item.count
    assert position == job.end
    assert await store.params("j", range(job.frames + 10)) == {number: row(number) for number in range(job.frames)}
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]
    assert (await store.take_over("j")).end == job.end
    store.append("j", entry(job.end))
    await store.flush()
    assert (await found(store)).end == job.end + 1


async def test_a_job_is_interrupted_at_once_when_its_owner_is_killed(start: Starter, store: SqliteStore) -> None:
    child = await start()
    assert await child.tell("create j") == "True"
    assert await child.tell("status j running") == "ok"
    job = await found(store)
    assert (job.status, job.owner.alive, job.owner.mine) == (JobStatus.RUNNING, True, False)
    assert job.owner.pid == int(await child.tell("pid"))
    child.kill()
    await child.process.wait()
    job = await found(store)
    assert (job.status, job.owner.alive) == (JobStatus.INTERRUPTED, False)
    assert [job.status for job in await store.jobs()] == [JobStatus.INTERRUPTED]


async def test_a_job_that_ended_stays_ended_when_its_owner_dies(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    await child.tell("status j finished")
    child.kill()
    await child.process.wait()
    assert (await found(store)).status is JobStatus.FINISHED


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


# taking over


async def test_only_one_takes_a_job_over(start: Starter) -> None:
    owner = await start()
    await owner.tell("create j")
    await owner.tell("append j 5")
    others = [await start() for _ in range(3)]
    assert await others[0].tell("take j") == "JobOwned"
    assert await others[0].tell("delete j") == "JobOwned"
    owner.kill()
    await owner.process.wait()
    outcomes = await asyncio.gather(*(other.tell("take j") for other in others))
    assert sorted(outcomes) == ["5", "JobOwned", "JobOwned"]


async def test_a_closed_owner_gives_its_jobs_up(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    assert await child.tell("close") == "ok"
    assert (await found(store)).status is JobStatus.INTERRUPTED
    await store.delete("j")
    assert await store.find("j") is None


async def test_many_processes_create_one_store_at_the_same_time(path: Path, start: Starter, opened: Opener) -> None:
    children = await asyncio.gather(*(start() for _ in range(6)))
    await asyncio.gather(*(child.tell("create", f"j{number}") for number, child in enumerate(children)))
    await asyncio.gather(*(child.tell("append", f"j{number}", 100) for number, child in enumerate(children)))
    jobs = await (await opened()).jobs()
    assert {job.job_id: job.end for job in jobs} == {f"j{number}": 100 for number in range(6)}
    assert len({job.owner.fence for job in jobs}) == 6


async def test_a_writer_without_a_pause_lets_others_write(start: Starter, opened: Opener) -> None:
    await start("write")
    store = await opened(busy_timeout=2.0)
    await store.create(new_job("mine"))
    for offset in range(20):
        store.append("mine", entry(offset))
        await store.flush()
    assert (await found(store, "mine")).end == 20


# following


async def test_follower_is_notified_of_every_commit_and_of_the_end(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    async with store.follow((await found(store)).owner.fence) as follower:
        assert await follower.changed()
        for number in range(1, 6):
            await child.tell("append j 1")
            assert await follower.changed()
            assert (await found(store)).end == number
        waiting = asyncio.create_task(follower.changed())
        await child.tell("status j finished")
        assert await waiting
        await child.tell("close")
        assert not await follower.changed()
        assert not await follower.changed()
    assert (await found(store)).status is JobStatus.FINISHED


async def test_reading_behind_each_change_misses_nothing(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    ends: list[int] = []

    async def read() -> None:
        async with store.follow((await found(store)).owner.fence) as follower:
            more = True
            while more:
                more = await follower.changed()
                while page := await store.read("j", ends[-1] + 1 if ends else 0):
                    ends.extend(item.first for item in page)

    reading = asyncio.create_task(read())
    for _ in range(20):
        await child.tell("append j 7")
    child.kill()
    await reading
    assert ends == list(range(140))


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


async def test_ended_owner_is_reported_at_once(start: Starter, store: SqliteStore) -> None:
    child = await start()
    await child.tell("create j")
    child.kill()
    await child.process.wait()
    async with store.follow((await found(store)).owner.fence) as follower:
        assert not await follower.changed()
    async with store.follow(4711) as follower:
        assert not await follower.changed()


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
