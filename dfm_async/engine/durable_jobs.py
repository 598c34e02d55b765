"""The durable jobs of one process in a store: created, written, found again, taken over, deleted.

What sessions and the hubs of federations have in common. How values are stored differs: see :class:`StoredValues`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.base.tasks import completed, in_thread
from dfm_async.base.wall_clock import wall_time
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobTable
from dfm_async.engine.journal import History, JobJournal, StoredLog, StoredValues, read_history
from dfm_async.errors import DfmError, EncodingError, JobNotFound, JobOwned, ParameterError, StoreError
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.record import ERRORS_KEPT, JobRecord
from dfm_async.site import checkpoints
from dfm_async.store.base import NewJob, Store, StoredJob

_log = logging.getLogger(__name__)

PAGE: Final = 100
"""How many jobs of the store are read at once."""
_PRUNE_FIRST: Final = 1.0
_PRUNE_LAST: Final = 3600.0
"""The smallest and the largest number of seconds between two deletions of old jobs."""
_spec: Final = msgspec.msgpack.Decoder(JobSpec)
_RESTORE: Final = "Restore the file from a copy, or forget the job"


class LeftOver(msgspec.Struct, frozen=True):
    """An interrupted job that this process has taken over: what it needs to go on."""

    record: JobRecord
    history: History
    rows: dict[int, Row]
    frames: int
    stopped: bool


class DurableJobs:
    """Connect the jobs of one process with a store.

    Args:
        store: the store, which :meth:`opened` opens.
        jobs: the jobs that are known here.
        spawn: starts a task that ends with this process's use of the store.
        values: how parameter sets and results are stored.
        folder: where sites keep checkpoints.
    """

    def __init__(
        self,
        store: Store,
        jobs: JobTable[Any],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        values: StoredValues,
        folder: str | None,
    ) -> None:
        self.store = store
        self._jobs = jobs
        self._spawn = spawn
        self._values = values
        self._folder = folder
        self._writing: dict[str, JobRecord] = {}
        self._creating: dict[str, JobRecord] = {}
        jobs.backing = functools.partial(StoredLog, store, values)
        self.interrupted = asyncio.Event()
        """Set when there may be interrupted jobs: another process has died, or a job here could not be written."""
        self.lock = asyncio.Lock()
        """Held while a job is created or resumed, so that it does not happen twice."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the store open.

        Raises:
            StoreError: it cannot be opened, or not everything could be written.
        """
        store = self.store
        store.on_commit, store.on_fenced, store.on_error = self._committed, self._fenced, self._failed
        store.on_gap, store.on_interrupted = self._stop_writing, self.interrupted.set
        store.on_lost = self._check_owned
        await store.open()
        try:
            yield
        finally:
            await completed(store.close())

    # callbacks of the store

    def _committed(self, ends: dict[str, int]) -> None:
        for job_id, end in ends.items():
            record = self._writing.get(job_id)
            if record is not None and record.journal is not None:
                record.written(end)
                if record.status.ended:
                    del self._writing[job_id]

    def _check_owned(self) -> None:
        """Write all jobs that run here, without a change: those that another process has taken over are fenced."""
        with contextlib.suppress(StoreError):  # it is not open yet, or not any longer
            for job_id in self._writing:
                self.store.update(job_id)

    def _fenced(self, job_id: str) -> None:
        problem = f"job {job_id} belongs to another process now, or was deleted"
        self._stop_writing(job_id, StoreError(self.store.path, problem, "Read it there, with session.reattach"))

    def _failed(self, error: StoreError) -> None:
        for job_id in list(self._writing):
            if self.store.discard(job_id):  # a job that had nothing to write is not affected
                self._stop_writing(job_id, error)

    def _stop_writing(self, job_id: str, error: StoreError) -> None:
        """Interrupt a job that cannot be written any longer. What is not in the file is dropped, and never shown."""
        record = self._writing.pop(job_id, None)
        if record is None or record.journal is None:
            return
        self.store.discard(job_id)
        with contextlib.suppress(StoreError):  # it is closed already
            # Retried with the next commit; if it never succeeds, the job is interrupted when this process ends.
            self.store.update(job_id, status=JobStatus.INTERRUPTED, reason=str(error))
        coordinator = self._jobs.coordinator(job_id)
        record.stop_writing(error, running=coordinator is not None)
        if coordinator is None:
            self.interrupted.set()
        else:
            coordinator.on_end(lambda _: self.interrupted.set())
            coordinator.halt(JobStatus.INTERRUPTED, str(error), coordinator.spec.grace)

    # writing

    async def create(self, record: JobRecord, rows: Sequence[Row], *, plan: bytes, stopped: bool) -> bool:
        """Store a new job; False if its id is taken. From then on its events go to its journal.

        ``plan`` is what :meth:`StoredValues.load_plan` will read.
        """
        new = NewJob(
            job_id=record.job_id,
            plan=plan,
            fingerprint=record.fingerprint,
            options=msgspec.msgpack.encode(record.spec),
            created=record.created,
            params=[self._values.row(row) for row in rows],
            stopped=stopped,
            pipeline=record.plan.pipeline,
            label=record.label,
        )
        self._creating[record.job_id] = record  # calls that look for it meanwhile must find this one
        try:
            if not await self.store.create(new):
                return False
        finally:
            del self._creating[record.job_id]
        self._attach(record)
        self._jobs.remember(record)
        return True

    def _attach(self, record: JobRecord) -> None:
        record.log.backing = StoredLog(self.store, self._values, record.job_id, record.plan)
        failed = functools.partial(self._stop_writing, record.job_id)
        record.journal = JobJournal(self.store, self._values, record.job_id, failed, self._spawn)
        self._writing[record.job_id] = record

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended. It is forgotten here as well if this is cancelled after it was deleted.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: another process runs it.
        """
        await completed(self._delete(job_id), hurry=asyncio.Task.cancel)

    async def _delete(self, job_id: str) -> None:
        names = await self._checkpoints_of(job_id)
        try:
            await self.store.delete(job_id)
        except asyncio.CancelledError:
            if await self.store.find(job_id) is not None:
                raise
        self._deleted({job_id})
        for folder, name in names:
            await in_thread(lambda: checkpoints.delete(folder, name), "checkpoints")  # noqa: B023 - called at once

    def _deleted(self, job_ids: set[str]) -> None:
        """Forget jobs that the store does not have any longer."""
        for job_id in job_ids:
            self._jobs.forget(job_id)

    async def prune(self, before: float, status: JobStatus | None) -> int:
        """Delete the jobs that ended before a time, also their checkpoints; return their number."""
        count = 0
        while pruned := await self.prune_page(before, status):
            count += pruned
        return count

    async def prune_page(self, before: float, status: JobStatus | None) -> int:
        """Delete some of these jobs, those that ended first; return their number."""
        return await completed(self._prune_page(before, status))  # what is deleted must be forgotten here

    async def _prune_page(self, before: float, status: JobStatus | None) -> int:
        pruned = await self.store.prune(before, status, PAGE)
        for stored in pruned:
            for folder, name in self._checkpoints_in(stored):
                await in_thread(lambda: checkpoints.delete(folder, name), "checkpoints")  # noqa: B023 - called at once
        self._deleted({stored.job_id for stored in pruned})
        return len(pruned)

    async def keep_for(self, seconds: float) -> None:
        """Delete jobs that ended this long ago, until this is cancelled."""
        while True:
            try:
                await self.prune(wall_time() - seconds, None)
            except StoreError as error:
                _log.warning("old jobs cannot be deleted: %s", error)
            await asyncio.sleep(min(max(seconds / 10, _PRUNE_FIRST), _PRUNE_LAST))

    async def _checkpoints_of(self, job_id: str) -> list[tuple[str, str]]:
        """Return the folder and the name of the checkpoints of a job, if it may have some."""
        if self._folder is None or not Path(self._folder).exists():  # noqa: ASYNC240 - quick, and never on a network
            return []
        stored = await self.store.find(job_id)
        return [] if stored is None else self._checkpoints_in(stored)

    def _checkpoints_in(self, stored: StoredJob) -> list[tuple[str, str]]:
        name = ""
        if self._folder is not None:
            with contextlib.suppress(StoreError):  # a damaged job can be deleted
                name = self._decoded(stored)[1].checkpoints
        return [(self._folder, name)] if self._folder is not None and name else []

    async def forget(self, record: JobRecord) -> None:
        """Delete a job that was not submitted."""
        record.journal = None
        self._writing.pop(record.job_id, None)
        try:
            await self.delete(record.job_id)
        except (JobNotFound, StoreError):
            _log.warning("job %s was not submitted, but could not be deleted", record.job_id, exc_info=True)

    # finding

    def _known(self, job_id: str) -> JobRecord | None:
        return self._creating.get(job_id) or self._jobs.find(job_id)

    def _know(self, stored: StoredJob) -> JobRecord:
        record = self._known(stored.job_id)
        if record is None:
            record = self._build(stored)
            self._jobs.remember(record)
        elif record.journal is None and not record.status.terminal:
            self._update(record, stored)
        return record

    def _build(self, stored: StoredJob) -> JobRecord:
        plan, spec = self._decoded(stored)
        backing = StoredLog(self.store, self._values, stored.job_id, plan)
        record = JobRecord(spec, plan, backing, stored.end)
        self._update(record, stored)
        return record

    def _decoded(self, stored: StoredJob) -> tuple[Plan, JobSpec]:
        """Return the plan and the specification of a job.

        Raises:
            StoreError: what is stored of it is damaged.
        """
        problem, cause, column = stored.damage, None, "plan"
        if problem is None:
            try:
                plan = self._values.load_plan(stored.plan)
                column = "options"
                spec = _spec.decode(stored.options)
                found = {"job_id": stored.job_id, "created": stored.created, "fingerprint": stored.fingerprint}
                return plan, msgspec.structs.replace(spec, stored=True, **found)
            except Exception as error:  # noqa: BLE001 - a file can hold anything
                problem, cause = f"column {column!r} cannot be read ({error})", error
        raise self._damaged(stored, problem) from cause

    def _update(self, record: JobRecord, stored: StoredJob) -> None:
        status, reason = stored.status, stored.reason
        held = stored.job_id in self._writing or stored.job_id in self._creating
        if stored.owner.mine and not status.ended and not held:
            # Of this store, but not running: it could not be written, or taking it over was cancelled.
            status, reason = JobStatus.INTERRUPTED, record.reason
        if status is JobStatus.FAILED:
            record.loader = functools.partial(self._load_errors, record)
        counts = record.sets, record.done, record.error_count
        record.next_frame = record.sets = stored.frames
        record.done = stored.frames if stored.done is None and status is JobStatus.FINISHED else stored.done
        record.finished, record.error_count = stored.finished, stored.errors or 0
        record.open_elsewhere = runs_elsewhere(stored) and not stored.stopped
        record.follow(status, reason, stored.end)
        if counts != (record.sets, record.done, record.error_count):
            record.changed()
        self._jobs.ended_elsewhere(record)

    async def _load_errors(self, record: JobRecord) -> None:
        history = await read_history(self.store, self._values, record.job_id, record.plan, ERRORS_KEPT)
        record.errors, record.error_count = tuple(history.errors), max(record.error_count, history.error_count)

    # going on

    @staticmethod
    def check_resumable(job_id: str, status: JobStatus) -> None:
        """Check that a job has not ended for good.

        Raises:
            DfmError: it has.
        """
        if status.terminal:
            raise DfmError(f"job {job_id} is {status.value}: only interrupted jobs can be resumed or aborted")

    async def take_over(self, job_id: str, *, more: bool) -> LeftOver:
        """Take an interrupted job over, and read what it needs to go on; ``more``: further parameter sets come.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: another process runs it.
            ParameterError: further parameter sets are needed.
            StoreError: what is stored of it is damaged.
            DfmError: it has ended.
        """
        found = await self.store.find(job_id)
        if found is None:
            raise JobNotFound(job_id)
        _, spec = self._decoded(found)
        if spec.fed and not found.stopped and not more and not found.status.terminal:
            problem = (
                f"the stream of parameter sets of job {job_id} had not ended when it was interrupted; {found.frames} "
                "sets had come. Pass the rest to resume(..., input_params=...), or [] if there is none"
            )
            raise ParameterError([problem])
        stored = found if found.status.terminal else await self.store.take_over(job_id)
        self.check_resumable(job_id, stored.status)
        try:
            record = self._know(stored)
            history = await read_history(self.store, self._values, job_id, record.plan, ERRORS_KEPT)
            missing = [index for index in range(stored.frames) if index not in history.done]
            packed = await self.store.params(job_id, missing)
            rows = {index: self._row(stored, index, packed.get(index), record.plan) for index in missing}
        except BaseException:  # this store owns it, but it does not run
            self.store.update(job_id, status=JobStatus.INTERRUPTED, reason=found.reason, finished=found.finished)
            raise
        record.errors = tuple(history.errors)
        record.error_count = history.error_count if stored.errors is None else stored.errors
        record.log.publish(stored.end)
        record.next_frame = stored.frames
        record.reopen()
        record.sets, record.done = stored.frames, stored.frames - len(missing)
        self._attach(record)
        return LeftOver(record, history, rows, stored.frames, stored.stopped)

    async def give_back(self, left: LeftOver) -> None:
        """Leave a job interrupted that was taken over, and is not resumed after all."""
        left.record.change(JobStatus.INTERRUPTED, "it was not resumed")
        await self.store.flush()

    def _row(self, stored: StoredJob, index: int, data: bytes | None, plan: Plan) -> Row:
        try:
            if data is not None:
                return self._values.load_row(data, plan)
            problem = "is missing"
        except (EncodingError, ValueError) as error:
            problem = f"cannot be read ({error})"
        raise self._damaged(stored, f"parameter set {index} {problem}")

    def _damaged(self, stored: StoredJob, problem: str) -> StoreError:
        return StoreError(self.store.path, f"job {stored.job_id} is damaged: {problem}", _RESTORE)

    async def abort(self, job_id: str, reason: str) -> None:
        """End an interrupted job for good.

        Raises:
            JobOwned: another process runs it, or this one, which has resumed it meanwhile.
        """
        async with self.lock:
            if self._jobs.coordinator(job_id) is not None:
                raise JobOwned(job_id, os.getpid(), socket.gethostname())
            await completed(self._abort(job_id, reason))

    async def _abort(self, job_id: str, reason: str) -> None:
        left = await self.take_over(job_id, more=True)
        left.record.finished = wall_time()
        left.record.change(JobStatus.ABORTED, reason)
        await self.store.flush()


def runs_elsewhere(stored: StoredJob) -> bool:
    """Return whether another process runs a job."""
    return not stored.status.ended and stored.owner.alive and not stored.owner.mine
