"""The jobs that a target knows, in the order in which they were created."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.engine import job_table
from dfm_async.engine.job_table import JobTable
from dfm_async.model.ids import JobId
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.options import LocalOptions, ResultLimits
from dfm_async.results.record import JobRecord

_LABELS = st.sampled_from([None, "red", "blue"])
_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5), _LABELS), max_size=60)


def record_of(number: int, created: float, label: str | None) -> JobRecord:
    spec = JobSpec(job_id=JobId(f"job-{number}"), created=created, limits=ResultLimits(), label=label, grace=1.0)
    no_plan: Any = None
    return JobRecord(spec, no_plan)


@given(_STEPS, st.integers(0, 6), st.integers(0, 9), _LABELS, st.integers(0, 8))
def test_jobs_are_listed_from_the_newest_to_the_oldest(
    steps: list[tuple[bool, int, int, str | None]], before: int, number: int, label: str | None, compact: int
) -> None:
    table: JobTable[Any] = JobTable(LocalOptions())
    known: dict[int, JobRecord] = {}
    try:
        job_table._COMPACT = compact  # type: ignore[misc] # so that few jobs are many
        for forget, which, created, its_label in steps:
            if forget:
                table.forget(f"job-{which}")
                known.pop(which, None)
            else:
                known[which] = record_of(which, created, its_label)
                table.remember(known[which])
    finally:
        job_table._COMPACT = 1024  # type: ignore[misc]
    start = (float(before), f"job-{number}")
    expected = sorted(((job.created, job.job_id) for job in known.values()), reverse=True)
    assert [(job.created, job.job_id) for job in table.newest()] == expected
    wanted = [
        (job.created, job.job_id)
        for job in known.values()
        if (label is None or job.label == label) and (job.created, job.job_id) < start
    ]
    found = [(job.created, job.job_id) for job in table.newest(start, label)]
    assert found == sorted(wanted, reverse=True)
    assert len(table._order[None]) <= 2 * len(table) + compact + 1


def test_a_list_of_jobs_goes_on_while_jobs_come_and_go() -> None:
    table: JobTable[Any] = JobTable(LocalOptions())
    for number in range(6):
        table.remember(record_of(number, number, None))
    jobs = table.newest()
    assert next(jobs).job_id == "job-5"
    table.forget("job-3")
    table.remember(record_of(9, 9, None))
    table.remember(record_of(8, 2.5, None))
    assert [job.job_id for job in jobs] == ["job-4", "job-8", "job-2", "job-1", "job-0"]
