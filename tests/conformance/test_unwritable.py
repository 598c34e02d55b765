"""Stores that cannot be written any more: unwritten events are never shown, and all waiters are notified."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async import Event, Federation, Job, JobStatus, Pipeline, PlaceParam, Result, Session, StatusChanged, Yield
from dfm_async.errors import JobInterrupted, StoreError
from dfm_async.store.sqlite import SqliteStore
from tests.conftest import TargetName
from tests.support.disks import grow, mounted
from tests.support.pipelines import pipeline_of
from tests.support.postgres import PostgresServer
from tests.support.processes import ROOT
from tests.support.sessions import SHORT
from tests.support.stores import execute_sql
from tests.support.waiting import file_created

LIMIT = 60

fed = Federation("full")
site = fed.site("site")


@site.operation
async def blobs(n: int, size: int) -> Any:
    for number in range(n):
        yield bytes([number % 256]) * size


@site.operation
async def held(folder: str, n: int) -> int:
    """Return at once for 0, and when the file ``open`` exists for others."""
    if n:
        await file_created(f"{folder}/open")
    return n


streams = pipeline_of(blobs, "n", "size")
holds = pipeline_of(held, "folder", "n")


@pytest.fixture(params=["inline", "local"])
def target(request: pytest.FixtureRequest) -> TargetName:
    return request.param  # type: ignore[no-any-return]


class Observed:
    """Everything that the readers of one job have received."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.events: list[Event] = []
        self.results: list[int] = []
        self.called: list[int] = []
        self.errors: list[BaseException] = []
        self.status: JobStatus | None = None

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except StoreError as error:
            self.errors.append(error)

    async def _events(self) -> None:
        async with self.job.events() as events:
            async for event in events:
                self.events.append(event)

    async def _results(self) -> None:
        async with self.job.results() as results:
            async for result in results:
                self.results.append(result.offset)

    async def _wait(self) -> None:
        self.status = await self.job

    async def to_the_end(self) -> None:
        """Read in three ways, each of which must end with a ``StoreError``."""
        await asyncio.gather(*map(self._guarded, (self._events(), self._results(), self._wait())))
        await asyncio.wait_for(self.job.completed.wait(), LIMIT)
        assert len(self.errors) == 3
        assert self.status is None
        assert (self.job.status, self.job.info().status) == (JobStatus.INTERRUPTED, JobStatus.INTERRUPTED)
        assert self.job.info().events == len(self.events)
        assert str(self.errors[0]) == self.job.info().reason
        assert not [event for event in self.events if isinstance(event, StatusChanged) and event.status.ended]

    async def compare(self, session: Session, *, same: bool = False, more: bool = False) -> None:
        """Check that the readers have received what the file has.

        Args:
            session: where the file is read.
            same: whether it is the session that could not write.
            more: whether the file may have further events, of a commit that was in flight.
        """
        again = await session.reattach(self.job.job_id)
        assert again.status is JobStatus.INTERRUPTED
        found: list[Event] = []
        with pytest.raises(StoreError) if same else nullcontext():
            async with again.events() as events:
                async for event in events:
                    found.append(event)
        kept = [event for event in found if not (isinstance(event, StatusChanged) and event.status.ended)]
        if more:
            del kept[len(self.events) :]
        assert [(type(event), event.offset) for event in kept] == [(type(event), event.offset) for event in self.events]
        assert self.results == [event.offset for event in kept if isinstance(event, Result)]
        assert more or again.info().events == self.job.info().events
        assert again.info().errors == self.job.info().errors


def opened(path: Path, target: TargetName, store: SqliteStore | None = None) -> Session:
    return Session(fed, target=target, options=SHORT, store=store or f"sqlite:///{path}")


# a real disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    with mounted(folder, megabytes=2):
        yield folder


@pytest.mark.parametrize(("n", "size"), [(40, 100_000), (100, 30_000), (1000, 4_000), (8000, 300)])
async def test_full_disk_never_shows_unwritten_events(small_disk: Path, target: TargetName, n: int, size: int) -> None:
    path = small_disk / "jobs.db"
    seen = []
    try:
        async with opened(path, target) as session:
            observed = Observed(await session.execute(streams, {"n": n, "size": size}, job_id="x"))
            await observed.to_the_end()
            with pytest.raises(StoreError):
                await observed.job.collect()
            seen = observed.results
    except StoreError as error:
        assert "full" in str(error)  # noqa: PT017 - on closing: not even the reason could be written
    assert len(seen) < n
    async with opened(path, target) as session:
        await observed.compare(session)


