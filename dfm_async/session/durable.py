"""The durable jobs of a session: created, found again, followed, resumed, aborted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.base.backoff import delays
from dfm_async.base.containers import BoundedDict
from dfm_async.base.signals import Signal
from dfm_async.base.tasks import completed, in_thread
from dfm_async.base.wall_clock import wall_time
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobTable
from dfm_async.errors import DfmError, EncodingError, JobNotFound, JobOwned, ParameterError, StoreError
from dfm_async.model.ids import Frame, JobId
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.record import ERRORS_KEPT, JobRecord
from dfm_async.session.journal import History, JobJournal, StoredLog, read_history
from dfm_async.session.parameters import ParameterSets, stored_row
from dfm_async.session.steering import OwnedJobs, RemoteSteering
from dfm_async.site import checkpoints
from dfm_async.store.base import NewJob, Position, Store, StoredJob
from dfm_async.wire.codec import Codec

_log = logging.getLogger(__name__)

_PLANS: Final = 128
_PAGE: Final = 100
"""How many jobs of the store are read at once."""

_UNSEEN: Final = 1000
"""How many jobs of other processes are noted to be read; if there are more, all that are active are read."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
"""The number of seconds until they are read again after an error, at first and at most."""
_PRUNE_FIRST: Final = 1.0
_PRUNE_LAST: Final = 3600.0
"""The smallest and the largest number of seconds between two deletions of old jobs."""
_spec: Final = msgspec.msgpack.Decoder(JobSpec)
_ACTIVE: Final = JobFilter(status=JobStatus.RUNNING)
_RESTORE: Final = "Restore the file from a copy, or forget the job"
_UNREADABLE: Final = Plan(
    pipeline=None, federation="", api_version="", homesite="", locations=(), nets=(), params=(), uses=(), nodes=()
)
"""Replaces a plan that cannot be read."""


class LeftOver(msgspec.Struct, frozen=True):
    """An interrupted job that this session has taken over: what it needs to go on."""

    record: JobRecord
    history: History
    rows: dict[int, Row]
    frames: int
    stopped: bool


