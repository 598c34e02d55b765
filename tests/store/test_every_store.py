"""What stores do in every database."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfm_async.errors import JobNotFound, JobOwned, StoreError
from dfm_async.model.job_filter import JobFilter, lowered
from dfm_async.model.status import JobStatus
from dfm_async.store import Store
from dfm_async.store.base import Entry, StoredJob
from dfm_async.store.rows import VERSION, storable
from tests.store.backends import Backend
from tests.store.conftest import AnyOpener
from tests.store.helpers import entry, everything, found, new_job, row


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


@pytest.fixture
def opened(any_opened: AnyOpener) -> AnyOpener:
    return any_opened


@pytest.fixture
def errors(store: Store) -> list[StoreError]:
    reported: list[StoreError] = []
    store.on_error = reported.append
    return reported


# writing and reading


async def test_closing_commits_what_is_queued(opened: AnyOpener) -> None:
    store = await opened()
    await store.create(new_job("j"))
    for offset in range(100):
        store.append("j", entry(offset))
    await store.close()
    assert await everything(await opened()) == [entry(offset) for offset in range(100)]


async def test_closed_store_raises(store: Store) -> None:
    await store.close()
    with pytest.raises(StoreError, match="not open"):
        store.append("j", entry(0))
    with pytest.raises(StoreError, match="not open"):
        store.add_params("j", 0, [])
    with pytest.raises(StoreError, match="not open"):
        store.update("j")
    for wait in (store.flush, store.jobs, lambda: store.find("j"), lambda: store.create(new_job("j"))):
        with pytest.raises(StoreError, match="not open"):
            await wait()


async def test_a_store_can_be_opened_again(store: Store) -> None:
    await store.create(new_job("j"))
    first = store.fence
    await store.close()
    await store.open()
    assert store.fence > first
    assert (await found(store)).status is JobStatus.INTERRUPTED


async def test_new_job_is_stored_as_it_was_passed(backend: Backend, store: Store) -> None:
    assert await store.create(new_job("j"))
    job = await found(store)
    assert job == StoredJob(
        job_id="j",
        plan=b"plan",
        fingerprint="fingerprint",
        options=b"options",
        created=12.5,
        finished=None,
        status=JobStatus.SUBMITTED,
        reason=None,
        end=0,
        frames=0,
        stopped=False,
        errors=0,
        done=0,
        owner=job.owner,
    )
    assert (job.owner.fence, job.owner.pid, job.owner.alive, job.owner.mine) == (store.fence, os.getpid(), True, True)
    assert await backend.execute("SELECT job_id FROM jobs") == [("j",)], "it is committed when create returns"


async def test_an_id_that_is_taken(store: Store) -> None:
    outcomes = await asyncio.gather(*(store.create(new_job("j", b"%d" % number)) for number in range(5)))
    assert outcomes == [True, False, False, False, False]
    assert (await found(store)).plan == b"0"


async def test_jobs_come_in_the_order_of_their_creation(store: Store) -> None:
    for job_id in "zebra", "ant", "mole":
        await store.create(new_job(job_id))
    await store.delete("ant")
    await store.create(new_job("ant"))
    assert [job.job_id for job in await store.jobs()] == ["zebra", "mole", "ant"]


_texts = st.sampled_from([None, "", "x", "X", "ä", "\0", "\udc80"])
_filters = st.builds(
    JobFilter,
    status=st.sampled_from([None, JobStatus.FINISHED, JobStatus.FAILED, JobStatus.RUNNING, JobStatus.INTERRUPTED]),
    pipeline=_texts,
    label=_texts,
    since=st.none() | st.integers(0, 4).map(float),
    until=st.none() | st.integers(0, 4).map(float),
    search=st.sampled_from([None, "X", "a x", "\0", "ä", "Ä", "%", "_"]),
)


def in_list(job: StoredJob, names: tuple[str | None, str | None], wanted: JobFilter) -> bool:
    """Return whether a list of a store has a job, with these names of its pipeline and label."""
    if wanted.status is not None and wanted.status.terminal != job.status.terminal:
        return False
    text = storable(lowered(" ".join([job.job_id, *filter(None, names)]))) or ""
    return (
        (wanted.status is None or not wanted.status.terminal or wanted.status is job.status)
        and wanted.pipeline in (None, names[0])
        and wanted.label in (None, names[1])
        and (wanted.since is None or job.created >= wanted.since)
        and (wanted.until is None or job.created < wanted.until)
        and all((storable(word) or "") in text for word in wanted.words)
    )


def position(listed: list[StoredJob]) -> tuple[float, str] | None:
    return (listed[-1].created, listed[-1].job_id) if listed else None


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_lists_have_the_jobs_that_fit_in_pages_of_any_size(store: Store, data: st.DataObject) -> None:
    for job in await store.jobs():
        await store.delete(job.job_id)
    names: dict[str, tuple[str | None, str | None]] = {}
    for job_id in data.draw(st.lists(st.sampled_from("aAbBäzZ_"), unique=True, max_size=8)):
        names[job_id] = data.draw(_texts), data.draw(_texts)
        pipeline, label = names[job_id]
        created = float(data.draw(st.integers(0, 3)))
        change = {"pipeline": pipeline, "label": label, "created": created}
        await store.create(msgspec.structs.replace(new_job(job_id), **change))
        status = data.draw(st.sampled_from([JobStatus.FINISHED, JobStatus.FAILED, JobStatus.RUNNING, None]))
        if status is not None:
            store.update(job_id, status=status)
    await store.flush()
    jobs = sorted(await store.jobs(), key=lambda job: (job.created, job.job_id), reverse=True)
    assert await store.jobs() == jobs
    assert {job.job_id for job in jobs} == names.keys()
    for _ in range(5):
        wanted, size = data.draw(_filters), data.draw(st.integers(1, 3))
        listed: list[StoredJob] = []
        while page := await store.jobs(wanted, before=position(listed), limit=size):
            assert len(page) <= size
            listed += page
        assert listed == [job for job in jobs if in_list(job, names[job.job_id], wanted)]


async def test_missing_jobs_have_no_data(store: Store) -> None:
    assert await store.find("j") is None
    assert await store.jobs() == []
    assert await store.read("j", 0) == []
    assert [e async for e in store.heads("j")] == []
    assert await store.params("j", [0, 1]) == {}
    for refused in store.take_over, store.delete:
        with pytest.raises(JobNotFound):
            await refused("j")


async def test_changes_keep_what_they_do_not_name(store: Store) -> None:
    await store.create(new_job("j"))
    store.update("j", status=JobStatus.RUNNING)
    store.update("j", stopped=True)
    await store.flush()
    store.update("j", status=JobStatus.ABORTED, reason="why", finished=99.0)
    await store.flush()
    store.update("j")
    await store.flush()
    job = await found(store)
    assert (job.status, job.stopped, job.reason, job.finished) == (JobStatus.ABORTED, True, "why", 99.0)


async def test_reading_begins_with_the_entry_that_holds_the_offset(store: Store) -> None:
    await store.create(new_job("j"))
    entries = [entry(0, 3), entry(3, 1), entry(4, 10), entry(14, 2)]
    for item in entries:
        store.append("j", item)
    await store.flush()
    for start, expected in [(0, 0), (2, 0), (3, 1), (4, 2), (13, 2), (14, 3), (15, 3), (16, 4), (99, 4)]:
        assert await store.read("j", start) == entries[expected:]


async def test_reading_gives_about_as_much_as_was_asked_for_but_at_least_one(store: Store) -> None:
    await store.create(new_job("j"))
    for offset in range(10):
        store.append("j", Entry(offset, 1, 0, b"", bytes(100)))
    await store.flush()
    assert len(await store.read("j", 0, max_bytes=350)) == 3
    assert len(await store.read("j", 0, max_bytes=1)) == 1
    assert len(await store.read("j", 0)) == 10


async def test_heads_come_without_payloads_over_many_pages(store: Store) -> None:
    await store.create(new_job("j"))
    for offset in range(0, 5002, 2):
        store.append("j", entry(offset, 2))
    await store.flush()
    heads = [item async for item in store.heads("j")]
    assert heads == [Entry(first, 2, first % 7, b"head %d" % first, b"") for first in range(0, 5002, 2)]
    assert [item.first async for item in store.heads("j", 4997)] == [4998, 5000]


async def test_more_parameter_sets_than_a_statement_has_variables(store: Store) -> None:
    await store.create(new_job("j"))
    store.add_params("j", 0, [row(number) for number in range(40_000)])
    await store.flush()
    assert (await found(store)).frames == 40_000
    rows = await store.params("j", range(-5, 40_005))
    assert rows == {number: row(number) for number in range(40_000)}


async def test_a_deleted_job_is_gone_with_all_it_had(backend: Backend, store: Store) -> None:
    for job_id in "j", "k":
        await store.create(new_job(job_id))
        store.append(job_id, entry(0))
        store.add_params(job_id, 0, [row(0)])
    await store.delete("j")
    assert [job.job_id for job in await store.jobs()] == ["k"]
    for table in "jobs", "plans", "params", "entries":
        assert await backend.execute(f"SELECT count(*) FROM {table}") == [(1,)]
    assert await everything(store, "k") == [entry(0)]


async def test_a_store_of_a_newer_version_is_refused_with_both_versions(backend: Backend, store: Store) -> None:
    await backend.execute(f"UPDATE meta SET version = {VERSION + 1}")
    with pytest.raises(StoreError, match=f"version {VERSION + 1}, this is for version {VERSION}. Use a newer"):
        await backend.make().open()


async def test_a_store_of_the_first_version_is_migrated(backend: Backend, opened: AnyOpener) -> None:
    old = await opened()
    await old.create(new_job("j"))
    await old.close()
    for statement in "DROP TABLE requests", "DROP INDEX jobs_by_end", "UPDATE meta SET version = 1":
        await backend.execute(statement)
    for statement in "DROP TABLE garbage", "DROP INDEX jobs_open":
        with suppress(sqlite3.Error, psycopg.Error):  # only one of the databases has it
            await backend.execute(statement)
    store = await opened()
    assert store.migrated_from == 1
    assert await backend.execute("SELECT version FROM meta") == [(VERSION,)]
    await store.take_over("j")
    assert await store.request("j", b"data") is not None


async def test_two_stores_in_one_process_are_two_owners(store: Store, opened: AnyOpener) -> None:
    await store.create(new_job("j"))
    store.update("j", status=JobStatus.RUNNING)
    await store.flush()
    other = await opened()
    job = await found(other)
    assert (job.owner.mine, job.owner.alive, job.status) == (False, True, JobStatus.RUNNING)
    for refused in other.take_over, other.delete:
        with pytest.raises(JobOwned) as caught:
            await refused("j")
        assert caught.value.pid == os.getpid()
    await store.close()
    assert (await found(other)).status is JobStatus.INTERRUPTED
    taken = await other.take_over("j")
    assert (taken.owner.mine, taken.status) == (True, JobStatus.SUBMITTED)


async def test_a_job_of_ours_can_be_taken_over_with_what_is_queued(store: Store) -> None:
    await store.create(new_job("j"))
    store.append("j", entry(0, 5))
    assert (await store.take_over("j")).end == 5


# commits


async def test_every_commit_is_reported_with_the_ends_of_its_jobs(store: Store) -> None:
    told: list[dict[str, int]] = []
    store.on_commit = told.append
    await store.create(new_job("j"))
    await store.create(new_job("k"))
    store.append("j", entry(0, 3))
    store.append("j", entry(3))
    store.update("k", status=JobStatus.RUNNING)
    assert store.backlog > 0
    await store.flush()
    assert store.backlog == 0
    assert told == [{"j": 0}, {"k": 0}, {"j": 4, "k": 0}]


async def test_what_is_queued_during_a_commit_goes_into_the_next_one(store: Store) -> None:
    ends: list[int] = []
    store.on_commit = lambda told: ends.append(told["j"])
    await store.create(new_job("j"))
    for offset in range(10_000):
        store.append("j", entry(offset))
        if offset % 100 == 0:
            await asyncio.sleep(0)
    await store.flush()
    assert ends == sorted(set(ends))
    assert ends[-1] == 10_000
    assert 1 < len(ends) < 1000


async def test_a_flush_with_nothing_to_do_returns(store: Store) -> None:
    await store.flush()


async def test_a_callback_that_raises_does_not_stop_the_store(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: dict[str, int]) -> None:
        raise ValueError("broken")

    store.on_commit = broken
    await store.create(new_job("j"))
    store.append("j", entry(0))
    await store.flush()
    assert (await found(store)).end == 1
    assert "a callback raised" in caplog.text


async def test_fenced_owner_writes_no_more_of_its_job(backend: Backend, store: Store) -> None:
    fenced: list[str] = []
    ends: list[dict[str, int]] = []
    await store.create(new_job("lost"))
    await store.create(new_job("kept"))
    await backend.execute("UPDATE jobs SET fence = 999 WHERE job_id = 'lost'")
    store.on_fenced, store.on_commit = fenced.append, ends.append
    for job_id in "lost", "kept":
        store.append(job_id, entry(0))
        store.add_params(job_id, 0, [row(0)])
        store.update(job_id, status=JobStatus.RUNNING)
    await store.flush()
    assert (fenced, ends) == (["lost"], [{"kept": 1}])
    lost, kept = await found(store, "lost"), await found(store, "kept")
    assert (lost.end, lost.frames, lost.owner.mine, lost.status) == (0, 0, False, JobStatus.INTERRUPTED)
    assert (kept.end, kept.frames, kept.status) == (1, 1, JobStatus.RUNNING)
    store.append("lost", entry(1))
    await store.flush()
    assert fenced == ["lost", "lost"]
    await store.take_over("lost")
    store.append("lost", entry(0))
    await store.flush()
    assert fenced == ["lost", "lost"]
    assert await everything(store, "lost") == [entry(0)]


async def test_writes_for_a_missing_job_are_reported(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.append("nothing", entry(0))
    await store.flush()
    assert "nothing" in caplog.text, "without a callback, it is logged"


async def test_failed_commit_is_reported_and_kept(backend: Backend, store: Store, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))
    async with backend.broken():
        store.append("j", entry(0))
        store.add_params("j", 0, [row(0)])
        with pytest.raises(StoreError, match="no luck"):
            await store.flush()
        assert [store.path in str(error) for error in errors] == [True]
        assert ((await found(store)).end, (await found(store)).frames) == (0, 0)
        backlog = store.backlog
        assert backlog > 0
        store.append("j", entry(1))
        store.add_params("j", 1, [row(1)])
        assert store.backlog > backlog
    await store.flush()
    assert (await everything(store), store.backlog) == ([entry(0), entry(1)], 0)
    assert await store.params("j", [0, 1]) == {0: row(0), 1: row(1)}


async def test_a_failed_commit_is_tried_again_when_much_more_is_queued(
    backend: Backend, store: Store, errors: list[StoreError]
) -> None:
    await store.create(new_job("j"))
    done = asyncio.Event()
    async with backend.broken():
        for offset in range(1000):
            store.append("j", entry(offset))
            await asyncio.sleep(0)
        with pytest.raises(StoreError):
            await store.flush()
        assert 2 <= len(errors) < 30, "not for every write"
    store.on_commit = lambda _: done.set()
    for offset in range(1000, 3000):
        store.append("j", entry(offset))
    await done.wait()
    await store.flush()
    assert len(await everything(store)) == 3000


async def test_close_with_uncommitted_writes_raises(backend: Backend, store: Store, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))
    async with backend.broken():
        store.append("j", entry(0))
        with pytest.raises(StoreError, match="bytes were committed"):
            await store.close()
    assert "no luck" in str(errors[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dfm-store")]


async def test_without_a_callback_errors_are_logged(
    backend: Backend, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await store.create(new_job("j"))
    async with backend.broken():
        store.append("j", entry(0))
        with pytest.raises(StoreError):
            await store.flush()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("first", [0, 2, 7])
async def test_events_with_gaps_are_reported_and_left_out(store: Store, errors: list[StoreError], first: int) -> None:
    await store.create(new_job("j"))
    await store.create(new_job("other"))
    store.append("j", entry(0))
    await store.flush()
    store.append("j", entry(first))
    store.append("other", entry(0))
    with pytest.raises(StoreError, match=f"event {first} came where 1 is next"):
        await store.flush()
    assert len(errors) == 1
    assert [(await found(store, job_id)).end for job_id in ("j", "other")] == [1, 1]
    store.append("j", entry(1))
    await store.flush()
    assert await everything(store) == [entry(0), entry(1)]


async def test_gap_is_reported_to_its_job(store: Store, errors: list[StoreError]) -> None:
    gaps: list[str] = []
    store.on_gap = lambda job_id, _error: gaps.append(job_id)
    await store.create(new_job("j"))
    await store.create(new_job("other"))
    store.append("j", entry(5))
    store.append("other", entry(0))
    with pytest.raises(StoreError):
        await store.flush()
    assert (gaps, errors) == (["j"], [])


async def test_parameter_sets_with_gaps_are_reported_and_left_out(store: Store, errors: list[StoreError]) -> None:
    await store.create(new_job("j"))
    store.add_params("j", 0, [row(0)])
    store.add_params("j", 2, [row(2)])
    with pytest.raises(StoreError, match="parameter set 2 came where 1 is next"):
        await store.flush()
    assert len(errors) == 1
    assert (await found(store)).frames == 0


async def test_a_value_that_no_row_can_hold_is_refused_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store), "largest", 100)
    with pytest.raises(StoreError, match="101 bytes of job j"):
        store.append("j", Entry(0, 1, 0, b"x", bytes(100)))
    with pytest.raises(StoreError, match="101 bytes of job j"):
        store.add_params("j", 0, [b"", bytes(101)])
    assert store.backlog == 0


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("ab"), st.integers(1, 4)),
        st.tuples(st.just("params"), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(
            st.just("status"),
            st.sampled_from("ab"),
            st.tuples(
                st.sampled_from([s for s in JobStatus if s is not JobStatus.UNKNOWN]),
                st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5),
            ),
        ),
        st.tuples(st.just("stopped"), st.sampled_from("ab"), st.booleans()),
        st.tuples(st.just("flush"), st.none(), st.none()),
        st.tuples(st.just("turn"), st.none(), st.none()),
        st.tuples(st.just("break"), st.none(), st.none()),
        st.tuples(st.just("mend"), st.none(), st.none()),
    ),
    max_size=40,
)


class Expected:
    """What a job must look like."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.params: list[bytes] = []
        self.changes: dict[str, Any] = {"status": JobStatus.SUBMITTED, "reason": None, "stopped": False}

    @property
    def end(self) -> int:
        return sum(item.count for item in self.entries)


