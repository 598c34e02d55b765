"""Stores that tests open, and processes that own jobs."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from dfm_async.store.base import Entry, NewJob, Store, StoredJob
from dfm_async.store.database import Database
from dfm_async.store.sqlite import SqliteStore
from tests.support.processes import ROOT, run_python


def new_job(job_id: str, plan: bytes = b"plan") -> NewJob:
    return NewJob(job_id=job_id, plan=plan, fingerprint="fingerprint", options=b"options", created=12.5)


def entry(first: int, count: int = 1) -> Entry:
    """An entry that shows by its content where it belongs."""
    return Entry(first, count, first % 7, b"head %d" % first, b"payload %d" % first)


def database(store: SqliteStore) -> Database:
    """The connection that writes."""
    assert store._database is not None
    return store._database


def row(number: int) -> bytes:
    return b"params %d" % number


async def found(store: Store, job_id: str = "j") -> StoredJob:
    job = await store.find(job_id)
    assert job is not None
    return job


async def everything(store: Store, job_id: str = "j") -> list[Entry]:
    """All entries of a job, read page by page."""
    entries: list[Entry] = []
    while page := await store.read(job_id, entries[-1].first + entries[-1].count if entries else 0):
        entries += page
    return entries


def sql(path: Path, statement: str, *arguments: Any) -> list[Any]:
    """Does something to the file behind the store's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, arguments).fetchall()


def run_unclosed(path: Path, last: str) -> subprocess.CompletedProcess[str]:
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
    return run_python("-c", code, cwd=ROOT)


class Child:
    """A process with a store of its own; does what it is told, line by line. See ``child.py``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, url: str, *words: str) -> Child:
        command = [sys.executable, "-m", "tests.store.child", url, *words]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        child = cls(process)
        assert await child.line() == "ready"
        return child

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def tell(self, *words: Any) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        return await self.line()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    async def kill_owner(self, store: Store, job_id: str = "j") -> None:
        """Kill it, and wait until another store knows that the owner of the job is dead."""
        fence = (await found(store, job_id)).owner.fence
        self.kill()
        await self.process.wait()
        async with store.follow(fence) as follower:
            while await follower.changed():
                pass

    async def end(self) -> None:
        if self.process.returncode is None:
            self.kill()
        await self.process.communicate()
