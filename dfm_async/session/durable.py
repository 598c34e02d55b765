"""The durable jobs of a session: those that it runs, and those of other processes, which are listed and followed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

from dfm_async.base.backoff import delays
from dfm_async.base.containers import BoundedDict
from dfm_async.base.signals import Signal
from dfm_async.base.tasks import in_thread
from dfm_async.engine.durable_jobs import PAGE, DurableJobs, runs_elsewhere
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobTable
from dfm_async.engine.journal import read_history
from dfm_async.errors import DfmError, EncodingError, JobNotFound, ParameterError, StoreError
from dfm_async.model.ids import Frame, JobId
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.session.parameters import ParameterSets, stored_row
from dfm_async.session.steering import OwnedJobs, RemoteSteering
from dfm_async.site import checkpoints
from dfm_async.store.base import Position, Store, StoredJob
from dfm_async.wire.codec import Codec

_log = logging.getLogger(__name__)

_PLANS: Final = 128
_UNSEEN: Final = 1000
"""How many jobs of other processes are noted to be read; if there are more, all that are active are read."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
"""The number of seconds until they are read again after an error, at first and at most."""
_ACTIVE: Final = JobFilter(status=JobStatus.RUNNING)
_UNREADABLE: Final = Plan(
    pipeline=None, federation="", api_version="", homesite="", locations=(), nets=(), params=(), uses=(), nodes=()
)
"""Replaces a plan that cannot be read."""


class SessionValues:
    """How a session stores values: without pickle, so that a file can be read although it is untrusted.

    ``target_codec`` packs parameter sets for the sites.
    """

    def __init__(self, target_codec: Codec) -> None:
        self.codec = Codec.for_store()
        """Encodes values for the store."""
        self._target_codec = target_codec
        self._plans: BoundedDict[str, bytes] = BoundedDict(_PLANS)
        self.load_plan = functools.lru_cache(_PLANS)(Plan.from_json)

    def plan(self, plan: Plan) -> bytes:
        """Return the bytes of a plan."""
        data = self._plans.get(plan.hash)
        if data is None:
            data = self._plans[plan.hash] = plan.to_json()
        return data

    def row(self, row: Row) -> bytes:
        """Return the bytes of a parameter set."""
        return stored_row(row)

    def load_row(self, data: bytes, plan: Plan) -> Row:
        """Return a parameter set, packed for the sites."""
        return {name: self._target_codec.pack(value) for name, value in self.params(data, plan).items()}

    def params(self, data: bytes, plan: Plan) -> dict[str, Any]:
        """Return the values of a parameter set.

        Raises:
            EncodingError, ValueError: it cannot be read, or does not fit the plan.
        """
        row = self.codec.loads(data)
        if not isinstance(row, dict) or row.keys() != set(plan.params):
            raise ValueError("it does not have the parameters of its pipeline")
        return row

    def batch(self, values: Sequence[Any]) -> bytes:
        """Return the bytes of results."""
        return self.codec.dumps([self.codec.pack(value) for value in values])

    def load_batch(self, data: bytes) -> Sequence[Any]:
        """Return results."""
        return self.codec.loads_batch(data)


class SessionJobs(DurableJobs):
    """Connect the jobs of a session with a store that it may share with other processes.

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
        self.values = SessionValues(target_codec)
        super().__init__(store, jobs, spawn, self.values, folder)
        self._spawn_task = spawn
        self._limit = listed
        self._listed: list[StoredJob] = []
        self._reading: list[set[str]] = []
        self._followed: dict[int, dict[str, JobRecord]] = {}
        self._unseen: set[str] | None = set()
        self._signal = Signal()
        self._watching = False
        self.codec = self.values.codec
        self.remote = RemoteSteering(store)
        """Steers jobs of other processes."""
        self.owned: OwnedJobs | None = None
        """Carries out what other processes request."""
        store.on_request, store.on_change = self._requested, self._changed

    def serve(self, params: ParameterSets) -> None:
        """Carry out what other processes request for the jobs that run here."""
        self.owned = OwnedJobs(self.store, self._jobs, self._spawn_task, params, self.codec)
        self._spawn(self.owned.run())

    def _requested(self) -> None:
        if self.owned is not None:  # else it begins with reading them
            self.owned.notify()

    def _changed(self, jobs: Collection[str] | None) -> None:
        """Note jobs that other processes have changed, if somebody watches all jobs; None: any of them."""
        if not self._jobs.changes.readers:
            return
        if jobs is None or (self._unseen is not None and len(self._unseen) >= _UNSEEN):
            self._unseen = None
        elif self._unseen is not None:
            self._unseen.update(jobs)
        self._signal.notify()

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
        while page := await self.store.jobs(before=before, limit=PAGE):
            for stored in page:
                if stored.damage is None and not any(f"job {stored.job_id} " in problem for problem in damaged):
                    try:
                        plan, _ = self._decoded(stored)
                        await read_history(self.store, self._values, stored.job_id, plan, 0)
                    except StoreError as error:
                        yield error
                count += 1
                if progress is not None:
                    progress(count, max(count, total))
            before = page[-1].created, page[-1].job_id

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
            if runs_elsewhere(stored) or (known is not None and known.journal is None):
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
        while page := await self.store.jobs(_ACTIVE, before=before, limit=PAGE):
            for stored in page:
                if runs_elsewhere(stored):
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
        while not page or len(page) == PAGE:
            page = await self.store.jobs(wanted, before=before, limit=PAGE)
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

    def _deleted(self, job_ids: set[str]) -> None:
        super()._deleted(job_ids)
        self._listed = [stored for stored in self._listed if stored.job_id not in job_ids]
        for deleted in self._reading:
            deleted |= job_ids

    def _know(self, stored: StoredJob) -> JobRecord:
        record = super()._know(stored)
        if record.journal is None and runs_elsewhere(stored):
            self._follow(record, stored.owner.fence)
        return record

    def _show(self, stored: StoredJob) -> None:
        with contextlib.suppress(StoreError):  # a damaged job is listed as such
            self._know(stored)

    def _follow(self, record: JobRecord, fence: int) -> None:
        """Show what another process writes of a job, from now on."""
        if fence in self._followed:
            if record.job_id not in self._followed[fence]:
                self._followed[fence][record.job_id] = record
                self._spawn(self._join_followed(record))
        else:
            self._followed[fence] = {record.job_id: record}
            self._spawn(self._follow_owner(fence))

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

    async def unfinished(self, record: JobRecord) -> dict[int, tuple[dict[str, Any], DfmError | None]]:
        """Return the parameter sets of a job that have not succeeded, with their first errors.

        Raises:
            JobNotFound: the store does not have the job any longer.
            StoreError: what is stored of it is damaged.
        """
        stored = await self._flushed(record)
        history = await read_history(self.store, self._values, record.job_id, record.plan, 0)
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

    def _params(self, stored: StoredJob, index: int, data: bytes | None, plan: Plan) -> dict[str, Any]:
        try:
            if data is not None:
                return self.values.params(data, plan)
            problem = "is missing"
        except (EncodingError, ValueError) as error:
            problem = f"cannot be read ({error})"
        raise self._damaged(stored, f"parameter set {index} {problem}")