_names = itertools.count()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
async def test_any_interleaving_of_writes_reads_back_the_same(
    backend: Backend, store: Store, steps: Sequence[tuple[str, Any, Any]]
) -> None:
    name = next(_names)
    jobs = {f"{letter}{name}": Expected() for letter in "ab"}
    store.on_error = lambda _: None
    for job_id in jobs:
        await store.create(new_job(job_id))
    async with AsyncExitStack() as broken:
        fails = False
        for step, letter, value in steps:
            job_id = f"{letter}{name}"
            job = jobs.get(job_id, Expected())
            if step == "append":
                store.append(job_id, entry(job.end, value))
                job.entries.append(entry(job.end, value))
            elif step == "params":
                rows = [row(number) for number in range(len(job.params), len(job.params) + value)]
                store.add_params(job_id, len(job.params), rows)
                job.params += rows
            elif step == "status":
                status, reason = value
                store.update(job_id, status=status, reason=reason)
                job.changes.update(status=status, reason=reason if status.ended else None)
            elif step == "stopped":
                store.update(job_id, stopped=value)
                job.changes["stopped"] = value
            elif step == "turn":
                await asyncio.sleep(0)
            elif step == "flush":
                try:
                    await store.flush()
                except StoreError:
                    assert fails
            elif (step == "break") is not fails:
                fails = not fails
                if fails:
                    await broken.enter_async_context(backend.broken("jobs", "UPDATE"))
                else:
                    await broken.aclose()
    await store.flush()
    for job_id, job in jobs.items():
        stored = await found(store, job_id)
        assert (stored.end, stored.frames) == (job.end, len(job.params))
        assert {name: getattr(stored, name) for name in job.changes} == job.changes
        assert await everything(store, job_id) == job.entries
        assert await store.params(job_id, range(99)) == dict(enumerate(job.params))


