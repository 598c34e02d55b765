"""Stores that tests open, and processes that own jobs."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from dfm_async.store.base import Entry, NewJob, StoredJob
from dfm_async.store.sqlite import SqliteStore

ROOT = Path(__file__).resolve().parents[2]


def new_job(job_id: str, plan: bytes = b"plan") -> NewJob:
    return NewJob(job_id, plan, "fingerprint", b"options", 12.5)


def entry(first: int, count: int = 1) -> Entry:
    """An entry that shows by its content where it belongs."""
    return Entry(first, count, first % 7, b"head %d" % first, b"payload %d" % first)


def row(number: int) -> bytes:
    return b"params %d" % number


async def found(store: SqliteStore, job_id: str = "j") -> StoredJob:
    job = await store.find(job_id)
    assert job is not None
    return job


async def everything(store: SqliteStore, job_id: str = "j") -> list[Entry]:
    """All entries of a job, read page by page."""
    entries: list[Entry] = []
    while page := await store.read(job_id, entries[-1].first + entries[-1].count if entries else 0):
        entries += page
    return entries


def sql(path: Path, statement: str, *arguments: Any) -> list[Any]:
    """Does something to the file behind the store's back."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


class Child:
    """A process with a store of its own; does what it is told, line by line. See ``child.py``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, path: Path, *words: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.store.child",
            str(path),
            *words,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
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

    async def end(self) -> None:
        if self.process.returncode is None:
            self.kill()
        await self.process.communicate()
