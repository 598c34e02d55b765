"""The journal of a hub: its jobs in a store at the server, so that they outlive it. Values stay opaque."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dfm_async.base.tasks import in_thread
from dfm_async.base.wall_clock import wall_time
from dfm_async.engine.durable_jobs import PAGE, DurableJobs
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobTable
from dfm_async.errors import StoreError
from dfm_async.model.flare import SiteSettings
from dfm_async.model.job_filter import ALL_JOBS, JobFilter
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.store.base import Position, Store, StoredJob
from dfm_async.store.urls import open_store
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.event_messages import OpaqueValues

_log = logging.getLogger(__name__)

_FOLDER: Final = "journal"
"""The folder of the journals, in the server's workspace."""
_URLS: Final = ("postgresql://", "postgres://")
_CODE_KEPT: Final = 3600.0
"""The number of seconds for which code is kept at least: a job that needs it may be about to be stored."""
_LISTED: Final = 100
"""The number of ended jobs that are listed, the newest."""
_MODE: Final = 0o700
_TEMPORARY: Final = "new-"
_UNFINISHED: Final = JobFilter(status=JobStatus.INTERRUPTED)

_encode: Final = msgspec.msgpack.Encoder().encode
_row: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_plan: Final = msgspec.json.Decoder(Plan)


class KeptSubmission(msgspec.Struct, frozen=True, array_like=True):
    """What is stored of a submission besides the specification of the job. New fields go to the end.

    Attributes:
        plan: the plan, whose constants only the sites decode.
        nets: the net of each location.
        offers: the code that each site runs, if the application has brought it.
        token: as in :class:`~dfm_async.targets.flare.protocol.Submit`.
        lanes: the number of lanes of the application.
        slots: the number of its jobs that may run at the same time.
        began: when the time of the job's deadline began, by the clock of the server.
    """

    plan: bytes
    nets: tuple[bytes, ...]
    offers: dict[str, str]
    token: str
    lanes: int
    slots: int
    began: float


_submission: Final = msgspec.msgpack.Decoder(KeptSubmission)


class OpaqueStored:
    """How a hub stores values: as they came."""

    def __init__(self) -> None:
        self._values = OpaqueValues()

    def row(self, row: Row) -> bytes:
        """Return the bytes of a parameter set."""
        return _encode(row)

    def load_row(self, data: bytes, plan: Plan) -> Row:
        """Return a parameter set.

        Raises:
            ValueError: it cannot be read, or lacks a parameter.
        """
        row = _row.decode(data)
        if missing := set(plan.params) - row.keys():
            raise ValueError(f"it has no parameter {min(missing)!r}")
        return row

    def batch(self, values: Sequence[Any]) -> bytes:
        """Return the bytes of results."""
        return _encode(values)

    def load_batch(self, data: bytes) -> Sequence[Any]:
        """Return results."""
        return self._values.loads_batch(data)

    def load_plan(self, data: bytes) -> Plan:
        """Return the plan of a job."""
        return _plan.decode(_submission.decode(data).plan)


class JournalPlace(NamedTuple):
    """Where the jobs of one user are kept, and how many of them.

    Attributes:
        store: the store of these jobs, and of no others.
        code: the folder for code that applications bring.
        keep_for: for how many seconds ended jobs are kept.
        max_bytes: how many bytes a file may hold before ended jobs are deleted.
    """

    store: Store
    code: Path
    keep_for: float
    max_bytes: int

    @classmethod
    def find(
        cls, settings: SiteSettings, workspace: Path, user: str, organisation: str, *, brings_code: bool
    ) -> JournalPlace | None:
        """Return the place for the jobs of a user as FLARE knows it; None if the server keeps no journal.

        Jobs that bring code have one of their own, as they have host jobs of their own.

        Raises:
            StoreError: the store cannot be used, and why.
        """
        where = settings.journal
        if not where:
            return None
        kind = "travels" if brings_code else "installed"
        digest = hashlib.sha256("\0".join([user, organisation, kind]).encode()).hexdigest()[:24]
        url = where if isinstance(where, str) and where.startswith(_URLS) else None
        folder = workspace / (where if isinstance(where, str) and url is None else _FOLDER) / digest
        try:
            folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder of the journal cannot be made ({error})"
            raise StoreError(str(folder), problem, "Make it writable, or choose another one (journal)") from error
        store = open_store(f"sqlite:///{folder / 'jobs.db'}" if url is None else url, schema=f"dfm_hub_{digest}")
        return cls(store, folder / "code", settings.journal_keep_for, settings.journal_max_bytes)