# operations


async def ended(store: Store, job_id: str, finished: float, status: JobStatus = JobStatus.FINISHED) -> None:
    await store.create(new_job(job_id))
    store.append(job_id, entry(0))
    store.add_params(job_id, 0, [row(0)])
    store.update(job_id, status=status, finished=finished)
    await store.flush()


async def test_old_jobs_are_pruned_those_that_ended_first(backend: Backend, store: Store, opened: AnyOpener) -> None:
    for number in range(8):
        await ended(store, f"j{number}", 100.0 + number, JobStatus.FAILED if number % 2 else JobStatus.FINISHED)
    await ended(store, "interrupted", 1.0, JobStatus.INTERRUPTED)
    await store.create(new_job("running"))
    other = await opened()  # jobs of all owners
    assert [job.job_id for job in await other.prune(104.0, limit=3)] == ["j0", "j1", "j2"]
    assert [job.job_id for job in await other.prune(106.0, JobStatus.FINISHED)] == ["j4"]
    assert [job.job_id for job in await other.prune(106.0, JobStatus.FINISHED)] == []
    assert {job.job_id for job in await store.jobs()} == {"j3", "j5", "j6", "j7", "interrupted", "running"}
    for table in "entries", "params":
        assert await backend.execute(f"SELECT count(*) FROM {table}") == [(5,)]