class DurableJobs:
    """Connect the jobs of a session with a store.

    ``listed`` is the number of jobs of the store that are listed, the newest; the others can be found by their ids.
    ``folder`` is where sites keep checkpoints.
    """

    def __init__(
        self,
        store: Store,
        jobs: JobTable[Any],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        target_codec: Codec,
        listed: int,
        folder: str | None,
    ) -> None:
        self._folder = folder
        self._limit = listed
        self._listed: list[StoredJob] = []
        self._reading: list[set[str]] = []
        self._writing: dict[str, JobRecord] = {}
        self._creating: dict[str, JobRecord] = {}
        self._target_codec = target_codec
        self.store = store
        self._jobs = jobs
        jobs.backing = functools.partial(StoredLog, store)
        self._spawn = spawn
        self._plan = functools.lru_cache(_PLANS)(Plan.from_json)
        self._plan_of: BoundedDict[str, bytes] = BoundedDict(_PLANS)
        self._followed: dict[int, dict[str, JobRecord]] = {}
        self._unseen: set[str] | None = set()
        self._signal = Signal()
        self._watching = False
        self.codec = Codec.for_store()
        """Encodes values for the store."""
        self.remote = RemoteSteering(store)
        """Steers jobs of other processes."""
        self.owned: OwnedJobs | None = None
        """Carries out what other processes request."""
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
        store.on_request, store.on_lost, store.on_change = self._requested, self._check_owned, self._changed
        await store.open()
        try:
            yield
        finally:
            await completed(store.close())

    def serve(self, params: ParameterSets) -> None:
        """Carry out what other processes request for the jobs that run here."""
        self.owned = OwnedJobs(self.store, self._jobs, self._spawn, params, self.codec)
        self._spawn(self.owned.run())

    # callbacks of the store

    def _requested(self) -> None:
        if self.owned is not None:  # else it begins with reading them
            self.owned.notify()

    def _committed(self, ends: dict[str, int]) -> None:
        for job_id, end in ends.items():
            record = self._writing.get(job_id)
            if record is not None and record.journal is not None:
                record.written(end)
                if record.status.ended:
                    del self._writing[job_id]

    def _changed(self, jobs: Collection[str] | None) -> None:
        """Note jobs that other processes have changed, if somebody watches all jobs; None: any of them."""
        if not self._jobs.changes.readers:
            return
        if jobs is None or (self._unseen is not None and len(self._unseen) >= _UNSEEN):
            self._unseen = None
        elif self._unseen is not None:
            self._unseen.update(jobs)
        self._signal.notify()

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

    async def create(self, record: JobRecord, rows: Sequence[Row], *, stopped: bool) -> bool:
        """Store a new job; False if its id is taken. From then on its events go to its journal."""
        new = NewJob(
            job_id=record.job_id,
            plan=self._plan_data(record.plan),
            fingerprint=record.fingerprint,
            options=msgspec.msgpack.encode(record.spec),
            created=record.created,
            params=[stored_row(row) for row in rows],
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
        record.log.backing = StoredLog(self.store, record.job_id, record.plan)
        failed = functools.partial(self._stop_writing, record.job_id)
        record.journal = JobJournal(self.store, record.job_id, failed, self._spawn)
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
        self._jobs.forget(job_id)
        for folder, name in names:
            await in_thread(lambda: checkpoints.delete(folder, name), "checkpoints")  # noqa: B023 - called at once
        self._listed = [stored for stored in self._listed if stored.job_id != job_id]
        for deleted in self._reading:
            deleted.add(job_id)

    async def prune(self, before: float, status: JobStatus | None) -> int:
        """Delete the jobs that ended before a time, also their checkpoints; return their number."""
        count = 0
        while pruned := await completed(self._prune_page(before, status)):  # what is deleted must be forgotten here
            count += pruned
        return count

    async def _prune_page(self, before: float, status: JobStatus | None) -> int:
        pruned = await self.store.prune(before, status, _PAGE)
        for stored in pruned:
            for folder, name in self._checkpoints_in(stored):
                await in_thread(lambda: checkpoints.delete(folder, name), "checkpoints")  # noqa: B023 - called at once
            self._jobs.forget(stored.job_id)
        gone = {stored.job_id for stored in pruned}
        self._listed = [stored for stored in self._listed if stored.job_id not in gone]
        for deleted in self._reading:
            deleted |= gone
        return len(pruned)

    async def keep_for(self, seconds: float) -> None:
        """Delete jobs that ended this long ago, until this is cancelled."""
        while True:
            try:
                await self.prune(wall_time() - seconds, None)
            except StoreError as error:
                _log.warning("old jobs cannot be deleted: %s", error)
            await asyncio.sleep(min(max(seconds / 10, _PRUNE_FIRST), _PRUNE_LAST))

    async def check(self, progress: Callable[[int, int | None], object] | None) -> AsyncGenerator[StoreError, None]:
        """Yield an error for everything in the store that is damaged, also for what only a session can decode."""
        damaged: set[str] = set()
        total = count = 0

        def checked(jobs: int) -> None:
            nonlocal total
            total = jobs
            if progress is not None:
                progress(jobs, None)

        async for error in self.store.check(checked):
            damaged.add(error.problem)
            yield error
        before: Position | None = None
        while page := await self.store.jobs(before=before, limit=_PAGE):
            for stored in page:
                if stored.damage is None and not any(f"job {stored.job_id} " in problem for problem in damaged):
                    try:
                        plan, _ = self._decoded(stored)
                        await read_history(self.store, stored.job_id, plan, 0)
                    except StoreError as error:
                        yield error
                count += 1
                if progress is not None:
                    progress(count, max(count, total))
            before = page[-1].created, page[-1].job_id

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

    async def reuse_checkpoints(
        self, spec: JobSpec, new: JobSpec, sets: Mapping[int, int], is_kept: Callable[[str, Frame], bool]
    ) -> None:
        """Let a job use what was recorded for some parameter sets of another one.

        ``sets`` has their numbers in the new job, by those in the other one. ``is_kept`` chooses calls, by their nodes
        and their frames in the other one.

        Raises:
            StoreError: the checkpoints cannot be read or written.
        """
        folder = self._folder
        if folder is not None and spec.checkpoints:
            work = lambda: checkpoints.copy(folder, spec.checkpoints, new.checkpoints, sets, is_kept)  # noqa: E731
            await in_thread(work, "checkpoints")

    async def recorded_frames(self, spec: JobSpec, node: str) -> list[Frame]:
        """Return the frames in which calls of a node are recorded, in order.

        Raises:
            StoreError: the checkpoints cannot be read.
        """
        folder = self._folder
        if folder is None or not spec.checkpoints:
            return []
        return await in_thread(lambda: checkpoints.recorded_frames(folder, spec.checkpoints, node), "checkpoints")

    async def forget(self, record: JobRecord) -> None:
        """Delete a job that was not submitted."""
        record.journal = None
        self._writing.pop(record.job_id, None)
        try:
            await self.delete(record.job_id)
        except (JobNotFound, StoreError):
            _log.warning("job %s was not submitted, but could not be deleted", record.job_id, exc_info=True)

    # finding

    async def refresh(self) -> None:
        """Read the store again: jobs of other processes, and their states."""
        deleted: set[str] = set()  # what is read may be from before that
        self._reading.append(deleted)
        try:
            read = await self.store.jobs(limit=self._limit) if self._limit else []
        finally:
            self._reading = [other for other in self._reading if other is not deleted]
        found = [job for job in read if job.job_id not in deleted]
        self._listed = sorted(found, key=lambda job: (job.created, job.job_id))
        for stored in self._listed:
            known = self._jobs.find(stored.job_id)
            if _runs_elsewhere(stored) or (known is not None and known.journal is None):
                self._show(stored)

    def watch(self) -> None:
        """Show the watchers of all jobs the active ones of other processes."""
        if not self._watching:
            self._watching = True
            self._spawn(self._show_unseen())
        self._changed(None)

    async def _show_unseen(self) -> None:
        """Make the jobs known that other processes have changed, until this is cancelled.

        After an error it pauses, for longer and longer up to a limit: no event reports that a database has returned.
        """
        pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            await self._signal.wait_until(lambda: self._unseen is None or self._unseen)
            unseen, self._unseen = self._unseen, set()
            try:
                if unseen is None:
                    await self._show_active()
                for job_id in unseen or ():
                    if self._is_unseen(job_id) and (stored := await self.store.find(job_id)) is not None:
                        self._show(stored)
            except StoreError as error:
                _log.warning("jobs of other processes cannot be read: %s", error)
                self._unseen = None
                await asyncio.sleep(next(pauses))
            else:
                pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)

    def _is_unseen(self, job_id: str) -> bool:
        known = self._known(job_id)
        if known is not None and (known.journal is not None or known.status.terminal):
            return False
        return not any(job_id in records for records in self._followed.values())

    async def _show_active(self) -> None:
        before: Position | None = None
        while page := await self.store.jobs(_ACTIVE, before=before, limit=_PAGE):
            for stored in page:
                if _runs_elsewhere(stored):
                    self._show(stored)
            before = page[-1].created, page[-1].job_id

    def listed(self) -> list[JobRecord]:
        """Return the jobs of the store that are not among those of the session."""
        return [self._listing(stored) for stored in self._listed if self._known(stored.job_id) is None]

    def _listing(self, stored: StoredJob) -> JobRecord:
        """Return the record of a job; one that is damaged has an unknown status, and reading it raises the error."""
        try:
            return self._build(stored)
        except StoreError as error:
            spec = JobSpec(job_id=JobId(stored.job_id), created=stored.created)
            record = JobRecord(spec, _UNREADABLE)
            record.finished = stored.finished
            record.status = record.decided = JobStatus.UNKNOWN
            record.reason = error.problem
            record.cut_off(error)
            return record

    async def search(self, wanted: JobFilter, before: Position | None) -> AsyncGenerator[JobRecord, None]:
        """Yield the jobs of the store that are not among those of the session, the newest first.

        With a status that can still change, jobs with others that can are among them.
        """
        page: Sequence[StoredJob] = ()
        while not page or len(page) == _PAGE:
            page = await self.store.jobs(wanted, before=before, limit=_PAGE)
            if not page:
                return
            before = page[-1].created, page[-1].job_id
            for stored in page:  # before any of them is shown: others are shown between them
                known = self._known(stored.job_id)
                if known is not None and known.journal is None and not known.status.terminal:
                    self._update(known, stored)
            for stored in page:
                if self._known(stored.job_id) is None:
                    yield self._listing(stored)

    def _known(self, job_id: str) -> JobRecord | None:
        return self._creating.get(job_id) or self._jobs.find(job_id)

    async def find(self, job_id: str) -> JobRecord | None:
        """Find a job in the store, and follow it if another process runs it.

        Raises:
            StoreError: what is stored of it is damaged.
        """
        known = self._known(job_id)
        if known is not None and (known.journal is not None or known.status.terminal):
            return known
        stored = await self.store.find(job_id)
        if stored is None:
            return known
        return self._know(stored)

    def _show(self, stored: StoredJob) -> None:
        with contextlib.suppress(StoreError):  # a damaged job is listed as such
            self._know(stored)

    def _know(self, stored: StoredJob) -> JobRecord:
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
        plan, spec = self._decoded(stored)
        backing = StoredLog(self.store, stored.job_id, plan)
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
                plan = self._plan(stored.plan)
                column = "options"
                spec = _spec.decode(stored.options)
                found = {"job_id": stored.job_id, "created": stored.created, "fingerprint": stored.fingerprint}
                return plan, msgspec.structs.replace(spec, stored=True, **found)
            except Exception as error:  # noqa: BLE001 - a file can hold anything
                problem, cause = f"column {column!r} cannot be read ({error})", error
        raise self._damaged(stored, problem) from cause

    def _follow(self, record: JobRecord, fence: int) -> None:
        """Show what another process writes of a job, from now on."""
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
            # Of this store, but not running: it could not be written, or taking it over was cancelled.
            status, reason = JobStatus.INTERRUPTED, record.reason
        if status is JobStatus.FAILED:
            record.loader = functools.partial(self._load_errors, record)
        counts = record.sets, record.done, record.error_count
        record.next_frame = record.sets = stored.frames
        record.done = stored.frames if stored.done is None and status is JobStatus.FINISHED else stored.done
        record.finished, record.error_count = stored.finished, stored.errors or 0
        record.open_elsewhere = _runs_elsewhere(stored) and not stored.stopped
        record.follow(status, reason, stored.end)
        if counts != (record.sets, record.done, record.error_count):
            record.changed()
        self._jobs.ended_elsewhere(record)

    async def _load_errors(self, record: JobRecord) -> None:
        history = await read_history(self.store, record.job_id, record.plan, ERRORS_KEPT)
        record.errors, record.error_count = tuple(history.errors), max(record.error_count, history.error_count)

    def _plan_data(self, plan: Plan) -> bytes:
        data = self._plan_of.get(plan.hash)
        if data is None:
            data = self._plan_of[plan.hash] = plan.to_json()
        return data

    async def _follow_owner(self, fence: int) -> None:
        """Show what another process writes, until all its jobs that are known here have ended, or it has."""
        records = self._followed[fence]
        try:
            async with self.store.follow(fence) as follower:
                alive = True
                while alive and records:
                    alive = await follower.changed()
                    changed = follower.jobs() if alive else None
                    for record in list(records.values()):
                        if changed is not None and record.job_id not in changed:
                            continue
                        owner = await self._catch_up(record)
                        if record.status.ended or record.journal is not None:
                            records.pop(record.job_id, None)
                        elif owner not in (None, fence):  # another process has taken it over
                            records.pop(record.job_id, None)
                            self._follow(record, owner)
        except StoreError as error:
            for record in records.values():
                record.cut_off(error)
        finally:
            del self._followed[fence]

    async def _join_followed(self, record: JobRecord) -> None:
        """Show commits that the follower received between the reading of a record and its registration."""
        try:
            await self._catch_up(record)
        except StoreError as error:
            record.cut_off(error)

    async def _catch_up(self, record: JobRecord) -> int | None:
        """Show the stored state of a job; return its owner."""
        stored = await self.store.find(record.job_id)
        if stored is None:
            record.follow(JobStatus.ABORTED, "it was deleted from the store", record.log.end)
        elif stored.damage is not None:
            record.cut_off(self._damaged(stored, stored.damage))
        elif record.journal is None and not record.status.terminal:
            self._update(record, stored)
        return None if stored is None else stored.owner.fence

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
            history = await read_history(self.store, job_id, record.plan, ERRORS_KEPT)
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

    async def unfinished(self, record: JobRecord) -> dict[int, tuple[dict[str, Any], DfmError | None]]:
        """Return the parameter sets of a job that have not succeeded, with their first errors.

        Raises:
            JobNotFound: the store does not have the job any longer.
            StoreError: what is stored of it is damaged.
        """
        stored = await self._flushed(record)
        history = await read_history(self.store, record.job_id, record.plan, 0)
        of_all, errors = history.first_errors.get(-1), history.first_errors
        numbers = [index for index in range(stored.frames) if of_all or index in errors or index not in history.done]
        rows = await self._rows(record, stored, numbers)
        return {index: (row, errors.get(index, of_all)) for index, row in rows.items()}

    async def params(self, record: JobRecord, index: int | None) -> dict[int, dict[str, Any]]:
        """Return a parameter set of a job, or all of them, by their numbers.

        Raises:
            JobNotFound: the store does not have the job any longer.
            StoreError: what is stored of it is damaged.
            ParameterError: the job does not have this parameter set.
        """
        stored = await self._flushed(record)
        if index is not None and index >= stored.frames:
            last = f"the last one is {stored.frames - 1}" if stored.frames else "it has none"
            raise ParameterError([f"job {record.job_id} has no parameter set {index}: {last}"])
        return await self._rows(record, stored, list(range(stored.frames)) if index is None else [index])

    async def _flushed(self, record: JobRecord) -> StoredJob:
        """Return what is stored of a job, after everything was written."""
        await self.store.flush()
        stored = await self.store.find(record.job_id)
        if stored is None:
            raise JobNotFound(record.job_id, "the store")
        return stored

    async def _rows(self, record: JobRecord, stored: StoredJob, numbers: list[int]) -> dict[int, dict[str, Any]]:
        packed = await self.store.params(record.job_id, numbers)
        return {index: self._params(stored, index, packed.get(index), record.plan) for index in numbers}

    async def give_back(self, left: LeftOver) -> None:
        """Leave a job interrupted that was taken over, and is not resumed after all."""
        left.record.change(JobStatus.INTERRUPTED, "it was not resumed")
        await self.store.flush()

    def _row(self, stored: StoredJob, index: int, data: bytes | None, plan: Plan) -> Row:
        row = self._params(stored, index, data, plan)
        return {name: self._target_codec.pack(value) for name, value in row.items()}

    def _params(self, stored: StoredJob, index: int, data: bytes | None, plan: Plan) -> dict[str, Any]:
        try:
            row = None if data is None else self.codec.loads(data)
        except EncodingError as error:
            raise self._damaged(stored, f"parameter set {index} cannot be read ({error})") from error
        if not isinstance(row, dict) or row.keys() != set(plan.params):
            raise self._damaged(stored, f"parameter set {index} cannot be read")
        return row

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


def _runs_elsewhere(stored: StoredJob) -> bool:
    return not stored.status.ended and stored.owner.alive and not stored.owner.mine