class HubJournal(DurableJobs):
    """The jobs of one user in a store.

    Args:
        place: where they are kept.
        jobs: the jobs of the hub.
        spawn: starts a task that ends with the hub.
        on_written: is called with the ids of jobs of which something was written.
    """

    def __init__(
        self,
        place: JournalPlace,
        jobs: JobTable[Any],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_written: Callable[[Iterable[str]], None],
    ) -> None:
        super().__init__(place.store, jobs, spawn, OpaqueStored(), None)
        self._place = place
        self._on_written = on_written
        self._full = False
        """Whether unfinished jobs alone take more than the limit, so that it takes no further ones."""

    def _committed(self, ends: dict[str, int]) -> None:
        super()._committed(ends)
        self._on_written(ends)

    def _stop_writing(self, job_id: str, error: StoreError) -> None:
        super()._stop_writing(job_id, error)
        self._on_written([job_id])  # its state is another one, although nothing was written

    def _decoded(self, stored: StoredJob) -> tuple[Plan, JobSpec]:
        plan, spec = super()._decoded(stored)
        return plan, msgspec.structs.replace(spec, stored=False)  # sites encode results for the application

    def job_of(self, stored: StoredJob) -> JobRecord:
        """Return the record of a job that has ended.

        Raises:
            StoreError: what is stored of it is damaged.
        """
        return self._know(stored)

    def submission(self, stored: StoredJob) -> KeptSubmission:
        """Return what is kept of the submission of a job.

        Raises:
            StoreError: it is damaged.
        """
        try:
            return _submission.decode(stored.plan)
        except ValueError as error:
            raise self._damaged(stored, f"its submission cannot be read ({error})") from error

    def missing(self, stored: StoredJob, deployed: Iterable[str]) -> tuple[str, ...]:
        """Return sites of a job that are not among those that a host job was sent to, and never will be.

        Another host job, with all of them, is to go on with the job.

        Raises:
            StoreError: what is stored of it is damaged.
        """
        return tuple(sorted(set(self._decoded(stored)[0].sites_at).difference(deployed)))

    async def keep(
        self,
        record: JobRecord,
        rows: Sequence[Row],
        submission: KeptSubmission,
        offers: list[fm.Offer],
        *,
        stopped: bool,
    ) -> bool:
        """Store a new job, and the code that it needs; False if its id is taken.

        Raises:
            StoreError: it cannot be written, or there is no room.
        """
        if self._full:
            problem = f"unfinished jobs of this user fill it: {self._place.max_bytes:,} bytes (journal_max_bytes)"
            raise StoreError(self.store.path, problem, "Wait until jobs have ended, or cancel some")
        for offer in offers:
            await self._keep_code(offer)
        return await self.create(record, rows, plan=_encode(submission), stopped=stopped)

    # lists

    async def unfinished(self) -> AsyncIterator[StoredJob]:
        """Yield the jobs that have not ended, wherever they run."""
        before: Position | None = None
        while page := await self.store.jobs(_UNFINISHED, before=before, limit=PAGE):
            for stored in page:
                if stored.damage is None and not stored.status.terminal:
                    yield stored
            before = page[-1].created, page[-1].job_id

    async def ended(self) -> list[str]:
        """Return the newest jobs that have ended, the oldest of them first."""
        newest = await self.store.jobs(ALL_JOBS, limit=_LISTED)
        return [stored.job_id for stored in reversed(newest) if stored.damage is None and stored.status.terminal]

    # code

    def _code_file(self, site: str, key: str) -> Path:
        return self._place.code / hashlib.sha256(f"{site}\0{key}".encode()).hexdigest()

    async def _keep_code(self, offer: fm.Offer) -> None:
        path = self._code_file(offer.site, offer.key)

        def write() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return
            path.parent.mkdir(mode=_MODE, exist_ok=True)
            temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
            temporary.write_bytes(fm.encode(offer))
            temporary.replace(path)

        try:
            await in_thread(write, "journal")
        except OSError as error:
            problem = f"the code of site {offer.site!r} cannot be kept ({error})"
            raise StoreError(str(path), problem, "See that the disk of the server has room") from error

    async def code(self, site: str, key: str) -> fm.Offer | None:
        """Return code that an application has brought for a site; None if it is not kept, or was changed."""
        path = self._code_file(site, key)
        try:
            offer = fm.decode_app(await in_thread(path.read_bytes, "journal"))
        except (OSError, ValueError) as error:
            _log.warning("code of site %s cannot be read: %s", site, error)
            return None
        return offer if isinstance(offer, fm.Offer) and (offer.site, offer.key) == (site, key) else None

    # retention

    async def tidy(self) -> None:
        """Delete jobs that ended too long ago, then the oldest ones while the store is too large.

        Raises:
            StoreError: they cannot be deleted.
        """
        await self.prune(wall_time() - self._place.keep_for, None)
        self._full = await self._too_large()
        while self._full and await self.prune_page(wall_time(), None):
            self._full = await self._too_large()
        await self._drop_code()

    async def _too_large(self) -> bool:
        size = await self.store.size()
        return size is not None and size > self._place.max_bytes

    async def _drop_code(self) -> None:
        """Delete code that no unfinished job needs."""
        if not self._place.code.exists():
            return
        needed: set[str] = set()
        async for stored in self.unfinished():
            with contextlib.suppress(StoreError):  # one that is damaged cannot go on
                needed |= {self._code_file(site, key).name for site, key in self.submission(stored).offers.items()}

        def drop() -> None:
            for path in self._place.code.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another hub of the user was faster
                    if path.name not in needed and path.stat().st_mtime < time.time() - _CODE_KEPT:
                        path.unlink()

        try:
            await in_thread(drop, "journal")
        except OSError as error:
            _log.warning("code that no job needs cannot be deleted: %s", error)