async def test_a_check_finds_what_is_damaged_and_costs_one_job_each(backend: Backend, store: Store) -> None:
    for number in range(5):
        await ended(store, f"j{number}", 100.0)
    assert [error async for error in store.check()] == []
    await backend.execute("DELETE FROM entries WHERE job = (SELECT job FROM jobs WHERE job_id = 'j1')")
    await backend.execute("DELETE FROM params WHERE job = (SELECT job FROM jobs WHERE job_id = 'j2')")
    await backend.execute("UPDATE entries SET count = 0 WHERE job = (SELECT job FROM jobs WHERE job_id = 'j3')")
    await backend.execute("UPDATE jobs SET status = 'odd' WHERE job_id = 'j4'")
    found = sorted([error.problem async for error in store.check()])
    assert found[0] == "job j1 is damaged: it has 1 events, but those that are stored end at 0"
    assert found[1] == "job j2 is damaged: its parameter set 0 is missing"
    assert "job j3 is damaged: a row of its events cannot be read" in found[2]
    assert "job j4 is damaged: column 'status' cannot be read" in found[3]
    assert len(found) == 4


async def test_vacuum_leaves_every_job_as_it_is(store: Store, opened: AnyOpener) -> None:
    await ended(store, "j", 100.0)
    await ended(store, "k", 100.0)
    await store.delete("k")
    await asyncio.gather(store.vacuum(), ended(store, "l", 100.0))
    assert await everything(store, "j") == await everything(store, "l") == [entry(0)]
