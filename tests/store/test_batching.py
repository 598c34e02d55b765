"""What one transaction has to write: pure, without a database."""

from __future__ import annotations

from typing import Any

import pytest

from dfm_async.model.status import JobStatus
from dfm_async.store.batching import Batch, Committed, JobBeforeCommit, JobChange
from tests.store.helpers import entry, row


def resolved(batch: Batch, states: dict[str, JobBeforeCommit]) -> tuple[list[JobChange], Committed]:
    """Return the changes of a batch of the store with fencing number 1."""
    done = Committed({}, [], [])
    return list(batch.changes(states.get, 1, "jobs.db", done)), done


def test_changes_have_the_writes_of_each_job_and_their_ends() -> None:
    batch = Batch()
    batch.append("a", entry(3, 2), errors=1, done=0)
    batch.append("a", entry(5), errors=0, done=2)
    batch.add_params("a", 1, [row(1), row(2)])
    batch.update("b", JobStatus.FINISHED, "all done", 12.5, None)
    changes, done = resolved(batch, {"a": JobBeforeCommit(10, 1, 3, 1), "b": JobBeforeCommit(11, 1, 0, 0)})
    assert [(change.key, change.end, change.frames) for change in changes] == [(10, 6, 3), (11, 0, 0)]
    assert (changes[0].writes.errors, changes[0].writes.done) == (1, 2)
    assert (changes[1].writes.status, changes[1].writes.finished) == (JobStatus.FINISHED, 12.5)
    assert done == Committed({"a": 6, "b": 0}, [], [])


def test_writes_for_jobs_of_other_owners_are_left_out() -> None:
    batch = Batch()
    for job_id in ("lost", "deleted", "own"):
        batch.append(job_id, entry(0), errors=0, done=0)
    changes, done = resolved(batch, {"lost": JobBeforeCommit(1, 2, 0, 0), "own": JobBeforeCommit(2, 1, 0, 0)})
    assert [change.key for change in changes] == [2]
    assert done.fenced == ["lost", "deleted"]
    assert done.ends == {"own": 1}


@pytest.mark.parametrize("state", [(1, 0), (0, 1), ("damaged", 0), (0, None)])
def test_writes_behind_a_gap_are_left_out(state: Any) -> None:
    batch = Batch()
    batch.append("j", entry(0), errors=0, done=0)
    batch.add_params("j", 0, [row(0)])
    changes, done = resolved(batch, {"j": JobBeforeCommit(1, 1, *state)})
    assert not changes
    assert [job_id for job_id, _ in done.gaps] == ["j"]
    assert not done.ends


def test_merged_batches_are_as_one() -> None:
    one, first, second = Batch(), Batch(), Batch()
    for batch in (one, first):
        batch.append("j", entry(0), errors=1, done=0)
        batch.update("j", JobStatus.RUNNING, None, None, None)
    for batch in (one, second):
        batch.append("j", entry(1), errors=0, done=1)
        batch.update("j", JobStatus.FAILED, "broken", 2.0, True)
        batch.append("k", entry(0), errors=0, done=0)
    first.merge(second)
    assert first.size == one.size
    states = {"j": JobBeforeCommit(1, 1, 0, 0), "k": JobBeforeCommit(2, 1, 0, 0)}
    (expected, ends), (found, also_ends) = resolved(one, states), resolved(first, states)
    assert ends == also_ends
    assert [change.writes for change in expected] == [change.writes for change in found]


def test_discarded_writes_are_not_counted() -> None:
    batch = Batch()
    batch.append("j", entry(0), errors=0, done=0)
    assert batch.size
    assert batch.discard("j")
    assert not batch.discard("j")
    assert (batch.size, bool(batch)) == (0, False)
