"""The locks that tell who is alive; those of the process do what those of open files do."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from dfm_async.model.status import JobStatus
from dfm_async.store.processes import Locks, OfdLocks, ProcessLocks, open_locks
from dfm_async.store.sqlite import SqliteStore
from tests.store.helpers import found, new_job
from tests.support.processes import ROOT, run_python

KINDS = [OfdLocks, ProcessLocks]
Kind = type[OfdLocks] | type[ProcessLocks]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def other_process(kind: Kind, path: str, byte: int) -> tuple[bool, bool]:
    """Whether another process sees the lock as held, and can acquire it."""
    code = f"""
from dfm_async.store.processes import {kind.__name__} as Locks
locks = Locks({path!r})
print(locks.held({byte}), locks.acquire({byte}))
"""
    done = run_python("-c", code, cwd=ROOT)
    held, acquired = done.stdout.split()
    return held == "True", acquired == "True"


def test_a_lock_is_held_by_one_until_it_is_closed(kind: Kind, path: str) -> None:
    first, second = kind(path), kind(path)
    try:
        assert first.acquire(5)
        assert first.acquire(5), "it is ours already"
        assert second.acquire(1 << 40)
        for locks in first, second:
            assert [locks.held(byte) for byte in (4, 5, 6, 1 << 40)] == [False, True, False, True]
        assert not second.acquire(5)
        assert other_process(kind, path, 5) == (True, False)
        second.close()
        assert first.held(5), "the other's end changes nothing"
        assert other_process(kind, path, 5) == (True, False)
        assert not first.held(1 << 40)
        first.release(5)
        assert not first.held(5)
        assert other_process(kind, path, 5) == (False, True)
    finally:
        first.close()
        second.close()


def test_locks_can_be_closed_twice_and_raise_afterwards(kind: Kind, path: str) -> None:
    locks = kind(path)
    locks.acquire(1)
    locks.close()
    locks.close()
    with pytest.raises(ValueError):
        locks.held(1)
    assert other_process(kind, path, 1) == (False, True)


def test_the_descriptor_is_not_inherited(kind: Kind, path: str) -> None:
    locks = kind(path)
    try:
        assert not os.get_inheritable(locks._fd if isinstance(locks, OfdLocks) else locks._file.fd)
        assert os.stat(path).st_mode & 0o777 == 0o600
    finally:
        locks.close()


async def test_waiting_for_a_lock_ends_with_its_holder(kind: Kind, path: str) -> None:
    code = f"""
import sys
from dfm_async.store.processes import {kind.__name__} as Locks
locks = Locks({path!r})
print(locks.acquire(3), flush=True)
sys.stdin.read()
"""
    pipe = asyncio.subprocess.PIPE
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdin=pipe, stdout=pipe)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"True\n"
    locks = kind(path)
    try:
        assert locks.held(3)
        waiting = asyncio.create_task(asyncio.to_thread(locks.wait, 3))
        await asyncio.sleep(0)
        holder.kill()
        await waiting
        assert not locks.held(3)
    finally:
        locks.close()
        await holder.communicate()


def test_locks_of_open_files_are_used_on_linux_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Locks] = [open_locks(path)]
    monkeypatch.setattr(sys, "platform", "darwin")  # which has F_OFD_SETLK, but another struct flock
    found.append(open_locks(path))
    for locks in found:
        locks.close()
    assert [type(locks) for locks in found] == [OfdLocks, ProcessLocks]


async def test_stores_work_with_locks_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.store.sqlite.open_locks", ProcessLocks)
    first, second = SqliteStore(tmp_path / "jobs.db"), SqliteStore(tmp_path / "jobs.db")
    await first.open()
    await second.open()
    try:
        await first.create(new_job("j"))
        assert (await found(second)).status is JobStatus.SUBMITTED
        await first.close()
        assert (await found(second)).status is JobStatus.INTERRUPTED
        assert (await second.take_over("j")).owner.mine
    finally:
        await first.close()
        await second.close()
