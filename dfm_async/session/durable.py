"""The jobs of a session that are written down: created, found again, followed, resumed, aborted."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec

from dfm_async.errors import DfmError, JobNotFound, ParameterError, StoreError
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.record import ERRORS_KEPT, JobRecord
from dfm_async.session.journal import History, JobJournal, JobOptions, StoredLog, pack_rows, read_history
from dfm_async.store.base import NewJob, Store, StoredJob
from dfm_async.targets.coordinator import JobRules
from dfm_async.targets.frames import Row
from dfm_async.targets.jobs import JobTable
from dfm_async.wire.codec import Codec

__all__ = ["DurableJobs", "LeftOver"]

_log = logging.getLogger(__name__)

_PLANS: Final = 128

_options: Final = msgspec.msgpack.Decoder(JobOptions)


class LeftOver(msgspec.Struct, frozen=True):
    """An interrupted job that is ours now: what it needs to go on."""

    record: JobRecord
    options: JobOptions
    history: History
    rows: dict[int, Row]
    frames: int
    stopped: bool


class DurableJobs:
    """Connects the jobs of a session with a store.

    Args:
        store: where jobs are written.
        jobs: the jobs of the session.
        spawn: starts a task that the session owns.
    """

    def __init__(
        self, store: Store, jobs: JobTable, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        self._store = store
        self._jobs = jobs
        jobs.backing = functools.partial(StoredLog, store)
        self._spawn = spawn
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self._followed: dict[str, asyncio.Task[None]] = {}
        self.codec = Codec(trusted=False)
        """How values are encoded that are written down."""
        self.lock = asyncio.Lock()
        """Held while a job is created, resumed or looked for, so that nobody does it twice, or sees half of it."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keeps the store open, and knows all jobs in it.

        Raises:
            StoreError: it cannot be opened, or not everything could be written.
        """
        store = self._store
        store.on_commit, store.on_fenced, store.on_error = self._committed, self._fenced, self._failed
        await store.open()
        try:
            await self.refresh()
            yield
        finally:
            await store.close()

    # what the store tells

    def _committed(self, ends: dict[str, int]) -> None:
        for job_id, end in ends.items():
            record = self._jobs.find(job_id)
            if record is not None and record.journal is not None:
                record.written(end)

    def _fenced(self, job_id: str) -> None:
        problem = f"job {job_id} belongs to another process now, or was deleted"
        self._give_up(job_id, StoreError(self._store.path, problem, "Read it there, with session.reattach"))

    def _failed(self, error: StoreError) -> None:
        for record in self._jobs.records:
            if record.journal is not None:
                self._give_up(record.job_id, error)

    def _give_up(self, job_id: str, error: StoreError) -> None:
        """A job cannot be written any more: it fails, rather than go on unwritten."""
        record = self._jobs.find(job_id)
        if record is None or record.journal is None:
            return
        record.journal = None
        record.written(record.log.end)
        coordinator = self._jobs.coordinator(job_id)
        if coordinator is not None:
            coordinator.fail(error)

    # writing

    async def settled(self) -> None:
        """Waits until the jobs that are being created or resumed are known."""
        async with self.lock:
            return

    async def create(self, record: JobRecord, rules: JobRules, rows: Sequence[Row], stopped: bool) -> bool:
        """Writes a new job down, with its first parameter sets; False if its id is taken.

        Whoever is cancelled meanwhile leaves nothing behind.
        """
        plan = record.plan.to_json()
        options = JobOptions(
            on_error=rules.on_error, reruns=rules.reruns, window=rules.window, limits=record.log.limits
        )
        packed = msgspec.msgpack.encode(options)
        params = tuple(pack_rows(rows))
        new = NewJob(record.job_id, plan, record.fingerprint, packed, record.created, params, stopped)
        creating = asyncio.ensure_future(self._store.create(new))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                if await creating:
                    await self._store.delete(record.job_id)
            raise

    def attach(self, record: JobRecord) -> None:
        """What happens to a job from now on is written down."""
        record.log.backing = StoredLog(self._store, record.job_id, record.plan)
        record.journal = JobJournal(self._store, record.job_id)

    async def flush(self) -> None:
        """Waits until everything that was written is safe.

        Raises:
            StoreError: it could not be written.
        """
        await self._store.flush()

    async def delete(self, job_id: str) -> None:
        """Deletes a job that has ended.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: another process runs it.
        """
        await self._store.delete(job_id)

    async def forget(self, record: JobRecord) -> None:
        """Deletes a job that never came to be."""
        record.journal = None
        try:
            await self._store.delete(record.job_id)
        except (JobNotFound, StoreError):
            _log.warning("job %s was not submitted, but could not be deleted", record.job_id, exc_info=True)

    # finding

    async def refresh(self) -> None:
        """Reads the store again: jobs of other processes, and what became of them."""
        async with self.lock:  # what is being created is no job of another process
            for stored in await self._store.jobs():
                if self._jobs.coordinator(stored.job_id) is None:
                    await self._know(stored)

    async def find(self, job_id: str) -> JobRecord | None:
        """Finds a job in the store, and follows it if another process runs it."""
        known = self._jobs.find(job_id)
        if known is not None and _is_current(known):
            return known
        async with self.lock:
            return await self.look_up(job_id)

    async def look_up(self, job_id: str) -> JobRecord | None:
        """As :meth:`find`, for those who hold the lock."""
        known = self._jobs.find(job_id)
        if known is not None and _is_current(known):
            return known
        stored = await self._store.find(job_id)
        if stored is None:
            return known
        record = await self._know(stored)
        if not record.status.ended and stored.owner.alive and not stored.owner.mine and job_id not in self._followed:
            task = self._followed[job_id] = self._spawn(self._follow(record, stored.owner.fence))
            task.add_done_callback(lambda _: self._followed.pop(job_id, None))
        return record

    async def _know(self, stored: StoredJob) -> JobRecord:
        record = self._jobs.find(stored.job_id)
        if record is None:
            plan = self._plan(stored.plan)
            backing = StoredLog(self._store, stored.job_id, plan)
            limits = _options.decode(stored.options).limits
            record = JobRecord(JobId(stored.job_id), JobNumber(-1), plan, limits, backing, stored.end)
            record.created, record.fingerprint = stored.created, stored.fingerprint
            self._jobs.remember(record)
        if record.journal is None and not record.status.terminal:
            await self._update(record, stored)
        return record

    async def _update(self, record: JobRecord, stored: StoredJob) -> None:
        if stored.status is JobStatus.FAILED:
            history = await read_history(self._store, record.job_id, record.plan, ERRORS_KEPT)
            record.errors, record.error_count = history.errors, history.error_count
        record.next_frame, record.finished = stored.frames, stored.finished
        record.follow(stored.status, stored.reason, stored.end)

    def _plan(self, data: bytes) -> Plan:
        plan = self._plans.get(data)
        if plan is None:
            plan = self._plans[data] = Plan.from_json(data)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    async def _follow(self, record: JobRecord, fence: int) -> None:
        """Shows what another process writes, until the job ends or that process does."""
        async with self._store.follow(fence) as follower:
            while not record.status.ended:
                alive = await follower.changed()
                stored = await self._store.find(record.job_id)
                if stored is None or record.journal is not None:
                    return
                await self._update(record, stored)
                if not alive:
                    return

    # going on

    async def take_over(self, job_id: str) -> LeftOver:
        """Makes an interrupted job ours, and reads what it needs to go on.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: another process runs it.
            DfmError: it has ended.
        """
        found = await self._store.find(job_id)
        if found is None:
            raise JobNotFound(job_id)
        if found.status.terminal:
            raise DfmError(f"job {job_id} is {found.status.value}: only interrupted jobs can be resumed or aborted")
        stored = await self._store.take_over(job_id)
        record = await self._know(stored)
        plan, options = record.plan, _options.decode(stored.options)
        history = await read_history(self._store, job_id, plan, ERRORS_KEPT)
        missing = [index for index in range(stored.frames) if index not in history.done]
        packed = await self._store.params(job_id, missing)
        rows = {index: self._row(packed[index]) for index in missing}
        record.errors, record.error_count = history.errors, history.error_count
        record.log.publish(stored.end)
        record.next_frame = stored.frames
        record.reopen()
        self.attach(record)
        return LeftOver(record, options, history, rows, stored.frames, stored.stopped)

    def _row(self, data: bytes) -> Row:
        row = self.codec.loads(data)
        if not isinstance(row, dict):
            raise ParameterError(["a stored parameter set is damaged"])
        return {name: self.codec.pack(value) for name, value in row.items()}

    async def abort(self, job_id: str, reason: str) -> None:
        """Ends an interrupted job for good."""
        async with self.lock:
            left = await self.take_over(job_id)
            left.record.finished = time.time()
            left.record.change(JobStatus.ABORTED, reason)
            await self._store.flush()


def _is_current(record: JobRecord) -> bool:
    """Whether the store can tell nothing new about a job: it is written here, or will not change any more."""
    return record.journal is not None or record.status.terminal
