"""The jobs of a session that are written down: created, found again, followed, resumed, aborted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from dfm_async.base.completion import completed
from dfm_async.errors import DfmError, EncodingError, JobNotFound, JobOwned, ParameterError, StoreError
from dfm_async.model.events import Event
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.limits import ResultLimits
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.record import ERRORS_KEPT, JobRecord
from dfm_async.session.journal import History, JobJournal, JobOptions, StoredLog, read_history
from dfm_async.session.parameters import stored_row
from dfm_async.store.base import NewJob, Store, StoredJob
from dfm_async.targets.frames import Row
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.rules import JobRules
from dfm_async.wire.codec import Codec

__all__ = ["DurableJobs", "LeftOver"]

_log = logging.getLogger(__name__)

_PLANS: Final = 128

_options: Final = msgspec.msgpack.Decoder(JobOptions)
_RESTORE: Final = "Restore the file from a copy, or forget the job"
_UNREADABLE: Final = Plan(
    pipeline=None, federation="", api_version="", homesite="", locations=(), nets=(), params=(), uses=(), nodes=()
)
"""Stands in the place of a plan that cannot be read."""


class LeftOver(msgspec.Struct, frozen=True):
    """An interrupted job that is ours now: what it needs to go on."""

    record: JobRecord
    options: JobOptions
    history: History
    rows: dict[int, Row]
    frames: int
    stopped: bool

    def rules(self, grace: float) -> JobRules:
        """The rules that it began with."""
        options = self.options
        return JobRules(on_error=options.on_error, reruns=options.reruns, window=options.window, grace=grace)


class DurableJobs:
    """Connects the jobs of a session with a store.

    Args:
        store: where jobs are written.
        jobs: the jobs of the session.
        spawn: starts a task that the session owns.
        target_codec: how values travel to the sites.
        listed: how many jobs of the store are listed, the newest; the others can be found by their ids.
    """

    def __init__(
        self,
        store: Store,
        jobs: JobTable[Any],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        target_codec: Codec,
        listed: int,
    ) -> None:
        self._limit = listed
        self._listed: list[StoredJob] = []
        self._reading: list[set[str]] = []
        self._writing: dict[str, JobRecord] = {}
        self._creating: dict[str, JobRecord] = {}
        self._target_codec = target_codec
        self._store = store
        self._jobs = jobs
        jobs.backing = functools.partial(StoredLog, store)
        self._spawn = spawn
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self._plan_of: OrderedDict[str, bytes] = OrderedDict()
        self._followed: dict[int, dict[str, JobRecord]] = {}
        self.codec = Codec(trusted=False, stored=True)
        """How values are encoded that are written down."""
        self.lock = asyncio.Lock()
        """Held while a job is created or resumed, so that nobody does it twice."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keeps the store open.

        Raises:
            StoreError: it cannot be opened, or not everything could be written.
        """
        store = self._store
        store.on_commit, store.on_fenced, store.on_error = self._committed, self._fenced, self._failed
        store.on_gap = self._stop_writing
        await store.open()
        try:
            yield
        finally:
            await completed(store.close())

    # what the store tells

    def _committed(self, ends: dict[str, int]) -> None:
        for job_id, end in ends.items():
            record = self._writing.get(job_id)
            if record is not None and record.journal is not None:
                record.written(end)
                if record.status.ended:
                    del self._writing[job_id]

    def _fenced(self, job_id: str) -> None:
        problem = f"job {job_id} belongs to another process now, or was deleted"
        self._stop_writing(job_id, StoreError(self._store.path, problem, "Read it there, with session.reattach"))

    def _failed(self, error: StoreError) -> None:
        for job_id in list(self._writing):
            if self._store.discard(job_id):  # a job that had nothing to write is not affected
                self._stop_writing(job_id, error)

    def _stop_writing(self, job_id: str, error: StoreError) -> None:
        """Interrupt a job that cannot be written any more. What is not in the file is dropped, and never shown."""
        record = self._writing.pop(job_id, None)
        if record is None or record.journal is None:
            return
        self._store.discard(job_id)
        with contextlib.suppress(StoreError):  # it is closed already
            # Tried with the next commit; if it never succeeds, the job is interrupted all the same when we are gone.
            self._store.update(job_id, status=JobStatus.INTERRUPTED, reason=str(error))
        coordinator = self._jobs.coordinator(job_id)
        record.stop_writing(error, running=coordinator is not None)
        if coordinator is not None:
            coordinator.halt(JobStatus.INTERRUPTED, str(error), coordinator.rules.grace)

    # writing

    async def create(
        self, record: JobRecord, rules: JobRules, rows: Sequence[Row], *, stopped: bool, fed: bool
    ) -> bool:
        """Writes a new job down; False if its id is taken. What it writes from then on goes to its journal."""
        options = JobOptions(
            on_error=rules.on_error,
            reruns=rules.reruns,
            window=rules.window,
            limits=record.log.limits,
            fed=fed,
            label=record.label,
        )
        new = NewJob(
            record.job_id,
            self._plan_data(record.plan),
            record.fingerprint,
            msgspec.msgpack.encode(options),
            record.created,
            [stored_row(row) for row in rows],
            stopped,
        )
        self._creating[record.job_id] = record  # whoever looks for it meanwhile must find this one
        try:
            if not await self._store.create(new):
                return False
        finally:
            del self._creating[record.job_id]
        self._attach(record)
        self._jobs.remember(record)
        return True

    def withdraw(self, record: JobRecord) -> None:
        """Have :meth:`create` return False at once, if what it writes waits for another process's lock."""
        self._store.withdraw(record.job_id)

    def _attach(self, record: JobRecord) -> None:
        record.log.backing = StoredLog(self._store, record.job_id, record.plan)
        record.journal = JobJournal(self._store, record.job_id, functools.partial(self._stop_writing, record.job_id))
        self._writing[record.job_id] = record

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
        self._listed = [stored for stored in self._listed if stored.job_id != job_id]
        for deleted in self._reading:
            deleted.add(job_id)

    async def forget(self, record: JobRecord) -> None:
        """Deletes a job that never came to be."""
        record.journal = None
        self._writing.pop(record.job_id, None)
        try:
            await self.delete(record.job_id)
        except (JobNotFound, StoreError):
            _log.warning("job %s was not submitted, but could not be deleted", record.job_id, exc_info=True)

    def claim_service(self) -> None:
        """Makes this session the one whose jobs a web service serves.

        Raises:
            StoreError: a service in another process has the same store.
        """
        if not self._store.claim_service():
            problem = "another process serves it already"
            advice = "Each would list other jobs: serve a store from one process, as with uvicorn --workers 1"
            raise StoreError(self._store.path, problem, advice)

    # finding

    async def refresh(self) -> None:
        """Reads the store again: jobs of other processes, and what became of them."""
        deleted: set[str] = set()  # what is read may be from before that
        self._reading.append(deleted)
        try:
            read = await self._store.jobs(self._limit) if self._limit else []
        finally:
            self._reading = [other for other in self._reading if other is not deleted]
        found = [job for job in read if job.job_id not in deleted]
        self._listed = sorted(found, key=lambda job: (job.created, job.job_id))
        for stored in self._listed:
            known = self._jobs.find(stored.job_id)
            if _runs_elsewhere(stored) or (known is not None and known.journal is None):
                with contextlib.suppress(StoreError):  # a damaged job is listed as such
                    await self._know(stored)

    def listed(self) -> list[JobRecord]:
        """The jobs of the store that are not among those of the session."""
        return [self._listing(stored) for stored in self._listed if self._known(stored.job_id) is None]

    def _listing(self, stored: StoredJob) -> JobRecord:
        """The record of a job, also of one that is damaged: its status is unknown, and reading it raises the error."""
        try:
            return self._build(stored)
        except StoreError as error:
            limits = ResultLimits()
            record = JobRecord(JobId(stored.job_id), JobNumber(-1), _UNREADABLE, limits, _NoEvents(), 0)
            record.created, record.finished = stored.created, stored.finished
            record.status = record.decided = JobStatus.UNKNOWN
            record.reason = error.problem
            record.cut_off(error)
            return record

    def newest(self, before: tuple[float, str] | None) -> Iterator[JobRecord]:
        """Give the jobs of the store that are not among those of the session, the newest first."""
        for stored in reversed(self._listed):
            older = before is None or (stored.created, stored.job_id) < before
            if older and self._known(stored.job_id) is None:
                yield self._listing(stored)

    def _known(self, job_id: str) -> JobRecord | None:
        return self._creating.get(job_id) or self._jobs.find(job_id)

    async def find(self, job_id: str) -> JobRecord | None:
        """Finds a job in the store, and follows it if another process runs it.

        Raises:
            StoreError: what is stored of it is damaged.
        """
        known = self._known(job_id)
        if known is not None and (known.journal is not None or known.status.terminal):
            return known
        stored = await self._store.find(job_id)
        if stored is None:
            return known
        return await self._know(stored)

    async def _know(self, stored: StoredJob) -> JobRecord:
        record = self._known(stored.job_id)
        if record is None:
            record = self._build(stored)
            self._jobs.remember(record)
        elif record.journal is None and not record.status.terminal:
            self._update(record, stored)
        if record.journal is None and _runs_elsewhere(stored):
            self._follow(record, stored.owner.fence)
        return record

    def _build(self, stored: StoredJob) -> JobRecord:
        plan, options = self._decoded(stored)
        backing = StoredLog(self._store, stored.job_id, plan)
        record = JobRecord(JobId(stored.job_id), JobNumber(-1), plan, options.limits, backing, stored.end)
        record.created, record.fingerprint, record.label = stored.created, stored.fingerprint, options.label
        self._update(record, stored)
        return record

    def _decoded(self, stored: StoredJob) -> tuple[Plan, JobOptions]:
        """The plan and the options of a job.

        Raises:
            StoreError: what is stored of it is damaged.
        """
        problem, cause, column = stored.damage, None, "plan"
        if problem is None:
            try:
                plan = self._plan(stored.plan)
                column = "options"
                return plan, _options.decode(stored.options)
            except Exception as error:  # noqa: BLE001 - a file can hold anything
                problem, cause = f"column {column!r} cannot be read ({error})", error
        raise self._damaged(stored, problem) from cause

    def _follow(self, record: JobRecord, fence: int) -> None:
        """Shows what another process writes of a job, from now on."""
        if fence in self._followed:
            if record.job_id not in self._followed[fence]:
                self._followed[fence][record.job_id] = record
                self._spawn(self._join_followed(record))
        else:
            self._followed[fence] = {record.job_id: record}
            self._spawn(self._follow_owner(fence))

    def _update(self, record: JobRecord, stored: StoredJob) -> None:
        status, reason = stored.status, stored.reason
        held = stored.job_id in self._writing or stored.job_id in self._creating
        if stored.owner.mine and not status.ended and not held:
            # Ours, but nobody runs it: it could not be written, or taking it over was cancelled.
            status, reason = JobStatus.INTERRUPTED, record.reason
        if status is JobStatus.FAILED:
            record.loader = functools.partial(self._load_errors, record)
        record.next_frame = record.sets = stored.frames
        record.done = stored.frames if stored.done is None and status is JobStatus.FINISHED else stored.done
        record.finished, record.error_count = stored.finished, stored.errors or 0
        record.follow(status, reason, stored.end)
        self._jobs.ended_elsewhere(record)

    async def _load_errors(self, record: JobRecord) -> None:
        history = await read_history(self._store, record.job_id, record.plan, ERRORS_KEPT)
        record.errors, record.error_count = history.errors, max(record.error_count, history.error_count)

    def _plan_data(self, plan: Plan) -> bytes:
        data = self._plan_of.get(plan.hash)
        if data is None:
            data = self._plan_of[plan.hash] = plan.to_json()
            if len(self._plan_of) > _PLANS:
                self._plan_of.popitem(last=False)
        return data

    def _plan(self, data: bytes) -> Plan:
        plan = self._plans.get(data)
        if plan is None:
            plan = self._plans[data] = Plan.from_json(data)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    async def _follow_owner(self, fence: int) -> None:
        """Shows what another process writes, until all its jobs that are known here have ended, or it has."""
        records = self._followed[fence]
        try:
            async with self._store.follow(fence) as follower:
                alive = True
                while alive and records:
                    alive = await follower.changed()
                    for record in list(records.values()):
                        await self._catch_up(record)
                        if record.status.ended or record.journal is not None:
                            records.pop(record.job_id, None)
        except StoreError as error:
            for record in records.values():
                record.cut_off(error)
        finally:
            del self._followed[fence]

    async def _join_followed(self, record: JobRecord) -> None:
        """Shows commits that the follower received between the reading of a record and its registration."""
        try:
            await self._catch_up(record)
        except StoreError as error:
            record.cut_off(error)

    async def _catch_up(self, record: JobRecord) -> None:
        stored = await self._store.find(record.job_id)
        if stored is None:
            record.follow(JobStatus.ABORTED, "it was deleted from the store", record.log.end)
        elif stored.damage is not None:
            record.cut_off(self._damaged(stored, stored.damage))
        elif record.journal is None and not record.status.terminal:
            self._update(record, stored)

    async def check_steerable(self, job_id: str) -> None:
        """Tells that a job runs elsewhere.

        Raises:
            JobOwned: another process runs it.
        """
        stored = await self._store.find(job_id)
        if stored is not None and not stored.status.ended and not stored.owner.mine:
            raise JobOwned(job_id, stored.owner.pid, stored.owner.host)

    # going on

    async def take_over(self, job_id: str, *, more: bool) -> LeftOver:
        """Makes an interrupted job ours, and reads what it needs to go on; ``more``: further parameter sets come.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: another process runs it.
            ParameterError: further parameter sets are needed.
            StoreError: what is stored of it is damaged.
            DfmError: it has ended.
        """
        found = await self._store.find(job_id)
        if found is None:
            raise JobNotFound(job_id)
        _, options = self._decoded(found)
        if options.fed and not found.stopped and not more and not found.status.terminal:
            problem = (
                f"the stream of parameter sets of job {job_id} had not ended when it was interrupted; {found.frames} "
                "sets had come. Give the rest with resume(..., input_params=...), or [] if there is none"
            )
            raise ParameterError([problem])
        stored = found if found.status.terminal else await self._store.take_over(job_id)
        if stored.status.terminal:
            raise DfmError(f"job {job_id} is {stored.status.value}: only interrupted jobs can be resumed or aborted")
        try:
            record = await self._know(stored)
            history = await read_history(self._store, job_id, record.plan, ERRORS_KEPT)
            missing = [index for index in range(stored.frames) if index not in history.done]
            packed = await self._store.params(job_id, missing)
            rows = {index: self._row(stored, index, packed.get(index), record.plan) for index in missing}
        except BaseException:  # it is ours, and nobody runs it
            self._store.update(job_id, status=JobStatus.INTERRUPTED, reason=found.reason, finished=found.finished)
            raise
        record.errors = history.errors
        record.error_count = history.error_count if stored.errors is None else stored.errors
        record.log.publish(stored.end)
        record.next_frame = stored.frames
        record.reopen()
        self._attach(record)
        return LeftOver(record, options, history, rows, stored.frames, stored.stopped)

    async def give_back(self, left: LeftOver) -> None:
        """Leaves a job interrupted that was taken over, and is not resumed after all."""
        left.record.change(JobStatus.INTERRUPTED, "it was not resumed")
        await self._store.flush()

    def _row(self, stored: StoredJob, index: int, data: bytes | None, plan: Plan) -> Row:
        try:
            row = None if data is None else self.codec.loads(data)
        except EncodingError as error:
            raise self._damaged(stored, f"parameter set {index} cannot be read ({error})") from error
        if not isinstance(row, dict) or row.keys() != set(plan.params):
            raise self._damaged(stored, f"parameter set {index} cannot be read")
        return {name: self._target_codec.pack(value) for name, value in row.items()}

    def _damaged(self, stored: StoredJob, problem: str) -> StoreError:
        return StoreError(self._store.path, f"job {stored.job_id} is damaged: {problem}", _RESTORE)

    async def abort(self, job_id: str, reason: str) -> None:
        """Ends an interrupted job for good."""
        async with self.lock:
            await completed(self._abort(job_id, reason))

    async def _abort(self, job_id: str, reason: str) -> None:
        left = await self.take_over(job_id, more=True)
        left.record.finished = time.time()
        left.record.change(JobStatus.ABORTED, reason)
        await self._store.flush()


class _NoEvents:
    """The log of a job that cannot be read."""

    async def read(self, start: int) -> Sequence[Event]:
        """Gives nothing."""
        return ()

    async def frames_done(self, before: int) -> set[int]:
        """Gives nothing."""
        return set()


def _runs_elsewhere(stored: StoredJob) -> bool:
    return not stored.status.ended and stored.owner.alive and not stored.owner.mine