async def test_closing_a_session_on_a_full_disk_ends(small_disk: Path) -> None:
    path = small_disk / "jobs.db"
    session = opened(path, "inline")
    await session.connect()
    job = await session.execute(streams, {"n": 40, "size": 100_000}, job_id="x")
    try:
        await session.close()  # the disk may be full by now or not
    except StoreError as error:
        assert "full" in str(error)  # noqa: PT017
    with pytest.raises((StoreError, JobInterrupted)):
        await job
    assert job.status is JobStatus.INTERRUPTED
    shown = job.info().events
    async with opened(path, "inline") as session:
        again = await session.reattach("x")
        assert again.status is JobStatus.INTERRUPTED
        assert again.info().events >= shown


@site.operation(checkpoint=True)
async def noise(number: int) -> bytes:
    return random.Random(number).randbytes(100_000)


@site.operation
async def length(data: bytes) -> int:
    return len(data)


with Pipeline("lengths") as lengths:
    Yield(length(noise(PlaceParam("number"))))


async def test_calls_whose_checkpoints_do_not_fit_on_the_disk_fail_and_can_be_retried(
    small_disk: Path, store_path: Path, target: TargetName
) -> None:
    options = msgspec.structs.replace(SHORT, checkpoints=str(small_disk))
    async with Session(fed, target=target, options=options, store=f"sqlite:///{store_path}") as session:
        job = await session.execute(lengths, [{"number": number} for number in range(30)], concurrency=1)
        assert await job.wait_until_finished(LIMIT)
        failed = await job.failures()
        assert 0 < len(failed) < 30
        assert len(await job.collect(errors="skip")) == 30 - len(failed)
        assert all("database or disk is full" in str(found.error) for found in failed)
        grow(small_disk, megabytes=16)
        again = await job.retry_failed()
        assert await again is JobStatus.FINISHED
        assert len(await again.collect()) == len(failed)


@site.operation
async def noises(n: int) -> Any:
    for number in range(n):
        yield random.Random(number).randbytes(100_000)


async def test_full_disk_of_a_database_server_never_shows_unwritten_events(postgres: PostgresServer) -> None:
    with postgres.small_database(megabytes=14) as (url, disk):
        seen, stream = [], pipeline_of(noises, "n")
        try:
            async with Session(fed, target="inline", options=SHORT, store=url) as session:
                assert await (await session.execute(stream, {"n": 20}, job_id="fits")) is JobStatus.FINISHED
                observed = Observed(await session.execute(stream, {"n": 80}, job_id="x"))
                await observed.to_the_end()
                seen = observed.results
        except StoreError as error:
            assert "space" in str(error)  # noqa: PT017 - on closing: not even the reason could be written
        assert len(seen) < 80
        grow(disk, megabytes=50)
        async with Session(fed, target="inline", options=SHORT, store=url) as session:
            await observed.compare(session)
            assert len(await (await session.reattach("fits")).collect()) == 20
            job = await session.resume("x")
            assert await job is JobStatus.FINISHED
            assert len(await job.collect()) == 80


LIMITED = """
import asyncio, resource, sys
from tests.conformance.test_unwritable import Observed, opened, streams
from dfm_async.errors import StoreError

async def main(path, limit):
    session = opened(path, "inline")
    await session.connect()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    observed = Observed(await session.execute(streams, {"n": 300, "size": 5000}, job_id="x"))
    await observed.to_the_end()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await observed.compare(session, same=True)
    job = await session.resume("x")
    await job
    assert len(await job.collect()) == 300
    await session.close()
    print("kept", len(observed.results))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("limit", [120_000, 500_000])
async def test_a_file_that_may_not_grow_is_a_full_disk(store_path: Path, limit: int) -> None:
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIMITED, str(store_path), str(limit), cwd=ROOT, stdout=-1, stderr=-1, env=dict(os.environ)
    )
    out, err = await asyncio.wait_for(done.communicate(), LIMIT)
    assert (done.returncode, err.decode()) == (0, "")
    assert int(out.split()[1]) < 300


# commits that fail for other reasons

FAIL_FROM = """
    CREATE TRIGGER broken BEFORE INSERT ON entries WHEN (SELECT count(*) FROM entries) >= {} BEGIN
    SELECT RAISE(ABORT, 'no luck'); END
"""
FAIL_STATUS = """
    CREATE TRIGGER broken BEFORE UPDATE ON jobs WHEN new.status = '{}' BEGIN SELECT RAISE(ABORT, 'no luck'); END
