"""The one task that writes: whatever was queued during a commit goes into the next one."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from functools import partial
from typing import Any, Protocol

from dfm_async.base.completion import completed
from dfm_async.errors import StoreError
from dfm_async.store.batch import Batch, Command, Committed, Run
from dfm_async.store.database import Database, identity
from dfm_async.store.ownership import Ownership

__all__ = ["Listener", "Writer"]


class Listener(Protocol):
    """Hears what became of the commits."""

    def committed(self, ends: dict[str, int]) -> None:
        """A commit is done."""
        ...

    def fenced(self, job_id: str) -> None:
        """Writes for a job were left out."""
        ...

    def gap(self, job_id: str, error: StoreError) -> None:
        """Writes for a job were left out, because others are missing before them."""
        ...

    def failed(self, error: StoreError) -> None:
        """A commit failed."""
        ...


class Writer:
    """Commits batches, one after the other, without waiting in between.

    When a commit fails, its writes stay at the head of the queue, unless the listener discards them. They are tried
    again with the next flush or command, and when twice as much is queued: trying with every write would do the work of
    all before it each time.
    """

    def __init__(self, database: Database, ownership: Ownership, listener: Listener) -> None:
        self.database = database
        self._ownership = ownership
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._file = identity(database.path)
        self.batch = Batch()
        self._committing: Batch | None = None
        self._retry_size = 0
        self._wake: asyncio.Future[None] | None = None
        self._closing = False
        self._lost: StoreError | None = None
        self._task = self._loop.create_task(self._run(), name="dfm-store-writer")

    @property
    def backlog(self) -> int:
        """About how many bytes are queued or being committed."""
        return (0 if self._committing is None else self._committing.size) + self.batch.size

    @property
    def ended(self) -> bool:
        """Whether nothing will be committed any more."""
        return self._closing or self._task.done()

    def wake(self) -> None:
        """Something was added to :attr:`batch`."""
        wake = self._wake
        if wake is not None and self._ready:
            self._wake = None
            if not wake.done():
                wake.set_result(None)

    @property
    def _ready(self) -> bool:
        batch = self.batch
        if batch.commands or self._closing:
            return True
        return bool(batch.writes) and batch.size >= self._retry_size

    async def command(self, run: Run, undo: Run | None = None) -> Any:
        """Run something in the next transaction, behind what was queued before, and wait for the commit.

        Cancelled, it changes nothing: what has not begun is withdrawn, also while another process has the database
        locked; what has is waited for, and undone by the next transaction.
        """
        return await self.outcome(self.queue(run), undo)

    async def outcome(self, command: Command, undo: Run | None = None) -> Any:
        """Wait for a command, as :meth:`command` does."""
        try:
            return await asyncio.shield(command.outcome)
        except asyncio.CancelledError:
            if command.withdraw():
                command.outcome.cancel()
                raise
            try:
                await completed(_settled(command.outcome))  # soon: its transaction has the lock
            finally:
                if command.outcome.exception() is None and command.outcome.result() and undo is not None:
                    self.queue(undo)
            raise

    def queue(self, run: Run) -> Command:
        """Add something to the next transaction."""
        command = Command(run)
        # Nobody may wait for it any more when it fails.
        command.outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.batch.commands.append(command)
        self.wake()
        return command

    async def flush(self) -> None:
        """Waits until everything queued before is committed."""
        if self._committing is not None or self.batch:
            await self.command(_nothing)

    async def close(self) -> None:
        """Commits the rest and ends the task.

        Raises:
            StoreError: not everything could be committed.
        """
        self._closing = True
        self.wake()
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._lost is not None:
            raise self._lost

    async def _run(self) -> None:
        try:
            while True:
                if not self._ready:
                    wake = self._wake = self._loop.create_future()
                    await wake
                if not self.batch:
                    return  # closing
                if not await self._commit() and self._closing and not self.batch.commands:
                    return
        except asyncio.CancelledError:  # the loop ends, and nobody has closed the store
            self._closing = True
            if self.batch:
                await self._commit(wait=False)
            raise
        finally:
            self._end()

    async def _commit(self, *, wait: bool = True) -> bool:
        batch, self.batch = self.batch, Batch()
        self._committing = batch
        commit = partial(batch.commit, fence=self._ownership.fence, path=self.database.path, check=self._check)
        try:
            await self.database.run(commit, wait=wait)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self.database.run(_wait)  # the commit goes on: this runs behind it
            if batch.committed is None:
                self._failed(batch, None)
            else:
                self._tell(batch, batch.committed)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and nothing is lost
            self._failed(batch, error)
            return False
        if batch.committed is not None:
            self._tell(batch, batch.committed)
        return True

    def _check(self) -> None:
        """SQLite would go on writing to a file that was deleted."""
        path = self.database.path
        try:
            same = identity(path) == self._file
        except FileNotFoundError:
            same = False
        if not same:
            raise StoreError(
                path, "the file was deleted or replaced while it was open", "Put it back, or start again with a new one"
            )

    def _tell(self, batch: Batch, done: Committed) -> None:
        self._committing = None
        self._retry_size = 0
        gap = done.gaps[0][1] if done.gaps else None
        for command in batch.commands:
            command.done(command.result, command.error or (gap if command.run is _nothing else None))
        if done.ends:
            self._listener.committed(done.ends)
        for job_id in done.fenced:
            self._listener.fenced(job_id)
        for job_id, error in done.gaps:
            self._listener.gap(job_id, error)

    def _failed(self, batch: Batch, cause: Exception | None) -> None:
        if isinstance(cause, StoreError):
            error = cause
        else:
            why = "the loop ends" if cause is None else f"{type(cause).__name__}: {cause}"
            error = StoreError(self.database.path, f"a commit failed ({why})", "Close the store before the loop ends")
            error.__cause__ = cause
        if self._closing and batch.writes:
            self._lost = error
        commands, batch.commands = batch.commands, []
        batch.merge(self.batch)
        self.batch = batch
        self._committing = None
        for command in commands:
            command.done(None, error)
        self._listener.failed(error)
        self._retry_size = 2 * self.batch.size

    def _end(self) -> None:
        """Tells what is left in the queue, because a commit failed or the loop ends."""
        if not self.batch:
            return
        error = StoreError(
            self.database.path,
            f"it was closed before the last {self.batch.size:,} bytes were committed",
            "See the errors before this one",
        )
        error.__cause__ = self._lost
        self._lost = error
        for command in self.batch.commands:
            command.done(None, error)
        self._listener.failed(error)


async def _settled(outcome: asyncio.Future[Any]) -> None:
    await asyncio.wait([outcome])


def _wait(_connection: sqlite3.Connection) -> None:
    """Does nothing, behind everything that was asked for before."""


def _nothing(_connection: sqlite3.Connection, _ends: dict[str, int]) -> None:
    """What a flush does: its commit is all that matters."""