"""

Break = Callable[[Path, SqliteStore], Any]


def trigger(text: str) -> Break:
    return lambda store_path, _store: execute_sql(store_path, text)


async def _read_only(store: SqliteStore) -> None:
    assert store._database is not None
    await store._database.run(lambda connection: connection.execute("PRAGMA query_only = ON"))


BREAKS: dict[str, Break] = {
    **{f"at write {number}": trigger(FAIL_FROM.format(number)) for number in (0, 1)},
    "at its end": trigger(FAIL_STATUS.format("finished")),
    "read-only": lambda _path, store: _read_only(store),
    "owned by another": lambda store_path, _store: execute_sql(store_path, "UPDATE jobs SET fence = fence + 1000"),
    "events missing": lambda store_path, _store: execute_sql(store_path, 'UPDATE jobs SET "end" = "end" + 3'),
    "number damaged": lambda store_path, _store: execute_sql(store_path, "UPDATE jobs SET \"end\" = 'three'"),
    "replaced": lambda store_path, _store: store_path.write_bytes(
        store_path.rename(store_path.with_suffix(".old")).read_bytes()
    ),
}


@pytest.mark.parametrize("how", BREAKS)
async def test_a_commit_that_fails_interrupts_its_job(store_path: Path, tmp_path: Path, how: str) -> None:
    store = SqliteStore(store_path)
    session = opened(store_path, "inline", store)
    await session.connect()
    job = await session.execute(holds, [{"folder": str(tmp_path), "n": n} for n in range(6)], job_id="x")
    observed = Observed(job)
    reading = asyncio.create_task(observed.to_the_end())
    async with job.events() as events:
        first = await anext(events)
    assert first.offset == 0
    done = BREAKS[how](store_path, store)
    if asyncio.iscoroutine(done):
        await done
    (tmp_path / "open").touch()
    await reading
    with suppress(StoreError):  # not even the reason could be written
        await session.close()
    if how in ("owned by another", "events missing", "number damaged", "replaced"):
        return
    execute_sql(store_path, "DROP TRIGGER IF EXISTS broken")
    async with opened(store_path, "inline") as session:
        await observed.compare(session)
        job = await session.resume("x")
        assert await job is JobStatus.FINISHED
        assert sorted(result.value for result in await job.collect()) == list(range(6))


async def test_job_can_be_resumed_after_one_failed_commit(store_path: Path, tmp_path: Path) -> None:
    called: list[int] = []
    async with opened(store_path, "inline") as session:
        sets = [{"folder": str(tmp_path), "n": n} for n in range(4)]
        job = await session.execute(holds, sets, job_id="x", default_callback=lambda *args: called.append(args[-1]))
        await job.first()
        execute_sql(store_path, FAIL_FROM.format(0))
        (tmp_path / "open").touch()
        observed = Observed(job)
        await observed.to_the_end()
        assert called == [0]
        execute_sql(store_path, "DROP TRIGGER broken")
        await observed.compare(session, same=True)
        assert [info.status for info in session.infos()] == [JobStatus.INTERRUPTED]
        again = await session.resume("x")
        assert await again is JobStatus.FINISHED
        assert (again.info().reason, again.info().errors, again.info().done) == (None, 0, 4)
        assert await job is JobStatus.FINISHED, "the handle from before shows it, too"
        assert sorted(result.value for result in await again.collect()) == list(range(4))


async def test_failed_commit_does_not_affect_idle_jobs(store_path: Path, tmp_path: Path) -> None:
    async with opened(store_path, "inline") as session:
        waiting = await session.execute(holds, {"folder": str(tmp_path), "n": 1}, job_id="waits")
        async with waiting.events() as events:
            await anext(events)
        execute_sql(store_path, FAIL_FROM.format(0))
        with pytest.raises(StoreError, match="no luck"):
            await (await session.execute(streams, {"n": 3, "size": 10}, job_id="fails"))
        execute_sql(store_path, "DROP TRIGGER broken")
        (tmp_path / "open").touch()
        assert await waiting is JobStatus.FINISHED
        later = await session.execute(streams, {"n": 3, "size": 10}, job_id="later")
        assert len(await later.collect()) == 3


async def test_a_reason_that_can_be_written_again_is_in_the_file(store_path: Path) -> None:
    async with opened(store_path, "inline") as session:
        execute_sql(store_path, FAIL_STATUS.format("running"))
        job = await session.execute(streams, {"n": 3, "size": 10}, job_id="x")
        with pytest.raises(StoreError, match="no luck"):
            await job
        execute_sql(store_path, "DROP TRIGGER broken")
    async with opened(store_path, "inline") as session:
        info = (await session.reattach("x")).info()
        assert info.status is JobStatus.INTERRUPTED
        assert "no luck" in (info.reason or "")


async def test_a_value_that_no_row_can_hold_interrupts_its_job(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "largest", 100_000)
    async with opened(store_path, "inline") as session:
        observed = Observed(await session.execute(streams, {"n": 1, "size": 200_000}, job_id="x"))
        await observed.to_the_end()
        await observed.compare(session, same=True, more=True)
